"""The gradients of products on Hopper: weights and bias in one kernel, the activation's slope in a product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.mosaic import matmul
from pallas_models.kernels.mosaic import matmul_backward as backward
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.ops.test_matmul import edges
from parity.support.common import ON_GPU, assert_close, cuda_device, float64, gpu, kernel_calls, normal
from parity.support.tolerances import LONG, OP, ROUNDED


def config(block_m: int, block_n: int, splits: int, **options: int) -> backward.Config:
    return backward.Config(block_m=block_m, block_n=block_n, num_stages=2, splits=splits, **options)


@pytest.mark.parametrize(
    "shape, tiles, dtype",
    [
        ((128, 256, 128), config(128, 128, 1), "float16"),
        (
            (256, 128, 256),
            config(128, 256, 2, num_slots=1),
            "bfloat16",
        ),  # fewer tiles in a column than groups of 64
        ((384, 128, 128), config(128, 128, 3, uneven=True), "bfloat16"),
        pytest.param((328, 192, 320), config(128, 192, 3), "bfloat16", marks=edges),
        pytest.param((72, 64, 64), config(256, 128, 2), "float16", marks=edges),  # nothing is left for a split
        pytest.param((328, 64, 64), config(128, 64, 3, uneven=True), "float16", marks=edges),
        pytest.param((64, 64, 64), config(128, 64, 3, uneven=True), "float16", marks=edges),
    ],
)
def test_gradients_of_weights_and_bias(shape, tiles, dtype):
    m, k, n = shape
    rng = np.random.default_rng(50)
    x, dy = normal(rng, m, k, dtype=dtype), normal(rng, m, n, dtype=dtype, shift=0.5)
    call = functools.partial(backward.weight_gradient, config=tiles, target=gpu(), interpret=not ON_GPU)
    dw, dbias = jax.jit(call)(x, dy)
    assert dw.dtype == dtype and dbias.dtype == jnp.float32
    wide = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    assert_close(dw, wide[0].T @ wide[1], ROUNDED[dtype])
    assert_close(dbias, wide[1].sum(axis=0), LONG)


def test_sums_of_columns_are_those_of_whole_tiles():
    """A copy that goes past the end of a row goes to the next split's: GPUs take it as one run of memory."""
    x, dy = jnp.zeros((256, 64), "float16"), jnp.zeros((256, 72), "float16")
    call = functools.partial(backward.weight_gradient, config=config(128, 64, 2), target=gpu(), interpret=False)
    assert jax.eval_shape(call, x, dy)[1].shape == (72,)
    assert "f32[2,128]" in str(jax.make_jaxpr(call)(x, dy))


def times_slope(activation, x, w, y):
    """x w^T times the slope of the activation at y, by the kernel."""

    def call(x, w, y):
        form = Form(x=x, w=w, residual=y, transpose_w=True, precision=jax.lax.Precision.HIGHEST, out_dtype=x.dtype)
        config = matmul.Config(block_m=128, block_n=64, num_stages=2, ping_pong=False)
        return matmul.matmul(form, slope=activation, config=config, target=gpu(), interpret=not ON_GPU)

    return jax.jit(call)(x, w, y)


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_slope_of_an_activation(activation, dtype):
    # K of one element that counts: the product is exact, and what differs is the slope.
    x = jnp.zeros((128, 64), dtype).at[:, 0].set(1.0)
    w = jnp.zeros((64, 64), dtype).at[:, 0].set(jnp.asarray([1.0, -2.0, 0.25, 4.0] * 16, dtype))
    y = jnp.broadcast_to(jnp.linspace(-6, 6, 128).astype(dtype)[:, None], (128, 64))
    out = times_slope(activation, x, w, y)
    slope = jax.vjp(ops.ACTIVATIONS[activation], y.astype("float32"))[1](jnp.ones(y.shape))[0]
    assert_close(out, slope * w[:, 0].astype("float32"), OP[dtype])


def test_slopes_past_the_range_of_float16():
    """Where slopes of bfloat16 are computed in float16, numbers that this cannot hold have a slope of 0 or 1."""
    x = jnp.ones((128, 64), "bfloat16")
    y = jnp.broadcast_to(jnp.asarray([-3e38, -7e4, -9.0, 9.0, 7e4, 3e38, 0.0, -0.0] * 8, "bfloat16"), (128, 64))
    out = times_slope("gelu_tanh", x, jnp.ones((64, 64), "bfloat16"), y)
    assert np.array_equal(float64(out), np.where(y < 0, 0.0, np.where(y > 0, 64.0, 32.0)))


@pytest.mark.parametrize(
    "rows, has_bias, kernels, products", [(4096, True, 1, 1), (4096, False, 0, 2), (64, True, 0, 2)]
)
def test_one_kernel_where_there_is_a_bias_and_there_are_many_rows(rows, has_bias, kernels, products):
    def pull(dout, x, w, bias):
        bias = bias if has_bias else None
        return jax.vjp(lambda x, w, b: ops.matmul(x, w, bias=b), x, w, bias)[1](dout)

    shapes = [(rows, 128), (rows, 64), (64, 128), (128,)]
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(pull, *(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))
    assert kernel_calls(text) == kernels
    assert text.count("stablehlo.dot_general") == products


@pytest.mark.parametrize(
    "m, n, k, columns, splits, uneven",  # the fastest on an H200, by bench/NOTES.md
    [
        (8192, 3072, 768, 192, 2, True),
        (32768, 3072, 768, 192, 2, True),
        (8192, 2304, 768, 256, 2, False),
        (32768, 2304, 768, 256, 5, True),
        (8192, 768, 768, 192, 5, False),
        (100, 64, 64, 64, 1, False),
    ],
)
def test_heuristic(m, n, k, columns, splits, uneven):
    target = gpu()
    found = backward.heuristic(m, n, k, target)
    assert backward.shared_memory(found) <= target.shared_memory
    assert (found.block_n, found.splits, found.uneven) == (columns, splits, uneven)


def test_what_the_kernel_does_not_serve():
    x, w = jnp.ones((64, 64), "bfloat16"), jnp.ones((64, 64), "bfloat16")
    form = Form(x=x, w=w, precision=jax.lax.Precision.HIGHEST, out_dtype=x.dtype)
    assert backward.unsupported(form) is None
    assert "takes no transposed w" in backward.unsupported(form.replace(transpose_w=True))
    assert "takes float16 and bfloat16" in backward.unsupported(form.replace(x=x.astype("float32")))
    assert "x of shape (60, 64)" in backward.unsupported(form.replace(x=x[:60]))
    with pytest.raises(ValueError, match="splits must be positive"):
        config(128, 128, 0)
