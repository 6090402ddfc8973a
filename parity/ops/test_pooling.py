"""`ops.mean_pool`, `ops.segment_mean_pool` against torch: masks, segments, garbage in padding, tiles, gradient."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.mosaic import pooling as mosaic
from pallas_models.kernels.triton.pooling import Config
from parity.support.common import (
    KERNEL,
    MOSAIC,
    ON_GPU,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    cosines,
    cuda_device,
    float64,
    gpu,
    interprets_mosaic,
    normal,
    random_mask,
)
from parity.support.tolerances import GRADIENT, LONG, SAME, SHORT

SHAPES = by_device(  # batch, seq, width
    cpu=[
        (1, 1, 1),
        (3, 37, 33),  # odd everywhere
        (2, 130, 384),  # more than one block of tokens at MiniLM's width
    ],
    gpu=[
        (1, 16, 384),
        (64, 128, 384),
        (8, 512, 384),
        (3, 77, 385),
        (5, 300, 1024),
    ],
)
kernel = functools.partial(compiled.mean_pool, implementation=KERNEL)


def operands(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return normal(rng, *shape, dtype=dtype, shift=0.2), random_mask(rng, *shape[:2])


@pytest.mark.covering(2)
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "mean"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, shape, normalize):
    x, mask = operands(shape, dtype)

    @jax.jit
    def f(x, mask):
        return ops.mean_pool(x, mask, normalize=normalize, implementation=implementation)

    out = f(x, mask)
    assert out.dtype == "float32"
    expected = reference.compute(reference.mean_pool, x, mask, normalize=normalize)
    assert_close(out, expected, LONG)  # in every dtype: sums and result are float32
    if normalize:
        np.testing.assert_allclose(np.linalg.norm(float64(out), axis=-1), 1.0, atol=1e-6)
        assert np.all(cosines(out, expected) > 1 - 1e-9)


@functools.cache
def small_kernel():
    """Compiled once for all masks: 37 tokens are ten blocks, the last ragged."""
    return jax.jit(functools.partial(kernel, config=Config(block_s=4, num_warps=1)))


bits = st.lists(st.integers(0, 1), min_size=37, max_size=37)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(bits, min_size=2, max_size=2), st.integers(0, 9))
@hypothesis.example([[0] * 37, [1] * 37], 0)
@hypothesis.example([[0] * 36 + [1], [1] + [0] * 36], 1)
def test_any_mask(reference, mask, seed):
    x, mask = operands((2, 37, 33), seed=seed)[0], jnp.asarray(mask, jnp.int32)
    out = small_kernel()(x, mask)
    expected = reference.compute(reference.mean_pool, x, mask)
    for row in range(2):
        if not np.any(mask[row]):
            assert np.all(float64(out[row]) == 0.0)  # zero, and not NaN
        else:
            assert_close(out[row], expected[row], LONG)


@pytest.mark.parametrize("garbage", [1e4, np.inf, -np.inf, np.nan])
def test_padding_never_reaches_the_result(implementation, garbage):
    x, mask = operands((3, 37, 33), seed=1)
    mask = mask.at[1].set(0)
    f = functools.partial(compiled.mean_pool, mask=mask, implementation=implementation)
    assert_equal(f(jnp.where(mask[:, :, None] == 0, garbage, x)), f(x))


def test_nan_in_a_token_is_not_hidden(implementation):
    x, mask = operands((2, 9, 33), seed=2)
    mask = mask.at[:, 4].set(1)
    out = float64(compiled.mean_pool(x.at[0, 4, 5].set(np.nan), mask, implementation=implementation))
    assert np.isnan(out[0, 5])
    assert np.all(np.isfinite(out[1]))


def test_boolean_mask(implementation):
    x, mask = operands((2, 9, 33), seed=3)
    f = functools.partial(compiled.mean_pool, x, implementation=implementation)
    assert_close(f(mask.astype(bool)), f(mask), SAME)


@pytest.mark.parametrize("scale", [1e-15, 1e-6, 1e15])  # the least is below epsilon, and stays below unit norm
def test_tiny_and_huge_means(reference, implementation, scale):
    x, mask = operands((3, 9, 33), seed=4)
    x = x * scale
    out = compiled.mean_pool(x, mask, implementation=implementation)
    assert_close(out, reference.compute(reference.mean_pool, x, mask), LONG)


@pytest.mark.covering(1)
@pytest.mark.parametrize("epsilon", [1e-12, 1e-20, 1e-30, 0.0])
def test_any_epsilon(implementation, epsilon):
    """Neither its square nor a mean's may leave float32: no token gives zeros, all others a unit norm."""
    x, mask = operands((4, 9, 33), seed=10)
    mask = mask.at[1].set(0)
    scale = jnp.asarray([1.0, 1.0, 1e-8, 1e25])[:, None, None]
    out = compiled.mean_pool(x * scale, mask, epsilon=epsilon, implementation=implementation)
    expected = compiled.mean_pool(x, mask, implementation="xla")
    assert not np.any(float64(out[1]))
    assert_close(out, expected, LONG)
    gradient = jax.grad(
        lambda x: jnp.sum(ops.mean_pool(x, mask, epsilon=epsilon, implementation=implementation)[0] ** 3)
    )(x)
    assert np.all(np.isfinite(float64(gradient)))


def test_means_far_below_epsilon(implementation):
    x, mask = operands((3, 9, 33), seed=12)
    out = compiled.mean_pool(x * 1e-21, mask, epsilon=0.1, implementation=implementation)
    mean = compiled.mean_pool(x, mask, normalize=False, implementation="xla")
    assert_close(float64(out) * 1e20, mean, LONG)


@pytest.mark.parametrize("token", [1, 255, -1])
def test_under_jit_anything_but_zero_is_a_token(implementation, token):
    # Concrete masks of anything but 0 and 1 are refused; those that are traced cannot be looked at.
    x, mask = operands((2, 9, 33), seed=11)
    f = functools.partial(compiled.mean_pool, x, implementation=implementation)
    integers = np.asarray(mask) * token
    assert_close(f(integers.astype("uint8" if token > 0 else "int8")), f(mask), SAME)
    with jax.enable_x64(True):
        assert_close(f(integers.astype("int64") * 2**32), f(mask), SAME)


@pytest.mark.parametrize("block_s, num_warps", [(1, 1), (8, 2), (64, 4)])
@pytest.mark.parametrize("shape", [(3, 37, 33), (2, 64, 64)], ids=str)
def test_every_tile_config(shape, block_s, num_warps):
    x, mask = operands(shape, seed=5)
    out = kernel(x, mask, config=Config(block_s=block_s, num_warps=num_warps))
    assert_close(out, compiled.mean_pool(x, mask, implementation="xla"), LONG)


@pytest.mark.parametrize("value", [0, -2, 3])
@pytest.mark.parametrize("field", ["block_s", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        Config(**{**dict(block_s=4, num_warps=1), field: value})


@hypothesis.given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 70), st.integers(0, 9))
def test_any_shape(batch, seq, width, seed):
    x, mask = operands((batch, seq, width), seed=seed)
    out = kernel(x, mask, normalize=False, config=Config(block_s=8, num_warps=1))
    assert_close(out, compiled.mean_pool(x, mask, normalize=False, implementation="xla"), LONG)


def test_order_of_batch_and_of_tokens():
    x, mask = operands((4, 37, 33), seed=6)
    out = kernel(x, mask)
    assert_equal(kernel(x[::-1], mask[::-1]), out[::-1])
    order = np.random.default_rng(7).permutation(37)
    assert_close(kernel(x[:, order], mask[:, order]), out, SHORT)


@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "mean"])
def test_gradients(reference, dtype, tolerance, normalize):
    x, mask = operands((3, 11, 22), dtype, seed=8)
    mask = mask.at[1].set(0)  # a row with no token at all
    cotangent = normal(np.random.default_rng(9), 3, 22)
    kept = reference.tensor(mask)
    expected = reference.gradients(lambda x: reference.mean_pool(x, kept, normalize=normalize), [x], cotangent)
    assert np.all(expected[0][1] == 0.0)

    def f(x):
        return kernel(x, mask, normalize=normalize)

    assert_gradients_close(f, [x], cotangent, expected, max(tolerance, GRADIENT))


@pytest.mark.parametrize("garbage", [np.inf, np.nan])
def test_padding_never_reaches_a_gradient(garbage):
    x, mask = operands((3, 11, 22), seed=10)
    cotangent = normal(np.random.default_rng(11), 3, 22)

    def pulled(x):
        return jax.vjp(lambda x: kernel(x, mask), x)[1](cotangent)[0]

    out = pulled(jnp.where(mask[:, :, None] == 0, garbage, x))
    assert_equal(out, pulled(x))
    assert not np.any(float64(out)[np.asarray(mask) == 0])


def test_the_gradient_keeps_the_mean_and_does_not_read_x_again():
    x, mask = operands((3, 11, 22), seed=12)

    def loss(implementation):
        return lambda x: jnp.sum(ops.mean_pool(x, mask, implementation=implementation) ** 3)

    def sums_over_x(implementation):
        with cuda_device("NVIDIA H200", 132):
            text = jax.jit(jax.grad(loss(implementation))).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return len(re.findall(r"stablehlo\.reduce\(.*tensor<3x11x22xf32>", text))

    assert sums_over_x("xla") and not sums_over_x("triton")


# Segments


def segments(x: jax.Array, lengths: list[int], seed: int = 5) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Segment ids of x (B, S, D), with padding between; which rows of the flattened x each segment has."""
    rng = np.random.default_rng(seed)
    ids = np.full(x.shape[0] * x.shape[1], -1)
    names, place = rng.permutation(len(lengths)), 1
    for name, length in zip(names, lengths, strict=True):
        ids[place : place + length] = name
        place += length + rng.integers(0, 3)
    assert place <= ids.size + 2
    mask = ids == np.arange(len(lengths))[:, None]
    ids[-1] = len(lengths) + 2 if ids[-1] == -1 else ids[-1]  # padding as well
    return jnp.asarray(ids.reshape(x.shape[:2]), jnp.int32), mask, ids


LENGTHS_OF_SEGMENTS = [3, 1, 0, 40, 7, 17, 2]
segments_kernel = functools.partial(compiled.segment_mean_pool, implementation=KERNEL)


@pytest.mark.covering(2)
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "mean"])
@pytest.mark.parametrize("width", by_device(cpu=[33, 384], gpu=[33, 384, 1024]))
def test_segments_against_torch(reference, implementation, dtype, width, normalize):
    x, _ = operands((3, 31, width), dtype)
    ids, mask, _ = segments(x, LENGTHS_OF_SEGMENTS)
    options = dict(num_segments=len(mask), normalize=normalize, implementation=implementation)
    out = compiled.segment_mean_pool(x, ids, **options)
    assert out.shape == (len(mask), width) and out.dtype == "float32"
    rows = jnp.broadcast_to(x.reshape(1, -1, width), (len(mask), x.shape[0] * x.shape[1], width))
    expected = reference.compute(reference.mean_pool, rows, jnp.asarray(mask, jnp.int32), normalize=normalize)
    empty = ~mask.any(1)
    assert empty.sum() == 1 and np.all(float64(out)[empty] == 0.0)
    assert_close(float64(out)[~empty], expected[~empty], LONG)


@pytest.mark.parametrize("garbage", [1e4, np.inf, np.nan])
def test_padding_never_reaches_a_segment(implementation, garbage):
    x, _ = operands((3, 31, 33), seed=1)
    ids, mask, flat = segments(x, LENGTHS_OF_SEGMENTS)
    f = functools.partial(compiled.segment_mean_pool, num_segments=len(mask), implementation=implementation)
    outside = jnp.asarray(~mask.any(0).reshape(x.shape[:2]))
    assert set(flat[~mask.any(0)]) == {-1, len(mask) + 2}
    with_garbage, without = f(jnp.where(outside[:, :, None], garbage, x), ids), f(x, ids)
    if ON_GPU and implementation == "xla":  # XLA adds up there in any order, by atomic additions.
        assert_close(with_garbage, without, LONG)
    else:
        assert_equal(with_garbage, without)


def test_segments_in_any_order(implementation):
    x, _ = operands((3, 31, 33))
    ids, mask, _ = segments(x, LENGTHS_OF_SEGMENTS)
    order = np.random.default_rng(8).permutation(ids.size)
    mixed = (a.reshape(-1, *a.shape[2:])[order].reshape(a.shape) for a in (x, ids))
    f = functools.partial(compiled.segment_mean_pool, num_segments=len(mask), implementation=implementation)
    assert_close(f(*mixed), f(x, ids), LONG)


@pytest.mark.parametrize("block_s", [1, 4, 64])
def test_segments_with_any_blocks(block_s):
    x, _ = operands((3, 31, 33))
    ids, mask, _ = segments(x, LENGTHS_OF_SEGMENTS)
    out = segments_kernel(x, ids, num_segments=len(mask), config=Config(block_s=block_s, num_warps=1))
    assert_close(out, compiled.segment_mean_pool(x, ids, num_segments=len(mask), implementation="xla"), LONG)


def test_segment_ids_of_64_bits(implementation):
    x, _ = operands((3, 31, 33))
    ids, mask, _ = segments(x, LENGTHS_OF_SEGMENTS)
    f = functools.partial(ops.segment_mean_pool, x, num_segments=len(mask), implementation=implementation)
    with jax.enable_x64(True):
        wide = jnp.where(ids == -1, 2**32, ids.astype("int64"))
        assert_close(f(wide), f(ids), SAME)


def test_gradient_of_segments():
    x, _ = operands((3, 31, 33), seed=6)
    ids, mask, _ = segments(x, LENGTHS_OF_SEGMENTS)
    cotangent = normal(np.random.default_rng(7), len(mask), 33)
    rows = jnp.asarray(mask, jnp.int32)

    def padded(x):
        return ops.mean_pool(
            jnp.broadcast_to(x.reshape(1, -1, 33), (len(mask), 93, 33)), rows, implementation="xla"
        )

    found = jax.grad(lambda x: jnp.sum(segments_kernel(x, ids, num_segments=len(mask)) * cotangent))(x)
    assert_close(found, jax.grad(lambda x: jnp.sum(padded(x) * cotangent))(x), GRADIENT)


@interprets_mosaic
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "mean"])
@pytest.mark.parametrize(
    "shape, config",
    [
        ((3, 37, 33), mosaic.Config(block_s=2)),
        ((3, 37, 33), mosaic.Config(block_s=2, warpgroups=2)),
        ((2, 9, 384), None),
        ((2, 3, 1100), mosaic.Config(block_s=4, warpgroups=3)),
    ],
    ids=str,
)
def test_mosaic(dtype, shape, config, normalize):
    x, mask = operands(shape, dtype)
    x = jnp.where(mask[..., None] == 0, jnp.nan, x)  # padding is not read
    options = dict(normalize=normalize, config=config, implementation=MOSAIC)
    expected = compiled.mean_pool(x.astype("float32"), mask, normalize=normalize, implementation="xla")
    assert_close(compiled.mean_pool(x, mask, **options), expected, LONG)
    segments = jnp.where(mask == 0, -1, jnp.arange(len(x))[:, None])
    assert_close(compiled.segment_mean_pool(x, segments, num_segments=len(x), **options), expected, LONG)


def test_mosaic_says_what_it_does_not_take():
    x, mask = jnp.ones((1, 1, 16385)), jnp.ones((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="takes rows of up to 16384 columns, not 16385"):
        ops.mean_pool(x, mask, implementation="mosaic_interpret")
    with pytest.raises(ValueError, match="block_s must be positive"):
        mosaic.Config(block_s=0)
    with pytest.raises(ValueError, match="warpgroups must be 1 to 8"):
        mosaic.Config(block_s=1, warpgroups=9)


@pytest.mark.parametrize(
    "sentences, seq, n, expected",
    [
        (64, 128, 384, (16, 4)),  # all tokens in one step
        (512, 128, 384, (16, 1)),
        (1, 16, 384, (8, 1)),
        (64, 32, 384, (16, 1)),
        (4, 512, 4096, (4, 2)),  # more would leave sums more shared memory than they are worth
    ],
)
def test_few_sentences_have_many_warpgroups(sentences, seq, n, expected):
    found = mosaic.heuristic(sentences, seq, n, "float16", gpu())
    assert (found.block_s, found.warpgroups) == expected
    assert found in mosaic.configs(seq, n, "float16")
