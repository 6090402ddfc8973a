"""The gradient of the end of the triangle update for Hopper GPUs against derivatives in float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import target
from pallas_models.kernels.common import trimul_scales
from pallas_models.kernels.forms.trimul import Output
from pallas_models.kernels.forms.trimul_backward import OfEnd
from pallas_models.kernels.mosaic import trimul_output_backward
from parity.support.common import (
    HOPPER,
    MOSAIC,
    MOSAIC_CALL,
    array,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    float64,
    gpu,
    normal,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 is refused")
FLOAT16 = dict(dtype="float16", dout_dtype="float32")
both_gates = pytest.mark.parametrize("gate_after", [True, False], ids=["after", "before"])


def draw(
    matrices: int, n: int, h: int, c: int, *, gate_after: bool, dtype: str, dout_dtype: str, bias: bool = True
) -> tuple[Output[jax.Array], jax.Array]:
    """An end of matrices of n rows and columns, filled up to rows of 8 and columns of 64, and a cotangent."""
    rng = np.random.default_rng(n + h)
    rows, columns = n + -n % 8, n + -n % 64
    gates = c if gate_after else h

    def filled_up(x: jax.Array) -> jax.Array:
        """With what makes results NaN where it is read, and is NaN where results are not."""
        widths = (0, 0), (0, rows - n), (0, 0), (0, columns - n)
        x = np.pad(np.asarray(x).reshape(matrices, n, *x.shape[1:]), widths, constant_values=np.nan)
        return array(x.reshape(-1, *x.shape[2:]))

    form = Output(
        ys=(filled_up(normal(rng, matrices * n, h, n, dtype=dtype, scale=3.0, shift=1.0)),),
        gate=filled_up(array(1.0 / (1.0 + np.exp(rng.normal(size=(matrices * n, gates, n)))), dtype)),
        bounds=jnp.asarray(rng.uniform(1.0, 2.0, (2, 5)), jnp.float32),
        scale=normal(rng, h, shift=1.0, scale=0.3),
        shift=normal(rng, h),
        w=normal(rng, h, c, dtype=dtype, scale=h**-0.5),
        bias=normal(rng, c) if bias else None,
        gate_after=gate_after,
        factor=2.0**-22,
        epsilon=1e-5,
        precision=jax.lax.Precision.DEFAULT,
        out_dtype=jnp.dtype(dout_dtype),
        size=n,
        rows=(1, 1) if rows == n else (n, rows),
    )
    return form, normal(rng, matrices * n, n, c, dtype=dout_dtype)


def y_scale(form: Output[jax.Array]) -> float:
    """What y is scaled by."""
    left, right = trimul_scales.scales([*np.max(form.bounds, 0)], form.w.dtype)
    return float(form.factor * left * right)


def exact(form: Output[jax.Array], dout: jax.Array) -> OfEnd:
    """The cotangents in float64, none of them scaled, of y and of the gate without what is filled up."""
    kept, rows = form.rows
    with jax.enable_x64(True):
        y, gate = (
            float64(x).reshape(-1, rows, *x.shape[1:])[:, :kept, :, : form.size] for x in (form.ys[0], form.gate)
        )
        bias = np.zeros(form.w.shape[1]) if form.bias is None else float64(form.bias)
        weights = float64(form.w), float64(form.scale), float64(form.shift), bias

        def end(y: Any, logit: Any, w: Any, scale: Any, shift: Any, bias: Any) -> Any:
            d = y - y.mean(2, keepdims=True)
            normed = d / jnp.sqrt(jnp.mean(d * d, 2, keepdims=True) + form.epsilon)
            normed, gate = normed * scale[:, None] + shift[:, None], jax.nn.sigmoid(logit)
            if form.gate_after:
                return (jnp.einsum("bihj,hc->bicj", normed, w) + bias[:, None]) * gate
            return jnp.einsum("bihj,hc->bicj", normed * gate, w) + bias[:, None]

        operands = (y / y_scale(form), np.log(gate) - np.log1p(-gate), *weights)
        cotangent = float64(dout).reshape(len(y), kept, form.size, -1).swapaxes(2, 3)
        pulled = jax.jit(lambda cotangent, *operands: jax.vjp(end, *operands)[1](cotangent))
        return OfEnd(*map(float64, pulled(cotangent, *operands)))


def largest_product(form: Output[jax.Array], dout: jax.Array) -> float:
    """The largest cotangent of the product with the weights, or half of it."""
    return float(np.max(np.abs(float64(dout)))) * (0.5 if form.gate_after else 1.0)


def scales_of(form: Output[jax.Array], dout: jax.Array, wanted: OfEnd) -> jax.Array | None:
    """What float16's cotangents are scaled by."""
    if form.w.dtype != jnp.float16:
        return None
    largest = [largest_product(form, dout)]
    largest += [float(np.max(np.abs(d))) for d in (wanted.y, wanted.gate)]
    return trimul_scales.powers_of_two(jnp.asarray(largest, jnp.float32))


def program(form: Output[jax.Array], interpret: bool = INTERPRET) -> Any:
    run = functools.partial(trimul_output_backward.output_backward, target=target.current(), interpret=interpret)
    return jax.jit(lambda operands, dout, scales: run(form.of(operands), dout, scales))


def assert_gradients(form: Output[jax.Array], dout: jax.Array) -> None:
    wanted, dtype = exact(form, dout), str(form.w.dtype)
    scales = scales_of(form, dout, wanted)
    found = program(form)(form.operands, dout, scales)
    kept, rows = form.rows
    of_y, of_gate = (1.0, 1.0) if scales is None else float64(scales[1:])
    for name, by in (("y", of_y), ("gate", of_gate)):
        result = getattr(found, name)
        assert result.dtype == dtype
        result = float64(result).reshape(-1, rows, *result.shape[1:])
        assert_close(result[:, :kept, :, : form.size] / by, getattr(wanted, name), OP[dtype])
        assert not np.any(result[:, kept:]) and not np.any(result[..., form.size :])
    for name in ("w", "scale", "shift", "bias"):
        if name == "bias" and form.bias is None:
            assert found.bias is None
        else:
            assert getattr(found, name).dtype == jnp.float32
            assert_close(getattr(found, name), getattr(wanted, name), OP[dtype])


@both_gates
@pytest.mark.parametrize(
    "n, h, c, dtype, dout_dtype",
    [
        (16, 64, 64, "float16", "float32"),  # sixteen tiles, eight for each of two CTAs
        (13, 128, 64, "bfloat16", "bfloat16"),  # what is filled up in both directions
        (5, 64, 128, "float16", "bfloat16"),
        *by_device(
            cpu=[(8, 128, 128, "float16", "float16")],
            gpu=[
                (n, h, c, dtype, dout_dtype)
                for n, dout_dtype in ((64, "float32"), (70, "bfloat16"), (129, "float32"), (384, "bfloat16"))
                for h, c, dtype in ((128, 128, "float16"), (64, 128, "bfloat16"), (128, 64, "float16"))
            ],
        ),
    ],
)
def test_gradients(n, h, c, dtype, dout_dtype, gate_after):
    dtypes = dict(dtype=dtype, dout_dtype=dout_dtype)
    # The largest has many tiles for every CTA, and would take the host seconds for each matrix.
    assert_gradients(*draw(1 if n > 200 else 2, n, h, c, gate_after=gate_after, bias=n != 5, **dtypes))


@both_gates
@pytest.mark.parametrize("by", [2.0**-60, 2.0**60])
def test_cotangents_of_any_size(by, gate_after):
    form, dout = draw(1, 8, 64, 64, gate_after=gate_after, **FLOAT16)
    scales = scales_of(form, dout, exact(form, dout))
    f = program(form)
    found, wanted = f(form.operands, dout * by, scales / by), f(form.operands, dout, scales)
    for a, b, factor in zip(found, wanted, (1.0, 1.0, by, by, by, by), strict=True):
        assert_equal(a, b * factor)


@both_gates
@pytest.mark.parametrize("of_norm, of_w", [(1e-4, 1e-3), (1e3, 1e2)])
def test_weights_of_any_size(of_norm, of_w, gate_after):
    """Their product is beyond float16 one way, and its normal numbers the other way."""
    form, dout = draw(1, 8, 128, 64, gate_after=gate_after, **FLOAT16)
    w = (form.w.astype(jnp.float32) * of_w).astype(jnp.float16)
    form = form.replace(scale=form.scale * of_norm, shift=form.shift * of_norm, w=w, bias=None)
    assert_gradients(form, dout)


@both_gates
@pytest.mark.parametrize("padding", [np.nan, np.inf])
def test_what_is_masked_adds_nothing(padding, gate_after):
    """Where a result has no cotangent, neither y nor the gate adds anything, whatever they are."""
    form, dout = draw(1, 8, 64, 64, gate_after=gate_after, **FLOAT16)
    masked = np.random.default_rng(0).random((8, 8)) < 0.3
    dout = jnp.where(masked[..., None], 0.0, dout)
    there = jnp.pad(jnp.asarray(masked), ((0, 0), (0, 56)))[:, None]
    spoilt = [jnp.where(there, padding, x) for x in (form.ys[0], form.gate)]
    scales, f = scales_of(form, dout, exact(form, dout)), program(form)
    found = f(form.replace(ys=(spoilt[0],), gate=spoilt[1]).operands, dout, scales)
    for a, b in zip(found, f(form.operands, dout, scales), strict=True):
        assert_equal(a, b)
    assert not np.any(np.asarray(found.y)[np.broadcast_to(there, found.y.shape)])


@both_gates
def test_the_same_bits_twice(gate_after):
    form, dout = draw(*by_device(cpu=(1, 8), gpu=(1, 128)), 64, 64, gate_after=gate_after, **FLOAT16)
    scales, f = scales_of(form, dout, exact(form, dout)), program(form)
    for a, b in zip(*(f(form.operands, dout, scales) for _ in range(2)), strict=True):
        assert_equal(a, b)


@both_gates
@finds_races
@pytest.mark.parametrize("dout_dtype", ["float32", "bfloat16"])
def test_has_no_races(dout_dtype, gate_after):
    form, dout = draw(1, 16, 64, 64, gate_after=gate_after, dtype="float16", dout_dtype=dout_dtype)
    with no_races():
        jax.block_until_ready(program(form)(form.operands, dout, jnp.ones(3)))


@without_gpu
@both_gates
@pytest.mark.parametrize("dout_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [5, 200, 320])
def test_lowers(n, dout_dtype, gate_after):
    """To the one kernel, in the shared memory that a Hopper GPU has."""
    form, dout = draw(1, 8, 128, 128, gate_after=gate_after, dtype="float16", dout_dtype=dout_dtype)
    rows, columns = n + -n % 8, n + -n % 64
    form = form.abstract()
    y, gate = (jax.ShapeDtypeStruct((rows, 128, columns), x.dtype) for x in (form.ys[0], form.gate))
    form = form.replace(ys=(y,), gate=gate, size=n, rows=(n, rows))
    assert trimul_output_backward.unsupported(form, gpu()) is None
    dout, scales = jax.ShapeDtypeStruct((n, n, 128), dout.dtype), jax.ShapeDtypeStruct((3,), jnp.float32)
    with cuda_device(*HOPPER):
        traced = program(form, interpret=False).trace(form.operands, dout, scales)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count(f"@{MOSAIC_CALL}") == 1


@pytest.mark.parametrize(
    "h, c, columns, dtype, message",
    [
        (64, 64, 64, "float32", "takes weights in float16 and bfloat16, not float32"),
        (96, 64, 64, "float16", "takes 64 or 128 channels and hidden channels, not 64 and 96"),
        (64, 256, 64, "float16", "takes 64 or 128 channels and hidden channels, not 256 and 64"),
        (64, 64, 72, "float16", "takes y in one part and positions in multiples of 64, not [(8, 64, 72)]"),
    ],
)
def test_refuses(h, c, columns, dtype, message):
    form, _ = draw(1, 8, 64, 64, gate_after=True, **FLOAT16)
    form = form.abstract().replace(
        ys=(jax.ShapeDtypeStruct((8, h, columns), dtype),), w=jax.ShapeDtypeStruct((h, c), dtype)
    )
    assert re.search(re.escape(message), trimul_output_backward.unsupported(form, gpu()) or "")
