"""The triangle multiplicative update in plain XLA: at once, or some rows of pairs at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.dispatch.sharding import varying_alike
from pallas_models.kernels.common.channel_exchange import ByChannels
from pallas_models.kernels.common.trimul_scales import scales
from pallas_models.kernels.forms.trimul import Direction, Form
from pallas_models.kernels.schedules.trimul_backward import Residuals
from pallas_models.kernels.schedules.trimul_slices import Take, in_parts
from pallas_models.ops import _half_precision, norm

_EQUATIONS: dict[Direction, str] = {"outgoing": "hbik,hbjk->hbij", "incoming": "hbki,hbkj->hbij"}


def reference(form: Form[jax.Array]) -> Any:
    """The update in plain XLA, of x (B, N, N, C).

    Hidden channels come first, as the products over k want them, so that neither they nor the projections are
    transposed, nor are gradients of either.
    """
    steps = _Steps.of(form)
    out = _at_once(steps) if form.max_temporary_bytes is None else _in_slices(steps, form.max_temporary_bytes)
    return with_unread(out, form) if form.return_residuals else out


def with_unread(out: jax.Array, form: Form[jax.Array]) -> Any:
    """The result, and what is kept for a gradient that is the reference's."""
    return varying_alike((out, Residuals.unread(form)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of an update."""

    form: Form[jax.Array]
    by_channels: ByChannels

    @classmethod
    def of(cls, form: Form[jax.Array]) -> _Steps:
        """The steps of a call."""
        return cls(form, ByChannels.over(form.rows_over, form.columns_over))

    def product(self, equation: str, a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """The product of operands that are rounded to the compute dtype, in float32, and a bias."""
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if self.form.compute_dtype == jnp.float32:
            y = jnp.einsum(equation, a, b, precision=self.form.precision)
        else:
            y = _half_precision.rounded_einsum(equation, self.form.compute_dtype, a, b)
        return y if bias is None else y + bias.astype(jnp.float32)

    def normed(self, x: jax.Array) -> jax.Array:
        """The layer norm of x (B, I, J, C)."""
        form = self.form
        return norm.normalize(x.astype(jnp.float32), form.norm_scale, form.norm_bias, None, epsilon=form.epsilon)

    def sides(self, z: jax.Array, mask: jax.Array | None, which: tuple[int, ...]) -> list[jax.Array]:
        """Left (0), right (1), or both, (H, B, I, J), of pairs and their mask (B, I, J)."""
        first, last = 2 * which[0], 2 * which[-1] + 2
        w, b = self.form.w_in[:, first:last], self.form.b_in
        b = None if b is None else b[first:last, :, None, None, None]
        projections = self.product("cgh,bijc->ghbij", w, z, b)
        return [self._side(projections[i : i + 2], mask) for i in range(0, last - first, 2)]

    def _side(self, projections: jax.Array, mask: jax.Array | None) -> jax.Array:
        projection, gate = projections
        y = projection * jax.nn.sigmoid(gate)
        if mask is None:
            return y
        factor = mask.astype(jnp.float32)
        return jnp.where(factor == 0, 0.0, factor * y)  # 0 times what is not finite would be NaN

    def scales(self) -> list[jax.Array] | None:
        """Powers of two for left and right, which keep them in the range of float16; None where it needs none."""
        return _scales(self.form, self.by_channels) if self.form.compute_dtype == jnp.float16 else None

    def sums(self, left: jax.Array, right: jax.Array, by_scales: list[jax.Array] | None) -> jax.Array:
        """The sums over third positions, of sides that take scales for that."""
        sum_over_k = functools.partial(self.product, _EQUATIONS[self.form.direction])
        if by_scales is None:
            return self.by_channels.apply(sum_over_k, left, right)
        by_left, by_right = by_scales
        return self.by_channels.apply(sum_over_k, left * by_left, right * by_right) / by_left / by_right

    def end(self, x: jax.Array, z: jax.Array, y: jax.Array) -> jax.Array:
        """The result (B, I, J, C), from x, its layer norm and the sums (H, B, I, J)."""
        form = self.form
        y = norm.normalize(y, form.out_norm_scale, form.out_norm_bias, None, epsilon=form.epsilon, axis=0)
        gate = jax.nn.sigmoid(self.product("bijc,cg->bijg", z, form.w_gate, form.b_gate))
        if form.gate_after:
            out = self.product("hbij,hc->bijc", y, form.w_out, form.b_out) * gate
        else:
            out = self.product("bijh,hc->bijc", jnp.moveaxis(y, 0, -1) * gate, form.w_out, form.b_out)
        return (out + x.astype(jnp.float32) if form.residual else out).astype(form.out_dtype)


def _at_once(steps: _Steps) -> jax.Array:
    """The update for all rows of y."""
    form = steps.form
    z = steps.normed(form.x)
    left, right = steps.sides(z, form.mask, (0, 1))
    return steps.end(form.x, z, steps.sums(left, right, steps.scales()))


def row_bytes(form: Form[Any]) -> int:
    """Bytes that the update in slices takes for each row of a slice.

    In float32: x and its norm, left and right with their projections and rounded, y and its norm, gate and result.
    """
    b, n, _, c = form.x.shape
    return 4 * int(b) * int(n) * (8 * int(c) + 16 * form.hidden + 4 * int(form.w_gate.shape[1]))


def _in_slices(steps: _Steps, most: int) -> jax.Array:
    """The update for some rows of y at a time, and in each slice for as many columns of y.

    Left is made of the pairs of those rows, and right, again for each slice, of the pairs of those columns.
    """
    form = steps.form
    if form.is_split:
        raise ValueError(f"max_temporary_bytes={most} is for a device that has all pairs, not a part of them")
    n = form.x.shape[1]
    rows = min(max(most // row_bytes(form), 1), n)
    by_scales = steps.scales()
    axis = 1 if form.direction == "outgoing" else 2

    def side(which: int, take: Take) -> jax.Array:
        mask = None if form.mask is None else take(form.mask, axis)
        return steps.sides(steps.normed(take(form.x, axis)), mask, (which,))[0]

    def of_rows(take: Take) -> jax.Array:
        left = side(0, take)
        y = in_parts(n, rows, 3, lambda take: steps.sums(left, side(1, take), by_scales))
        x = take(form.x, 1)
        return steps.end(x, steps.normed(x), y)

    return in_parts(n, rows, 1, of_rows)


def _scales(form: Form[jax.Array], by_channels: ByChannels) -> list[jax.Array]:
    """Powers of two that keep left and right in the range of float16."""
    weights = form.factors, form.norm_scale, form.norm_bias, form.w_in.astype(form.compute_dtype), form.b_in
    largest = bounds(*jax.lax.stop_gradient(weights))
    if form.factors is not None:
        largest = by_channels.largest(largest)
    return scales(jnp.unstack(largest), form.compute_dtype)


def bounds(
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w_in: jax.Array,
    b_in: jax.Array | None,
) -> jax.Array:
    """What `scales` takes, (5,), for weights of the compute dtype and the factors of a float mask."""
    w = jnp.abs(w_in[:, ::2].astype(jnp.float32))
    scaled, shifted = (jnp.abs(p.astype(jnp.float32))[:, None, None] * w for p in (norm_scale, norm_bias))
    bound = jnp.sqrt(len(w) * jnp.sum(jnp.square(scaled), axis=0)) + jnp.sum(shifted, axis=0)
    if b_in is not None:
        bound += jnp.abs(b_in[::2])
    factor = jnp.ones(1, jnp.float32)
    if mask is not None:
        size = jnp.abs(mask.astype(jnp.float32))
        factor = jnp.max(jnp.where(size < jnp.inf, size, 1.0), keepdims=True).ravel()
    return jnp.concatenate([jnp.max(bound, axis=1), jnp.max(w, axis=(0, 2)), factor])
