"""`ops.gated_projection` against float64: the kernel for Hopper GPUs, the ops that it stands for, gradients."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.forms.gated_projection import Form
from pallas_models.kernels.mosaic import gated_projection as mosaic
from parity.cases.gated_projection import arrays
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
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, OP

NAMES = ("x", "gate", "w", "bias", "residual")
needs_jax_011 = pytest.mark.skipif(
    MOSAIC != "mosaic" and jax.__version_info__ < (0, 11), reason="JAX 0.10 interprets nothing past the end"
)


def draw(m: int, k: int, n: int, dtype: str, residual_dtype: str = "") -> dict[str, Any]:
    """The operands by name; the bias in float32, the residual in a dtype of its own, none for an odd m."""
    operands = dict(zip(NAMES, arrays(np.random.default_rng(m + n), "float32", (m,), k, n), strict=True))
    dtypes = dict(x=dtype, gate=dtype, w=dtype, bias="float32", residual=residual_dtype or dtype)
    return {name: x.astype(dtypes[name]) for name, x in operands.items() if m % 2 == 0 or name != "residual"}


def exact(operands: dict[str, Any], dtype: str) -> np.ndarray:
    """The result in float64, but for the one rounding between gate and product."""
    p = {name: float64(array) for name, array in operands.items()}
    gated = float64(jnp.asarray(p["x"] / (1.0 + np.exp(-p["gate"])), jnp.float32).astype(dtype))
    return gated @ p["w"] + p["bias"] + p.get("residual", 0.0)


def program(implementation: Any = MOSAIC, **options: Any) -> Any:
    call = functools.partial(ops.gated_projection, implementation=implementation, **options)
    return jax.jit(lambda operands: call(**operands))


@needs_jax_011
@pytest.mark.parametrize(
    "m, k, n, dtype, out_dtype",
    [
        (72, 64, 128, "float16", "float32"),
        (136, 128, 64, "bfloat16", "bfloat16"),  # tiles for one CTA more than another
        (63, 64, 64, "float16", "bfloat16"),
        *by_device(
            cpu=[(200, 128, 128, "bfloat16", "bfloat16")],
            gpu=[
                (m, 128, 128, dtype, out_dtype)
                for m in (7, 4096, 129 * 129, 512 * 512)
                for dtype, out_dtype in (("float16", "float16"), ("bfloat16", "float32"))
            ],
        ),
    ],
)
def test_kernel(m, k, n, dtype, out_dtype):
    operands = draw(m, k, n, dtype, out_dtype)
    out = program(out_dtype=out_dtype)(operands)
    assert out.dtype == out_dtype and out.shape == (m, n)
    assert_close(out, exact(operands, dtype), max(OP[dtype], OP[out_dtype]))


def test_leading_axes(implementation):
    operands = draw(30, 24, 20, "float32")
    folded = {name: x.reshape(2, 3, 5, -1) if len(x) == 30 else x for name, x in operands.items()}
    out = program(implementation)(folded)
    assert out.shape == (2, 3, 5, 20)
    assert_equal(out.reshape(30, 20), program(implementation)(operands))


@needs_jax_011
def test_the_same_bits_twice():
    operands, f = draw(by_device(cpu=200, gpu=40_000), 64, 64, "bfloat16"), program()
    assert_equal(f(operands), f(operands))


@needs_jax_011
def test_what_is_not_finite_stays_where_it_is():
    operands = draw(128, 64, 64, "float16")
    spoilt = operands | {"x": operands["x"].at[3, 4].set(np.nan), "gate": operands["gate"].at[70, 0].set(np.nan)}
    found, wanted = (np.array(program()(given)) for given in (spoilt, operands))
    assert np.all(np.isnan(found[[3, 70]]))
    assert_equal(np.delete(found, [3, 70], 0), np.delete(wanted, [3, 70], 0))


def test_gates_without_bounds(implementation):
    """An infinite gate is open or shut."""
    operands = draw(64, 64, 64, "float32") | {"gate": jnp.full((64, 64), jnp.inf)}
    p = {name: float64(array) for name, array in operands.items()}
    opened = p["x"] @ p["w"] + p["bias"] + p["residual"]
    assert_close(program(implementation)(operands), opened, OP["float32"])
    shut = program(implementation)(operands | {"gate": -operands["gate"]})
    assert_close(shut, p["bias"] + p["residual"], OP["float32"])


@needs_jax_011
@finds_races
def test_has_no_races():
    with no_races():
        jax.block_until_ready(program()(draw(1000, 64, 64, "float16")))


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, pytest.param(MOSAIC, marks=needs_jax_011)])
def test_gradients(implementation):
    """As those of plain XLA in float32."""
    dtype = "bfloat16" if implementation == MOSAIC else "float32"
    operands = draw(128, 64, 64, dtype)
    cotangent = jnp.asarray(np.random.default_rng(5).normal(size=(128, 64)), jnp.float32)

    def gradients(implementation: Any, operands: dict[str, Any]) -> dict[str, jax.Array]:
        def loss(operands: dict[str, jax.Array]) -> jax.Array:
            out = ops.gated_projection(**operands, implementation=implementation)
            return jnp.vdot(out.astype(jnp.float32), cotangent)

        return jax.jit(jax.grad(loss))(operands)

    wanted = gradients("xla", jax.tree.map(lambda x: x.astype(jnp.float32), operands))
    tolerance = GRADIENT if dtype == "float32" else 3 * OP[dtype]
    assert_named_close(gradients(implementation, operands), wanted, tolerance)


@without_gpu
def test_is_one_kernel_by_default():
    operands = jax.eval_shape(lambda: draw(4096, 128, 128, "bfloat16", "float32"))
    assert lowered_calls(program(None, out_dtype="float32"), operands) == 1


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(gate=jnp.ones((30, 20))), ValueError, "gate has shape (30, 20); expected (30, 24), (..., K)"),
        (
            dict(gate=jnp.ones((30, 24), "bfloat16")),
            TypeError,
            "gate has dtype bfloat16; expected float32, as x has",
        ),
        (dict(w=jnp.ones((20, 24))), ValueError, "w has shape (20, 24)"),
        (dict(residual=jnp.ones((30, 24))), ValueError, "residual has shape (30, 24)"),
    ],
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.gated_projection(**draw(30, 24, 20, "float32") | changed)


@pytest.mark.parametrize(
    "k, n, dtype, message",
    [
        (64, 64, "float32", "takes float16 and bfloat16, not float32"),
        (96, 64, "float16", "takes 64 or 128 channels and columns, not 96 and 64"),
        (64, 256, "float16", "takes 64 or 128 channels and columns, not 64 and 256"),
        (64, 64, "float16", None),
    ],
)
def test_refuses(k, n, dtype, message):
    form: Form[Any] = Form(
        **draw(64, k, n, dtype), out_dtype=jnp.dtype("float32"), precision=jax.lax.Precision.DEFAULT
    )
    assert mosaic.unsupported(form, gpu()) == message
