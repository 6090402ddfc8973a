"""Bounds of left and right of the triangle multiplicative update, of which the scales are made.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.steps import shared_step
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_columns import columns_of, reduce_rows, scratch_types
from pallas_models.kernels.mosaic.common.row_config import WARPGROUP, Config
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.mosaic.common.vectors import vector_length

_WARPGROUPS = 1  # of a CTA; each has to add up its columns with the others
_THREADS, _MOST_ROWS = 4, 4  # of a row of the weights; rows that a thread has at a time, in all 128 in a CTA
_MOST_CTAS = 128  # for the mask; XLA finds the largest of their bounds
_MOST_VECTORS = 8  # of the mask, that a thread has at a time


def _weights_blocks(w: jax.Array, num_ctas: int) -> Blocks:
    """The rows of one projection in w (C, 4, H), of which a CTA has some columns."""
    c, _, h = w.shape
    rows = min(pl.cdiv(c * _THREADS, _WARPGROUPS * WARPGROUP), _MOST_ROWS)
    width = _THREADS * vector_length(h, w.dtype)
    config = Config(threads=_THREADS, block_n=width, rows=rows, warpgroups=_WARPGROUPS)
    return Blocks.of(config, jax.ShapeDtypeStruct((c, h), w.dtype), num_ctas)


def _mask_blocks(mask: jax.Array, num_ctas: int) -> Blocks:
    """The mask (M,) as a row that each CTA reads some parts of."""
    threads, vector = _WARPGROUPS * WARPGROUP, vector_length(mask.size, mask.dtype)
    vectors = min(pl.cdiv(mask.size, num_ctas * threads * vector), _MOST_VECTORS)
    config = Config(threads=threads, block_n=vectors * threads * vector, warpgroups=_WARPGROUPS)
    return Blocks.of(config, jax.ShapeDtypeStruct((num_ctas, mask.size), mask.dtype))


def _kernel(refs: Refs, blocks: Blocks, of_mask: Blocks | None) -> None:
    """Bounds some columns of one side, where none are left the last ones once more, and some of the mask."""
    cta = jax.lax.axis_index("cta")
    side, piece = jax.lax.rem(cta, 2), jnp.minimum(jax.lax.div(cta, 2), blocks.steps - 1)
    largest_factor = None
    if of_mask is not None:  # its first part is on its way while weights are added up
        first = _load_factors(refs.mask, of_mask, cta)
        largest_factor = functools.partial(_largest_factor, refs.mask, of_mask, first)

    def step(k: jax.Array | int, totals: list[jax.Array]) -> list[jax.Array]:
        squares, shifts, largest = totals
        i = jax.lax.axis_index("warpgroup") + k * blocks.groups
        row = blocks.index(i)
        w = jnp.abs(blocks.look_up(refs.w, i, piece, 4 * row + 2 * side).astype(jnp.float32))
        scale, shift = (blocks.spread(jnp.abs(blocks.load_numbers(ref, i))) for ref in (refs.scale, refs.shift))
        shifts += shift * w
        if refs.bias is not None:
            bias = jnp.abs(blocks.look_up(refs.bias, i, piece, 0 * row + 2 * side))
            shifts += jnp.where(blocks.spread(row) == 0, bias, 0.0)
        return [squares + (scale * w) * (scale * w), shifts, jnp.maximum(largest, w)]

    steps, totals = pl.cdiv(blocks.m, blocks.groups * blocks.shape[0]), [blocks.full(0.0)] * 3
    totals = step(0, totals) if steps == 1 else jax.lax.fori_loop(0, steps, step, totals)
    squares, shifts, largest = reduce_rows(blocks, refs, ("add", "add", "max"), *totals)
    bound = jnp.sqrt(blocks.m * squares) + shifts
    maxima = [jnp.where(bound < jnp.inf, bound, jnp.inf), largest]
    if largest_factor is not None:
        maxima.append(largest_factor())
    columns = columns_of(blocks)
    bound, largest, *factor = columns.reduce_all(refs, 0, "max", *maxima)
    of_sides = (jnp.where(side == s, x, 0.0) for x in (bound, largest) for s in range(2))
    for k, number in enumerate((*of_sides, *(factor or [jnp.float32(1.0)]))):
        columns.store_numbers(refs.o, k, cta, number)


def _load_factors(ref: Ref, blocks: Blocks, step: jax.Array) -> jax.Array:
    """A part of the mask; past the end the last one once more."""
    return blocks.load(ref, blocks.place(), blocks.column(jnp.minimum(step, blocks.steps - 1)))


def _largest_factor(ref: Ref, blocks: Blocks, first: jax.Array) -> jax.Array:
    """The largest factor that each thread comes by, in `first` or in the parts after it."""

    def sizes(x: jax.Array) -> jax.Array:
        size = jnp.abs(x.astype(jnp.float32))
        return jnp.where(size < jnp.inf, size, 1.0)  # a factor that is not finite spoils its own sums alone

    def step(k: jax.Array, most: jax.Array) -> jax.Array:
        return jnp.maximum(most, sizes(_load_factors(ref, blocks, blocks.place() + k * blocks.num_ctas)))

    steps, most = pl.cdiv(blocks.steps, blocks.num_ctas), sizes(first)
    return blocks.fold("max", most if steps == 1 else jax.lax.fori_loop(1, steps, step, most))


@shared_step
def bounds(
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    interpret: bool,
) -> jax.Array:
    """Bounds for a mask of any shape, w (C, 4, H) and bias (4, H); Triton's `trimul_bounds.bounds` says which.

    Args:
      mask: its factors, or None where they are 0 or 1.
      norm_scale: (C,), float32.
      norm_bias: (C,), float32.

    Returns:
      (1, 5), float32: what `scales` takes.
    """
    c, _, h = w.shape
    num_ctas = 2 * pl.cdiv(h, _THREADS * vector_length(h, w.dtype))
    if mask is not None:
        mask = mask.ravel()
        vectors = pl.cdiv(mask.size, _WARPGROUPS * WARPGROUP * vector_length(mask.size, mask.dtype))
        num_ctas = max(num_ctas, min(vectors, _MOST_CTAS))
    blocks = _weights_blocks(w, num_ctas)
    of_mask = None if mask is None else _mask_blocks(mask, num_ctas)
    (found,) = launch(
        functools.partial(_kernel, blocks=blocks, of_mask=of_mask),
        dict(mask=mask, scale=norm_scale, shift=norm_bias, w=w.reshape(4 * c, h), bias=bias),
        dict(o=jax.ShapeDtypeStruct((5, num_ctas), jnp.float32)),
        columns_of(blocks).scratch_types(1, interpret, arrays=3) | scratch_types(blocks, 3, interpret),
        name="trimul_bounds",
        num_ctas=num_ctas,
        num_warpgroups=_WARPGROUPS,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return jnp.max(found, axis=1)[None]  # Triton's kernels of the end read all that there is
