"""The channels of 64 positions in the registers of a warpgroup, some at a time: norms, products and stores."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import layout_cast, load
from pallas_models.kernels.mosaic.common.products import multiply, with_sums
from pallas_models.kernels.mosaic.common.row_copies import copy_back

ROWS = 64  # positions that are normalised and multiplied at a time
PIECE = 64  # channels that are multiplied at a time


def positions(tile: jax.Array) -> pl.Slice:
    """The positions of a tile, where all lie in one row."""
    return pl.Slice(pl.multiple_of(tile * ROWS, ROWS), ROWS)


def pieces(width: int) -> list[pl.Slice]:
    """All channels, some at a time."""
    return [pl.Slice(i, PIECE) for i in range(0, width, PIECE)]


def in_pieces(x: jax.Array) -> list[jax.Array]:
    """An array in registers, some of its channels at a time."""
    return [x[:, i : i + PIECE] for i in range(0, x.shape[1], PIECE)]


def along_rows(v: jax.Array, columns: int) -> jax.Array:
    """A value for each of `ROWS` positions as that many equal columns."""
    return jax.lax.broadcast_in_dim(v, (ROWS, columns), [0])


def mean(parts: list[jax.Array], c: int) -> jax.Array:
    """Mean over the c columns that `parts` have side by side."""
    return jnp.sum(functools.reduce(operator.add, parts), axis=1) * (1.0 / c)


def same_rows(vector: Ref) -> jax.Array:
    """A vector in device or shared memory as every row of a tile."""
    loaded = load(vector, plgpu.Layout.WGMMA.reduce(0))
    return jax.lax.broadcast_in_dim(loaded, (ROWS, loaded.shape[0]), [1])


def loaded(tiles: Ref) -> list[jax.Array]:
    """Positions in shared memory, (pieces, ROWS, PIECE), in float32."""
    parts = [tiles.at[i] for i in range(tiles.shape[0])]
    return [load(part, plgpu.Layout.WGMMA).astype(jnp.float32) for part in parts]


def normed(parts: list[jax.Array], epsilon: Any, scale: Ref, shift: Ref) -> list[jax.Array]:
    """The layer norm of all positions, with scale and shift in device memory."""
    width = len(parts) * PIECE
    center = along_rows(mean(parts, width), PIECE)
    ds = [part - center for part in parts]
    inverse = along_rows(jax.lax.rsqrt(mean([d * d for d in ds], width) + epsilon), PIECE)
    return [
        d * inverse * same_rows(scale.at[piece]) + same_rows(shift.at[piece])
        for d, piece in zip(ds, pieces(width), strict=True)
    ]


def product(zs: list[jax.Array], w: Ref, *, transpose_w: bool = False) -> jax.Array:
    """The product of all channels and the weights, in shared memory, in float32."""
    zs, (channels, columns) = [z.astype(w.dtype) for z in zs], w.shape[::-1] if transpose_w else w.shape

    def compute(sums: Ref) -> jax.Array:
        for z, piece in zip(zs, pieces(channels), strict=True):
            multiply(sums, z, w.at[:, piece] if transpose_w else w.at[piece], transpose_b=transpose_w)
        plgpu.wgmma_wait(0)
        return sums[...]

    return layout_cast(with_sums(compute, (ROWS, columns)), plgpu.Layout.WGMMA)


def store(parts: list[jax.Array], staged: Ref, out: Ref, first: Sequence[Any]) -> None:
    """Stores positions in device memory, (items, positions, channels), by way of shared memory.

    Args:
      staged: (parts, ROWS, columns) of shared memory, which what was stored before may not have left.
      first: the index in `out` of the first position.
    """
    count, _, width = staged.shape
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i in range(count):
        part, column = divmod(i * width, PIECE)
        staged[i] = parts[part][:, column : column + width].astype(staged.dtype)
    plgpu.commit_smem()
    for i in range(count):
        copy_back(staged.at[i], out, (*first, i * width))
