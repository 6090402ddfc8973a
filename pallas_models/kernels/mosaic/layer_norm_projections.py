"""Several projections of one layer norm, for Hopper GPUs and 64 or 128 channels.

CTAs stay on their multiprocessor with the weights in shared memory. One warpgroup of each copies 64 positions at a
time; the others take turns with them: a norm in registers, and from there all products, one after another.
"""

import dataclasses
import functools
from collections.abc import Callable
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
    positions,
    product,
    same_rows,
    store,
)
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS, store_transposed
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer
from pallas_models.kernels.mosaic.common.turns import WORKERS, Turns, launch_in_turns, num_slots
from pallas_models.target import Target

_WIDTHS = 64, 128
_MOST_FIRST = 64  # columns of the projection whose columns come first


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `layer_norm_projections` does not serve a call; None if it does."""
    _, c, count, n = form.sizes
    if form.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {form.dtype}"
    if c not in _WIDTHS or (count and n not in _WIDTHS):
        return f"takes 64 or 128 channels and columns, not {c} and {n}"
    if form.w_first is not None:
        if not _jax.since(0, 11):
            return f"needs JAX 0.11 or newer to store what it transposes, not {jax.__version__}"
        if form.first > _MOST_FIRST:
            return f"takes w_first of {_MOST_FIRST} columns or fewer, not {form.first}"
    if num_slots(*_buffers(form), target) < 2:
        return f"does not fit {count} projections of {c} channels to {n} columns into shared memory"
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
    w_first, first = form.w_first, None
    if w_first is not None:
        columns = _first_columns(form)
        w_first = jnp.pad(w_first.T, ((0, columns - form.first), (0, 0)))
        first = jax.ShapeDtypeStruct((columns, ROWS * tiles), form.dtype)
    results = launch_in_turns(
        _Kernel(form.abstract()),
        dict(x=form.x[None], scale=form.scale, offset=form.offset, w=form.w, bias=form.bias, w_first=w_first),
        {f"out{i}": jax.ShapeDtypeStruct((1, m, n), form.dtype) for i in range(count)} | dict(first=first),
        *_buffers(form),
        tiles=tiles,
        copies=form.x.shape[1] // PIECE,
        weights=count + (w_first is not None),
        name="layer_norm_projections",
        target=target,
        interpret=interpret,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    outs = [out.reshape(m, n) for out in results[:count]]
    return (*outs, *(some[: form.first, :m] for some in results[count:]))


def _first_columns(form: Form[Any]) -> int:
    """The columns of `w_first`, filled up with zeros to whole tiles."""
    return form.first + -form.first % TILE_ROWS


def _buffers(form: Form[Any]) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    """The shared memory that a CTA keeps, and that of a tile of x."""
    _, c, count, n = form.sizes
    dtype = form.dtype
    kept: dict[str, Buffer] = {}
    if count:
        kept |= dict(
            w_smem=Buffer((count, c, n), dtype, ROW_BYTES),
            out_smem=Buffer((WORKERS, n // PIECE, ROWS, PIECE), dtype, ROW_BYTES),
        )
    if form.w_first is not None:
        columns = _first_columns(form)
        kept |= dict(
            w_first_smem=Buffer((columns, c), dtype, ROW_BYTES),
            first_smem=Buffer((WORKERS, columns, ROWS), dtype, ROW_BYTES),
        )
    return kept, dict(x_smem=Buffer((c // PIECE, ROWS, PIECE), form.x.dtype, ROW_BYTES))


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Form[Any]

    def __call__(self, turns: Turns, refs: Refs) -> None:
        def copy_weights() -> None:
            for i in range(self.form.sizes[2]):
                plgpu.copy_gmem_to_smem(refs.w.at[:, i], refs.w_smem.at[i], refs.weights_full)
            if refs.w_first is not None:
                plgpu.copy_gmem_to_smem(refs.w_first, refs.w_first_smem, refs.weights_full)

        def copy(tile: jax.Array, slot: jax.Array, full: jax.Array) -> None:
            for i, piece in enumerate(pieces(refs.x.shape[2])):
                to = refs.x_smem.at[slot, i]
                copy_rows(refs.x, jnp.int32(0), positions(tile), piece, to, refs.full, full, row_bytes=ROW_BYTES)

        turns.take(
            refs,
            copy_weights=copy_weights,
            copy=copy,
            worker=lambda own: functools.partial(self.project, refs, own),
        )

    def project(
        self, refs: Refs, own: jax.Array, tile: jax.Array, slot: jax.Array, release: Callable[[], None]
    ) -> None:
        """Projects a tile."""
        rows = positions(tile)
        zs = normed(loaded(refs.x_smem.at[slot]), self.form.epsilon, refs.scale, refs.offset)
        zs = [z.astype(self.form.dtype) for z in zs]
        release()
        for j in range(self.form.sizes[2]):
            y = product(zs, refs.w_smem.at[j])
            if refs.bias is not None:
                y += same_rows(refs.bias.at[j])
            out = getattr(refs, f"out{j}")
            store(in_pieces(y), refs.out_smem.at[own], out, (jnp.int32(0), rows.start))
        if refs.first is not None:
            self.store_first(refs, product(zs, refs.w_first_smem, transpose_w=True), refs.first_smem.at[own], rows)

    def store_first(self, refs: Refs, y: jax.Array, staged: Ref, rows: pl.Slice) -> None:
        """Stores the transpose of y."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_transposed(staged, y.astype(staged.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, refs.first.at[:, rows])
