"""Encoders of every family: transformers computes the same hidden states, padded and packed; files come back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weights
from pallas_models import minilm, modernbert, qwen3
from parity.ops.test_lowering import lowered_for_cuda
from parity.sentence import encoder_checkpoints
from parity.support.common import assert_close, cuda_device, kernel_calls
from parity.support.tolerances import DEEP
from parity.weights.test_weights import assert_trees_equal
from weights import families, loading

LENGTHS = (38, 1, 17, 9)
every_family = pytest.mark.parametrize("kind", encoder_checkpoints.FAMILIES)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Token ids from 4 on, no special ones, and the mask."""
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int32)
    return np.where(mask == 1, np.random.default_rng(7).integers(4, 40, mask.shape), 0), mask


def torch_states(folder, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What transformers computes, of tokens alone."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
    return states.numpy()[mask == 1]


@every_family
def test_against_transformers(tmp_path, kind):
    folder = encoder_checkpoints.write(tmp_path, kind)
    params, config = weights.load_encoder(folder), weights.load_encoder_config(folder)
    encode = families.of(config).encode
    ids, mask = batch()
    expected = torch_states(folder, ids, mask)
    padded = encode(params, jnp.asarray(ids), jnp.asarray(mask), config=config)
    assert_close(np.asarray(padded)[mask == 1], expected, DEEP)
    # Packed: two rows of 50 with 3 sentences and 1, the rest padding.
    tokens, segments = np.zeros((2, 50), np.int32), np.full((2, 50), 4, np.int32)
    for sentence, row, start in ((1, 0, 0), (2, 0, 1), (3, 0, 18), (0, 1, 0)):
        places = slice(start, start + LENGTHS[sentence])
        tokens[row, places], segments[row, places] = ids[sentence, : LENGTHS[sentence]], sentence
    packed = np.asarray(
        encode(params, jnp.asarray(tokens), None, segment_ids=jnp.asarray(segments), config=config)
    )
    assert_close(np.concatenate([packed[segments == i] for i in range(4)]), expected, DEEP)


@pytest.mark.parametrize(
    "kind, change",
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"hidden_act": "silu"}),
        ("distilbert", {"activation": "relu"}),
        ("modernbert", {"hidden_activation": "silu"}),
        ("roberta", {"hidden_act": "gelu_pytorch_tanh"}),
        ("bert", {"num_attention_heads": 8}),
        ("modernbert", {"num_attention_heads": 8}),
        ("roberta", {"pad_token_id": 0}),
        ("xlm-roberta", {"pad_token_id": 3}),
    ],
    ids=str,
)
def test_configs_that_people_have(tmp_path, kind, change):
    """As transformers computes it, and once more from what export and save write."""
    source = encoder_checkpoints.write(tmp_path / "source", kind, **change)
    params, config = weights.load_encoder(source), weights.load_encoder_config(source)
    ids, mask = batch()
    if "pad_token_id" in change:  # from whose places transformers knows the positions
        ids = np.where(mask == 1, ids, change["pad_token_id"])
    expected = torch_states(source, ids, mask)
    states = families.of(config).encode(params, jnp.asarray(ids), jnp.asarray(mask), config=config)
    assert_close(np.asarray(states)[mask == 1], expected, DEEP)
    weights.export(params, tmp_path / "export", config=config)
    assert_close(torch_states(tmp_path / "export", ids, mask), expected, 1e-6)
    for folder in (tmp_path / "export", weights.save(params, tmp_path / "own", config=config)):
        assert weights.load_encoder_config(folder) == config
        assert_trees_equal(weights.load_encoder(folder), params)


@every_family
def test_files_come_back(tmp_path, kind):
    """What export writes, transformers and this library read; what save writes, this library reads."""
    pytest.importorskip("torch")
    source = encoder_checkpoints.write(tmp_path / "source", kind)
    params, config = weights.load_encoder(source), weights.load_encoder_config(source)
    ids, mask = batch()
    weights.export(params, tmp_path / "export", config=config)
    assert_close(torch_states(tmp_path / "export", ids, mask), torch_states(source, ids, mask), 1e-6)
    for folder in (tmp_path / "export", weights.save(params, tmp_path / "own", config=config)):
        assert weights.load_encoder_config(folder) == config
        assert_trees_equal(weights.load_encoder(folder), params)
        assert loading.find_encoder(folder) is families.of(config)


@pytest.mark.parametrize(
    "config",
    [
        minilm.RobertaConfig(num_layers=1),
        minilm.MPNetConfig(num_layers=1),
        minilm.DistilBertConfig(num_layers=1),
        modernbert.ModernBertConfig(num_layers=2),
        qwen3.Qwen3EncoderConfig(num_layers=1),
    ],
    ids=lambda config: type(config).__name__,
)
def test_products_and_attention_are_kernels_of_ours(config):
    """On a GPU, packed, in rows longer than a window; layers of a kind are alike."""
    family = families.of(config)
    params = jax.eval_shape(lambda: family.init(jax.random.key(0), config, dtype=jnp.float16))
    tokens = jax.ShapeDtypeStruct((16, 256), jnp.int32)
    with cuda_device("NVIDIA H200", 132):
        text = lowered_for_cuda(
            lambda params, ids, segments: family.encode(params, ids, None, segment_ids=segments, config=config),
            params,
            tokens,
            tokens,
        )
    assert kernel_calls(text) >= 6
    for operation in ("dot_general", "exponential", "rsqrt"):
        assert f"stablehlo.{operation}" not in text


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("roberta", {"pad_token_id": None}, "pad_token_id is None; expected an integer of at least 0"),
        ("bert", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; expected 'gelu' or 'gelu_python' or"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets is 16; expected 32"),
        ("distilbert", {"activation": "mish"}, "activation is 'mish'; expected 'gelu' or"),
        ("modernbert", {"norm_bias": True}, "norm_bias is True; expected False"),
        (
            "modernbert",
            {"layer_types": ["sliding_attention"] * 4},
            "expected full attention in the first of every n",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "expected the default type",
        ),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True; expected False"),
    ],
)
def test_what_is_not_run_is_refused_by_name(tmp_path, kind, change, message):
    path = encoder_checkpoints.write(tmp_path, kind) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(weights.CheckpointError, match=message) as error:
        weights.load_encoder(tmp_path)
    assert str(path) in str(error.value)
