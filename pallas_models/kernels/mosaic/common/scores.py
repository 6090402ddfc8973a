"""Scores of attention as the tensor cores leave them: which are masked, and weights made of them."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.scores import exponents
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import layout_cast, load


def across(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector along an axis of a matrix, the same in all its rows or columns.

    It has the layout of products: where that is not said, to infer the layouts of integers takes long.
    """
    return layout_cast(jax.lax.broadcast_in_dim(x, shape, [axis]), plgpu.Layout.WGMMA)


def load_across(ref: Ref, shape: tuple[int, ...], axis: int) -> jax.Array:
    """The vector that `ref` points at, across a matrix."""
    return across(load(ref, plgpu.Layout.WGMMA.reduce(1 - axis)), shape, axis)


def masked(scores: jax.Array, valid: Sequence[jax.Array]) -> jax.Array:
    """The scores where all that is `valid` holds; -inf elsewhere."""
    return jnp.where(functools.reduce(operator.and_, valid), scores, -jnp.inf)


def exponent_scale(form: Form[Any]) -> float:
    """The factor on scores of exponents to the base 2, which are the GPU's own.

    Scores stay unscaled up to them, where there is no bias to be added.
    """
    return (form.sm_scale if form.bias is None else 1.0) * math.log2(math.e)


def softmax_weights(scores: jax.Array, peak: jax.Array, scale: float) -> jax.Array:
    """The exponentials of scaled scores (rows, keys) less the maximum of each row."""
    factors, shifts = (
        x if isinstance(x, float) else jax.lax.broadcast_in_dim(x, scores.shape, [0])
        for x in exponents(peak, scale)
    )
    return jnp.exp2(scores * factors - shifts)
