"""`python -m bench tune`: what it measures, writes, shows and refuses."""

import dataclasses
import inspect
import itertools
import types
from pathlib import Path

import jax
import pytest

from bench import __main__ as cli
from bench.measuring import environment, tunable, tune
from bench.measuring.harness import DTYPES
from pallas_models import ops, tuning
from pallas_models.tuning import Table, autotuner
from pallas_models.tuning import table as tables
from parity.dispatch.test_tuning import GPU, entry, folders, table, times
from parity.support.common import ON_HOPPER, cuda_device

__all__ = ["folders", "times"]  # fixtures


@pytest.fixture
def gpu(times, monkeypatch):
    """A GPU with an op to tune on it; the microseconds of its configs, by number."""
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda kind: [types.SimpleNamespace(device_kind=GPU)])

    def call(dtype, m, n):
        from parity.dispatch.test_tuning import Tile, double

        return double, tunable.operands(dtype, (m, n)), {"configs": [Tile(2), Tile(3)], "implementation": "any"}

    small = tunable.Tunable(axes="MxN", shapes=((16, 4), (64, 4)), call=call)
    monkeypatch.setattr(tune, "TUNABLES", {"double": small, "again": small})
    return times


def run(*arguments: object) -> int:
    return cli.main(["tune", *map(str, arguments)])


def test_it_writes_what_is_faster(gpu, tmp_path, capsys):
    from parity.dispatch.test_tuning import Tile

    gpu[Tile(3)] = 50.0
    path = tmp_path / "t.json"
    assert run("double", "--shape", "16x4,64x4", "--dtype", "fp32", "--output", path) == 0
    out = capsys.readouterr().out
    assert "[1/2] double 16x4 fp32: heuristic " in out and "[2/2] double 64x4 fp32: " in out
    assert "s left" in out and f"written: {path}" in out and "3 configs timed, 0 failed" in out
    found = Table.load(path)
    assert found.gpu == GPU
    assert [(e.shape, e.config["block"], e.bucketed) for e in found.entries] == [
        ({"m": 16}, 3, ("m",)),
        ({"m": 64}, 3, ("m",)),
    ]


def test_the_users_table_is_the_default(gpu, capsys):
    assert run("all", "--dtype", "fp32", "--trials") == 0
    path = tuning.cache_path(GPU)
    assert [e.config for e in Table.load(path).entries] == [None, None]
    out = capsys.readouterr().out
    assert "[4/4] again 64x4 fp32: heuristic" in out and "which nothing beats" in out
    assert "best and heuristic" in out and str(path) in out


def test_a_config_that_does_not_hold_for_fewer_rows_is_for_its_shape_only(gpu, tmp_path, monkeypatch, capsys):
    from parity.dispatch.test_tuning import Tile

    gpu[Tile(3)] = 50.0
    measure = autotuner._device_times_us

    def slow_with_few_rows(program, samples):
        (x,), _ = program.args
        scale = 10 if len(x) == 12 else 1
        return [us if us > 80 else us * scale for us in measure(program, samples)]

    monkeypatch.setattr(autotuner, "_device_times_us", slow_with_few_rows)
    assert run("double", "--shape", "16x4,64x4", "--dtype", "fp32", "--output", tmp_path / "t.json") == 0
    assert [e.bucketed for e in Table.load(tmp_path / "t.json").entries] == [(), ("m",)]
    assert "times as fast (this shape only)" in capsys.readouterr().out


def test_one_shape_that_fails_stops_no_other(gpu, tmp_path, monkeypatch, capsys):
    original = tune.tune

    def failing(tunable, shape, *rest):
        if shape == (16, 4):
            raise RuntimeError("out of memory")
        return original(tunable, shape, *rest)

    monkeypatch.setattr(tune, "tune", failing)
    assert run("double", "--dtype", "fp32", "--output", tmp_path / "t.json") == 1
    captured = capsys.readouterr()
    assert "[1/2] double 16x4 fp32: FAILED: RuntimeError: out of memory" in captured.out
    assert captured.err == "failed: double 16x4 fp32\n"
    assert [e.shape for e in Table.load(tmp_path / "t.json").entries] == [{"m": 64}]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["conv"], "unknown op 'conv'; expected some of attention, "),
        ([], "unknown op ''; expected some of attention, "),
        (["matmul", "--shape", "4x5"], "'4x5' is no shape; expected MxNxK, such as 8192x8192x8192"),
        (["matmul", "--shape", "4x5x0"], "'4x5x0' is no shape"),
        (["softmax", "--shape", "4x5,axb"], "'axb' is no shape; expected MxN"),
        (["all", "--shape", "4x5"], "--shape needs one op, not all"),
        (["softmax,nope,rms_norm"], "unknown op 'nope'; expected some of"),
        (["softmax,rms_norm", "--shape", "4x5"], "--shape needs one op, not softmax,rms_norm"),
        (["--show", "/no/such.json"], "/no/such.json: cannot be read (No such file or directory)"),
    ],
)
def test_what_it_refuses(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    assert run("matmul") == 2
    assert "tuning times kernels on an NVIDIA GPU; JAX finds none" in capsys.readouterr().err


def test_unknown_dtype(capsys):
    with pytest.raises(SystemExit):
        run("matmul", "--dtype", "int4")
    assert "unknown dtype int4" in capsys.readouterr().err


def test_a_table_of_another_gpu_is_not_touched(gpu, tmp_path, capsys):
    table(entry(), gpu="NVIDIA Other").save(tmp_path / "t.json")
    before = (tmp_path / "t.json").read_bytes()
    assert run("double", "--output", tmp_path / "t.json") == 2
    assert f"t.json is for NVIDIA Other; this is {GPU}" in capsys.readouterr().err
    (tmp_path / "t.json").write_text("{")
    assert run("double", "--output", tmp_path / "t.json") == 2
    assert "t.json: is not a JSON file" in capsys.readouterr().err
    assert before.startswith(b'{"format"')


def test_show(tmp_path, capsys):
    table(entry(), dataclasses.replace(entry(), op="rms_norm", config=None, us=12.0)).save(tmp_path / "t.json")
    assert run("--show", tmp_path / "t.json") == 0
    out = capsys.readouterr().out
    assert "| softmax_fused |  triton | float32 | m64 n100 |         12.00 |     10.00 |" in out
    assert "1.200 | block_m 2, block_n 128, num_warps 2 |" in out and "heuristic's |" in out
    assert f"{GPU}, geometric mean 1.095, from {tmp_path / 't.json'}" in out


def small(op: str) -> tunable.Sizes:
    """The sizes of a small shape of the op."""
    return tuple(min(size, 64) for size in tune.TUNABLES[op].shapes[0])


def test_every_op_with_tiles_to_choose_can_be_tuned():
    """Of the ops in one module, one at least, whose blocks the others have too."""
    functions = [f for name in ops.__all__ if inspect.isfunction(f := getattr(ops, name))]
    with_tiles = {f.__module__ for f in functions if "config" in inspect.signature(f).parameters}
    tuned = {t.call(t.dtypes[0], *small(op))[0].__module__ for op, t in tune.TUNABLES.items()}
    assert tuned == with_tiles


@pytest.mark.parametrize("op", tune.TUNABLES)
def test_every_op_has_a_kernel_that_can_be_tuned(op):
    """At a small shape; the kernel is traced, not run."""
    tuned = tune.TUNABLES[op]
    for text in map(tune.shape_text, tuned.shapes):
        assert tune.shape_text(tuned.parse(text)) == text
    sizes = small(op)
    fn, args, options = tuned.call(tuned.dtypes[0], *sizes)
    call = autotuner._Call(fn, args, options)
    problem = call.problem(tuned.kernel)
    candidates = set(problem.candidates())
    assert candidates and all(isinstance(config, problem.config) for config in candidates)
    assert isinstance(problem.heuristic(), problem.config)
    assert problem.op in op or op in problem.op
    with cuda_device(GPU, 132):
        for config in (min(candidates, key=str), max(candidates, key=str)):
            function = call.function(problem.backend, autotuner._Fixed(problem, config))
            jax.jit(function).trace(*call.arrays).lower(lowering_platforms=("cuda",))
    entry_of = {"op": problem.op, "shape": dict(problem.shape), "bucketed": problem.bucketed}
    entry_of["backend"] = problem.backend
    fn, args, options = tuned.call(tuned.dtypes[0], *tuned.smaller(sizes))
    near = autotuner._Call(fn, args, options).problem(tuned.kernel)
    if near.shape != problem.shape:  # a kernel may pad both to whole tiles
        distance = entry(dtype="any", **entry_of).distance(near.op, near.shape, "any", near.backend)
        assert 0.15 < distance < 0.9  # powers of two
    else:
        assert op == "trimul_product" and ON_HOPPER


SHIPPED = Table.load(Path(tuning.__file__).parent / "tables" / tables.file_name(GPU))


@pytest.mark.parametrize("op", ["matmul", "gated_matmul", "softmax", "layer_norm", "rms_norm"])
def test_shipped_configs_were_measured_against_the_heuristics_of_today(op, monkeypatch):
    """Tune anew after a change to a heuristic, or take what it now chooses otherwise out of the table."""
    monkeypatch.setattr(
        tunable,
        "operands",
        lambda dtype, *shapes: [jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for shape in shapes],
    )
    shipped = {entry.key: entry for entry in SHIPPED.entries if entry.op == op}
    backends = sorted({backend for _, backend, *_ in shipped})  # one of them may no longer be the default
    for shape, backend in itertools.product(tune.TUNABLES[op].shapes, backends):
        fn, args, options = tune.TUNABLES[op].call("bf16", *shape)
        with cuda_device(GPU, 132):
            problem = autotuner._Call(fn, args, options | {"implementation": backend}).problem(None)
        if found := shipped.pop(problem.key, None):  # others have the heuristic's config
            assert problem.config(**found.heuristic) == problem.heuristic(), found.shape
    assert not shipped, "entries of shapes that are not measured"
