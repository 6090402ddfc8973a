"""The floors of the library: a module imports from its own floor and those below, also inside of functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(jax|pallas_models|weights)(\.\w+)+")

# From the ground up. A module belongs to the longest name here that its own begins with.
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "machine",
        (
            "pallas_models",  # the version; the names of its modules are imported when they are wanted
            "pallas_models._implementation",
            "pallas_models._jax",
            "pallas_models._options",
            "pallas_models._processes",
            "pallas_models.exporting",
            "pallas_models.files",
            "pallas_models.target",
        ),
    ),
    ("tuning", ("pallas_models.tuning", "pallas_models.compilation_cache")),
    ("forms", ("pallas_models.kernels", "pallas_models.kernels.forms")),
    ("kernels/common", ("pallas_models.kernels.common",)),
    ("kernels", ("pallas_models.kernels.triton", "pallas_models.kernels.mosaic")),
    ("schedules", ("pallas_models.kernels.schedules",)),
    ("dispatch", ("pallas_models.dispatch",)),
    ("ops", ("pallas_models.ops",)),
    (
        "models",
        (
            "pallas_models._gpt2_flat",
            "pallas_models._modules",
            "pallas_models._parameter_sharding",
            "pallas_models.bert",
            "pallas_models.cuequivariance",
            "pallas_models.gpt2",
            "pallas_models.modernbert",
            "pallas_models.pairformer",
            "pallas_models.qwen3",
            "pallas_models.training",
            "pallas_models.trimul",
        ),
    ),
    ("weights", ("weights",)),
    ("sentence", ("pallas_models.sentence", "pallas_models.minilm", "pallas_models.quantization")),
    ("corpus", ("pallas_models.corpus", "pallas_models.ray")),
    ("command line", ("pallas_models.__main__", "weights.__main__")),
)
FLOOR_OF = {name: number for number, (_, names) in enumerate(FLOORS) for name in names}
# Only the root of a package stands for itself alone: a new module has to be put on a floor.
ALONE = {"pallas_models"}
# Modules whose imports run up for now, and why.
UNFINISHED: dict[str, str] = {}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for part in ("pallas_models", "weights") for path in (ROOT / part).rglob("*.py")}


def imports(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, at its top, in functions, or later by a name in a string."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
            yield node.value


def module_of(imported: str) -> str | None:
    """The module that a full name is, or is in; None where it is none of ours."""
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported or None


def floor(module: str) -> int | None:
    name = module
    while name not in FLOOR_OF or (name in ALONE and name != module):
        if not name:
            return None
        name = name.rpartition(".")[0]
    return FLOOR_OF[name]


def running_up(module: str, path: Path) -> list[str]:
    own = floor(module)
    assert own is not None, f"{module} is on no floor"
    found = {name for name in map(module_of, imports(path)) if name is not None}
    above = {name: number for name in found if (number := floor(name) or 0) > own}
    return sorted(f"{name}, on the floor of {FLOORS[number][0]}" for name, number in above.items())


def test_every_module_has_a_floor():
    assert [module for module in MODULES if floor(module) is None] == []
    assert [name for name in FLOOR_OF if name not in MODULES] == []


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=[pytest.mark.xfail(reason=UNFINISHED[name], strict=True)])
        if name in UNFINISHED
        else name
        for name in sorted(MODULES)
        if name not in ALONE
    ],
)
def test_no_import_runs_up(module):
    assert running_up(module, MODULES[module]) == []


def test_what_runs_up_is_seen(tmp_path):
    """At the top, in a function, and however it is spelled."""
    path = tmp_path / "heads.py"
    path.write_text("import numpy\nfrom pallas_models import ops\nfrom pallas_models.sentence import encoder\n")
    encoder = "pallas_models.sentence.encoder, on the floor of sentence"
    assert running_up("pallas_models.ops.heads", path) == [encoder]
    assert running_up("pallas_models.sentence.heads", path) == []
    path.write_text("def f():\n    import weights.hub\n    return load('pallas_models.kernels.triton.norm')\n")
    assert len(running_up("pallas_models.dispatch.heads", path)) == 1
    assert len(running_up("pallas_models.kernels.common.heads", path)) == 2


@pytest.mark.parametrize(("backend", "other"), [("mosaic", "triton"), ("triton", "mosaic")])
def test_no_backend_imports_another(backend, other):
    names = {
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module.startswith(f"pallas_models.kernels.{backend}")
        for name in imports(path)
        if f"{name}.".startswith((f"pallas_models.kernels.{other}.", f"jax.experimental.pallas.{other}"))
    }
    assert names == set()


def test_pallas_triton_is_imported_by_triton_kernels_alone():
    """JAX will remove it one day; all else has to run without it."""
    found = {module for module, path in MODULES.items() if "jax.experimental.pallas.triton" in set(imports(path))}
    found.remove("pallas_models._jax")  # which asks whether JAX has it
    assert found and all(module.startswith("pallas_models.kernels.triton") for module in found), found


def test_the_library_imports_neither_its_tests_nor_its_benchmarks():
    roots = {module: {name.partition(".")[0] for name in imports(path)} for module, path in MODULES.items()}
    assert [module for module, found in roots.items() if found & {"parity", "bench"}] == []
