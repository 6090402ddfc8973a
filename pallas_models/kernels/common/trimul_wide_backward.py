"""Steps of the gradient of the triangle multiplicative update in XLA, for any number of channels.

Kernels hold all channels of some positions. Where these are too many, most of the work is in products with
weights, and XLA's own are as fast as any. Cotangents come and go as for kernels: channels before positions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_models.kernels.common import trimul_output_scales as output_scales
from pallas_models.kernels.common.activations import times
from pallas_models.kernels.common.trimul_sides import Side
from pallas_models.kernels.forms.trimul import Output, Projection
from pallas_models.kernels.forms.trimul_backward import Given, OfEnd, OfPositions, OfWeights


class _Places(NamedTuple):
    """Where positions lie in arrays that are filled up: how many rows of a matrix, and positions of a row."""

    rows: int
    padded_rows: int
    size: int
    padded_size: int

    @classmethod
    def of(cls, form: Projection[Any]) -> "_Places":
        return cls(form.rows, form.padded_rows, form.x.shape[1], form.result[1])

    def taken(self, x: jax.Array) -> jax.Array:
        """(B, M, channels) float32 of (B', channels, M')."""
        matrices = x.reshape(-1, self.padded_rows, *x.shape[1:])[:, : self.rows, :, : self.size]
        return matrices.reshape(-1, *matrices.shape[2:]).swapaxes(1, 2).astype(jnp.float32)

    def filled_up(self, x: jax.Array) -> jax.Array:
        """(B', channels, M') of (B, M, channels), with zeros for what no position is at."""
        matrices = x.swapaxes(1, 2).reshape(-1, self.rows, x.shape[2], self.size)
        more = (0, self.padded_rows - self.rows), (0, 0), (0, self.padded_size - self.size)
        return jnp.pad(matrices, ((0, 0), *more)).reshape(-1, x.shape[2], self.padded_size)


def _product(equation: str, a: jax.Array, b: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    """A product in float32 of operands of the same dtype, at `precision` where that is float32."""
    if a.dtype.itemsize == 2:
        precision = jax.lax.Precision.DEFAULT
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _mean(x: jax.Array) -> jax.Array:
    """The mean along the last axis, divided before it is summed.

    XLA computes what is cheap again for each that reads it. Divided after, a mean would be rounded in one place,
    and in another be subtracted in one instruction with its division: rows of equal numbers would not become 0.
    """
    return jnp.sum(x * (1.0 / x.shape[-1]), axis=-1, keepdims=True)


class _Norm(NamedTuple):
    """A layer norm along the last axis; `inverse` is 0 where nothing of a position is to be known."""

    unit: jax.Array
    inverse: jax.Array

    @classmethod
    def of(cls, x: jax.Array, epsilon: jax.Array | float, factor: jax.Array | None = None) -> "_Norm":
        """The norm of x, float32. Where the factor of a mask is 0, what is not finite counts for nothing."""
        d = x - _mean(x)
        inverse = jax.lax.rsqrt(_mean(d * d) + epsilon)
        if factor is None:
            return cls(d * inverse, inverse)
        inverse = jnp.where((factor[..., None] != 0.0) | (inverse > 0.0), inverse, 0.0)
        return cls(jnp.where(inverse == 0.0, 0.0, d * inverse), inverse)

    def pulled(self, cotangent: jax.Array) -> jax.Array:
        """The cotangent of x, from the cotangent of `unit`."""
        along = _mean(cotangent * self.unit)
        return (cotangent - _mean(cotangent) - self.unit * along) * self.inverse


def output_backward(form: Output[jax.Array], dout: jax.Array, scales: jax.Array | None) -> OfEnd:
    """The gradient of the end of the update, for the cotangent (B, M, C) of its result, of any float dtype."""
    (y,), (rows, padded), dtype = form.ys, form.rows, form.w.dtype
    places = _Places(rows, padded, form.size, y.shape[2])
    of_product, of_y, of_gate = (jnp.float32(1.0),) * 3 if scales is None else jnp.unstack(scales)
    y_scale, epsilon = output_scales.scaled(form)
    assert form.gate is not None
    gate, dout = places.taken(form.gate), dout.astype(jnp.float32)
    norm = _Norm.of(places.taken(y), epsilon)
    normed = norm.unit * form.scale + form.shift
    product = times(dout, gate) if form.gate_after else dout
    # What is not finite adds nothing where its result has a cotangent of 0, as a position that is masked has.
    operand = normed if form.gate_after else normed * gate
    operand = jnp.where(jnp.any(product != 0.0, axis=-1, keepdims=True), operand, 0.0).astype(dtype)
    rounded = (product * of_product).astype(dtype)
    doperand = _product("bmc,hc->bmh", rounded, form.w, form.precision) / of_product
    if form.gate_after:
        out = _product("bmh,hc->bmc", operand, form.w, form.precision)
        dgate, dnormed = dout * (out if form.bias is None else out + form.bias), doperand
    else:
        dgate, dnormed = doperand * normed, times(doperand, gate)
    dgate = times(dgate, gate * (1.0 - gate))
    dy = norm.pulled(dnormed * form.scale) * y_scale
    return OfEnd(
        y=places.filled_up((dy * of_y).astype(dtype)),
        gate=places.filled_up((dgate * of_gate).astype(dtype)),
        w=_product("bmh,bmc->hc", operand, rounded, form.precision) / of_product,
        scale=jnp.sum(dnormed * norm.unit, axis=(0, 1)),
        shift=jnp.sum(dnormed, axis=(0, 1)),
        bias=None if form.bias is None else jnp.sum(product, axis=(0, 1)),
    )


def _sides(form: Projection[jax.Array], z: jax.Array, given: Given) -> tuple[jax.Array, Side]:
    """The cotangents of left and right, (B, M, 2, H), and of what makes them.

    Both steps ask for them, in one program, in which XLA computes them once.
    """
    factor = None if form.mask is None else form.mask.astype(jnp.float32)[..., None, None]
    products = _product("bmc,ckh->bmkh", z, form.w, form.precision)
    if form.bias is not None:
        products += form.bias
    p, g = (products[:, :, k::2] for k in range(2))
    places = _Places.of(form)
    cotangent = jnp.stack([places.taken(given.left), places.taken(given.right)], axis=2)
    scales = given.scales[3], 1.0
    return cotangent, Side.pulled(p, jax.nn.sigmoid(g), cotangent, factor, scales, dtype=z.dtype)


def _of_gate(form: Projection[jax.Array], given: Given) -> jax.Array:
    """The cotangent of the gate, (B, M, G), in the dtype of products."""
    return _Places.of(form).taken(given.gate).astype(form.w.dtype)


def project_backward(form: Projection[jax.Array], given: Given, *, of_mask: bool) -> OfPositions:
    """The gradient of the projections but for their weights.

    Args:
      of_mask: whether the cotangent of the mask is wanted.
    """
    factor = None if form.mask is None else form.mask.astype(jnp.float32)
    norm = _Norm.of(form.x.astype(jnp.float32), form.epsilon, factor)
    z = (norm.unit * form.norm_scale + form.norm_bias).astype(form.w.dtype)
    of_projections, of_gates, of_gate, shrink = jnp.unstack(given.scales)
    cotangent, side = _sides(form, z, given)
    # What float16 cannot hold at its own size is multiplied apart.
    dz = _product("bmsh,csh->bmc", side.projection, form.w[:, 0::2], form.precision) * of_projections
    dz += _product("bmsh,csh->bmc", side.gate, form.w[:, 1::2], form.precision) * of_gates
    dz += _product("bmg,cg->bmc", _of_gate(form, given), form.w_gate, form.precision) * of_gate
    kept = None
    if of_mask:
        assert factor is not None
        dmask = jnp.sum(cotangent * side.value, axis=(2, 3))
        kept = jnp.where(factor == 0.0, 0.0, dmask * (of_projections * shrink))
    return OfPositions(
        x=norm.pulled(dz * form.norm_scale).astype(form.x.dtype),
        mask=kept,
        scale=jnp.sum(dz * norm.unit, axis=(0, 1)),
        shift=jnp.sum(dz, axis=(0, 1)),
        z=z,
    )


def weights_backward(form: Projection[jax.Array], z: jax.Array, given: Given) -> OfWeights:
    """The gradient of the projections for their weights, from the normalised positions z (B, M, C).

    Each is still to be multiplied by the scale of its cotangent among the first three `scales`.
    """
    _, side = _sides(form, z, given)
    of_sides, of_gate = [side.projection, side.gate], _of_gate(form, given)
    w = jnp.stack([_product("bmc,bmsh->csh", z, d, form.precision) for d in of_sides], axis=2)
    total = functools.partial(jnp.sum, axis=(0, 1), dtype=jnp.float32)
    of_bias = jnp.stack([total(d) for d in of_sides], axis=1)
    return OfWeights(
        w=w.reshape(form.w.shape),
        bias=None if form.bias is None else of_bias.reshape(form.bias.shape),
        w_gate=_product("bmc,bmg->cg", z, of_gate, form.precision),
        b_gate=None if form.b_gate is None else total(of_gate),
    )
