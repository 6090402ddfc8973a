"""Small breaks of kernels, dispatch, models and loaders, each with the tests that have to notice it.

`mutants.txt` holds them. A line "/x" names the file `pallas_models/x.py`, and the breaks of that file follow it. A
break is the lines of the file that it replaces, after "-", the lines that take their place, after "+", and the
tests, after a space: "matmul -k gelu" means `parity/ops/test_matmul.py -k gelu`. A name means a test file of
`parity/ops`, or of the only one in another folder; "weights/gpt2" names the folder too. `mutate.py` runs them.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from parity import ROOT


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """A break.

    Attributes:
      file: the file to break, from the root of the project.
      old: a text that the file holds exactly once.
      new: the text that takes its place.
      tests: arguments of pytest: files, from the root of the project, and after them which of their tests.
    """

    file: str
    old: str
    new: str
    tests: str


def _file_of(name: str) -> str:
    """The test file of a name in `mutants.txt`, from the root of the project."""
    folder, _, stem = name.rpartition("/")
    if not folder and (ROOT / "parity" / "ops" / f"test_{stem}.py").exists():
        folder = "ops"
    found = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "parity").glob(f"{folder or '*'}/test_{stem}.py")
    ]
    if len(found) != 1:
        raise LookupError(f"mutants.txt names the tests {name!r}, which are {found or 'nowhere'}")
    return found[0]


def _read(path: Path) -> Iterator[Mutant]:
    file = ""
    lines: dict[str, list[str]] = {"-": [], "+": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line[0] in lines:
            lines[line[0]].append(line[1:])
        elif line[0] == " ":
            old, new = ("\n".join(lines[kind]) for kind in "-+")
            names, k, chosen = line[1:].partition(" -k ")
            tests = " ".join(map(_file_of, names.split()))
            yield Mutant(file, old, new, tests + k + chosen)
            lines = {"-": [], "+": []}
        else:
            file = f"pallas_models{line}.py" if line[0] == "/" else f"{line}.py"


MUTANTS = list(_read(Path(__file__).with_name("mutants.txt")))
