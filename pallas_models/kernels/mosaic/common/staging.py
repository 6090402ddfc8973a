"""How outputs leave registers: block by block through slots in shared memory, from which they are copied."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, tiled
from pallas_models.kernels.mosaic.common.tile_walk import Tile

_ROWS = 64  # that a warpgroup multiplies at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of a tile, of the size in which an output leaves: `of` selects it from the sums, `at` from memory."""

    row: int
    column: int
    width: int

    def of(self, sums: jax.Array) -> jax.Array:
        """The block of (tile.num_rows, tile.num_columns) in registers."""
        return sums[self.row : self.row + _ROWS, self.columns]

    @property
    def columns(self) -> slice:
        """Where it lies in the columns of the tile."""
        return slice(self.column, self.column + self.width)

    def at(self, ref: Ref, tile: Tile) -> Ref:
        """The block of (m, n) in device memory."""
        return ref.at[pl.ds(tile.row + self.row, _ROWS), pl.ds(tile.column + self.column, self.width)]


@dataclasses.dataclass(frozen=True, slots=True)
class Staging:
    """Shared memory through which an output leaves.

    Attributes:
      blocks: all blocks of the part of a tile that a warpgroup has.
      num_slots: how many of them are there at a time, for each warpgroup.
      num_warpgroups: how many warpgroups have slots.
      dtype: of the output.
    """

    blocks: tuple[Block, ...]
    num_slots: int
    num_warpgroups: int
    dtype: jnp.dtype

    @classmethod
    def of(
        cls, config: Config, num_columns: int, dtype: DTypeLike, *, whole: bool = False, joined: bool = True
    ) -> Self:
        """The staging for `num_columns` columns of the rows that a warpgroup has of a tile.

        Blocks have 64 rows of 128 bytes; where columns are no multiple of that, the last two overlap. Where there
        is a slot for each of them, blocks beside one another are one: fewer copies, and much less code.

        Args:
          whole: whether there is a slot for each block, as for a residual that waits there.
          joined: whether blocks may be made one; not where there is so much to compute of each element that
            registers are short.
        """
        dtype = jnp.dtype(dtype)
        width = ROW_BYTES // dtype.itemsize
        most = config.rows // _ROWS * pl.cdiv(num_columns, width)
        num_slots = most if whole else min(most, config.num_slots)
        if joined and num_slots * width * _ROWS == config.rows * num_columns:
            width = num_columns
        blocks = [
            Block(row, min(column, num_columns - width), width)
            for column in range(0, num_columns, width)
            for row in range(0, config.rows, _ROWS)
        ]
        return cls(tuple(blocks), min(num_slots, len(blocks)), config.num_consumers, dtype)

    @property
    def scratch_type(self) -> Any:
        """The slots, as a kernel asks for them."""
        return tiled((self.num_warpgroups, self.num_slots, _ROWS, self.blocks[0].width), self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory."""
        slot = _ROWS * self.blocks[0].width * self.dtype.itemsize
        return self.num_warpgroups * self.num_slots * slot


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What `store` stores: `value(block, slot)` in `ref`, (m, n) in device memory, by way of `slots`.

    Attributes:
      slots: the memory of a `Staging`.
      copy: `copy(slot, ref, block, tile)` copies a slot to a block of a tile; `block.at(ref, tile)` when None.
    """

    slots: Ref
    warpgroup: jax.Array
    ref: Ref
    value: Callable[[Block, Ref], jax.Array]
    copy: Callable[[Ref, Ref, Block, Tile], None] | None = None

    def slot(self, i: int) -> Ref:
        """The slot of the i-th block."""
        return self.slots.at[self.warpgroup, i % self.slots.shape[1]]

    def leave(self, i: int, block: Block, tile: Tile) -> None:
        """Copies the slot of the i-th block of a tile."""
        if self.copy is None:
            plgpu.copy_smem_to_gmem(self.slot(i), block.at(self.ref, tile))
        else:
            self.copy(self.slot(i), self.ref, block, tile)


def store(tile: Tile, staging: Staging, *outputs: Output, wait: bool) -> None:
    """Stores a tile of outputs block by block, the same of all together, and waits for none of them to arrive.

    Args:
      staging: of all the outputs, which have the same blocks.
      wait: whether slots may still be on their way from the last tile; not if that was waited for before.
    """
    num_slots = min(output.slots.shape[1] for output in outputs)
    for i, block in enumerate(staging.blocks):
        if wait:
            plgpu.wait_smem_to_gmem(len(outputs) * (num_slots - 1), wait_read_only=True)
        for output in outputs:
            slot = output.slot(i)
            slot[...] = output.value(block, slot).astype(output.ref.dtype)
        plgpu.commit_smem()
        for output in outputs:
            output.leave(i, block, tile)
