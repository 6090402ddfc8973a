"""Scores of attention: how they are masked, scaled and turned into weights, on every backend."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models.kernels.forms.attention import Form

# What the maximum of a row of scores starts from: finite, so that a score of -inf less the maximum is no NaN.
LOWEST = float(np.finfo(np.float32).min)
# The log-sum-exp of a query that no key is left for: finite, as jax_debug_infs takes every infinity for a mistake.
NO_KEY = LOWEST
# A bias of this and below counts for -inf.
MASKING_BIAS = -1e30


def lowest_score(scale: float, *, with_bias: bool = False) -> float:
    """The number that the maximum of a row starts from.

    It is finite when it is scaled too, so that a score of -inf less the maximum is no NaN. With a bias it is the
    next number above one that masks: scores that such a bias makes have no weight, where a row has no others too.
    """
    return (
        float(np.nextafter(np.float32(MASKING_BIAS), np.float32(0.0)))
        if with_bias
        else LOWEST / max(_power_above(scale), 1.0)
    )


def biased_in_xla(scores: jax.Array, scale: float, bias: jax.Array) -> jax.Array:
    """`scores * scale + bias`, float32, the same for all that read it.

    XLA computes this again for each, and would round product and sum once in one place, twice in another, were
    they not kept apart. A row's maximum must be one of the scores that it is subtracted from.
    """
    bias = bias.astype(jnp.float32)
    return jnp.where(jnp.isnan(bias), bias, scores * scale) + bias


def exponents(peak: jax.Array, scale: float) -> tuple[jax.Array | float, jax.Array]:
    """The factor and the shift that make exponents to the base 2 of scores: `score * factor - shift`.

    The GPU rounds product and difference once, so that the rounding of the shift is an error of the maximum's
    exponent: 2 for a shift of 2**26, where weights of 16 bits begin to suffer. From there on scores are rounded
    to steps of more than 4 in the exponent, so that any factor as large will do: a power of two rounds nothing.

    Args:
      peak: the maximum of each row of scores.
      scale: factor on the scores, to the base 2.
    """
    power = _power_above(scale)
    factor = scale if power == scale else jnp.where(jnp.abs(peak) >= 2.0**26 / scale, power, scale)
    return factor, peak * factor


def _power_above(scale: float) -> float:
    return 2.0 ** math.ceil(math.log2(scale))


def rows_of_backward(
    form: Form[Any], out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Two numbers that the gradients of attention need for each row of weights, both float32 like `lse`.

    Args:
      form: the call.
      out: (B, Sq, heads * head_dim), the results; of pairs (B, N, N, heads * head_dim).
      lse: (B, heads, Sq) float32, the log-sum-exp of the scores, `NO_KEY` for queries without one; of pairs
        (B, lines, heads, N).
      dout: gradient of `out`.
      dlse: gradient of `lse`; None for zeros.

    Returns:
      The shift, which is added to scores to the base 2 before exponentials, and the delta, which is subtracted
      from gradients of weights.
    """
    by_head = (*out.shape[:-1], -1, form.head_dim)
    product = out.astype(jnp.float32) * dout.astype(jnp.float32)
    delta = jnp.sum(product.reshape(by_head), axis=-1)
    if form.item_axis == 2:
        delta = delta.swapaxes(1, 2)
    delta = delta.swapaxes(-2, -1)
    empty = lse == NO_KEY
    if dlse is not None:  # the gradient of lse is the weights themselves
        delta = jnp.where(empty, 0.0, delta - dlse)
    return jnp.where(empty, -jnp.inf, lse * -math.log2(math.e)), delta
