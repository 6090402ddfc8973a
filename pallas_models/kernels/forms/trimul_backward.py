"""What the kernels of the gradient of the triangle multiplicative update give one another."""

from typing import NamedTuple

import jax

GATED = 2.0**-14  # of the cotangent of a gate: what left and right are at most is its inverse


class OfEnd(NamedTuple):
    """The cotangents of the end of the update; sums over positions are float32.

    The kernel is given scales, (3,), powers of two, or None where all are 1.

    Attributes:
      y: (B', H, M'), in the dtype of the products, 0 for what no result is made of, times `scales[1]`: of y as it
        is without its scale.
      gate: (B', G, M'), likewise, times `scales[2]`: of what the gate is the sigmoid of.
      w: (H, C); its products are of cotangents times `scales[0]`, by which it is divided.
      scale: (H,).
      shift: (H,).
      bias: (C,), or None where there is no bias.
    """

    y: jax.Array
    gate: jax.Array
    w: jax.Array
    scale: jax.Array
    shift: jax.Array
    bias: jax.Array | None


class Given(NamedTuple):
    """The cotangents that come to the projections, each scaled.

    Attributes:
      left: (B', H, M').
      right: (B', H, M').
      gate: (B', G, M'), of what the gate is the sigmoid of.
      scales: (4,), powers of two. Products of cotangents with the weights as they are given are multiplied by the
        first for projections, by the second for their gates, and by the third for the gate; the cotangents of
        projections are multiplied by the last, so that no factor of a mask makes them too large for float16.
    """

    left: jax.Array
    right: jax.Array
    gate: jax.Array
    scales: jax.Array


class OfPositions(NamedTuple):
    """The cotangents of positions, of their mask and their norm, and the normalised positions.

    Attributes:
      x: (B, M, C), in the dtype of x.
      mask: (B, M), float32, or None.
      scale: (C,), float32, of the norm.
      shift: (C,), float32, of the norm.
      z: (B, M, C), in the dtype of the products.
    """

    x: jax.Array
    mask: jax.Array | None
    scale: jax.Array
    shift: jax.Array
    z: jax.Array


class OfWeights(NamedTuple):
    """The cotangents of weights and biases, float32.

    Attributes:
      w: (C, 4, H), of the weights without their scales.
      bias: (4, H), likewise, or None where there is no bias.
      w_gate: (C, G).
      b_gate: (G,), or None where there is no bias.
    """

    w: jax.Array
    bias: jax.Array | None
    w_gate: jax.Array
    b_gate: jax.Array | None
