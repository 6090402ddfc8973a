"""Bounds of left and right of the triangle multiplicative update, and the scales that keep them in range."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.triton.common import (
    block_size,
    compiler_params,
    in_bounds,
    load,
    span,
    store,
    tile_mask,
)

LOG2_LARGEST = 14  # of left, right and sums: half of what float16 holds, for what rounding adds
_PROGRAMS = 8  # for each side; where so few are read, their largest takes no kernel of XLA's of its own
_MASK_PROGRAMS = 128  # at most
_BLOCK_C, _BLOCK_MASK = 128, 16384


def scales(largest: Sequence[jax.Array], dtype: DTypeLike) -> list[jax.Array]:
    """Powers of two for left and right, times which they are at most `2**LOG2_LARGEST`, whatever x is.

    Weights, of `dtype`, take these scales, too, which must not make them grow beyond their own range. Nor does the
    mask count as less than 1, nor for so much that float16 rounds it. Sums of such masks may be infinite. NaN
    where even the bound is beyond float32.

    Args:
      largest: what the columns of `bounds` are at most, each a number.
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


def _bounds_kernel(
    mask_ref: Ref | None,  # (M,)
    scale_ref: Ref,  # (C,)
    shift_ref: Ref,  # (C,)
    w_ref: Ref,  # (C, 4, H)
    b_ref: Ref | None,  # (4, H)
    o_ref: Ref,  # (parts, 5)
) -> None:
    """Programs of left, of right and of the mask: each waits for memory once."""
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
                # What is not finite is so in its own sums alone.
                return jnp.maximum(carry, jnp.where(factors < jnp.inf, factors, 1.0))

            zeros = jnp.zeros(_BLOCK_MASK, jnp.float32)
            factor = jnp.max(jax.lax.fori_loop(0, jnp.int32(steps), step, zeros))
        store(o_ref.at[part, jnp.int32(4)], factor)
        for i in range(4):
            store(o_ref.at[part, jnp.int32(i)], jnp.float32(0.0), part >= _PROGRAMS)  # which no side has


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

    The squares of a normalised row of C channels add up to C at most. So what is projected is by Cauchy and
    Schwarz at most sqrt(C) |norm_scale w| plus the sum of |norm_bias w| and |bias|.

    Returns:
      (parts, 5), float32: of left, of right, without the mask; the largest |weight| of each; the largest factor of
      the mask.
    """
    parts = _PROGRAMS
    if mask is not None:
        mask = mask.reshape(-1)
        parts = block_size(pl.cdiv(mask.size, _BLOCK_MASK), _PROGRAMS, _MASK_PROGRAMS)
    return pl.pallas_call(
        _bounds_kernel,
        out_shape=jax.ShapeDtypeStruct((parts, 5), jnp.float32),
        grid=(2 * _PROGRAMS + parts,),
        compiler_params=compiler_params(num_warps=16, num_stages=1),
        interpret=interpret,
        name="trimul_bounds",
    )(mask, norm_scale, norm_bias, w, bias)
