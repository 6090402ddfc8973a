"""That the sanitizers see every kernel, and what they say is read right."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_models import ops
from pallas_models.ops import _dispatch
from pallas_models.ops._dispatch import Op
from parity import __main__ as check
from parity import sanitize
from parity.common import cuda_device


def records() -> dict[str, Op]:
    """Every op by name."""
    modules = [
        importlib.import_module(f"{ops.__name__}.{module.name}") for module in pkgutil.iter_modules(ops.__path__)
    ]
    return {op.name: op for module in modules for op in vars(module).values() if isinstance(op, Op)}


def test_every_kernel_has_a_call_at_odd_and_even_sizes(monkeypatch):
    seen: dict[int, set[tuple[str, str]]] = {1: set(), 16: set()}
    original, size = _dispatch._run, 1

    def spy(*args: Any, op: Op, names: tuple[str, ...], **rest: Any) -> Any:
        seen[size].add((op.name, names[0]))
        return original(*args, op=op, names=names, **rest)

    monkeypatch.setattr(_dispatch, "_run", spy)
    with cuda_device("NVIDIA H200", 132):
        for backend, call, dtype, size in sanitize.runs():  # the spy reads the size
            arrays = call.arrays(dtype, size)
            _, both = sanitize.functions(backend, call, arrays[call.floats :])
            jax.eval_shape(both, *arrays[: call.floats])  # raises where the kernel does not serve the call
    kernels = {(op.name, kernel.backend) for op in records().values() for kernel in op.kernels}
    assert len(kernels) >= 13
    assert seen == {1: kernels, 16: kernels}


@pytest.mark.parametrize(
    "log, code, findings",
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, 0),
        ("========= ERROR SUMMARY: 3 errors\n", 1, 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 1, 2),
        ("Traceback (most recent call last):\n", 1, None),
        ("========= ERROR SUMMARY: 0 errors\n", 139, None),
    ],
)
def test_findings_are_counted(log, code, findings):
    assert sanitize.findings("memcheck", log, code) == findings


def test_a_tool_has_got_to_the_end_where_every_call_has():
    def summary(*findings: int | None) -> int | None:
        return sanitize.summary([sanitize.Outcome("memcheck", "a", found, 1, "") for found in findings])[
            "findings"
        ]

    assert summary(0, 2, 1) == 3
    assert summary(0, None) is None and summary() is None


def test_gradients_run_where_they_have_kernels(monkeypatch):
    called: list[str] = []
    original = _dispatch._run

    def spy(*args: Any, op: Op, **rest: Any) -> Any:
        called.append(op.name)
        return original(*args, op=op, **rest)

    monkeypatch.setattr(_dispatch, "_run", spy)
    with_kernels = {(op.name, b.backend) for op in records().values() for b in op.backward if b.backend != "xla"}
    assert ("attention", "mosaic") in with_kernels
    found = set()
    with cuda_device("NVIDIA H200", 132):
        for backend, call, dtype, size in sanitize.runs():
            if size == 16:
                called.clear()
                results = sanitize.traced(backend, call, call.arrays(dtype, size)).out_info
                found |= {(name, backend) for name in called} if len(jax.tree.leaves(results)) > 1 else set()
    assert with_kernels <= found


def test_without_the_tool_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert check.main(["sanitize"]) == 2
    assert "compute-sanitizer is not installed" in capsys.readouterr().err


# As compute-sanitizer: softmax hangs once, and in matmul memcheck finds something.
FAKE = """
import pathlib, sys, time
if '--version' in sys.argv: sys.exit(print('Version 2026.1'))
tool, call = sys.argv[sys.argv.index('--tool') + 1], sys.argv[-1].split("'")[1]
seen = pathlib.Path(__file__).with_name(f'{tool} {call}')
if call == 'softmax' and not seen.exists():
    seen.touch()
    time.sleep(60)
bad = tool == 'memcheck' and call == 'matmul'
print('========= ERROR SUMMARY: %d errors' % bad)
sys.exit(bad)
"""


def write_program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """Programs in the place of the sanitizer and of what names and compiles the calls."""
    program = write_program(tmp_path / "compute-sanitizer", f"#!{sys.executable}\n{FAKE}")
    python = write_program(
        tmp_path / "python", "#!/bin/sh\ncase $2 in *served*) printf 'softmax\\nmatmul\\n';; esac\n"
    )
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: program)
    monkeypatch.setattr(sanitize, "describe_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(sanitize.sys, "executable", python)
    monkeypatch.setattr(sanitize, "PATIENCE", 1.0)


@pytest.mark.usefixtures("fakes")
def test_a_report_is_written(tmp_path, capsys):
    output = tmp_path / "log" / "sanitize.json"
    assert sanitize.main(["--output", str(output)]) == 1
    text = capsys.readouterr().out
    assert "2 of 2 calls compiled" in text
    assert "memcheck: 2 of 2 calls, 1 findings" in text and "racecheck: 2 of 2 calls, 0 findings" in text
    said = json.loads(output.read_text())
    assert said["tools"]["memcheck"] == {"findings": 1, "calls": ["softmax", "matmul"], "begun_anew": ["softmax"]}
    assert said["sanitizer"] == ["Version 2026.1"]
    assert list(said["logs"]) == ["memcheck matmul"]
    assert sanitize.main(["--tool", "synccheck"]) == 0


@pytest.mark.usefixtures("fakes")
def test_a_call_that_hangs_each_time_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "TRIES", 1)
    assert sanitize.main(["--tool", "racecheck"]) == 2
    text = capsys.readouterr().out
    assert "racecheck: 1 of 2 calls, did not get to the end" in text
    assert "racecheck softmax:\n\nnot at the end after 1 s" in text
