"""Examples of the reference: each function has one. Docstrings run theirs here, pages in test_readme.py."""

import functools
import importlib
import inspect
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weights
from parity.support.test_docs import DOCS, MODULES, public
from parity.weights import checkpoints

FENCE = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_PAGES = [
    code
    for path in (DOCS / "reference").glob("*.md")
    for code in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
]
SEARCHED = [*MODULES, *(f"pallas_models.sentence.{name}" for name in ("packing", "heads", "similarity"))]
# What has no example, by module or by name, and why.
WITHOUT = {
    "ray.embed_files": "needs a cluster; the command line calls it",
}
# What an example needs that a test on a CPU does not have.
COMPILED_ONLY = {
    "minilm.CrossEncoder": "a model of the hub; test_cross_encoder.py has small ones",
    "ray.Embed": "a cluster of Ray",
    "ray.check_available": "Ray",
    "weights.load_pairformer": "a checkpoint of a whole model",
}


def examples_of(value):
    return FENCE.findall(inspect.getdoc(value) or "")


def documented():
    """Public functions and classes by their names, each once, and modules."""
    found = {}
    for path in SEARCHED:
        module = importlib.import_module(path)
        stem = path.removeprefix("pallas_models.").removeprefix("sentence.")
        found.setdefault(id(module), (stem, module))
        for name, value in public(module).items():
            if inspect.isfunction(value) or inspect.isclass(value):
                found.setdefault(id(value), (f"{stem}.{name}", value))
    return dict(found.values())


DOCUMENTED = documented()
FUNCTIONS = [
    name
    for name, value in DOCUMENTED.items()
    if inspect.isfunction(value) and not WITHOUT.keys() & {name, name.partition(".")[0]}
]
EXAMPLES = {
    f"{name}-{number}": code
    for name, value in DOCUMENTED.items()
    for number, code in enumerate(examples_of(value))
}


def imported():
    """What an example need not import: JAX, NumPy and the modules of the reference, by their last names."""
    modules = {path.rpartition(".")[2]: importlib.import_module(path) for path in SEARCHED}
    return modules | dict(jax=jax, jnp=jnp, np=np, functools=functools, Path=Path)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_an_example(name):
    """In a docstring, as a rule their own, or on a page of the reference."""
    assert any(re.search(rf"\b{re.escape(name)}\b", code) for code in (*ON_PAGES, *EXAMPLES.values()))


def test_exceptions_are_needed():
    modules = {name.partition(".")[0] for name in DOCUMENTED}
    assert not [name for name in WITHOUT if name not in modules | DOCUMENTED.keys()]
    assert not [name for name in WITHOUT if any(f"{name}(" in code for code in (*ON_PAGES, *EXAMPLES.values()))]
    assert not COMPILED_ONLY.keys() - {name.rpartition("-")[0] for name in EXAMPLES}


@pytest.mark.parametrize("name", [name for name, value in DOCUMENTED.items() if inspect.isclass(value)])
def test_attributes_have_lines_of_their_own(name):
    """Of two names on a line the reference would show the second as the type of the first."""
    attributes = (inspect.getdoc(DOCUMENTED[name]) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    assert not re.search(r"^  \w+, .*:", attributes, re.MULTILINE)


@pytest.fixture(scope="module")
def model():
    """A folder with a small encoder of sentences."""
    with tempfile.TemporaryDirectory() as folder:
        yield checkpoints.write(Path(folder))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, model, monkeypatch, tmp_path):
    """In an empty folder, with a small model in place of one that would be downloaded."""
    code = compile(EXAMPLES[name], name, "exec")
    if name.rpartition("-")[0] in COMPILED_ONLY:
        return
    if "serialize" in EXAMPLES[name]:
        pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: programs cannot be bytes")
    monkeypatch.setattr(weights.hub, "resolve", lambda name: model)
    monkeypatch.chdir(tmp_path)
    names = imported()
    exec(code, names)
    for line in EXAMPLES[name].splitlines():
        check_comment(line, names)


def check_comment(line, names):
    """A comment such as `# (8, 128)` is the shape of the first name that its line assigns."""
    told = re.fullmatch(r"(\w+)\b.*=.*  # (\([\d, ]*\)).*", line)
    if told:
        assert names[told[1]].shape == tuple(map(int, re.findall(r"\d+", told[2]))), line
