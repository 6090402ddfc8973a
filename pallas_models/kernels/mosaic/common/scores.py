"""Weights of attention from its scores."""

import jax
import jax.numpy as jnp

from pallas_models.kernels.common.scores import exponents


def softmax_weights(scores: jax.Array, peak: jax.Array, scale: float) -> jax.Array:
    """The exponentials of scaled scores (rows, keys), less those of what each row has at most."""
    factors, shifts = (
        x if isinstance(x, float) else jax.lax.broadcast_in_dim(x, scores.shape, [0])
        for x in exponents(peak, scale)
    )
    return jnp.exp2(scores * factors - shifts)
