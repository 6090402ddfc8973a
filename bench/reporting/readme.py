"""Markdown files generated from results: a page for each GPU, beside its results, and a table in README.md."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from bench.__main__ import BENCHMARKS, module_of
from bench.measuring import sources
from bench.measuring.results import Result
from bench.reporting import reasons, tables
from bench.reporting.reasons import Reasons
from bench.reporting.tables import Comparison, Headline
from pallas_models import files

NAME = "README.md"  # GitHub shows it where a reader opens the folder
MARK = " †"  # of a result that is older than the kernels that it times
SUMMARY = "summary"  # the name of the markers in README.md
PLOTS = {  # in the folder "plots" beside the results, by name: what each shows
    "minilm-speedup-device": "Speed-up of the MiniLM forward pass over XLA and torch at eight shapes",
    "all-speedup": "Speed-up over the best of all others, of XLA and of torch, by benchmark",
    "all-roofline": "Roofline with our kernels on it, and their shares of the ceilings",
}

HOW_TO_READ = """\
Every run measures this library ("ours"), XLA and torch side by side on the same inputs. A column has the best
candidate of its family: of XLA's programs; of torch eager, in CUDA graphs and compiled; of other libraries
("peers"). Device time is that in which kernels of a call run (measured before 2026-11-23, what overlaps counts
twice), wall time what a caller sees with many calls queued. A ratio is the baseline's time over ours: above 1,
ours is faster. In the first table ratios are of device time unless a row says otherwise, and means of all cases,
the last by wall time. "Of its ceiling" is the share of the rate of copies or of matrix products that was measured
in the same run. A figure in a ladder, such as "800 (95, 98%)", is a rate with its share of XLA's and of the
ceiling. How it is measured:
[docs/performance.md](../../../docs/performance.md)."""


def module_named(benchmark: str) -> object | None:
    """The module of a benchmark; None for a name that is none, as a file may have."""
    return module_of(benchmark) if benchmark in BENCHMARKS else None


def title(benchmark: str) -> str:
    """What a benchmark measures, in a few words."""
    words = str(getattr(module_named(benchmark), "HELP", benchmark)).partition(":")[0]
    return words[:1].upper() + words[1:]


def own_tables(result: Result) -> str:
    """The tables that a benchmark's module makes for itself; empty if it makes none."""
    table = getattr(module_named(result.benchmark), "table", None)
    return str(table(result)) if table else ""


def headline(result: Result) -> Headline | None:
    """The line of a benchmark in the summary; None where ours or every baseline has no figure."""
    module = module_named(result.benchmark)
    own = getattr(module, "headline", None)
    found: Headline | None = own(result) if own else tables.headline(result, getattr(module, "SHOWN", ""))
    return found


def stale(result: Result) -> str:
    """A sentence that says which kernels and ops have changed since a result timed them; empty if none has."""
    if module_named(result.benchmark) is None:
        return ""
    if not result.sources:
        return "The result does not record the kernels that it times, which have changed since."
    names = sources.changed(result.benchmark, result.sources)
    return f"Changed since: {', '.join(names)}." if names else ""


def slower(result: Result) -> list[Comparison]:
    """The rows of a benchmark's tables in which ours is the slower."""
    own = getattr(module_named(result.benchmark), "comparisons", tables.comparisons)
    return [row for row in own(result) if row.is_slower]


def escaped(text: str) -> str:
    """Text of a result file as it can stand in Markdown, where `<script>` would be a tag."""
    return html.escape(text, quote=False)


def in_order(results: Sequence[Result]) -> list[Result]:
    """The results in the order of BENCHMARKS; results of unknown benchmarks come last."""
    order = {name: i for i, name in enumerate(BENCHMARKS)}
    return sorted(results, key=lambda result: order.get(result.benchmark, len(order)))


def summary(results: Sequence[Result], page: str) -> str:
    """One row a benchmark, with a link to its section of `page`."""
    rows = []
    for result in in_order(results):
        if found := headline(result):
            link = f"[{title(result.benchmark)}]({page}#{result.benchmark})" + MARK * bool(stale(result))
            figures = (found.case, found.ours, found.baseline)
            ratios = (found.ratio, found.mean, found.wall_mean)
            rows.append([link, *map(escaped, figures), *map(tables.format_ratio, ratios)])
    header = ["benchmark", "case", "ours", "best of XLA, torch, others", "ratio", "mean ratio", "by wall time"]
    legend = f"\n\n{MARK.strip()} Kernels or ops that it times have changed since it was measured."
    marked = any(row[0].endswith(MARK) for row in rows)
    return tables.markdown(header, rows) + legend * marked if rows else ""


def section(result: Result, why: Reasons) -> str:
    """All about one benchmark: its tables, why ours is the slower in some rows, where the figures come from."""
    found = [own_tables(result) or tables.brief(result), reasons.listed(result, slower(result), why)]
    text = escaped("\n\n".join(filter(None, [*found, f"{tables.conditions(result)} {stale(result)}".strip()])))
    about = " ".join(filter(None, [f"{title(result.benchmark)}.", tables.means(result)]))
    return f"## {result.benchmark}\n\n{about}\n\n{text}"


def page(results: Sequence[Result], plots: Sequence[str], why: Reasons) -> str:
    """The page of a GPU; `plots`: the names of those that are there; `why` ours is the slower in some rows."""
    device = escaped(results[0].environment.get("device", "unknown device"))
    lines = [f"# Benchmarks on {device}", "Generated by `python -m bench report` from the result files beside it."]
    lines += [HOW_TO_READ, summary(results, ""), *(f"![{PLOTS[name]}](plots/{name}.png)" for name in plots)]
    sections = [section(result, why) for result in in_order(results)]
    text = "\n\n".join(filter(None, [*lines, *sections])) + "\n"
    return unaligned(text)


def unaligned(text: str) -> str:
    """The text as readers of HTML see it: tables without the spaces that align columns, a first cell once."""
    lines, last = [], ""
    for line in text.split("\n"):
        if line.startswith("|"):
            cells = re.sub(r" *(?<!\\)\| *", "|", line)
            line = cells if set(cells) - set("|-:") else re.sub("-{4,}", "---", cells)
            first = line.split("|", 2)[1]
            line, last = line.replace(first, "", 1) if first == last else line, first
        lines.append(line)
    return "\n".join(lines)


def replace_marked(text: str, name: str, content: str) -> str:
    """Replaces what stands between `<!-- bench:name -->` and `<!-- /bench:name -->`.

    Raises:
      ValueError: the markers are not there exactly once, in this order.
    """
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"expected {start} and, after it, {end}, each exactly once")
    pattern = re.escape(start) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: f"{start}\n{content}\n{end}", text, flags=re.DOTALL)


def rewrite(path: Path, results: Sequence[Result], page: str) -> None:
    """Rewrites the summary in a Markdown file.

    Raises:
      OSError: the file cannot be read or written.
      ValueError: its markers are not there exactly once; nothing is written then.
    """
    text = path.read_text(encoding="utf-8")
    days: dict[str, list[str]] = {}
    for result in results:
        days.setdefault(str(result.environment.get("device")), []).append(result.date[:10])
    conditions = "; ".join(f"{device}, {', '.join(sorted({*of}))}" for device, of in days.items())
    table = unaligned(summary(results, page))
    content = f"{table}\n\nGenerated by `python -m bench report`: {escaped(conditions)}."
    files.write(path, replace_marked(text, SUMMARY, content))
