"""The measures of the house: what is longer or wider than a reader can hold says why."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from parity import ROOT

SOURCES = sorted([*(ROOT / "pallas_models").rglob("*.py"), *(ROOT / "weights").rglob("*.py")])
LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS = 500, 120, 14


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def length(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    return (function.end_lineno or 0) - function.lineno + 1 - (len(docstring.splitlines()) if docstring else 0)


def parameters(function: ast.FunctionDef) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def test_no_file_is_longer_than_a_reader_can_hold():
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert len(lines) > 150
    assert {path: count for path, count in lines.items() if count > LONGEST_FILE} == {}


# Kernels whose first lines say what their length buys.
LONG: set[str] = set()
# Contracts of the field: AlphaFold's parameters, cuEquivariance's functions, sentence-transformers' constructor.
WIDE = {
    "triangle_update",
    "triangle_multiplicative_update",
    "attention_pair_bias",
    "EmbeddingModel.__init__",
}


def test_no_function_is_longer_than_a_reader_can_hold():
    found = {f"{path.stem}.{f.name}" for path in SOURCES for f in functions(path) if length(f) > LONGEST_FUNCTION}
    assert found == LONG


def test_no_signature_is_wider_than_a_reader_can_hold():
    found = {f.name for path in SOURCES for f in functions(path) if parameters(f) > MOST_PARAMETERS}
    assert found == {name.rpartition(".")[2] for name in WIDE}


def test_every_file_that_the_walks_name_is_there():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/]+(?:\.py|/))`", text) if "/" in name or name.endswith(".py")}
    assert len(named) > 50
    folders = ROOT, ROOT / "pallas_models", ROOT / "pallas_models/kernels/mosaic"
    missing = {name for name in named if not any((folder / name).exists() for folder in folders)}
    assert missing == set()
