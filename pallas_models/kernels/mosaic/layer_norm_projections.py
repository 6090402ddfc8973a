"""Several projections of one layer norm, for Hopper GPUs and 64 or 128 channels.

CTAs stay on their multiprocessor with the weights in shared memory. One warpgroup of each copies 64 positions at a
time; the others take turns with them: a norm in registers, and from there all products, one after another.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.layer_norm_projections import Form
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
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, store_transposed
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

_WIDTHS = 64, 128
_WORKERS = 2
_REGISTERS = 40, 232  # of a thread of the producer, and of the workers
_MOST_SLOTS = 6
_OTHERS = 2048  # bytes of shared memory that barriers and alignment take
_FIRST = 8  # columns of the projection whose columns come first, filled up with zeros


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `layer_norm_projections` does not serve a call; None if it does."""
    _, c, _, n = form.sizes
    if form.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {form.dtype}"
    if c not in _WIDTHS or n not in _WIDTHS:
        return f"takes 64 or 128 channels and columns, not {c} and {n}"
    if form.w_first is not None:
        if not _jax.since(0, 11):
            return f"needs JAX 0.11 or newer to store what it transposes, not {jax.__version__}"
        if form.w_first.shape[1] > _FIRST:
            return f"takes w_first of {_FIRST} columns or fewer, not {form.w_first.shape[1]}"
    if _buffers(form, target)[1] < 2:
        return f"does not fit {form.sizes[2]} projections of {c} channels to {n} columns into shared memory"
    return None


def layer_norm_projections(
    form: Form[jax.Array], *, config: None, target: Target, interpret: bool
) -> tuple[jax.Array, ...]:
    """The projections, (M, N) each, and the one whose columns come first, (F, M), if there is one."""
    del config
    m, _, count, n = form.sizes
    if interpret:
        check_interpreted_sizes(positions=(m, ROWS))
    tiles = pl.cdiv(m, ROWS)
    num_ctas = min(num_cores(target, interpret), tiles)
    buffers, slots = _buffers(form, target)
    w_first, first = form.w_first, None
    if w_first is not None:
        w_first = jnp.pad(w_first.T, ((0, _FIRST - w_first.shape[1]), (0, 0)))
        first = jax.ShapeDtypeStruct((_FIRST, ROWS * tiles), form.dtype)
    results = launch(
        _Kernel(form.abstract(), tiles, num_ctas, slots),
        dict(
            x=form.x[None],
            scale=form.scale,
            offset=form.offset,
            w=jnp.moveaxis(form.w, 1, 0),
            bias=form.bias,
            w_first=w_first,
        ),
        {f"out{i}": jax.ShapeDtypeStruct((1, m, n), form.dtype) for i in range(count)} | dict(first=first),
        dict(
            **{name: buffer.scratch_type for name, buffer in buffers.items()},
            full=plgpu.Barrier(num_arrivals=form.x.shape[1] // PIECE, num_barriers=_WORKERS * slots),
            free=plgpu.Barrier(num_barriers=slots),
            weights_full=plgpu.Barrier(num_arrivals=1 if w_first is None else 2),
        ),
        name="layer_norm_projections",
        num_ctas=num_ctas,
        num_warpgroups=_WORKERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    outs = [out.reshape(m, n) for out in results[:count]]
    return tuple(outs) if form.w_first is None else (*outs, results[count][: form.w_first.shape[1], :m])


def _buffers(form: Form[Any], target: Target) -> tuple[dict[str, Buffer], int]:
    """The shared memory of a CTA, and how many tiles of x it has."""
    _, c, count, n = form.sizes
    dtype = form.dtype
    buffers = dict(
        w_smem=Buffer((count, c, n), dtype, ROW_BYTES),
        out_smem=Buffer((_WORKERS, n // PIECE, ROWS, PIECE), dtype, ROW_BYTES),
    )
    if form.w_first is not None:
        buffers |= dict(
            w_first_smem=Buffer((_FIRST, c), dtype, ROW_BYTES),
            first_smem=Buffer((_WORKERS, _FIRST, ROWS), dtype, ROW_BYTES),
        )
    tile = Buffer((c // PIECE, ROWS, PIECE), form.x.dtype, ROW_BYTES)
    room = available(target) - _OTHERS - num_bytes(buffers.values())
    slots = min(room // tile.num_bytes, _MOST_SLOTS)
    return buffers | dict(x_smem=dataclasses.replace(tile, shape=(slots, *tile.shape))), slots


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Form[Any]
    tiles: int
    num_ctas: int
    slots: int

    def __call__(self, refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(self.tiles - cta + self.num_ctas - 1, self.num_ctas)
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

    def rows(self, step: jax.Array) -> pl.Slice:
        """The positions of the tile of a step."""
        return pl.Slice(pl.multiple_of((self.cta + step * self.kernel.num_ctas) * ROWS, ROWS), ROWS)

    def ring(self, worker: jax.Array) -> Ring:
        """The ring of tiles, as a worker sees it."""
        slots = self.kernel.slots
        return Ring(self.refs.full, self.refs.free, slots, worker * slots)

    def produce(self) -> None:
        """Copies the weights and all tiles, and waits until they have been read."""
        refs = self.refs
        plgpu.copy_gmem_to_smem(refs.w, refs.w_smem, refs.weights_full)
        if refs.w_first is not None:
            plgpu.copy_gmem_to_smem(refs.w_first, refs.w_first_smem, refs.weights_full)
        pl.loop(0, self.steps)(self.copy)
        self.ring(jnp.int32(0)).drain(self.steps)

    def copy(self, step: jax.Array) -> None:
        """Copies the tile of a step."""
        refs, ring = self.refs, self.ring(jax.lax.rem(step, _WORKERS))
        slot, rows = ring.acquire(step), self.rows(step)
        for i, piece in enumerate(pieces(refs.x.shape[2])):
            tile, full = refs.x_smem.at[slot, i], ring.first_full + slot
            copy_rows(refs.x, jnp.int32(0), rows, piece, tile, refs.full, full, row_bytes=ROW_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """A warpgroup that projects the positions of every `_WORKERS`-th tile."""

    walk: _Walk
    own: jax.Array

    @property
    def refs(self) -> Refs:
        return self.walk.refs

    def run(self) -> None:
        """Projects all tiles, and waits until they are stored."""
        plgpu.barrier_wait(self.refs.weights_full)
        steps = jax.lax.div(self.walk.steps - self.own + _WORKERS - 1, _WORKERS)
        pl.loop(0, steps)(self.step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(self, i: jax.Array) -> None:
        """Projects the i-th tile of this warpgroup."""
        refs, kernel = self.refs, self.walk.kernel
        step = i * _WORKERS + self.own
        ring, rows, slot = self.walk.ring(self.own), self.walk.rows(step), jax.lax.rem(step, kernel.slots)
        ring.wait(slot)
        zs = normed(loaded(refs.x_smem.at[slot]), kernel.form.epsilon, refs.scale, refs.offset)
        zs = [z.astype(kernel.form.dtype) for z in zs]
        plgpu.commit_smem()  # all have read
        ring.release(slot)
        for j in range(refs.w.shape[0]):
            y = product(zs, refs.w_smem.at[j])
            if refs.bias is not None:
                y += same_rows(refs.bias.at[j])
            out = getattr(refs, f"out{j}")
            store(in_pieces(y), refs.out_smem.at[self.own], out, (jnp.int32(0), rows.start))
        if refs.first is not None:
            self.store_first(product(zs, refs.w_first_smem, transpose_w=True), rows)

    def store_first(self, y: jax.Array, rows: pl.Slice) -> None:
        """Stores the transpose of y."""
        staged: Ref = self.refs.first_smem.at[self.own]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_transposed(staged, y.astype(staged.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, self.refs.first.at[:, rows])
