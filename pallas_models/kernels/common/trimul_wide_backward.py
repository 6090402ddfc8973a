"""Steps of the gradient of the triangle multiplicative update in XLA, for any number of channels.

Kernels hold all channels of some positions. Where these are too many, most of the work is in products with
weights, and XLA's own are as fast as any. Cotangents come and go as for kernels, with a row's channels before its
positions. Here all P positions are one axis, with hidden channels before it: each product with weights is of two
matrices, which XLA takes as they are.
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
        """(channels, P) of (B', channels, M')."""
        matrices = x.reshape(-1, self.padded_rows, *x.shape[1:])[:, : self.rows, :, : self.size]
        return jnp.moveaxis(matrices, 2, 0).reshape(x.shape[1], -1)

    def filled_up(self, x: jax.Array) -> jax.Array:
        """(B', channels, M') of (channels, P), with zeros for what no position is at."""
        matrices = jnp.moveaxis(x.reshape(len(x), -1, self.rows, self.size), 0, 2)
        more = (0, self.padded_rows - self.rows), (0, 0), (0, self.padded_size - self.size)
        return jnp.pad(matrices, ((0, 0), *more)).reshape(-1, len(x), self.padded_size)


def _product(equation: str, a: jax.Array, b: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    """A product in float32 of operands of the same dtype, at `precision` where that is float32."""
    if a.dtype.itemsize == 2:
        precision = jax.lax.Precision.DEFAULT
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _in_positions(x: jax.Array) -> jax.Array:
    """(P, channels) of (B, M, channels)."""
    return x.reshape(-1, x.shape[-1])


def _mean(x: jax.Array, axis: int) -> jax.Array:
    """The mean along an axis, divided before it is summed.

    Divided after, it would be subtracted in one instruction with its division where a kernel computes both, and
    what is left of rows of equal numbers would not be 0.
    """
    return jnp.sum(x * (1.0 / x.shape[axis]), axis=axis, keepdims=True)


class _Norm(NamedTuple):
    """A layer norm along an axis; `inverse` is 0 where nothing of a position is to be known."""

    unit: jax.Array
    inverse: jax.Array
    axis: int

    @classmethod
    def of(cls, x: jax.Array, epsilon: jax.Array | float, axis: int, factor: jax.Array | None = None) -> "_Norm":
        """The norm of x, float32. Where the factor of a mask is 0, what is not finite counts for nothing."""
        # Behind barriers: else each that reads the norm would sum anew, in a kernel that does nothing else.
        mean = jax.lax.optimization_barrier(_mean(x, axis))
        inverse = jax.lax.rsqrt(_mean((x - mean) ** 2, axis) + epsilon)
        if factor is not None:
            inverse = jnp.where((jnp.expand_dims(factor, axis) != 0.0) | (inverse > 0.0), inverse, 0.0)
        inverse = jax.lax.optimization_barrier(inverse)
        unit = (x - mean) * inverse
        return cls(unit if factor is None else jnp.where(inverse == 0.0, 0.0, unit), inverse, axis)

    def pulled(self, cotangent: jax.Array) -> jax.Array:
        """The cotangent of x, from the cotangent of `unit`."""
        along = _mean(cotangent * self.unit, self.axis)
        return (cotangent - _mean(cotangent, self.axis) - self.unit * along) * self.inverse


def output_backward(form: Output[jax.Array], dout: jax.Array, scales: jax.Array | None) -> OfEnd:
    """The gradient of the end of the update, for the cotangent (B, M, C) of its result, of any float dtype."""
    (y,), (rows, padded), dtype = form.ys, form.rows, form.w.dtype
    places = _Places(rows, padded, form.size, y.shape[2])
    of_product, of_y, of_gate = (jnp.float32(1.0),) * 3 if scales is None else jnp.unstack(scales)
    y_scale, epsilon = output_scales.scaled(form)
    assert form.gate is not None
    gate, dout = places.taken(form.gate).astype(jnp.float32), _in_positions(dout).astype(jnp.float32)
    norm = _Norm.of(places.taken(y).astype(jnp.float32), epsilon, 0)
    operand = norm.unit * form.scale[:, None] + form.shift[:, None]
    if form.gate_after:
        gate = gate.T
        product = times(dout, gate)
    else:
        normed, product = operand, dout
        operand = normed * gate
    # What is not finite adds nothing where its result has a cotangent of 0, as a position that is masked has.
    operand = jnp.where(jnp.any(product != 0.0, axis=1), operand, 0.0).astype(dtype)
    rounded = (product * of_product).astype(dtype)
    doperand = _product("hc,pc->hp", form.w, rounded, form.precision) / of_product
    if form.gate_after:
        out = _product("hp,hc->pc", operand, form.w, form.precision)
        dgate, dnormed = dout * (out if form.bias is None else out + form.bias), doperand
    else:
        dgate, dnormed = doperand * normed, times(doperand, gate)
    dgate = times(dgate, gate * (1.0 - gate))
    dy = norm.pulled(dnormed * form.scale[:, None]) * y_scale
    return OfEnd(
        y=places.filled_up((dy * of_y).astype(dtype)),
        gate=places.filled_up(((dgate.T if form.gate_after else dgate) * of_gate).astype(dtype)),
        w=_product("hp,pc->hc", operand, rounded, form.precision) / of_product,
        scale=jnp.sum(dnormed * norm.unit, axis=1),
        shift=jnp.sum(dnormed, axis=1),
        bias=None if form.bias is None else jnp.sum(product, axis=0),
    )


def _sides(form: Projection[jax.Array], z: jax.Array, given: Given) -> tuple[jax.Array, Side]:
    """The cotangents of left and right, (2, H, P), and of what makes them, from the normalised positions (P, C).

    Both steps ask for them, in one program, in which XLA computes them once.
    """
    factor = None if form.mask is None else form.mask.astype(jnp.float32).ravel()
    products = _product("ckh,pc->khp", form.w, z, form.precision)
    if form.bias is not None:
        products += form.bias[:, :, None]
    places = _Places.of(form)
    # Behind a barrier, else XLA joins left and right last, in a kernel for each cotangent that reads all products.
    cotangent = jax.lax.optimization_barrier(jnp.stack([places.taken(given.left), places.taken(given.right)]))
    cotangent = cotangent.astype(jnp.float32)
    scales, sigmoid = (given.scales[3], 1.0), jax.nn.sigmoid(products[1::2])
    return cotangent, Side.pulled(products[0::2], sigmoid, cotangent, factor, scales, dtype=z.dtype)


def _of_gate(form: Projection[jax.Array], given: Given) -> jax.Array:
    """The cotangent of the gate, (G, P), in the dtype of products."""
    return _Places.of(form).taken(given.gate).astype(form.w.dtype)


def project_backward(form: Projection[jax.Array], given: Given, *, of_mask: bool) -> OfPositions:
    """The gradient of the projections but for their weights.

    Args:
      of_mask: whether the cotangent of the mask is wanted.
    """
    factor = None if form.mask is None else form.mask.astype(jnp.float32).ravel()
    norm = _Norm.of(_in_positions(form.x).astype(jnp.float32), form.epsilon, 1, factor)
    z = (norm.unit * form.norm_scale + form.norm_bias).astype(form.w.dtype)
    of_projections, of_gates, of_gate, shrink = jnp.unstack(given.scales)
    cotangent, side = _sides(form, z, given)
    # What float16 cannot hold at its own size is multiplied apart.
    dz = _product("shp,csh->pc", side.projection, form.w[:, 0::2], form.precision) * of_projections
    dz += _product("shp,csh->pc", side.gate, form.w[:, 1::2], form.precision) * of_gates
    dz += _product("gp,cg->pc", _of_gate(form, given), form.w_gate, form.precision) * of_gate
    kept = None
    if of_mask:
        assert form.mask is not None
        dmask = jnp.sum(cotangent * side.value, axis=(0, 1)) * (of_projections * shrink)
        kept = jnp.where(factor == 0.0, 0.0, dmask).reshape(form.mask.shape)
    return OfPositions(
        x=norm.pulled(dz * form.norm_scale).astype(form.x.dtype).reshape(form.x.shape),
        mask=kept,
        scale=jnp.sum(dz * norm.unit, axis=0),
        shift=jnp.sum(dz, axis=0),
        z=z.reshape(form.x.shape),
    )


def weights_backward(form: Projection[jax.Array], z: jax.Array, given: Given) -> OfWeights:
    """The gradient of the projections for their weights, from the normalised positions z (B, M, C).

    Each is still to be multiplied by the scale of its cotangent among the first three `scales`.
    """
    z = _in_positions(z)
    _, side = _sides(form, z, given)
    of_sides, of_gate = [d.reshape(-1, len(z)) for d in (side.projection, side.gate)], _of_gate(form, given)
    # Of projections, then of gates, each of left and right.
    w = jnp.stack([_product("pc,dp->cd", z, d, form.precision) for d in of_sides], axis=1)
    total = functools.partial(jnp.sum, axis=-1, dtype=jnp.float32)
    of_bias = jnp.stack([total(d) for d in of_sides])
    c, _, h = form.w.shape
    return OfWeights(
        w=w.reshape(c, 2, 2, h).swapaxes(1, 2).reshape(form.w.shape),
        bias=None if form.bias is None else of_bias.reshape(2, 2, h).swapaxes(0, 1).reshape(form.bias.shape),
        w_gate=_product("pc,gp->cg", z, of_gate, form.precision),
        b_gate=None if form.b_gate is None else total(of_gate),
    )
