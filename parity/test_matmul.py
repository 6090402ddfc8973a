"""`ops.matmul` against torch: shapes, epilogues, tiles, options, gradients."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.triton.matmul import Config
from parity.common import (
    KERNEL,
    assert_close,
    assert_gradients_close,
    by_device,
    float64,
    normal,
    relative_error,
)

SHAPES = by_device(
    cpu=[
        (1, 1, 1),  # less than any tile
        (5, 33, 7),  # odd everywhere
        (64, 128, 64),  # whole tiles: no masks
        (70, 150, 129),  # several tiles each way, all ragged
    ],
    gpu=[
        (1, 1, 1),
        (16, 384, 1152),  # MiniLM's projections at its smallest and largest batches
        (8192, 384, 1152),
        (8192, 384, 1536),
        (8192, 1536, 384),
        (2048, 768, 3072),
        (77, 385, 1151),  # odd everywhere: rows that are not aligned
        (1000, 130, 131),
    ],
)
CONFIGS = [
    Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1, group_m=1),
    Config(block_m=16, block_n=64, block_k=32, num_warps=2, num_stages=2, group_m=2),  # ragged last group
    Config(block_m=64, block_n=16, block_k=128, num_warps=4, num_stages=2, group_m=3),
    Config(block_m=32, block_n=48, block_k=16, num_warps=2, num_stages=2),  # held as 32 and 16 columns
    Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
]
kernel = functools.partial(ops.matmul, implementation=KERNEL)


def operands(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, w, bias and residual, such that x @ w is of order one: where activations bend."""
    m, k, n = shape
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=0.3),
        normal(rng, m, n, dtype=dtype),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_full_epilogue(reference, implementation, dtype, tolerance, shape):
    x, w, bias, residual = operands(shape, dtype)

    @jax.jit
    def f(x, w, bias, residual):
        return ops.matmul(x, w, bias=bias, residual=residual, activation="gelu", implementation=implementation)

    out = f(x, w, bias, residual)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation="gelu"), tolerance)


@pytest.mark.parametrize(
    "activation, has_bias, has_residual",
    [
        (None, False, False),
        (None, True, False),
        (None, False, True),
        ("gelu", False, False),
        ("gelu_tanh", True, False),
        ("silu", False, True),
        ("relu", True, True),
    ],
)
def test_every_part_of_the_epilogue_alone(reference, implementation, activation, has_bias, has_residual):
    x, w, bias, residual = operands((19, 40, 37), seed=1)
    bias, residual = bias if has_bias else None, residual if has_residual else None
    out = ops.matmul(x, w, bias=bias, residual=residual, activation=activation, implementation=implementation)
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation=activation), 1e-6)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)], ids=str)
def test_leading_dimensions(reference, implementation, batch):
    rng = np.random.default_rng(2)
    x, residual = normal(rng, *batch, 24), normal(rng, *batch, 18)
    _, w, bias, _ = operands((1, 24, 18))
    out = ops.matmul(x, w, bias=bias, residual=residual, activation="silu", implementation=implementation)
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation="silu"), 1e-6)


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_activations_are_exact_and_survive_extremes(reference, implementation, activation):
    # K = 1 and weights that are powers of two: what reaches the activation is exact.
    x = np.concatenate(
        [
            np.linspace(-9, 9, 1999),
            np.geomspace(1e-30, 30, 200),
            -np.geomspace(1e-30, 30, 200),
            [1e4, -1e4, 1e30, -1e30, 65504, -65504, np.inf, -np.inf, np.nan],
        ]
    )
    x = jnp.asarray(x, jnp.float32)[:, None]
    w = jnp.asarray([[1.0, -1.0, 0.5, -2.0]])
    with np.errstate(invalid="ignore"):
        out = float64(ops.matmul(x, w, activation=activation, implementation=implementation))
        expected = reference.compute(reference.matmul, x, w, activation=activation)
    finite = np.broadcast_to(np.isfinite(x), out.shape)
    assert np.all(np.isfinite(out[finite]))
    error = np.abs(out[finite] - expected[finite]) / np.maximum(1.0, np.abs(expected[finite]))
    assert np.max(error) < 1e-6
    y = float64(x) * float64(w)
    np.testing.assert_array_equal(out[y == np.inf], expected[y == np.inf])
    assert np.all(np.isnan(out[np.isnan(y)]))
    # torch computes -inf * 0 = NaN in all but relu; the limit, 0 to within the bound above, is as good.
    below = out[y == -np.inf]
    assert np.all((np.abs(below) < 1e-6) | (np.isnan(below) & np.isnan(expected[y == -np.inf])))


# Ragged tiles, and five by three of them where rows go in groups of two; whole tiles; a long contraction.
@pytest.mark.parametrize("shape", [(70, 53, 131), (128, 128, 128), (90, 200, 70)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.block_k}g{c.group_m}")
def test_every_tile_config(shape, config):
    x, w, bias, residual = operands(shape, seed=3)
    options = dict(bias=bias, residual=residual, activation="gelu")
    out = kernel(x, w, config=config, **options)
    assert_close(out, ops.matmul(x, w, implementation="xla", **options), 2e-6)


@pytest.mark.parametrize("value", [0, -16, 40])
@pytest.mark.parametrize("field", ["block_m", "block_n", "block_k", "num_warps"])
def test_a_block_of_no_possible_size_is_refused(field, value):
    sizes = dict(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1)
    with pytest.raises(ValueError, match=rf"{field}={value} must be a"):  # power of two, or multiple of 16
        Config(**{**sizes, field: value})


def test_float16_accumulation_is_an_option_with_its_price(reference):
    x, w, bias, _ = operands((40, 512, 48), "float16", seed=4)
    expected = reference.compute(reference.matmul, x, w, bias)
    in_half, in_full = (
        relative_error(kernel(x, w, bias=bias, acc_dtype=acc, out_dtype="float32"), expected)
        for acc in ("float16", "float32")
    )
    assert in_full < 2e-6
    assert in_half < 4e-3  # 512 roundings to 11 bits; several in a row happen in one step of a tensor core
    assert in_half > 2 * in_full, "acc_dtype made no difference"


@pytest.mark.parametrize("precision", [None, "highest", "high", "default", jax.lax.Precision.DEFAULT])
def test_precision_of_float32(reference, precision):
    x, w, bias, _ = operands((33, 200, 50), seed=5)
    out = kernel(x, w, bias=bias, precision=precision)
    exact = precision in (None, "highest")  # no TF32 unless asked for
    assert_close(out, reference.compute(reference.matmul, x, w, bias), 1e-6 if exact else 1e-3)


@pytest.mark.parametrize(
    "dtype, out_dtype", [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_out_dtype(reference, implementation, dtype, out_dtype):
    x, w, bias, residual = operands((21, 64, 30), dtype, seed=6)
    out = ops.matmul(x, w, bias=bias, residual=residual, out_dtype=out_dtype, implementation=implementation)
    assert out.dtype == out_dtype
    # A float32 result of half operands shows that nothing is rounded on the way.
    expected = reference.compute(reference.matmul, x, w, bias, residual)
    assert_close(out, expected, 1e-6 if out_dtype == "float32" else 4e-4)


def test_operands_of_mixed_dtype(reference, implementation):
    x, w, _, _ = operands((21, 64, 30), "float16", seed=7)
    _, _, bias, residual = operands((21, 64, 30), "float32", seed=8)
    out = ops.matmul(
        x, w, bias=bias, residual=residual.astype("bfloat16"), out_dtype="float32", implementation=implementation
    )
    expected = reference.compute(reference.matmul, x, w, bias, residual.astype("bfloat16"))
    assert_close(out, expected, 1e-6)


def test_overflow_of_float16_is_infinite_not_nan(reference, implementation):
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.uniform(5e3, 1e4, (18, 40)), "float16")
    w = jnp.asarray(rng.uniform(0.5, 1, (40, 20)) * rng.choice([-1, 1], 20), "float16")
    out = float64(ops.matmul(x, w, implementation=implementation))
    np.testing.assert_array_equal(out, np.sign(reference.compute(reference.matmul, x, w)) * np.inf)


@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_any_shape(m, k, n, seed):
    x, w, bias, residual = operands((m, k, n), seed=seed)
    options = dict(bias=bias, residual=residual, activation="gelu_tanh")
    out = kernel(x, w, config=CONFIGS[0], **options)  # the smallest tiles: most shapes need several
    assert_close(out, ops.matmul(x, w, implementation="xla", **options), 2e-6)


@pytest.mark.parametrize("activation", [None, *sorted(ops.ACTIVATIONS)])
def test_gradients(reference, activation):
    arrays = operands((9, 31, 22), seed=10)
    cotangent = normal(np.random.default_rng(11), 9, 22)
    expected = reference.gradients(functools.partial(reference.matmul, activation=activation), arrays, cotangent)

    def f(x, w, bias, residual):
        return kernel(x, w, bias=bias, residual=residual, activation=activation)

    assert_gradients_close(f, arrays, cotangent, expected, 3e-6)
