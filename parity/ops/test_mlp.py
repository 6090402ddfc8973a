"""`ops.mlp` against torch: values, gradients apart and together, what is kept, errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.dispatch.sharding import Total
from pallas_models.kernels.forms.mlp import Down, Up
from pallas_models.ops.mlp import _DOWN, _UP
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.ops.test_matmul import edges
from parity.support.common import (
    KERNEL,
    MOSAIC,
    assert_close,
    assert_gradients_close,
    compiled,
    cuda_device,
    kernel_calls,
    normal,
)
from parity.support.tolerances import GRADIENT, LONG, OP

M, K, N, D = 72, 64, 128, 192  # of which Hopper's kernels take the last three, and a ragged first
ARRAYS = ("x", "w_up", "w_down", "bias_up", "bias_down", "residual")


def operands(dtype: str = "float32", shape: tuple[int, int, int, int] = (11, 33, 50, 21)) -> tuple[jax.Array, ...]:
    m, k, n, d = shape
    rng = np.random.default_rng(40)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, d, dtype=dtype, scale=n**-0.5),
        normal(rng, n, shift=0.5),
        normal(rng, d, shift=0.5),
        normal(rng, m, d, dtype=dtype),
    )


def call(*arrays: jax.Array, **options) -> jax.Array:
    named = dict(zip(ARRAYS, arrays, strict=False))
    return ops.mlp(named.pop("x"), named.pop("w_up"), named.pop("w_down"), **named, **options)


def test_against_torch(reference, implementation, dtype, tolerance):
    arrays = operands(dtype)
    for given, activation in ((arrays, "gelu_tanh"), (arrays[:3], "silu")):
        out = jax.jit(functools.partial(call, activation=activation, implementation=implementation))(*given)
        assert out.dtype == dtype
        assert_close(out, reference.compute(reference.mlp, *given, activation=activation), tolerance)


def test_leading_axes():
    x, *arrays, residual = operands()
    whole = compiled.mlp(x, *arrays[:2], residual=residual, implementation=KERNEL)
    split = compiled.mlp(x[None], *arrays[:2], residual=residual[None], implementation=KERNEL)
    np.testing.assert_array_equal(whole[None], split)


def test_gradients(reference):
    arrays = operands()
    cotangent = normal(np.random.default_rng(41), 11, 21)
    expected = reference.gradients(reference.mlp, arrays, cotangent)
    assert_gradients_close(functools.partial(call, implementation=KERNEL), arrays, cotangent, expected, GRADIENT)


@edges
@pytest.mark.parametrize("dtype, activation", [("bfloat16", "gelu_tanh"), ("float16", "gelu")])
def test_gradients_on_hopper(reference, dtype, activation):
    arrays = operands(dtype, (M, K, N, D))
    cotangent = normal(np.random.default_rng(42), M, D, dtype=dtype)
    expected = reference.gradients(functools.partial(reference.mlp, activation=activation), arrays, cotangent)
    f = functools.partial(call, activation=activation, implementation=MOSAIC)
    assert_gradients_close(f, arrays, cotangent, expected, OP[dtype])


def pulled(wanted: tuple[int, ...], **options):
    """The gradients by some of the arrays, as a function of the cotangent and the arrays."""

    def pull(cotangent, *arrays):
        def f(*some):
            every = list(arrays)
            for i, x in zip(wanted, some, strict=True):
                every[i] = x
            return call(*every, **options)

        return jax.vjp(f, *(arrays[i] for i in wanted))[1](cotangent)

    return pull


@pytest.mark.parametrize(
    "backend, rows, wanted, kernels, products",
    [
        # Up, the slope in a product, the gradients by both weights; that by x is XLA's; nobody asks for the result
        ("mosaic", 72, range(6), 4, 1),
        (None, 4096, range(6), 4, 1),
        (None, 1024, range(6), 2, 4),  # few rows: as two products
        ("mosaic", 72, [0], 2, 1),
        ("triton", 72, range(6), 2, 4),  # and the slope in a kernel
    ],
)
def test_what_the_gradient_computes(backend, rows, wanted, kernels, products):
    arrays = operands("bfloat16", (rows, K, N, D))
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(pulled(tuple(wanted), implementation=backend), arrays[-1], *arrays)
    assert kernel_calls(text) == kernels
    assert text.count("stablehlo.dot_general") == products


def test_without_a_gradient_it_is_two_products_and_keeps_nothing():
    def products(x, w_up, w_down, bias_up, bias_down, residual):
        hidden = ops.matmul(x, w_up, bias=bias_up, activation="gelu_tanh", implementation="mosaic")
        return ops.matmul(hidden, w_down, bias=bias_down, residual=residual, implementation="mosaic")

    arrays = operands("bfloat16", (M, K, N, D))
    with cuda_device(*HOPPER):
        text, expected = (lowered_for_cuda(f, *arrays) for f in (call_on_mosaic, products))
    assert kernel_calls(text) == 2
    assert text.replace("call_on_mosaic", "products") == expected


def call_on_mosaic(*arrays):
    return call(*arrays, implementation="mosaic")


def test_checkpoints_know_the_hidden_values():
    assert "name=mlp_up" in str(jax.make_jaxpr(functools.partial(call, implementation="xla"))(*operands()))


X, UP, DOWN = operands()[:3]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ops.mlp(X, UP, DOWN.T), ValueError, "w_up has shape (33, 50); expected (33, 21), (K, N) with"),
        (lambda: ops.mlp(X, DOWN, DOWN), ValueError, "w_up has shape (50, 21); expected (33, 50), (K, N) with"),
        (lambda: ops.mlp(X, UP, DOWN[0]), ValueError, "w_down has shape (21,); expected 2 axes, (N, D)"),
        (
            lambda: ops.mlp(X, UP, DOWN.astype("bfloat16")),
            TypeError,
            "w_down has dtype bfloat16; expected the same",
        ),
        (lambda: ops.mlp(X, UP, DOWN, bias_up=X[0]), ValueError, "bias_up has shape (33,); expected (50,), (N,)"),
        (lambda: ops.mlp(X, UP, DOWN, residual=X), ValueError, "residual has shape (11, 33); expected (11, 21)"),
        (lambda: ops.mlp(X, UP, DOWN, activation=None), ValueError, "activation=None is not supported"),
        (lambda: ops.mlp(X, UP, DOWN, activation="gelo"), ValueError, "activation='gelo' is unknown"),
        (lambda: ops.mlp(X, UP, DOWN, implementation="mosaic"), NotImplementedError, "takes float16 and bfloat16"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("part", ["up", "down"])
def test_devices_that_share_a_contraction_add_up_before_the_epilogue(part):
    x, w_up, w_down, bias_up, bias_down, residual = operands()
    options = dict(activation="gelu_tanh", precision=jax.lax.Precision.HIGHEST)
    total = Total(over=("device",))

    def halves(a, axis):
        return jnp.stack(jnp.split(a, 2, axis))

    def on_device(*arrays):
        op, form = (_UP, up(*arrays)) if part == "up" else (_DOWN, down(*arrays))
        return op.contracted(op.reference, total, form)

    def up(x, w):
        return Up(x=x, w=w, bias=bias_up, **options)

    def down(y, hidden, w):
        return Down(y=y, hidden=hidden, w=w, bias=bias_down, residual=residual, **options)

    y, hidden = _UP.reference(up(x, w_up))
    if part == "up":
        x, w_up = (jnp.concatenate([a, a[i]], axis) for a, i, axis in ((x, np.s_[:, :1], 1), (w_up, np.s_[:1], 0)))
        split, expected = (halves(x, 1), halves(w_up, 0)), _UP.reference(up(x, w_up))
    else:
        split = halves(y, 1), halves(hidden, 1), halves(w_down, 0)
        expected = [_DOWN.reference(down(y, hidden, w_down))]
    found = jax.vmap(on_device, axis_name="device")(*split)
    for each, wanted in zip(found if part == "up" else [found], expected, strict=True):
        for of_device in each:
            assert_close(of_device, wanted, LONG)
