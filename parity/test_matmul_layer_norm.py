"""`ops.matmul_layer_norm` against torch: fused and unfused, operands absent and present, gradients."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.triton import matmul
from pallas_models.kernels.triton.matmul_layer_norm import Config
from parity.common import KERNEL, assert_close, assert_gradients_close, by_device, compiled, gpu, normal
from parity.tolerances import GRADIENT, LONG, OP, TF32

SHAPES = by_device(
    cpu=[
        (5, 40, 33),  # odd rows and width
        (70, 96, 384),  # a width that is no power of two
        (5, 1700, 24),  # K in parts, the last of them ragged and with steps past the end
    ],
    gpu=[
        (16, 384, 384),  # MiniLM's two, at few rows and at many
        (16, 1536, 384),
        (128, 1536, 384),
        (5, 1700, 24),  # K in parts, the last of them ragged and with steps past the end
        (8192, 384, 384),
        (8192, 1536, 384),
        (2049, 385, 383),  # odd everywhere
        (300, 768, 768),
    ],
)


def fused(width: int, block_m: int = 16, block_k: int = 32) -> Config:
    """Tiles of the kernel that holds whole rows; without a config small shapes may run as two kernels."""
    return Config(block_m=block_m, block_n=-(-width // 16) * 16, block_k=block_k, num_warps=4, num_stages=2)


kernel = functools.partial(compiled.matmul_layer_norm, implementation=KERNEL)


def operands(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, w, scale, offset, bias, residual."""
    m, k, n = shape
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=1.0, scale=0.3),
        normal(rng, n, dtype=dtype),
        normal(rng, n, dtype=dtype, shift=0.5),
        normal(rng, m, n, dtype=dtype),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape):
    x, w, scale, offset, bias, residual = operands(shape, dtype)

    @jax.jit
    def f(x, w, scale, offset, bias, residual):
        return ops.matmul_layer_norm(
            x, w, scale, offset, bias=bias, residual=residual, implementation=implementation
        )

    out = f(x, w, scale, offset, bias, residual)
    assert out.dtype == dtype
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual)
    assert_close(out, expected, tolerance)


@pytest.mark.parametrize(
    "m, k, n, parts",
    [
        (5, 1700, 24, 8),  # as in SHAPES: 14 blocks of K, 2 a part; the seventh is ragged, the eighth empty
        (16, 1536, 384, 6),
        (8192, 1536, 384, 1),  # enough tiles for every core
    ],
)
def test_few_rows_split_the_contraction(m, k, n, parts):
    target = gpu()
    assert matmul.heuristic(m, n, k, np.float16, target, summed=True).splits == parts


@pytest.mark.parametrize("shape", by_device(cpu=[(37, 50, 41)], gpu=[(4096, 1536, 384), (300, 129, 41)]), ids=str)
def test_fused_kernel_in_every_dtype(reference, dtype, tolerance, shape):
    x, w, scale, offset, bias, residual = operands(shape, dtype, seed=1)
    out = kernel(x, w, scale, offset, bias=bias, residual=residual, config=fused(shape[2]))
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual)
    assert_close(out, expected, tolerance)


@pytest.mark.parametrize("config", [None, fused(38)], ids=["chosen", "fused"])
@pytest.mark.parametrize("has_bias, has_residual", [(False, False), (True, False), (False, True)])
def test_absent_operands_and_epsilon(reference, config, has_bias, has_residual):
    x, w, scale, offset, bias, residual = operands((9, 24, 38), seed=2)
    bias, residual = bias if has_bias else None, residual if has_residual else None
    out = kernel(x, w, scale, offset, bias=bias, residual=residual, epsilon=0.1, config=config)
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual, epsilon=0.1)
    assert_close(out, expected, LONG)


@pytest.mark.parametrize("batch", [(), (2, 1, 3)], ids=str)
def test_leading_dimensions(reference, implementation, batch):
    rng = np.random.default_rng(3)
    _, w, scale, offset, bias, _ = operands((1, 24, 18))
    x, residual = normal(rng, *batch, 24), normal(rng, *batch, 18)
    out = compiled.matmul_layer_norm(
        x, w, scale, offset, bias=bias, residual=residual, implementation=implementation
    )
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual)
    assert_close(out, expected, LONG)


@pytest.mark.parametrize("block_m, block_k", [(16, 16), (32, 64), (64, 32)])
@pytest.mark.parametrize("width", [16, 41, 64, 100])  # one block, ragged, whole, several blocks
def test_every_tile_config(width, block_m, block_k):
    x, w, scale, offset, bias, residual = operands((37, 50, width), seed=4)
    out = kernel(x, w, scale, offset, bias=bias, residual=residual, config=fused(width, block_m, block_k))
    expected = compiled.matmul_layer_norm(x, w, scale, offset, bias=bias, residual=residual, implementation="xla")
    assert_close(out, expected, LONG)


@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 70), st.integers(0, 9))
def test_any_shape(m, k, n, seed):
    x, w, scale, offset, bias, residual = operands((m, k, n), seed=seed)
    # A large epsilon keeps two nearly equal columns from amplifying rounding.
    options = dict(bias=bias, residual=residual, epsilon=0.1)
    out = kernel(x, w, scale, offset, config=fused(n, block_k=16), **options)
    assert_close(
        out, compiled.matmul_layer_norm(x, w, scale, offset, implementation="xla", **options), OP["float32"]
    )


def test_precision_of_float32(reference):
    x, w, scale, offset, bias, _ = operands((33, 200, 50), seed=5)
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias)
    for config in (None, fused(50)):
        assert_close(kernel(x, w, scale, offset, bias=bias, config=config), expected, LONG)
        assert_close(kernel(x, w, scale, offset, bias=bias, config=config, precision="default"), expected, TF32)


def test_gradients(reference):
    arrays = operands((9, 31, 22), seed=6)
    cotangent = normal(np.random.default_rng(7), 9, 22)
    expected = reference.gradients(reference.matmul_layer_norm, arrays, cotangent)

    def f(x, w, scale, offset, bias, residual):
        return kernel(x, w, scale, offset, bias=bias, residual=residual)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)
