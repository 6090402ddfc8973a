"""`ops.layer_norm` and `ops.rms_norm` in Mosaic against torch: widths, residual, configs, hard inputs."""

import functools

import jax
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.mosaic.norm import Config, heuristic
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.ops.test_norm import WELFORD, operands
from parity.ops.test_rows import ROWS, WAYS, every_way
from parity.support.common import (
    KERNEL,
    MOSAIC_CALL,
    TRITON_CALL,
    assert_close,
    assert_equal,
    by_device,
    compiled,
    cuda_device,
    float64,
    normal,
)
from parity.support.tolerances import GRADIENT, LONG, OP, SHORT

SHAPES = by_device(
    # Odd; a part of a warp a row; blocks of a row that threads keep; longer than they keep.
    cpu=[(5, 33), (2, 7, 384), (3, 9000), (2, 33000)],
    gpu=[
        *((1, 384), (64, 128, 384), (8192, 768), (1001, 333), (3, 5, 7), (700, 9000), (300, 16384)),
        *((5, 20000), (300, 65536), (3, 100003)),
    ],
)
NAMES = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])


def vectors_of(name, scale, bias):
    return (scale, bias) if name == "layer_norm" else (scale,)


@pytest.mark.covering(1)
@NAMES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, dtype, tolerance, name, shape):
    x, scale, bias, residual = operands(shape, dtype)
    vectors = vectors_of(name, scale, bias)
    function = getattr(compiled, name)
    out, total = function(x, *vectors, residual=residual, return_residual=True, implementation=ROWS)
    assert out.dtype == total.dtype == dtype
    assert_equal(total, (x.astype("float32") + residual.astype("float32")).astype(dtype))
    assert_close(out, reference.compute(getattr(reference, name), x, *vectors, residual), tolerance)
    out, total = function(x, *vectors, return_residual=True, implementation=ROWS)  # nothing to add
    assert_close(out, reference.compute(getattr(reference, name), x, *vectors), tolerance)
    assert_equal(total, x)


@NAMES
def test_operands_of_mixed_dtype(reference, name):
    x, _, bias, _ = operands((6, 50), "float16", seed=2)
    _, scale, _, residual = operands((6, 50), seed=2)
    vectors = vectors_of(name, scale, bias)
    out = getattr(compiled, name)(x, *vectors, residual=residual, implementation=ROWS)
    assert out.dtype == "float16"
    assert_close(out, reference.compute(getattr(reference, name), x, *vectors, residual), OP["float16"])


@pytest.mark.covering(1)
@every_way
@NAMES
@pytest.mark.parametrize("shape", [(33, 50), (5, 200)], ids=str)
def test_every_way(name, shape, config):
    x, scale, bias, residual = operands(shape, seed=5)
    options = dict(residual=residual, return_residual=True)
    f = functools.partial(getattr(compiled, name), x, *vectors_of(name, scale, bias), **options)
    out, total = f(config=config, implementation=ROWS)
    expected, expected_total = f(implementation="xla")
    assert_close(out, expected, SHORT)
    assert_equal(total, expected_total)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "dtype, shift, scale, tolerance",
    [
        ("float32", 300.0, 1.0, 2e-4),  # a mean far from zero: one pass would cancel to nothing (1e-2)
        ("float32", 0.0, 1e15, 3e-6),  # squares near the end of float32
        ("float32", 0.0, 1e-4, 3e-6),
        ("float16", 0.0, 1e4, 8e-4),  # squares beyond float16
    ],
)
@pytest.mark.parametrize("block_n, keep", [(384, False), (64, True), (64, False)], ids=["held", "kept", "walked"])
def test_hard_inputs(reference, dtype, shift, scale, tolerance, block_n, keep):
    x = normal(np.random.default_rng(3), 5, 384, dtype=dtype, shift=shift, scale=scale)
    _, weight, bias, _ = operands((1, 384), dtype)
    options = dict(epsilon=1e-12)
    config = Config(threads=16, block_n=block_n, keep=keep)
    out = compiled.layer_norm(x, weight, bias, config=config, implementation=ROWS, **options)
    assert_close(out, reference.compute(reference.layer_norm, x, weight, bias, **options), tolerance)


@pytest.mark.parametrize("block_n, keep", [(512, False), (64, True), (128, False)], ids=["held", "kept", "walked"])
def test_rows_that_vary_less_than_their_mean_is_rounded(block_n, keep):
    """As in Triton: constant rows give the bias, 1000 +- 0.01 unit variance."""
    rng = np.random.default_rng(11)
    scale, bias = normal(rng, 300, shift=1.0, scale=0.3), normal(rng, 300)
    config = Config(threads=8, block_n=block_n, keep=keep)
    f = functools.partial(compiled.layer_norm, config=config, epsilon=1e-12, implementation=ROWS)
    constant = jax.numpy.full((2, 300), 1.2345678, "float32")
    np.testing.assert_allclose(float64(f(constant, scale, bias)), np.broadcast_to(bias, (2, 300)), atol=1e-6)
    x = normal(rng, 4, 300, shift=1000.0, scale=0.01)
    d = float64(x) - float64(x).mean(-1, keepdims=True)
    expected = d / np.sqrt(np.square(d).mean(-1, keepdims=True) + 1e-12) * float64(scale) + float64(bias)
    assert_close(f(x, scale, bias), expected, LONG if keep or block_n > 300 else WELFORD)


@pytest.mark.covering(1)
@NAMES
@pytest.mark.parametrize("config", [None, WAYS[2], WAYS[4]], ids=["held", "warps", "walked"])
def test_gradients_from_its_statistics(reference, name, config):
    """By the kernel of Triton, which is given the mean in two parts and the factor."""
    x, scale, bias, residual = operands((37, 300), seed=12)
    arrays = (x, *vectors_of(name, scale, bias), residual)
    cotangent = normal(np.random.default_rng(13), 37, 300)

    def function(x, *rest):
        norm = functools.partial(getattr(ops, name), config=config, implementation=(ROWS, KERNEL))
        return norm(x, *rest[:-1], residual=rest[-1])

    found = jax.jit(lambda *arrays: jax.vjp(function, *arrays)[1](cotangent))(*arrays)
    wanted = reference.gradients(getattr(reference, name), arrays, cotangent)
    for gradient, expected in zip(found, wanted, strict=True):
        assert_close(gradient, expected, GRADIENT)


@pytest.mark.parametrize(
    "n, dtype, arrays, threads, keep",
    [
        (8192, "bfloat16", 1, 256, False),
        (8200, "float16", 1, 256, True),
        (16384, "bfloat16", 1, 256, True),
        (16384, "bfloat16", 2, 512, False),
        (16384, "float32", 1, 512, False),
        (9001, "bfloat16", 1, 512, False),
        (16400, "bfloat16", 1, 1024, True),
    ],
)
def test_threads_that_keep_a_row(n, dtype, arrays, threads, keep):
    config = heuristic(300, n, dtype, arrays=arrays, reductions=3)
    assert (config.threads, config.keep) == (threads, keep)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has Mosaic for Hopper, which is not for rows")
@NAMES
@pytest.mark.parametrize("n, residual, expected", [(16384, False, MOSAIC_CALL), (16384, True, TRITON_CALL)])
def test_long_rows_on_hopper_are_mosaics_without_a_residual(name, n, residual, expected):
    x, vector = jax.ShapeDtypeStruct((40, n), "bfloat16"), jax.ShapeDtypeStruct((n,), "float32")
    vectors = vectors_of(name, vector, vector)
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(
            lambda x, *vectors: getattr(ops, name)(x, *vectors, residual=x if residual else None), x, *vectors
        )
    assert {c for c in (MOSAIC_CALL, TRITON_CALL) if c in text} == {expected}
