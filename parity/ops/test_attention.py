"""`ops.attention` and `ops.attention_qkv` against torch: lengths, heads, masks, tiles, extremes, gradients."""

import dataclasses
import functools
import itertools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops, target
from pallas_models.kernels.common.scores import exponents
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic import attention as mosaic
from pallas_models.kernels.mosaic.common import attention_walk
from pallas_models.kernels.triton import attention as triton
from pallas_models.kernels.triton.attention import Config
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    TRITON_CALL,
    array,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    float64,
    gpu,
    normal,
    random_mask,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import DEEP, GRADIENT, LONG, OP, SAME, SHORT

SHAPES = by_device(  # batch, seq, heads, head_dim
    cpu=[
        (2, 1, 1, 16),  # one token
        (2, 37, 2, 32),  # one ragged block of keys
        (1, 130, 1, 64),  # more than one block of keys
        (1, 20, 2, 48),  # a head size that is no power of two
        (1, 33, 1, 128),
    ],
    gpu=[
        (1, 16, 12, 32),  # MiniLM's, smallest to largest
        (64, 128, 12, 32),
        (8, 512, 12, 32),
        (3, 300, 12, 32),
        (2, 77, 12, 64),
        (2, 257, 3, 128),
        (2, 100, 2, 80),
        (2, 77, 3, 20),
        (2, 130, 2, 5),
        (1, 65, 2, 256),
        (2, 1, 1, 16),
    ],
)
kernel = functools.partial(compiled.attention_qkv, implementation=KERNEL)
SMALL = Config(block_q=16, block_kv=16, num_warps=1, num_stages=1)


def qkv_of(
    shape: tuple[int, int, int, int], dtype: str = "float32", seed: int = 0, scale: float = 1.5
) -> jax.Array:
    batch, seq, heads, head_dim = shape
    return normal(np.random.default_rng(seed), batch, seq, 3 * heads * head_dim, dtype=dtype, scale=scale)


@pytest.mark.covering(2)
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape, masked):
    qkv = qkv_of(shape, dtype)
    mask = random_mask(np.random.default_rng(1), *shape[:2]) if masked else None

    @jax.jit
    def f(qkv, mask):
        return ops.attention_qkv(qkv, num_heads=shape[2], mask=mask, implementation=implementation)

    out = f(qkv, mask)
    assert out.dtype == dtype
    expected = reference.compute(reference.attention_qkv, qkv, num_heads=shape[2], mask=mask)
    assert_close(out, expected, tolerance)


def test_scale_of_scores_and_boolean_mask(reference, implementation):
    qkv, mask = qkv_of((2, 19, 2, 32)), random_mask(np.random.default_rng(2), 2, 19)
    out = compiled.attention_qkv(
        qkv, num_heads=2, mask=mask.astype(bool), sm_scale=0.4, implementation=implementation
    )
    expected = reference.compute(reference.attention_qkv, qkv, num_heads=2, mask=mask, sm_scale=0.4)
    assert_close(out, expected, LONG)


@pytest.mark.parametrize(
    "block_q, block_kv, options",
    [
        (16, 16, {}),
        (64, 16, {"tensor_sums": True}),
        (16, 64, {"heads": 2}),
        (32, 32, {"tensor_sums": True, "heads": 4}),
    ],
)
@pytest.mark.parametrize("seq", [50, 64])
def test_every_tile_config(reference, seq, block_q, block_kv, options):
    qkv, mask = qkv_of((2, seq, 4, 32), seed=3), random_mask(np.random.default_rng(3), 2, seq)
    config = Config(block_q=block_q, block_kv=block_kv, num_warps=2, num_stages=2, **options)
    out = kernel(qkv, num_heads=4, mask=mask, config=config)
    assert_close(out, reference.compute(reference.attention_qkv, qkv, num_heads=4, mask=mask), LONG)


def test_several_heads_projected():
    qkv, w = (normal(np.random.default_rng(i), *shape) for i, shape in enumerate([(2, 20, 384), (128, 48)]))
    heads = dict(num_heads=4, num_kv_heads=4, head_dim=32, sm_scale=32**-0.5)
    form = Form(qkv=(qkv,), **heads, precision=jax.lax.Precision.HIGHEST)
    config = Config(block_q=16, block_kv=32, num_warps=1, num_stages=2, heads=2)
    options = dict(target=target.current(), interpret=KERNEL == "interpret")
    parts = triton.attention(form, config=config, w=w, **options)
    y = np.asarray(compiled.attention_qkv(qkv, num_heads=4, implementation="xla"))
    expected = np.einsum("bshd,hdn->hbsn", y.reshape(2, 20, 4, 32), np.asarray(w).reshape(4, 32, 48))
    assert_close(parts, expected, OP["float32"])


@pytest.mark.parametrize("value", [0, -16, 48])
@pytest.mark.parametrize("field", ["block_q", "block_kv", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        dataclasses.replace(SMALL, **{field: value})


def test_no_heads_in_a_program_are_refused():
    with pytest.raises(ValueError, match="heads=0 must be positive"):
        dataclasses.replace(SMALL, heads=0)


@functools.cache
def small_kernel():
    """Compiled once for all masks: 37 tokens are three blocks of keys, the last ragged."""
    return jax.jit(lambda qkv, mask: kernel(qkv, num_heads=2, mask=mask, config=SMALL))


bits = st.lists(st.integers(0, 1), min_size=37, max_size=37)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(bits, min_size=2, max_size=2), st.integers(0, 9))
@hypothesis.example([[0] * 37, [1] * 37], 0)  # no key in one row
@hypothesis.example([[0] * 33 + [1] * 4, [1] * 5 + [0] * 32], 1)  # whole blocks without a key, first and last
@hypothesis.example([[0] * 36 + [1], [1] + [0] * 36], 2)
@hypothesis.example([[1, 0] * 18 + [1], [0] * 16 + [1] + [0] * 20], 3)
def test_any_mask(reference, mask, seed):
    qkv, mask = qkv_of((2, 37, 2, 32), seed=seed), jnp.asarray(mask, jnp.int32)
    out = small_kernel()(qkv, mask)
    expected = reference.compute(reference.attention_qkv, qkv, num_heads=2, mask=mask)
    for row in range(2):
        if not np.any(mask[row]):
            assert np.all(float64(out[row]) == 0.0)  # zero, and not NaN
        else:
            assert_close(out[row], expected[row], LONG)


@hypothesis.given(st.integers(1, 70), st.sampled_from([5, 16, 20, 48]), st.integers(0, 9))
def test_any_length(reference, seq, head_dim, seed):
    qkv, mask = qkv_of((2, seq, 1, head_dim), seed=seed), random_mask(np.random.default_rng(seed), 2, seq)
    out = kernel(qkv, num_heads=1, mask=mask, config=SMALL)
    assert_close(out, reference.compute(reference.attention_qkv, qkv, num_heads=1, mask=mask), LONG)


@pytest.mark.parametrize("garbage", [7.0, 1e4, -1e30])
def test_a_masked_key_has_exactly_no_weight(implementation, garbage):
    qkv, mask = qkv_of((2, 37, 2, 32), seed=4), random_mask(np.random.default_rng(4), 2, 37)
    f = functools.partial(compiled.attention_qkv, num_heads=2, mask=mask, implementation=implementation)
    padding = (mask == 0)[:, :, None]
    keys_and_values = jnp.arange(qkv.shape[-1]) >= qkv.shape[-1] // 3
    assert_equal(f(jnp.where(padding & keys_and_values, garbage, qkv)), f(qkv))


def test_equal_values_come_out_as_they_are():
    # The weights of a row sum to one.
    qkv, mask = qkv_of((2, 37, 2, 32), seed=5), random_mask(np.random.default_rng(5), 2, 37)
    value = normal(np.random.default_rng(6), 64)
    out = small_kernel()(qkv.at[..., 128:].set(value), mask)
    assert_close(out, np.broadcast_to(float64(value), out.shape), SAME)


def test_a_shift_of_all_keys_changes_nothing():
    # It adds the same to all scores of a row, here up to some hundreds: without the maximum exp overflows.
    qkv, mask = qkv_of((2, 37, 2, 32), seed=7), random_mask(np.random.default_rng(7), 2, 37)
    shift = normal(np.random.default_rng(8), 64, scale=80.0)
    assert np.max(np.abs(shift[:32] @ qkv[0, :, :32].T)) * 32**-0.5 > 100
    assert_close(small_kernel()(qkv.at[..., 64:128].add(shift), mask), small_kernel()(qkv, mask), 5e-4)


def test_permutations_of_batch_and_of_tokens():
    qkv, mask = qkv_of((2, 37, 2, 32), seed=9), random_mask(np.random.default_rng(9), 2, 37)
    out = small_kernel()(qkv, mask)
    assert_equal(small_kernel()(qkv[::-1], mask[::-1]), out[::-1])
    order = np.random.default_rng(10).permutation(37)
    assert_close(small_kernel()(qkv[:, order], mask[:, order]), out[:, order], LONG)


@pytest.mark.parametrize(
    "dtype, scale", [("float32", 60.0), ("float32", 1e9), ("float16", 60.0), ("bfloat16", 1e8)]
)
def test_scores_of_thousands(reference, implementation, dtype, scale):
    # Softmax is all but one-hot: a wrong maximum gives infinities. Scores reach 1e4 to 1e19.
    qkv, mask = qkv_of((2, 37, 2, 32), dtype, seed=11, scale=scale), random_mask(np.random.default_rng(11), 2, 37)
    out = compiled.attention_qkv(qkv, num_heads=2, mask=mask, implementation=implementation)
    expected = reference.compute(reference.attention_qkv, qkv, num_heads=2, mask=mask)
    # The scores' own float32 rounding, 1e4 * 2^-24, is what moves the weights here.
    assert_close(out, expected, {"float32": 1e-3, "float16": 1e-3, "bfloat16": 6e-3}[dtype])


def test_weights_add_up_to_1_however_large_scores_and_a_bias_are(implementation):
    """The maximum is one of the scores that it is subtracted from, rounded as that is."""
    rng = np.random.default_rng(21)
    q, k = (normal(rng, 2, 33, 2, 20, dtype="bfloat16") for _ in range(2))
    bias = 1e12 * normal(rng, 1, 2, 33, 33)
    out = ops.attention(q, k * jnp.bfloat16(1e13), jnp.ones_like(q), bias=bias, implementation=implementation)
    assert_close(out, np.ones(q.shape), OP["bfloat16"])


@pytest.mark.parametrize("scale", [0.125 * np.log2(np.e), 1.0, 7.0, 3e8])
def test_exponents_of_any_scores(scale):
    # The GPU fuses product and difference, which the interpreter does not: so float64, of float32 operands.
    peak = np.concatenate([s * np.geomspace(1e-3, 1e30, 200, dtype=np.float32) for s in (-1, 1)])
    peak = peak[np.abs(peak) * scale < 1e38]
    factor, shift = (np.asarray(x, np.float32).astype(float) for x in exponents(jnp.asarray(peak), float(scale)))

    def exponent(score):
        return score.astype(float) * factor - shift

    below = np.nextafter(peak, np.float32(-np.inf))
    size = np.abs(peak.astype(float)) * scale
    far, near = size > 1.01 * 2.0**26, size < 0.99 * 2.0**26
    assert far.any() and np.all(exponent(peak)[far] == 0.0) and np.all(exponent(below)[far] < -4.0)
    assert np.all(np.abs(exponent(peak)[near]) <= 1e-7 * size[near]) and np.all(
        (factor == np.float32(scale)) | far
    )


def test_precision_of_float32(reference):
    qkv = qkv_of((2, 40, 2, 64), seed=12)
    expected = reference.compute(reference.attention_qkv, qkv, num_heads=2)
    for precision, tolerance in ((None, 2e-6), ("highest", 2e-6), ("default", 2e-3), ("high", 2e-3)):
        assert_close(kernel(qkv, num_heads=2, precision=precision), expected, tolerance)


def test_gradients(reference):
    qkv, mask = qkv_of((3, 21, 2, 16), seed=13), random_mask(np.random.default_rng(13), 3, 21)
    mask = mask.at[1].set(0)  # a row with no key at all
    cotangent = normal(np.random.default_rng(14), 3, 21, 32)
    attend = functools.partial(reference.attention_qkv, num_heads=2, mask=reference.tensor(mask))
    expected = reference.gradients(attend, [qkv], cotangent)

    def f(qkv):
        return kernel(qkv, num_heads=2, mask=mask)

    assert_gradients_close(f, [qkv], cotangent, expected, GRADIENT)
    gradient = float64(jax.vjp(f, qkv)[1](cotangent)[0])
    assert np.all(gradient[1] == 0.0)
    assert np.all(gradient[:, :, 32:][np.asarray(mask) == 0] == 0.0)  # keys and values of padding


# The general form: queries, keys and values apart, every mask, grouped heads.

# Sq, Skv, Hq, Hkv, D, then the options; SMALL has two blocks of queries and five of keys in most.
CASES = {
    "causal": (37, 70, 2, 2, 16, {"causal": True}),
    "causal, more queries than keys": (70, 37, 2, 1, 16, {"causal": True}),
    "window": (70, 70, 2, 1, 16, {"causal": True, "window": 20}),
    "window of one key": (33, 65, 1, 1, 16, {"causal": True, "window": 1}),
    "window to both sides": (50, 70, 2, 1, 16, {"window": 20}),
    "grouped heads": (40, 64, 6, 2, 48, {"sm_scale": 0.4}),
    "one head of keys, negative scale": (19, 70, 4, 1, 32, {"sm_scale": -0.2}),
    "cross attention, masked": (5, 70, 2, 2, 16, {"mask": True}),
    "bias": (37, 70, 4, 2, 16, {"bias": (2, 4)}),
    "heads of 20": (37, 70, 4, 2, 20, {"causal": True, "mask": True}),
    "heads of 5, bias": (19, 40, 4, 2, 5, {"bias": (1, 4)}),
    "bias of all heads and rows": (37, 64, 2, 2, 16, {"bias": (1, 1)}),
    "segments": (70, 70, 2, 1, 16, {"segments": True}),
    "segments of queries and keys": (37, 300, 2, 2, 16, {"segments": True}),
    "long mask, blocks searched": (37, 300, 2, 2, 16, {"mask": True}),
    "all": (150, 165, 4, 2, 16, {"causal": True, "window": 41, "mask": True, "bias": (1, 4), "segments": True}),
}


# The axes of a mask of pairs that are not broadcast.
PAIRS = {"keys": "bk", "keys of all": "k", "queries": "bqk", "heads": "bhk", "pairs": "bhqk", "pairs of all": "qk"}


@pytest.mark.covering(2)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_masks_as_jax_takes_them(implementation, name, with_bias):
    rng = np.random.default_rng(70)
    sizes = dict(b=2, h=4, q=9, k=21)
    shape = [n if axis in PAIRS[name] else 1 for axis, n in sizes.items()]
    mask = rng.integers(0, 4, shape) > 0
    if name != "keys of all":
        mask[0, 0, 0] = False  # queries that no key is left for
    q, k, v = normal(rng, 2, 9, 4, 16), *(normal(rng, 2, 21, 2, 16) for _ in range(2))
    floats = (q, k, v, normal(rng, 1, 4, 9, 21)) if with_bias else (q, k, v)
    left = np.broadcast_to(mask, tuple(sizes.values())).any(axis=-1).swapaxes(1, 2)[..., None]
    cotangent = jnp.where(left, normal(rng, *q.shape), 0.0)  # of others jax.nn takes the mean of all values

    def pulled(attend, *floats):
        out, pull = jax.vjp(lambda q, k, v, bias=None: attend(q, k, v, bias=bias, mask=jnp.asarray(mask)), *floats)
        return jnp.where(left, out, 0.0), *pull(cotangent)

    attend = functools.partial(ops.attention, implementation=implementation)
    out = attend(q, k, v, bias=floats[-1] if with_bias else None, mask=mask.astype(np.int32))
    assert np.all(float64(out)[~np.broadcast_to(left, out.shape)] == 0.0)
    found = jax.jit(functools.partial(pulled, attend))(*floats)
    assert_close(out, found[0], SAME)
    expected = jax.jit(functools.partial(pulled, jax.nn.dot_product_attention))(*floats)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, GRADIENT)


def operands(
    case: tuple, dtype: str = "float32", seed: int = 0
) -> tuple[tuple[jax.Array, ...], jax.Array | None, dict[str, object]]:
    """q, k and v, the bias, and the options of a case; masks and segments drawn where it has them."""
    seq, kv_seq, heads, kv_heads, head_dim, options = case
    rng, options = np.random.default_rng(seed), dict(options)
    q = normal(rng, 2, seq, heads, head_dim, dtype=dtype, scale=1.5)
    k, v = (normal(rng, 2, kv_seq, kv_heads, head_dim, dtype=dtype, scale=1.5) for _ in range(2))
    bias = options.pop("bias", None)
    if bias is not None:
        bias = normal(rng, *bias, seq, kv_seq, dtype=dtype, scale=2.0)
    if options.pop("mask", False):
        # A run of padding at the end as batches have it, and holes.
        mask = rng.integers(0, 8, (2, kv_seq)) > 0
        mask[0, kv_seq // 3 :] = False
        options["mask"] = jnp.asarray(mask)
    if options.pop("segments", False):
        options["segment_ids"] = jnp.asarray(np.sort(rng.integers(0, 4, (2, seq))), jnp.int32)
        if seq != kv_seq:
            options["kv_segment_ids"] = jnp.asarray(np.sort(rng.integers(0, 4, (2, kv_seq))), jnp.int32)
    return (q, k, v), bias, options


general = functools.partial(compiled.attention, config=SMALL, implementation=KERNEL)


@pytest.mark.parametrize("name", CASES)
def test_every_option_against_torch(reference, implementation, name):
    arrays, bias, options = operands(CASES[name])

    @jax.jit
    def f(*arrays, bias):
        return ops.attention(
            *arrays, bias=bias, return_lse=True, config=SMALL, implementation=implementation, **options
        )

    out, lse = f(*arrays, bias=bias)
    assert_close(out, reference.compute(reference.attention, *arrays, bias, **options), LONG)
    expected = reference.compute(reference.attention_lse, *arrays[:2], bias, **options)
    empty = np.isneginf(expected)
    assert lse.dtype == jnp.float32
    assert np.all(np.isneginf(float64(lse)[empty]))
    assert_close(float64(lse)[~empty], expected[~empty], SHORT)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["grouped heads", "all"])
def test_every_dtype_against_torch(reference, implementation, dtype, tolerance, name):
    arrays, bias, options = operands(CASES[name], dtype)
    f = jax.jit(lambda *arrays: ops.attention(*arrays, bias=bias, implementation=implementation, **options))
    out = f(*arrays)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.attention, *arrays, bias, **options), tolerance)


@pytest.mark.parametrize(
    "batch, seq, heads, kv_heads, head_dim, options",
    by_device(
        cpu=[(1, 150, 2, 1, 64, {"causal": True}), (1, 140, 2, 1, 128, {"causal": True, "window": 40})],
        gpu=[
            (4, 1024, 12, 12, 64, {"causal": True}),  # GPT-2
            (1, 2048, 32, 8, 128, {"causal": True}),  # Qwen3-8B
            (2, 1000, 16, 8, 128, {"causal": True, "window": 300}),
            (2, 2048, 16, 16, 64, {}),
            (2, 2048, 16, 16, 128, {}),
            (1, 1537, 4, 4, 256, {"causal": True}),
        ],
    ),
)
def test_shapes_of_models_with_the_tiles_chosen_for_them(
    reference, dtype, tolerance, batch, seq, heads, kv_heads, head_dim, options
):
    qkv = normal(np.random.default_rng(20), batch, seq, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    options = dict(num_heads=heads, num_kv_heads=kv_heads, **options)
    out = jax.jit(lambda qkv: kernel(qkv, **options))(qkv)
    assert_close(out, reference.compute(reference.attention_qkv, qkv, **options), tolerance)


def test_the_fused_buffer_is_the_same_as_its_parts():
    qkv = normal(np.random.default_rng(21), 2, 37, (4 + 2 * 2) * 16)
    parts = jnp.split(qkv.reshape(2, 37, 8, 16), [4, 6], axis=2)
    out, lse = kernel(qkv, num_heads=4, num_kv_heads=2, causal=True, return_lse=True, config=SMALL)
    apart, lse_apart = general(*parts, causal=True, return_lse=True)
    assert_equal(out.reshape(apart.shape), apart)
    assert_equal(lse, lse_apart)


def test_a_head_of_keys_serves_its_group():
    (q, k, v), _, _ = operands((37, 70, 6, 2, 16, {}))
    repeated = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    assert_equal(general(q, k, v), general(q, *repeated))


@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_batch_is_its_sentences_one_by_one(reference, causal):
    lengths = [5, 17, 1, 0, 40, 3]
    ends = np.cumsum([0, *lengths])
    total = int(ends[-1]) + 4  # padding at the end
    (q, k, v), _, _ = operands((total, total, 2, 1, 16, {}))
    ids = ops.segment_ids_from_cu_seqlens(jnp.asarray(ends), total)
    np.testing.assert_array_equal(ids, np.repeat(np.arange(7), [*lengths, 4]))
    out, lse = general(q, k, v, segment_ids=jnp.stack([ids, ids]), causal=causal, return_lse=True)
    for start, end in itertools.pairwise(ends):
        if start < end:
            q_part, k_part, v_part = (x[:, start:end] for x in (q, k, v))
            expected = reference.compute(reference.attention, q_part, k_part, v_part, causal=causal)
            assert_close(out[:, start:end], expected, LONG)
            expected = reference.compute(reference.attention_lse, q_part, k_part, causal=causal)
            assert_close(lse[..., start:end], expected, SHORT)


# What of the keys no query of the first 16, or of the last, may see.
@pytest.mark.parametrize(
    "rows, unseen, options",
    [
        (slice(0, 16), slice(16, 300), {"causal": True}),
        (slice(283, 300), slice(0, 240), {"causal": True, "window": 20}),
        (slice(0, 300), slice(160, 300), {"mask": array(np.arange(300)[None] < 150)}),
        (slice(0, 300), slice(0, 128), {"mask": array(np.arange(300)[None] > 150)}),
        (slice(0, 90), slice(112, 300), {"segment_ids": array(np.arange(300)[None] // 100)}),
        (slice(208, 300), slice(0, 192), {"segment_ids": array(np.arange(300)[None] // 100), "causal": True}),
    ],
    ids=["causal", "window", "mask, end", "mask, start", "segments", "causal segments"],
)
def test_blocks_without_a_valid_pair_are_not_read(rows, unseen, options):
    rng = np.random.default_rng(22)
    q, k, v = (normal(rng, 1, 300, 1, 16) for _ in range(3))
    out = general(q, k, v, **options)[:, rows]
    poisoned = general(q, *(x.at[:, unseen].set(jnp.nan) for x in (k, v)), **options)[:, rows]
    assert_equal(poisoned, out)


# Eight blocks of 16 keys. A window of 16 n + 2 ends a block before where one of a key less does: its first key is
# the last of a block. One of 16 n + 15 has its last key, seen from the end of a block, in the next.
@pytest.mark.parametrize("window", [2, 18, 31])
def test_windows_that_end_at_the_edge_of_a_block(reference, window):
    arrays, _, _ = operands((128, 128, 1, 1, 16, {}))
    options = dict(causal=True, window=window)
    assert_close(general(*arrays, **options), reference.compute(reference.attention, *arrays, **options), LONG)


def test_a_window_as_long_as_the_keys_changes_nothing():
    (q, k, v), _, _ = operands((70, 70, 2, 2, 16, {}))
    assert_close(general(q, k, v, causal=True, window=70), general(q, k, v, causal=True), SAME)


def test_halves_of_the_keys_merge_by_their_sums():
    (q, k, v), _, _ = operands((20, 70, 2, 2, 16, {}))
    whole, lse = general(q, k, v, return_lse=True)
    parts = [general(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 33), slice(33, 70))]
    weights = [jnp.exp(part - lse).transpose(0, 2, 1)[..., None] for _, part in parts]
    assert_close(sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), whole, LONG)


def test_a_bias_of_minus_infinity_masks(reference, implementation):
    (q, k, v), _, _ = operands((21, 70, 2, 2, 16, {}))
    mask = random_mask(np.random.default_rng(23), 2, 70).at[1].set(0)
    expected = reference.compute(reference.attention, q, k, v, mask=mask)
    expected_lse = reference.compute(reference.attention_lse, q, k, mask=mask)
    f = functools.partial(ops.attention, q, k, v, config=SMALL, implementation=implementation, return_lse=True)
    f = jax.jit(lambda bias, f=f: f(bias=bias))
    for least in (-jnp.inf, float(jnp.finfo(jnp.float32).min), -1e30):
        bias = np.where(mask != 0, 0.0, least)[:, None, None]
        out, lse = f(jnp.asarray(np.broadcast_to(bias, (2, 1, 21, 70)), jnp.float32))
        assert_close(out, expected, SHORT)
        assert np.all(float64(out[1]) == 0.0)
        assert_close(lse[0], expected_lse[0], SHORT)
        assert np.all(np.isneginf(lse[1]))


def test_a_bias_just_above_the_one_that_masks_does_not_mask(implementation):
    # It swallows the scores, which leaves all keys alike.
    (q, k, v), _, _ = operands((21, 70, 2, 2, 16, {}))
    bias = jnp.full((1, 1, 21, 70), -9.9e29)
    f = functools.partial(compiled.attention, config=SMALL, implementation=implementation)
    expected = np.broadcast_to(np.mean(float64(v), axis=1, keepdims=True), q.shape)
    assert_close(f(q, k, v, bias=bias), expected, SHORT)


@pytest.mark.parametrize("sm_scale", [3e8, 1e20])
def test_rows_without_keys_are_zero_at_any_scale(implementation, sm_scale):
    (q, k, v), _, _ = operands((37, 21, 2, 2, 16, {}))
    f = functools.partial(compiled.attention, sm_scale=sm_scale, implementation=implementation)
    out, lse = f(q, k, v, causal=True, return_lse=True)
    assert np.all(float64(out[:, :16]) == 0.0) and np.all(np.isneginf(lse[..., :16]))
    out = f(q, k, v, mask=jnp.zeros((2, 21), bool))
    assert np.all(float64(out) == 0.0)


def test_a_window_of_any_length(implementation):
    (q, k, v), _, _ = operands((21, 70, 2, 2, 16, {}))
    f = functools.partial(compiled.attention, causal=True, implementation=implementation)
    assert_close(f(q, k, v, window=10**12), f(q, k, v), SAME)


def test_nan_in_a_masked_key_reaches_no_gradient(implementation):
    (q, k, v), _, _ = operands((21, 70, 2, 2, 16, {}))
    mask = random_mask(np.random.default_rng(29), 2, 70)
    poisoned = jnp.where((mask == 0)[:, :, None, None], jnp.nan, k)

    @jax.jit
    def gradients(q, k, v):
        def loss(q, k, v):
            return jnp.sum(general(q, k, v, mask=mask, implementation=implementation) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for gradient, expected in zip(gradients(q, poisoned, v), gradients(q, k, v), strict=True):
        assert_equal(gradient, expected)


@functools.cache
def masked_kernel():
    """Compiled once for all masks and segments; 300 keys are 19 blocks, enough to search them."""

    def f(q, k, v, mask, ids, kv_ids):
        return general(q, k, v, mask=mask, segment_ids=ids, kv_segment_ids=kv_ids)

    return jax.jit(f), jax.jit(functools.partial(ops.attention, implementation="xla"))


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.lists(st.integers(0, 40), max_size=6),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from([1, 2, 50, 299]),
    st.booleans(),
    st.integers(0, 9),
)
def test_any_segments_and_masks(ends, kv_ends, holes, is_sorted, seed):
    f, xla = masked_kernel()
    (q, k, v), _, _ = operands((40, 300, 1, 1, 16, {}), seed=seed)
    rng = np.random.default_rng(seed)
    ids, kv_ids = (
        np.searchsorted(np.sort(np.asarray(e, int)), np.arange(n), side="right")
        for e, n in ((ends, 40), (kv_ends, 300))
    )
    if not is_sorted:
        ids, kv_ids = rng.permutation(ids), rng.permutation(kv_ids)
    masks = rng.integers(0, 300, (2, 300)) >= holes
    ids, kv_ids = (jnp.asarray(np.stack([x, x[::-1]]), jnp.int32) for x in (ids, kv_ids))
    out = f(q, k, v, masks, ids, kv_ids)
    expected = xla(q, k, v, mask=masks, segment_ids=ids, kv_segment_ids=kv_ids)
    empty = np.all(float64(expected) == 0.0, axis=-1)
    assert np.all(float64(out)[empty] == 0.0)
    if not np.all(empty):
        assert_close(float64(out)[~empty], float64(expected)[~empty], LONG)


@hypothesis.given(
    st.integers(1, 90), st.integers(1, 90), st.integers(1, 100), st.sampled_from([16, 32]), st.integers(0, 9)
)
def test_any_lengths_and_windows(reference, seq, kv_seq, window, block_kv, seed):
    arrays, _, _ = operands((seq, kv_seq, 1, 1, 16, {}), seed=seed)
    options = dict(causal=True, window=window)
    out = general(*arrays, config=dataclasses.replace(SMALL, block_kv=block_kv), **options)
    assert_close(out, reference.compute(reference.attention, *arrays, **options), LONG)


@pytest.mark.parametrize("name", ["grouped heads", "bias"])
def test_gradients_of_the_general_form(reference, name):
    arrays, bias, options = operands(CASES[name])
    arrays = arrays if bias is None else (*arrays, bias)
    cotangent = normal(np.random.default_rng(24), *arrays[0].shape)
    attend = functools.partial(reference.attention, **{n: reference.tensor(x) for n, x in options.items()})
    expected = reference.gradients(attend, arrays, cotangent)

    def f(q, k, v, bias=None):
        return general(q, k, v, bias=bias, **options)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


def test_gradients_of_the_log_sum_exp(reference):
    (q, k, v), _, options = operands(CASES["segments"])
    cotangent = normal(np.random.default_rng(25), 2, 2, 70)
    lse = functools.partial(reference.attention_lse, segment_ids=reference.tensor(options["segment_ids"]))
    expected = reference.gradients(lse, (q, k), cotangent)

    def f(q, k):
        return general(q, k, v, return_lse=True, **options)[1]

    assert_gradients_close(f, (q, k), cotangent, expected, GRADIENT)


def test_no_keys_and_no_queries(implementation):
    q, k = normal(np.random.default_rng(26), 2, 3, 1, 16), jnp.zeros((2, 0, 1, 16))
    f = functools.partial(compiled.attention, return_lse=True, implementation=implementation)
    out, lse = f(q, k, k)
    assert out.shape == q.shape
    assert np.all(float64(out) == 0.0)
    assert np.all(np.isneginf(lse))
    out, lse = f(k, q, q)
    assert out.shape == (2, 0, 1, 16)
    assert lse.shape == (2, 1, 0)


# The kernel for Hopper GPUs. Blocks of 64 queries and keys unless a case says otherwise.

edges = pytest.mark.skipif(
    MOSAIC != "mosaic" and jax.__version_info__ < (0, 11),
    reason="JAX 0.10 interprets nothing past the end of an array",
)
HOPPER_CASES = {
    "one block": ((64, 64, 1, 1, 64, {}), {}),
    "two warpgroups, heads of 128": ((128, 128, 1, 1, 128, {}), {"block_q": 128, "block_kv": 128}),
    "tiles of one and two blocks": ((128, 128, 1, 1, 64, {"causal": True}), {"num_cores": 1}),
    "ragged": ((70, 150, 2, 2, 64, {"sm_scale": 0.3}), {"block_kv": 128}),
    "ragged, causal": ((203, 331, 2, 1, 64, {"causal": True}), {"block_q": 128, "num_stages": 3, "num_cores": 3}),
    "more queries than keys": ((192, 64, 1, 1, 64, {"causal": True}), {"num_cores": 1}),
    "window": ((300, 300, 1, 1, 64, {"causal": True, "window": 70}), {"num_cores": 2}),
    "window of one key": ((130, 140, 1, 1, 128, {"causal": True, "window": 1}), {"block_q": 128}),
    "window to both sides": ((128, 192, 2, 1, 64, {"window": 20, "mask": True}), {"num_cores": 2}),
    "few": ((5, 9, 2, 1, 64, {"causal": True}), {"block_kv": 128}),
    "all masks, searched": (
        (256, 320, 2, 1, 64, {"causal": True, "window": 200, "mask": True, "segments": True}),
        {"block_q": 128, "num_stages": 3, "num_cores": 1},
    ),
    "ragged, all masks": ((203, 331, 2, 1, 64, {"mask": True, "segments": True}), {"block_kv": 128}),
    "bias of each head": ((128, 192, 2, 1, 64, {"bias": (1, 2)}), {"num_cores": 3}),
    "bias and masks": (
        (128, 128, 2, 2, 128, {"bias": (2, 1), "causal": True, "segments": True}),
        {"block_q": 128, "num_cores": 1},
    ),
    "ragged, bias": ((70, 150, 1, 1, 64, {"bias": (1, 1), "mask": True}), {"block_kv": 128}),
    "heads of 32": ((192, 128, 2, 1, 32, {"causal": True}), {"block_kv": 128, "num_cores": 1}),
    "heads of 32, few": ((16, 16, 2, 2, 32, {"mask": True}), {}),
    "heads of 32, ragged": (
        (70, 150, 2, 1, 32, {"mask": True, "segments": True, "window": 90, "bias": (2, 1)}),
        {"block_q": 128, "num_cores": 2},
    ),
    # As with the windows above, of blocks of 64.
    "window that begins with the last key of a block": (
        (256, 256, 1, 1, 64, {"causal": True, "window": 66}),
        {"num_cores": 2},
    ),
    "window that ends with the first key of a block": (
        (256, 256, 1, 1, 64, {"causal": True, "window": 127}),
        {"num_cores": 2},
    ),
}


def hopper(*, block_q: int = 64, block_kv: int = 64, num_stages: int = 2) -> mosaic.Config:
    return mosaic.Config(block_q=block_q, block_kv=block_kv, num_stages=num_stages)


def hopper_case(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Operands of a case, and its options with the config; a GPU with fewer cores takes tiles in turn."""
    case, config = HOPPER_CASES[name]
    monkeypatch.setattr(target, "_local", lambda: gpu(config.get("num_cores", 132)))
    arrays, bias, options = operands(case, "bfloat16")
    options |= {} if bias is None else {"bias": bias}
    return arrays, options, hopper(**{field: value for field, value in config.items() if field != "num_cores"})


def assert_attends(reference, out, lse, arrays, options, dtype) -> None:
    """Result and log-sum-exp are the reference's, 0 and -inf where a row sees no key."""
    assert out.dtype == dtype
    expected = reference.compute(reference.attention_lse, *arrays[:2], **options)
    empty = np.isneginf(expected)
    assert np.all(np.isneginf(float64(lse)[empty]))
    assert_close(float64(lse)[~empty], expected[~empty], DEEP)
    empty = empty.transpose(0, 2, 1)
    assert np.all(float64(out)[empty] == 0.0)
    expected = reference.compute(reference.attention, *arrays, **options)
    assert_close(float64(out)[~empty], expected[~empty], OP[dtype])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[edges] * (c[0][0] % 64 + c[0][1] % 64 > 0)) for n, c in HOPPER_CASES.items()]
)
def test_hopper_kernel(reference, monkeypatch, name):
    if "searched" in name:
        monkeypatch.setattr(attention_walk, "SEARCHED", 1)
    arrays, options, config = hopper_case(name, monkeypatch)
    out, lse = ops.attention(*arrays, return_lse=True, config=config, implementation=MOSAIC, **options)
    assert_attends(reference, out, lse, arrays, options, "bfloat16")


def test_hopper_kernel_leaves_rows_without_keys_zero_at_any_scale(monkeypatch):
    (q, k, v), options, config = hopper_case("more queries than keys", monkeypatch)
    out, lse = ops.attention(
        q, k, v, sm_scale=1e20, return_lse=True, config=config, implementation=MOSAIC, **options
    )
    assert np.all(float64(out[:, :128]) == 0.0) and np.all(np.isneginf(lse[..., :128]))


@pytest.mark.parametrize(
    "dtype, batch, seq, kv_seq, heads, kv_heads, head_dim, options",
    by_device(
        cpu=[("float16", 1, 64, 64, 2, 1, 64, {})],
        gpu=[
            ("bfloat16", 4, 1024, 1024, 12, 12, 64, {"causal": True}),
            ("bfloat16", 1, 2048, 2048, 32, 8, 128, {"causal": True}),
            ("float16", 2, 1003, 777, 16, 8, 128, {"causal": True, "window": 300}),
            ("bfloat16", 2, 777, 2050, 16, 16, 64, {"causal": True}),
            ("float16", 2, 2048, 2048, 16, 16, 128, {}),
            ("float16", 3, 40, 4000, 4, 4, 64, {}),
        ],
    ),
)
def test_hopper_kernel_with_blocks_of_its_choice(
    reference, dtype, batch, seq, kv_seq, heads, kv_heads, head_dim, options
):
    rng = np.random.default_rng(27)
    shapes = ((batch, length, n, head_dim) for length, n in ((seq, heads), (kv_seq, kv_heads), (kv_seq, kv_heads)))
    arrays = [normal(rng, *shape, dtype=dtype) for shape in shapes]
    out = compiled.attention(*arrays, implementation=MOSAIC, **options)
    assert_close(out, reference.compute(reference.attention, *arrays, **options), OP[dtype])


@pytest.mark.parametrize("seq", [64, pytest.param(70, marks=edges)])
def test_hopper_kernel_reads_the_fused_buffer_in_place(seq):
    qkv = normal(np.random.default_rng(28), 1, seq, (2 + 2 * 1) * 64, dtype="bfloat16")
    parts = jnp.split(qkv.reshape(1, seq, 4, 64), [2, 3], axis=2)
    options = dict(causal=True, config=hopper(), implementation=MOSAIC)
    out = compiled.attention_qkv(qkv, num_heads=2, num_kv_heads=1, **options)
    assert_equal(out.reshape(1, seq, 2, 64), compiled.attention(*parts, **options))


@finds_races
@pytest.mark.parametrize("name", ["tiles of one and two blocks", "ragged, causal"])
def test_hopper_kernel_has_no_races(monkeypatch, name):
    arrays, options, config = hopper_case(name, monkeypatch)
    with no_races():
        ops.attention(*arrays, config=config, implementation=MOSAIC, **options)


def test_hopper_kernel_under_vmap_and_its_gradients():
    arrays, _, _ = operands((128, 128, 1, 1, 64, {}), "bfloat16")

    def loss(arrays, implementation, config=None):
        one = functools.partial(compiled.attention, config=config, implementation=implementation)
        return jnp.sum(jax.vmap(one)(*(x[:, None] for x in arrays)).astype("float32") ** 2)

    out, gradients = jax.value_and_grad(loss)(arrays, MOSAIC, hopper())
    expected, wanted = jax.value_and_grad(loss)(arrays, "xla")
    assert_close(out, expected, OP["bfloat16"])
    for gradient, one in zip(gradients, wanted, strict=True):
        assert_close(gradient, one, 2 * OP["bfloat16"])


@without_gpu
@pytest.mark.parametrize(
    "dtype, batch, seq, heads, kv_heads, head_dim, options",
    [
        ("bfloat16", 8, 1024, 12, 12, 64, {"causal": True}),
        ("float16", 1, 1000, 32, 8, 128, {"causal": True, "window": 300, "return_lse": True}),
        ("bfloat16", 2, 2048, 16, 16, 128, {}),
    ],
)
def test_hopper_kernel_lowers(dtype, batch, seq, heads, kv_heads, head_dim, options):
    qkv = jax.ShapeDtypeStruct((batch, seq, (heads + 2 * kv_heads) * head_dim), dtype)

    def f(qkv):
        return ops.attention_qkv(qkv, num_heads=heads, num_kv_heads=kv_heads, implementation="mosaic", **options)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(f, qkv)
    assert text.count(f"@{MOSAIC_CALL}") == 1
    assert "stablehlo.dot_general" not in text and "stablehlo.pad" not in text


@without_gpu
@pytest.mark.parametrize(
    "head_dim, options",
    [
        (32, {"segment_ids": array(np.zeros((1, 1024)), "int32")}),
        (64, {"segment_ids": array(np.zeros((1, 1024)), "int32")}),
        (
            128,
            {"mask": array(np.ones((1, 1024), bool)), "bias": array(np.zeros((1, 1, 1024, 1024))), "window": 65},
        ),
    ],
)
def test_hopper_kernel_lowers_with_masks(head_dim, options):
    def f(qkv):
        return ops.attention_qkv(qkv, num_heads=2, implementation="mosaic", **options)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(f, jax.ShapeDtypeStruct((1, 1024, 3 * 2 * head_dim), jnp.bfloat16))
    assert text.count(f"@{MOSAIC_CALL}") == 1


@pytest.mark.parametrize(
    "batch, seq, options",
    [
        (8, 16, {"mask": True}),
        (2, 64, {"causal": True}),
        pytest.param(6, 30, {"causal": True, "mask": True}, marks=edges),
    ],
    ids=str,
)
def test_short_sequences_go_together(monkeypatch, batch, seq, options):
    if MOSAIC != "mosaic":
        monkeypatch.setattr(target, "_local", lambda: gpu(1))
    rng = np.random.default_rng(30)
    q, k, v, dout = (normal(rng, batch, seq, heads, 32, dtype="bfloat16") for heads in (2, 1, 1, 2))
    dlse = normal(rng, batch, 2, seq)
    if "mask" in options:
        options = options | {"mask": array(rng.random((batch, seq)) < 0.7).at[:, 0].set(True)}

    def found(implementation, *arrays):
        f = functools.partial(ops.attention, implementation=implementation, return_lse=True, **options)
        results, pull = jax.vjp(f, *arrays)
        return *results, *pull((dout.astype(arrays[0].dtype), dlse))

    out, lse, *gradients = found(MOSAIC, q, k, v)
    expected, wanted_lse, *wanted = found("xla", *(x.astype("float32") for x in (q, k, v)))
    assert_close(out, expected, OP["bfloat16"])
    assert_close(lse, wanted_lse, DEEP)
    for gradient, one in zip(gradients, wanted, strict=True):
        assert_close(gradient, one, 2 * OP["bfloat16"])


@without_gpu
@pytest.mark.parametrize("batch, count", [(64, 8), (4, 4), (9, 1)])
def test_as_many_go_together_as_a_tile_has_room_for(batch, count):
    x = jax.ShapeDtypeStruct((batch, 16, 2, 32), jnp.bfloat16)
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(functools.partial(ops.attention, implementation="mosaic"), x, x, x)
    assert text.count(f"@{MOSAIC_CALL}") == 1
    assert f"tensor<{batch // count}x{count * 16}x64xbf16>" in text
    assert bool(re.search(r"stablehlo\.pad.*xbf16>", text)) == (count < 8)


# The kernel for heads of 32, whose keys stay in shared memory.

RESIDENT_CASES = {
    "two tiles, blocks of 128": (128, 256, 2, 1, 32, {"sm_scale": 0.3}),
    "a tile, blocks of 64": (64, 192, 2, 2, 32, {"mask": True}),
    "one block": (192, 128, 1, 1, 32, {"mask": True}),
    "blocks without a key": (128, 512, 1, 1, 32, {"mask": True}),
    "rows without a key": (64, 64, 2, 1, 32, {"mask": True}),
}


@pytest.mark.parametrize("name", RESIDENT_CASES)
def test_resident_kernel(reference, name):
    arrays, _, options = operands(RESIDENT_CASES[name], "float16")
    if name == "rows without a key":
        options["mask"] = options["mask"].at[1].set(False)
    out, lse = ops.attention(*arrays, return_lse=True, implementation=MOSAIC, **options)
    assert_attends(reference, out, lse, arrays, options, "float16")


def test_resident_kernel_reads_the_fused_buffer_and_no_masked_key():
    qkv = normal(np.random.default_rng(29), 1, 128, (2 + 2 * 1) * 32, dtype="bfloat16")
    q, k, v = jnp.split(qkv.reshape(1, 128, 4, 32), [2, 3], axis=2)
    mask = jnp.arange(128)[None] < 50
    options = dict(mask=mask, implementation=MOSAIC)
    out = compiled.attention_qkv(qkv, num_heads=2, num_kv_heads=1, **options)
    lost = jnp.where(mask[:, :, None, None], k, jnp.nan)
    assert_equal(out.reshape(1, 128, 2, 32), compiled.attention(q, lost, v, **options))


@without_gpu
@pytest.mark.parametrize("batch, seq", [(32, 512), (256, 128)])
def test_resident_kernel_lowers_where_it_is_preferred(batch, seq):
    qkv = jax.ShapeDtypeStruct((batch, seq, 3 * 12 * 32), jnp.float16)
    mask = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(lambda qkv, mask: ops.attention_qkv(qkv, num_heads=12, mask=mask), qkv, mask)
    assert text.count(f"@{MOSAIC_CALL}") == 1 and TRITON_CALL not in text


@pytest.mark.parametrize("in_cache", [0, 4, 100])
@pytest.mark.parametrize("heads, blocks", [(64, range(16, 0, -1)), (16, range(64, 0, -1)), (7, [3, 3]), (1, [1])])
def test_heads_walked_together_keep_all_programs_busy(heads, blocks, in_cache):
    none = np.zeros(len(blocks), int)  # the runs of whole blocks, which take as long
    group = attention_walk.group_of_heads(
        (none, np.asarray(blocks), none, none), heads, len(blocks), in_cache, 132
    )
    assert heads % group == 0
    work = np.zeros(132, int)
    tiles = [b for _ in range(0, heads, group) for b in blocks for _ in range(group)]
    for i, tile in enumerate(tiles):
        turn, program = divmod(i, 132)
        work[program if turn % 2 == 0 else 131 - program] += tile
    assert max(work) <= max(1.05 * sum(tiles) / 132, max(blocks))


@pytest.mark.parametrize(
    "dtype, head_dim, options, message",
    [
        ("float32", 64, {}, "takes float16 and bfloat16, not float32"),
        ("bfloat16", 80, {}, "takes heads of .*32, 64 and 128, not head_dim=80"),
        ("bfloat16", 64, {"sm_scale": -1.0}, r"takes positive scales, not sm_scale=-1\.0"),
        (
            "bfloat16",
            64,
            {"config": SMALL},
            r"takes a Config of pallas_models\.kernels\.mosaic\.attention\w*, not pallas_models\.kernels\.triton",
        ),
    ],
)
def test_what_kernels_of_mosaic_do_not_serve(dtype, head_dim, options, message):
    x = jnp.ones((2, 8, 2, head_dim), dtype)
    with pytest.raises(NotImplementedError, match=message):
        ops.attention(x, x, x, implementation=MOSAIC, **options)


@pytest.mark.parametrize("field, value", [("block_q", 100), ("block_q", 320), ("block_kv", 32), ("num_stages", 1)])
def test_hopper_blocks_of_no_possible_size_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        hopper(**{field: value})
