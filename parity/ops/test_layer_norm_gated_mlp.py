"""`ops.layer_norm_gated_mlp` against float64: the kernel for Hopper, the ops that it stands for, gradients."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.forms.layer_norm_gated_mlp import Form
from pallas_models.kernels.mosaic import layer_norm_gated_mlp as mosaic
from pallas_models.kernels.mosaic import layer_norm_gated_mlp_backward as backward
from parity.cases.layer_norm_gated_mlp import arrays
from parity.ops.test_lowering import HOPPER
from parity.support.common import (
    IMPLEMENTATIONS,
    MOSAIC,
    assert_close,
    assert_equal,
    assert_named_close,
    by_device,
    cuda_device,
    float64,
    gpu,
    lowered_calls,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, OP

NAMES = ("x", "scale", "offset", "w_gate_up", "w_down")
needs_jax_011 = pytest.mark.skipif(
    MOSAIC != "mosaic" and jax.__version_info__ < (0, 11), reason="JAX 0.10 interprets nothing past the end"
)


def draw(m: int, c: int, h: int, dtype: str, x_dtype: str = "") -> dict[str, Any]:
    """The operands by name; vectors in float32."""
    operands = dict(zip(NAMES, arrays(np.random.default_rng(m + h), "float32", (m,), c, h), strict=True))
    dtypes = dict(x=x_dtype or dtype, w_gate_up=dtype, w_down=dtype)
    return operands | {name: operands[name].astype(of) for name, of in dtypes.items()}


def exact(operands: dict[str, Any], dtype: str, residual: bool) -> np.ndarray:
    """The result in float64, but for the two roundings before products."""
    p = {name: float64(array) for name, array in operands.items()}

    def rounded(x: np.ndarray) -> np.ndarray:
        return float64(jnp.asarray(x, jnp.float32).astype(dtype))

    d = p["x"] - p["x"].mean(-1, keepdims=True)
    y = rounded(d / np.sqrt(np.mean(d * d, -1, keepdims=True) + 1e-5) * p["scale"] + p["offset"])
    gate, up = (y @ p["w_gate_up"][:, i] for i in range(2))
    out = rounded(gate / (1.0 + np.exp(-gate)) * up) @ p["w_down"]
    return out + p["x"] if residual else out


def written_out(x: Any, scale: Any, offset: Any, w_gate_up: Any, w_down: Any, residual: bool) -> jax.Array:
    """The op in jax.numpy."""
    y = jax.nn.standardize(x, epsilon=1e-5) * scale + offset
    gate, up = (jnp.matmul(y, w_gate_up[:, i], precision="highest") for i in range(2))
    out = jnp.matmul(jax.nn.silu(gate) * up, w_down, precision="highest")
    return out + x if residual else out


def program(implementation: Any = MOSAIC, **options: Any) -> Any:
    call = functools.partial(ops.layer_norm_gated_mlp, implementation=implementation, **options)
    return jax.jit(lambda operands: call(**operands))


@needs_jax_011
@pytest.mark.parametrize(
    "m, c, h, dtype, x_dtype, residual",
    [
        (72, 64, 64, "float16", "float32", True),
        (136, 64, 192, "bfloat16", "bfloat16", False),  # an odd number of tiles: two warpgroups have the last
        (63, 64, 64, "float16", "float16", True),
        (40, 64, 128, "bfloat16", "float32", False),
        *by_device(
            cpu=[(600, 128, 320, "bfloat16", "bfloat16", True)],  # slots and stages come round again
            gpu=[
                (m, 128, 512, dtype, x_dtype, True)
                for m in (7, 4096, 129 * 129, 512 * 512)
                for dtype, x_dtype in (("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
            ],
        ),
    ],
)
def test_kernel(m, c, h, dtype, x_dtype, residual):
    operands = draw(m, c, h, dtype, x_dtype)
    out = program(residual=residual)(operands)
    assert out.dtype == x_dtype and out.shape == (m, c)
    assert_close(out, exact(operands, dtype, residual), max(OP[dtype], OP[x_dtype]))


@pytest.mark.parametrize("activation", ["gelu_tanh", None])
def test_other_gates(activation):
    operands = draw(64, 64, 64, "float16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    wanted = program("xla", activation=activation)(wide)
    assert_close(program(activation=activation)(operands), wanted, 3 * OP["float16"])


def test_leading_axes(implementation):
    operands = draw(30, 24, 20, "float32")
    out = program(implementation)(operands | {"x": operands["x"].reshape(2, 3, 5, 24)})
    assert out.shape == (2, 3, 5, 24)
    assert_equal(out.reshape(30, 24), program(implementation)(operands))


@needs_jax_011
def test_the_same_bits_twice():
    operands, f = draw(by_device(cpu=200, gpu=40_000), 64, 64, "bfloat16"), program()
    assert_equal(f(operands), f(operands))


def test_what_is_not_finite_stays_where_it_is():
    operands = draw(128, 64, 64, "float16")
    spoilt = operands | {"x": operands["x"].at[3, 4].set(np.nan).at[70, 0].set(np.inf)}
    found, wanted = (np.array(program(residual=True)(given)) for given in (spoilt, operands))
    assert np.all(np.isnan(found[[3, 70]]))
    assert_equal(np.delete(found, [3, 70], 0), np.delete(wanted, [3, 70], 0))


@needs_jax_011
@finds_races
def test_has_no_races():
    with no_races():
        jax.block_until_ready(program(residual=True)(draw(1000, 64, 192, "float16")))


def gradients(
    operands: dict[str, Any], cotangent: jax.Array, function: Any = ops.layer_norm_gated_mlp, **options: Any
) -> dict[str, jax.Array]:
    def loss(operands: dict[str, jax.Array]) -> jax.Array:
        return jnp.vdot(function(**operands, **options).astype(jnp.float32), cotangent)

    return jax.jit(jax.grad(loss))(operands)


def drawn(m: int, c: int) -> jax.Array:
    """A cotangent of the result."""
    return jnp.asarray(np.random.default_rng(5).normal(size=(m, c)), jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_gradients(implementation, residual):
    """As those of the op written out, in float32."""
    operands, cotangent = draw(128, 64, 64, "float32"), drawn(128, 64)
    wanted = gradients(operands, cotangent, written_out, residual=residual)
    found = gradients(operands, cotangent, implementation=implementation, residual=residual)
    assert_named_close(found, wanted, GRADIENT)


@needs_jax_011
@pytest.mark.parametrize(
    "m, c, h, dtype, residual",
    [
        (128, 64, 64, "bfloat16", False),
        (136, 64, 192, "float16", True),  # two warpgroups have the last tile, whose sums count once
        (63, 64, 64, "bfloat16", True),
        *by_device(
            cpu=[(600, 128, 320, "bfloat16", True)],  # places and stages come round again
            gpu=[
                (m, 128, 512, dtype, True)
                for m in (7, 4096, 129 * 129, 512 * 512)
                for dtype in ("float16", "bfloat16")
            ],
        ),
    ],
)
def test_gradients_in_the_kernel(m, c, h, dtype, residual):
    operands, cotangent = draw(m, c, h, dtype), drawn(m, c)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    wanted = gradients(wide, cotangent, written_out, residual=residual)
    found = gradients(operands, cotangent, implementation=MOSAIC, residual=residual)
    assert_named_close(found, wanted, 3 * OP[dtype])


@needs_jax_011
@pytest.mark.parametrize("activation", ["gelu", "sigmoid", None])
def test_gradients_of_other_gates(activation):
    operands, cotangent = draw(64, 64, 64, "float16"), drawn(64, 64)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    wanted = gradients(wide, cotangent, implementation="xla", activation=activation)
    found = gradients(operands, cotangent, implementation=MOSAIC, activation=activation)
    assert_named_close(found, wanted, 3 * OP["float16"])


@needs_jax_011
def test_gradients_are_the_same_bits_twice():
    m = by_device(cpu=200, gpu=40_000)
    operands, cotangent = draw(m, 64, 64, "bfloat16"), drawn(m, 64)
    once, twice = (gradients(operands, cotangent, implementation=MOSAIC) for _ in range(2))
    for name, gradient in once.items():
        assert_equal(gradient, twice[name])


@needs_jax_011
def test_gradients_of_what_is_not_finite_stay_where_it_is():
    operands, cotangent = draw(128, 64, 64, "float16"), drawn(128, 64)
    spoilt = operands | {"x": operands["x"].at[3, 4].set(np.nan).at[70, 0].set(np.inf)}
    found, wanted = (
        np.array(gradients(given, cotangent, implementation=MOSAIC)["x"]) for given in (spoilt, operands)
    )
    assert np.all(np.isnan(found[[3, 70]]))
    assert_equal(np.delete(found, [3, 70], 0), np.delete(wanted, [3, 70], 0))


@needs_jax_011
@finds_races
def test_gradients_have_no_races():
    with no_races():
        found = gradients(draw(1000, 64, 192, "float16"), drawn(1000, 64), implementation=MOSAIC, residual=True)
        jax.block_until_ready(found)


@without_gpu
@pytest.mark.parametrize("m, is_one", [(16384, True), (4096, False)])
def test_is_one_kernel_each_way_where_all_multiprocessors_have_work(m, is_one):
    operands = jax.eval_shape(lambda: draw(m, 128, 512, "bfloat16"))
    assert (lowered_calls(program(None, residual=True), operands) == 1) == is_one
    cotangent = jax.ShapeDtypeStruct((m, 128), jnp.float32)
    with cuda_device(*HOPPER):
        traced = jax.make_jaxpr(functools.partial(gradients, residual=True))(operands, cotangent)
    assert ("layer_norm_gated_mlp_backward" in str(traced)) == is_one


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(x=jnp.float32(1.0)), ValueError, "x has shape (); expected (..., C)"),
        (dict(scale=jnp.ones(20)), ValueError, "scale has shape (20,); expected (24,), (C,)"),
        (
            dict(w_gate_up=jnp.ones((24, 20))),
            ValueError,
            "w_gate_up has shape (24, 20); expected 3 axes, (C, 2, H)",
        ),
        (dict(w_down=jnp.ones((24, 20))), ValueError, "w_down has shape (24, 20); expected (20, 24), (H, C)"),
        (dict(w_down=jnp.ones((20, 24), "bfloat16")), TypeError, "w_down has dtype bfloat16; expected float32"),
        (dict(offset=np.ones(24, np.int32)), TypeError, "offset has dtype int32; expected float16"),
        (dict(activation="tanh"), ValueError, "activation='tanh' is unknown"),
    ],
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.layer_norm_gated_mlp(**draw(30, 24, 20, "float32") | changed)


@pytest.mark.parametrize(
    "c, h, dtype, message",
    [
        (64, 64, "float32", "takes weights in float16 and bfloat16, not float32"),
        (96, 64, "float16", "takes 64 or 128 channels and hidden channels in multiples of 64, not 96 and 64"),
        (64, 96, "float16", "takes 64 or 128 channels and hidden channels in multiples of 64, not 64 and 96"),
        (64, 64, "float16", None),
    ],
)
def test_refuses(c, h, dtype, message):
    form: Form[Any] = Form(
        **draw(64, c, h, dtype),
        activation="silu",
        residual=True,
        epsilon=1e-5,
        precision=jax.lax.Precision.DEFAULT,
    )
    assert mosaic.unsupported(form, gpu()) == backward.unsupported(form, gpu()) == message
    mixed = form.replace(x=form.x.astype(jnp.float32), w_down=form.w_down.astype(jnp.float16))
    expected = "takes x in the dtype of the weights, float16, not float32"
    assert backward.unsupported(mixed, gpu()) == expected
