"""Small breaks of kernels, dispatch, models and loaders, and the tests that are to see each: see `mutate.py`.

They stand in `mutants.txt`: "/x" for `pallas_models/x.py`, below it for each break the lines
that are in it after "-", those that take their place after "+", and the tests after a space: "matmul -k gelu" are
those of `test_matmul.py`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """A break.

    Attributes:
      file: of the project.
      old: what is in it, exactly once.
      new: what takes its place.
      tests: arguments of pytest: a file of `parity` and, after it, which of its tests.
    """

    file: str
    old: str
    new: str
    tests: str


def _read(path: Path) -> Iterator[Mutant]:
    file = ""
    lines: dict[str, list[str]] = {"-": [], "+": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line[0] in lines:
            lines[line[0]].append(line[1:])
        elif line[0] == " ":
            old, new = ("\n".join(lines[kind]) for kind in "-+")
            names, k, chosen = line[1:].partition(" -k ")
            tests = " ".join(f"test_{name}.py" for name in names.split())
            yield Mutant(file, old, new, tests + k + chosen)
            lines = {"-": [], "+": []}
        else:
            file = f"pallas_models{line}.py" if line[0] == "/" else f"{line}.py"


MUTANTS = list(_read(Path(__file__).with_name("mutants.txt")))
