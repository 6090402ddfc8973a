"""How the kernels of `layer_norm_gated_mlp` go through positions and weights.

CTAs stay on their multiprocessor. Two warpgroups of each have 64 positions apiece and go through all hidden
channels, 64 at a time. The third copies the weights of these channels, which both read, and the next positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.forms.layer_norm_gated_mlp import Form
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import PIECE, ROWS, pieces, positions
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer
from pallas_models.kernels.mosaic.common.turns import REGISTERS, WORKERS, num_slots
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

_WIDTHS = 64, 128  # channels
_MOST_STAGES = 4  # for weights


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """What is known of a launch beforehand.

    Attributes:
      form: the call.
      arrays: the names of the arrays of positions, (1, M, C) each, whose tiles lie in shared memory of their name.
      kept: other shared memory of a CTA.
      slots: for positions. Of two one is filled while the other is read; of one as soon as it has been left.
      stages: for weights.
      num_ctas: CTAs.
    """

    form: Form[Any]
    arrays: tuple[str, ...]
    kept: dict[str, Buffer]
    slots: int
    stages: int
    num_ctas: int

    @classmethod
    def of(
        cls,
        form: Form[Any],
        arrays: tuple[str, ...],
        kept: dict[str, Buffer],
        slots: int,
        target: Target,
        *,
        num_cores: int,
    ) -> Self:
        """The walk with as many stages as there is room for, up to 4, in no more than `num_cores` CTAs."""
        walk = cls(form, arrays, kept, slots, 0, 0)
        stages = num_slots(kept | walk.position_buffers, walk.weight_buffers, target, most=_MOST_STAGES)
        return dataclasses.replace(walk, stages=stages, num_ctas=min(num_cores, pl.cdiv(walk.tiles, WORKERS)))

    @property
    def tiles(self) -> int:
        """Of positions; a CTA has two of them at a time."""
        return pl.cdiv(self.form.sizes[0], ROWS)

    @property
    def chunks(self) -> int:
        """Pieces of hidden channels."""
        return self.form.sizes[2] // PIECE

    @property
    def position_buffers(self) -> dict[str, Buffer]:
        """The shared memory of all positions that a CTA has at a time."""
        c, dtype = self.form.x.shape[1], self.form.x.dtype
        shape = self.slots, WORKERS, c // PIECE, ROWS, PIECE
        return {f"{name}_smem": Buffer(shape, dtype, ROW_BYTES) for name in self.arrays}

    @property
    def weight_buffers(self) -> dict[str, Buffer]:
        """The shared memory of the weights of some hidden channels."""
        c, dtype = self.form.x.shape[1], self.form.w_down.dtype
        gate_up_smem, down_smem = Buffer((2, c, PIECE), dtype, ROW_BYTES), Buffer((PIECE, c), dtype, ROW_BYTES)
        return dict(gate_up_smem=gate_up_smem, down_smem=down_smem)

    def unsupported(self) -> str | None:
        """Why kernels that walk so do not serve a call; None if they do."""
        _, c, h = self.form.sizes
        if self.form.w_down.dtype not in (jnp.float16, jnp.bfloat16):
            return f"takes weights in float16 and bfloat16, not {self.form.w_down.dtype}"
        if c not in _WIDTHS or h % PIECE:
            return f"takes 64 or 128 channels and hidden channels in multiples of {PIECE}, not {c} and {h}"
        if self.stages < 2:
            return f"does not fit {c} channels of {self.form.x.dtype} into shared memory"
        return None

    def launch(
        self,
        work: Callable[["Steps", jax.Array], None],
        arrays: tuple[jax.Array, ...],
        out_type: dict[str, jax.ShapeDtypeStruct | None],
        *,
        name: str,
        interpret: bool,
    ) -> list[jax.Array]:
        """Runs `work(steps, own)` in the two warpgroups that compute, whose numbers `own` are."""
        form, c = self.form, self.form.x.shape[1]
        if interpret:
            check_interpreted_sizes(positions=(form.sizes[0], ROWS))
        weights = {
            key: dataclasses.replace(b, shape=(self.stages, *b.shape)) for key, b in self.weight_buffers.items()
        }
        buffers = self.kept | self.position_buffers | weights
        return launch(
            lambda refs: Steps.of(self.abstract(), refs).run(work),
            dict(zip(self.arrays, (array[None] for array in arrays), strict=True))
            | dict(scale=form.scale, offset=form.offset, w_gate_up=form.w_gate_up, w_down=form.w_down),
            out_type,
            dict(
                **{key: buffer.scratch_type for key, buffer in buffers.items()},
                full=plgpu.Barrier(num_arrivals=len(arrays) * WORKERS * (c // PIECE), num_barriers=self.slots),
                free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=self.slots),
                weights_full=plgpu.Barrier(num_arrivals=3, num_barriers=self.stages),
                weights_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=self.stages),
            ),
            name=name,
            num_ctas=self.num_ctas,
            num_warpgroups=WORKERS + 1,
            interpret=interpret,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
        )

    def abstract(self) -> Self:
        """The walk without arrays."""
        return dataclasses.replace(self, form=self.form.abstract())


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The steps of this CTA, each with a tile of positions for either warpgroup.

    Attributes:
      tiles: the ring of positions.
      weights: the ring of weights.
      count: how many steps there are.
    """

    walk: Walk
    refs: Refs
    cta: jax.Array
    tiles: Ring
    weights: Ring
    count: jax.Array

    @classmethod
    def of(cls, walk: Walk, refs: Refs) -> Self:
        """The steps of the CTA that runs this."""
        cta, num_ctas = jax.lax.axis_index("cta"), walk.num_ctas
        return cls(
            walk,
            refs,
            cta,
            Ring(refs.full, refs.free, walk.slots),
            Ring(refs.weights_full, refs.weights_free, walk.stages),
            jax.lax.div(pl.cdiv(walk.tiles, WORKERS) - cta + num_ctas - 1, num_ctas),
        )

    def run(self, work: Callable[["Steps", jax.Array], None]) -> None:
        """What a warpgroup does."""
        producer_registers, worker_registers = REGISTERS
        specialize(
            Role(range(WORKERS, WORKERS + 1), producer_registers, lambda _: self.produce()),
            Role(range(WORKERS), worker_registers, lambda own: work(self, own)),
        )

    def tile(self, step: jax.Array, own: jax.Array | int) -> jax.Array:
        """The tile of a warpgroup; past the end if tiles are odd in number."""
        return (self.cta + step * self.walk.num_ctas) * WORKERS + own

    def rows(self, step: jax.Array, own: jax.Array | int) -> pl.Slice:
        """The positions of a warpgroup. If tiles are odd in number both have the last, as both get weights."""
        return positions(jnp.minimum(self.tile(step, own), self.walk.tiles - 1))

    def stage(self, step: jax.Array, chunk: jax.Array) -> jax.Array:
        """The stage of the weights of some hidden channels, once they have arrived."""
        stage = jax.lax.rem(step * self.walk.chunks + chunk, self.walk.stages)
        self.weights.wait(stage)
        return stage

    def produce(self) -> None:
        """Copies positions, and for each step all weights."""
        refs, walk = self.refs, self.walk

        def copy_positions(step: jax.Array) -> None:
            slot = self.tiles.acquire(step)
            for own in range(WORKERS):
                for name in walk.arrays:
                    ref, smem = getattr(refs, name), getattr(refs, f"{name}_smem")
                    for i, piece in enumerate(pieces(ref.shape[2])):
                        rows, to, full = self.rows(step, own), smem.at[slot, own, i], self.tiles.full
                        copy_rows(ref, jnp.int32(0), rows, piece, to, full, slot, row_bytes=ROW_BYTES)

        copy_positions(jnp.int32(0))

        @pl.loop(0, self.count)
        def _(step: jax.Array) -> None:
            @pl.loop(0, walk.chunks)
            def _(chunk: jax.Array) -> None:
                slot = self.weights.acquire(step * walk.chunks + chunk)
                full, hidden = self.weights.full_of(slot), pl.Slice(pl.multiple_of(chunk * PIECE, PIECE), PIECE)
                for i in range(2):
                    plgpu.copy_gmem_to_smem(refs.w_gate_up.at[:, i, hidden], refs.gate_up_smem.at[slot, i], full)
                plgpu.copy_gmem_to_smem(refs.w_down.at[hidden], refs.down_smem.at[slot], full)
                if walk.slots == 1:  # the weights that a step begins with come while the step before it ends
                    begun = chunk == min(walk.stages, walk.chunks) - 1
                    pl.when(begun & (step > 0))(lambda: copy_positions(step))

            # The workers are past the begin of this step, where they leave the slot that this waits for.
            if walk.slots > 1:
                pl.when(step + 1 < self.count)(lambda: copy_positions(step + 1))

        self.weights.drain(self.count * walk.chunks)
        self.tiles.drain(self.count)
