"""The harness of the benchmarks: what becomes of right, wrong, failing and absent contenders; and its users."""

import argparse
import dataclasses
import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as cli
from bench.measuring import contenders, environment, gradients, harness, results, timing, torch_programs
from bench.measuring.harness import Benchmark, Contender, Gradient, Workload
from parity.bench.test_bench import FAST
from parity.support.common import ON_GPU, cuda_device, kernel_calls, without_gpu

OPS = [
    name for name in cli.BENCHMARKS if getattr(getattr(cli.module_of(name), "BENCHMARK", None), "workload", None)
]


def double() -> Callable[..., Any]:
    return lambda x: (2 * x, x)  # of a tuple, the reference has only the first


def absent() -> Callable[..., Any]:
    import no_such_package

    return no_such_package.double


def raises(error: Exception) -> Callable[[], Callable[..., Any]]:
    def function(x: Any) -> Any:
        raise error

    return lambda: function


def in_torch(factor: float = 2) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        pytest.importorskip("torch")
        return lambda x: factor * x

    return load


def workload_of(*contenders: Contender, **changes: Any) -> Callable[[str, harness.Shape], Workload]:
    def workload(dtype: str, shape: harness.Shape) -> Workload:
        sizes = tuple(int(n) for n in shape if isinstance(n, int))
        fields: dict[str, Any] = dict(
            inputs=lambda seed: harness.normal(seed, dtype, sizes),
            reference=lambda x: 2 * x.astype(jnp.float32),
            contenders=contenders,
            sets=3,
            bytes=4.0,
        )
        return Workload(**{**fields, **changes})

    return workload


def benchmark_of(*contenders: Contender, **changes: Any) -> Benchmark:
    return Benchmark(
        name="double",
        axes=("rows", "columns"),
        flags=("odd",),
        shapes=((8, 4),),
        cpu_shapes=((2, 3), (4, 5, "odd")),
        dtypes=("bf16",),
        workload=workload_of(*contenders, **changes),
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, results.Result]]:
    """Runs a benchmark as on a machine without a GPU; gives its exit code and what it saved."""
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(timing, "QUICK", FAST)

    def run(benchmark: Benchmark, *options: str) -> tuple[int, results.Result]:
        parser = argparse.ArgumentParser()
        benchmark.add_arguments(parser)
        code = benchmark.run(parser.parse_args([*options, "--output", str(tmp_path)]))
        return code, results.load(tmp_path / "cpu" / f"{benchmark.name}.partial.json")

    return run


def test_every_outcome(run, capsys):
    pytest.importorskip("torch", reason="torch is not installed: a right and a wrong program are written in it")
    benchmark = benchmark_of(
        Contender("good", "ours", double),
        Contender("wrong", "ladder", lambda: lambda x: 2.5 * x),
        Contender("nan", "xla", lambda: lambda x: x * jnp.nan),
        Contender("shape", "xla", lambda: lambda x: x[:1]),
        Contender("raises", "xla", raises(RuntimeError("no memory\nmore"))),
        Contender("cannot", "xla", raises(NotImplementedError("only on Tuesdays"))),
        Contender("absent", "peer", absent),
        Contender("kernel", "peer", double, gpu=True),
        Contender("never", "peer", double, skip="out of reach"),
        Contender("scaled", "xla", lambda: lambda scale, x: scale * x, params=(jnp.bfloat16(2),)),
        Contender("rows", "xla", lambda: lambda y: 2 * y.T, prepare=lambda x: (x.T,)),
        Contender("torch", "torch", in_torch()),
        Contender("bad", "torch", in_torch(3), ways=("eager",)),
    )
    code, result = run(benchmark, "--show-results")
    assert code == 1, "a variant of ours was wrong"
    assert [case.label for case in result.cases] == ["2x3 bf16", "4x5+odd bf16"]
    assert [case.shape for case in result.cases] == [
        {"rows": 2, "columns": 3},
        {"rows": 4, "columns": 5, "odd": 1},
    ]
    for case in result.cases:
        found = {entry.name: (entry.status, entry.message) for entry in case.entries}
        for name in ("good", "scaled", "rows", "torch-eager"):
            assert found[name] == ("ok", "")
        assert found["wrong"] == ("wrong", "relative error is 2.5e-01, limit 1e-02")
        assert found["nan"] == ("wrong", "relative error is not finite, limit 1e-02")
        assert found["bad-eager"][0] == "wrong"
        assert found["shape"][0] == "failed" and "the output has shape (1, " in found["shape"][1]
        assert found["raises"] == ("failed", "RuntimeError: no memory")
        assert found["cannot"] == ("skipped", "only on Tuesdays")
        assert found["absent"] == ("skipped", "no_such_package is not installed")
        assert found["kernel"] == ("skipped", "it needs a CUDA GPU")
        assert found["never"] == ("skipped", "out of reach")
        assert found["torch-graph"][0] == found["torch-compile"][0] == "skipped"
        for entry in case.entries:
            assert (entry.wall is not None) == (entry.status == "ok"), "wrong ones are not timed"
    out = capsys.readouterr().out
    assert "1 of 2, about" in out and "absent skipped: no_such_package is not installed (all cases)" in out


def test_modes(run):
    """Gradients are compared, too; a call that has other inputs, or no gradient, is left out."""
    pytest.importorskip("torch")
    benchmark = benchmark_of(
        Contender("good", "ours", double),
        Contender("wrong", "xla", lambda: lambda x: x + jax.lax.stop_gradient(x)),
        Contender("scaled", "xla", lambda: lambda scale, x: scale * x, params=(jnp.bfloat16(2),)),
        Contender("rows", "xla", lambda: lambda y: 2 * y.T, prepare=lambda x: (x.T,)),
        Contender("none", "peer", double, differentiable=False),
        Contender("torch", "torch", in_torch(), prepare=lambda x: (x,)),
        Contender("bad", "torch", lambda: lambda x: x + x.detach(), ways=("eager",)),
        gradient=Gradient(bytes=6.0),
    )
    code, result = run(benchmark, "--shapes", "2x3,4x5+odd", "--mode", "both,forward,backward", "--dtype", "fp32")
    assert code == 0
    labels = [f"{shape}{mode} fp32" for mode in ("", "+backward", "+both") for shape in ("2x3", "4x5+odd")]
    assert [case.label for case in result.cases] == labels
    assert [case.bytes for case in result.cases] == [4.0, 4.0, 6.0, 6.0, 10.0, 10.0]
    for case in result.cases:
        found = {entry.name: entry.status for entry in case.entries if entry.message.count("torch.compile") == 0}
        forward = not {"backward", "both"} & case.shape.keys()
        assert found.pop("none", None) == ("ok" if forward else None)
        assert found.pop("wrong") == found.pop("bad-eager") == ("ok" if forward else "wrong")
        assert found.pop("rows") == ("ok" if forward else "skipped")
        assert found == {"good": "ok", "scaled": "ok", "torch-eager": "ok"}


def test_inputs_without_gradients_and_inputs_put_together(run):
    pytest.importorskip("torch")

    def pair(seed: int) -> tuple[Any, ...]:
        return *harness.normal(seed, "fp32", (2, 3), (2, 3)), jnp.arange(3)

    def joined(xy: Any, ids: Any) -> Any:
        return xy[0] * xy[1] * ids

    def first(x: Any, xy: Any, ids: Any) -> Any:  # as if only the second input were prepared
        return x * xy[1] * ids

    benchmark = benchmark_of(
        Contender("good", "ours", lambda: lambda x, y, ids: x * y * ids),
        Contender("joined", "xla", lambda: joined, prepare=lambda x, y, ids: (jnp.stack([x, y]), ids)),
        Contender("first", "xla", lambda: first, prepare=lambda x, y, ids: (x, jnp.stack([x, y]), ids)),
        Contender("torch", "torch", lambda: lambda x, y, ids: x * y * ids),
        inputs=pair,
        reference=lambda x, y, ids: x * y * ids,
        gradient=Gradient(),
    )
    for count in (None, 1):
        gradient = dataclasses.replace(benchmark, workload=counting(benchmark, count))
        _, result = run(gradient, "--shapes", "2x3", "--mode", "backward,both", "--dtype", "fp32")
        for case in result.cases:
            found = {entry.name: entry.status for entry in case.entries}
            assert found["good"] == found["first"] == found["torch-eager"] == "ok"
            assert found["joined"] == "skipped" and case.bytes is None


def counting(benchmark: Benchmark, count: int | None) -> Callable[[str, harness.Shape], Workload]:
    """The workload of a benchmark, with gradients by `count` inputs."""
    workload = benchmark.workload
    assert workload is not None
    return lambda *args: dataclasses.replace(workload(*args), gradient=Gradient(inputs=count))


def test_a_mode_that_is_unknown_or_has_no_gradient(capsys):
    benchmark = benchmark_of(Contender("ours", "ours", double))
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    assert parser.parse_args([]).mode == ["forward"]
    assert benchmark.run(parser.parse_args(["--mode", "both"])) == 2
    assert "its gradient is not measured; `python -m bench train` has whole" in capsys.readouterr().out
    with pytest.raises(argparse.ArgumentTypeError, match=r"unknown mode back; expected some of \['forward', "):
        harness.parse_modes("forward,back")


@pytest.mark.parametrize(
    ("family", "load", "code"),
    [
        ("ours", raises(RuntimeError("no")), 1),
        ("ours", raises(NotImplementedError("no")), 1),
        ("ladder", raises(NotImplementedError("no")), 0),
        ("xla", raises(RuntimeError("no")), 0),
        ("ours", double, 0),
    ],
)
def test_exit_code(run, family, load, code):
    assert run(benchmark_of(Contender("one", family, load)), "--shapes", "2x2")[0] == code


def test_an_impossible_shape(run, capsys):
    def workload(dtype: str, shape: harness.Shape) -> Workload:
        raise ValueError(f"{shape} cannot be")

    parser = argparse.ArgumentParser()
    benchmark = Benchmark(
        name="x", axes=("n",), shapes=((1,),), cpu_shapes=((1,),), dtypes=("fp32",), workload=workload
    )
    benchmark.add_arguments(parser)
    assert benchmark.run(parser.parse_args([])) == 2
    assert "(1,) cannot be" in capsys.readouterr().out


def test_without_torch(run, monkeypatch):
    monkeypatch.setattr(torch_programs.TorchPrograms, "_missing", lambda self: "torch is not installed")
    code, result = run(benchmark_of(Contender("torch", "torch", in_torch()), Contender("ours", "ours", double)))
    assert code == 0
    status = {entry.name: entry.message for entry in result.cases[0].entries}
    assert status["torch-eager"] == status["torch-compile-graph"] == "torch is not installed"


def test_torch_keeps_no_memory_of_a_case(run, monkeypatch):
    forgotten = []
    monkeypatch.setattr(torch_programs.TorchPrograms, "forget", lambda self: forgotten.append(self))
    _, result = run(benchmark_of(Contender("torch", "torch", in_torch()), Contender("ours", "ours", double)))
    assert len(forgotten) == len(result.cases) > 0


@pytest.fixture
def programs():
    """The programs of torch on a GPU, of which nothing is there to be given back."""
    pytest.importorskip("torch")
    made = torch_programs.TorchPrograms(gpu=True, compile_mode="default", compile_budget=0, no_compile=True)
    made.forget()  # else what other tests left may be taken
    return made


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_torch_gives_memory_back_that_an_error_refers_to(programs):
    torch = pytest.importorskip("torch")
    before = torch.cuda.memory_reserved()

    def fails():
        x = torch.ones(2**26, device="cuda")
        raise MemoryError(x.shape)

    try:
        fails()
    except MemoryError as error:
        error.itself = error
    assert torch.cuda.memory_reserved() >= before + 2**28
    programs.forget()
    assert torch.cuda.memory_reserved() <= before


class Held:
    """What the frames of an error must not keep."""


@pytest.mark.parametrize("where", ["loading", "checking", "timing"])
def test_what_failed_keeps_nothing(where):
    kept = []

    def fails(*_):
        held = Held()
        kept.append(weakref.ref(held))
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None

    attempt = contenders.Attempt(name="x", family="torch", output=fails)
    if where == "loading":
        try:
            fails()
        except ValueError as error:
            attempt.stop(error)
        error = attempt.error
    elif where == "checking":
        attempt.check({0: jnp.ones(3)}, contenders.RELATIVE, 1e-3)
        error = attempt.error
    else:
        candidate = timing.Candidate(call=fails, wait=lambda _: None)
        error = timing.measure({"x": candidate}, timing.QUICK, on_device=False)["x"]
    assert isinstance(error, ValueError) and str(error) == "second"
    assert kept and all(held() is None for held in kept)


@pytest.mark.parametrize(
    "family, skipped", [("torch", "a graph takes 9 GB"), ("peer", "a graph takes 9 GB"), ("ours", "")]
)
def test_a_rival_that_memory_is_short_for_is_skipped(family, skipped):
    attempt = contenders.Attempt(name="x", family=family)
    attempt.stop(MemoryError("a graph takes 9 GB"))
    assert attempt.skipped == skipped and (attempt.error is None) == bool(skipped)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_a_graph_that_leaves_too_little_is_not_captured(programs):
    torch = pytest.importorskip("torch")
    before = torch.cuda.memory_reserved()
    x = torch.ones(2**26, device="cuda")
    with pytest.raises(MemoryError, match=r"a CUDA graph takes 0\.[3-9] GB and other calls 1000\.0, of"):
        torch_programs.capture(lambda x: (2 * x).sum(), [(x,)], beside=10**12)
    del x
    programs.forget()
    assert torch.cuda.memory_reserved() <= before + 2**25


def test_shapes():
    benchmark = benchmark_of()
    assert benchmark.parse_shapes("8x4, 2x3+odd") == [(8, 4), (2, 3, "odd")]
    assert [harness.shape_text(shape) for shape in ((8, 4), (2, 3, "odd"))] == ["8x4", "2x3+odd"]
    for text in ("8", "8x4x2", "0x4", "8x-4", "8x4+even", "8x4+odd+odd", "8x4,", "2147483648x4"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"no shape; expected ROWSxCOLUMNS\[\+odd\], such as"):
            benchmark.parse_shapes(text)
    assert harness.parse_dtypes("fp16,fp16,bf16") == ["fp16", "bf16"]


def test_which_shapes_are_run():
    shapes = tuple((n, n) for n in range(1, 6))
    benchmark = Benchmark(name="x", axes=("a", "b"), shapes=shapes, cpu_shapes=((9, 9),), dtypes=("fp32",))

    def chosen(*options: str, gpu: bool = True) -> list[harness.Shape]:
        parser = argparse.ArgumentParser()
        benchmark.add_arguments(parser)
        return benchmark.chosen_shapes(parser.parse_args(options), gpu=gpu)

    assert chosen() == list(shapes) and chosen("--quick") == list(shapes[:2])
    assert chosen(gpu=False) == [(9, 9)] and chosen("--shapes", "7x7", "--quick", gpu=False) == [(7, 7)]


def test_input_sets(monkeypatch):
    monkeypatch.setattr(contenders, "COLD_BYTES", 1000)
    workload = workload_of(sets=None)("fp32", (8, 8))
    sets = workload.input_sets()
    assert len(sets) == 4  # of 256 bytes each
    values = np.array([np.asarray(x) for (x,) in sets])
    assert len(np.unique(values)) == values.size and abs(values.mean()) < 0.3 and 0.8 < values.std() < 1.2
    assert len(workload_of(sets=None)("fp32", (100, 100)).input_sets()) == 2
    assert len(workload_of(sets=None)("fp32", (1, 1)).input_sets()) == contenders.MAX_SETS
    assert len(workload_of(sets=1)("fp32", (1, 1)).input_sets()) == 1


def test_relative_error():
    a = jnp.arange(1.0, 7.0).reshape(2, 3)
    assert harness.RELATIVE.of(a, a) == 0
    assert harness.RELATIVE.of(1.5 * a, a) == pytest.approx(0.5)
    assert harness.RELATIVE.of(a.at[0, 0].set(jnp.inf), a) == contenders.NOT_FINITE
    with pytest.raises(ValueError, match=r"the output has shape \(2, 2\), the reference \(2, 3\)"):
        harness.RELATIVE.of(a[:, :2], a)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a CUDA GPU")
def test_capture():
    torch = pytest.importorskip("torch")
    inputs = [(torch.randn(8, device="cuda"),) for _ in range(2)]
    calls = torch_programs.capture(lambda x: 2 * x, inputs, beside=0)
    for call, (x,) in zip(calls, inputs, strict=True):
        assert torch.equal(call(), 2 * x)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("gemm", "33x65x17"),
        ("softmax", "5x70"),
        ("norm", "5x70,5x70+rms"),
        ("linear-cross-entropy", "7x50x33"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_operations(monkeypatch, tmp_path, on_cpu, name, shapes, dtype):
    """XLA's and torch's figures are for the same computation; each benchmark registers and takes shapes."""
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(timing, "QUICK", FAST)
    options = ["--shapes", shapes, "--dtype", dtype, "--mode", "forward,both", "--output", str(tmp_path)]
    assert cli.main([name, *options]) == 0
    result = results.load(tmp_path / "cpu" / f"{name}.partial.json")
    for case in result.cases:
        status = {entry.name: entry.status for entry in case.entries}
        assert status.pop("xla") == "ok"
        assert status.pop("torch-eager") == ("ok" if importlib.util.find_spec("torch") else "skipped")
        assert set(status.values()) == {"skipped"} and case.bytes
        assert case.flop or ("both" in case.shape and name in ("softmax", "norm"))


@without_gpu
@pytest.mark.parametrize("mode", ["forward", "both"])
@pytest.mark.parametrize("name", OPS)
def test_kernels_lower_for_cuda(name, mode):
    """Everything of ours that a benchmark times can be called as it calls it; "backward" is a part of "both"."""
    benchmark = cli.module_of(name).BENCHMARK
    dtype, shape = benchmark.dtypes[0], benchmark.shapes[0]
    workload = gradients.of(benchmark.workload(dtype, shape), dtype, mode)
    inputs = jax.eval_shape(lambda: workload.inputs(0))
    timed = [c for c in workload.contenders if c.family in ("ours", "ladder") and not c.skip]
    assert "ours" in {contender.family for contender in timed}
    for contender in timed:
        with cuda_device("NVIDIA H200", 132):
            function = contender.load()
            given = jax.eval_shape(contender.prepared, inputs)
            traced = jax.jit(function).trace(*contender.params, *given)
            assert kernel_calls(traced.lower(lowering_platforms=("cuda",)).as_text()) > 0, contender.name
