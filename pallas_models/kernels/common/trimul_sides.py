"""The gradient of left and right of the triangle multiplicative update, by position and channel."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.forms.trimul_backward import GATED


class Side(NamedTuple):
    """Some channels of left or right before the mask, and cotangents of what makes them: (positions, channels).

    Attributes:
      value: of the projection times its gate's sigmoid.
      projection: the cotangent of the projection.
      gate: the cotangent of the gate, times `GATED` and the scale of the projection.
    """

    value: jax.Array
    projection: jax.Array
    gate: jax.Array

    @classmethod
    def pulled(
        cls,
        p: jax.Array,
        s: jax.Array,
        cotangent: jax.Array,
        factor: jax.Array | None,
        scales: tuple[jax.Array | float, jax.Array | float],
        *,
        dtype: DTypeLike,
    ) -> Self:
        """The gradient of `factor * p * s`, where s is the sigmoid of the gate.

        Args:
          cotangent: of the side, in float32.
          factor: the factors of the mask by position, or None.
          scales: what the cotangents of p and of the gate are multiplied by.
        """
        value = p * s
        of_p, of_g = scales
        dp, dg = cotangent * s, cotangent * (GATED * value * (1.0 - s))
        if factor is None:
            dp, dg = dp * of_p, dg * of_g
        else:  # 0 times what is not finite would be NaN
            dp, dg = (jnp.where(factor == 0.0, 0.0, d * (factor * by)) for d, by in ((dp, of_p), (dg, of_g)))
        return cls(value, dp.astype(dtype), dg.astype(dtype))
