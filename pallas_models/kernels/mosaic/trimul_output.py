"""The end of the triangle multiplicative update and its gate, for Hopper GPUs and up to 128 channels.

The gate is computed here, of x: to read x takes no longer than to read the gate, which nobody writes then. CTAs
stay on their multiprocessor with the weights in shared memory. One warpgroup of each copies 64 positions at a
time; the others take turns with them, and what they multiply stays in registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common import trimul_scales
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.steps import shared_step
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
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, layout_cast, load_transposed
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer
from pallas_models.kernels.mosaic.common.turns import WORKERS, Turns, launch_in_turns
from pallas_models.kernels.mosaic.trimul_project_parts import Tiles
from pallas_models.target import Target

_WIDTHS = 64, 128


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


@shared_step
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
    vectors = dict(
        x_scale=gating.norm_scale,
        x_shift=gating.norm_bias,
        y_scale=form.scale,
        y_shift=form.shift,
        gate_shift=gating.b_gate,
        out_shift=form.bias,
    )
    (out,) = launch_in_turns(
        _Kernel(form.abstract(), tiles, gating.epsilon),
        dict(x=x, y=y, w_gate=gating.w_gate, w=form.w, bounds=jnp.max(form.bounds, axis=0), **vectors),
        dict(out=jax.ShapeDtypeStruct((form.batch, form.size, c), form.out_dtype)),
        *_buffers(form, gating),
        tiles=tiles.count,
        copies=1 + c // PIECE,
        weights=2,
        name="trimul_output",
        target=target,
        interpret=interpret,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    return out


def _buffers(
    form: Output[jax.Array], gating: Projection[jax.Array]
) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    """The shared memory that a CTA keeps, and that of a tile of x and of y."""
    (h, c), dtype, width = form.w.shape, form.w.dtype, ROW_BYTES // form.out_dtype.itemsize
    kept = dict(
        w_gate_smem=Buffer(gating.w_gate.shape, dtype, ROW_BYTES),
        w_smem=Buffer((h, c), dtype, ROW_BYTES),
        out_smem=Buffer((WORKERS, c // width, ROWS, width), form.out_dtype, ROW_BYTES),
    )
    x_smem = Buffer((c // PIECE, ROWS, PIECE), gating.x.dtype, ROW_BYTES)
    return kept, dict(x_smem=x_smem, y_smem=Buffer((h, ROWS), dtype, ROW_BYTES))


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Output[Any]
    tiles: Tiles
    x_epsilon: float

    def __call__(self, turns: Turns, refs: Refs) -> None:
        def copy_weights() -> None:
            for name in ("w_gate", "w"):
                plgpu.copy_gmem_to_smem(getattr(refs, name), getattr(refs, f"{name}_smem"), refs.weights_full)

        turns.take(
            refs,
            copy_weights=copy_weights,
            copy=functools.partial(self.copy, refs),
            worker=lambda own: _Worker(self, refs, own).step,
        )

    def copy(self, refs: Refs, tile: jax.Array, slot: jax.Array, full: jax.Array) -> None:
        """Copies a tile of x and of y."""
        item, rows = self.tiles.place(tile)
        for i, piece in enumerate(pieces(refs.x.shape[2])):
            to = refs.x_smem.at[slot, i]
            copy_rows(refs.x, item, rows, piece, to, refs.full, full, row_bytes=ROW_BYTES)
        y = refs.y.at[self.source(item), :, rows]
        plgpu.copy_gmem_to_smem(y, refs.y_smem.at[slot], refs.full.at[full])

    def source(self, item: jax.Array) -> jax.Array:
        """The item of y that an item of the result is made of."""
        kept, rows = self.form.rows
        return item if kept == rows else jax.lax.div(item, kept) * rows + jax.lax.rem(item, kept)


class _Worker:
    """A warpgroup that finishes the positions of every second tile of a CTA."""

    def __init__(self, kernel: _Kernel, refs: Refs, own: jax.Array) -> None:
        self.kernel, self.refs, self.own, form = kernel, refs, own, kernel.form
        _, self.epsilon = trimul_scales.scaled_sums(self.bounds(), form.w.dtype, form.factor, form.epsilon)

    def bounds(self) -> list[jax.Array]:
        """The bounds of left and right, as vectors: Mosaic takes no exponents of scalars."""
        bounds = [self.refs.bounds[i] for i in range(self.refs.bounds.shape[0])]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return [layout_cast(jnp.broadcast_to(bound, (ROWS,)), layout) for bound in bounds]

    def step(self, tile: jax.Array, slot: jax.Array, release: Callable[[], None]) -> None:
        """Finishes a tile."""
        refs, form = self.refs, self.kernel.form
        gate = self.gate(slot)
        zs = normed(self.y(slot), self.epsilon, refs.y_scale, refs.y_shift)
        if form.residual is None:
            release()
        if not form.gate_after:
            zs = [z * part.astype(jnp.float32) for z, part in zip(zs, in_pieces(gate), strict=True)]
        out = self.shifted(product(zs, refs.w_smem), refs.out_shift, 1.0)
        if form.gate_after:
            out *= gate.astype(jnp.float32)
        parts = in_pieces(out)
        if form.residual is not None:
            parts = [part + x for part, x in zip(parts, loaded(refs.x_smem.at[slot]), strict=True)]
            release()
        item, rows = self.kernel.tiles.place(tile)
        store(parts, refs.out_smem.at[self.own], refs.out, (item, rows.start))

    def gate(self, slot: jax.Array) -> jax.Array:
        """The gate of a tile, in the dtype of the weights."""
        refs = self.refs
        zs = normed(loaded(refs.x_smem.at[slot]), self.kernel.x_epsilon, refs.x_scale, refs.x_shift)
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
