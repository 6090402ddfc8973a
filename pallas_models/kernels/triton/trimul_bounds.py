"""Bounds of left and right of the triangle multiplicative update, of which the scales are made."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.triton.common import (
    block_size,
    in_bounds,
    launch,
    load,
    span,
    store,
    tile_mask,
)

_PROGRAMS = 8  # for each side: XLA finds the largest of so few bounds without a kernel of its own
_MASK_PROGRAMS = 128  # for the mask, at most
_BLOCK_C, _BLOCK_MASK = 128, 16384


def _bounds_kernel(
    mask_ref: Ref | None,  # (M,)
    scale_ref: Ref,  # (C,)
    shift_ref: Ref,  # (C,)
    w_ref: Ref,  # (C, 4, H)
    b_ref: Ref | None,  # (4, H)
    o_ref: Ref,  # (parts, 5)
) -> None:
    """Some programs bound left, some right, some the mask, so that each waits for memory once."""
    c, h = w_ref.shape[0], w_ref.shape[2]
    pid = pl.program_id(0)

    @pl.when(pid < 2 * _PROGRAMS)
    def of_side() -> None:
        side, part = jax.lax.div(pid, jnp.int32(_PROGRAMS)), jax.lax.rem(pid, jnp.int32(_PROGRAMS))
        block_h = block_size(pl.cdiv(h, _PROGRAMS), 16, 1024)
        first = part * block_h
        columns, h_mask = span(first, block_h), first + jnp.arange(block_h) < h  # the last programs may have none
        squares = shifts = largest = jnp.zeros((_BLOCK_C, block_h), jnp.float32)
        for start in range(0, c, _BLOCK_C):
            rows, c_mask = span(start, _BLOCK_C), in_bounds(start, _BLOCK_C, c)
            w = jnp.abs(load(w_ref.at[rows, 2 * side, columns], tile_mask(c_mask, h_mask)).astype(jnp.float32))
            scaled, shifted = (jnp.abs(load(ref.at[rows], c_mask))[:, None] * w for ref in (scale_ref, shift_ref))
            squares += scaled * scaled
            shifts += shifted
            largest = jnp.maximum(largest, w)
        bound = jnp.sqrt(c * jnp.sum(squares, axis=0)) + jnp.sum(shifts, axis=0)
        if b_ref is not None:
            bound += jnp.abs(load(b_ref.at[2 * side, columns], h_mask))
        bound = jnp.where(bound < jnp.inf, bound, jnp.inf)  # no NaN, which Triton's maximum would drop
        store(o_ref.at[part, side], jnp.max(bound))
        store(o_ref.at[part, 2 + side], jnp.max(largest))

    @pl.when(pid >= 2 * _PROGRAMS)
    def of_mask() -> None:
        part = pid - 2 * _PROGRAMS
        factor = jnp.float32(1.0)
        if mask_ref is not None:
            size = mask_ref.shape[0]
            steps = pl.cdiv(size, _BLOCK_MASK * o_ref.shape[0])

            def step(i: jax.Array, carry: jax.Array) -> jax.Array:
                start = (part * steps + i) * _BLOCK_MASK
                factors = load(mask_ref.at[span(start, _BLOCK_MASK)], start + jnp.arange(_BLOCK_MASK) < size)
                factors = jnp.abs(factors.astype(jnp.float32))
                # A factor that is not finite spoils its own sums alone.
                return jnp.maximum(carry, jnp.where(factors < jnp.inf, factors, 1.0))

            zeros = jnp.zeros(_BLOCK_MASK, jnp.float32)
            factor = jnp.max(jax.lax.fori_loop(0, jnp.int32(steps), step, zeros))
        store(o_ref.at[part, jnp.int32(4)], factor)
        for i in range(4):
            store(o_ref.at[part, jnp.int32(i)], jnp.float32(0.0), part >= _PROGRAMS)  # parts without a side


def bounds(
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    interpret: bool,
) -> jax.Array:
    """Bounds for a mask of any shape, w (C, 4, H) and bias (4, H).

    The squares of a normalised row of C channels add up to C at most. So a projection is by Cauchy and Schwarz at
    most sqrt(C) |norm_scale w| plus the sum of |norm_bias w| and |bias|.

    Args:
      mask: its factors, or None where they are 0 or 1.
      norm_scale: (C,), float32.
      norm_bias: (C,), float32.

    Returns:
      (parts, 5), float32, whose largest elements by column are what `scales` takes: bounds of left and of right
      without the mask, the largest |weight| of each, the largest factor of the mask.
    """
    parts = _PROGRAMS
    if mask is not None:
        mask = mask.reshape(-1)
        parts = block_size(pl.cdiv(mask.size, _BLOCK_MASK), _PROGRAMS, _MASK_PROGRAMS)
    return launch(
        _bounds_kernel,
        out_shape=jax.ShapeDtypeStruct((parts, 5), jnp.float32),
        grid=(2 * _PROGRAMS + parts,),
        num_warps=16,
        num_stages=1,
        interpret=interpret,
        name="trimul_bounds",
    )(mask, norm_scale, norm_bias, w, bias)
