"""A product of what a gate leaves, for Hopper GPUs and 64 or 128 channels.

CTAs stay on their multiprocessor with the weights in shared memory. One warpgroup of each copies 64 positions with
their gates and residuals at a time; the others take turns with them, and what they multiply stays in registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.forms.gated_projection import Form
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import (
    PIECE,
    ROWS,
    in_pieces,
    loaded,
    pieces,
    positions,
    product,
    same_rows,
    store,
)
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer
from pallas_models.kernels.mosaic.common.turns import WORKERS, Turns, launch_in_turns, num_slots
from pallas_models.target import Target

_WIDTHS = 64, 128


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `gated_projection` does not serve a call; None if it does."""
    _, n, k = form.sizes
    if form.x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.x.dtype}"
    if n not in _WIDTHS or k not in _WIDTHS:
        return f"takes 64 or 128 channels and columns, not {k} and {n}"
    if num_slots(*_buffers(form), target) < 2:
        return f"does not fit tiles of {k} channels and {n} columns of {form.out_dtype} into shared memory"
    return None


def gated_projection(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """The product, (M, N), in one kernel."""
    del config
    m, n, _ = form.sizes
    if interpret:
        check_interpreted_sizes(positions=(m, ROWS))
    given = _tiles(form)
    (out,) = launch_in_turns(
        _Kernel(form.abstract()),
        {name: array[None] for name, array in given.items()} | dict(w=form.w, bias=form.bias),
        dict(out=jax.ShapeDtypeStruct((1, m, n), form.out_dtype)),
        *_buffers(form),
        tiles=pl.cdiv(m, ROWS),
        copies=sum(array.shape[1] // PIECE for array in given.values()),
        weights=1,
        name="gated_projection",
        target=target,
        interpret=interpret,
    )
    return out.reshape(m, n)


def _tiles(form: Form[Any]) -> dict[str, Any]:
    """The operands that are copied tile by tile."""
    given = dict(x=form.x, gate=form.gate)
    return given if form.residual is None else given | dict(residual=form.residual)


def _buffers(form: Form[Any]) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    """The shared memory that a CTA keeps, and that of a tile of all operands."""
    width = ROW_BYTES // form.out_dtype.itemsize
    kept = dict(
        w_smem=Buffer(form.w.shape, form.w.dtype, ROW_BYTES),
        out_smem=Buffer((WORKERS, form.w.shape[1] // width, ROWS, width), form.out_dtype, ROW_BYTES),
    )
    tile = {
        f"{name}_smem": Buffer((array.shape[1] // PIECE, ROWS, PIECE), array.dtype, ROW_BYTES)
        for name, array in _tiles(form).items()
    }
    return kept, tile


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Form[Any]

    def __call__(self, turns: Turns, refs: Refs) -> None:
        def copy(tile: jax.Array, slot: jax.Array, full: jax.Array) -> None:
            for name, array in _tiles(self.form).items():
                for i, piece in enumerate(pieces(array.shape[1])):
                    place = getattr(refs, name), jnp.int32(0), positions(tile), piece
                    to = getattr(refs, f"{name}_smem").at[slot, i]
                    copy_rows(*place, to, refs.full, full, row_bytes=ROW_BYTES)

        turns.take(
            refs,
            copy_weights=lambda: plgpu.copy_gmem_to_smem(refs.w, refs.w_smem, refs.weights_full),
            copy=copy,
            worker=lambda own: functools.partial(self.project, refs, own),
        )

    def project(
        self, refs: Refs, own: jax.Array, tile: jax.Array, slot: jax.Array, release: Callable[[], None]
    ) -> None:
        """Gates and projects a tile."""
        xs, gates = loaded(refs.x_smem.at[slot]), loaded(refs.gate_smem.at[slot])
        dtype = self.form.x.dtype
        y = product([x * activate("sigmoid", gate, dtype) for x, gate in zip(xs, gates, strict=True)], refs.w_smem)
        if refs.bias is not None:
            y += same_rows(refs.bias.at[pl.Slice(0, y.shape[1])])
        parts = in_pieces(y)
        if self.form.residual is not None:
            parts = [part + x for part, x in zip(parts, loaded(refs.residual_smem.at[slot]), strict=True)]
        release()
        store(parts, refs.out_smem.at[own], refs.out, (jnp.int32(0), positions(tile).start))
