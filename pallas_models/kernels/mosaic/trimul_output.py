"""The end of the triangle multiplicative update and its gate, for Hopper GPUs and up to 128 channels.

The gate is computed here, of x: to read x takes no longer than to read the gate, which nobody writes then. CTAs
stay on their multiprocessor with the weights in shared memory. One warpgroup of each copies 64 positions at a
time; the others take turns with them, and what they multiply stays in registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common import trimul_scales
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.trimul import Form, Output, Projection
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import (
    PIECE,
    ROWS,
    in_pieces,
    loaded,
    normed,
    pieces,
    product,
    same_rows,
    store,
)
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, layout_cast, load_transposed
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.kernels.mosaic.trimul_project_parts import Place, Tiles
from pallas_models.target import Target

_WIDTHS = 64, 128
_WORKERS = 2  # with three each has too few registers: 255 us and not 229 at N = 1024 on an H200
_REGISTERS = 40, 232  # of a thread of the producer, and of the workers
_MOST_SLOTS = 6
_OTHERS = 2048  # bytes of shared memory that barriers and alignment take


def unsupported(form: Form[Any]) -> str | None:
    """Why `output` does not serve an update; None if it does."""
    c, h, dtype = form.x.shape[3], form.hidden, form.compute_dtype
    if not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer to read what it transposes, not {jax.__version__}"
    if dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {dtype}"
    if h not in _WIDTHS or c not in _WIDTHS:
        return f"takes 64 or 128 channels and hidden channels, not {c} and {h}"
    return None


def output(
    form: Output[jax.Array],
    gating: Projection[jax.Array],
    *,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """The end of the update, (B', M, C), for `form` without its gate, which is made of the x of `gating`."""
    (y,), c, x = form.ys, form.w.shape[1], gating.x
    if interpret:
        check_interpreted_sizes(positions=(form.size, ROWS))
    tiles = Tiles(form.batch, form.size, 1, 1)
    num_ctas = min(num_cores(target, interpret), tiles.count)
    vectors = dict(
        x_scale=gating.norm_scale,
        x_shift=gating.norm_bias,
        y_scale=form.scale,
        y_shift=form.shift,
        gate_shift=gating.b_gate,
        out_shift=form.bias,
    )
    buffers, slots = _buffers(form, gating, target)
    (out,) = launch(
        _Kernel(form.abstract(), tiles, num_ctas, slots, gating.epsilon),
        dict(x=x, y=y, w_gate=gating.w_gate, w=form.w, bounds=jnp.max(form.bounds, axis=0), **vectors),
        dict(out=jax.ShapeDtypeStruct((form.batch, form.size, c), form.out_dtype)),
        dict(
            **{name: buffer.scratch_type for name, buffer in buffers.items()},
            full=plgpu.Barrier(num_arrivals=1 + c // PIECE, num_barriers=_WORKERS * slots),
            free=plgpu.Barrier(num_barriers=slots),
            weights_full=plgpu.Barrier(num_arrivals=2),
        ),
        name="trimul_output",
        num_ctas=num_ctas,
        num_warpgroups=_WORKERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    return out


def _buffers(
    form: Output[jax.Array], gating: Projection[jax.Array], target: Target
) -> tuple[dict[str, Buffer], int]:
    """The shared memory of a CTA, and how many tiles of x and of y it has."""
    (h, c), dtype, width = form.w.shape, form.w.dtype, ROW_BYTES // form.out_dtype.itemsize
    buffers = dict(
        w_gate_smem=Buffer(gating.w_gate.shape, dtype, ROW_BYTES),
        w_smem=Buffer((h, c), dtype, ROW_BYTES),
        out_smem=Buffer((_WORKERS, c // width, ROWS, width), form.out_dtype, ROW_BYTES),
    )
    x_smem = Buffer((c // PIECE, ROWS, PIECE), gating.x.dtype, ROW_BYTES)
    tile = dict(x_smem=x_smem, y_smem=Buffer((h, ROWS), dtype, ROW_BYTES))
    room = available(target) - _OTHERS - num_bytes(buffers.values())
    slots = min(room // num_bytes(tile.values()), _MOST_SLOTS)
    some = {name: dataclasses.replace(b, shape=(slots, *b.shape)) for name, b in tile.items()}
    return buffers | some, slots


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Output[Any]
    tiles: Tiles
    num_ctas: int
    slots: int
    x_epsilon: float

    def __call__(self, refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(self.tiles.count - cta + self.num_ctas - 1, self.num_ctas)
        walk = _Walk(self, refs, cta, steps)
        producer_registers, worker_registers = _REGISTERS
        specialize(
            Role(range(_WORKERS, _WORKERS + 1), producer_registers, lambda _: walk.produce()),
            Role(range(_WORKERS), worker_registers, lambda own: _Worker(walk, own).run()),
            warpgroup=warpgroup,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """The tiles of a CTA, one a step: every `num_ctas`-th. The workers take turns with them."""

    kernel: _Kernel
    refs: Refs
    cta: jax.Array
    steps: jax.Array

    def place(self, step: jax.Array) -> Place:
        """Where the tile of a step is in x and in the result."""
        return self.kernel.tiles.place(self.cta + step * self.kernel.num_ctas)

    def source(self, item: jax.Array) -> jax.Array:
        """The item of y that an item of the result is made of."""
        kept, rows = self.kernel.form.rows
        return item if kept == rows else jax.lax.div(item, kept) * rows + jax.lax.rem(item, kept)

    def ring(self, worker: jax.Array) -> Ring:
        """The ring of tiles, as a worker sees it."""
        slots = self.kernel.slots
        return Ring(self.refs.full, self.refs.free, slots, worker * slots)

    def produce(self) -> None:
        """Copies the weights and all tiles, and waits until they have been read."""
        refs = self.refs
        for name in ("w_gate", "w"):
            plgpu.copy_gmem_to_smem(getattr(refs, name), getattr(refs, f"{name}_smem"), refs.weights_full)
        pl.loop(0, self.steps)(self.copy)
        self.ring(jnp.int32(0)).drain(self.steps)

    def copy(self, step: jax.Array) -> None:
        """Copies the tile of a step."""
        refs, ring = self.refs, self.ring(jax.lax.rem(step, _WORKERS))
        slot, (item, rows) = ring.acquire(step), self.place(step)
        full = ring.first_full + slot
        for i, piece in enumerate(pieces(refs.x.shape[2])):
            tile = refs.x_smem.at[slot, i]
            copy_rows(refs.x, item, rows, piece, tile, refs.full, full, row_bytes=ROW_BYTES)
        y = refs.y.at[self.source(item), :, rows]
        plgpu.copy_gmem_to_smem(y, refs.y_smem.at[slot], ring.full_of(slot))


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """A warpgroup that finishes the positions of every `_WORKERS`-th tile."""

    walk: _Walk
    own: jax.Array

    @property
    def refs(self) -> Refs:
        return self.walk.refs

    def run(self) -> None:
        """Finishes all tiles, and waits until they are stored."""
        form = self.walk.kernel.form
        _, epsilon = trimul_scales.scaled_sums(self.bounds(), form.w.dtype, form.factor, form.epsilon)
        plgpu.barrier_wait(self.refs.weights_full)
        steps = jax.lax.div(self.walk.steps - self.own + _WORKERS - 1, _WORKERS)
        pl.loop(0, steps)(functools.partial(self.step, epsilon))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def bounds(self) -> list[jax.Array]:
        """The bounds of left and right, as vectors: Mosaic takes no exponents of scalars."""
        bounds = [self.refs.bounds[i] for i in range(self.refs.bounds.shape[0])]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return [layout_cast(jnp.broadcast_to(bound, (ROWS,)), layout) for bound in bounds]

    def step(self, epsilon: jax.Array, i: jax.Array) -> None:
        """Finishes the i-th tile of this warpgroup, given the epsilon of the norm of y."""
        refs, kernel = self.refs, self.walk.kernel
        step = i * _WORKERS + self.own
        ring, (item, rows) = self.walk.ring(self.own), self.walk.place(step)
        slot = jax.lax.rem(step, kernel.slots)
        ring.wait(slot)
        gate = self.gate(slot)
        zs = normed(self.y(slot), epsilon, refs.y_scale, refs.y_shift)
        if kernel.form.residual is None:
            self.release(ring, slot)
        if not kernel.form.gate_after:
            zs = [z * part.astype(jnp.float32) for z, part in zip(zs, in_pieces(gate), strict=True)]
        out = self.shifted(product(zs, refs.w_smem), refs.out_shift, 1.0)
        if kernel.form.gate_after:
            out *= gate.astype(jnp.float32)
        parts = in_pieces(out)
        if kernel.form.residual is not None:
            parts = [part + x for part, x in zip(parts, loaded(refs.x_smem.at[slot]), strict=True)]
            self.release(ring, slot)
        store(parts, refs.out_smem.at[self.own], refs.out, (item, rows.start))

    def release(self, ring: Ring, slot: jax.Array) -> None:
        """Lets the next tile be copied to a slot that has been read."""
        plgpu.commit_smem()  # all have read
        ring.release(slot)

    def gate(self, slot: jax.Array) -> jax.Array:
        """The gate of a tile, in the dtype of the weights."""
        refs = self.refs
        zs = normed(loaded(refs.x_smem.at[slot]), self.walk.kernel.x_epsilon, refs.x_scale, refs.x_shift)
        half = self.shifted(product(zs, refs.w_gate_smem), refs.gate_shift, 0.5)
        return (0.5 * jnp.tanh(half) + 0.5).astype(refs.w_gate.dtype)

    def y(self, slot: jax.Array) -> list[jax.Array]:
        """The sums over third positions of a tile, (positions, channels), some channels at a time."""
        y = self.refs.y_smem
        return [
            load_transposed(y.at[slot, piece], plgpu.Layout.WGMMA).astype(jnp.float32)
            for piece in pieces(y.shape[1])
        ]

    def shifted(self, y: jax.Array, shift: Ref | None, factor: float) -> jax.Array:
        """`factor` times a product and its bias."""
        y = y if factor == 1.0 else y * factor
        return y if shift is None else y + factor * same_rows(shift.at[pl.Slice(0, y.shape[1])])
