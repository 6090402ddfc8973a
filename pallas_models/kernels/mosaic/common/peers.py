"""Stores of a kernel to the memory of the other GPUs of a mesh, without a collective after it.

JAX hands kernels the addresses that their outputs have on all GPUs, and starts none before all GPUs are there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, load

ROWS = 64  # that are stored at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """The GPUs of a mesh, this one among them, by their index along its only axis.

    Attributes:
      axis: its name.
      count: how many they are.
    """

    axis: str
    count: int

    @property
    def index(self) -> jax.Array:
        """The index of this GPU."""
        return jax.lax.axis_index(self.axis)

    @property
    def scratch_types(self) -> dict[str, Any]:
        """What `finish` needs."""
        return dict(arrived=plgpu.SemaphoreType.REGULAR)

    def turn(self, row: jax.Array, block_m: int) -> tuple[jax.Array, jax.Array]:
        """The GPU that takes a row where each takes a block of rows in turn, and which of its rows that is.

        Each GPU begins with the rows of the GPU after it, so that all links carry alike at all times.
        """
        block = jax.lax.div(row, block_m)
        there = jax.lax.div(block, self.count) * block_m + jax.lax.rem(row, block_m)
        return jax.lax.rem(block + self.index + 1, self.count), pl.multiple_of(there, ROWS)

    def on(self, target: Ref, index: jax.Array) -> Ref:
        """An output of the kernel on the GPU of an index.

        Where a bulk copy to it is no run of memory, the host describes it, with the address that the output had
        when XLA recorded the kernel into a CUDA graph. In a later call the other GPU may have another address for
        it. `store` and bulk copies of runs ask the address when they run.
        """
        return plgpu.remote_ref(target, index)

    def store(self, slot: Ref, target: Ref, index: jax.Array, at: Callable[[Ref], Ref]) -> None:
        """Stores `tiled` shared memory, all of which there is room for, to `at(target)` on the GPU of an index."""
        rows = plgpu.Layout.SMEM_GMEM_COPY(slot.shape, slot.dtype, swizzle=ROW_BYTES)
        at(self.on(target, index))[...] = load(slot, rows)

    def finish(self, refs: Refs, *, storing: int, waits: bool | jax.Array) -> None:
        """Has the warpgroup of each CTA that `waits` wait for all stores of the same CTA of each GPU.

        `storing` warpgroups of each CTA call it, after their stores. A semaphore in scratch memory belongs to a
        CTA, on every GPU: with all CTAs waiting so, nothing is on its way when the kernel ends.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        for i in range(self.count):
            pl.semaphore_signal(refs.arrived, 1, device_id=i)

        @pl.when(waits)
        def _() -> None:
            pl.semaphore_wait(refs.arrived, self.count * storing, decrement=False)
