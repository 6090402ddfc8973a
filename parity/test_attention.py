"""`ops.attention` against torch: lengths, head sizes, masks, tiles, extremes, gradients."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.triton.attention import Config
from parity.common import (
    KERNEL,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    float64,
    normal,
    random_mask,
)

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
        (1, 65, 2, 256),
        (2, 1, 1, 16),
    ],
)
kernel = functools.partial(ops.attention, implementation=KERNEL)
SMALL = Config(block_q=16, block_kv=16, num_warps=1, num_stages=1)


def qkv_of(
    shape: tuple[int, int, int, int], dtype: str = "float32", seed: int = 0, scale: float = 1.5
) -> jax.Array:
    batch, seq, heads, head_dim = shape
    return normal(np.random.default_rng(seed), batch, seq, 3 * heads * head_dim, dtype=dtype, scale=scale)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape, masked):
    qkv = qkv_of(shape, dtype)
    mask = random_mask(np.random.default_rng(1), *shape[:2]) if masked else None

    @jax.jit
    def f(qkv, mask):
        return ops.attention(qkv, num_heads=shape[2], mask=mask, implementation=implementation)

    out = f(qkv, mask)
    assert out.dtype == dtype
    expected = reference.compute(reference.attention, qkv, num_heads=shape[2], mask=mask)
    assert_close(out, expected, tolerance)


def test_scale_of_scores_and_boolean_mask(reference, implementation):
    qkv, mask = qkv_of((2, 19, 2, 32)), random_mask(np.random.default_rng(2), 2, 19)
    out = ops.attention(qkv, num_heads=2, mask=mask.astype(bool), sm_scale=0.4, implementation=implementation)
    expected = reference.compute(reference.attention, qkv, num_heads=2, mask=mask, sm_scale=0.4)
    assert_close(out, expected, 2e-6)


@pytest.mark.parametrize("block_q, block_kv", [(16, 16), (64, 16), (16, 64), (32, 32)])
@pytest.mark.parametrize("seq", [50, 64])
def test_every_tile_config(seq, block_q, block_kv):
    qkv, mask = qkv_of((2, seq, 2, 32), seed=3), random_mask(np.random.default_rng(3), 2, seq)
    config = Config(block_q=block_q, block_kv=block_kv, num_warps=2, num_stages=2)
    out = kernel(qkv, num_heads=2, mask=mask, config=config)
    assert_close(out, ops.attention(qkv, num_heads=2, mask=mask, implementation="xla"), 2e-6)


@pytest.mark.parametrize("value", [0, -16, 48])
@pytest.mark.parametrize("field", ["block_q", "block_kv", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        Config(**{**dict(block_q=16, block_kv=16, num_warps=1, num_stages=1), field: value})


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
    expected = reference.compute(reference.attention, qkv, num_heads=2, mask=mask)
    for row in range(2):
        if not np.any(mask[row]):
            assert np.all(float64(out[row]) == 0.0)  # zero, and not NaN
        else:
            assert_close(out[row], expected[row], 2e-6)


@hypothesis.given(st.integers(1, 70), st.sampled_from([16, 32, 48]), st.integers(0, 9))
def test_any_length(seq, head_dim, seed):
    qkv, mask = qkv_of((2, seq, 1, head_dim), seed=seed), random_mask(np.random.default_rng(seed), 2, seq)
    out = kernel(qkv, num_heads=1, mask=mask, config=SMALL)
    assert_close(out, ops.attention(qkv, num_heads=1, mask=mask, implementation="xla"), 2e-6)


@pytest.mark.parametrize("garbage", [7.0, 1e4, -1e30])
def test_a_masked_key_has_exactly_no_weight(implementation, garbage):
    qkv, mask = qkv_of((2, 37, 2, 32), seed=4), random_mask(np.random.default_rng(4), 2, 37)
    f = functools.partial(ops.attention, num_heads=2, mask=mask, implementation=implementation)
    padding = (mask == 0)[:, :, None]
    keys_and_values = jnp.arange(qkv.shape[-1]) >= qkv.shape[-1] // 3
    assert_equal(f(jnp.where(padding & keys_and_values, garbage, qkv)), f(qkv))


def test_equal_values_come_out_as_they_are():
    # The weights of a row sum to one.
    qkv, mask = qkv_of((2, 37, 2, 32), seed=5), random_mask(np.random.default_rng(5), 2, 37)
    value = normal(np.random.default_rng(6), 64)
    out = small_kernel()(qkv.at[..., 128:].set(value), mask)
    assert_close(out, np.broadcast_to(float64(value), out.shape), 5e-7)


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
    assert_close(small_kernel()(qkv[:, order], mask[:, order]), out[:, order], 2e-6)


@pytest.mark.parametrize("dtype, scale", [("float32", 60.0), ("float16", 60.0), ("bfloat16", 1e4)])
def test_scores_of_thousands(reference, implementation, dtype, scale):
    # Softmax is all but one-hot: a wrong maximum gives infinities. Scores reach 1e4 to 1e9.
    qkv, mask = qkv_of((2, 37, 2, 32), dtype, seed=11, scale=scale), random_mask(np.random.default_rng(11), 2, 37)
    out = ops.attention(qkv, num_heads=2, mask=mask, implementation=implementation)
    expected = reference.compute(reference.attention, qkv, num_heads=2, mask=mask)
    # The scores' own float32 rounding, 1e4 * 2^-24, is what moves the weights here.
    assert_close(out, expected, {"float32": 1e-3, "float16": 1e-3, "bfloat16": 6e-3}[dtype])


def test_precision_of_float32(reference):
    qkv = qkv_of((2, 40, 2, 64), seed=12)
    expected = reference.compute(reference.attention, qkv, num_heads=2)
    for precision, tolerance in ((None, 2e-6), ("highest", 2e-6), ("default", 2e-3), ("high", 2e-3)):
        assert_close(kernel(qkv, num_heads=2, precision=precision), expected, tolerance)


def test_gradients(reference):
    qkv, mask = qkv_of((3, 21, 2, 16), seed=13), random_mask(np.random.default_rng(13), 3, 21)
    mask = mask.at[1].set(0)  # a row with no key at all
    cotangent = normal(np.random.default_rng(14), 3, 21, 32)
    attend = functools.partial(reference.attention, num_heads=2, mask=reference.tensor(mask))
    expected = reference.gradients(attend, [qkv], cotangent)

    def f(qkv):
        return kernel(qkv, num_heads=2, mask=mask)

    assert_gradients_close(f, [qkv], cotangent, expected, 3e-6)
    gradient = float64(jax.vjp(f, qkv)[1](cotangent)[0])
    assert np.all(gradient[1] == 0.0)
    assert np.all(gradient[:, :, 32:][np.asarray(mask) == 0] == 0.0)  # keys and values of padding
