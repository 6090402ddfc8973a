"""`ops.layer_norm` against torch: widths, residual, tiles, hard inputs, gradients."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.triton.norm import Config
from parity.common import KERNEL, TOLERANCE, assert_close, assert_gradients_close, by_device, float64, normal

SHAPES = by_device(
    cpu=[
        (5, 33),  # odd
        (2, 7, 384),  # MiniLM's width, leading dimensions
        (3, 17000),  # wider than one chunk: three passes over the row
    ],
    gpu=[
        (1, 384),
        (64, 128, 384),
        (8192, 768),
        (1001, 333),
        (3, 5, 7),
        (5, 20000),
    ],
)
kernel = functools.partial(ops.layer_norm, implementation=KERNEL)


def operands(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, scale, bias, residual."""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, *shape, dtype=dtype, scale=2.0, shift=0.7),
        normal(rng, shape[-1], dtype=dtype, shift=1.0, scale=0.3),
        normal(rng, shape[-1], dtype=dtype),
        normal(rng, *shape, dtype=dtype),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape):
    x, scale, bias, residual = operands(shape, dtype)

    @jax.jit
    def f(x, scale, bias, residual):
        return ops.layer_norm(x, scale, bias, residual=residual, implementation=implementation)

    out = f(x, scale, bias, residual)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.layer_norm, x, scale, bias, residual), tolerance)


def test_without_residual_and_with_epsilon(reference, implementation):
    x, scale, bias, _ = operands((6, 50), seed=1)
    out = ops.layer_norm(x, scale, bias, epsilon=0.5, implementation=implementation)
    assert_close(out, reference.compute(reference.layer_norm, x, scale, bias, epsilon=0.5), 1e-6)


def test_operands_of_mixed_dtype(reference, implementation):
    x, _, _, _ = operands((6, 50), "float16", seed=2)
    _, scale, bias, residual = operands((6, 50), seed=2)
    out = ops.layer_norm(x, scale, bias, residual=residual, implementation=implementation)
    assert out.dtype == "float16"
    expected = reference.compute(reference.layer_norm, x, scale, bias, residual)
    assert_close(out, expected, TOLERANCE["float16"])


@pytest.mark.parametrize(
    "dtype, shift, scale, tolerance",
    [
        ("float32", 300.0, 1.0, 2e-4),  # a mean far from zero: one pass would cancel to nothing (1e-2)
        ("float32", 0.0, 1e15, 3e-6),  # squares near the end of float32
        ("float32", 0.0, 1e-4, 3e-6),
        ("float16", 0.0, 1e4, 8e-4),  # squares beyond float16
    ],
)
def test_hard_inputs(reference, implementation, dtype, shift, scale, tolerance):
    rng = np.random.default_rng(3)
    x = normal(rng, 5, 384, dtype=dtype, shift=shift, scale=scale)
    _, weight, bias, _ = operands((1, 384), dtype)
    out = ops.layer_norm(x, weight, bias, epsilon=1e-12, implementation=implementation)
    assert_close(out, reference.compute(reference.layer_norm, x, weight, bias, epsilon=1e-12), tolerance)


def test_a_single_column_gives_the_bias(implementation):
    x, scale, bias, _ = operands((4, 1), seed=4)
    out = ops.layer_norm(x, scale, bias, implementation=implementation)
    assert_close(out, np.broadcast_to(float64(bias), (4, 1)), 1e-6)


@pytest.mark.parametrize("block_m, block_n", [(1, 16), (4, 64), (16, 32), (8, 256)])
@pytest.mark.parametrize("shape", [(33, 50), (16, 64), (5, 200)], ids=str)
def test_every_tile_config(shape, block_m, block_n):
    x, scale, bias, residual = operands(shape, seed=5)
    config = Config(block_m=block_m, block_n=block_n, num_warps=2)
    out = kernel(x, scale, bias, residual=residual, config=config)
    assert_close(out, ops.layer_norm(x, scale, bias, residual=residual, implementation="xla"), 1e-6)


@pytest.mark.parametrize("value", [0, -2, 48])
@pytest.mark.parametrize("field", ["block_m", "block_n", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        Config(**{**dict(block_m=4, block_n=64, num_warps=2), field: value})


@hypothesis.given(st.integers(1, 40), st.integers(2, 300), st.sampled_from([16, 128]), st.integers(0, 9))
def test_any_shape(m, n, block_n, seed):
    x, scale, bias, residual = operands((m, n), seed=seed)
    config = Config(block_m=4, block_n=block_n, num_warps=1)
    # A large epsilon keeps two nearly equal columns from amplifying rounding.
    options = dict(residual=residual, epsilon=0.1)
    out = kernel(x, scale, bias, config=config, **options)
    assert_close(out, ops.layer_norm(x, scale, bias, implementation="xla", **options), 2e-6)


def test_rows_have_no_mean_and_unit_variance_and_ignore_shift_and_scale():
    x, scale, bias, _ = operands((7, 300), seed=6)
    out = kernel(x, scale, bias, epsilon=0.0)
    rows = (float64(out) - float64(bias)) / float64(scale)
    np.testing.assert_allclose(rows.mean(-1), 0.0, atol=1e-6)
    np.testing.assert_allclose(rows.var(-1), 1.0, atol=1e-5)
    assert_close(kernel(4 * x + 8, scale, bias, epsilon=0.0), out, 5e-6)


def test_gradients(reference):
    arrays = operands((9, 31), seed=7)
    cotangent = normal(np.random.default_rng(8), 9, 31)
    expected = reference.gradients(reference.layer_norm, arrays, cotangent)

    def f(x, scale, bias, residual):
        return kernel(x, scale, bias, residual=residual)

    assert_gradients_close(f, arrays, cotangent, expected, 3e-6)
