"""The gradient of several projections of one layer norm, for Hopper GPUs: of x, the norm's scale and its offset.

CTAs stay on their multiprocessor with the weights in shared memory. Each of their warpgroups takes 64 positions at
a time: it normalises them again, adds up the products of the cotangents of all projections, which are copied ahead
one after another, and takes the norm's gradient of the sum. Nobody waits for another warpgroup.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.layer_norm_projections import Form
from pallas_models.kernels.mosaic import layer_norm_projections as forward
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import (
    PIECE,
    ROWS,
    along_rows,
    in_pieces,
    loaded,
    mean,
    pieces,
    positions,
    same_rows,
)
from pallas_models.kernels.mosaic.common.device_sums import sums_of_parts
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS, layout_cast, load
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, with_sums
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.row_stores import SUMMED, column_sums, store_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.target import Target

_WARPGROUPS = 2
_MOST_SLOTS = 4  # for arrays of positions that are copied ahead
_MOST_FIRST = 16  # columns of the projection whose columns come first, which are added up one by one
_OTHERS = 1024  # bytes of shared memory that barriers and alignment take


_Totals = list[list[jax.Array]]  # of scale and offset, by pieces of the channels


def prefer(form: Form[Any], target: Target) -> bool:
    """Whether it is the faster gradient: rows that are not in multiples of 8 are padded first, which is a copy."""
    del target
    return form.sizes[0] % TILE_ROWS == 0


class Gradient(NamedTuple):
    """The cotangents of x (M, C), scale and offset (C,); and the layer norm (M, C) in the dtype of the weights."""

    x: jax.Array
    scale: jax.Array
    offset: jax.Array
    z: jax.Array


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `layer_norm_projections_backward` does not serve a call; None if it does."""
    if reason := forward.unsupported(form, target):
        return reason
    if form.x.dtype != form.dtype:
        return f"takes x in the dtype of the weights, {form.dtype}, not {form.x.dtype}"
    if form.first > _MOST_FIRST:
        return f"takes w_first of {_MOST_FIRST} columns or fewer, not {form.first}"
    if _num_slots(form, target) < 2:
        return f"does not fit weights of {form.sizes[2]} projections into shared memory"
    return None


def _buffers(form: Form[Any]) -> tuple[dict[str, Buffer], Buffer]:
    """The shared memory of the weights, and of an array of positions."""
    _, c, count, n = form.sizes
    weights = dict(w_smem=Buffer((count, c, n), form.dtype, ROW_BYTES)) if count else {}
    return weights, Buffer((max(c, n) // PIECE, ROWS, PIECE), form.dtype, ROW_BYTES)


def _first(form: Form[Any]) -> Buffer:
    """The shared memory of two tiles of the cotangent whose columns come first, for each warpgroup."""
    return Buffer((_WARPGROUPS, 2, form.first, ROWS), form.dtype)


def _num_slots(form: Form[Any], target: Target) -> int:
    """For how many arrays of positions a warpgroup has room."""
    weights, tile = _buffers(form)
    room = available(target) - _OTHERS - num_bytes([*weights.values(), _first(form)])
    return min(room // (_WARPGROUPS * tile.num_bytes), _MOST_SLOTS)


def layer_norm_projections_backward(
    form: Form[jax.Array],
    douts: list[jax.Array | None],
    dfirst: jax.Array | None,
    dsame: jax.Array | None,
    *,
    target: Target,
    interpret: bool,
) -> Gradient:
    """The gradient but for the weights.

    Args:
      douts: the cotangents of the projections, (M, N), None for zeros.
      dfirst: the cotangent of the projection whose columns come first, (F, M), or None.
      dsame: the cotangent of the x that is returned, (M, C), or None.
    """
    m, c, count, _ = form.sizes
    if interpret:
        check_interpreted_sizes(positions=(m, ROWS))
    tiles = pl.cdiv(m, ROWS)
    num_ctas = min(num_cores(target, interpret), pl.cdiv(tiles, _WARPGROUPS))
    weights, tile = _buffers(form)
    arrays = dict(x=form.x) | {f"d{i}": d for i, d in enumerate(douts) if d is not None}
    if dsame is not None:
        arrays["same"] = dsame
    # Nothing is copied two tiles ahead: there is no room for a third tile of `dfirst`.
    slots = min(_num_slots(form, target), len(arrays))
    w_first = None
    if dfirst is not None and form.w_first is not None:
        dfirst, w_first = jnp.pad(dfirst, ((0, 0), (0, ROWS * tiles - m))), form.w_first.T.astype(jnp.float32)
    results = launch(
        lambda refs: _Warpgroup.of(refs, tuple(arrays), form.abstract(), tiles, num_ctas, slots).run(),
        {name: array[None] for name, array in arrays.items()}
        | dict(scale=form.scale, offset=form.offset, w=form.w, dfirst=dfirst, w_first=w_first),
        dict(
            dx=jax.ShapeDtypeStruct((1, m, c), form.x.dtype),
            z=jax.ShapeDtypeStruct((1, m, c), form.dtype),
            sums=jax.ShapeDtypeStruct((2, c // PIECE, num_ctas, _WARPGROUPS, 4 * SUMMED), jnp.float32),
        ),
        dict(
            **{name: buffer.scratch_type for name, buffer in weights.items()},
            smem=dataclasses.replace(tile, shape=(_WARPGROUPS, slots, *tile.shape)).scratch_type,
            **({} if dfirst is None else dict(first_smem=_first(form).scratch_type)),
            full=plgpu.Barrier(num_arrivals=tile.shape[0], num_barriers=_WARPGROUPS * slots),
            first_full=plgpu.Barrier(num_barriers=2 * _WARPGROUPS),
            weights_full=plgpu.Barrier(num_arrivals=max(count, 1)),
        ),
        name="layer_norm_projections_backward",
        num_ctas=num_ctas,
        num_warpgroups=_WARPGROUPS,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    dx, z, sums = results
    dscale, doffset = sums_of_parts(sums.reshape(2, c // PIECE, -1, SUMMED), axis=1)
    return Gradient(x=dx.reshape(m, c), scale=dscale.reshape(c), offset=doffset.reshape(c), z=z.reshape(m, c))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Warpgroup:
    """A warpgroup, which has all there is to do for its tiles.

    Attributes:
      names: the arrays of positions in the order in which a tile takes them.
      first: its first tile.
      stride: how many tiles lie between one and the next one.
      steps: how many tiles it has.
      slots: how many arrays are copied ahead.
    """

    refs: Refs
    names: tuple[str, ...]
    form: Form[Any]
    index: jax.Array
    first: jax.Array
    stride: int
    steps: jax.Array
    slots: int

    @classmethod
    def of(
        cls, refs: Refs, names: tuple[str, ...], form: Form[Any], tiles: int, num_ctas: int, slots: int
    ) -> Self:
        """The warpgroup that runs this."""
        index, stride = jax.lax.axis_index("warpgroup"), _WARPGROUPS * num_ctas
        first = jax.lax.axis_index("cta") * _WARPGROUPS + index
        return cls(
            refs=refs,
            names=names,
            form=form,
            index=index,
            first=first,
            stride=stride,
            steps=jax.lax.div(tiles - first + stride - 1, stride),
            slots=slots,
        )

    @property
    def pieces(self) -> list[pl.Slice]:
        """The channels of all pieces of x."""
        return pieces(self.form.x.shape[1])

    def run(self) -> None:
        """Copies the weights, takes all tiles, and stores the sums over their positions."""
        refs, count = self.refs, self.form.sizes[2]

        @pl.when(self.index == 0)
        def _() -> None:
            for i in range(count):
                plgpu.copy_gmem_to_smem(refs.w.at[:, i], refs.w_smem.at[i], refs.weights_full)

        for i in range(self.slots):
            self.copy(jnp.int32(0), i)
        if count:
            plgpu.barrier_wait(refs.weights_full)
        zeros = layout_cast(
            jnp.zeros((4 * SUMMED,), jnp.float32), plgpu.Layout.WG_STRIDED((4 * SUMMED,), vec_size=2)
        )
        totals = jax.lax.fori_loop(0, self.steps, self.step, [[zeros] * len(self.pieces)] * 2)
        cta = jax.lax.axis_index("cta")
        for i, parts in enumerate(totals):
            for j, total in enumerate(parts):
                refs.sums.at[i, j, cta, self.index][...] = total

    def slot(self, step: jax.Array, i: int) -> jax.Array:
        """The slot of the i-th array of a step.

        It is not 0 for the first one: where slots come round with each step they would be constants, and the
        compiler would keep the addresses of all products in registers, and spill.
        """
        return jax.lax.rem(self.index + step * len(self.names) + i, self.slots)

    def copy(self, step: jax.Array, i: int) -> None:
        """Starts the copy of the i-th array of a step; past the end it is one of the steps after it, if any."""
        refs, slot, (later, i) = self.refs, self.slot(step, i), divmod(i, len(self.names))
        number, ref = step + later, getattr(refs, self.names[i])
        full = self.index * self.slots + slot
        most = refs.smem.shape[2]

        @pl.when(number < self.steps)
        def _() -> None:
            parts = pieces(ref.shape[2])
            rows = self.rows(number)
            for j, columns in enumerate(parts):
                to = refs.smem.at[self.index, slot, j]
                copy_rows(ref, jnp.int32(0), rows, columns, to, refs.full, full, row_bytes=ROW_BYTES)
            for _ in range(most - len(parts)):
                plgpu.barrier_arrive(refs.full.at[full])
            if i == 0 and refs.dfirst is not None:
                half = jax.lax.rem(number, 2)
                to, full_of = refs.first_smem.at[self.index, half], refs.first_full.at[2 * self.index + half]
                plgpu.copy_gmem_to_smem(refs.dfirst.at[:, rows], to, full_of)

    def rows(self, number: jax.Array) -> pl.Slice:
        """The positions of a step."""
        return positions(self.first + number * self.stride)

    def wait(self, step: jax.Array, i: int) -> Ref:
        """The i-th array of a step, once it has arrived: (pieces, ROWS, PIECE)."""
        slot = self.slot(step, i)
        plgpu.barrier_wait(self.refs.full.at[self.index * self.slots + slot])
        width = getattr(self.refs, self.names[i]).shape[2]
        return self.refs.smem.at[self.index, slot, pl.ds(0, width // PIECE)]

    def release(self, step: jax.Array, i: int) -> None:
        """Lets the next array take the slot of the i-th."""
        plgpu.commit_smem()  # all have read
        self.copy(step, i + self.slots)

    def step(self, step: jax.Array, totals: _Totals) -> _Totals:
        """Stores all that positions of a step have, and adds to the sums over positions."""
        refs, rows, c, item = self.refs, self.rows(step), self.form.x.shape[1], jnp.int32(0)
        xs = loaded(self.wait(step, 0))
        self.release(step, 0)
        center = along_rows(mean(xs, c), PIECE)
        xs = [x - center for x in xs]
        inverse = along_rows(jax.lax.rsqrt(mean([x * x for x in xs], c) + self.form.epsilon), PIECE)
        units = [x * inverse for x in xs]
        for unit, piece in zip(units, self.pieces, strict=True):
            z = unit * same_rows(refs.scale.at[piece]) + same_rows(refs.offset.at[piece])
            store_rows(refs.z, item, rows, piece, z.astype(refs.z.dtype))
        dzs = self.pulled(step)
        totals = [
            [total + column_sums(term) for total, term in zip(parts, terms, strict=True)]
            for parts, terms in zip(
                totals, ([d * unit for d, unit in zip(dzs, units, strict=True)], dzs), strict=True
            )
        ]
        dus = [d * same_rows(refs.scale.at[piece]) for d, piece in zip(dzs, self.pieces, strict=True)]
        average = along_rows(mean(dus, c), PIECE)
        along = along_rows(mean([du * unit for du, unit in zip(dus, units, strict=True)], c), PIECE)
        last = len(self.names) - 1
        same = self.wait(step, last) if self.names[last] == "same" else None
        for i, (du, unit, piece) in enumerate(zip(dus, units, self.pieces, strict=True)):
            dx = (du - average - unit * along) * inverse
            if same is not None:
                dx += load(same.at[i], plgpu.Layout.WGMMA).astype(jnp.float32)
            store_rows(refs.dx, item, rows, piece, dx.astype(refs.dx.dtype))
        if same is not None:
            self.release(step, last)
        return totals

    def pulled(self, step: jax.Array) -> list[jax.Array]:
        """The cotangents of the layer norm, times its scale and with its offset."""
        refs = self.refs

        def compute(sums: Ref) -> jax.Array:
            for i, name in enumerate(self.names):
                if name[0] == "d":
                    d, w = self.wait(step, i), refs.w_smem.at[int(name[1:])]
                    for j, columns in enumerate(pieces(w.shape[1])):
                        multiply(sums, d.at[j], w.at[:, columns], transpose_b=True)
                    plgpu.wgmma_wait(0)
                    self.release(step, i)
            return in_layout(sums)

        dzs = in_pieces(with_sums(compute, (ROWS, self.form.x.shape[1])))
        if refs.dfirst is None:
            return dzs

        half = jax.lax.rem(step, 2)
        plgpu.barrier_wait(refs.first_full.at[2 * self.index + half])

        def add(f: jax.Array, dzs: list[jax.Array]) -> list[jax.Array]:
            d = load(refs.first_smem.at[self.index, half, f], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
            ws = [same_rows(refs.w_first.at[f, piece]) for piece in self.pieces]
            return [dz + along_rows(d, PIECE) * w for dz, w in zip(dzs, ws, strict=True)]

        return jax.lax.fori_loop(0, refs.dfirst.shape[0], add, dzs)
