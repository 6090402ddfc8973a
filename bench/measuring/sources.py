"""The library's code that a result times, as digests: a report tells by them which of it has changed since.

Comments, docstrings and the layout of lines do not count.
"""

import ast
import functools
import hashlib
import importlib
import io
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

_OURS = ("pallas_models", "bench.models")
_TIMED = ("pallas_models.kernels.", "pallas_models.ops.")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_BEFORE_STATEMENT = (tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@functools.cache  # most modules are timed by several benchmarks
def digest(source: str) -> str:
    """Twelve hexadecimal digits of Python code, the same in every version of Python."""
    parts: list[str] = []
    before = tokenize.ENCODING  # the last token that is no comment and no empty line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and before in _BEFORE_STATEMENT
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            parts.append(tokenize.tok_name[token.type])
        if token.type not in _LAYOUT and not is_docstring:
            # Python 3.12 gives an f-string in parts; without spaces and doubled braces they are its text.
            parts.append("".join(token.string.split()).replace("{{", "{").replace("}}", "}"))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


def _named(module: ModuleType, name: str) -> str:
    """The module in which what `module` calls `name` is written; empty for what is in no module."""
    value = getattr(module, name, None)
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""


@functools.cache
def _imports(name: str) -> frozenset[str]:
    """The modules that one uses: of a package not its __init__, but those where the names it is asked for are."""
    tree = list(ast.walk(ast.parse(_path(name).read_text(encoding="utf-8"))))
    found: set[str] = set()
    packages: dict[str, ModuleType] = {}  # by the name that this module gives them
    for node in tree:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS):
            origin = importlib.import_module(str(node.module))
            for alias in node.names:
                used = _named(origin, alias.name)
                if hasattr(sys.modules.get(used), "__path__"):
                    packages[alias.asname or alias.name] = sys.modules[used]
                else:
                    found.add(used)
    for node in tree:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            found.add(_named(packages[node.value.id], node.attr))
    ours = (used for used in found if used.startswith(_OURS))
    return frozenset(used for used in ours if not hasattr(sys.modules.get(used), "__path__"))


def _path(name: str) -> Path:
    return Path(str(importlib.import_module(name).__file__))


@functools.cache
def timed(benchmark: str) -> dict[str, str]:
    """The digests of the kernels and ops that a benchmark's module leads to, by name: `kernels.mosaic.norm`."""
    seen: set[str] = set()
    to_do = {f"bench.cases.{benchmark.replace('-', '_')}"}
    while to_do:
        seen |= to_do
        to_do = set().union(*map(_imports, to_do)) - seen
    names = sorted(name for name in seen if name.startswith(_TIMED))
    return {name.removeprefix("pallas_models."): digest(_path(name).read_text(encoding="utf-8")) for name in names}


def changed(benchmark: str, recorded: Mapping[str, str]) -> list[str]:
    """The modules that are not as a result of the benchmark recorded them."""
    now = timed(benchmark)
    return sorted(name for name in {*now, *recorded} if now.get(name) != recorded.get(name))
