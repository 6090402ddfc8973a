"""Tiles of arrays in device memory, which a warpgroup loads straight into registers and stores from there.

A thread loads neighbours in a row, wherever the rows of the tile lie, and nothing past the end of an array, which
may have any number of rows and columns. Nothing here is Hopper's, but it has been compiled for Hopper only.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.mlir import ir

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import memory
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.vectors import address, load_vector, store_vector

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")

THREADS, _LANES, _WARPS = 128, 32, 4  # threads of a warpgroup and of a warp, warps of a warpgroup
_MOST_COLUMNS = 16384  # of a row that a warpgroup holds, 128 numbers a thread


def too_wide(width: int) -> str | None:
    """Why a warpgroup does not hold a row of so many columns; None if it does."""
    return f"takes rows of up to {_MOST_COLUMNS} columns, not {width}" if width > _MOST_COLUMNS else None


def _rows_of(array: jax.Array, rows: jax.Array) -> jax.Array:
    is_row = (rows >= 0) & (rows < len(array))
    found = array[jnp.where(is_row, rows, 0)]
    return jnp.where(is_row.reshape(-1, *[1] * (array.ndim - 1)), found, jnp.zeros((), array.dtype))


def _columns_of(array: jax.Array, column: jax.Array | int, count: int) -> jax.Array:
    padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, count)])
    return jax.lax.dynamic_slice_in_dim(padded, column, count, axis=-1)


def _interpreted_load(self: "Tile", ref: Ref, rows: jax.Array, column: jax.Array | int = 0) -> jax.Array:
    return _columns_of(_rows_of(ref[...], rows), column, self.columns)


def _interpreted_load_row(self: "Tile", ref: Ref, column: jax.Array | int = 0) -> jax.Array:
    return _columns_of(ref[...], column, self.columns)


def _interpreted_store(self: "Tile", ref: Ref, rows: jax.Array, x: jax.Array, column: jax.Array | int = 0) -> None:
    (m, n), column = ref.shape, jnp.asarray(column, jnp.int32)

    @pl.loop(0, len(rows))
    def _(i: jax.Array) -> None:
        row, values = rows[i], jax.lax.dynamic_index_in_dim(x, i, keepdims=False).astype(ref.dtype)
        for size in {min(self.columns, n), n % self.columns} - {0}:  # a whole piece of the row, and its last one

            @pl.when((row >= 0) & (row < m) & (jnp.minimum(n - column, self.columns) == size))
            def _(size: int = size) -> None:
                ref.at[row, pl.ds(column, size)][...] = values[:size]


def _interpreted_bits(
    self: "Tile", ref: Ref, first: jax.Array, end: jax.Array, value: jax.Array | None, count: int
) -> jax.Array:
    k = jax.lax.broadcasted_iota(jnp.int32, (self.rows, count), 1)
    place = first + k * self.rows + jax.lax.broadcasted_iota(jnp.int32, k.shape, 0)
    numbers = _rows_of(ref[...], place.ravel()).reshape(k.shape)
    counts = (numbers != 0 if value is None else numbers == value) & (place < jnp.minimum(end, ref.shape[0]))
    return jnp.sum(jnp.left_shift(counts.astype(jnp.int32), k), axis=1)


def _interpreted_sum_marked(self: "Tile", ref: Ref, first: jax.Array, bits: jax.Array, count: int) -> jax.Array:
    rows = jnp.arange(self.rows, dtype=jnp.int32)
    places = [jnp.where((bits >> k) & 1 != 0, first + k * self.rows + rows, -1) for k in range(count)]
    loaded = (_interpreted_load(self, ref, rows).astype(jnp.float32) for rows in places)
    return functools.reduce(jnp.add, loaded)


def _interpreted_leave_sums(self: "Tile", ref: Ref, x: jax.Array) -> None:
    total = jnp.sum(x, axis=0).reshape(1, -1)
    others = jnp.zeros((self.row_warps - 1, total.shape[1]), x.dtype)
    ref.at[pl.ds(jax.lax.axis_index("warpgroup") * self.row_warps, self.row_warps)][...] = jnp.concatenate(
        [total, others]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A tile of (rows, columns) in the registers of a warpgroup: as many rows as threads allow.

    Attributes:
      threads: of a row, a power of two up to 128.
      vector: neighbours in a row that a thread holds; the width of an array that is loaded is a multiple of it.
      pieces: how many vectors of a row a thread holds.
    """

    threads: int
    vector: int
    pieces: int = 1

    @staticmethod
    def of_rows(width: int, vector: int, most: int = THREADS) -> "Tile":
        """A tile of whole rows: in up to `most` threads, each with a vector or several."""
        threads = max(min(pl.next_power_of_2(pl.cdiv(width, vector)), most), 2)  # Mosaic spreads no single column
        return Tile(threads, vector, pl.cdiv(width, threads * vector))

    @property
    def rows(self) -> int:
        """How many rows the threads hold together."""
        return THREADS // self.threads

    @property
    def columns(self) -> int:
        """How many numbers of a row its threads hold."""
        return self.threads * self.vector * self.pieces

    @property
    def layout(self) -> Any:
        """Which thread has which numbers."""
        lanes = min(self.threads, _LANES)
        tiles = (
            (THREADS // self.threads, self.threads * self.vector),  # all threads
            (_LANES // lanes, lanes * self.vector),  # a warp
            (1, self.vector),  # a thread
        )
        found = _arrays.TiledLayout(_arrays.Tiling(tiles), (-6, -5), (-4, -3), -1, _check_canonical=False)
        found = found.canonicalize()
        return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)

    @property
    def row_layout(self) -> Any:
        """Which thread has which of the numbers for each row."""
        return self.layout.reduce(1)

    def index(self) -> jax.Array:
        """The number of each row of the tile, (rows,) int32."""
        return memory.iota((self.rows,), 0, self.row_layout)

    def full(self, value: float) -> jax.Array:
        """A tile of one number, float32."""
        return memory.layout_cast(jnp.full((self.rows, self.columns), value, jnp.float32), self.layout)

    def across(self, x: jax.Array) -> jax.Array:
        """A number for each row, (rows,), as a tile."""
        return jax.lax.broadcast_in_dim(x, (self.rows, self.columns), [0])

    def along(self, x: jax.Array) -> jax.Array:
        """A number for each column, (columns,), as a tile."""
        return jax.lax.broadcast_in_dim(x, (self.rows, self.columns), [1])

    @meaning(_interpreted_load)
    def load(self, ref: Ref, rows: jax.Array, column: jax.Array | int = 0) -> jax.Array:
        """Loads rows of `ref` (M, N), from `column` on, a multiple of `columns`; 0 where there is no such place.

        Args:
          rows: (rows,), int32: which rows of `ref`; there are none below 0 and from M on.
        """
        kinds = plgpu.RefType(), self.row_layout, plgpu.Layout.WG_SPLAT
        result = plgpu.ShapeDtypeStruct((self.rows, self.columns), ref.dtype, layout=self.layout)
        load = plgpu.inline_mgpu(arg_types=kinds, return_type=result)(functools.partial(_load, self))
        rows = memory.layout_cast(rows, self.row_layout)
        loaded: jax.Array = load(ref, rows, jnp.asarray(column, jnp.int32))
        return loaded

    @meaning(_interpreted_load_row)
    def load_row(self, ref: Ref, column: jax.Array | int = 0) -> jax.Array:
        """Loads (columns,) numbers of `ref` (N,), from `column` on; 0 past the end."""
        kinds = plgpu.RefType(), plgpu.Layout.WG_SPLAT
        result = plgpu.ShapeDtypeStruct((self.columns,), ref.dtype, layout=self.layout.reduce(0))
        load = plgpu.inline_mgpu(arg_types=kinds, return_type=result)(functools.partial(_load_row, self))
        loaded: jax.Array = load(ref, jnp.asarray(column, jnp.int32))
        return loaded

    @property
    def most_bits(self) -> int:
        """Threads of a row in a warp."""
        return min(self.threads, _LANES)

    @meaning(_interpreted_bits)
    def bits(self, ref: Ref, first: jax.Array, end: jax.Array, value: jax.Array | None, count: int) -> jax.Array:
        """Bit k of row r is whether number `first + k * rows + r` of `ref` (M,) counts, (rows,) int32.

        All of them are loaded at once: of bits that are numbers each, ptxas loads one after another.

        Args:
          end: where numbers end that count.
          value: what those are; None for anything but 0.
          count: how many bits a row has, up to `most_bits`.
        """
        given = [jnp.asarray(x, jnp.int32) for x in (first, end) + (() if value is None else (value,))]
        kinds = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(given)
        find = plgpu.inline_mgpu(arg_types=kinds, return_type=self._numbers_type(jnp.int32))
        return self._numbers(find(functools.partial(_bits, self, count))(ref, *given))

    @meaning(lambda self, bits: jax.lax.population_count(bits).astype(jnp.float32))
    def count_bits(self, bits: jax.Array) -> jax.Array:
        """How many bits of each row are set, (rows,) float32."""
        count = plgpu.inline_mgpu(arg_types=(self.row_layout,), return_type=self._numbers_type(jnp.float32))
        return self._numbers(count(functools.partial(_count_bits, self))(bits))

    @meaning(_interpreted_sum_marked)
    def sum_marked(self, ref: Ref, first: jax.Array, bits: jax.Array, count: int) -> jax.Array:
        """Adds up rows `first + k * rows + r` of `ref` (M, N) for the bits k of row r that are set, in float32.

        Other rows are not read. All loads are under way before the first sum.

        Args:
          bits: of `bits`; `count` as there.
        """
        kinds = plgpu.RefType(), plgpu.Layout.WG_SPLAT, self.row_layout
        result = plgpu.ShapeDtypeStruct((self.rows, self.columns), jnp.float32, layout=self.layout)
        add = plgpu.inline_mgpu(arg_types=kinds, return_type=result)
        total: jax.Array = add(functools.partial(_sum_marked, self, count))(
            ref, jnp.asarray(first, jnp.int32), bits
        )
        return total

    def _numbers_type(self, dtype: Any) -> Any:
        # An array (1,) is the register that has it: MLIR drops the cast between them, and its layout with it.
        shape, layout = ((), plgpu.Layout.WG_SPLAT) if self.rows == 1 else ((self.rows,), self.row_layout)
        return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)

    def _numbers(self, found: jax.Array) -> jax.Array:
        if self.rows == 1:
            found = memory.layout_cast(jax.lax.broadcast_in_dim(found, (1,), ()), self.row_layout)
        return found

    @property
    def row_warps(self) -> int:
        """How many sums of its rows a warpgroup leaves: one for each warp, or for the warps that share a row."""
        return _WARPS // max(self.threads // _LANES, 1)

    @meaning(_interpreted_leave_sums)
    def leave_sums(self, ref: Ref, x: jax.Array) -> None:
        """Leaves sums over rows in shared memory, `row_warps` for each warpgroup, of float32.

        Args:
          ref: (parts, columns) for x (rows, columns); (parts, 1) for a number for each row, (rows,).
        """
        layout, splat = self.row_layout if x.ndim == 1 else self.layout, plgpu.Layout.WG_SPLAT
        leave = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), splat))(functools.partial(_leave_sums, self))
        leave(x, ref, jax.lax.axis_index("warpgroup"))

    @meaning(_interpreted_store)
    def store(self, ref: Ref, rows: jax.Array, x: jax.Array, column: jax.Array | int = 0) -> None:
        """Stores x (rows, columns), in the dtype of `ref`, where `load` loads; nothing where there is no place."""
        kinds = plgpu.RefType(), self.row_layout, self.layout, plgpu.Layout.WG_SPLAT
        store = plgpu.inline_mgpu(arg_types=kinds)(functools.partial(_store, self))
        store(ref, rows, x.astype(ref.dtype), jnp.asarray(column, jnp.int32))


def _load(tile: Tile, _: Any, ref: Any, rows: Any, column: Any) -> Any:
    layout, shape = tile.layout.to_mgpu(), (tile.rows, tile.columns)
    kind = ir.VectorType.get((tile.vector,), ir.MemRefType(ref.type).element_type)
    places = _places(tile, ref, rows.broadcast_in_dim(shape, (0,), layout), column)
    return _fragment([load_vector(kind, *place) for place in places], layout, shape, kind)


def _load_row(tile: Tile, _: Any, ref: Any, column: Any) -> Any:
    layout, (size,) = tile.layout.reduce(0).to_mgpu(), ir.MemRefType(ref.type).shape
    kind = ir.VectorType.get((tile.vector,), ir.MemRefType(ref.type).element_type)
    registers = []
    for (index,) in layout.thread_idxs((tile.columns,)):
        place = _from(column, index)
        is_there = None if size % tile.columns == 0 else _below(place, size)
        registers.append(load_vector(kind, address(ref, place), is_there))
    return _fragment(registers, layout, (tile.columns,), kind)


def _store(tile: Tile, _: Any, ref: Any, rows: Any, x: Any, column: Any) -> None:
    places = _places(tile, ref, rows.broadcast_in_dim(x.shape, (0,), x.layout), column)
    for vector, place in zip(x.registers.flat, places, strict=True):
        store_vector(vector, *place)


def _bits(tile: Tile, count: int, _: Any, ref: Any, first: Any, end: Any, *value: Any) -> Any:
    (size,), arith = ir.MemRefType(ref.type).shape, inline.utils.arith
    kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
    thread, lanes = inline.thread(), min(tile.threads, _LANES)
    row, k = arith.divui(thread, inline.i32(tile.threads)), arith.remui(thread, inline.i32(lanes))
    place = inline.add(first.registers.item(), inline.times(k, tile.rows), row)
    is_there = arith.andi(_below(k, count), _below(place, size))
    is_there = arith.andi(is_there, arith.cmpi(arith.CmpIPredicate.slt, place, end.registers.item()))
    number = inline.item(load_vector(kind, address(ref, place), is_there), 0)
    if value:
        counts = arith.cmpi(arith.CmpIPredicate.eq, number, value[0].registers.item())
    else:
        counts = arith.cmpi(arith.CmpIPredicate.ne, number, inline.i32(0))
    word = ir.IntegerType.get_signless(32)
    text = "vote.sync.ballot.b32 $0, $1, 0xffffffff;"
    found = inline.utils.llvm.inline_asm(word, [arith.andi(counts, is_there)], text, "=r,b", has_side_effects=True)
    if tile.threads < _LANES:
        first_lane = inline.times(arith.remui(row, inline.i32(_LANES // tile.threads)), tile.threads)
        found = arith.andi(arith.shrui(found, first_lane), inline.i32((1 << tile.threads) - 1))
    return _of_row(tile, found, is_signed=True)


def _count_bits(tile: Tile, _: Any, bits: Any) -> Any:
    word, arith = ir.IntegerType.get_signless(32), inline.utils.arith
    text = "popc.b32 $0, $1;"
    found = inline.utils.llvm.inline_asm(word, [_word(bits)], text, "=r,r", has_side_effects=False)
    return _of_row(tile, arith.sitofp(ir.F32Type.get(), found), is_signed=None)


def _sum_marked(tile: Tile, count: int, _: Any, ref: Any, first: Any, bits: Any) -> Any:
    arith, word, long = inline.utils.arith, *map(ir.IntegerType.get_signless, (32, 64))
    (_, n), layout, shape = ir.MemRefType(ref.type).shape, tile.layout.to_mgpu(), (tile.rows, tile.columns)
    kind = ir.VectorType.get((tile.vector,), ir.MemRefType(ref.type).element_type)
    columns = [arith.index_cast(word, index) for _, index in layout.thread_idxs(shape)]
    row = inline.add(first.registers.item(), arith.divui(inline.thread(), inline.i32(tile.threads)))
    loaded = []
    for k in range(count):
        is_marked = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(_word(bits), inline.i32(1 << k)), inline.i32(0))
        begin = arith.muli(arith.extui(long, inline.add(row, k * tile.rows)), inline.utils.c(n, long))
        for column in columns:
            is_there = is_marked if n % tile.columns == 0 else arith.andi(is_marked, _below(column, n))
            loaded.append(load_vector(kind, address(ref, arith.addi(begin, arith.extui(long, column))), is_there))
    parts = [loaded[i : i + len(columns)] for i in range(0, len(loaded), len(columns))]
    wide = [_fragment(part, layout, shape, kind).astype(ir.F32Type.get()) for part in parts]
    return functools.reduce(operator.add, wide)


def _word(bits: Any) -> Any:
    """The bits of a thread's row."""
    return inline.item(bits.registers.flat[0], 0)


def _of_row(tile: Tile, number: Any, *, is_signed: bool | None) -> Any:
    """An array of a number for each row, which each thread has of its own row."""
    if tile.rows == 1:
        return _arrays.FragmentedArray.splat(number, (), is_signed=is_signed)
    layout, kind = tile.row_layout.to_mgpu(), ir.VectorType.get((1,), number.type)
    return _fragment([inline.utils.vector.broadcast(kind, number)], layout, (tile.rows,), kind)


def _leave_sums(tile: Tile, _: Any, x: Any, ref: Any, warpgroup: Any) -> None:
    utils, index = inline.utils, ir.IndexType.get()
    warp = utils.arith.divui(inline.lane_and_warp()[1], inline.i32(_WARPS // tile.row_warps))
    part = inline.add(inline.times(warpgroup.registers.item(), tile.row_warps), warp)
    places = [utils.c(0, index)]
    if len(x.shape) == 2:
        places = [place for (place,) in tile.layout.reduce(0).to_mgpu().thread_idxs((tile.columns,))]
    for total, place in zip(x.registers.flat, places, strict=True):
        distance = tile.threads
        while distance < _LANES:
            total = utils.arith.addf(total, utils.shfl_bfly(total, distance))
            distance *= 2
        utils.vector.store(total, ref, [utils.arith.index_cast(index, part), place])


def _places(tile: Tile, ref: Any, rows: Any, column: Any) -> Iterator[tuple[Any, Any]]:
    """Where each register of the tile lies in `ref`, and whether there is such a place."""
    (m, n), arith, long = ir.MemRefType(ref.type).shape, inline.utils.arith, ir.IntegerType.get_signless(64)
    indices = tile.layout.to_mgpu().thread_idxs((tile.rows, tile.columns))
    for register, (_, index) in zip(rows.registers.flat, indices, strict=True):
        row, at = inline.item(register, 0), _from(column, index)
        is_there = _below(row, m)
        if n % tile.columns:
            is_there = arith.andi(is_there, _below(at, n))
        begin = arith.muli(arith.extui(long, row), inline.utils.c(n, long))
        yield address(ref, arith.addi(begin, arith.extui(long, at))), is_there


def _from(column: Any, index: Any) -> Any:
    integer = inline.utils.arith.index_cast(ir.IntegerType.get_signless(32), index)
    return inline.add(integer, column.registers.item())


def _below(index: Any, size: int) -> Any:
    """Whether an axis has an index: without its sign a negative one is large."""
    arith = inline.utils.arith
    return arith.cmpi(arith.CmpIPredicate.ult, index, inline.i32(size))


def _fragment(registers: list[Any], layout: Any, shape: tuple[int, ...], kind: Any) -> Any:
    array = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return _arrays.FragmentedArray(_registers=array, _layout=layout, _is_signed=_is_signed(kind))


def _is_signed(kind: Any) -> bool | None:
    return True if isinstance(kind.element_type, ir.IntegerType) else None
