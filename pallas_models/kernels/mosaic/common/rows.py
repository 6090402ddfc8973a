"""Rows in the registers of threads: how threads share them, read and write them, and add up what they have.

Nothing here is Hopper's: memory is read and written by loads and stores of up to 16 bytes, numbers of a row are
exchanged by shuffles and through shared memory, and threads wait for one another at barriers that every GPU has.
It has been compiled for Hopper only.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import memory, rows_ptx
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.row_config import WARP, WARPGROUP, Config
from pallas_models.kernels.mosaic.common.vectors import vector_length

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")

Kind = Literal["add", "max"]


def _past_columns(blocks: "Blocks", dtype: jnp.dtype) -> float:
    """What a block past the last column has: anything where blocks end with the rows, as nothing is compared."""
    return jnp.nan if blocks.have_whole_columns and jnp.issubdtype(dtype, jnp.floating) else 0


def _interpreted_load(
    self: "Blocks", ref: Ref, i: jax.Array, j: jax.Array, repeat: int | None = None
) -> jax.Array:
    (rows, width), n = self.shape, ref.shape[-1]
    first = jnp.minimum(j * width, max(n - width, 0))
    columns = pl.ds(first, min(width, n))

    def aligned(x: jax.Array, axis: int, size: int, distance: jax.Array) -> jax.Array:
        """x, which was read from that many places before its beginning on, in an array of `size`."""
        x = jnp.pad(x, [(0, size - x.shape[axis]) if a == axis else (0, 0) for a in range(x.ndim)])
        kept = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < size - distance
        past = _past_columns(self, x.dtype) if axis == x.ndim - 1 else 0
        return jnp.where(kept, jnp.roll(x, -distance, axis), jnp.asarray(past, x.dtype))

    if len(ref.shape) == 1:
        return jnp.broadcast_to(aligned(ref[columns], 0, width, j * width - first), self.shape)
    if repeat is not None:
        places = [jax.lax.rem(jax.lax.div(i * rows + r, repeat), ref.shape[0]) for r in range(rows)]
        return aligned(jnp.stack([ref[place, columns] for place in places]), 1, width, j * width - first)
    top = jnp.minimum(i * rows, max(self.m - rows, 0))
    x = aligned(ref[pl.ds(top, min(rows, self.m)), columns], 0, rows, i * rows - top)
    return aligned(x, 1, width, j * width - first)


def _interpreted_look_up(self: "Blocks", ref: Ref, i: jax.Array, j: jax.Array, rows: jax.Array) -> jax.Array:
    height, width = self.shape
    past = _past_columns(self, ref.dtype)
    table = jnp.pad(ref[...], [(0, 0), (0, self.row_warpgroups * width)], constant_values=past)
    is_row = (i * height + jnp.arange(height) < self.m)[:, None]
    found = jax.lax.dynamic_slice_in_dim(table, j * width, width, axis=1)[jnp.reshape(rows, height)]
    return jnp.where(is_row, found, jnp.zeros((), ref.dtype))


def _interpreted_store(self: "Blocks", ref: Ref, i: jax.Array, j: jax.Array, x: jax.Array) -> None:
    """Blocks are whole, cut off or past the end."""
    (rows, width), n = self.shape, ref.shape[-1]
    for height in {rows, self.m % rows} - {0}:
        for length in {width, n % width} - {0}:
            left, below = n - j * width, self.m - i * rows
            is_so = (jnp.minimum(below, rows) == height) & (jnp.minimum(left, width) == length)

            @pl.when(is_so)
            def _(height: int = height, length: int = length) -> None:
                ref[pl.ds(i * rows, height), pl.ds(j * width, length)] = x[:height, :length]


def _interpreted_store_numbers(self: "Blocks", ref: Ref, row: int, i: jax.Array, x: jax.Array) -> None:
    rows = self.shape[0]
    for height in {rows, self.m % rows} - {0}:

        @pl.when(jnp.minimum(self.m - i * rows, rows) == height)
        def _(height: int = height) -> None:
            ref[row, pl.ds(i * rows, height)] = x.reshape(rows)[:height]


def _interpreted_load_numbers(
    self: "Blocks", ref: Ref, i: jax.Array, columns: jax.Array | None = None, *, row: int = 0
) -> jax.Array:
    if columns is None and len(ref.shape) == 2:
        ref = ref.at[row]
    rows, n = self.shape[0], ref.shape[-1]
    places = i * rows + jnp.arange(rows) if columns is None else jnp.reshape(columns, rows)
    is_there = (i * rows + jnp.arange(rows) < self.m) & (places >= 0) & (places < n)
    numbers = []
    for r in range(rows):
        own, place = jnp.where(is_there[r], i * rows + r, 0), jnp.where(is_there[r], places[r], 0)
        numbers.append(ref[place] if len(ref.shape) == 1 else ref[own, place])
    return jnp.where(is_there, jnp.stack(numbers), jnp.zeros((), ref.dtype)).reshape(self.numbers_shape)


def _interpreted_store_at(self: "Blocks", ref: Ref, i: jax.Array, columns: jax.Array, x: jax.Array) -> None:
    rows = self.shape[0]
    columns, x = jnp.reshape(columns, rows), jnp.reshape(x, rows)
    for r in range(rows):

        @pl.when((i * rows + r < self.m) & (columns[r] >= 0) & (columns[r] < self.n))
        def _(r: int = r) -> None:
            ref[i * rows + r, columns[r]] = x[r]


def _interpreted_fold(self: "Blocks", kind: "Kind", x: jax.Array) -> jax.Array:
    add: Callable[..., jax.Array] = jnp.sum if kind == "add" else jnp.max
    parts = x.reshape(self.shape[0], self.columns, self.of_threads.step, self.vector)
    return add(parts, axis=(1, 3))


def _interpreted_unfold(self: "Blocks", x: jax.Array) -> jax.Array:
    rows, threads = x.shape
    parts = jnp.broadcast_to(x[:, None, :, None], (rows, self.columns, threads, self.vector))
    return parts.reshape(self.shape)


def _interpreted_reduce(
    self: "Blocks", refs: Refs, slot: jax.Array | int, kind: "Kind", *arrays: jax.Array
) -> list[jax.Array]:
    """In the order of a GPU: the numbers of a thread, and then the threads'."""
    add: Callable[..., jax.Array] = jnp.sum if kind == "add" else jnp.max
    rows, pieces = self.shape[0], self.row_warpgroups
    total = jnp.concatenate([add(add(x.reshape(rows, -1, self.step), axis=1), axis=1) for x in arrays])
    if pieces > 1:
        warpgroup = jax.lax.axis_index("warpgroup")
        group = jax.lax.div(warpgroup, pieces)
        refs.sums[slot, warpgroup, pl.ds(0, total.size)] = total
        added = refs.added.at[slot * self.groups + group]
        plgpu.barrier_arrive(added)
        plgpu.barrier_wait(added)
        parts = [refs.sums[slot, group * pieces + piece, pl.ds(0, total.size)] for piece in range(pieces)]
        total = add(jnp.stack(parts), axis=0)
    return [part.reshape(self.numbers_shape) for part in jnp.split(total, len(arrays))]


def _interpreted_store_sums(self: "Blocks", refs: Refs, ref: Ref, row: jax.Array, x: jax.Array) -> None:
    """In the order of a GPU: the rows of a warpgroup, and then the warpgroups."""
    total, width, warpgroup = jnp.sum(x, axis=0), self.shape[1], jax.lax.axis_index("warpgroup")
    piece = jax.lax.rem(warpgroup, self.row_warpgroups)
    if self.groups > 1:
        refs.columns[warpgroup] = total
        memory.meet(refs)
        total = sum_of(refs.columns[k * self.row_warpgroups + piece] for k in range(self.groups))
        memory.meet(refs)
    for length in {width, self.n % width} - {0}:

        @pl.when((warpgroup == piece) & (jnp.minimum(self.n - piece * width, width) == length))
        def _(length: int = length) -> None:
            ref[row, pl.ds(piece * width, length)] = total[:length]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of rows (m, n) that warpgroups hold; block (i, j) has blocks of i times as many rows before it.

    Attributes:
      threads: of a row.
      vector: elements that lie side by side in a thread.
      rows: that a thread has a part of.
      columns: vectors of a row that a thread has.
      warpgroups: of a CTA.
      keep: whether threads keep the blocks of all steps.
      walkers: CTAs that walk the blocks, each some of them and past the end; None where each has a block.
    """

    m: int
    n: int
    threads: int
    vector: int
    rows: int
    columns: int
    warpgroups: int
    keep: bool
    walkers: int | None = None

    @classmethod
    def of(cls, config: Config, x: jax.Array | jax.ShapeDtypeStruct, walkers: int | None = None) -> "Blocks":
        """The blocks of x (m, n)."""
        m, n = x.shape
        vector = vector_length(n, x.dtype)
        return cls(
            m=m,
            n=n,
            threads=config.threads,
            vector=vector,
            rows=config.rows,
            columns=pl.cdiv(min(config.block_n, n), config.threads * vector),
            warpgroups=config.warpgroups,
            keep=config.keep,
            walkers=walkers,
        )

    @property
    def row_warpgroups(self) -> int:
        """Warpgroups that share a row."""
        return max(self.threads // WARPGROUP, 1)

    @property
    def row_warps(self) -> int:
        """Warps of a warpgroup that share a row."""
        return max(min(self.threads, WARPGROUP) // WARP, 1)

    @property
    def row_lanes(self) -> int:
        """Threads of a warp that share a row."""
        return min(self.threads, WARP)

    @property
    def step(self) -> int:
        """Columns of a row that a warpgroup has in one vector of each thread."""
        return self.row_warps * self.row_lanes * self.vector

    @property
    def rows_at_once(self) -> int:
        """Rows that a warpgroup has in one vector of each thread."""
        return WARPGROUP // (self.row_warps * self.row_lanes)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a block."""
        return self.rows * self.rows_at_once, self.columns * self.step

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """The shape of an array of a number for each row: () where it is one number; Mosaic has none of (1,)."""
        rows = self.shape[0]
        return () if rows == 1 else (rows,)

    @property
    def steps(self) -> int:
        """Blocks of a row that each of its warpgroups has."""
        return pl.cdiv(self.n, self.shape[1] * self.row_warpgroups)

    @property
    def are_held(self) -> bool:
        """Whether threads hold rows whole."""
        return self.keep or self.steps == 1

    @property
    def groups(self) -> int:
        """Warpgroups, or sets of warpgroups that share rows, of a CTA."""
        return self.warpgroups // self.row_warpgroups

    @property
    def row_groups(self) -> int:
        """Warps, or sets of warps that share rows, of a CTA."""
        return self.groups * (WARPGROUP // WARP // self.row_warps)

    @property
    def num_ctas(self) -> int:
        return self.walkers or pl.cdiv(self.m, self.shape[0] * self.groups)

    @property
    def are_whole(self) -> bool:
        """Whether no block that a warpgroup has reaches past the last row."""
        return self.walkers is None and self.m % (self.shape[0] * self.groups) == 0

    @property
    def have_whole_columns(self) -> bool:
        """Whether blocks end with the rows, so that no thread asks which of its columns lie before the end."""
        return self.n % (self.shape[1] * self.row_warpgroups) == 0

    @property
    def layout(self) -> Any:
        """Where a block lies: a step in all threads of its rows, then the next one."""
        lanes = WARP // self.row_lanes, self.row_lanes * self.vector
        tiles = (self.rows_at_once, self.step), lanes, (1, self.vector)
        found = _arrays.TiledLayout(_arrays.Tiling(tiles), (-6, -5), (-4, -3), -1, _check_canonical=False)
        found = found.canonicalize()
        return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)

    @property
    def numbers_layout(self) -> Any:
        """Where a number for each row lies: in all threads that share the row."""
        return self.layout.reduce(1) if self.numbers_shape else plgpu.Layout.WG_SPLAT

    @property
    def of_threads(self) -> "Blocks":
        """Blocks of one element for each row in each thread."""
        return dataclasses.replace(self, vector=1, columns=1)

    def place(self) -> jax.Array:
        """The block of rows that this warpgroup has."""
        group = jax.lax.div(jax.lax.axis_index("warpgroup"), self.row_warpgroups)
        return jax.lax.axis_index("cta") * self.groups + group

    def column(self, step: jax.Array | int) -> jax.Array:
        """The block of columns that this warpgroup has in a step."""
        return step * self.row_warpgroups + jax.lax.rem(jax.lax.axis_index("warpgroup"), self.row_warpgroups)

    def inside(self, j: jax.Array) -> jax.Array | None:
        """Which elements of a block lie before the end of their row; None where all do."""
        if self.have_whole_columns:
            return None
        return memory.iota(self.shape, 1, self.layout) < self.n - j * self.shape[1]

    @meaning(lambda self, x: x)
    def again(self, x: jax.Array) -> jax.Array:
        """A block once more: what is computed from it is not what was computed before, and kept, but anew."""
        result = plgpu.ShapeDtypeStruct(self.shape, x.dtype, layout=self.layout)
        again = plgpu.inline_mgpu(arg_types=(self.layout,), return_type=result)
        block: jax.Array = again(functools.partial(rows_ptx.again, self))(x)
        return block

    @meaning(lambda self, x: x)
    def rounded(self, x: jax.Array) -> jax.Array:
        """A number for each row, as memory has it: compilers fuse a product with the difference that follows."""
        result = plgpu.ShapeDtypeStruct(self.numbers_shape, jnp.float32, layout=self.numbers_layout)
        rounded = plgpu.inline_mgpu(arg_types=(self.numbers_layout,), return_type=result)
        numbers: jax.Array = rounded(functools.partial(rows_ptx.rounded, self))(x)
        return numbers

    @meaning(_interpreted_fold)
    def fold(self, kind: Kind, x: jax.Array) -> jax.Array:
        """The sum or the maximum of what each thread has of each row, float32, as a block `of_threads`."""
        result = plgpu.ShapeDtypeStruct(self.of_threads.shape, jnp.float32, layout=self.of_threads.layout)
        fold = plgpu.inline_mgpu(arg_types=(self.layout,), return_type=result)
        folded: jax.Array = fold(lambda _, x: rows_ptx.fold(self, kind, x))(x)
        return folded

    @meaning(_interpreted_unfold)
    def unfold(self, x: jax.Array) -> jax.Array:
        """A block, all elements of a row in a thread one number of `fold`."""
        result = plgpu.ShapeDtypeStruct(self.shape, jnp.float32, layout=self.layout)
        unfold = plgpu.inline_mgpu(arg_types=(self.of_threads.layout,), return_type=result)
        block: jax.Array = unfold(functools.partial(rows_ptx.unfold, self))(x)
        return block

    def full(self, value: float) -> jax.Array:
        """A block of one number, float32."""
        return memory.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def index(self, i: jax.Array) -> jax.Array:
        """The number of each row of block i, int32."""
        first = i * self.shape[0]
        return first + memory.iota(self.numbers_shape, 0, self.numbers_layout) if self.numbers_shape else first

    def spread(self, x: jax.Array) -> jax.Array:
        """A number for each row as a block."""
        return jax.lax.broadcast_in_dim(x, self.shape, range(x.ndim))

    @meaning(_interpreted_load)
    def load(self, ref: Ref, i: jax.Array, j: jax.Array, repeat: int | None = None) -> jax.Array:
        """Loads block (i, j) of rows (M, N), or columns j of a vector (N,) for each row; 0 past the end.

        A block that begins past the last column may be other memory: where blocks end with the rows.

        Args:
          repeat: loads row `r // repeat` for row r, of W rows (W, N) that begin again after the last one.
        """
        result = plgpu.ShapeDtypeStruct(self.shape, ref.dtype, layout=self.layout)
        splat = plgpu.Layout.WG_SPLAT
        load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat), return_type=result)
        block: jax.Array = load(functools.partial(rows_ptx.load, self, repeat))(ref, *_numbers(i, j))
        return block

    @meaning(_interpreted_look_up)
    def look_up(self, ref: Ref, i: jax.Array, j: jax.Array, rows: jax.Array) -> jax.Array:
        """Loads columns j of a row of `ref` (M, N) for each row of block i, as `load` does; 0 past the end.

        Args:
          rows: which row of `ref` each takes: there is one.
        """
        result = plgpu.ShapeDtypeStruct(self.shape, ref.dtype, layout=self.layout)
        splat = plgpu.Layout.WG_SPLAT
        load = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), splat, splat, self.numbers_layout), return_type=result
        )
        rows = memory.layout_cast(rows, self.numbers_layout)
        block: jax.Array = load(functools.partial(rows_ptx.look_up, self))(ref, *_numbers(i, j), rows)
        return block

    @meaning(_interpreted_store)
    def store(self, ref: Ref, i: jax.Array, j: jax.Array, x: jax.Array) -> None:
        """Stores block (i, j) of rows (M, N), as far as it lies inside."""
        splat = plgpu.Layout.WG_SPLAT
        store = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, self.layout))
        store(functools.partial(rows_ptx.store, self))(ref, *_numbers(i, j), x)

    @meaning(_interpreted_store_numbers)
    def store_numbers(self, ref: Ref, row: int, i: jax.Array, x: jax.Array) -> None:
        """Stores a number for each row of block i, in a row of `ref`, (K, M), float32."""
        splat = plgpu.Layout.WG_SPLAT
        store = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, self.numbers_layout))
        x = memory.layout_cast(x, self.numbers_layout)
        store(functools.partial(rows_ptx.store_numbers, self, row))(ref, *_numbers(i), x)

    @meaning(_interpreted_load_numbers)
    def load_numbers(self, ref: Ref, i: jax.Array, columns: jax.Array | None = None, *, row: int = 0) -> jax.Array:
        """Loads a number for each row of block i, from a vector (M,), or a row of (K, M); 0 past the end.

        Args:
          columns: for each row the column of its number, of rows (M, N), or of a vector (N,).
          row: the row of (K, M).
        """
        splat = plgpu.Layout.WG_SPLAT
        others = () if columns is None else (columns,)
        result = plgpu.ShapeDtypeStruct(self.numbers_shape, ref.dtype, layout=self.numbers_layout)
        types = plgpu.RefType(), splat, *(self.numbers_layout for _ in others)
        load = plgpu.inline_mgpu(arg_types=types, return_type=result)
        numbers: jax.Array = load(functools.partial(rows_ptx.load_numbers, self, row))(ref, *_numbers(i), *others)
        return numbers

    @meaning(_interpreted_store_at)
    def store_at(self, ref: Ref, i: jax.Array, columns: jax.Array, x: jax.Array) -> None:
        """Stores a number for each row of block i at its column of rows (M, N), if there is one."""
        splat = plgpu.Layout.WG_SPLAT
        store = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, self.numbers_layout, self.numbers_layout))
        x = memory.layout_cast(x, self.numbers_layout)
        store(functools.partial(rows_ptx.store_at, self))(ref, *_numbers(i), columns, x)

    def scratch_types(self, reductions: int, interpret: bool, *, arrays: int = 1) -> dict[str, Any]:
        """Shared memory for so many reductions of some arrays each, where threads of several warps share a row."""
        numbers, warps = arrays * self.shape[0], self.row_warps * self.row_warpgroups
        if interpret and self.row_warpgroups > 1:
            added = plgpu.Barrier(num_arrivals=self.row_warpgroups, num_barriers=reductions * self.groups)
            return dict(sums=plgpu.SMEM((reductions, self.warpgroups, numbers), jnp.float32), added=added)
        if interpret or warps == 1:
            return {}
        return dict(sums=plgpu.SMEM((reductions, self.groups, numbers, warps), jnp.float32))

    def reduce(self, refs: Refs, slot: jax.Array | int, kind: Kind, x: jax.Array) -> jax.Array:
        """The sum or the maximum of every row of a block, float32; NaN where the row has one."""
        (total,) = self.reduce_all(refs, slot, kind, x)
        return total

    @meaning(_interpreted_reduce)
    def reduce_all(self, refs: Refs, slot: jax.Array | int, kind: Kind, *arrays: jax.Array) -> list[jax.Array]:
        """`reduce` of several blocks at once.

        Args:
          slot: a number of this reduction alone: a warp may read its sums while another stores the next ones.
        """
        numbers = plgpu.ShapeDtypeStruct(self.numbers_shape, jnp.float32, layout=self.numbers_layout)
        results, kinds = [numbers] * len(arrays), [self.layout] * len(arrays)
        if self.row_warps * self.row_warpgroups == 1:
            reduce = plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=results)
            alone: list[jax.Array] = reduce(lambda _, *xs: rows_ptx.reduce(self, kind, None, *xs))(*arrays)
            return alone
        reduce = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *kinds), return_type=results)
        emit = functools.partial(rows_ptx.reduce, self, kind)
        totals: list[jax.Array] = reduce(lambda _, sums, *xs: emit(sums, *xs))(refs.sums.at[slot], *arrays)
        return totals

    def sums_scratch_types(self, interpret: bool) -> dict[str, Any]:
        """Shared memory for `store_sums`, where several warps have rows of their own."""
        if self.row_groups == 1:
            return {}
        width = self.shape[1]
        shape = (self.warpgroups, width) if interpret else (self.row_groups, self.row_warpgroups * width)
        return dict(columns=plgpu.SMEM(shape, jnp.float32)) | memory.meeting(self.warpgroups, interpret)

    @meaning(_interpreted_store_sums)
    def store_sums(self, refs: Refs, ref: Ref, row: jax.Array, x: jax.Array) -> None:
        """Stores the sums of columns, over all rows of a CTA, in a row of `ref`, (K, N), float32.

        Threads hold rows whole, in a step.

        Args:
          x: a block, float32: rows, or sums of rows.
        """
        splat = plgpu.Layout.WG_SPLAT
        kinds = plgpu.RefType(), splat, splat, self.layout
        columns = () if self.row_groups == 1 else (refs.columns,)
        store = plgpu.inline_mgpu(arg_types=(*kinds, *[plgpu.RefType()] * len(columns)))
        store(functools.partial(rows_ptx.store_sums, self))(ref, *_numbers(row, self.column(0)), x, *columns)


def _numbers(*values: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(value, jnp.int32) for value in values]


def sum_of(blocks: Iterable[jax.Array]) -> jax.Array:
    """The sum of some blocks, of which there is one at least."""
    return functools.reduce(operator.add, blocks)
