"""Tables of tile configs, how a kernel finds its config in them, and the autotuner that makes them."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_models import ops, target, tuning
from pallas_models.kernels.mosaic import attention as mosaic_attention
from pallas_models.kernels.mosaic.common import gemm_config
from pallas_models.kernels.triton import (
    attention,
    gated_mlp,
    matmul,
    matmul_layer_norm,
    norm,
    rotary,
    softmax,
    trimul_output,
    trimul_product,
    trimul_project,
)
from pallas_models.tuning import HEURISTIC, Entry, Problem, Table, TableError, autotuner, choose
from pallas_models.tuning import table as tables
from parity import ROOT
from parity.support.common import ON_GPU, cuda_device, gpu, normal

GPU = "NVIDIA H200"
CONFIGS: dict[str, type[Any]] = {
    "matmul": matmul.Config,
    "gated_matmul": matmul.Config,
    "matmul_layer_norm": matmul.Config,
    "softmax_online": softmax.Config,
    "softmax_fused": softmax.Config,
    "layer_norm": norm.Config,
    "rms_norm": norm.Config,
    "attention": attention.Config,
    "rotary": rotary.Config,
    "trimul_project": trimul_project.Config,
    "trimul_product": trimul_product.Config,
    "trimul_output": trimul_output.Config,
}
MOSAIC_CONFIGS: dict[str, type[Any]] = {
    "matmul": gemm_config.Config,
    "gated_matmul": gemm_config.Config,
    "attention": mosaic_attention.Config,
    "trimul_product": gemm_config.Config,
}


def entry(**changes: Any) -> Entry:
    fields = dict(
        op="softmax_fused",
        dtype="float32",
        shape={"m": 64, "n": 100},
        bucketed=("m",),
        config={"block_m": 2, "block_n": 128, "num_warps": 2},
        us=10.0,
        heuristic={"block_m": 1, "block_n": 128, "num_warps": 1},
        heuristic_us=12.0,
        date="2026-11-21T03:00:00+00:00",
        versions="jax 0.11.2",
    )
    return Entry(**{**fields, **changes})


def table(*entries: Entry, gpu: str = GPU) -> Table:
    return Table(gpu=gpu, entries=entries)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty folders in place of the user's and of the shipped tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "shipped_path", lambda gpu: tmp_path / "shipped" / tables.file_name(gpu))
    tables._read.cache_clear()
    yield
    tables._read.cache_clear()


def lowered(x: jax.Array, config: Any = None, gpu: str = GPU) -> tuple[int, int]:
    """Programs and warps of softmax, lowered for a GPU."""
    with cuda_device(gpu, 132):
        traced = jax.jit(lambda x: ops.softmax(x, implementation="triton", config=config)).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = {name: int(value) for name, value in re.findall(r"(grid_x|num_warps) = (\d+)", text)}
    return found["grid_x"], found["num_warps"]


X = jax.ShapeDtypeStruct((64, 100), jnp.float32)
BY_HEURISTIC = (64, 1)


class TestTable:
    def test_round_trip(self, tmp_path):
        before = table().updated(entry(), entry(op="rms_norm"), entry(shape={"m": 8, "n": 9}, config=None))
        before.save(tmp_path / "new" / "a.json")
        after = Table.load(tmp_path / "new" / "a.json")
        assert (after.gpu, after.entries) == (before.gpu, before.entries)
        assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "a.json"]

    def test_an_entry_is_a_line(self, tmp_path):
        table(entry(), entry(op="rms_norm")).save(tmp_path / "a.json")
        lines = (tmp_path / "a.json").read_text().splitlines()
        assert [json.loads(line.strip(" ,"))["op"] for line in lines[1:-1]] == ["softmax_fused", "rms_norm"]

    def test_a_new_entry_replaces_the_old_one(self):
        found = table(entry(), entry(dtype="bfloat16")).updated(entry(us=9.0))
        assert [(e.dtype, e.us) for e in found.entries] == [("bfloat16", 10.0), ("float32", 9.0)]

    def good(self) -> dict[str, Any]:
        head = {"format": tables.FORMAT, "version": tables.VERSION, "gpu": GPU}
        return head | {"entries": [json.loads(json.dumps(dataclasses.asdict(entry())))]}

    @pytest.mark.parametrize(
        "spoil, message",
        [
            (lambda data: data.pop("format"), 'no "format": "pallas_models.tuning"'),
            (lambda data: data.update(version=99), "has version 99; this program reads version 1"),
            (lambda data: data.update(entries={}), "lacks the name of its GPU or its entries"),
            (lambda data: data.pop("gpu"), "lacks the name of its GPU or its entries"),
            (lambda data: data["entries"].append(3), "entry 2 is not valid .expected an object, got 3"),
            (lambda data: data["entries"][0].pop("us"), "entry 1 is not valid .*'us'"),
            (lambda data: data["entries"][0].update(extra=1), "entry 1 is not valid .*'extra'"),
            (
                lambda data: data["entries"][0].update(op=None),
                "op, backend, dtype, date and versions must be strings",
            ),
            (lambda data: data["entries"][0].update(shape={"m": "8"}), "shape must hold integers"),
            (lambda data: data["entries"][0].update(bucketed=["k"]), "bucketed must name sizes of the shape"),
            (lambda data: data["entries"][0].update(config=[1]), "config and heuristic must be objects"),
            (lambda data: data["entries"][0].update(us=-1.0), "us and heuristic_us must be positive numbers"),
        ],
    )
    def test_what_is_no_table_is_refused(self, tmp_path, spoil, message):
        data, path = self.good(), tmp_path / "mine.json"
        path.write_text(json.dumps(data))
        assert Table.load(path).entries == (entry(),)
        spoil(data)
        path.write_text(json.dumps(data))
        with pytest.raises(TableError, match=f"mine.json: .*{message}"):
            Table.load(path)

    @pytest.mark.parametrize("content", [b'{"format": "pallas', b"\xff\xfe", b"", b"[]"])
    def test_a_damaged_file_is_refused(self, tmp_path, content):
        (tmp_path / "mine.json").write_bytes(content)
        with pytest.raises(TableError, match=r"mine\.json: is not"):
            Table.load(tmp_path / "mine.json")
        with pytest.raises(TableError, match=r"absent\.json: cannot be read"):
            Table.load(tmp_path / "absent.json")

    def test_names(self, tmp_path):
        assert tables.cache_path("NVIDIA H100 80GB HBM3") == (
            tmp_path / "cache" / "pallas_models" / "tuning" / "nvidia-h100-80gb-hbm3.json"
        )
        assert tuning.shipped_path("NVIDIA H200").parent == Path(tuning.__file__).parent / "tables"


class TestFind:
    TABLE = table(
        entry(us=1.0, shape={"m": 8192, "n": 100}),
        entry(us=2.0, shape={"m": 7000, "n": 100}),
        entry(us=3.0, shape={"m": 1024, "n": 100}, bucketed=()),
    )

    @pytest.mark.parametrize(
        "m, us",
        [
            *((8192, 1.0), (7000, 2.0)),  # their own
            *((7900, 1.0), (11000, 1.0), (7200, 2.0), (5800, 2.0)),  # the nearest of their bucket
            *((5700, None), (11700, None), (16384, None)),  # other buckets
            *((1024, 3.0), (1025, None)),  # an entry for its own shape only
        ],
    )
    def test_rows(self, m, us):
        found = self.TABLE.find("softmax_fused", {"m": m, "n": 100}, jnp.float32)
        assert (found and found.us) == us

    def test_all_else_must_match(self):
        shape = {"m": 8192, "n": 100}
        assert self.TABLE.find("softmax_fused", shape, "float32").us == 1.0
        assert self.TABLE.find("softmax_fused", shape, jnp.float16) is None
        assert self.TABLE.find("softmax_online", shape, "float32") is None
        assert self.TABLE.find("softmax_fused", shape | {"n": 101}, "float32") is None
        assert self.TABLE.find("softmax_fused", shape | {"k": 1}, "float32") is None

    def test_lookup(self):
        table(entry()).save(tables.cache_path(GPU))
        assert tuning.lookup("softmax_fused", {"m": 60, "n": 100}, "float32", gpu=GPU) == entry()
        assert tuning.lookup("softmax_fused", {"m": 60, "n": 100}, "float32", gpu="another") is None
        assert tuning.lookup("softmax_fused", {"m": 600, "n": 100}, "float32", gpu=GPU) is None


def with_warps(num_warps: int) -> Entry:
    return entry(config={"block_m": 1, "block_n": 128, "num_warps": num_warps})


class TestPrecedence:
    """Which config a kernel gets, read from the program that it is lowered to."""

    def test_each_beats_the_next(self):
        assert lowered(X) == BY_HEURISTIC
        table(with_warps(2)).save(tables.shipped_path(GPU))
        assert lowered(X) == (64, 2)
        table(with_warps(4)).save(tables.cache_path(GPU))
        assert lowered(X) == (64, 4)
        assert lowered(X, table(with_warps(8))) == (64, 8)
        assert lowered(X, softmax.Config(block_m=4, block_n=128, num_warps=16)) == (16, 16)
        assert lowered(X, HEURISTIC) == BY_HEURISTIC

    def test_a_table_without_the_shape_leaves_it_to_the_next(self):
        table(with_warps(2)).save(tables.shipped_path(GPU))
        table(entry(shape={"m": 9999, "n": 100})).save(tables.cache_path(GPU))
        assert lowered(X, table()) == (64, 2)

    def test_an_entry_may_say_that_the_heuristic_is_best(self):
        table(with_warps(2)).save(tables.shipped_path(GPU))
        table(entry(config=None)).save(tables.cache_path(GPU))
        assert lowered(X) == BY_HEURISTIC

    def test_tables_are_those_of_the_gpu_compiled_for(self):
        table(with_warps(2)).save(tables.shipped_path(GPU))
        assert lowered(X, gpu="NVIDIA L40") == BY_HEURISTIC

    def test_no_table_applies_where_there_is_no_gpu(self):
        if not ON_GPU:
            assert target.current().name == ""
        device = AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            assert target.current().name == "" or ON_GPU

    def test_the_result_is_right_whatever_the_config(self):
        x = normal(np.random.default_rng(70), 10, 33)
        config = Table(
            gpu=GPU, entries=(entry(shape={"m": 10, "n": 33}, config=dict(block_m=4, block_n=64, num_warps=1)),)
        )
        out = ops.softmax(x, implementation="interpret", config=config)
        np.testing.assert_allclose(out, jax.nn.softmax(x), rtol=1e-5)

    def test_norms_look_up_too(self):
        config = {"block_m": 4, "block_n": 128, "num_warps": 8}
        table(*(entry(op=op, config=config) for op in ("layer_norm", "rms_norm"))).save(tables.shipped_path(GPU))
        scale = jnp.arange(100.0)
        for call in (lambda x: ops.layer_norm(x, scale, scale), lambda x: ops.rms_norm(x, scale)):
            with cuda_device(GPU, 132):
                text = jax.jit(call).trace(X).lower(lowering_platforms=("cuda",)).as_text()
            assert "num_warps = 8" in text and "grid_x = 16" in text


class TestBadTables:
    def test_a_damaged_one_in_the_cache_folder_is_left_out_with_one_warning(self):
        table(with_warps(2)).save(tables.shipped_path(GPU))
        path = tables.cache_path(GPU)
        path.parent.mkdir(parents=True)
        path.write_text("{")
        with pytest.warns(UserWarning, match=f"left out .*{re.escape(str(path))}: is not a JSON file") as seen:
            assert lowered(X) == (64, 2)
            assert lowered(jax.ShapeDtypeStruct((65, 100), jnp.float32)) == (65, 2)
        assert sum("left out" in str(warning.message) for warning in seen) == 1

    @pytest.mark.parametrize("content", ["[" * 100_000, "[" * 3000 + "]" * 3000, "[1]", "null"])
    def test_no_table_stops_an_op(self, content):
        path = tables.cache_path(GPU)
        path.parent.mkdir(parents=True)
        path.write_text(content)
        with pytest.raises(TableError, match=re.escape(str(path))):
            Table.load(path)
        with pytest.warns(UserWarning, match=f"left out a table .*{re.escape(str(path))}"):
            assert lowered(X) == BY_HEURISTIC

    @pytest.mark.parametrize("change", [{"num_stages": -1}, {"num_stages": "3"}, {"group_m": 0}, {"group_m": 1.5}])
    def test_fields_of_a_product(self, change):
        self.check_product(matmul.Config, "triton", change, "expected an integer from 1 to")

    @pytest.mark.parametrize("change", [{"ping_pong": 1}, {"num_slots": 0}])
    def test_fields_of_a_product_in_mosaic(self, change):
        self.check_product(
            gemm_config.Config, "mosaic", change, "expected an integer from 1 to|expected true or false"
        )

    def test_more_shared_memory_than_there_is(self):
        self.check_product(matmul.Config, "triton", {"block_m": 256, "num_stages": 16}, "bytes of shared memory")

    def check_product(self, kind: type[Any], backend: str, change: dict[str, Any], message: str) -> None:
        """The entry is used as it is, and left out with a warning once it is changed."""
        fields = {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 3}
        fields |= {"num_warps": 4} if backend == "triton" else {"ping_pong": False}
        problem: Problem[Any] = Problem(
            backend=backend,
            op="matmul",
            shape={"m": 256},
            bucketed=(),
            dtype="float16",
            config=kind,
            heuristic=lambda: kind(**fields),
            candidates=tuple,
            shared_memory=lambda config: (
                (config.block_m + config.block_n) * config.block_k * 2 * config.num_stages
            ),
        )
        gpu = target.Target(name=GPU, capability=(9, 0), num_cores=132, shared_memory=232_448)
        for config in (fields, fields | change):
            found = entry(
                op="matmul", backend=backend, dtype="float16", shape={"m": 256}, bucketed=(), config=config
            )
            table(found).save(tables.cache_path(GPU))
            if config == fields:
                assert choose(None, problem, gpu) == kind(**fields)
            else:
                with pytest.warns(UserWarning, match=f"left out a tuned config: .*({message})"):
                    assert choose(None, problem, gpu) == problem.heuristic()
                with pytest.raises(TableError, match=message):
                    choose(table(found), problem, gpu)

    def test_every_shipped_entry_is_used(self):
        for path in Path(tables.__file__).parent.glob("tables/*.json"):
            for found in Table.load(path).entries:
                kind = (CONFIGS if found.backend == "triton" else MOSAIC_CONFIGS)[found.op]
                problem: Problem[Any] = Problem(
                    backend=found.backend, op=found.op, shape=found.shape, bucketed=found.bucketed,
                    dtype=found.dtype, config=kind, heuristic=lambda: None, candidates=tuple,
                )  # fmt: skip
                assert table(found).choose(problem) == (kind(**found.config) if found.config else None)

    def test_a_foreign_one_is_left_out(self):
        table(with_warps(2), gpu="NVIDIA Other").save(tables.cache_path(GPU))
        with pytest.warns(UserWarning, match=f"is for 'NVIDIA Other', not {GPU}"):
            assert lowered(X) == BY_HEURISTIC

    @pytest.mark.parametrize(
        "config, message",
        [
            ({"block_m": 3, "block_n": 128, "num_warps": 1}, "block_m=3 must be a power of two"),
            ({"block_m": 2, "no_such_field": 1}, "no_such_field"),
            (
                {"block_m": 1, "block_n": 2**20, "num_warps": 1},
                "block_n is 1048576; expected an integer from 1 to",
            ),
            ({"block_m": 1, "block_n": 128, "num_warps": 64}, "num_warps is 64; expected an integer from 1 to 32"),
            ({"block_m": None, "block_n": 128, "num_warps": 1}, "block_m is None; expected an integer"),
            ({"block_m": 1, "block_n": 128, "num_warps": 1, "splits": 1.5}, "splits is 1.5; expected an integer"),
            ({"block_m": 1, "block_n": "128", "num_warps": 1}, "block_n is '128'; expected an integer"),
            ({"block_m": True, "block_n": 128, "num_warps": 1}, "block_m is True; expected an integer"),
        ],
    )
    def test_a_config_of_another_version(self, config, message):
        other = table(entry(config=config))
        with pytest.raises(TableError, match=f"softmax_fused .m 64, n 100. in float32 does not fit .*{message}"):
            lowered(X, other)
        other.save(tables.cache_path(GPU))
        with pytest.warns(UserWarning, match=f"left out a tuned config: .*{message}"):
            assert lowered(X) == BY_HEURISTIC

    def test_a_config_of_another_kind(self):
        config = norm.Config(block_m=1, block_n=128, num_warps=1)
        expected = r"expected .*row_config\.Config or .*softmax\.Config, a tuning\.Table or None"
        with pytest.raises(TypeError, match=f"config is a Config; {expected}"):
            ops.softmax(jnp.ones((2, 3)), config=config, implementation="interpret")


@dataclasses.dataclass(frozen=True)
class Tile:
    block: int
    wrong_by: float = 0.0
    breaks: bool = False


def double(x, offset=None, *, factor=2.0, config=None, implementation=None, configs=(), size=None):
    """An op without a kernel, to tune: x * factor, or something wrong if its config says so."""
    if implementation == "xla":
        return x * factor
    problem = Problem(
        backend="triton",
        op="double",
        shape={"m": x.shape[0]},
        bucketed=("m",),
        dtype=x.dtype,
        config=Tile,
        heuristic=lambda: Tile(1),
        candidates=lambda: configs,
        shared_memory=size,
    )
    config = choose(config, problem, target.current())
    if config.breaks:
        raise RuntimeError("RESOURCE_EXHAUSTED: shared memory\nand more")
    return (x * factor).at[0].add(config.wrong_by)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Microseconds of each config, in place of a GPU's; a config that is not in it takes 100."""
    found: dict[Any, float] = {}
    config_of: dict[Any, Any] = {}
    rng = np.random.default_rng(71)
    compile_call = autotuner._Call.compile

    def compile_and_note(self, implementation, config):
        program = compile_call(self, implementation, config)
        config_of[program] = getattr(config, "config", None)
        return program

    def measure(program: Any, samples: int) -> list[float]:
        return list(found.get(config_of[program], 100.0) * rng.uniform(0.99, 1.01, samples))

    monkeypatch.setattr(autotuner._Call, "compile", compile_and_note)
    monkeypatch.setattr(autotuner, "_device_times_us", measure)
    monkeypatch.setattr(autotuner, "_BUSY_S", 0.0)
    monkeypatch.setattr(target, "_local", gpu)
    return found


@pytest.fixture
def tune(times) -> Callable[..., tuning.Result]:
    """`autotune` of `double` with some configs."""
    x = normal(np.random.default_rng(72), 64)
    return lambda *configs, **options: tuning.autotune(double, x, configs=configs, implementation="any", **options)


class TestAutotune:
    def test_the_fastest_wins(self, tune, times):
        times.update({Tile(2): 90.0, Tile(4): 50.0, Tile(8): 70.0})
        result = tune(Tile(2), Tile(4), Tile(8))
        assert result.config == Tile(4)
        assert result.best.us == pytest.approx(50.0, rel=0.01)
        assert result.heuristic.us == pytest.approx(100.0, rel=0.01)
        assert {trial.config for trial in result.trials} == {Tile(1), Tile(2), Tile(4), Tile(8)}
        found = result.entry
        assert (found.op, found.dtype, found.shape, found.bucketed) == ("double", "float32", {"m": 64}, ("m",))
        assert found.config == {"block": 4, "wrong_by": 0.0, "breaks": False}
        assert found.speedup == pytest.approx(2.0, rel=0.02)
        assert f"jax {jax.__version__}" in found.versions

    @pytest.mark.parametrize("us, kept", [(99.5, True), (98.5, True), (97.0, False)])
    def test_the_heuristic_stays_within_the_noise(self, tune, times, us, kept):
        times[Tile(2)] = us
        result = tune(Tile(2))
        assert result.config == (Tile(1) if kept else Tile(2))
        assert (result.entry.config is None) == kept

    def test_a_lucky_first_measurement_does_not_decide(self, tune, times, monkeypatch):
        times[Tile(2)] = 80.0
        measure, calls = autotuner._device_times_us, []

        def lucky(program, samples):
            calls.append(samples)
            if samples == autotuner._FIRST_SAMPLES:
                return [1.0] * samples
            return [100.0] * samples

        monkeypatch.setattr(autotuner, "_device_times_us", lucky)
        assert tune(Tile(2)).config == Tile(1)
        assert len(calls) > 2 and measure is not lucky

    def test_a_wrong_result_never_wins(self, tune, times):
        times.update({Tile(2, wrong_by=0.01): 10.0, Tile(4, wrong_by=float("nan")): 10.0, Tile(8): 50.0})
        result = tune(Tile(2, wrong_by=0.01), Tile(4, wrong_by=float("nan")), Tile(8))
        assert result.config == Tile(8)
        failures = {trial.config.block: trial.failure for trial in result.trials}
        assert failures[1] == failures[8] == ""
        assert "its output is off by" in failures[2] and "off by nan" in failures[4]
        assert tune(Tile(2, wrong_by=0.01), tolerance=0.5).config == Tile(2, wrong_by=0.01)

    def test_one_wrong_element_among_many_counts(self):
        expected = normal(np.random.default_rng(79), 1 << 16)
        assert autotuner._error(expected, expected) == 0
        one_off = expected.at[77].add(1e-3)
        assert np.linalg.norm(one_off - expected) < 0.5e-5 * np.linalg.norm(expected)
        assert autotuner._error(one_off, expected) > 1e-5
        infinite = expected.at[3].set(-jnp.inf)  # such as the log-sum-exp of no keys
        assert autotuner._error(infinite, infinite) == 0
        assert not autotuner._error(infinite, expected) <= 1.0

    @pytest.mark.parametrize("spread, faster", [(1.0, True), (8.0, False)])
    def test_samples_that_overlap_decide_nothing(self, spread, faster):
        samples = np.linspace(-spread, spread, 20)
        slow, fast = (autotuner.Trial(config=None, samples_us=list(us + samples)) for us in (100.0, 95.0))
        assert fast.is_faster(slow) == faster
        assert not slow.is_faster(fast) and not autotuner.Trial(config=None).is_faster(slow)

    def test_one_that_does_not_compile_stops_no_other(self, tune, times):
        times[Tile(4)] = 50.0
        result = tune(Tile(2, breaks=True), Tile(4))
        assert result.config == Tile(4)
        assert [t.failure for t in result.trials if t.config.breaks] == [
            "RuntimeError: RESOURCE_EXHAUSTED: shared memory"
        ]
        assert "failed: Tile(block=2" in result.summary()

    def test_what_does_not_fit_in_shared_memory_is_not_compiled(self, tune, times):
        big = Tile(1 << 20, breaks=True)
        result = tune(Tile(2), big, size=lambda config: config.block)
        assert result.pruned == 1 and big not in {trial.config for trial in result.trials}

    def test_the_heuristic_must_be_right_itself(self, times):
        x = normal(np.random.default_rng(73), 64)

        def wrong(x, *, config=None, implementation=None):
            return double(
                x, config=config, implementation=implementation, factor=2 if implementation == "xla" else 3
            )

        with pytest.raises(
            ValueError, match=r"double .m 64. in float32: the heuristic's Tile.block=1.* failed: its"
        ):
            tuning.autotune(wrong, x, implementation="any")

    def test_time_limit(self, tune, times):
        result = tune(*(Tile(2 + i) for i in range(5)), seconds=0.0)
        assert result.config == Tile(1)
        assert all("not begun within 0 s" in trial.failure for trial in result.trials[1:])

    def test_given_candidates(self, tune, times):
        times.update({Tile(2): 50.0, Tile(3): 60.0})
        assert tune(Tile(2), candidates=[Tile(3)]).config == Tile(3)

    def test_arrays_among_the_options_are_operands(self, times, monkeypatch):
        x = normal(np.random.default_rng(74), 64)
        seen = []
        monkeypatch.setattr(autotuner, "_keep_busy", lambda program: seen.append(program.args))
        tuning.autotune(double, x, offset=x, implementation="any")
        assert seen == [((x,), {"offset": x})]

    def test_save(self, tune, times, tmp_path):
        times[Tile(2)] = 50.0
        result = tune(Tile(2))
        assert result.save() == tables.cache_path(GPU)
        (saved,) = Table.load(tables.cache_path(GPU)).entries
        assert saved == dataclasses.replace(result.entry, date=saved.date)  # a second may have gone by
        assert tuning.lookup("double", {"m": 64}, "float32", gpu=GPU) == saved
        table(entry()).save(tmp_path / "other.json")
        result.save(tmp_path / "other.json")
        assert {e.op for e in Table.load(tmp_path / "other.json").entries} == {"double", "softmax_fused"}
        table(entry(), gpu="NVIDIA Other").save(tmp_path / "foreign.json")
        with pytest.raises(ValueError, match=f"foreign.json is for NVIDIA Other; these times are of {GPU}"):
            result.save(tmp_path / "foreign.json")

    def test_a_saved_config_is_used_by_what_is_traced_next(self, times):
        x = normal(np.random.default_rng(75), 64, 100)
        best = softmax.Config(block_m=8, block_n=128, num_warps=4)
        times[best] = 20.0
        result = tuning.autotune(ops.softmax, x, implementation="interpret", scale=0.5)
        assert result.config == best and len(result.trials) > 10
        assert lowered(X) == BY_HEURISTIC
        result.save()
        assert lowered(X) == (8, 4)
        assert "softmax_fused (m 64, n 100) in float32" in result.summary()
        assert "best" in result.summary() and "heuristic" in result.summary()

    def test_not_an_op(self):
        x = jnp.ones((2, 3))
        with pytest.raises(TypeError, match="fn takes no config and no implementation"):
            autotuner._Call(jnp.sin, (x,), {})

    def test_an_op_whose_kernel_asks_no_table(self, times):
        def plain(x, *, config=None, implementation=None):
            return x

        with pytest.raises(ValueError, match="the kernels of this call that can be: none"):
            tuning.autotune(plain, normal(np.random.default_rng(76), 4))

    def test_several_kernels(self, times):
        def both(x, *, config=None, implementation=None, configs=()):
            if implementation != "xla":
                double(x, config=config, implementation=implementation)
            return double(x[:32], config=config, implementation=implementation)

        x = normal(np.random.default_rng(77), 64)
        with pytest.raises(ValueError, match=r"op=None does not tell .* double .m 32. .*, triton double .m 64. "):
            tuning.autotune(both, x, implementation="any")

    @pytest.mark.skipif(ON_GPU, reason="this process has a GPU")
    def test_no_gpu(self):
        with pytest.raises(RuntimeError, match="times kernels on a CUDA device; JAX finds none"):
            tuning.autotune(ops.softmax, jnp.ones((2, 3)))

    @pytest.mark.skipif(not ON_GPU, reason="times kernels on a CUDA device")
    def test_on_a_gpu(self):
        x = normal(np.random.default_rng(78), 4096, 1024, dtype="bfloat16")
        result = tuning.autotune(ops.softmax, x)
        timed = [trial for trial in result.trials if not trial.failure]
        assert len(timed) > 10
        assert all(0.5 < trial.us < 1000 for trial in timed)
        assert result.best.us <= result.heuristic.us


class TestShipped:
    """The tables in this package, which the kernels of this version must be able to use."""

    PATHS = sorted(tuning.shipped_path("").parent.glob("*.json"))

    @pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
    def test_every_entry_fits_its_kernel(self, path):
        found = Table.load(path)
        assert path.name == tables.file_name(found.gpu)
        assert found.entries
        for e in found.entries:
            if e.config is not None:
                (CONFIGS if e.backend == "triton" else MOSAIC_CONFIGS)[e.op](**e.config)
                assert e.speedup > 1 + autotuner.MIN_GAIN / 2
            else:
                assert e.us == e.heuristic_us

    def test_the_wheel_has_them(self, tmp_path):
        wheel = pytest.importorskip("hatchling.builders.wheel")
        import zipfile

        (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        assert self.PATHS and {f"pallas_models/tuning/tables/{path.name}" for path in self.PATHS} <= set(names)
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        assert b"\nAuthor: The pallas_models developers\n" in archive.read(metadata)


class TestSearchSpaces:
    @pytest.mark.parametrize("m, n", [(1, 1), (3, 100), (8192, 384), (65536, 4096), (2048, 65536), (1, 1 << 20)])
    def test_rows(self, m, n):
        algorithm = softmax.fastest(n)
        for configs in (list(softmax.configs(m, n, algorithm)), list(norm.configs(m, n))):
            assert len(configs) == len(set(configs)) <= 250
        assert all(c.block_n >= n for c in softmax.configs(m, n, "fused")) or n > 32768

    @pytest.mark.parametrize("m, n, k", [(1, 1, 1), (16, 384, 384), (8192, 1152, 384), (8192, 24576, 4096)])
    @pytest.mark.parametrize("kernel", [matmul, gated_mlp, matmul_layer_norm])
    def test_products(self, kernel, m, n, k):
        configs = list(kernel.configs(m, n, k, 132))
        assert 0 < len(configs) == len(set(configs)) <= 260
        fitting = [config for config in configs if kernel.shared_memory(config, 2) <= 99 * 1024]
        assert fitting and (min(m, n, k) < 64 or len(fitting) < len(configs))  # an RTX 4090 cannot hold them all

    @pytest.mark.parametrize(
        "shape, tiles",
        [
            ((8192, 8192, 8192), (128, 256, 64, 8, 3)),
            ((8192, 24576, 4096), (128, 256, 64, 8, 3)),
            ((8192, 1152, 384), (128, 128, 64, 4, 2)),
            ((8192, 1152, 384), (128, 128, 32, 4, 3)),
            ((8192, 384, 1536), (256, 128, 64, 8, 3)),
            ((8192, 384, 1536), (64, 128, 64, 4, 3)),
            ((1024, 3072, 768), (128, 256, 64, 8, 3)),
            ((1024, 768, 3072), (64, 128, 64, 4, 4)),
        ],
    )
    def test_what_was_tried_by_hand_is_among_them(self, shape, tiles):
        fields = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
        assert matmul.Config(**dict(zip(fields, tiles, strict=True))) in set(matmul.configs(*shape, 132))

    def test_a_product_and_norm_may_be_one_kernel_or_two(self):
        configs = set(matmul_layer_norm.configs(1024, 384, 1536, 132))
        assert {config.block_n >= 384 for config in configs} == {True, False}
        assert {1, 4} <= {config.splits for config in configs}
        assert {config.splits for config in gated_mlp.configs(1024, 768, 3072, 132)} == {1}  # it splits nothing

    def test_shared_memory_is_that_of_the_tiles_in_flight(self):
        config = matmul.Config(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3)
        assert matmul.shared_memory(config, 2) == 3 * (128 * 64 + 64 * 256) * 2
        assert gated_mlp.shared_memory(config, 2) == 3 * (128 * 64 + 2 * 64 * 256) * 2

    def test_they_are_small_enough_to_search_in_seconds(self):
        assert len(list(softmax.configs(8192, 4096, "fused"))) in range(8, 40)
        assert len(list(norm.configs(8192, 4096))) in range(8, 40)
