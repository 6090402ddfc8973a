"""Why ours is the slower in rows of the tables: `reasons.toml` beside the results of a GPU.

Each entry has `why`, one sentence; `clock`, the time that the rows are compared by; and `rows`, the labels of
cases by benchmark. A row without an entry says whether both ranges of times overlap, or that nobody has looked.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.measuring.results import Result
from bench.reporting.tables import Comparison

NAME = "reasons.toml"
NOISE = "too close to tell, as the ranges from the 20th to the 80th percentile of both overlap."
UNKNOWN = "nobody has looked why."

Row = tuple[str, str, str]  # benchmark, clock, case
Reasons = Mapping[Row, str]


class ReasonError(ValueError):
    """The file cannot be used: the message names it and says why."""


def load(folder: Path) -> dict[Row, str]:
    """The reasons that stand beside results; none where there is no file.

    Raises:
      ReasonError: the file cannot be read, or is not as described above.
    """
    path = folder / NAME
    if not path.exists():
        return {}
    found: dict[Row, str] = {}
    try:
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["reason"]:
            for benchmark, cases in entry["rows"].items():
                found |= {(benchmark, entry["clock"], case): entry["why"] for case in cases}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReasonError(f"{path}: expected reasons with why, clock and rows ({error!r})") from error
    return found


def unused(reasons: Reasons, slower: Mapping[str, Sequence[Comparison]]) -> list[Row]:
    """The rows with a reason that are not among those in which ours is the slower, given by benchmark."""
    rows = {(name, row.clock, row.case) for name, found in slower.items() for row in found}
    return [row for row in reasons if row not in rows]


def of(result: Result, row: Comparison, reasons: Reasons) -> str:
    """Why ours is the slower in a row."""
    return reasons.get((result.benchmark, row.clock, row.case), NOISE if row.overlaps else UNKNOWN)


def listed(result: Result, slower: Sequence[Comparison], reasons: Reasons) -> str:
    """A Markdown list of the rows in which ours is the slower, rows of one reason together; empty without any."""
    together: dict[tuple[str, str], list[str]] = {}
    for row in slower:
        rows = together.setdefault((row.clock, of(result, row, reasons)), [])
        rows.append(f"{row.case} ({row.rival} / ours {row.ratio:.2f})")
    lines = [f"- {clock.capitalize()}, {', '.join(rows)}: {why}" for (clock, why), rows in together.items()]
    return "\n".join(["Where ours is the slower:\n", *lines]) if lines else ""
