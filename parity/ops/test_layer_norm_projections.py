"""`ops.layer_norm_projections` against float64: the kernel for Hopper, the ops that it stands for, gradients."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.forms.layer_norm_projections import Form
from pallas_models.kernels.mosaic import layer_norm_projections as mosaic
from pallas_models.kernels.mosaic import layer_norm_projections_backward as mosaic_backward
from parity.cases.layer_norm_projections import arrays
from parity.support.common import (
    IMPLEMENTATIONS,
    MOSAIC,
    assert_close,
    assert_equal,
    assert_named_close,
    by_device,
    float64,
    gpu,
    lowered_calls,
    normal,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, OP

NAMES = ("x", "scale", "offset", "w", "bias", "w_first")
needs_jax_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 is refused")


def draw(m: int, c: int, count: int, n: int, first: int, dtype: str, x_dtype: str = "") -> dict[str, Any]:
    """The operands by name; vectors in float32."""
    rng = np.random.default_rng(m + n)
    operands = dict(zip(NAMES, arrays(rng, "float32", (m, c), count, n, max(first, 1)), strict=True))
    dtypes = dict(x=x_dtype or dtype, w=dtype, w_first=dtype)
    operands |= {name: operands[name].astype(of) for name, of in dtypes.items()}
    if not count:
        operands |= dict(w=None, bias=None)
    return {name: x for name, x in operands.items() if first or name != "w_first"}


def exact(operands: dict[str, Any], dtype: str) -> list[np.ndarray]:
    """The results in float64, but for the one rounding between norm and products."""
    p = {name: float64(array) for name, array in operands.items() if array is not None}
    d = p["x"] - p["x"].mean(-1, keepdims=True)
    y = d / np.sqrt(np.mean(d * d, -1, keepdims=True) + 1e-5) * p["scale"] + p["offset"]
    y = float64(jnp.asarray(y, jnp.float32).astype(dtype))
    outs = [y @ p["w"][:, i] + p["bias"][i] for i in range(p["w"].shape[1])] if "w" in p else []
    return [*outs, *([(y @ p["w_first"]).T] if "w_first" in p else []), p["x"]]


def program(implementation: Any = MOSAIC) -> Any:
    call = functools.partial(ops.layer_norm_projections, implementation=implementation)
    return jax.jit(lambda operands: call(**operands))


@needs_jax_011
@pytest.mark.parametrize(
    "m, c, count, n, first, dtype, x_dtype",
    [
        (72, 64, 1, 128, 0, "float16", "float32"),
        (136, 128, 2, 64, 8, "bfloat16", "bfloat16"),  # tiles for one CTA more than another
        (64, 64, 3, 64, 1, "float16", "bfloat16"),
        (72, 128, 0, 64, 16, "bfloat16", "bfloat16"),  # the biases of heads alone
        *by_device(
            cpu=[(200, 64, 4, 128, 4, "bfloat16", "bfloat16")],
            gpu=[
                (m, 128, 4, 128, 4, dtype, dtype)
                for m in (8, 4096, 129 * 128, 512 * 512)
                for dtype in ("float16", "bfloat16")
            ],
        ),
    ],
)
def test_kernel(m, c, count, n, first, dtype, x_dtype):
    operands = draw(m, c, count, n, first, dtype, x_dtype)
    found = program()(operands)
    *_, x = found
    assert x.dtype == x_dtype and {y.dtype for y in found[:-1]} == {jnp.dtype(dtype)}
    for y, wanted in zip(found, exact(operands, dtype), strict=True):
        assert y.shape == wanted.shape
        assert_close(y, wanted, OP[dtype])
    assert_equal(x, operands["x"])


def test_leading_axes(implementation):
    """Pairs of several items; columns that come first come before all axes."""
    operands = draw(30, 24, 2, 20, 3, "float32")
    flat = program(implementation)(operands)
    found = program(implementation)(operands | {"x": operands["x"].reshape(2, 3, 5, 24)})
    assert [y.shape for y in found] == [(2, 3, 5, 20)] * 2 + [(3, 2, 3, 5), (2, 3, 5, 24)]
    for y, wanted in zip(found, flat, strict=True):
        assert_equal(y.reshape(wanted.shape), wanted)


def test_no_positions(implementation):
    operands = draw(30, 24, 2, 20, 3, "float32")
    found = program(implementation)(operands | {"x": operands["x"][:0]})
    assert [y.shape for y in found] == [(0, 20), (0, 20), (3, 0), (0, 24)]


@needs_jax_011
def test_the_same_bits_twice():
    operands = draw(by_device(cpu=200, gpu=40_000), 64, 2, 64, 4, "bfloat16")
    f = program()
    for once, again in zip(f(operands), f(operands), strict=True):
        assert_equal(once, again)


@needs_jax_011
def test_what_is_not_finite_stays_where_it_is():
    operands = draw(128, 64, 2, 64, 4, "float16")
    spoilt = operands["x"].at[3, 4].set(np.nan).at[70, 0].set(np.inf)
    found, wanted = (program()(operands | {"x": x}) for x in (spoilt, operands["x"]))
    for y, right in zip(found[:2], wanted[:2], strict=True):
        y, right = np.array(y), np.array(right)
        assert np.all(np.isnan(y[[3, 70]]))
        assert_equal(np.delete(y, [3, 70], 0), np.delete(right, [3, 70], 0))
    assert_equal(np.delete(found[2], [3, 70], 1), np.delete(wanted[2], [3, 70], 1))


@needs_jax_011
@finds_races
def test_has_no_races():
    with no_races():
        jax.block_until_ready(program()(draw(1000, 64, 1, 64, 4, "float16")))


@needs_jax_011
@finds_races
@pytest.mark.parametrize("count", [0, 2])
def test_gradients_have_no_races(count):
    operands = {name: x for name, x in draw(1000, 64, count, 64, 4, "float16").items() if x is not None}
    operands |= {} if count else dict(w=None)
    with no_races():
        found, pull = jax.vjp(program(), operands)
        jax.block_until_ready(pull(found))


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, pytest.param(MOSAIC, marks=needs_jax_011)])
@pytest.mark.parametrize("moved", [("x",), NAMES], ids=["by x", "by all"])
def test_gradients(implementation, moved):
    """As those of plain XLA in float32, the gradient of the x that is returned among them.

    The kernel for Hopper takes no x in float32: norm and products are differentiated, one of them by XLA.
    """
    dtype = "bfloat16" if implementation == MOSAIC else "float32"
    operands = draw(128, 64, 2, 64, 4, dtype, "float32")
    rng = np.random.default_rng(5)
    cotangents = [jnp.asarray(rng.normal(size=y.shape), jnp.float32) for y in exact(operands, dtype)]

    def gradients(implementation: Any, operands: dict[str, Any]) -> dict[str, jax.Array]:
        def loss(some: dict[str, jax.Array]) -> jax.Array:
            found = ops.layer_norm_projections(**operands | some, implementation=implementation)
            return sum(jnp.vdot(y.astype(jnp.float32), c) for y, c in zip(found, cotangents, strict=True))

        return jax.jit(jax.grad(loss))({name: operands[name] for name in moved})

    wanted = gradients("xla", jax.tree.map(lambda x: x.astype(jnp.float32), operands))
    tolerance = GRADIENT if dtype == "float32" else 3 * OP[dtype]
    assert_named_close(gradients(implementation, operands), wanted, tolerance)


@needs_jax_011
@pytest.mark.parametrize(
    "m, c, count, n, first, used",
    [
        (200, 128, 4, 128, 4, "all"),  # a slot of each warpgroup comes round in the middle of a tile
        (72, 64, 2, 128, 0, "all"),
        (600, 128, 0, 64, 16, "all"),  # no product at all, and three tiles for a warpgroup
        (63, 128, 2, 64, 3, "all"),
        (128, 64, 3, 64, 2, "projections"),
        (128, 64, 3, 64, 2, "second"),
        (128, 64, 1, 64, 2, "first"),
        *by_device(cpu=[], gpu=[(512 * 512, 128, 4, 128, 4, "all"), (129 * 129, 128, 4, 128, 4, "all")]),
    ],
)
def test_gradients_in_the_kernel(m, c, count, n, first, used):
    """As those of plain XLA in float32, also of some of the results alone."""
    operands, rng = draw(m, c, count, n, first, "bfloat16"), np.random.default_rng(6)
    numbers = {"all": range(count + 2), "projections": range(count), "second": [1], "first": [count]}[used]
    moved = {name: x for name, x in operands.items() if x is not None}
    outs = jax.eval_shape(program("xla"), operands)
    cotangents = [normal(rng, *y.shape, dtype="bfloat16") for y in outs]

    def loss(moved: dict[str, jax.Array], cotangents: list[jax.Array], implementation: Any) -> jax.Array:
        found = ops.layer_norm_projections(**operands | moved, implementation=implementation)
        pairs = list(zip(found, cotangents, strict=True))
        some = [pairs[i] for i in numbers if i < len(pairs)]
        return sum(jnp.vdot(y.astype(jnp.float32), c.astype(jnp.float32)) for y, c in some)

    gradients = jax.jit(jax.grad(loss), static_argnums=2)
    traced = jax.make_jaxpr(gradients, static_argnums=2)(moved, cotangents, MOSAIC)
    assert "layer_norm_projections_backward" in str(traced)
    wanted = gradients(jax.tree.map(lambda x: x.astype(jnp.float32), moved), cotangents, "xla")
    found = gradients(moved, cotangents, MOSAIC)
    for name in [name for name, gradient in wanted.items() if not jnp.any(gradient)]:
        assert not jnp.any(found.pop(name)) and not jnp.any(wanted.pop(name))
    assert_named_close(found, wanted, 3 * OP["bfloat16"])


@without_gpu
@needs_jax_011
@pytest.mark.parametrize("count", [0, 4])
def test_is_one_kernel_by_default(count):
    operands = jax.eval_shape(lambda: draw(4096, 128, count, 128, 4, "bfloat16"))
    assert lowered_calls(program(None), operands) == 1


@pytest.mark.parametrize("m, count, expected", [(4096, 0, True), (4096, 4, True), (4099, 4, False)])
def test_gradient_that_is_the_default(m, count, expected):
    """Biases alone, and with projections; not rows that would be padded."""
    form: Form[Any] = Form(
        **draw(m, 128, count, 128, 4, "bfloat16"), epsilon=1e-5, precision=jax.lax.Precision.DEFAULT
    )
    assert mosaic_backward.prefer(form, gpu()) is expected


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(w=jnp.ones((24, 20))), ValueError, "w has shape (24, 20); expected (24, G, N), (C, G, N)"),
        (dict(scale=jnp.ones(20)), ValueError, "scale has shape (20,); expected (24,), (C,)"),
        (dict(offset=np.ones(24, np.int32)), TypeError, "offset has dtype int32; expected float16"),
        (dict(bias=jnp.ones(20)), ValueError, "bias has shape (20,); expected (2, 20), (G, N)"),
        (dict(w_first=jnp.ones((20, 3))), ValueError, "w_first has shape (20, 3); expected (24, F), (C, F)"),
        (dict(w_first=jnp.ones((24, 3), "bfloat16")), TypeError, "w_first has dtype bfloat16; expected float32"),
        (dict(x=jnp.float32(1.0)), ValueError, "x has shape (); expected (..., C)"),
        (dict(w=None, w_first=None, bias=None), ValueError, "w and w_first are None; expected one of them"),
        (dict(w=None), ValueError, "bias is of the projections by w, which is None"),
    ],
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.layer_norm_projections(**draw(30, 24, 2, 20, 3, "float32") | changed)


@needs_jax_011
@pytest.mark.parametrize(
    "sizes, dtype, message",
    [
        ((64, 64, 2, 64, 4), "float32", "takes weights in float16 and bfloat16, not float32"),
        ((64, 96, 2, 64, 4), "float16", "takes 64 or 128 channels and columns, not 96 and 64"),
        ((64, 64, 2, 256, 4), "float16", "takes 64 or 128 channels and columns, not 64 and 256"),
        ((64, 64, 2, 64, 65), "float16", "takes w_first of 64 columns or fewer, not 65"),
        ((64, 128, 6, 128, 4), "float16", "does not fit 6 projections of 128 channels to 128 columns into shared"),
    ],
)
def test_refuses(sizes, dtype, message):
    operands = draw(*sizes, dtype)
    form: Form[Any] = Form(**operands, epsilon=1e-5, precision=jax.lax.Precision.DEFAULT)
    for unsupported in (mosaic.unsupported, mosaic_backward.unsupported):
        reason = unsupported(form, gpu())
        assert reason is not None and reason.startswith(message)


@needs_jax_011
@pytest.mark.parametrize(
    "first, x_dtype, message",
    [
        (17, "", "takes w_first of 16 columns or fewer, not 17"),
        (4, "float32", "takes x in the dtype of the weights, float16, not float32"),
        (4, "", None),
    ],
)
def test_gradients_refuse(first, x_dtype, message):
    operands = draw(64, 64, 2, 64, first, "float16", x_dtype)
    form: Form[Any] = Form(**operands, epsilon=1e-5, precision=jax.lax.Precision.DEFAULT)
    assert mosaic_backward.unsupported(form, gpu()) == message
