"""That the sanitizers see every kernel, and what they say is read right."""

import importlib
import pkgutil
import sys
from typing import Any

import jax
import pytest

from pallas_models import ops
from pallas_models.ops import _dispatch
from pallas_models.ops._dispatch import Op
from parity import __main__ as check
from parity import sanitize
from parity.common import cuda_device


def every_kernel() -> set[tuple[str, str]]:
    """The op and the backend of each kernel record."""
    modules = [
        importlib.import_module(f"{ops.__name__}.{module.name}") for module in pkgutil.iter_modules(ops.__path__)
    ]
    records = {op.name: op for module in modules for op in vars(module).values() if isinstance(op, Op)}
    return {(op.name, kernel.backend) for op in records.values() for kernel in op.kernels}


def test_every_kernel_has_a_call_at_odd_and_even_sizes(monkeypatch):
    seen: dict[int, set[tuple[str, str]]] = {1: set(), 16: set()}
    original, size = _dispatch._run, 1

    def spy(*args: Any, op: Op, names: tuple[str, ...], **rest: Any) -> Any:
        seen[size].add((op.name, names[0]))
        return original(*args, op=op, names=names, **rest)

    monkeypatch.setattr(_dispatch, "_run", spy)
    with cuda_device("NVIDIA H200", 132):
        for backend, call, dtype, size in sanitize.runs():  # the spy reads the size
            jax.eval_shape(call(backend), *call.arrays(dtype, size))  # raises where the kernel does not serve it
    kernels = every_kernel()
    assert len(kernels) >= 13
    assert seen == {1: kernels, 16: kernels}


@pytest.mark.parametrize(
    "log, code, findings",
    [
        ("call triton matmul bfloat16 1\n========= ERROR SUMMARY: 0 errors\n", 0, 0),
        ("call triton matmul bfloat16 1\n========= ERROR SUMMARY: 3 errors\n", 1, 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 1, 2),
        ("Traceback (most recent call last):\n", 1, None),
        ("========= ERROR SUMMARY: 0 errors\n", 139, None),
    ],
)
def test_findings_are_counted(log, code, findings):
    outcome = sanitize.parse("memcheck", log, code)
    assert outcome.findings == findings
    assert outcome.calls == (
        ["triton matmul bfloat16 1"] if "call" in log.split("\n")[0] and "call last" not in log else []
    )


def test_without_the_tool_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert check.main(["sanitize"]) == 2
    assert "compute-sanitizer is not installed" in capsys.readouterr().err


FAKE = """
import sys
print('call triton softmax float16 16')
tool = sys.argv[sys.argv.index('--tool') + 1]
print('========= ERROR SUMMARY: %d errors' % (tool == 'memcheck'))
sys.exit(tool == 'memcheck')
"""


def test_a_report_is_written(monkeypatch, tmp_path, capsys):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!{sys.executable}\n{FAKE}")
    program.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(sanitize, "describe_gpu", lambda: "NVIDIA H200")
    output = tmp_path / "log" / "sanitize.json"
    assert sanitize.main(["--output", str(output)]) == 1
    assert '"findings": 1' in output.read_text()
    text = capsys.readouterr().out
    assert "memcheck: 1 calls, 1 findings" in text and "racecheck: 1 calls, 0 findings" in text
    assert sanitize.main(["--tool", "synccheck", "--workers", "2"]) == 0
    assert "synccheck: 2 calls, 0 findings" in capsys.readouterr().out
