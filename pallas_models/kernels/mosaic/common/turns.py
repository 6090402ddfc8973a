"""How a CTA goes through tiles: one warpgroup copies them ahead, two others take turns with them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

WORKERS = 2  # with three each has too few registers: the update's end took 255 us, not 229, at N = 1024 on an H200
_MOST_SLOTS = 6
_OTHERS = 2048  # bytes of shared memory that barriers and alignment take
REGISTERS = 40, 232  # of a thread of the producer, and of the workers

# Finishes a tile that has arrived in a slot, and calls the third argument once the slot has been read.
Step = Callable[[jax.Array, jax.Array, Callable[[], None]], None]


def num_slots(kept: dict[str, Buffer], tile: dict[str, Buffer], target: Target, *, most: int = _MOST_SLOTS) -> int:
    """For how many tiles a CTA has room in shared memory beside what it keeps."""
    return min((available(target) - _OTHERS - num_bytes(kept.values())) // num_bytes(tile.values()), most)


def launch_in_turns(
    body: Callable[["Turns", Refs], None],
    operands: Mapping[str, jax.Array | None],
    out_type: Mapping[str, jax.ShapeDtypeStruct | None],
    kept: dict[str, Buffer],
    tile: dict[str, Buffer],
    *,
    tiles: int,
    copies: int,
    weights: int,
    name: str,
    target: Target,
    interpret: bool,
    **compiler_params: Any,
) -> list[jax.Array]:
    """`launch` of a kernel that goes through its tiles by `Turns`, which `body` is given.

    Args:
      kept: shared memory that a CTA keeps.
      tile: shared memory of a tile, of which there are as many as there is room for.
      tiles: how many the kernel has.
      copies: that arrive for a tile.
      weights: copies that arrive before all tiles.
    """
    slots = num_slots(kept, tile, target)
    turns = Turns(tiles, min(num_cores(target, interpret), tiles), slots)
    buffers = kept | {key: dataclasses.replace(b, shape=(slots, *b.shape)) for key, b in tile.items()}
    return launch(
        functools.partial(body, turns),
        operands,
        out_type,
        dict(
            **{key: buffer.scratch_type for key, buffer in buffers.items()},
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=WORKERS * slots),
            free=plgpu.Barrier(num_barriers=slots),
            weights_full=plgpu.Barrier(num_arrivals=weights),
        ),
        name=name,
        num_ctas=turns.num_ctas,
        num_warpgroups=WORKERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        **compiler_params,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """The tiles of a kernel, of which a CTA has every `num_ctas`-th.

    Attributes:
      tiles: how many there are.
      num_ctas: CTAs.
      slots: shared memory for so many tiles.
    """

    tiles: int
    num_ctas: int
    slots: int

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

        producer_registers, worker_registers = REGISTERS
        specialize(
            Role(range(WORKERS, WORKERS + 1), producer_registers, produce),
            Role(range(WORKERS), worker_registers, work),
            warpgroup=warpgroup,
        )
