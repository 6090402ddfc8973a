"""Parts of a campaign that draw how people use ops, models, encoders and jobs: what they draw, and notice."""

import importlib
import importlib.util
import inspect
import itertools
import json
import os

import jax
import numpy as np
import pytest

import pallas_models.ops
from parity.campaign import __main__ as campaign
from parity.campaign import encoders, exports, folders, jobs, ops, shardings, transformations
from parity.cases import OPS
from parity.support import draws
from parity.support.bounded import apart
from parity.support.draws import Pick

MODULES = [encoders, exports, folders, jobs, shardings, transformations]
needs_models = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch or transformers is not installed: models are compared with them",
)


def names(module, seed: int, count: int) -> list[str]:
    return [case.name for case in itertools.islice(module.cases(seed), count)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_case_depends_on_its_seed_and_number_alone(module):
    assert names(module, 3, 20) == names(module, 3, 40)[:20] != names(module, 4, 20)


@needs_models
def test_odd_configs_are_drawn_by_seed_and_number():
    models = importlib.import_module("parity.campaign.models")
    drawn = [models.draw(3, i) for i in range(200)]
    assert drawn == [models.draw(3, i) for i in range(200)] != [models.draw(4, i) for i in range(200)]
    assert {kind for kind, *_ in drawn} == set(models.KINDS)


def test_ops_with_kernels_for_hopper_are_those_that_have_records_of_them():
    assert {"matmul", "attention_qkv", "mlp", "matmul_layer_norm", "post_norm_mlp"} <= set(ops.MOSAIC)
    drawn = [ops.program(5, i, "mosaic") for i in range(300)]
    assert {p.op for p in drawn} == set(ops.MOSAIC)


@pytest.mark.parametrize("op", ops.DRAWN)
def test_calls_that_are_drawn_have_all_that_an_op_asks_for(op):
    """One that leaves out an argument fails, and looks as if the op had."""
    called = [inspect.signature(f) for f in (getattr(pallas_models.ops, op), OPS[op].formula)]
    for i in range(100):
        inputs, options = ops.DRAWN[op](Pick(np.random.default_rng(i)), "bfloat16", i % 2 == 1)
        for signature, more in zip(called, (dict(implementation=None), dict(dtype="bfloat16")), strict=True):
            signature.bind(**inputs, **options, **more)


def test_transformations_of_all_ops_under_all_settings_are_drawn():
    drawn = [transformations.program(1, i) for i in range(1500)]
    assert {kind for p in drawn for kind, _ in p.steps} == set(transformations.KINDS)
    assert {name for p in drawn for name in p.settings} == set(transformations.SETTINGS)
    rows = {p.call.row for p in drawn}
    assert rows > set(ops.DRAWN) and {"gpt2.loss", "contrastive", "modernbert"} < rows
    assert {p.orders for p in drawn} == {0, 1, 2} and {p.jit for p in drawn} == {True, False}


def first(seed: int, kind: str, op: str) -> int:
    """The number of a program of that op in float32, under that transformation alone."""

    def wanted(p: transformations.Program) -> bool:
        drawn = (p.call.row, p.call.dtype, [name for name, _ in p.steps])
        return drawn == (op, "float32", [kind]) and p.jit and not p.settings

    return draws.first(lambda i: transformations.program(seed, i, "xla"), wanted)


@pytest.mark.parametrize("name", transformations.MODEL_NAMES)
def test_every_model_is_called(name):
    index = draws.first(lambda i: transformations.program(1, i), lambda p: p.call.row == name)
    call = transformations.program(1, index).call
    floats, rest = call.arrays(np.random.default_rng(0))
    assert all(np.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(call.of("xla"), floats, rest)))


BREAKS = [("vmap", "softmax"), ("grad", "rms_norm"), ("scan", "mean_pool")]


@pytest.mark.parametrize("kind, op", BREAKS)
def test_a_program_of_each_break_is_drawn_at_the_sizes_of_a_gpu(monkeypatch, kind, op):
    monkeypatch.setattr(draws, "ON_GPU", True)
    assert first(0, kind, op) >= 0


@pytest.mark.parametrize("kind, op", BREAKS)
def test_a_break_under_a_transformation_is_found(monkeypatch, kind, op):
    index = first(0, kind, op)
    trial = transformations._Trial(0, index * transformations.DRAWS, "xla", {})
    transformations._compiled.cache_clear()
    assert trial() is None
    transformations._compiled.cache_clear()
    p, function, *references = transformations._compiled(0, index, "xla")
    broken = lambda floats, rest: jax.tree.map(lambda x: x * 1.1, function(floats, rest))  # noqa: E731
    monkeypatch.setattr(transformations, "_compiled", lambda *_: (p, broken, *references))
    assert "is off by" in (trial() or "")


def test_what_is_apart():
    expected = [np.arange(1.0, 9.0), np.array([np.nan, np.inf, 1.0])]
    assert apart([x.astype(np.float32) for x in expected], expected, 1e-6, 0.0) == (None, 0.0)
    assert apart(np.zeros((0, 3)), np.zeros((0, 3)), 1e-6, 0.0) == (None, 0.0)
    for wrong, message in (
        ([expected[0] * (1 + 1e-4), expected[1]], "result 0 of \\(8,\\) is off by"),
        ([expected[0], np.array([1.0, np.inf, 1.0])], "result 1 holds"),
        ([expected[0], np.array([np.nan, -np.inf, 1.0])], "result 1 holds"),
        ([expected[0], np.array([np.nan, np.inf, np.nan])], "result 1 of \\(3,\\) is off by nan"),
        ([expected[0][:7], expected[1]], "shapes are"),
        (expected[:1], "shapes are"),
    ):
        found, part = apart(wrong, expected, 1e-6, 0.0)
        assert part == np.inf
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(found)
    large = np.array([1e5, 1.0] * 4)  # float16 holds the half of it
    with np.errstate(over="ignore"):
        assert apart(large.astype(np.float16), large, 1e-3, 0.0)[0] is None
    assert apart(np.float32([np.inf, 1.0] * 4), large, 1e-3, 0.0)[0]
    moved = [expected[0] * (1 + 1e-4), expected[1]]  # a hundred times what is allowed, as operands move it
    assert apart([expected[0] * (1 + 2e-4), expected[1]], expected, 1e-6, 0.0, moved)[0] is None


def test_operands_are_spread_in_every_way():
    found = [shardings.spread(1, i, shardings.call(1, i // shardings.DRAWS)[0]) for i in range(600)]
    assert {tuple(s.mesh.items()) for s in found} == {tuple(mesh.items()) for mesh in shardings.MESHES}
    split = [axes for s in found for spec in s.specs.values() for axes in spec]
    assert {None, "a", "b", ("a", "b"), ("b", "a")} == set(split)
    for i, s in enumerate(found):  # each as often as devices divide it
        p, _ = shardings.call(1, i // shardings.DRAWS)
        for name, spec in s.specs.items():
            for size, axes in zip(p.inputs[name].shape, spec, strict=True):
                parts = [s.mesh[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())]
                assert size % int(np.prod(parts)) == 0


def test_every_model_that_is_exported_can_be_called():
    picks = (Pick(np.random.default_rng([3, i])) for i in range(150))
    drawn = {(one.name, len(one.arrays)): one for one in map(exports._model, picks)}
    assert {name for name, _ in drawn} == set(exports.MODELS)
    assert {("modernbert", 1), ("modernbert", 2)} <= set(drawn)
    for one in drawn.values():
        jax.eval_shape(one.function, *one.arrays)


def test_symbols_stand_for_batches_and_lengths():
    drawn = [exports.program(1, i) for i in range(150)]
    symbols = [{name for names in p.axes for name in names if name} for p in drawn]
    assert {"b"} in symbols and {"s"} in symbols and {"b", "s"} in symbols
    p = next(p for p in drawn if p.name == "gpt2.logits" and p.axes[0] == ("b", "s"))
    (gated,) = {p.axes[2] for p in drawn if p.name == "gated_matmul"}
    assert gated == ("", "")  # gate and up are no batch of two
    (ids, *_) = p.sized({"b": 3, "s": 5, "t": 1})
    assert ids.shape == (3, 5)
    np.testing.assert_array_equal(ids[2], ids[0])


def test_an_artefact_is_held_to_the_function(monkeypatch):
    index = draws.first(lambda i: exports.program(2, i), lambda p: p.name == "rms_norm")
    exports._artefact.cache_clear()
    trial = exports._Trial(2, index * exports.DRAWS, {})
    assert trial() is None
    p, artefact, function = exports._artefact(2, index)
    other = lambda *arrays: jax.tree.map(lambda x: x * 1.01, function(*arrays))  # noqa: E731
    monkeypatch.setattr(exports, "_artefact", lambda *_: (p, artefact, other))
    assert "is off by" in (trial() or "")


@pytest.fixture(scope="module")
def right() -> encoders.Call:
    return encoders.Call("encode", True, "list", ["a man", "", "the guitar"], {"normalize_embeddings": True}, ())


def test_calls_of_an_encoder_are_held_to_a_loop(monkeypatch, right):
    monkeypatch.setattr(encoders, "call", lambda *_: right)
    assert encoders._Trial(0, 1)() is None
    expected = encoders._expected(right)
    assert expected.shape == (3, encoders.WIDTH)
    assert "is off by" in (encoders._checked(right, expected[::-1].astype(np.float32)) or "")
    assert "a list, expected ndarray" in (encoders._checked(right, list(expected)) or "")
    assert "float64, expected float32" in (encoders._checked(right, expected) or "")


@pytest.mark.parametrize(
    "options, wrong, message",
    [
        ({"batch_size": 0}, ("batch_size",), None),
        ({"batch_size": 0}, ("truncate_dim",), "names none of"),
        ({"batch_size": 2}, ("batch_size",), "are taken"),
    ],
)
def test_arguments_of_an_encoder_are_refused_by_name(monkeypatch, options, wrong, message):
    made = encoders.Call("encode", True, "list", ["a man", "the"], options, wrong)
    monkeypatch.setattr(encoders, "call", lambda *_: made)
    found = encoders._Trial(0, 1)()
    assert found is None if message is None else message in (found or "")


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantized_embeddings_are_held_to_a_loop(precision):
    from pallas_models.quantization import quantize_embeddings

    expected = np.random.default_rng(1).normal(size=(9, 16))
    out = quantize_embeddings(expected.astype(np.float32), precision)
    assert encoders._quantized(out, expected, precision) is None
    assert encoders._quantized(out[::-1], expected, precision)


def test_hostile_folders_are_the_same_each_time(tmp_path):
    manifest = {"model": {"name": "a"}, "ranges": [[0.0] * 32, [1.0] * 32], "shards": [], "complete": True}
    for change in (folders.change_manifest, folders.change_ranges):
        kinds = set()
        for number in range(30):
            found = []
            for attempt in range(2):
                folder = tmp_path / f"{change.__name__}-{number}-{attempt}"
                folder.mkdir()
                (folder / "manifest.json").write_text(json.dumps(manifest))
                for shard in range(3):
                    (folder / f"{shard:06d}.npy").write_bytes(b"x")
                what = change(np.random.default_rng(number), folder)
                found.append((what, {path.name: path.read_bytes() for path in folder.iterdir()}))
            assert found[0] == found[1]
            kinds.add(found[0][0])
        assert len(kinds) > 15


def test_hostile_caches_are_of_every_kind(tmp_path):
    kinds = set()
    for number in range(60):
        folder = tmp_path / str(number) / "folder"
        folder.mkdir(parents=True)
        (folder / "0.executable").write_bytes(b"a program")
        kinds.add(folders.change_cache(np.random.default_rng(number), folder))
    assert {"folder for all", "file for the group", "links to a file", "links to a planted file"} < kinds
    assert {"entries: pipe", "entries: damaged"} < kinds


def test_a_planted_program_leaves_a_mark(tmp_path):
    import pickle

    folders._plant(tmp_path / "entry", tmp_path / "mark")
    pickle.loads((tmp_path / "entry").read_bytes()[32:])
    assert (tmp_path / "mark").is_dir()


@pytest.mark.parametrize(
    "low, high, sound",
    [(-1.0, 1.0, True), (1.0, -1.0, False), (-np.inf, 1.0, False), (0.0, np.nan, False), (0.0, 1e30, False)],
)
def test_what_ranges_may_be(low, high, sound):
    width = folders.MODEL.hidden_size
    assert (folders._unsound([[low] * width, [high] * width]) is None) == sound


def test_what_jobs_may_leave():
    alone = {"000000.npy": b"a", "manifest.json": b"b"}
    assert jobs._different(alone | {".lock": b""}, alone) is None
    for found in (alone | {"000000.npy": b"c"}, {"000000.npy": b"a"}, alone | {".0123456789abcdef.draft": b""}):
        assert jobs._different(found, alone)


def test_signals_and_pairs_of_jobs_are_drawn():
    drawn = names(jobs, 1, 200)
    for word in ("SIGINT", "SIGTERM", "later", "which compiles", "apart", "that is there"):
        assert any(word in name for name in drawn)
    for variant in jobs.VARIANTS:
        assert any(variant in name for name in drawn)


EIGHT = "--xla_force_host_platform_device_count=8"
PART = """
import os
from parity.campaign._case import Case
{}
def cases(seed):
    yield Case("the environment", lambda: f"{{os.environ.get('OF_A_PART')}} {{os.environ.get('XLA_FLAGS')}}")
"""


def test_parts_have_their_environment_and_what_they_need(monkeypatch, tmp_path):
    for name, text in (("own_part", ""), ("plain_part", ""), ("absent_part", "import a_package_that_nobody_has")):
        (tmp_path / f"{name}.py").write_text(PART.format(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(campaign, "_ENVIRONMENTS", {"own": {"OF_A_PART": "1", "XLA_FLAGS": EIGHT}})
    monkeypatch.setenv("XLA_FLAGS", "")
    parts = {"own": "own_part", "plain": "plain_part", "absent": "absent_part"}
    report = campaign.run(parts, 0, cases=1, workers=1)
    assert {f.part: f.message for f in report.failures} == {"own": f"1 {EIGHT}", "plain": "None "}
    assert report.cases == {"own": 1, "plain": 1}
    assert "absent: left out, No module named 'a_package_that_nobody_has'" in report.summary()
    assert os.environ.get("OF_A_PART") is None


def test_flags_are_added_to_those_that_there_are(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    with campaign._environment({"XLA_FLAGS": EIGHT, "OF_A_PART": "1"}):
        assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {EIGHT}" and os.environ["OF_A_PART"] == "1"
    assert os.environ["XLA_FLAGS"] == "--xla_a=1" and "OF_A_PART" not in os.environ


def test_a_report_holds_what_no_encoding_has(monkeypatch, tmp_path, capsys):
    failure = campaign.Failure("ops", 0, "name = \ud800", "wrong", "again")
    monkeypatch.setattr(
        campaign, "run", lambda *_, **__: campaign.Report(campaign.collections.Counter(ops=1), [failure])
    )
    assert campaign.main(["--cases", "1", "--output", str(tmp_path)]) == 1
    assert "name = \\ud800" in capsys.readouterr().out
    assert "name = \\ud800" in (tmp_path / "campaign.md").read_text()
