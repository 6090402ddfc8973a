"""The gradient of the projections of the triangle multiplicative update, for Hopper GPUs: of x, its mask and norm.

CTAs stay on their multiprocessor with all of the weights in shared memory. Each of their warpgroups takes 64
positions at a time, normalises them in registers, and multiplies them by some columns of the weights at a time.
What gates make of the products and of the cotangents, which are copied ahead, are operands of the next products
as they are in registers. Nobody waits for another warpgroup: one multiplies while the other one gates.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.steps import shared_step
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.forms.trimul_backward import GATED, Given, OfPositions
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import ROWS, along_rows, mean, same_rows
from pallas_models.kernels.mosaic.common.device_sums import sums_of_parts
from pallas_models.kernels.mosaic.common.elementwise import elementwise
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import layout_cast, load, load_transposed
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, put, with_sums
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.row_stores import SUMMED, column_sums, store_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.trimul_project_parts import Place, Tiles, unsupported_by_both, whole_mask
from pallas_models.target import Target

_CHUNK = 32  # channels of a side that are multiplied at a time
_PIECE = 64  # channels of x in one array of registers
_SLOTS = 4  # chunks of cotangents that are copied ahead
_OTHERS = 1024  # bytes of shared memory that barriers and alignment take
_SIZES = 64, 128  # channels that all weights in shared memory, and sums in registers, leave room for


def unsupported(form: Projection[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `project_backward` does not serve a call; None if it does."""
    c, h, g = form.x.shape[2], form.hidden, form.gates
    if reason := unsupported_by_both(form):
        return reason
    if not {c, h, g} <= {*_SIZES}:
        return f"takes 64 or 128 channels, hidden channels and channels of the gate, not {c}, {h} and {g}"
    if not _warpgroups(form, target):
        return f"does not fit weights of {c} channels for {2 * h} projections and {g} gates into shared memory"
    return None


def _buffers(form: Projection[Any], warpgroups: int) -> dict[str, Buffer]:
    """The shared memory of a CTA."""
    c, x_dtype, dtype, row_bytes = form.x.shape[2], form.x.dtype, form.w.dtype, _CHUNK * form.w.dtype.itemsize
    return dict(
        w_smem=Buffer((2 * form.hidden // _CHUNK, c, 2 * _CHUNK), dtype, row_bytes),
        gate_smem=Buffer((form.gates // _CHUNK, c, _CHUNK), dtype, row_bytes),
        x_smem=Buffer((warpgroups, c // _PIECE, ROWS, _PIECE), x_dtype, 128),
        d_smem=Buffer((warpgroups, _SLOTS, _CHUNK, ROWS), dtype, 128),
        norm_smem=Buffer((2, c), jnp.dtype(jnp.float32)),
    )


def _warpgroups(form: Projection[Any], target: Target) -> int:
    """How many warpgroups a CTA has: as many as shared memory has room for, up to two; 0 if it has none."""
    room = available(target) - _OTHERS
    return next((n for n in (2, 1) if num_bytes(_buffers(form, n).values()) <= room), 0)


@shared_step
def project_backward(
    form: Projection[jax.Array], given: Given, *, of_mask: bool, target: Target, interpret: bool
) -> OfPositions:
    """The gradient of `trimul_project.project` but for the weights.

    Args:
      of_mask: whether the cotangent of the mask is wanted.
    """
    x, dtype = form.x, form.w.dtype
    b, size, c = x.shape
    warpgroups, tiles = _warpgroups(form, target), Tiles(b, size, form.rows, form.rows)
    mask = whole_mask(form.replace(padded=None))
    num_ctas = min(num_cores(target, interpret), pl.cdiv(tiles.count, warpgroups))
    walk = _Walk(tiles, form.padded_rows, num_ctas, warpgroups)
    results = launch(
        lambda refs: _Warpgroup.of(refs, walk, form.epsilon).run(),
        dict(
            x=x,
            mask=mask,
            norm=jnp.stack([form.norm_scale, form.norm_bias]),
            w=_chunks(form.w),
            bias=None if form.bias is None else _chunks(form.bias[None])[:, 0],
            w_gate=jnp.moveaxis(form.w_gate.reshape(c, -1, _CHUNK), 1, 0),
            **given._asdict(),
        ),
        dict(
            dx=jax.ShapeDtypeStruct(x.shape, x.dtype),
            z=jax.ShapeDtypeStruct(x.shape, dtype),
            sums=jax.ShapeDtypeStruct((2, c // _PIECE, num_ctas, warpgroups, 4 * SUMMED), jnp.float32),
            dmask=jax.ShapeDtypeStruct((b, ROWS * tiles.per_item), jnp.float32) if of_mask else None,
        ),
        dict(
            **{name: buffer.scratch_type for name, buffer in _buffers(form, warpgroups).items()},
            x_full=plgpu.Barrier(num_arrivals=c // _PIECE, num_barriers=warpgroups),
            d_full=plgpu.Barrier(num_barriers=warpgroups * _SLOTS),
            weights_full=plgpu.Barrier(num_arrivals=3),
        ),
        name="trimul_project_backward",
        num_ctas=num_ctas,
        num_warpgroups=warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # rows are summed by threads beside one another
    )
    dx, z, sums, *dmask = results
    dscale, dshift = sums_of_parts(sums.reshape(2, c // _PIECE, -1, SUMMED), axis=1)
    return OfPositions(
        x=dx,
        mask=dmask[0][:, :size] if of_mask else None,
        scale=dscale.reshape(c),
        shift=dshift.reshape(c),
        z=z,
    )


def _chunks(w: jax.Array) -> jax.Array:
    """Weights (C, 4, H) in chunks, each with its gates beside it: (2 H / _CHUNK, C, 2 _CHUNK)."""
    c, _, h = w.shape
    chunks = jnp.transpose(w.reshape(c, 2, 2, h // _CHUNK, _CHUNK), (1, 3, 0, 2, 4))
    return chunks.reshape(-1, c, 2 * _CHUNK)


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """The tiles that warpgroups take: every `num_ctas * warpgroups`-th one each.

    Attributes:
      tiles: of x.
      padded_rows: of a matrix of cotangents, which has no fewer than one of x.
    """

    tiles: Tiles
    padded_rows: int
    num_ctas: int
    warpgroups: int

    def steps(self, first: jax.Array) -> jax.Array:
        """How many tiles the warpgroup has whose first tile is given."""
        stride = self.num_ctas * self.warpgroups
        return jax.lax.div(self.tiles.count - first + stride - 1, stride)

    def place(self, first: jax.Array, step: jax.Array) -> Place:
        """Where a tile of this warpgroup is in x."""
        return self.tiles.place(first + step * (self.num_ctas * self.warpgroups))

    def filled(self, item: jax.Array) -> jax.Array:
        """The item of cotangents that an item of x has."""
        if self.tiles.rows == self.padded_rows:
            return item
        matrix, row = jax.lax.div(item, self.tiles.rows), jax.lax.rem(item, self.tiles.rows)
        return matrix * self.padded_rows + row


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Norm:
    """The layer norm of 64 positions.

    Attributes:
      mean: (64,).
      inverse: (64,), of the deviation, 0 for what is masked and not finite.
      masked: whether there is a mask.
    """

    mean: jax.Array
    inverse: jax.Array
    masked: bool

    @classmethod
    def of(cls, xs: list[jax.Array], factor: jax.Array | None, epsilon: float) -> Self:
        """The norm of x in pieces of its channels, with the factors of the mask."""
        c = len(xs) * _PIECE
        center = mean(xs, c)
        ds = [x - along_rows(center, _PIECE) for x in xs]
        inverse = jax.lax.rsqrt(mean([d * d for d in ds], c) + epsilon)
        if factor is not None:  # 0 times what is not finite would be NaN
            inverse = jnp.where((factor != 0.0) | (inverse > 0.0), inverse, 0.0)
        return cls(mean=center, inverse=inverse, masked=factor is not None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """A piece of x with mean 0 and variance 1."""
        inverse = along_rows(self.inverse, _PIECE)
        unit = (x - along_rows(self.mean, _PIECE)) * inverse
        return jnp.where(inverse == 0.0, 0.0, unit) if self.masked else unit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Warpgroup:
    """A warpgroup, which has all there is to do for its tiles.

    Attributes:
      first: its first tile.
      steps: how many tiles it has.
    """

    refs: Refs
    walk: _Walk
    epsilon: float
    index: jax.Array
    first: jax.Array
    steps: jax.Array

    @classmethod
    def of(cls, refs: Refs, walk: _Walk, epsilon: float) -> Self:
        """The warpgroup that runs this."""
        index = jax.lax.axis_index("warpgroup")
        first = jax.lax.axis_index("cta") * walk.warpgroups + index
        return cls(refs=refs, walk=walk, epsilon=epsilon, index=index, first=first, steps=walk.steps(first))

    @property
    def dtype(self) -> Any:
        """Of the operands of products."""
        return self.refs.w.dtype

    @property
    def pieces(self) -> list[pl.Slice]:
        """The channels of all pieces of x."""
        return [pl.Slice(i, _PIECE) for i in range(0, self.refs.x.shape[2], _PIECE)]

    @property
    def streams(self) -> list[tuple[Ref, int, int]]:
        """The cotangents in the order in which a tile takes them: the array, its first chunk, the one after it."""
        found, begin = [], 0
        for ref in (self.refs.left, self.refs.right, self.refs.gate):
            found.append((ref, begin, begin + ref.shape[1] // _CHUNK))
            begin = found[-1][-1]
        return found

    @property
    def num_chunks(self) -> int:
        """Chunks of cotangents of a tile."""
        return self.streams[-1][-1]

    def run(self) -> None:
        """Copies the weights, takes all tiles, and stores the sums over their positions."""
        refs = self.refs

        @pl.when(self.index == 0)
        def _() -> None:
            for source, target in (
                (refs.norm, refs.norm_smem),
                (refs.w, refs.w_smem),
                (refs.w_gate, refs.gate_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target, refs.weights_full)

        self.copy_x(jnp.int32(0))
        for i in range(_SLOTS):
            self.copy_chunk(jnp.int32(0), jnp.int32(i))
        plgpu.barrier_wait(refs.weights_full)
        zeros = jnp.zeros((4 * SUMMED,), jnp.float32)
        layout = plgpu.Layout.WG_STRIDED((4 * SUMMED,), vec_size=2)
        zeros = layout_cast(zeros, layout)
        totals = jax.lax.fori_loop(0, self.steps, self.step, [[zeros] * len(self.pieces)] * 2)
        cta = jax.lax.axis_index("cta")
        for i, parts in enumerate(totals):
            for j, total in enumerate(parts):
                refs.sums.at[i, j, cta, self.index][...] = total

    def copy_x(self, step: jax.Array) -> None:
        """Starts copies of the positions of a step, if there is one."""
        refs = self.refs

        @pl.when(step < self.steps)
        def _() -> None:
            item, rows = self.walk.place(self.first, step)
            for i, channels in enumerate(self.pieces):
                slot = refs.x_smem.at[self.index, i]
                copy_rows(refs.x, item, rows, channels, slot, refs.x_full, self.index, row_bytes=128)

    def read_x(self) -> list[jax.Array]:
        """The positions that were copied, piece by piece."""
        slots = (self.refs.x_smem.at[self.index, i] for i in range(len(self.pieces)))
        return [load(slot, plgpu.Layout.WGMMA).astype(jnp.float32) for slot in slots]

    def slot(self, step: jax.Array, chunk: jax.Array) -> jax.Array:
        """The slot of a chunk of cotangents."""
        return jax.lax.rem(step * self.num_chunks + chunk, _SLOTS)

    def copy_chunk(self, step: jax.Array, chunk: jax.Array) -> None:
        """Starts the copy of a chunk of cotangents; past the end of a step it is one of the next step, if any."""
        slot, past = self.slot(step, chunk), chunk >= self.num_chunks
        step, chunk = step + past, chunk - jnp.where(past, self.num_chunks, 0)
        item, rows = self.walk.place(self.first, step)
        item = self.walk.filled(item)
        target, full = self.refs.d_smem.at[self.index, slot], self.refs.d_full.at[self.index * _SLOTS + slot]
        for ref, begin, end in self.streams:

            @pl.when((step < self.steps) & (begin <= chunk) & (chunk < end))
            def _(ref: Ref = ref, begin: int = begin) -> None:
                channels = pl.ds((chunk - begin) * _CHUNK, _CHUNK)
                plgpu.copy_gmem_to_smem(ref.at[item, channels, rows], target, full)

    def take_chunk(self, step: jax.Array, chunk: jax.Array) -> jax.Array:
        """A chunk of cotangents, (64, _CHUNK); its slot is filled again."""
        slot = self.slot(step, chunk)
        plgpu.barrier_wait(self.refs.d_full.at[self.index * _SLOTS + slot])
        d = load_transposed(self.refs.d_smem.at[self.index, slot], plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # all have read
        self.copy_chunk(step, chunk + _SLOTS)
        return d

    def step(self, step: jax.Array, totals: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Stores all that positions of a step have, and adds to the sums over positions."""
        refs, (item, rows) = self.refs, self.walk.place(self.first, step)
        factor = None
        if refs.mask is not None:
            factor = load(refs.mask.at[item, rows], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
        plgpu.barrier_wait(refs.x_full.at[self.index])
        xs = self.read_x()
        norm = _Norm.of(xs, factor, self.epsilon)
        zs = [
            (norm(x) * self.vector(0, channels) + self.vector(1, channels)).astype(self.dtype)
            for x, channels in zip(xs, self.pieces, strict=True)
        ]
        for z, channels in zip(zs, self.pieces, strict=True):
            store_rows(refs.z, item, rows, channels, z)
        dz, dmask = _Block(self, step, zs, factor).pulled()
        if refs.dmask is not None:
            refs.dmask.at[item, rows][...] = dmask
        # Read again: kept, it would take the registers of the products.
        xs = self.read_x()
        plgpu.commit_smem()  # all have read
        self.copy_x(step + 1)
        return self.finish((item, rows), norm, xs, dz, totals)

    def finish(
        self, place: Place, norm: _Norm, xs: list[jax.Array], dz: jax.Array, totals: list[list[jax.Array]]
    ) -> list[list[jax.Array]]:
        """Stores dx, given x and dz, and adds to the sums over positions."""
        (item, rows), c = place, len(xs) * _PIECE
        dzs = [dz[:, i.start : i.start + _PIECE] for i in self.pieces]
        units = [norm(x) for x in xs]
        dus = [d * self.vector(0, channels) for d, channels in zip(dzs, self.pieces, strict=True)]
        average = along_rows(mean(dus, c), _PIECE)
        along = along_rows(mean([du * unit for du, unit in zip(dus, units, strict=True)], c), _PIECE)
        inverse = along_rows(norm.inverse, _PIECE)
        for du, unit, channels in zip(dus, units, self.pieces, strict=True):
            dx = ((du - average - unit * along) * inverse).astype(self.refs.x.dtype)
            store_rows(self.refs.dx, item, rows, channels, dx)
        terms = [d * unit for d, unit in zip(dzs, units, strict=True)], dzs
        return [
            [total + column_sums(term) for total, term in zip(parts, more, strict=True)]
            for parts, more in zip(totals, terms, strict=True)
        ]

    def vector(self, i: int, channels: pl.Slice) -> jax.Array:
        """The scale (0) or the bias (1) of the norm, equal for all positions."""
        return same_rows(self.refs.norm_smem.at[i, channels])


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """The positions of a step of a warpgroup, whose cotangents are multiplied by all weights.

    Attributes:
      zs: the normalised positions, piece by piece.
      factor: of the mask, or None.
    """

    warpgroup: _Warpgroup
    step: jax.Array
    zs: list[jax.Array]
    factor: jax.Array | None

    @property
    def refs(self) -> Refs:
        return self.warpgroup.refs

    def pulled(self) -> tuple[jax.Array, jax.Array | None]:
        """The cotangents of the normalised positions, (64, C), and of the mask."""
        shape = ROWS, len(self.zs) * _PIECE
        # What float16 cannot hold at its own size is summed apart.
        wide = self.warpgroup.dtype != jnp.float16
        return with_sums(self.add_all, *[shape] * (1 if wide else 2))

    def add_all(self, *sums: Ref) -> tuple[jax.Array, jax.Array | None]:
        """`pulled` given sums for the cotangents, of projections and of their gates."""
        of_projections, of_gates, of_gate, shrink = (self.refs.scales[i] for i in range(4))
        wide, of_mask = len(sums) == 1, self.refs.dmask is not None
        by = (of_projections, of_gates) if wide else (shrink, 1.0)
        factors = [self.along(x) for x in (by[0], by[1] * GATED)]
        dmask = self.along(0.0) if of_mask else None
        sides = 2 * self.refs.left.shape[1] // _CHUNK
        add_side = functools.partial(self.add_side, sums, factors)
        dmask = jax.lax.fori_loop(0, sides, add_side, dmask)
        if dmask is not None:
            dmask *= of_projections * shrink
        if not wide:
            of_projections, of_gates = of_projections / of_gate, of_gates / of_gate
            put(sums[0], in_layout(sums[0]) * of_projections + in_layout(sums[1]) * of_gates)
        jax.lax.fori_loop(
            0, self.warpgroup.num_chunks - sides, functools.partial(self.add_gate, sums[0], sides), None
        )
        dz = in_layout(sums[0])
        return dz if wide else dz * of_gate, dmask

    def along(self, scale: jax.Array | float) -> jax.Array:
        """A factor of all positions times the factor of their mask."""
        scale = jnp.float32(scale)
        if self.factor is None:
            return layout_cast(jnp.full(ROWS, scale), plgpu.Layout.WGMMA.reduce(1))
        return self.factor * scale

    def add_side(
        self, sums: tuple[Ref, ...], factors: list[jax.Array], j: jax.Array, dmask: jax.Array | None
    ) -> jax.Array | None:
        """Adds the products of the cotangents of chunk j of left or right, and the cotangents of the mask."""
        refs, dtype = self.refs, self.warpgroup.dtype
        y = self.product(j)
        d = self.warpgroup.take_chunk(self.step, j)
        masked, of_mask = self.factor is not None, dmask is not None

        def pulled(p: Any, g: Any, d: Any, of_p: Any, of_g: Any) -> tuple[Any, ...]:
            d, t = d.astype(jnp.float32), jnp.tanh(0.5 * g)
            if masked:  # 0 times what is not finite would be NaN
                d = jnp.where(of_p == 0.0, 0.0, d)
            s = 0.5 * t + 0.5
            value = p * s
            found = (d * of_p * s).astype(dtype), (d * of_g * (value * (0.5 - 0.5 * t))).astype(dtype)
            return (*found, d * value) if of_mask else found

        dp, dg, *of_factor = elementwise(pulled, y[:, :_CHUNK], y[:, _CHUNK:], d, rows=factors)
        for i, cotangent in enumerate((dp, dg)):
            w = refs.w_smem.at[j, :, pl.ds(i * _CHUNK, _CHUNK)]
            multiply(sums[min(i, len(sums) - 1)], cotangent, w, transpose_b=True)
        if dmask is not None:
            dmask += jnp.sum(of_factor[0], axis=1)
        plgpu.wgmma_wait(0)
        return dmask

    def product(self, j: jax.Array) -> jax.Array:
        """Chunk j of projections and their gates, (64, 2 _CHUNK)."""
        refs, pieces = self.refs, self.warpgroup.pieces

        def compute(sums: Ref) -> jax.Array:
            for z, channels in zip(self.zs, pieces, strict=True):
                multiply(sums, z, refs.w_smem.at[j, channels])
            return in_layout(sums)

        y = with_sums(compute, (ROWS, 2 * _CHUNK))
        if refs.bias is not None:
            y += same_rows(refs.bias.at[j])
        return y

    def add_gate(self, sums: Ref, first: int, j: jax.Array, _: None) -> None:
        """Adds the product of chunk j of the cotangents of the gate, which follow `first` others in a tile."""
        d = self.warpgroup.take_chunk(self.step, first + j)
        multiply(sums, d, self.refs.gate_smem.at[j], transpose_b=True)
        plgpu.wgmma_wait(0)
