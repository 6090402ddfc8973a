"""The scales that keep left and right of the triangle multiplicative update, and their sums, in range."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LOG2_LARGEST = 14  # of left, right and sums: half of the range of float16, as rounding may add to them


def scales(largest: Sequence[jax.Array], dtype: DTypeLike) -> list[jax.Array]:
    """Powers of two for left and right, times which they are at most `2**LOG2_LARGEST`, whatever x is.

    The weights, which are of `dtype`, take these scales, too, and must not grow beyond their own range. The
    largest factor of the mask counts for no less than 1, and in float16 for no more than 1024, or float16 would
    round what the scale makes small: sums of larger factors may be infinite. A scale is NaN where its bound is
    beyond float32.

    Args:
      largest: five numbers: bounds of left and of right without the mask, the largest |weight| of each, and the
        largest factor of the mask.
    """
    *sides, mask = largest
    mask = jnp.clip(mask, 1.0, 2.0**10 if dtype == jnp.float16 else jnp.inf)

    def scale(bound: jax.Array, weight: jax.Array) -> jax.Array:
        growth = weight * 2.0 ** (LOG2_LARGEST + 1 - jnp.finfo(dtype).maxexp)
        # At least 2**-17, of which the scale is 2**30: the squares of both are within float32.
        bound = jnp.maximum(jnp.maximum(bound * mask, growth), 2.0**-17)
        exponent = jax.lax.bitcast_convert_type(bound, jnp.int32) >> 23
        power = jax.lax.bitcast_convert_type((LOG2_LARGEST + 253 - exponent) << 23, jnp.float32)
        return jnp.where(bound < jnp.inf, power, jnp.nan)

    return [scale(*side) for side in zip(sides[:2], sides[2:], strict=True)]


def sums_factor(n: int) -> float:
    """A power of two, times which sums of `n` products are at most as large as left and right may be."""
    return 2.0 ** -(LOG2_LARGEST + math.ceil(math.log2(n)))


def scaled_sums(
    largest: Sequence[jax.Array], dtype: DTypeLike, factor: float, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """What the sums, times `factor`, are scaled by as left and right are, and the epsilon of their norm.

    Scaled sums have the same norm as the sums if epsilon is scaled, too: not to 0, or zeros would become NaN.
    """
    left, right = scales(largest, dtype)
    scale = factor * left * right
    return scale, jnp.maximum(scale * scale * epsilon, float(jnp.finfo(jnp.float32).tiny))


def powers_of_two(largest: jax.Array) -> jax.Array:
    """Powers of two, times which numbers of this size are 2**13 to 2**14, as far as both are within float32."""
    exponent = (jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127
    exponent = jnp.clip(LOG2_LARGEST - 1 - exponent, -100, 113)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
