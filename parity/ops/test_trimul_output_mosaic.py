"""The end of the triangle update that computes its gate, for Hopper GPUs, against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import target
from pallas_models.kernels.common import trimul_scales
from pallas_models.kernels.forms.trimul import Form, Output, Projection
from pallas_models.kernels.mosaic import trimul_output
from parity.support.common import (
    MOSAIC,
    array,
    assert_close,
    assert_equal,
    by_device,
    float64,
    lowered_calls,
    normal,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 is refused")
both_gates = pytest.mark.parametrize("gate_after", [True, False], ids=["after", "before"])
Call = tuple[Output[jax.Array], Projection[jax.Array]]


def draw(
    matrices: int,
    n: int,
    h: int,
    c: int,
    *,
    gate_after: bool,
    dtype: str,
    x_dtype: str,
    bias: bool = True,
    residual: bool = False,
) -> Call:
    """An end of matrices (n, n), and its gate; y is filled up with NaN to rows of 8 and columns of 64."""
    rng = np.random.default_rng(n + h)
    rows, columns = n + -n % 8, n + -n % 64
    y = np.asarray(normal(rng, matrices, n, h, n, dtype=dtype, scale=3.0, shift=1.0))
    y = np.pad(y, ((0, 0), (0, rows - n), (0, 0), (0, columns - n)), constant_values=np.nan)
    shared: dict[str, Any] = dict(epsilon=1e-5, precision=jax.lax.Precision.DEFAULT)
    form = Output(
        ys=(array(y.reshape(-1, h, columns)),),
        gate=None,
        bounds=jnp.asarray(rng.uniform(1.0, 2.0, (2, 5)), jnp.float32),
        scale=normal(rng, h, shift=1.0, scale=0.3),
        shift=normal(rng, h),
        w=normal(rng, h, c, dtype=dtype, scale=h**-0.5),
        bias=normal(rng, c) if bias else None,
        gate_after=gate_after,
        factor=2.0**-22,
        out_dtype=jnp.dtype(x_dtype),
        size=n,
        rows=(n, rows),
        **shared,
    )
    gates = c if gate_after else h
    gating = Projection(
        x=normal(rng, matrices * n, n, c, dtype=x_dtype, scale=2.0, shift=1.0),
        mask=None,
        norm_scale=normal(rng, c, shift=1.0, scale=0.3),
        norm_bias=normal(rng, c),
        w=jnp.zeros((c, 4, 0), dtype),
        bias=None,
        w_gate=normal(rng, c, gates, dtype=dtype, scale=c**-0.5),
        b_gate=normal(rng, gates) if bias else None,
        **shared,
    )
    return form.replace(residual=gating.x) if residual else form, gating


def exact(form: Output[jax.Array], gating: Projection[jax.Array]) -> np.ndarray:
    """The result in float64."""

    def normed(x: np.ndarray, scale: Any, shift: Any, epsilon: float) -> np.ndarray:
        d = x - x.mean(-1, keepdims=True)
        z: np.ndarray = d / np.sqrt(np.mean(d * d, -1, keepdims=True) + epsilon) * float64(scale) + float64(shift)
        return z

    def of(bias: Any) -> Any:
        return 0.0 if bias is None else float64(bias)

    kept, rows = form.rows
    left, right = trimul_scales.scales([*np.max(form.bounds, 0)], form.w.dtype)
    y = float64(form.ys[0]).reshape(-1, rows, form.hidden, form.ys[0].shape[2])[:, :kept, :, : form.size]
    y = y.reshape(-1, form.hidden, form.size).swapaxes(1, 2) / float(form.factor * left * right)
    z = normed(float64(gating.x), gating.norm_scale, gating.norm_bias, gating.epsilon)
    gate = 1.0 / (1.0 + np.exp(-(z @ float64(gating.w_gate) + of(gating.b_gate))))
    y = normed(y, form.scale, form.shift, form.epsilon)
    y = y if form.gate_after else y * gate
    out: np.ndarray = y @ float64(form.w) + of(form.bias)
    out = out * gate if form.gate_after else out
    return out if form.residual is None else out + float64(form.residual)


def program(call: Call, interpret: bool = INTERPRET) -> Any:
    form, gating = (one.abstract() for one in call)
    run = functools.partial(trimul_output.output, target=target.current(), interpret=interpret)
    return jax.jit(lambda end, gate: run(form.of(end), gating.of(gate)))


def run(call: Call) -> jax.Array:
    out: jax.Array = program(call)(*(form.operands for form in call))
    return out


@both_gates
@pytest.mark.parametrize(
    "n, h, c, dtype, x_dtype",
    [
        (16, 64, 64, "float16", "float32"),  # sixteen tiles, eight for each of two CTAs
        (13, 128, 64, "bfloat16", "bfloat16"),  # what is filled up in both directions
        (1, 64, 128, "float16", "bfloat16"),
        *by_device(
            cpu=[(72, 128, 128, "float16", "float32")],
            gpu=[
                (n, h, c, dtype, x_dtype)
                for n, x_dtype in ((64, "float32"), (70, "bfloat16"), (129, "float32"), (384, "bfloat16"))
                for h, c, dtype in ((128, 128, "float16"), (64, 128, "bfloat16"), (128, 64, "float16"))
            ],
        ),
    ],
)
def test_output(n, h, c, dtype, x_dtype, gate_after):
    matrices = 1 if n > 70 else 2
    options: dict[str, Any] = dict(gate_after=gate_after, bias=n != 13, residual=h == c)
    call = draw(matrices, n, h, c, dtype=dtype, x_dtype=x_dtype, **options)
    out = run(call)
    assert out.dtype == x_dtype and out.shape == (matrices * n, n, c)
    assert_close(out, exact(*call), OP[x_dtype if x_dtype == "bfloat16" else dtype])


@both_gates
def test_the_same_bits_twice(gate_after):
    n = by_device(cpu=8, gpu=200)
    call = draw(1, n, 64, 64, gate_after=gate_after, dtype="float16", x_dtype="float32")
    f = program(call)
    assert_equal(*(f(*(form.operands for form in call)) for _ in range(2)))


@both_gates
def test_what_is_not_finite_stays_where_it_is(gate_after):
    form, gating = draw(1, 9, 64, 64, gate_after=gate_after, dtype="float16", x_dtype="float32")
    spoilt = gating.replace(x=gating.x.at[3, 4, 5].set(np.nan).at[6, 0, 0].set(np.inf))
    out, expected = (np.array(run((form, some))) for some in (spoilt, gating))
    for place in ((3, 4), (6, 0)):
        assert np.all(np.isnan(out[place]))
        out[place] = expected[place] = 0.0
    assert_equal(out, expected)


@both_gates
@finds_races
@pytest.mark.parametrize("x_dtype, residual", [("float32", False), ("bfloat16", True)])
def test_has_no_races(x_dtype, residual, gate_after):
    call = draw(1, 16, 64, 64, gate_after=gate_after, dtype="float16", x_dtype=x_dtype, residual=residual)
    with no_races():
        jax.block_until_ready(run(call))


@without_gpu
@both_gates
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n, residual", [(5, False), (200, True), (320, False)])
def test_lowers(n, x_dtype, gate_after, residual):
    """To the one kernel, in the shared memory that a Hopper GPU has."""
    options: dict[str, Any] = dict(gate_after=gate_after, residual=residual)
    form, gating = (form.abstract() for form in draw(1, 8, 128, 128, dtype="float16", x_dtype=x_dtype, **options))
    rows, columns = n + -n % 8, n + -n % 64
    y = jax.ShapeDtypeStruct((rows, 128, columns), form.w.dtype)
    form = form.replace(ys=(y,), size=n, rows=(n, rows))
    gating = gating.replace(x=jax.ShapeDtypeStruct((n, n, 128), x_dtype))
    if residual:
        form = form.replace(residual=gating.x)

    def f(*operands: Any) -> jax.Array:
        out: jax.Array = program((form, gating), interpret=False)(*operands)
        return out

    assert lowered_calls(f, form.operands, gating.operands) == 1


@pytest.mark.parametrize(
    "h, c, dtype, message",
    [
        (64, 64, "float32", "takes weights in float16 and bfloat16, not float32"),
        (96, 64, "float16", "takes 64 or 128 channels and hidden channels, not 64 and 96"),
        (64, 256, "float16", "takes 64 or 128 channels and hidden channels, not 256 and 64"),
        (64, 128, "bfloat16", None),
    ],
)
def test_refuses(h, c, dtype, message):
    operands = dict.fromkeys(Form.OPERANDS)
    operands |= dict(
        x=jax.ShapeDtypeStruct((1, 8, 8, c), "float32"), w_in=jax.ShapeDtypeStruct((c, 4, h), "float32")
    )
    form: Form[Any] = Form(
        **operands,
        direction="outgoing",
        gate_after=True,
        epsilon=1e-5,
        compute_dtype=jnp.dtype(dtype),
        precision=jax.lax.Precision.DEFAULT,
        out_dtype=jnp.dtype("float32"),
    )
    assert trimul_output.unsupported(form) == message
