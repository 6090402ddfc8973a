"""GPT-2 checkpoints to parameters: names, files, the tied head, the flat buffer, and errors that list all."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import weights
from pallas_models import gpt2
from pallas_models.gpt2 import GPT2Config
from parity.models.decoder_checkpoints import gpt2_json, gpt2_tensors, write
from parity.support.common import assert_close, random_params
from parity.weights import checkpoints
from parity.weights.test_weights import DTYPES, assert_trees_equal
from weights.__main__ import main

CONFIG = GPT2Config(
    vocab_size=30, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=48, max_positions=9
)
PARAMS = random_params(CONFIG, init=gpt2.init)
TENSORS = gpt2_tensors(PARAMS)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "checkpoint", TENSORS, gpt2_json(CONFIG))


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("extras", [False, True], ids=["bare", "head-and-buffers"])
@pytest.mark.parametrize("shards", [0, 3])
def test_loads(tmp_path, prefix, extras, shards):
    tensors = {prefix + name: tensor for name, tensor in TENSORS.items()}
    if extras:
        tensors["lm_head.weight"] = TENSORS["wte.weight"].copy()
        for i in range(2):
            tensors[f"{prefix}h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 9, 9), np.uint8))
            tensors[f"{prefix}h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    folder = write(tmp_path, tensors, gpt2_json(CONFIG), shards=shards)
    assert weights.load_gpt2_config(folder) == CONFIG
    assert_trees_equal(weights.load_gpt2(folder), PARAMS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_is_that_of_init(folder, dtype):
    params = weights.load_gpt2(folder, dtype=dtype)
    expected = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), CONFIG, dtype=dtype))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )


IDS = np.random.default_rng(1).integers(0, 30, (2, 9))


def of_hugging_face(folder, **changes):
    """Writes a random model with transformers, in several files; returns its logits of IDS."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    stated = gpt2_json(CONFIG) | {"n_inner": None} | changes
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**stated)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "ln_" in name and "weight" in name else 0.0, 0.1)
    model.save_pretrained(folder, max_shard_size="40KB")
    return torch_logits(folder)


def torch_logits(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.no_grad():
        return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()(torch.tensor(IDS)).logits


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"activation_function": "silu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"tie_word_embeddings": False},
        {"n_head": 8},
        {"n_head": 4, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    ],
    ids=str,
)
def test_a_checkpoint_of_hugging_face(tmp_path, change):
    """The same logits, and from what export writes of it, with its config.json and without."""
    expected = of_hugging_face(tmp_path / "theirs", **change)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    params, config = weights.load_gpt2(tmp_path / "theirs"), weights.load_gpt2_config(tmp_path / "theirs")
    assert config.intermediate_size == 256
    assert_close(gpt2.logits(params, jnp.asarray(IDS), config=config, implementation="xla"), expected, 1e-5)
    for like in (None, tmp_path / "theirs"):
        weights.export(params, tmp_path / "export", config=config, like=like)
        assert_close(torch_logits(tmp_path / "export"), expected, 1e-5)
    assert weights.load_config(weights.save(params, tmp_path / "own", config=config)) == config


def test_a_head_of_its_own_is_learned(tmp_path):
    of_hugging_face(tmp_path, tie_word_embeddings=False)
    params, config = weights.load_gpt2(tmp_path), weights.load_gpt2_config(tmp_path)
    logits = gpt2.logits(params, jnp.asarray(IDS), config=config)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), IDS[:, 1:, None], axis=-1)
    loss, gradients = jax.value_and_grad(gpt2.loss)(params, jnp.asarray(IDS), config=config)
    assert_close(loss, -jnp.mean(picked), 1e-5)
    assert gradients["head"]["kernel"].shape == (64, 30) and jnp.any(gradients["head"]["kernel"])


def test_an_old_config(tmp_path):
    """Of the first versions, which called the number of positions n_ctx."""
    stated = gpt2_json(CONFIG)
    folder = write(tmp_path, TENSORS, stated | {"n_ctx": stated.pop("n_positions")})
    assert weights.load_gpt2_config(folder) == CONFIG
    assert_trees_equal(weights.load_gpt2(folder), PARAMS)


def test_a_stored_file_of_before(tmp_path):
    """Fields that are newer than a file of `save` are what was computed then."""
    from safetensors import safe_open

    path = weights.save(PARAMS, tmp_path, config=CONFIG)
    with safe_open(path, "numpy") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    fields = json.loads(metadata["config"])
    for name in ("activation", "tie_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"):
        del fields[name]
    save_file(tensors, path, metadata | {"config": json.dumps(fields)})
    assert weights.load_config(path) == CONFIG


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_file(folder, dtype):
    torch = pytest.importorskip("torch")
    state = {name: torch.tensor(t).to(getattr(torch, dtype)) for name, t in TENSORS.items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype).astype("float32"), PARAMS)
    assert_trees_equal(weights.load_gpt2(folder), expected)


def test_a_head_of_its_own_is_refused(tmp_path):
    folder = write(tmp_path, TENSORS | {"lm_head.weight": TENSORS["wte.weight"] * 2}, gpt2_json(CONFIG))
    with pytest.raises(
        weights.CheckpointError, match=r"lm_head\.weight apart from wte\.weight; expected the same"
    ):
        weights.load_gpt2(folder)


def test_every_disagreement_of_config_and_tensors_is_listed(tmp_path):
    tensors = dict(TENSORS)
    del tensors["ln_f.bias"]
    tensors["h.0.mlp.c_fc.weight"] = tensors["h.0.mlp.c_fc.weight"].T.copy()  # as nn.Linear has it
    tensors["h.1.attn.c_attn.bias"] = np.zeros(192, np.int8)
    tensors["classifier.weight"] = np.zeros((2, 64), np.float32)
    folder = write(tmp_path, tensors, gpt2_json(CONFIG) | {"n_positions": 12})
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_gpt2(folder)
    assert [" ".join(line.split()) for line in str(error.value).splitlines()[1:]] == [
        "missing ln_f.bias (64,)",
        "unexpected classifier.weight (2, 64)",
        "misshapen h.0.mlp.c_fc.weight (48, 64); expected (64, 48)",
        "not float h.1.attn.c_attn.bias int8",
        "misshapen wpe.weight (9, 64); expected (12, 64)",
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "bert"}, "model of type 'bert'; expected 'gpt2'"),
        ({"activation_function": "mish"}, "activation_function is 'mish'; expected 'gelu' or 'gelu_python' or"),
        ({"activation_function": ["gelu"]}, "activation_function is ['gelu']; expected 'gelu' or"),
        ({"activation_function": "gelu_tanh"}, "activation_function is 'gelu_tanh'; expected 'gelu' or"),  # ours
        ({"scale_attn_by_inverse_layer_idx": 1}, "scale_attn_by_inverse_layer_idx is 1; expected true or false"),
        ({"add_cross_attention": True}, "add_cross_attention is True; expected False"),
        ({"n_embd": "64", "n_inner": None}, "n_embd is '64'; expected a positive integer"),
        ({"n_layer": 0}, "n_layer is 0; expected a positive integer"),
        ({"n_head": 5}, "hidden_size=64 is not a multiple of num_heads=5"),
        ({"layer_norm_epsilon": "tiny"}, "layer_norm_epsilon is 'tiny'; expected a positive number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_config_is_checked(tmp_path, change, message):
    folder = write(tmp_path, TENSORS, gpt2_json(CONFIG) | change)
    for load in (weights.load_gpt2, weights.load_gpt2_config):
        with pytest.raises(weights.CheckpointError, match=re.escape(message)) as error:
            load(folder)
        assert str(folder / "config.json") in str(error.value)


@pytest.mark.parametrize("change", [{}, {"n_inner": None}, {"activation_function": "gelu_pytorch_tanh"}], ids=str)
def test_configs_that_mean_the_same(tmp_path, change):
    config = GPT2Config(hidden_size=64, num_heads=2, intermediate_size=256)
    folder = write(tmp_path, {}, gpt2_json(config) | change)
    assert weights.load_gpt2_config(folder) == config


def test_save_load_and_command_line(tmp_path, folder, capsys):
    path = weights.save(PARAMS, tmp_path / "own", config=CONFIG)
    assert_trees_equal(weights.load(path), PARAMS)
    assert_trees_equal(weights.load_gpt2(path), PARAMS)
    assert weights.load_config(path) == weights.load_gpt2_config(path) == CONFIG
    assert main(["gpt2", str(folder), str(tmp_path / "converted"), "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert_trees_equal(weights.load(tmp_path / "converted"), weights.load_gpt2(folder, dtype="bfloat16"))


def test_a_stored_model_of_another_kind_is_refused(tmp_path):
    path = weights.save(PARAMS, tmp_path, config=CONFIG)
    for load in (weights.load_minilm, weights.load_minilm_config, weights.load_qwen3, weights.load_qwen3_config):
        with pytest.raises(weights.CheckpointError, match="holds a model with a GPT2Config; expected a"):
            load(path)
    bert = checkpoints.write(tmp_path / "bert")
    weights.save(weights.load_minilm(bert), tmp_path / "minilm", config=checkpoints.CONFIG)
    with pytest.raises(weights.CheckpointError, match="holds a model with a MiniLMConfig; expected a GPT2Config"):
        weights.load_gpt2(tmp_path / "minilm")


# The flat buffer


@pytest.fixture(scope="module")
def flat() -> np.ndarray:
    return np.random.default_rng(2).normal(size=gpt2.FLAT_SIZE).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_from_the_flat_buffer(flat, dtype):
    params = weights.load_gpt2_block(flat, dtype=dtype)
    expected = jax.eval_shape(lambda: gpt2.init_block(jax.random.key(0), dtype=dtype))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )
    np.testing.assert_array_equal(params["mlp"]["up"]["bias"], flat[4724736 : 4724736 + 3072])
    kernel = flat[1773312 : 1773312 + 768 * 768].reshape(768, 768).astype(dtype)
    np.testing.assert_array_equal(params["attention"]["out"]["kernel"], kernel)


def test_a_block_from_a_file(tmp_path, flat):
    flat.tofile(tmp_path / "block.bin")
    np.save(tmp_path / "block.npy", flat)
    expected = weights.load_gpt2_block(flat)
    assert_trees_equal(weights.load_gpt2_block(tmp_path / "block.bin"), expected)
    assert_trees_equal(weights.load_gpt2_block(str(tmp_path / "block.npy")), expected)


def test_a_buffer_that_is_no_block(tmp_path, flat):
    flat[:-1].tofile(tmp_path / "short.bin")
    message = r"short\.bin does not fit a block of GPT-2 small:\s+misshapen .*\(7087871,\); expected \(7087872,\)"
    with pytest.raises(weights.CheckpointError, match=message):
        weights.load_gpt2_block(tmp_path / "short.bin")
    with pytest.raises(weights.CheckpointError, match=r"the buffer does not fit .*\s+not float .* int32"):
        weights.load_gpt2_block(flat.astype(np.int32))
    with pytest.raises(TypeError, match="int8; expected float16, bfloat16 or float32"):
        weights.load_gpt2_block(flat, dtype="int8")
    with pytest.raises(FileNotFoundError):
        weights.load_gpt2_block(tmp_path / "nowhere.bin")


@pytest.mark.parametrize("keep", [0, 300, -1], ids=["empty", "in-header", "in-data"])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(weights.CheckpointError, match="truncated or corrupt") as error:
        weights.load_gpt2(folder)
    assert str(path) in str(error.value)


def test_no_files(tmp_path):
    write(tmp_path, TENSORS, gpt2_json(CONFIG))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected one of model\.safetensors, pytorch_model\.bin"):
        weights.load_gpt2(tmp_path)


def test_a_dtype_that_cannot_be_read(tmp_path):
    save_file({"x": np.zeros(2, np.uint16)}, tmp_path / "model.safetensors")
    with pytest.raises(weights.CheckpointError, match="holds x as U16, which this library cannot read"):
        weights.lazy.open_tensors(tmp_path).__enter__()
