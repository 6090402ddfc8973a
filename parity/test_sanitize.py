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
            jax.eval_shape(call(backend), *call.arrays(dtype, size))  # raises where the kernel does not serve it
    kernels = {(op.name, kernel.backend) for op in records().values() for kernel in op.kernels}
    assert len(kernels) >= 13
    assert seen == {1: kernels, 16: kernels}


@pytest.mark.parametrize(
    "log, code, findings",
    [
        ("of 7 calls\ncall triton matmul bfloat16 1: 2 s\n========= ERROR SUMMARY: 0 errors\n", 0, 0),
        ("of 7 calls\ncall triton matmul bfloat16 1: 2 s\n========= ERROR SUMMARY: 3 errors\n", 1, 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 1, 2),
        ("Traceback (most recent call last):\n", 1, None),
        ("========= ERROR SUMMARY: 0 errors\n", 139, None),
    ],
)
def test_findings_are_counted(log, code, findings):
    outcome = sanitize.parse("memcheck", log, code)
    assert outcome.findings == findings
    begun = log.startswith("of 7 calls")
    assert (outcome.calls, outcome.total) == ((["triton matmul bfloat16 1: 2 s"], 7) if begun else ([], 0))


def test_a_tool_has_got_to_the_end_where_every_call_has():
    """However the calls are spread over processes, one of which may have died of one."""

    def part(calls: list[str], findings: int | None = 0) -> sanitize.Outcome:
        return sanitize.Outcome("memcheck", calls, 3, findings, "")

    assert sanitize.merged([part(["a", "b"]), part(["c"], 2)]).findings == 2
    assert sanitize.merged([part(["a", "b", "c"]), part([])]).findings == 0
    for parts in ([part(["a", "b"]), part([])], [part(["a", "b"]), part(["c"], None)], []):
        assert sanitize.merged([*parts, part([])]).findings is None


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
            if size == 16 and call.name in ("layer_norm", "mean_pool", *(name for name, _ in with_kernels)):
                called.clear()
                results = sanitize.traced(backend, call, call.arrays(dtype, size)).out_info
                found |= {(called[0], backend)} if len(jax.tree.leaves(results)) > 1 else set()
    assert found == with_kernels


def test_without_the_tool_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert check.main(["sanitize"]) == 2
    assert "compute-sanitizer is not installed" in capsys.readouterr().err


FAKE = """
import sys
import pathlib
if '--version' in sys.argv: sys.exit(print('Version 2026.1'))
tool = sys.argv[sys.argv.index('--tool') + 1]
folder = pathlib.Path(sys.argv[-1].split("'")[1])
print('of 2 calls')
for i in range(2):
    try: (folder / str(i)).touch(exist_ok=False)
    except FileExistsError: continue
    print(f'call triton softmax float16 {i}: 1.0 s')
print('========= ERROR SUMMARY: %d errors' % (tool == 'memcheck'))
sys.exit(tool == 'memcheck')
"""


def test_a_report_is_written(monkeypatch, tmp_path, capsys):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!{sys.executable}\n{FAKE}")
    program.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(sanitize, "describe_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(sanitize.sys, "executable", "true")  # what compiles
    output = tmp_path / "log" / "sanitize.json"
    assert sanitize.main(["--output", str(output)]) == 1
    assert '"findings": 1' in output.read_text()
    text = capsys.readouterr().out
    assert "memcheck: 2 of 2 calls, 1 findings" in text and "racecheck: 2 of 2 calls, 0 findings" in text
    assert '"Version 2026.1"' in output.read_text()
    assert sanitize.main(["--tool", "synccheck", "--workers", "2"]) == 0
    assert "synccheck: 2 of 2 calls, 0 findings" in capsys.readouterr().out
