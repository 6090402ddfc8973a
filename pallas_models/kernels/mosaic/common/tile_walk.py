"""The tiles of an output, and the order in which CTAs that stay on their multiprocessor take them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.tiles import tile_order


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the output, or the part of it that a warpgroup has: which product of the batch, rows and columns.

    Rows and columns may reach past the end. There copies to shared memory read zeros and copies from it write
    nothing.
    """

    batch: jax.Array
    row: jax.Array
    column: jax.Array
    num_rows: int
    num_columns: int

    @property
    def rows(self) -> pl.Slice:
        return pl.Slice(self.row, self.num_rows)

    @property
    def columns(self) -> pl.Slice:
        return pl.Slice(self.column, self.num_columns)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileWalk:
    """The tiles of `batch` outputs (m, n) that this CTA has, one after another.

    Attributes:
      k: the length of the contraction.
      first_k: the length of the contraction of the first output where it is longer than `k`. Each tile of the
        first output then has a CTA for itself, and the CTAs that are left share the tiles of the other outputs.
      group_m: how many row blocks are walked together before the next column block.
    """

    batch: int
    m: int
    n: int
    k: int
    first_k: int | None
    block_m: int
    block_n: int
    block_k: int
    group_m: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles in a column and in a row of an output."""
        return pl.cdiv(self.m, self.block_m), pl.cdiv(self.n, self.block_n)

    @property
    def num_tiles(self) -> int:
        """Tiles of all outputs."""
        tiles_m, tiles_n = self.tiles
        return self.batch * tiles_m * tiles_n

    @property
    def num_steps(self) -> Any:
        """Steps of the contraction of each tile of this CTA."""
        steps = pl.cdiv(self.k, self.block_k)
        if self.first_k is None:
            return steps
        is_first = jax.lax.axis_index("cta") < self.num_tiles // self.batch
        return jnp.where(is_first, pl.cdiv(self.first_k, self.block_k), steps)

    @property
    def stride(self) -> Any:
        """The distance from a tile of a CTA to its next one."""
        ctas = jax.lax.axis_size("cta")
        return ctas if self.first_k is None else ctas - self.num_tiles // self.batch

    @property
    def count(self) -> jax.Array:
        """How many tiles this CTA has."""
        cta = jax.lax.axis_index("cta")
        count = jax.lax.div(self.num_tiles + self.stride - 1 - cta, self.stride)
        return count if self.first_k is None else jnp.where(cta < self.num_tiles // self.batch, 1, count)

    def tile(self, i: jax.Array) -> Tile:
        """The i-th tile of this CTA."""
        i = jax.lax.axis_index("cta") + i * self.stride
        tiles_m, tiles_n = self.tiles
        batch, i = jax.lax.div(i, tiles_m * tiles_n), jax.lax.rem(i, tiles_m * tiles_n)
        row, column = tile_order(i, tiles_m, tiles_n, self.group_m)
        return Tile(batch, row * self.block_m, column * self.block_n, self.block_m, self.block_n)
