"""The site of the documentation: its menu and its reference are complete, its notebooks and tables true."""

import ast
import gzip
import importlib
import inspect
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import types
import typing

import jax
import jax.numpy as jnp
import pytest

import pallas_models
import weights
from pallas_models import gpt2, ops, target, tuning
from parity import ROOT
from parity.support import notebooks

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
# Names of types do not know the module that defines them.
ALIASES = {"Params": "pallas_models._modules.Params", "Precision": "pallas_models.sentence.quantization"}
MODULES = ["weights", *(f"pallas_models.{name}" for name in pallas_models.__all__)]


def menu(entries):
    """The pages of mkdocs.yml's nav."""
    for entry in entries:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            yield from [value] if isinstance(value, str) else menu(value)


def test_every_page_is_in_the_menu():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    pages = list(menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert len(pages) == len(set(pages))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb")}
    outside = {page for page in pages if page not in there}
    assert not there - set(pages)
    assert outside and all((ROOT / page).is_file() for page in outside)


def test_the_start_links_to_every_page_and_notebook():
    text = (DOCS / "index.md").read_text("utf-8")
    for path in (*DOCS.glob("*.md"), *NOTEBOOKS):
        assert path.name == "index.md" or f"]({path.relative_to(DOCS).as_posix()}" in text, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    """In a process of their own, on a CPU, in little time; they print what they show, but for numbers.

    Their programs are compiled as quickly as the suite's.
    """
    quick = {"XLA_FLAGS": os.environ["XLA_FLAGS"], "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "parity.support.notebooks", path],
        cwd=ROOT,
        env={"PATH": "", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"} | quick,
        capture_output=True,
        text=True,
        timeout=240,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Of all threads: what else runs on the machine does not count.
    assert after.ru_utime - before.ru_utime < 20
    shown = [notebooks.printed(cell) for cell in notebooks.code_cells(json.loads(path.read_text("utf-8")))]
    assert any(shown)
    for new, old in zip(json.loads(done.stdout.splitlines()[-1]), shown, strict=True):
        assert re.sub(r"\d+(\.\d+)?", "#", new) == re.sub(r"\d+(\.\d+)?", "#", old)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_explained(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    kinds = [cell["cell_type"] for cell in cells]
    assert kinds[0] == "markdown" and cells[0]["source"][0].startswith("# ")
    assert all(before == "markdown" for before, kind in itertools.pairwise(kinds) if kind == "code")


def public(module):
    """The public names of a module: `__all__`, or what it defines, without variables of types."""
    names = getattr(module, "__all__", None)
    if names is None:
        own = (n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
        names = [name for name in own if not name.startswith("_")]
    variables = (typing.TypeVar, typing.ParamSpec)
    return {name: getattr(module, name) for name in names if not isinstance(getattr(module, name), variables)}


def referenced():
    """What the pages of the reference take from the code: whole modules, and single names."""
    text = "\n".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name):
    """By itself or with the module that defines it; `ops` shows no members of its own."""
    module, pages = importlib.import_module(name), referenced()
    for member, value in public(module).items():
        own = ALIASES.get(member) or getattr(value, "__module__", name)
        whole = {value.__name__} if isinstance(value, types.ModuleType) else {name, own} - {"pallas_models.ops"}
        alone = {page for page in pages if page.endswith(f".{member}") and page.startswith(("pallas_models", own))}
        assert whole & pages or alone, member


def test_the_reference_names_what_exists():
    for path in referenced():
        parts = path.split(".")
        for split in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:split]))
            except ModuleNotFoundError:
                continue
            for part in parts[split:]:
                value = getattr(value, part)
            break


def functions():
    for name in MODULES:
        for member, value in public(importlib.import_module(name)).items():
            if inspect.isfunction(value):
                yield pytest.param(value, id=f"{name}.{member}")


@pytest.mark.parametrize("function", list(functions()))
def test_docstrings(function):
    """Each says something, and of arrays their shapes and dtypes, itself or by naming the function that does."""
    doc = inspect.getdoc(function)
    assert doc
    takes = [p for p in inspect.signature(function).parameters.values() if p.annotation in ("Array", "jax.Array")]
    if takes:
        says = re.search(r"\([^()]*[A-Z.][^()]*\)|shape|one dimension|as in `|as `|As `", doc)
        assert says, f"no shapes in {function.__qualname__}"
        assert re.search(r"float|bool|int|dtype|as in `|as `|As `", doc), f"no dtypes in {function.__qualname__}"


OURS = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}


def calls():
    text = (DOCS / "moving.md").read_text("utf-8")
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| `") or "| `" in line]
    found = [code for row in rows for cell in row[2:] for code in re.findall(r"`([^`]+)`", cell)]
    return sorted({code for code in found if code.split(".")[0] in OURS})


@pytest.mark.parametrize("code", calls())
def test_what_one_moves_to_exists(code):
    """Each name is there, and takes the arguments that the table gives it."""
    node = ast.parse(code, mode="eval").body
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    value = OURS[name.split(".")[0]]
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    if isinstance(node, ast.Call):
        inspect.signature(value).bind(*node.args, **{keyword.arg: None for keyword in node.keywords})


def test_there_are_calls_to_move_to():
    assert len(calls()) > 30


def test_benchmarks_name_the_commits_that_were_measured():
    rows = re.findall(r"^\| ([0-9a-f]{7}) \| (.+) \|$", (DOCS / "benchmarks.md").read_text("utf-8"), re.MULTILINE)
    told = {name: commit for commit, names in rows for name in re.findall(r"`([\w-]+)`", names)}
    measured = {}
    for path in (ROOT / "bench/results/nvidia-h200").glob("*.json.gz"):
        commit = json.loads(gzip.decompress(path.read_bytes()))["environment"]["commit"]
        measured[path.name.removesuffix(".json.gz")] = commit[:7]
    assert told == measured


_CONFIG = gpt2.GPT2Config(
    vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8, max_positions=8
)
REFUSED = {
    "The platform has no such kernel": lambda x: jax.jit(lambda x: ops.softmax(x, implementation="triton"))(x),
    "The named kernel does not take the call": lambda x: ops.matmul(x, x.T, implementation="mosaic"),
    "An unknown implementation": lambda x: ops.softmax(x, implementation="cuda"),
    "Shapes do not fit": lambda x: ops.matmul(x, jnp.ones((32, 8))),
    "Dtypes differ": lambda x: ops.matmul(x, jnp.ones((64, 8), jnp.bfloat16)),
    "The mask is not of 0 and 1": lambda x: ops.mean_pool(x[None], jnp.full((1, 8), 2)),
    "Parameters do not fit the config": lambda x: gpt2.logits({}, jnp.ones((1, 4), jnp.int32)),
    "Too many tokens": lambda x: gpt2.logits(
        gpt2.init(jax.random.key(0), _CONFIG), jnp.ones((1, 16), jnp.int32), config=_CONFIG
    ),
    "A model is not found": lambda x: weights.load_minilm("/nonexistent/x"),
    "Nothing to tune on": lambda x: tuning.autotune(ops.matmul, x, x.T),
}


def test_messages_are_those_that_are_raised(monkeypatch):
    """Each message that docs/errors.md quotes of this library, as where there is no GPU."""
    monkeypatch.setattr(target, "current", lambda: target.ANY)
    text = (DOCS / "errors.md").read_text("utf-8")
    quoted = dict(re.findall(r"^### (.+)\n\n```text\n(.+)\n```", text, re.MULTILINE))
    assert quoted.keys() == REFUSED.keys()
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((8, 64))
        for heading, message in quoted.items():
            with pytest.raises(Exception) as raised:
                REFUSED[heading](x)
            assert f"{raised.type.__name__}: {raised.value}".startswith(message), heading
