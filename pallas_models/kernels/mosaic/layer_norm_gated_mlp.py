"""A gated MLP of a layer norm, for Hopper GPUs and 64 or 128 channels.

What is hidden never leaves the registers. CTAs stay on their multiprocessor, and two warpgroups of each have 64
positions apiece: a norm in registers, then 64 hidden channels at a time a gate, its product and their part of the
result. The third warpgroup copies the weights of these channels, which both read, and the next positions ahead.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.layer_norm_gated_mlp import Form
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import (
    PIECE,
    ROWS,
    in_pieces,
    loaded,
    normed,
    pieces,
    positions,
)
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_back, copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer
from pallas_models.kernels.mosaic.common.turns import REGISTERS, WORKERS, num_slots
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

_WIDTHS = 64, 128
_Rows = Callable[[jax.Array, jax.Array | int], pl.Slice]
_SLOTS = 2  # for positions: the next ones are copied while results leave the place of those before
_MOST_STAGES = 4  # for weights


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `layer_norm_gated_mlp` does not serve a call; None if it does."""
    _, c, h = form.sizes
    if form.w_down.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {form.w_down.dtype}"
    if c not in _WIDTHS or h % PIECE:
        return f"takes 64 or 128 channels and hidden channels in multiples of {PIECE}, not {c} and {h}"
    if num_slots(*_buffers(form), target) < 2:
        return f"does not fit {c} channels of {form.x.dtype} into shared memory"
    return None


def prefer(form: Form[Any], target: Target) -> bool:
    """Whether there are positions for all multiprocessors: each reads all weights, which takes 12 us."""
    return form.sizes[0] >= ROWS * target.num_cores


def layer_norm_gated_mlp(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """The result, (M, C), in one kernel."""
    del config
    m, c, h = form.sizes
    if interpret:
        check_interpreted_sizes(positions=(m, ROWS))
    positions_of, weights = _buffers(form)
    tiles, stages = pl.cdiv(m, ROWS), num_slots(positions_of, weights, target, most=_MOST_STAGES)
    num_ctas = min(num_cores(target, interpret), pl.cdiv(tiles, WORKERS))
    rings = positions_of | {name: dataclasses.replace(b, shape=(stages, *b.shape)) for name, b in weights.items()}
    (out,) = launch(
        _Kernel(form.abstract(), tiles, h // PIECE, num_ctas, stages),
        dict(x=form.x[None], scale=form.scale, offset=form.offset, w_gate_up=form.w_gate_up, w_down=form.w_down),
        dict(out=jax.ShapeDtypeStruct((1, m, c), form.x.dtype)),
        dict(
            **{name: buffer.scratch_type for name, buffer in rings.items()},
            full=plgpu.Barrier(num_arrivals=WORKERS * (c // PIECE), num_barriers=_SLOTS),
            free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=_SLOTS),
            weights_full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            weights_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages),
        ),
        name="layer_norm_gated_mlp",
        num_ctas=num_ctas,
        num_warpgroups=WORKERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    return out.reshape(m, c)


def _buffers(form: Form[Any]) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    """The shared memory of all positions that a CTA has at a time, and of the weights of some hidden channels."""
    c, dtype = form.x.shape[1], form.w_down.dtype
    x_smem = Buffer((_SLOTS, WORKERS, c // PIECE, ROWS, PIECE), form.x.dtype, ROW_BYTES)
    gate_up_smem, down_smem = Buffer((2, c, PIECE), dtype, ROW_BYTES), Buffer((PIECE, c), dtype, ROW_BYTES)
    return dict(x_smem=x_smem), dict(gate_up_smem=gate_up_smem, down_smem=down_smem)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel.

    Attributes:
      tiles: of positions; a CTA has two of them at a time.
      chunks: pieces of hidden channels.
      num_ctas: CTAs.
      stages: shared memory for the weights of so many pieces.
    """

    form: Form[Any]
    tiles: int
    chunks: int
    num_ctas: int
    stages: int

    def __call__(self, refs: Refs) -> None:
        cta = jax.lax.axis_index("cta")
        pairs = pl.cdiv(self.tiles, WORKERS)
        steps = jax.lax.div(pairs - cta + self.num_ctas - 1, self.num_ctas)

        def rows(step: jax.Array, own: jax.Array | int) -> pl.Slice:
            """The positions of a warpgroup. If tiles are odd in number both have the last, as both get weights."""
            tile = (cta + step * self.num_ctas) * WORKERS + own
            return positions(jnp.minimum(tile, self.tiles - 1))

        rings = Ring(refs.full, refs.free, _SLOTS), Ring(refs.weights_full, refs.weights_free, self.stages)
        producer_registers, worker_registers = REGISTERS
        specialize(
            Role(
                range(WORKERS, WORKERS + 1),
                producer_registers,
                lambda _: self.produce(refs, *rings, steps, rows),
            ),
            Role(range(WORKERS), worker_registers, lambda own: self.work(refs, *rings, steps, rows, own)),
        )

    def produce(self, refs: Refs, tiles: Ring, weights: Ring, steps: jax.Array, rows: _Rows) -> None:
        """Copies positions, and for each step all weights."""

        def copy_positions(step: jax.Array) -> None:
            slot = tiles.acquire(step)
            for own in range(WORKERS):
                for i, piece in enumerate(pieces(refs.x.shape[2])):
                    to = refs.x_smem.at[slot, own, i]
                    copy_rows(
                        refs.x, jnp.int32(0), rows(step, own), piece, to, tiles.full, slot, row_bytes=ROW_BYTES
                    )

        copy_positions(jnp.int32(0))

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            @pl.loop(0, self.chunks)
            def _(chunk: jax.Array) -> None:
                slot = weights.acquire(step * self.chunks + chunk)
                full, hidden = weights.full_of(slot), pl.Slice(pl.multiple_of(chunk * PIECE, PIECE), PIECE)
                for i in range(2):
                    plgpu.copy_gmem_to_smem(refs.w_gate_up.at[:, i, hidden], refs.gate_up_smem.at[slot, i], full)
                plgpu.copy_gmem_to_smem(refs.w_down.at[hidden], refs.down_smem.at[slot], full)

            # The workers are past the begin of this step, where they leave the slot that this waits for.
            @pl.when(step + 1 < steps)
            def _() -> None:
                copy_positions(step + 1)

        weights.drain(steps * self.chunks)
        tiles.drain(steps)

    def work(self, refs: Refs, tiles: Ring, weights: Ring, steps: jax.Array, rows: _Rows, own: jax.Array) -> None:
        """Computes the results of a warpgroup, each in the place of the positions that it is made of."""

        def leave(step: jax.Array) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tiles.release(jax.lax.rem(step, _SLOTS))

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            slot = jax.lax.rem(step, _SLOTS)
            x_smem = refs.x_smem.at[slot, own]
            tiles.wait(slot)
            zs = normed(loaded(x_smem), self.form.epsilon, refs.scale, refs.offset)
            zs = [z.astype(self.form.w_down.dtype) for z in zs]

            @pl.when(step > 0)
            def _() -> None:
                leave(step - 1)

            def compute(sums: Ref) -> jax.Array:
                @pl.loop(0, self.chunks)
                def _(chunk: jax.Array) -> None:
                    stage = jax.lax.rem(step * self.chunks + chunk, self.stages)
                    weights.wait(stage)
                    hidden = self.hidden(zs, refs.gate_up_smem.at[stage])
                    multiply(sums, hidden, refs.down_smem.at[stage])
                    plgpu.wgmma_wait(0)
                    weights.release(stage)

                return in_layout(sums)

            parts = in_pieces(with_sums(compute, (ROWS, refs.x.shape[2])))
            if self.form.residual:
                parts = [part + x for part, x in zip(parts, loaded(x_smem), strict=True)]
            for i, part in enumerate(parts):
                x_smem[i] = part.astype(x_smem.dtype)
            plgpu.commit_smem()
            for i, piece in enumerate(pieces(refs.x.shape[2])):
                copy_back(x_smem.at[i], refs.out, (jnp.int32(0), rows(step, own).start, piece.start))

        leave(steps - 1)

    def hidden(self, zs: list[jax.Array], w: Ref) -> jax.Array:
        """What the gate leaves of some hidden channels, by their weights (2, C, PIECE)."""
        form = self.form

        def compute(gate: Ref, up: Ref) -> list[jax.Array]:
            for i, sums in enumerate((gate, up)):
                for z, piece in zip(zs, pieces(form.x.shape[1]), strict=True):
                    multiply(sums, z, w.at[i, piece])
                    plgpu.wgmma_wait(1)  # each under way has a copy of z, and there is room for two
            plgpu.wgmma_wait(0)
            return [in_layout(sums) for sums in (gate, up)]

        gate, up = with_sums(compute, *[(ROWS, PIECE)] * 2)
        return (activate(form.activation, gate, form.w_down.dtype) * up).astype(form.w_down.dtype)
