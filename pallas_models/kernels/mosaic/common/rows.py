"""Rows in the registers of threads: how threads share them, read and write them, and add up what they have.

Nothing here is of one generation of GPUs: memory is read and written by loads and stores of up to 16 bytes a thread,
numbers of a row are exchanged by shuffles and through shared memory, and threads wait for one another at barriers
that every GPU has.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.mlir import ir
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import memory
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")

_WARP, _WARPGROUP, _MOST_THREADS = 32, 128, 1024
_VECTOR_BYTES = 16  # that a thread loads at once
_HELD = 32  # elements of a row in a thread: a CTA of 1024 threads has 64 registers for each
LONGEST_HELD = _MOST_THREADS * _HELD  # columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`threads` threads share a row, of which they hold `block_n` columns at a time; a thread has parts of `rows` rows.

    A CTA has `warpgroups` warpgroups of 128 threads, each with rows of its own unless a row takes several.
    """

    threads: int
    block_n: int
    rows: int = 1
    warpgroups: int = 1

    def __post_init__(self) -> None:
        if self.threads not in (1 << i for i in range(_MOST_THREADS.bit_length())):
            raise ValueError(f"{__name__}: threads={self.threads} must be a power of two up to {_MOST_THREADS}")
        for name in ("block_n", "rows", "warpgroups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{__name__}: {name}={getattr(self, name)} must be positive")
        if self.warpgroups > _MOST_THREADS // _WARPGROUP:
            raise ValueError(f"{__name__}: warpgroups={self.warpgroups} must be {_MOST_THREADS // _WARPGROUP} or fewer")
        if self.threads > _WARPGROUP and self.threads != self.warpgroups * _WARPGROUP:
            raise ValueError(f"{self}: rows of over {_WARPGROUP} threads take all warpgroups of a CTA")


def vector_length(n: int, dtype: DTypeLike) -> int:
    """Elements that a thread loads at once of rows of `n`: 16 bytes, or fewer where rows begin at odd addresses."""
    return math.gcd(n, _VECTOR_BYTES // jnp.dtype(dtype).itemsize)


def heuristic(n: int, dtype: DTypeLike) -> Config:
    """Chooses 32 elements a thread, of rows up to 32768 columns, which are held; longer ones are walked, 16 a thread."""
    if n > LONGEST_HELD:
        return Config(threads=512, block_n=8192, warpgroups=4)
    vectors = pl.cdiv(n, vector_length(n, dtype))
    threads = min(pl.next_power_of_2(pl.cdiv(n, _HELD)), pl.next_power_of_2(vectors))
    return Config(threads=threads, block_n=n, warpgroups=max(threads // _WARPGROUP, 1))


def configs(m: int, n: int, dtype: DTypeLike) -> Iterator[Config]:
    """The configs worth measuring for rows (m, n): 8 to 64 elements a thread, rows held or walked."""
    for threads in (1 << i for i in range(_MOST_THREADS.bit_length())):
        for elements in (8, 16, 32, 64):
            block_n, own = threads * elements, max(threads // _WARPGROUP, 1)
            least = threads * vector_length(n, dtype)
            if block_n // 2 >= max(n, least) or (block_n < n and threads < 2 * _WARPGROUP):
                continue
            for rows in (1, 2):
                for warpgroups in (own,) if threads > _WARPGROUP else (1, 2):
                    if rows * _WARPGROUP * warpgroups // threads <= m and rows * elements <= 64:
                        yield Config(threads=threads, block_n=min(block_n, n), rows=rows, warpgroups=warpgroups)


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
        return jnp.where(kept, jnp.roll(x, -distance, axis), jnp.zeros((), x.dtype))

    if len(ref.shape) == 1:
        return jnp.broadcast_to(aligned(ref[columns], 0, width, j * width - first), self.shape)
    if repeat is not None:
        places = [jax.lax.rem(jax.lax.div(i * rows + r, repeat), ref.shape[0]) for r in range(rows)]
        return aligned(jnp.stack([ref[place, columns] for place in places]), 1, width, j * width - first)
    top = jnp.minimum(i * rows, max(self.m - rows, 0))
    x = aligned(ref[pl.ds(top, min(rows, self.m)), columns], 0, rows, i * rows - top)
    return aligned(x, 1, width, j * width - first)


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


def _interpreted_reduce(self: "Blocks", refs: Refs, slot: int, kind: "Kind", x: jax.Array) -> jax.Array:
    """In the order of a GPU: the numbers of a thread, and then the threads'."""
    add = {"add": jnp.sum, "max": jnp.max}[kind]
    rows, pieces = self.shape[0], self.row_warpgroups
    total = add(add(x.reshape(rows, -1, self.step), axis=1), axis=1)
    if pieces > 1:
        refs.sums[slot, jax.lax.axis_index("warpgroup")] = total
        plgpu.barrier_arrive(refs.added.at[slot])
        plgpu.barrier_wait(refs.added.at[slot])
        total = add(jnp.stack([refs.sums[slot, piece] for piece in range(pieces)]), axis=0)
    return total.reshape(self.numbers_shape)


Kind = Literal["add", "max"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of rows (m, n) that warpgroups hold: block (i, j) is of the rows `i` and the columns `j` times a block.

    Attributes:
      threads: of a row.
      vector: elements that lie side by side in a thread.
      rows: that a thread has a part of.
      columns: vectors of a row that a thread has.
      warpgroups: of a CTA.
    """

    m: int
    n: int
    threads: int
    vector: int
    rows: int
    columns: int
    warpgroups: int

    @classmethod
    def of(cls, config: Config, x: jax.Array) -> "Blocks":
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
        )

    @property
    def row_warpgroups(self) -> int:
        """Warpgroups that share a row."""
        return max(self.threads // _WARPGROUP, 1)

    @property
    def row_warps(self) -> int:
        """Warps of a warpgroup that share a row."""
        return max(min(self.threads, _WARPGROUP) // _WARP, 1)

    @property
    def row_lanes(self) -> int:
        """Threads of a warp that share a row."""
        return min(self.threads, _WARP)

    @property
    def step(self) -> int:
        """Columns of a row that a warpgroup has in one vector of each thread."""
        return self.row_warps * self.row_lanes * self.vector

    @property
    def rows_at_once(self) -> int:
        """Rows that a warpgroup has in one vector of each thread."""
        return _WARPGROUP // (self.row_warps * self.row_lanes)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a block."""
        return self.rows * self.rows_at_once, self.columns * self.step

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """The shape of an array of a number for each row: () where it is one number, as Mosaic has none of (1,)."""
        rows = self.shape[0]
        return () if rows == 1 else (rows,)

    @property
    def steps(self) -> int:
        """Blocks of a row that each of its warpgroups has."""
        return pl.cdiv(self.n, self.shape[1] * self.row_warpgroups)

    @property
    def groups(self) -> int:
        """Warpgroups, or sets of warpgroups that share rows, of a CTA."""
        return self.warpgroups // self.row_warpgroups

    @property
    def num_ctas(self) -> int:
        return pl.cdiv(self.m, self.shape[0] * self.groups)

    @property
    def layout(self) -> Any:
        """Where a block lies: a step in all threads of its rows, then the next one."""
        lanes = _WARP // self.row_lanes, self.row_lanes * self.vector
        tiles = (self.rows_at_once, self.step), lanes, (1, self.vector)
        found = _arrays.TiledLayout(_arrays.Tiling(tiles), (-6, -5), (-4, -3), -1, _check_canonical=False)
        found = found.canonicalize()
        return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)

    @property
    def numbers_layout(self) -> Any:
        """Where a number for each row lies: in all threads that share the row."""
        return self.layout.reduce(1) if self.numbers_shape else plgpu.Layout.WG_SPLAT

    def place(self) -> jax.Array:
        """The block of rows that this warpgroup has."""
        group = jax.lax.div(jax.lax.axis_index("warpgroup"), self.row_warpgroups)
        return jax.lax.axis_index("cta") * self.groups + group

    def column(self, step: jax.Array | int) -> jax.Array:
        """The block of columns that this warpgroup has in a step."""
        return step * self.row_warpgroups + jax.lax.rem(jax.lax.axis_index("warpgroup"), self.row_warpgroups)

    def inside(self, j: jax.Array) -> jax.Array | None:
        """Which elements of a block lie before the end of their row; None where all do."""
        width = self.shape[1]
        if self.n % (width * self.row_warpgroups) == 0:
            return None
        return memory.iota(self.shape, 1, self.layout) < self.n - j * width

    def full(self, value: float) -> jax.Array:
        """A block of one number, float32."""
        return memory.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def spread(self, x: jax.Array) -> jax.Array:
        """A number for each row as a block."""
        return jax.lax.broadcast_in_dim(x, self.shape, range(x.ndim))

    @meaning(_interpreted_load)
    def load(self, ref: Ref, i: jax.Array, j: jax.Array, repeat: int | None = None) -> jax.Array:
        """Loads block (i, j) of rows (M, N), or columns j of a vector (N,) for each row; 0 past the end.

        Args:
          repeat: loads row `r // repeat` for row r, of W rows (W, N) that begin again after the last one.
        """
        result = plgpu.ShapeDtypeStruct(self.shape, ref.dtype, layout=self.layout)
        splat = plgpu.Layout.WG_SPLAT
        load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat), return_type=result)
        block: jax.Array = load(functools.partial(_load, self, repeat))(ref, *_numbers(i, j))
        return block

    @meaning(_interpreted_store)
    def store(self, ref: Ref, i: jax.Array, j: jax.Array, x: jax.Array) -> None:
        """Stores block (i, j) of rows (M, N), as far as it lies inside."""
        splat = plgpu.Layout.WG_SPLAT
        store = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, self.layout))
        store(functools.partial(_store, self))(ref, *_numbers(i, j), x)

    @meaning(_interpreted_store_numbers)
    def store_numbers(self, ref: Ref, row: int, i: jax.Array, x: jax.Array) -> None:
        """Stores a number for each row of block i, in a row of `ref`, (K, M), float32."""
        splat = plgpu.Layout.WG_SPLAT
        store = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, self.numbers_layout))
        store(functools.partial(_store_numbers, self, row))(ref, *_numbers(i), x)

    def scratch_types(self, reductions: int, interpret: bool) -> dict[str, Any]:
        """Shared memory for so many reductions, where threads of several warps share a row."""
        rows, warps = self.shape[0], self.row_warps * self.row_warpgroups
        if interpret and self.row_warpgroups > 1:
            added = plgpu.Barrier(num_arrivals=self.row_warpgroups, num_barriers=reductions)
            return dict(sums=plgpu.SMEM((reductions, self.row_warpgroups, rows), jnp.float32), added=added)
        if interpret or warps == 1:
            return {}
        return dict(sums=plgpu.SMEM((reductions, self.groups, rows, warps), jnp.float32))

    @meaning(_interpreted_reduce)
    def reduce(self, refs: Refs, slot: int, kind: Kind, x: jax.Array) -> jax.Array:
        """The sum or the maximum of every row of a block, float32; NaN where the row has one.

        Args:
          slot: a number of this reduction alone: a warp may read the sums of one while another stores the next ones.
        """
        result = plgpu.ShapeDtypeStruct(self.numbers_shape, jnp.float32, layout=self.numbers_layout)
        if self.row_warps * self.row_warpgroups == 1:
            reduce = plgpu.inline_mgpu(arg_types=(self.layout,), return_type=result)
            alone: jax.Array = reduce(lambda _, x: _reduce(self, kind, x, None))(x)
            return alone
        reduce = plgpu.inline_mgpu(arg_types=(self.layout, plgpu.RefType()), return_type=result)
        total: jax.Array = reduce(lambda _, x, sums: _reduce(self, kind, x, sums))(x, refs.sums.at[slot])
        return total


def _numbers(*values: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(value, jnp.int32) for value in values]


class _Thread:
    """What a thread has of block (i, j): its rows and its columns, which it has in vectors."""

    def __init__(self, blocks: Blocks, i: Any, j: Any) -> None:
        self.blocks = blocks
        lane, warp = inline.lane_and_warp()
        arith = inline.utils.arith
        divided = [
            (arith.divui(number, inline.i32(size)), arith.remui(number, inline.i32(size)))
            for number, size in ((warp, blocks.row_warps), (lane, blocks.row_lanes))
        ]
        (self.row_of_warp, self.warp_of_row), (row_of_lane, lane_of_row) = divided
        self.lane = lane
        (rows, width), lanes = blocks.shape, _WARP // blocks.row_lanes
        row = inline.add(inline.times(i, rows), inline.times(self.row_of_warp, lanes), row_of_lane)
        self.rows = [inline.add(row, t * blocks.rows_at_once) for t in range(blocks.rows)]
        if j is not None:
            across = inline.times(self.warp_of_row, blocks.row_lanes * blocks.vector)
            column = inline.add(inline.times(j, width), across, inline.times(lane_of_row, blocks.vector))
            self.columns = [inline.add(column, u * blocks.step) for u in range(blocks.columns)]

    def rows_inside(self) -> list[Any]:
        """Whether each row is one; None where all are."""
        blocks = self.blocks
        is_whole = blocks.m % (blocks.shape[0] * blocks.groups) == 0
        return [None if is_whole else _below(row, blocks.m) for row in self.rows]

    def columns_inside(self) -> list[Any]:
        """Whether each vector of columns lies in the row; None where all do."""
        blocks = self.blocks
        is_whole = blocks.n % (blocks.shape[1] * blocks.row_warpgroups) == 0
        return [None if is_whole else _below(column, blocks.n) for column in self.columns]

    def pointers(self, ref: Any, rows: Sequence[Any]) -> list[list[Any]]:
        """Where the vectors of rows of an array lie."""
        arith, long = inline.utils.arith, ir.IntegerType.get_signless(64)
        kind = ir.MemRefType(ref.type)
        size = inline.utils.bitwidth(kind.element_type) // 8
        base = inline.utils.llvm.ptrtoint(long, inline.utils.memref_ptr(ref))

        def bytes_of(index: Any, each: int) -> Any:
            return arith.muli(arith.extui(long, index), inline.utils.c(each, long))

        first = arith.addi(base, bytes_of(self.columns[0], size))
        begins = [first if row is None else arith.addi(first, bytes_of(row, size * kind.shape[-1])) for row in rows]
        distances = [inline.utils.c(u * self.blocks.step * size, long) for u in range(self.blocks.columns)]
        return [[arith.addi(begin, distance) for distance in distances] for begin in begins]


def _below(value: Any, end: int) -> Any:
    return inline.utils.arith.cmpi(inline.utils.arith.CmpIPredicate.ult, value, inline.i32(end))


def _both(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else inline.utils.arith.andi(a, b)


def _words(num_bytes: int) -> tuple[int, int]:
    """The number of words that a vector is moved in, and their bits."""
    return (num_bytes // 4, 32) if num_bytes >= 4 else (1, 8 * num_bytes)


def _load(blocks: Blocks, repeat: int | None, _: Any, ref: Any, i: Any, j: Any) -> Any:
    thread = _Thread(blocks, i.registers.item(), j.registers.item())
    kind = ir.MemRefType(ref.type)
    if len(kind.shape) == 1:
        loaded = [_load_row(thread, ref, None, None)] * blocks.rows
    else:
        rows = thread.rows
        if repeat is not None:
            arith = inline.utils.arith
            turns = [arith.divui(row, inline.i32(repeat)) for row in rows]
            rows = [arith.remui(turn, inline.i32(kind.shape[0])) for turn in turns]
        loaded = [_load_row(thread, ref, *row) for row in zip(rows, thread.rows_inside(), strict=True)]
    layout = blocks.layout.to_mgpu()
    registers = np.array([x for row in loaded for x in row], dtype=object)
    is_signed = True if isinstance(kind.element_type, ir.IntegerType) else None
    registers = registers.reshape(layout.registers_shape(blocks.shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def _load_row(thread: _Thread, ref: Any, row: Any, is_inside: Any) -> list[Any]:
    element = ir.MemRefType(ref.type).element_type
    kind = ir.VectorType.get((thread.blocks.vector,), element)
    num_bytes = thread.blocks.vector * inline.utils.bitwidth(element) // 8
    (pointers,) = thread.pointers(ref, [row])
    insides = [_both(is_inside, column) for column in thread.columns_inside()]
    return [_load_vector(kind, num_bytes, *place) for place in zip(pointers, insides, strict=True)]


def _load_vector(kind: Any, num_bytes: int, pointer: Any, is_inside: Any) -> Any:
    llvm = inline.utils.llvm
    count, bits = _words(num_bytes)
    letter, word = {32: "r"}.get(bits, "h"), ir.IntegerType.get_signless(max(bits, 16))
    zeros = "" if is_inside is None else "".join(f"mov.b{max(bits, 16)} ${k}, 0;" for k in range(count))
    guard = "" if is_inside is None else f"@${count + 1} "
    text = zeros + "".join(
        f"{guard}ld.global{size}.b{bits} {names}, [${count} + {4 * first}];" for first, size, names in _moves(count)
    )
    operands, constraints = [pointer], [f"=&{letter}"] * count + ["l"]
    if is_inside is not None:
        operands.append(is_inside)
        constraints.append("b")
    result = word if count == 1 else ir.Type.parse(f"!llvm.struct<({', '.join([str(word)] * count)})>")
    # What it reads is never written, but a load is not to be moved to where its result is used.
    found = llvm.inline_asm(result, operands, text, ",".join(constraints), has_side_effects=True)
    if count == 1:
        if bits == 8:
            found = inline.utils.arith.trunci(ir.IntegerType.get_signless(8), found)
        return llvm.bitcast(kind, found)
    words = [llvm.extractvalue(word, found, ir.DenseI64ArrayAttr.get([k])) for k in range(count)]
    return llvm.bitcast(kind, inline.utils.vector.from_elements(ir.VectorType.get((count,), word), words))


def _moves(count: int) -> Iterator[tuple[int, str, str]]:
    """The instructions that move so many words: the first word, the size and the names of each."""
    for first in range(0, count, 4):
        names = [f"${k}" for k in range(first, min(first + 4, count))]
        yield first, f".v{len(names)}" if len(names) > 1 else "", f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]


def _store(blocks: Blocks, _: Any, ref: Any, i: Any, j: Any, x: Any) -> None:
    thread = _Thread(blocks, i.registers.item(), j.registers.item())
    num_bytes = blocks.vector * inline.utils.bitwidth(x.mlir_dtype) // 8
    registers = x.registers.reshape(blocks.rows, blocks.columns)
    columns_inside = thread.columns_inside()
    for vectors, pointers, row in zip(
        registers, thread.pointers(ref, thread.rows), thread.rows_inside(), strict=True
    ):
        for vector, pointer, column in zip(vectors, pointers, columns_inside, strict=True):
            _store_vector(vector, num_bytes, pointer, _both(row, column))


def _store_vector(vector: Any, num_bytes: int, pointer: Any, is_inside: Any) -> None:
    count, bits = _words(num_bytes)
    word = ir.IntegerType.get_signless(bits)
    if count == 1:
        words = [inline.utils.llvm.bitcast(word, vector)]
    else:
        together = inline.utils.llvm.bitcast(ir.VectorType.get((count,), word), vector)
        words = [inline.item(together, k) for k in range(count)]
    guard = "" if is_inside is None else f"@${count + 1} "
    text = "".join(
        f"{guard}st.global{size}.b{bits} [${count} + {4 * first}], {names};" for first, size, names in _moves(count)
    )
    constraints = [{32: "r"}.get(bits, "h")] * count + ["l"] + ([] if is_inside is None else ["b"])
    inline.asm(text, ",".join(constraints), *words, pointer, *([] if is_inside is None else [is_inside]))


def _store_numbers(blocks: Blocks, row: int, _: Any, ref: Any, i: Any, x: Any) -> None:
    thread = _Thread(blocks, i.registers.item(), None)
    arith, long = inline.utils.arith, ir.IntegerType.get_signless(64)
    base = inline.utils.llvm.ptrtoint(long, inline.utils.memref_ptr(ref))
    for number, place, is_inside in zip(x.registers.flat, thread.rows, thread.rows_inside(), strict=True):
        index = arith.addi(arith.extui(long, place), inline.utils.c(row * blocks.m, long))
        _store_vector(number, 4, arith.addi(base, arith.muli(index, inline.utils.c(4, long))), is_inside)


def _reduce(blocks: Blocks, kind: Kind, x: Any, sums: Any) -> Any:
    arith = inline.utils.arith
    combine = {"add": _arrays.addf, "max": arith.maximumf}[kind]  # the first contracts products and sums
    totals = []
    for vectors in x.registers.reshape(blocks.rows, blocks.columns):
        total = _tree(combine, list(vectors))
        total = _tree(combine, [inline.item(total, k) for k in range(blocks.vector)])
        distance = blocks.row_lanes // 2
        while distance:
            total = combine(total, inline.utils.shfl_bfly(total, distance))
            distance //= 2
        totals.append(total)
    if sums is not None:
        totals = _over_warps(blocks, combine, totals, sums)
    if not blocks.numbers_shape:
        return _arrays.FragmentedArray.splat(totals[0], ())
    layout = blocks.numbers_layout.to_mgpu()
    kind_of_register = layout.registers_element_type(ir.F32Type.get())
    registers = np.array([inline.utils.vector.broadcast(kind_of_register, total) for total in totals], dtype=object)
    registers = registers.reshape(layout.registers_shape(blocks.numbers_shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _tree(combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    while len(values) > 1:
        values = [functools.reduce(combine, values[k : k + 2]) for k in range(0, len(values), 2)]
    return values[0]


def _over_warps(blocks: Blocks, combine: Callable[[Any, Any], Any], totals: list[Any], sums: Any) -> list[Any]:
    """Each warp leaves its numbers in shared memory, and all threads of a row read those of all its warps."""
    arith, count = inline.utils.arith, blocks.row_warps * blocks.row_warpgroups
    thread = _Thread(blocks, inline.i32(0), None)
    warpgroup = arith.divui(inline.thread_of_cta(), inline.i32(_WARPGROUP))
    pieces = inline.i32(blocks.row_warpgroups)
    group, piece = arith.divui(warpgroup, pieces), arith.remui(warpgroup, pieces)
    base = inline.add(inline.address(sums), inline.times(group, 4 * blocks.shape[0] * count))
    warp = inline.add(inline.times(piece, blocks.row_warps), thread.warp_of_row)
    places = [inline.add(base, inline.times(row, 4 * count)) for row in thread.rows]
    for total, place in zip(totals, places, strict=True):
        text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.f32 [$0], $1; }"
        inline.asm(text, "r,f,r", inline.add(place, inline.times(warp, 4)), total, thread.lane)
    if blocks.row_warpgroups > 1:
        inline.asm("bar.sync 0;", "")
    else:
        inline.asm(f"bar.sync $0, {_WARPGROUP};", "r", inline.add(warpgroup, 1))
    return [_tree(combine, _load_shared(place, count)) for place in places]


def _load_shared(place: Any, count: int) -> list[Any]:
    """So many numbers that lie side by side in shared memory, the same ones in all threads of a row."""
    llvm, number = inline.utils.llvm, ir.F32Type.get()
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    text = "".join(
        f"ld.shared{size}.f32 {names}, [${count} + {4 * first}];" for first, size, names in _moves(count)
    )
    found = llvm.inline_asm(struct, [place], text, "=&f," * count + "r", has_side_effects=True)
    return [llvm.extractvalue(number, found, ir.DenseI64ArrayAttr.get([k])) for k in range(count)]
