"""Scales of the cotangents of the end of the triangle multiplicative update, which keep them within float16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_models.kernels.common import trimul_scales
from pallas_models.kernels.forms.trimul import Output


class Largest(NamedTuple):
    """What bounds all cotangents, float32: no cotangent itself is computed for it.

    Attributes:
      cotangent: the largest |cotangent| of the result.
      length: the largest norm of the cotangents of a position.
      by_deviation: the largest such norm divided by the deviation of the position's sums, unscaled.
    """

    cotangent: jax.Array
    length: jax.Array
    by_deviation: jax.Array


def scaled(form: Output[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What y is scaled by, and the epsilon of its norm."""
    largest = [jnp.max(form.bounds[:, i]) for i in range(form.bounds.shape[1])]
    return trimul_scales.scaled_sums(largest, form.w.dtype, form.factor, form.epsilon)


def find_largest(form: Output[jax.Array], dout: jax.Array) -> Largest:
    """`Largest` of dout (B, M, C), in XLA, which reduces arrays as fast as memory gives them: without Triton."""
    (y,), (rows, padded) = form.ys, form.rows
    scale, epsilon = scaled(form)
    y = y.reshape(-1, padded, *y.shape[1:])[:, :rows, :, : form.size].astype(jnp.float32)
    dout = dout.reshape(-1, rows, *dout.shape[1:]).astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.var(y, axis=2) + epsilon)
    most = jnp.max(jnp.abs(dout), axis=3)
    unit = dout * jnp.where(most > 0.0, 1.0 / most, 0.0)[..., None]  # whose squares are within float32
    length = most * jnp.sqrt(jnp.sum(unit * unit, axis=3))
    # What is not finite spoils its own sums alone.
    kept = (jnp.max(jnp.where(x < jnp.inf, x, 0.0)) for x in (most, length, length * inverse))
    cotangent, length, by_deviation = kept
    return Largest(cotangent, length, by_deviation * scale)


def scales(form: Output[jax.Array], found: Largest) -> jax.Array:
    """Powers of two for the cotangents of the product with the weights, of y and of the gate: (3,).

    Times these they are at most half of float16's largest number. The bounds come from the lengths of cotangents,
    from norms of the weights by Cauchy and Schwarz, and from the gradient of a layer norm, a projection divided by
    the deviation.
    """
    h = form.hidden
    scale, shift = (jnp.max(jnp.abs(v)) for v in (form.scale, form.shift))
    if form.gate_after:
        squares = jnp.sum(form.w.astype(jnp.float32) ** 2, axis=0)
        out = jnp.sqrt(h * jnp.max(squares)) * (scale + shift)
        gate = found.cotangent * (out if form.bias is None else out + jnp.max(jnp.abs(form.bias)))
    else:
        gate = found.length * _norm(form.w) * (float(h) ** 0.5 * scale + shift)
    dy = found.by_deviation * _norm(form.w) * scale
    return trimul_scales.powers_of_two(jnp.stack([found.cotangent, dy, 0.25 * gate]))


def _norm(w: jax.Array) -> jax.Array:
    """A bound of how much longer w makes a vector: the 8-norm of its singular values, under twice the largest."""

    def squared(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest element, and the product of x divided by it with its own transpose.

        As a sum over elements, in float32: so small a product is no work, and a GPU's own would take fewer bits.
        """
        most = jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(jnp.float32).tiny)
        x = x / most
        return most, jnp.sum(x[:, :, None] * x[:, None, :], axis=0)

    most, squares = squared(w.astype(jnp.float32))
    most_square, fourth = squared(squares)
    return most * jnp.sqrt(most_square * jnp.sqrt(jnp.sqrt(jnp.sum(fourth * fourth))))
