"""Qwen3 checkpoints to parameters: names, shards and their index, memory, and errors that list everything."""

import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weights
from pallas_models import qwen3
from pallas_models.qwen3 import Qwen3Config
from parity.models.decoder_checkpoints import qwen3_json, qwen3_tensors, write
from parity.support.common import assert_close, random_params
from parity.weights.test_weights import DTYPES, assert_trees_equal
from weights import families
from weights.__main__ import main

CONFIG = Qwen3Config(
    vocab_size=30,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=40,
    max_positions=64,
)
TIED = Qwen3Config(
    vocab_size=20,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    tie_embeddings=True,
)
PARAMS = random_params(CONFIG, init=qwen3.init)
TENSORS = qwen3_tensors(PARAMS, CONFIG)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "checkpoint", TENSORS, qwen3_json(CONFIG), shards=3)


def load(folder, **options):
    return weights.load_qwen3(folder, dtype="float32", **options)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("shards", [0, 1, 4])
def test_loads(tmp_path, prefix, shards):
    tensors = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in TENSORS.items()}
    folder = write(tmp_path, tensors, qwen3_json(CONFIG), shards=shards)
    assert weights.load_qwen3_config(folder) == CONFIG
    assert_trees_equal(load(folder), PARAMS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_is_that_of_init(folder, dtype):
    params = weights.load_qwen3(folder, dtype=dtype)
    expected = jax.eval_shape(lambda: qwen3.init(jax.random.key(0), CONFIG, dtype=dtype))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )


def test_bfloat16_in_and_out(tmp_path):
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in TENSORS.items()}
    folder = write(tmp_path, tensors, qwen3_json(CONFIG))
    params = weights.load_qwen3(folder)  # bfloat16 unless asked otherwise
    kernel = params["layers"]["1"]["mlp"]["gate_up"]["kernel"]
    assert kernel.dtype == "bfloat16"
    np.testing.assert_array_equal(kernel[:, 1], tensors["model.layers.1.mlp.up_proj.weight"].T)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_hugging_face(tmp_path, tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**qwen3_json(CONFIG) | {"tie_word_embeddings": tied, "rope_theta": 5e3})
    model = transformers.Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).is_file()
    ids = np.random.default_rng(1).integers(0, 30, (2, 9))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits
    ours = weights.load_qwen3_config(tmp_path)
    assert ours.tie_embeddings == tied and ours.rope_theta == 5e3
    out = qwen3.logits(load(tmp_path), jnp.asarray(ids), config=ours, implementation="xla")
    assert_close(out, expected, 1e-5)


def test_a_tied_head_may_be_there_but_not_differ(tmp_path):
    params = random_params(TIED, init=qwen3.init)
    tensors = qwen3_tensors(params, TIED)
    assert "lm_head.weight" not in tensors
    assert_trees_equal(load(write(tmp_path / "a", tensors, qwen3_json(TIED))), params)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    assert_trees_equal(load(write(tmp_path / "b", tensors | head, qwen3_json(TIED))), params)
    head["lm_head.weight"][3, 4] += 1
    with pytest.raises(
        weights.CheckpointError, match=r"lm_head\.weight apart from embed_tokens\.weight; expected"
    ):
        load(write(tmp_path / "c", tensors | head, qwen3_json(TIED)))


@pytest.mark.parametrize("shards", [0, 5])
def test_no_more_than_a_parameter_is_in_memory_beside_the_model(tmp_path, shards):
    # tracemalloc sees the arrays of NumPy, not JAX's: a parameter as it is read and as it is joined, and
    # one or two before it, of which JAX lets go when it copies the next.
    config = Qwen3Config(
        vocab_size=500,
        hidden_size=256,
        num_layers=12,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=512,
    )
    shapes = jax.eval_shape(lambda: qwen3.init(jax.random.key(0), config, dtype="bfloat16"))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    folder = write(tmp_path, qwen3_tensors(params, config), qwen3_json(config), shards=shards)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    del params
    weights.load_qwen3(folder)  # what is made once
    tracemalloc.start()
    try:
        loaded = weights.load_qwen3(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) == sum(sizes)
    assert max(sizes) <= peak < 4 * max(sizes) < 0.3 * sum(sizes)


def test_every_disagreement_of_config_and_tensors_is_listed(tmp_path):
    tensors = dict(TENSORS)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((48, 41), np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.int64)
    folder = write(tmp_path, tensors, qwen3_json(CONFIG) | {"num_key_value_heads": 1}, shards=2)
    with pytest.raises(weights.CheckpointError) as error:
        load(folder)
    lines = str(error.value).splitlines()
    assert str(folder) in lines[0] and "does not fit its config" in lines[0]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "missing norm.weight (48,)",
        "unexpected layers.1.self_attn.q_proj.bias (64,)",
        "misshapen layers.0.mlp.down_proj.weight (48, 41); expected (48, 40)",
        "misshapen layers.0.self_attn.k_proj.weight (32, 48); expected (16, 48)",
        "not float layers.0.self_attn.q_norm.weight int64",
        "misshapen layers.0.self_attn.v_proj.weight (32, 48); expected (16, 48)",
        "misshapen layers.1.self_attn.k_proj.weight (32, 48); expected (16, 48)",
        "misshapen layers.1.self_attn.v_proj.weight (32, 48); expected (16, 48)",
    ]


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_every_tensor_is_used(tmp_path, name):
    changed = load(write(tmp_path, TENSORS | {name: TENSORS[name] + 1}, qwen3_json(CONFIG)))
    pairs = zip(jax.tree.leaves(changed), jax.tree.leaves(PARAMS), strict=True)
    assert sum(not np.array_equal(a, b) for a, b in pairs) == 1


# The index and its files


def test_a_file_that_the_index_names_is_missing(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00003\.safetensors, named in model\.saf"):
        load(folder)


def test_index_and_files_that_disagree(folder):
    path = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(path)
    moved = sorted(tensors)[0]
    save_file({name: t for name, t in tensors.items() if name != moved} | {"stray": np.ones(2)}, path)
    with pytest.raises(weights.CheckpointError) as error:
        load(folder)
    lines = str(error.value).splitlines()
    assert f"{INDEX} does not fit the files that it names" in lines[0]
    assert [line.split() for line in lines[1:]] == [
        ["missing", moved, "in", path.name],
        ["unexpected", "stray", "in", path.name],
    ]


@pytest.mark.parametrize("content", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(folder, content):
    (folder / INDEX).write_text(content)
    with pytest.raises(weights.CheckpointError, match=r"index\.json has no weight_map from names of tensors"):
        load(folder)


def test_an_index_that_is_not_json(folder):
    (folder / INDEX).write_text("{")
    with pytest.raises(weights.CheckpointError, match=r"index\.json is not valid JSON"):
        load(folder)


def test_a_truncated_shard(folder):
    path = folder / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(weights.CheckpointError, match=r"model-00003-of-00003\.safetensors .*truncated"):
        load(folder)


# Configs


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "qwen3_moe"}, "model of type 'qwen3_moe'; expected 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; expected False"),
        ({"use_sliding_window": True}, "use_sliding_window is True; expected False"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is 'sliding_attention'; expected 'fu",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is {'rope_type': 'yarn'}; expected None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; expected 'default'"),
        ({"head_dim": None}, "head_dim is None; expected a positive integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'; expected a positive number"),
        ({"num_attention_heads": 3}, "num_heads=3 is not a multiple of num_kv_heads=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_config_is_checked(tmp_path, change, message):
    folder = write(tmp_path, {}, qwen3_json(CONFIG) | change)
    for function in (weights.load_qwen3, weights.load_qwen3_config):
        with pytest.raises(weights.CheckpointError, match=re.escape(message)) as error:
            function(folder)
        assert str(folder / "config.json") in str(error.value)


def test_every_problem_of_a_config_is_listed(tmp_path):
    folder = write(tmp_path, {}, {"model_type": "qwen3", "hidden_act": "gelu", "hidden_size": 64})
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_qwen3_config(folder)
    for key in ("hidden_act", "vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert f"\n  {key} is" in str(error.value)


def test_a_config_of_transformers_5(tmp_path):
    json = qwen3_json(CONFIG) | {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}
    json["rope_parameters"] = {"rope_type": "default", "rope_theta": json.pop("rope_theta")}
    del json["rope_scaling"]
    config = weights.load_qwen3_config(write(tmp_path, {}, json))
    assert config.rope_theta == CONFIG.rope_theta and config.tie_embeddings


def test_a_published_config(tmp_path):
    for config in qwen3.CONFIGS.values():
        assert weights.load_qwen3_config(write(tmp_path, {}, qwen3_json(config))) == config


def test_save_load_and_command_line(tmp_path, folder):
    path = weights.save(PARAMS, tmp_path / "own", config=CONFIG)
    assert_trees_equal(weights.load(path), PARAMS)
    assert_trees_equal(load(path), PARAMS)
    assert weights.load_config(path) == weights.load_qwen3_config(path) == CONFIG
    assert main(["qwen3", str(folder), str(tmp_path / "converted"), "--dtype", "bfloat16"]) == 0
    assert_trees_equal(weights.load(tmp_path / "converted"), weights.load_qwen3(folder))


def test_shapes_of_the_largest():
    shapes = families.shapes(qwen3.CONFIGS["Qwen3-32B"])
    assert sum(np.prod(shape) for shape in shapes.values()) == 32_762_123_264
    assert shapes["layers.63.mlp.gate_up.kernel"] == (5120, 2, 25600)
