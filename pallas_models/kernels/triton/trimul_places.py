"""Blocks of positions that the kernels of the end of the triangle multiplicative update walk over."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.forms.trimul import Output
from pallas_models.kernels.triton.common import block_size, span


class Places(NamedTuple):
    """Positions of all items of a call, `block_m` at a time."""

    form: Output[Any]
    block_m: int
    width: int  # positions of y, of which the result has form.size

    @property
    def columns(self) -> int:
        """Blocks of positions of an item."""
        return pl.cdiv(self.width, self.block_m)

    def place(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The item and the first position of a block."""
        columns = jnp.int32(self.columns)
        return jax.lax.div(block, columns), jax.lax.rem(block, columns) * self.block_m

    def source(self, item: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The item of the result that an item of y is for, and which positions of a block are in it."""
        kept, rows = self.form.rows
        if kept == rows:
            return item, self.within(start, self.form.size)
        matrix, row = jax.lax.div(item, jnp.int32(rows)), jax.lax.rem(item, jnp.int32(rows))
        mask = (start + jnp.arange(self.block_m) < self.form.size) & (row < kept)
        return matrix * kept + jnp.minimum(row, kept - 1), mask

    def within(self, start: jax.Array, size: int) -> jax.Array | None:
        """Which positions of a block lie below `size`."""
        whole = size == self.width and size % self.block_m == 0
        return None if whole else start + jnp.arange(self.block_m) < size

    @staticmethod
    def channels(size: int) -> tuple[pl.Slice, jax.Array | None]:
        """All channels of an axis, and which of the block there are."""
        block = block_size(size, 16, 1024)
        return span(0, block), None if block == size else jnp.arange(block) < size

    def span(self, start: jax.Array) -> pl.Slice:
        """The positions of a block."""
        return span(start, self.block_m)

    def steps(self, items: int, programs: int) -> tuple[jax.Array, jax.Array]:
        """The first block of this program, and how many it has."""
        pid = pl.program_id(0)
        return pid, jax.lax.div(items * self.columns - pid + programs - 1, jnp.int32(programs))
