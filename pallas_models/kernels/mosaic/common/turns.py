"""How a CTA goes through tiles: one warpgroup copies them ahead, two others take turns with them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

WORKERS = 2  # with three each has too few registers: an end of the triangle update took 255 us and not 229
WARPGROUPS = WORKERS + 1
_MOST_SLOTS = 6
_OTHERS = 2048  # bytes of shared memory that barriers and alignment take
_REGISTERS = 40, 232  # of a thread of the producer, and of the workers

# Finishes a tile that has arrived in a slot, and calls the third argument once the slot has been read.
Step = Callable[[jax.Array, jax.Array, Callable[[], None]], None]


def buffers_of(kept: dict[str, Buffer], tile: dict[str, Buffer], target: Target) -> tuple[dict[str, Buffer], int]:
    """The shared memory of a CTA, what it keeps and slots for tiles; and how many slots there is room for."""
    slots = min((available(target) - _OTHERS - num_bytes(kept.values())) // num_bytes(tile.values()), _MOST_SLOTS)
    return kept | {name: dataclasses.replace(b, shape=(slots, *b.shape)) for name, b in tile.items()}, slots


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """The tiles of a kernel, of which a CTA has every `num_ctas`-th.

    Attributes:
      tiles: how many there are.
      num_ctas: CTAs.
      slots: shared memory for so many tiles.
      copies: that arrive for a tile.
      weights: copies that arrive before all tiles.
    """

    tiles: int
    num_ctas: int
    slots: int
    copies: int
    weights: int

    @property
    def scratch_types(self) -> dict[str, Any]:
        """The barriers of a CTA."""
        return dict(
            full=plgpu.Barrier(num_arrivals=self.copies, num_barriers=WORKERS * self.slots),
            free=plgpu.Barrier(num_barriers=self.slots),
            weights_full=plgpu.Barrier(num_arrivals=self.weights),
        )

    def take(
        self,
        refs: Refs,
        *,
        copy_weights: Callable[[], None],
        copy: Callable[[jax.Array, jax.Array, jax.Array], None],
        worker: Callable[[jax.Array], Step],
    ) -> None:
        """What a warpgroup does.

        Args:
          copy_weights: starts the copies that arrive at `refs.weights_full`.
          copy: `copy(tile, slot, i)` starts the copies of a tile, which arrive at the i-th barrier of `refs.full`.
          worker: `worker(own)` gives the steps of a warpgroup, `own` being 0 or 1, and may compute before.
        """
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(self.tiles - cta + self.num_ctas - 1, self.num_ctas)

        def tile(step: jax.Array) -> jax.Array:
            return cta + step * self.num_ctas

        def ring(worker: jax.Array) -> Ring:
            return Ring(refs.full, refs.free, self.slots, worker * self.slots)

        def produce(warpgroup: jax.Array) -> None:
            del warpgroup
            copy_weights()

            @pl.loop(0, steps)
            def _(step: jax.Array) -> None:
                own = ring(jax.lax.rem(step, WORKERS))
                slot = own.acquire(step)
                copy(tile(step), slot, own.first_full + slot)

            ring(jnp.int32(0)).drain(steps)

        def work(own: jax.Array) -> None:
            finish = worker(own)
            plgpu.barrier_wait(refs.weights_full)

            @pl.loop(0, jax.lax.div(steps - own + WORKERS - 1, WORKERS))
            def _(i: jax.Array) -> None:
                step, tiles = i * WORKERS + own, ring(own)
                slot = jax.lax.rem(step, self.slots)

                def release() -> None:
                    plgpu.commit_smem()  # all have read
                    tiles.release(slot)

                tiles.wait(slot)
                finish(tile(step), slot, release)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        producer_registers, worker_registers = _REGISTERS
        specialize(
            Role(range(WORKERS, WARPGROUPS), producer_registers, produce),
            Role(range(WORKERS), worker_registers, work),
            warpgroup=warpgroup,
        )
