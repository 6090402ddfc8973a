"""That the sanitizers see every kernel, and what they say is read right."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_models.dispatch import run
from pallas_models.dispatch.records import Op
from parity import __main__ as check
from parity.cases import records
from parity.support import sanitize
from parity.support.common import cuda_device


@dataclasses.dataclass(frozen=True)
class Run:
    """The ops that one of `sanitize.runs` calls, each with the first backend it asks, and what comes out."""

    backend: str
    size: int
    called: frozenset[tuple[str, str]]
    results: list[Any]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """All runs traced for a GPU; it raises where a kernel does not serve its call."""
    called: set[tuple[str, str]] = set()
    original, found = run._run, []

    def spy(*args: Any, op: Op[Any], names: tuple[str, ...], **rest: Any) -> Any:
        if names[0] != "xla":  # as within a reference
            called.add((op.name, names[0]))
        return original(*args, op=op, names=names, **rest)

    with pytest.MonkeyPatch.context() as monkeypatch, cuda_device("NVIDIA H200", 132):
        monkeypatch.setattr(run, "_run", spy)
        for backend, call, dtype, size in sanitize.runs():
            called.clear()
            arrays = call.arrays(dtype, size)
            if size == 1:  # the same as at size 16
                _, both = sanitize.functions(backend, call, arrays[call.floats :])
                results = jax.eval_shape(both, *arrays[: call.floats])
            else:
                results = sanitize.traced(backend, call, arrays).out_info
            found.append(Run(backend, size, frozenset(called), jax.tree.leaves(results)))
    return found


def test_every_kernel_has_a_call_at_odd_and_even_sizes(runs):
    every_op = [op for of_module in records().values() for op in of_module.values()]
    kernels = {(op.name, kernel.backend) for op in every_op for kernel in op.kernels}
    if jax.__version_info__ < (0, 11):  # which has no such kernels
        kernels -= {
            (op, "mosaic")
            for op in ("post_norm_layers", "attention_post_norm_mlp", "rotary", "layer_norm_projections")
        }
    assert len(kernels) >= 13
    for size in (1, 16):
        assert set().union(*(run.called for run in runs if run.size == size)) == kernels


@pytest.mark.parametrize(
    "log, code, findings",
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, 0),
        ("========= ERROR SUMMARY: 3 errors\n", 1, 3),
        (
            "========= ERROR SUMMARY: 30 errors\n"
            "========= ERROR SUMMARY: 10 errors were not printed. Use --print-limit option to adjust\n",
            1,
            30,
        ),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 1, 2),
        ("Traceback (most recent call last):\n", 1, None),
        ("========= ERROR SUMMARY: 0 errors\n", 139, None),
    ],
)
def test_findings_are_counted(log, code, findings):
    assert sanitize.findings("memcheck", log, code) == findings


def test_an_excerpt_has_the_first_finding_and_the_end():
    finding = [
        "========= Invalid __global__ read of size 4 bytes",
        "=========     at kernel+0x40",
        "=========     by thread (0,0,0) in block (0,0,0)",
    ]
    host = [
        "=========     Saved host backtrace up to driver entry point at kernel launch time",
        "=========         Host Frame: call in stages.py:931",
        "=========                in /usr/lib/libcuda.so.1",
        "========= ",
    ]
    short = sanitize.excerpt("\n".join([*finding, *host, "the end"]))
    assert short == [*finding, "the end"]
    long = sanitize.excerpt("\n".join([*finding, *host, *map(str, range(500)), "the end"]))
    assert long[:3] == finding and long[-1] == "the end" and len(long) < 110


def test_a_tool_has_got_to_the_end_where_every_call_has():
    def summary(*findings: int | None) -> int | None:
        return sanitize.summary([sanitize.Outcome("memcheck", "a", found, 1, "") for found in findings])[
            "findings"
        ]

    assert summary(0, 2, 1) == 3
    assert summary(0, None) is None and summary() is None


def test_gradients_run_where_they_have_kernels(runs):
    every_op = [op for of_module in records().values() for op in of_module.values()]
    with_kernels = {(op.name, b.backend) for op in every_op for b in op.backward if b.backend != "xla"}
    assert ("attention", "mosaic") in with_kernels
    if jax.__version_info__ < (0, 11):
        with_kernels -= {(name, "mosaic") for name in ("rotary", "layer_norm_projections", "triangle_attention")}
    differentiated = [run for run in runs if run.size == 16 and len(run.results) > 1]
    assert with_kernels <= {(name, run.backend) for run in differentiated for name, _ in run.called}


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
    assert said["calls"] == ["softmax", "matmul"]
    assert said["tools"]["memcheck"] == {"findings": 1, "ended": 2, "begun_anew": ["softmax"]}
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
