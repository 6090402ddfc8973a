"""Qwen3 against torch, written out and as Hugging Face has it: layers, logits, masks, positions, gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import qwen3
from pallas_models.qwen3 import Qwen3Config
from parity.models.decoder_checkpoints import qwen3_json, qwen3_tensors
from parity.ops.test_lowering import DEVICES, HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    ON_GPU,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    kept,
    kernel_calls,
    normal,
    random_mask,
    random_params,
    relative_error,
)
from parity.support.tolerances import CHAIN, DEEP, LONG, MODEL, MODEL_GRADIENT

SMALL = Qwen3Config(
    vocab_size=60,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=80,
    max_positions=64,
    rope_theta=1e4,
)
# Of the smallest model but for layers and vocabulary: logits of all of that would be gigabytes in float64.
LARGE = Qwen3Config(vocab_size=32_003, hidden_size=1024, num_layers=2, num_heads=16, intermediate_size=3072)
CONFIG = LARGE if ON_GPU else SMALL
SHAPES = by_device(cpu=[(2, 19)], gpu=[(1, 128), (2, 1024), (5, 77), (3, 1)])


def tokens(batch: int, seq: int, config: Qwen3Config = CONFIG, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """ids and a mask with holes."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, config.vocab_size, (batch, seq)), jnp.int32), random_mask(rng, batch, seq)


@functools.cache
def compiled(implementation: str | None, config: Qwen3Config = CONFIG, **options):
    return jax.jit(functools.partial(qwen3.logits, config=config, implementation=implementation, **options))


def params_of(dtype: str = "float32", config: Qwen3Config = CONFIG) -> qwen3.Params:
    return random_params(config, dtype, qwen3.init)


@functools.cache
def layer_params(dtype: str = "float32", config: Qwen3Config = CONFIG) -> qwen3.Params:
    return random_params(config, dtype, qwen3.init_layer)


@functools.cache
def torch_model(decoders, config: Qwen3Config = CONFIG):
    return decoders.load(decoders.Qwen3(config), qwen3_tensors(params_of(config=config), config))


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer(reference, decoders, implementation, dtype, shape):
    rng = np.random.default_rng(1)
    x, mask = normal(rng, *shape, CONFIG.hidden_size, dtype=dtype), random_mask(rng, *shape)
    params = layer_params(dtype)
    f = jax.jit(functools.partial(qwen3.layer, config=CONFIG, implementation=implementation))
    out = f(params, x, mask=mask)
    assert out.dtype == dtype
    layer = decoders.load(decoders.Qwen3Layer(CONFIG), qwen3_tensors(params, CONFIG))
    assert_close(kept(out, mask), kept(reference.compute(layer, x, mask), mask), MODEL[dtype])


@pytest.mark.parametrize("by_row", [False, True], ids=["same-positions", "positions-by-row"])
def test_layer_without_a_mask_and_with_positions(reference, decoders, by_row):
    x = normal(np.random.default_rng(2), 2, 9, CONFIG.hidden_size)
    positions = jnp.arange(9) * 3 + (jnp.asarray([[5], [40]]) if by_row else 11)
    f = jax.jit(functools.partial(qwen3.layer, config=CONFIG, implementation=KERNEL))
    layer = decoders.load(decoders.Qwen3Layer(CONFIG), qwen3_tensors(layer_params(), CONFIG))
    expected = reference.compute(layer, x, positions=positions)
    assert_close(f(layer_params(), x, positions=positions), expected, MODEL["float32"])
    assert relative_error(f(layer_params(), x), expected) > 1e-3  # other distances between the tokens


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits(reference, decoders, implementation, shape):
    ids, mask = tokens(*shape)
    out = compiled(implementation)(params_of(), ids, mask)
    assert out.shape == (*shape, CONFIG.vocab_size) and out.dtype == "float32"
    expected = reference.compute(torch_model(decoders), ids, mask)
    assert_close(kept(out, mask), kept(expected, mask), CHAIN)


TIED = Qwen3Config(
    vocab_size=33,
    hidden_size=64,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=40,
    tie_embeddings=True,
)


def test_logits_with_a_tied_head(reference, decoders, implementation):
    ids, _ = tokens(2, 11, TIED)
    out = compiled(implementation, TIED)(params_of(config=TIED), ids)
    expected = reference.compute(torch_model(decoders, config=TIED), ids)
    assert_close(out, expected, MODEL["float32"])


def test_logits_of_hugging_face():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ids, mask = tokens(3, 19, SMALL, seed=2)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**qwen3_json(SMALL))).eval()
    params = params_of(config=SMALL)
    model.load_state_dict({name: torch.tensor(t) for name, t in qwen3_tensors(params, SMALL).items()})
    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(ids)), attention_mask=torch.tensor(np.asarray(mask))).logits
    out = compiled("xla", SMALL)(params, ids, mask)
    assert_close(kept(out, mask), kept(expected, mask), DEEP)


def test_only_the_last():
    ids, mask = tokens(3, 19)
    every, last = compiled("xla"), compiled("xla", last_only=True)
    mask = mask.at[0].set(jnp.arange(19) < 7).at[1].set(jnp.arange(19) > 3)
    expected = every(params_of(), ids, mask)[jnp.arange(3), jnp.asarray([6, 18, 18])]
    assert_close(last(params_of(), ids, mask), expected, LONG)


def test_no_token_sees_what_follows_or_padding():
    ids, mask = tokens(3, 19, seed=3)
    logits = compiled(KERNEL)
    out = logits(params_of(), ids, mask)
    later = ids.at[:, 11:].set((ids[:, 11:] + 7) % CONFIG.vocab_size)
    changed = logits(params_of(), later, mask)
    assert_equal(kept(changed[:, :11], mask[:, :11]), kept(out[:, :11], mask[:, :11]))
    assert relative_error(changed[:, 11:], out[:, 11:]) > 1e-2
    padding = jnp.where(mask == 0, (ids + 7) % CONFIG.vocab_size, ids)
    assert_equal(kept(logits(params_of(), padding, mask), mask), kept(out, mask))


def test_padding_on_either_side_does_not_matter():
    ids, _ = tokens(2, 13, seed=4)
    logits = compiled(KERNEL, last_only=True)
    alone = logits(params_of(), ids, jnp.ones_like(ids))
    for before, after in ((6, 0), (0, 6)):
        width = ((0, 0), (before, after))
        padded, mask = jnp.pad(ids, width, constant_values=3), jnp.pad(jnp.ones_like(ids), width)
        assert_close(logits(params_of(), padded, mask), alone, DEEP)


def test_gradients(reference, decoders):
    params, (ids, mask) = params_of(config=TIED), tokens(2, 9, TIED, seed=5)
    cotangent = normal(np.random.default_rng(6), 2, 9, TIED.vocab_size) * mask[..., None]
    logits = compiled(KERNEL, TIED)
    gradients = jax.grad(lambda p: jnp.sum(logits(p, ids, mask) * cotangent))(params)

    model = decoders.load(decoders.Qwen3(TIED), qwen3_tensors(params, TIED))
    model(*map(reference.tensor, (ids, mask))).backward(reference.tensor(cotangent))
    expected = {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}
    ours = qwen3_tensors(gradients, TIED)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        assert_close(gradient, expected[name], MODEL_GRADIENT)


# How it is lowered and transformed


@pytest.mark.parametrize(
    "device, dtype, batch, seq",
    [(device, "bfloat16", 8, 2048) for device in DEVICES]
    + [(HOPPER, "float16", 3, 77), (HOPPER, "float32", 1, 16)],
    ids=str,
)
def test_a_layer_is_nothing_but_kernels_of_ours(device, dtype, batch, seq):
    params = jax.eval_shape(lambda: qwen3.init_layer(jax.random.key(0), dtype=dtype))
    x = jax.ShapeDtypeStruct((batch, seq, 4096), dtype)
    with cuda_device(*device):
        text = lowered_for_cuda(qwen3.layer, params, x)
    # Norm, QKV, rotation, attention, projection; norm, gate and up, down. A split contraction takes two.
    assert 8 <= kernel_calls(text) <= 11
    for operation in ("dot_general", "convolution", "reduce", "exponential", "gather", "transpose", "concatenate"):
        assert f"stablehlo.{operation}" not in text


def _logits(params, ids, mask, **options):  # vmap and export count arguments by position
    return qwen3.logits(params, ids, mask, config=TIED, **options)


def test_vmap():
    ids, mask = tokens(2, 9, TIED)
    several = jnp.stack([ids, ids[::-1]])
    f = jax.jit(jax.vmap(functools.partial(_logits, implementation=KERNEL), (None, 0, None)))
    out, params = f(params_of(config=TIED), several, mask), params_of(config=TIED)
    for i in range(2):
        assert_close(kept(out[i], mask), kept(compiled("xla", TIED)(params, several[i], mask), mask), CHAIN)


# Sizes and errors


def test_published_sizes():
    sizes = {
        name: (c.num_layers, c.hidden_size, c.num_heads, c.intermediate_size, c.tie_embeddings)
        for name, c in qwen3.CONFIGS.items()
    }
    assert sizes == {
        "Qwen3-0.6B": (28, 1024, 16, 3072, True),
        "Qwen3-1.7B": (28, 2048, 16, 6144, True),
        "Qwen3-4B": (36, 2560, 32, 9728, True),
        "Qwen3-8B": (36, 4096, 32, 12288, False),
        "Qwen3-14B": (40, 5120, 40, 17408, False),
        "Qwen3-32B": (64, 5120, 64, 25600, False),
    }
    assert {(c.num_kv_heads, c.head_dim, c.vocab_size) for c in qwen3.CONFIGS.values()} == {(8, 128, 151936)}
    parameters = jax.eval_shape(lambda: qwen3.init(jax.random.key(0), qwen3.CONFIGS["Qwen3-0.6B"]))
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == 596_049_920


X, IDS, MASK = normal(np.random.default_rng(7), 2, 4, 64), jnp.ones((2, 4), int), jnp.ones((2, 4), int)


def layer(x=X, config=TIED, **options):
    return qwen3.layer(layer_params(config=TIED), x, config=config, **options)


def logits(ids=IDS, mask=MASK, config=TIED, **options):
    return qwen3.logits(params_of(config=TIED), ids, mask, config=config, **options)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: layer(X[0]), ValueError, "x has shape (4, 64); expected 3 axes, (B, S, H)"),
        (lambda: layer(X > 0), TypeError, "x has dtype bool; expected float16, bfloat16 or float32"),
        (lambda: layer(X.astype("float16")), TypeError, "x has dtype float16 and w has dtype float32"),
        (lambda: layer(X[..., :48]), ValueError, "scale has shape (64,); expected (48,), (D,)"),
        (lambda: layer(mask=MASK[:, :3]), ValueError, "mask has shape (2, 3); expected (2, 4)"),
        (lambda: layer(positions=MASK[:1]), ValueError, "positions has shape (1, 4); expected (2, 4), (B, S)"),
        (lambda: layer(positions=X[0, :, 0]), TypeError, "positions has dtype float32; expected an integer"),
        (lambda: layer(positions=jnp.arange(5)), ValueError, "cos has shape (5, 8); expected (4, 8) or (2, 4, 8)"),
        (
            lambda: layer(config=SMALL),
            ValueError,
            "['mlp']['gate_up']['kernel']: expected (48, 2, 80), got (64, 2",
        ),
        (lambda: layer(implementation="cudnn"), ValueError, "implementation='cudnn' is unknown; expected None"),
        (lambda: logits(IDS[0]), ValueError, "ids has shape (4,); expected 2 axes, (B, S)"),
        (lambda: logits(IDS * 1.0), TypeError, "ids has dtype float32; expected an integer dtype"),
        (lambda: logits(IDS + 59), ValueError, "ids has values from 60 to 60; expected 0 to 32, rows of the voc"),
        (lambda: logits(mask=MASK * 2), ValueError, "mask has values from 2 to 2; expected only 0 (padding)"),
        (lambda: logits(mask=MASK[:1]), ValueError, "mask has shape (1, 4); expected (2, 4), the shape of ids"),
        (
            lambda: logits(config=SMALL),
            ValueError,
            "params do not fit the config:\n  ['head']['kernel']: expected",
        ),
        (lambda: layer(jnp.ones((1, 40961, 64))), ValueError, "length 40961 is too long; expected at most 40960"),
        (lambda: Qwen3Config(num_heads=20), ValueError, "num_heads=20 is not a multiple of num_kv_heads=8"),
        (lambda: Qwen3Config(num_kv_heads=0), ValueError, "is not a multiple of num_kv_heads=0"),
        (lambda: Qwen3Config(head_dim=33), ValueError, "head_dim=33 cannot be rotated; expected an even number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
