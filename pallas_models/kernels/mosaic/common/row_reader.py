"""Rows of several arrays as the steps of a kernel read them: from memory, or as threads hold them."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.rows import Blocks


class Reader:
    """Blocks of some arrays of rows, None for those that a call does not have, in float32.

    Rows that are held are read from memory once, all of them before anything else.
    """

    def __init__(self, blocks: Blocks, i: jax.Array, *refs: Ref | None) -> None:
        self.blocks, self.i = blocks, i
        self.refs = [ref for ref in refs if ref is not None]
        self.held = [self._load(step) for step in range(blocks.steps)] if blocks.are_held else []

    def _load(self, step: jax.Array | int) -> list[jax.Array]:
        j = self.blocks.column(step)
        return [self.blocks.load(ref, self.i, j) for ref in self.refs]

    def read(self, step: Any) -> list[jax.Array]:
        """The block of a step of each array."""
        found = self.held[step] if self.held else self._load(step)
        if len(self.held) > 1:  # float32 of all blocks would not fit
            found = [self.blocks.again(x) for x in found]
        return [x.astype(jnp.float32) for x in found]
