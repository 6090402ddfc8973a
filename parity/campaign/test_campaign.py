"""That campaigns find what is wrong, let pass what is right, and go on after failures."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops as library
from parity import COMPILES_ALONE, ROOT
from parity import __main__ as check
from parity.campaign import __main__ as campaign
from parity.campaign import ops
from parity.support import bounded, draws
from parity.support.bounded import Bounded, disagreement, exact
from parity.support.compiling import ptxas
from parity.support.draws import DTYPES


def test_parts_have_cases():
    assert {"ops", "files", "damaged_results"} < set(campaign.PARTS)
    for module in campaign.PARTS.values():
        path = ROOT / (module.replace(".", "/") + ".py")
        assert "\ndef cases(" in path.read_text(), module


def test_every_op_is_drawn():
    drawn = [ops.program(1, i) for i in range(1500)]
    assert {p.op for p in drawn} == set(ops.DRAWN)
    assert {p.transformation.split()[0] for p in drawn} == set(ops.TRANSFORMATIONS)
    assert {p.implementation for p in drawn} == set(ops.SHARES)
    for op in ops.DRAWN:
        assert {p.dtype for p in drawn if p.op == op} == set(DTYPES)


def test_a_case_is_the_same_alone():
    p = ops.program(3, 7)
    assert str(p) == str(ops.program(3, 7)) != str(ops.program(4, 7))
    (first, _), (second, _) = (ops.arrays_of(p, np.random.default_rng([3, 7, 5])) for _ in range(2))
    for name, x in first.items():
        assert x.dtype == second[name].dtype
        np.testing.assert_array_equal(x, second[name])
    names = [case.name for case in itertools.islice(ops.cases(3), 7 * ops.DRAWS, 7 * ops.DRAWS + 2)]
    assert names == [str(p)] * 2


FORMULAS = {
    "product": lambda x, w: bounded.dot(exact(x), exact(w)),
    "norm": lambda x, w: bounded.normalised(exact(x), 1e-5, subtract_mean=True),
    "softmax": lambda x, w: bounded.exp(exact(x)) / bounded.total(bounded.exp(exact(x))),
    "gelu": lambda x, w: bounded.activation("gelu", exact(x)),
}


def in_float32(name, x, w):
    x, w = x.astype(np.float32), w.astype(np.float32)
    if name == "product":
        return np.add.reduce([x[:, i, None] * w[i] for i in range(x.shape[1])])  # one after another
    if name == "norm":
        d = x - np.mean(x, -1, keepdims=True)
        return d / np.sqrt(np.mean(d * d, -1, keepdims=True) + np.float32(1e-5))
    if name == "softmax":
        return np.exp(x) / np.sum(np.exp(x), -1, keepdims=True)
    return x * np.float32(0.5) * bounded.special.erfc(-x * np.float32(0.5**0.5))


@pytest.mark.parametrize("scale, shift", [(1.0, 0.0), (1e-3, 0.0), (5.0, 0.0), (1.0, 30.0)])
@pytest.mark.parametrize("name", FORMULAS)
def test_bounds_hold_and_are_near_what_they_bound(name, scale, shift):
    rng = np.random.default_rng(90)
    x, w = (rng.normal(shift, scale, shape).astype(np.float32) for shape in ((40, 70), (70, 30)))
    bounded = FORMULAS[name](x.astype(np.float64), w.astype(np.float64))
    out = in_float32(name, x, w)
    assert np.all(np.abs(out - bounded.value) <= bounded.error)
    # A wrong element, off by a hundredth of a typical one, is seen.
    typical = np.sqrt(np.mean(np.square(bounded.value)))
    assert np.max(bounded.error) < 0.01 * typical


def test_sums_may_begin_with_what_is_added_to_them():
    """As Triton's compiler makes them: every step is then rounded in relation to it."""
    rng = np.random.default_rng(91)
    x, w = rng.normal(0, 1e-3, (40, 70)), rng.normal(0, 1e-3, (70, 30))
    sums = np.full((40, 30), 16.0, np.float32)
    for i in range(70):
        sums += (x[:, i, None] * w[i]).astype(np.float32)
    off = np.abs(sums - 16.0 - x @ w)
    assert np.all(off <= bounded.dot(exact(x), exact(w), np.full(30, 16.0)).error)
    assert np.any(off > (bounded.dot(exact(x), exact(w)) + exact(16.0)).error)


def test_tensor_cores_align_subnormal_operands_as_the_smallest_normal():
    """A model of them: products are cut off below a unit given by the largest sum of two exponents."""
    rng = np.random.default_rng(92)
    x = rng.normal(0, 1e-7, (40, 32)).astype(np.float16).astype(np.float64)  # subnormal
    w = rng.normal(0, 1.0, (32, 30)).astype(np.float16).astype(np.float64)
    x[:, :2], w[0], w[1] = 2.0**-23, 65504.0, -65504.0
    products = x[:, :, None] * w
    exponents = [np.floor(np.log2(np.maximum(np.abs(a), 2.0**-14))) for a in (x, w)]
    unit = 2.0 ** (np.max(exponents[0][:, :, None] + exponents[1], 1, keepdims=True) - 25)
    off = np.abs(np.sum(np.trunc(products / unit) * unit, 1) - x @ w)
    assert np.all(off <= bounded.dot(exact(x), exact(w), dtype="float16").error)
    assert np.any(off > bounded.dot(exact(x), exact(w)).error)


@pytest.mark.parametrize(
    "out, message",
    [
        ([1.0, 2.0, np.nan, np.inf], None),
        ([1.0 + 1e-7, 2.0, np.nan, np.inf], None),
        ([1.0, 2.5, np.nan, np.inf], r"1 of 4 values are off, at \(1,\) 2.5, expected 2 "),
        ([np.nan, 2.0, np.nan, np.inf], r"at \(0,\) nan, expected 1 "),
        ([1.0, 2.0, 3.0, np.inf], r"at \(2,\) 3, expected nan"),
        ([1.0, 2.0, np.nan, -np.inf], r"at \(3,\) -inf, expected inf"),
        ([1.0, np.inf, np.nan, np.inf], r"at \(1,\) inf, expected 2 "),
    ],
)
def test_what_is_wrong_is_said(out, message):
    expected = Bounded(np.array([1.0, 2.0, np.nan, np.inf]), np.full(4, 1e-6))
    found, part, _ = disagreement(np.array(out, np.float32), expected, "float32")
    assert (part <= 1.0) == (message is None) == (found is None)
    if message is not None:
        assert re.search(message, found)


def test_beyond_the_range_of_a_dtype_only_infinity_is_right():
    expected = Bounded(np.array([7e4, 6e4]), np.zeros(2))
    for value, is_right in ((np.inf, True), (np.nan, True), (65504.0, False)):
        found, _, _ = disagreement(np.array([value, 6e4], np.float16), expected, "float16")
        assert (found is None) == is_right
    assert disagreement(np.zeros((1, 2)), expected, "float16")[0] == "shape (1, 2), expected (2,)"


def first_of(op: str, transformation: str) -> int:
    """The number of a case of an op under a transformation, run by XLA."""

    def wanted(p: ops.Program) -> bool:
        single = all(spec.dtype in ("float32", "int32", "bool", "int8") for spec in p.inputs.values())
        wide = ops.differentiable(p)  # rows of one element do not show every break
        return p.op == op and p.transformation.startswith(transformation) and single and wide

    return draws.first(lambda i: ops.program(0, i, "xla"), wanted) * ops.DRAWS


BREAKS = {
    ("softmax", "jit"): lambda f: lambda x, **o: f(x, **o) * (1 + 1e-4),
    ("layer_norm", "vmap"): lambda f: lambda x, **o: f(x, **(o | {"epsilon": 0.3})),
    ("gated_matmul", "vjp"): lambda f: lambda x, **o: f(x * 1.001, **o),
    ("rms_norm", "jvp"): lambda f: lambda x, **o: f(x + 0.1, **o),
    ("linear_cross_entropy", "jvp"): lambda f: lambda x, w, labels, **o: f(x * 1.001, w, labels, **o),
    ("mean_pool", "jit"): lambda f: lambda x, mask, **o: f(x, jnp.ones_like(mask), **o),
}


@pytest.mark.parametrize("op, transformation", BREAKS)
def test_a_case_of_each_break_is_drawn_at_the_sizes_of_a_gpu(monkeypatch, op, transformation):
    monkeypatch.setattr(draws, "ON_GPU", True)
    assert first_of(op, transformation) >= 0


@pytest.mark.parametrize("op, transformation", BREAKS)
def test_a_break_is_found(monkeypatch, op, transformation):
    start = first_of(op, transformation)
    cases = list(itertools.islice(ops.cases(0, "xla"), start, start + 6))
    ops._compiled.cache_clear()
    assert [case.run() for case in cases] == [None] * 6
    monkeypatch.setattr(library, op, BREAKS[op, transformation](getattr(library, op)))
    ops._compiled.cache_clear()
    assert any(case.run() for case in cases)
    ops._compiled.cache_clear()


PART = """
import itertools, os, signal, time
from parity.campaign._case import Case

def run(i):
    if i == 3: raise KeyError("three")
    if i == 5: os._exit(7)
    if i == 40: os.kill(os.getppid(), signal.SIGINT)
    if i in (20, 40): time.sleep(100)
    return "odd one" if i == 9 else None

def cases(seed, implementation=None):
    for i in itertools.count():
        measured = {"cases": 1, "largest": i}
        yield Case(f"case {seed + i}", lambda i=i: run(i), ("row", str(i % 2)), measured)
"""


@pytest.fixture
def fake_part(monkeypatch, tmp_path):
    (tmp_path / "fake_part.py").write_text(PART)
    monkeypatch.syspath_prepend(tmp_path)
    return {"fake": "fake_part"}


def test_a_campaign_goes_on_after_failures(fake_part):
    report = campaign.run(fake_part, 10, cases=24, workers=1, patience=4.0)
    assert report.cases == {"fake": 24}
    assert [failure.case for failure in report.failures] == [3, 5, 9, 20]
    raised, crashed, wrong, endless = (failure.message for failure in report.failures)
    assert "KeyError: 'three'" in raised and "crashed with 7" in crashed
    assert wrong == "odd one" and "no answer in 4 s" in endless
    assert report.failures[2].command == "python -m parity campaign --only fake --seed 10 --case 9"
    assert report.rows["row", "0"] == {"cases": 11, "largest": 22}  # all but the one that did not end
    assert "| row | 1 | 11 | 23 |" in report.table()
    assert "24 cases, 4 failures" in report.summary()


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="a plugin of JAX's is here")
def test_compiling_is_left_out_without_compilers():
    report = campaign.run({"compiled": campaign.PARTS["compiled"]}, 3, cases=2, workers=1)
    assert "jax_plugins" in report.absent["compiled"] and not report.failures


@pytest.mark.skipif(ptxas() is None, reason="needs JAX's CUDA plugin")
def test_calls_are_compiled_for_a_gpu_that_is_not_here():
    script = """
from parity.campaign import compiled
case = next(case for case in compiled.cases(3, "mosaic") if "rms_norm" in case.name)
assert case.row[1] == "sm_90" and case.run() is None
"""
    environment = os.environ | COMPILES_ALONE
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=ROOT)


def test_a_campaign_ends_in_time(fake_part):
    started = time.monotonic()
    report = campaign.run(fake_part, 10, minutes=0.06, first=20, workers=2)  # case 20 would go on
    assert time.monotonic() - started < 20
    assert not report.failures


def test_a_case_that_is_late_is_named():
    class Connection:
        """Of a process that has begun a case, and says no more."""

        def __init__(self) -> None:
            self.answers = [(20, "case 30", None)]

        def send(self, _: object) -> None: ...

        def poll(self, _: float) -> bool:
            return bool(self.answers)

        def recv(self) -> object:
            return self.answers.pop()

    worker = object.__new__(campaign._Worker)
    worker.connection, worker.patience = Connection(), 300.0
    worker.deadline = campaign._Deadline(time.monotonic() + 60)
    assert worker.make("fake", 20, 24) == []
    number, name, seconds = worker.late
    assert (number, name) == (20, "case 30") and 0 <= seconds < 60
    late = campaign.Failure("fake", number, name, "began 3 s before time was up", "again")
    report = campaign.Report(late=[late])
    assert "LATE again\n  case 30\n  began 3 s before time was up\n0 cases, 0 failures" in report.summary()
    assert report.as_json()["late"][0]["case"] == 20


def test_a_campaign_that_is_interrupted_tells_what_came_of_it(fake_part, tmp_path):
    script = f"""
import signal, sys
from parity.campaign import __main__ as campaign
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this run beside itself
report = campaign.run({fake_part!r}, 10, first=38, workers=1)
print(report.summary())
campaign.run = lambda *_, **__: report
sys.exit(campaign.main(["--cases", "1", "--output", {str(tmp_path)!r}]))
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130, done.stderr
    assert "fake: 2 cases" in done.stdout and "2 cases, 0 failures, interrupted" in done.stdout
    kept = json.loads((tmp_path / "campaign.json").read_text())
    assert kept["cases"] == {"fake": 2} and kept["interrupted"]


def test_a_case_is_made_again_by_its_number(fake_part, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(campaign, "PARTS", fake_part | {"ops": "fake_part"})
    arguments = ["campaign", "--only", "fake", "--seed", "10", "--case", "9", "--output", str(tmp_path)]
    assert check.main(arguments) == 1
    assert "odd one" in capsys.readouterr().out
    (failure,) = json.loads((tmp_path / "campaign.json").read_text())["failures"]
    assert failure["case"] == 9 and failure["name"] == "case 19"
    assert check.main(["campaign", "--only", "fake", "--seed", "10", "--case", "2"]) == 0


def test_a_campaign_of_which_nothing_came_says_so(fake_part, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "PARTS", fake_part | {"ops": "fake_part"})
    assert check.main(["campaign", "--only", "fake", "--minutes", "0"]) == 2
    said = capsys.readouterr()
    assert "no case came to its end" in said.err and "|" not in said.out


def test_an_installation_without_the_tests_extra_is_told_of_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", None)  # as where it is not installed
    monkeypatch.setattr(campaign, "run", None)
    assert check.main(["campaign", "--minutes", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install '.[test]'" in line


@pytest.mark.parametrize("asked", [b"", b'{"named": [], "size": 1}\n'])
def test_a_sandbox_whose_campaign_is_over_ends_quietly(tmp_path, asked):
    (tmp_path / "module.py").write_text(
        "import sys\nCLEAR = ()\nattempt = id\n"
        "def warm_up(): sys.stdin.buffer.peek(1)\n"  # until whoever asks is gone
    )
    command = [sys.executable, "-m", "parity.campaign._sandbox", "module"]
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, **pipes) as process:
        process.stdout.close()
        assert process.communicate(asked, timeout=60)[1] == b""
    assert process.returncode == 0


@pytest.mark.parametrize("arguments", [[], ["--case", "3"], ["--only", "nothing", "--cases", "1"]])
def test_what_cannot_be_run_is_said(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        check.main(["campaign", *arguments])
    assert exit.value.code == 2 and "usage" in capsys.readouterr().err
