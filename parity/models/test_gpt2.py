"""GPT-2 against torch, written out and as Hugging Face has it: blocks, logits, masks, the flat buffer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from pallas_models import gpt2
from pallas_models.gpt2 import GPT2Config
from parity.models.decoder_checkpoints import gpt2_json, gpt2_tensors
from parity.ops.test_lowering import DEVICES, HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    ON_GPU,
    array,
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
from parity.support.tolerances import CHAIN, DEEP, LONG, MODEL, MODEL_GRADIENT, OP, SAME

SMALL = GPT2Config(
    vocab_size=60, hidden_size=96, num_layers=2, num_heads=3, intermediate_size=80, max_positions=40
)
CONFIG = GPT2Config(num_layers=2) if ON_GPU else SMALL
SHAPES = by_device(cpu=[(2, 19)], gpu=[(1, 128), (2, 1024), (5, 77), (3, 1)])


def tokens(batch: int, seq: int, config: GPT2Config = CONFIG, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """ids and a mask with holes."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, config.vocab_size, (batch, seq)), jnp.int32), random_mask(rng, batch, seq)


@functools.cache
def compiled(implementation: str | None, config: GPT2Config = CONFIG, **options):
    return jax.jit(functools.partial(gpt2.logits, config=config, implementation=implementation, **options))


def params_of(dtype: str = "float32", config: GPT2Config = CONFIG) -> gpt2.Params:
    return random_params(config, dtype, gpt2.init)


@functools.cache
def block_params(dtype: str = "float32", config: GPT2Config = CONFIG) -> gpt2.Params:
    return random_params(config, dtype, gpt2.init_block)


@functools.cache
def torch_model(decoders):
    return decoders.load(decoders.GPT2(CONFIG), gpt2_tensors(params_of()))


def check_block(reference, decoders, implementation, shape, dtype="float32", *, causal=True, masked=True) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, *shape, CONFIG.hidden_size, dtype=dtype)
    mask = random_mask(rng, *shape) if masked else None
    params = block_params(dtype)
    options = dict(causal=causal, num_heads=CONFIG.num_heads, implementation=implementation)
    out = jax.jit(lambda params, x: gpt2.block(params, x, mask=mask, **options))(params, x)
    assert out.dtype == dtype
    block = decoders.load(decoders.GPT2Block(CONFIG), gpt2_tensors(params))
    expected = reference.compute(functools.partial(block, causal=causal), x, *([mask] if masked else []))
    rows = np.ones(shape) if mask is None else mask
    assert_close(kept(out, rows), kept(expected, rows), MODEL[dtype])


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block(reference, decoders, implementation, dtype, shape):
    check_block(reference, decoders, implementation, shape, dtype)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_that_looks_both_ways(reference, decoders, implementation, shape, masked):
    check_block(reference, decoders, implementation, shape, causal=False, masked=masked)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits(reference, decoders, implementation, shape):
    ids, mask = tokens(*shape)
    out = compiled(implementation)(params_of(), ids, mask)
    assert out.shape == (*shape, CONFIG.vocab_size) and out.dtype == "float32"
    expected = reference.compute(torch_model(decoders), ids, mask)
    assert_close(kept(out, mask), kept(expected, mask), MODEL["float32"])


def test_logits_without_a_mask_and_with_positions(reference, decoders):
    ids, mask = tokens(2, 19, seed=1)
    model, positions = torch_model(decoders), (jnp.arange(19) + jnp.asarray([[7], [0]])) % 40
    assert_close(compiled("xla")(params_of(), ids), reference.compute(model, ids), MODEL["float32"])
    out = compiled("xla")(params_of(), ids, mask, positions=positions)
    expected = reference.compute(model, ids, mask, positions)
    assert_close(kept(out, mask), kept(expected, mask), MODEL["float32"])


def test_logits_of_hugging_face():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ids, mask = tokens(3, 19, SMALL, seed=2)
    json = gpt2_json(SMALL) | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**json)).eval()
    params = params_of(config=SMALL)
    tensors = {f"transformer.{name}": torch.tensor(t) for name, t in gpt2_tensors(params).items()}
    model.load_state_dict(tensors | {"lm_head.weight": tensors["transformer.wte.weight"]})
    ids_, mask_ = (torch.tensor(np.asarray(a)) for a in (ids, mask))
    positions = jnp.broadcast_to(jnp.arange(19), ids.shape)  # which its forward pass takes, whatever the mask
    with torch.no_grad():
        expected = model(ids_, attention_mask=mask_).logits
    out = compiled("xla", SMALL)(params, ids, mask, positions=positions)
    assert_close(kept(out, mask), kept(expected, mask), DEEP)
    # What it generates from takes positions from the mask: with padding first, and with holes.
    options = dict(max_new_tokens=1, do_sample=False, pad_token_id=0)
    for masks in (jnp.arange(19) >= jnp.asarray([[3], [0], [11]]), mask.at[:, -1].set(1)):
        generated = model.generate(
            ids_,
            attention_mask=torch.tensor(np.asarray(masks)).long(),
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        out = compiled("xla", SMALL, last_only=True)(params, ids, masks)
        assert_close(out, generated.logits[0], DEEP)


def test_padding_on_either_side_is_the_same():
    ids, _ = tokens(1, 12)
    out = compiled("xla")(params_of(), ids)
    for before, after in ((5, 0), (0, 5), (2, 3)):
        padding = ((0, 0), (before, after))
        mask = jnp.pad(jnp.ones_like(ids), padding)
        padded = compiled("xla")(params_of(), jnp.pad(ids, padding, constant_values=7), mask)
        assert_close(padded[:, before : before + 12], out, LONG)


def test_only_the_last():
    ids, mask = tokens(3, 19)
    every, last = compiled("xla"), compiled("xla", last_only=True)
    assert_close(last(params_of(), ids), every(params_of(), ids)[:, -1], LONG)
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
    assert_close(logits(params_of(), ids[:, :11], mask[:, :11]), out[:, :11], OP["float32"])


def test_gradients(reference, decoders):
    config = GPT2Config(
        vocab_size=20, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=12
    )
    params, (ids, mask) = params_of(config=config), tokens(2, 9, config, seed=4)
    cotangent = normal(np.random.default_rng(5), 2, 9, 20) * mask[..., None]
    logits = compiled(KERNEL, config)
    gradients = jax.grad(lambda p: jnp.sum(logits(p, ids, mask) * cotangent))(params)

    model = decoders.load(decoders.GPT2(config), gpt2_tensors(params))
    model(*map(reference.tensor, (ids, mask))).backward(reference.tensor(cotangent))
    expected = {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}
    ours = gpt2_tensors(gradients)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        if name.endswith("c_attn.bias"):
            # The gradient of the key bias is zero: it shifts all scores of a query alike.
            assert np.max(np.abs(gradient[32:64])) < 1e-6
        assert_close(gradient, expected[name], MODEL_GRADIENT)


# The flat buffer


@functools.cache
def flat_weights() -> np.ndarray:
    """The buffer as section by section a challenge's author would fill it, from the names of the checkpoint."""
    tensors = gpt2_tensors(random_params(GPT2Config(), init=gpt2.init_block))
    names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    return np.concatenate([tensors[f"{name}.{kind}"].ravel() for name in names for kind in ("weight", "bias")])


OFFSETS = {
    ("attention_norm", "scale"): 0,
    ("attention_norm", "bias"): 768,
    ("attention", "qkv", "kernel"): 1536,
    ("attention", "qkv", "bias"): 1771008,
    ("attention", "out", "kernel"): 1773312,
    ("attention", "out", "bias"): 2363136,
    ("mlp_norm", "scale"): 2363904,
    ("mlp_norm", "bias"): 2364672,
    ("mlp", "up", "kernel"): 2365440,
    ("mlp", "up", "bias"): 4724736,
    ("mlp", "down", "kernel"): 4727808,
    ("mlp", "down", "bias"): 7087104,
}


def test_the_flat_buffer_is_that_of_the_cuda_block():
    params = gpt2.unpack(jnp.arange(7_087_872, dtype=jnp.float32))
    assert jax.tree.structure(params) == jax.tree.structure(block_params())
    for path, offset in OFFSETS.items():
        leaf = functools.reduce(lambda node, key: node[key], path, params)
        assert int(leaf.ravel()[0]) == offset, path
    assert int(params["mlp"]["down"]["bias"][-1]) == 7_087_871
    assert params["attention"]["qkv"]["kernel"][1, 0] == 1536 + 2304  # rows are inputs


def test_solve(reference, decoders, implementation):
    x, flat = normal(np.random.default_rng(6), 5, 768), flat_weights()
    block = decoders.load(decoders.GPT2Block(GPT2Config()), gpt2_tensors(gpt2.unpack(flat)))
    expected = reference.compute(functools.partial(block, causal=False), x[None])[0]
    out = jax.jit(functools.partial(gpt2.solve, implementation=implementation))(x, flat)
    assert_close(out, expected, MODEL["float32"])


# How it is lowered and transformed


@pytest.mark.parametrize(
    "device, dtype, batch, seq",
    [(device, "bfloat16", 8, 1024) for device in DEVICES]
    + [(HOPPER, "float16", 3, 77), (HOPPER, "bfloat16", 1, 128), (HOPPER, "float32", 1, 16)],
    ids=str,
)
def test_a_block_is_nothing_but_kernels_of_ours(device, dtype, batch, seq):
    params = jax.eval_shape(lambda: gpt2.init_block(jax.random.key(0), dtype=dtype))
    x = jax.ShapeDtypeStruct((batch, seq, 768), dtype)
    with cuda_device(*device):
        text = lowered_for_cuda(gpt2.block, params, x)
    # Norm, QKV, attention, projection; norm, up, down. A product whose contraction is split takes two.
    assert 7 <= kernel_calls(text) <= 11
    for operation in ("dot_general", "convolution", "reduce", "exponential", "gather", "tanh", "transpose"):
        assert f"stablehlo.{operation}" not in text


def test_the_head_reads_the_word_embeddings_in_place():
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(functools.partial(gpt2.logits, config=SMALL), params_of(config=SMALL), ids)
    assert "stablehlo.transpose" not in text and "stablehlo.dot_general" not in text


def _logits(params, ids, mask, **options):  # vmap and export count arguments by position
    return gpt2.logits(params, ids, mask, config=SMALL, **options)


def test_export():
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: jax.export serialises with it")
    ids, mask = tokens(2, 9, SMALL)
    exported = export.export(jax.jit(functools.partial(_logits, implementation=None)), platforms=["cpu"])(
        params_of(config=SMALL), ids, mask
    )
    restored = export.deserialize(exported.serialize())
    with jax.default_device(jax.devices("cpu")[0]):
        out = restored.call(*jax.device_put((params_of(config=SMALL), ids, mask), jax.devices("cpu")[0]))
    assert_close(kept(out, mask), kept(compiled("xla", SMALL)(params_of(config=SMALL), ids, mask), mask), CHAIN)


# Sizes and errors


def test_published_sizes():
    sizes = {
        name: (c.num_layers, c.hidden_size, c.num_heads, c.intermediate_size) for name, c in gpt2.CONFIGS.items()
    }
    assert sizes == {
        "gpt2": (12, 768, 12, 3072),
        "gpt2-medium": (24, 1024, 16, 4096),
        "gpt2-large": (36, 1280, 20, 5120),
        "gpt2-xl": (48, 1600, 25, 6400),
    }
    parameters = jax.eval_shape(lambda: gpt2.init(jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == 124_439_808


X, IDS, MASK = normal(np.random.default_rng(7), 2, 4, 96), array(np.ones((2, 4), int)), array(np.ones((2, 4), int))


def block(x=X, num_heads=3, **options):
    return gpt2.block(block_params(config=SMALL), x, num_heads=num_heads, **options)


def test_the_state_of_a_module_as_parameters():
    state = nnx.state(gpt2.GPT2(SMALL, rngs=nnx.Rngs(0)))
    gradients = [
        jax.grad(lambda params: gpt2.loss(params, IDS, MASK, config=SMALL))(params)
        for params in (state, nnx.to_pure_dict(state))
    ]
    assert isinstance(gradients[0], nnx.State)
    # XLA adds up the gradient of the embedding in any order on a GPU.
    same = functools.partial(assert_close, tolerance=SAME) if ON_GPU else assert_equal
    jax.tree.map(same, nnx.to_pure_dict(gradients[0]), gradients[1])


def logits(ids=IDS, mask=MASK, config=SMALL, **options):
    return gpt2.logits(params_of(config=SMALL), ids, mask, config=config, **options)


FLAT = jax.ShapeDtypeStruct((7_087_872,), jnp.float32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: block(num_heads=None), ValueError, "its width no multiple of 64: num_heads must be given"),
        (lambda: block(num_heads=5), ValueError, "hidden_size=96 is not a multiple of num_heads=5"),
        (lambda: block(num_heads=0), ValueError, "hidden_size=96 is not a multiple of num_heads=0"),
        (lambda: block(X[0]), ValueError, "x has shape (4, 96); expected 3 axes, (B, S, H)"),
        (lambda: block(X > 0), TypeError, "x has dtype bool; expected float16, bfloat16 or float32"),
        (lambda: block(X.astype("float16")), TypeError, "x has dtype float16 and w has dtype float32"),
        (
            lambda: block(X[..., :48]),
            ValueError,
            "['attention']['out']['kernel']: expected (48, 48), got (96, 96)",
        ),
        (lambda: block(mask=MASK[:, :3]), ValueError, "mask has shape (2, 3); expected (2, 4)"),
        (lambda: block(implementation="cudnn"), ValueError, "implementation='cudnn' is unknown; expected None"),
        (lambda: logits(IDS[0]), ValueError, "ids has shape (4,); expected 2 axes, (B, S)"),
        (lambda: logits(IDS * 1.0), TypeError, "ids has dtype float32; expected an integer dtype"),
        (lambda: logits(IDS + 59), ValueError, "ids has values from 60 to 60; expected 0 to 59, rows of the voc"),
        (lambda: logits(mask=MASK * 2), ValueError, "mask has values from 2 to 2; expected only 0 (padding)"),
        (lambda: logits(mask=MASK[:1]), ValueError, "mask has shape (1, 4); expected (2, 4), the shape of ids"),
        (lambda: logits(jnp.ones((1, 41), int), None), ValueError, "ids has length 41; expected at most 40 posit"),
        (lambda: logits(positions=IDS * 40), ValueError, "positions has values from 40 to 40; expected 0 to 39"),
        (lambda: logits(positions=IDS[0]), ValueError, "positions has shape (4,); expected (2, 4), the shape of"),
        (lambda: logits(positions=IDS * 1.0), TypeError, "positions has dtype float32; expected an integer"),
        (lambda: logits(config=GPT2Config()), ValueError, "params do not fit the config:\n  ['embeddings']"),
        (lambda: GPT2Config(num_heads=7), ValueError, "hidden_size=768 is not a multiple of num_heads=7"),
        (lambda: gpt2.unpack(jnp.ones(5)), ValueError, "flat_weights has shape (5,); expected (7087872,)"),
        (lambda: gpt2.unpack(jnp.ones(7_087_872, int)), TypeError, "flat_weights has dtype int32; expected"),
        (lambda: gpt2.solve(X, FLAT), ValueError, "x has shape (2, 4, 96); expected (S, 768)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
