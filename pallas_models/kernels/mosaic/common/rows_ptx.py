"""Rows in the registers of threads: what threads run to read and write them, and to add up what they have."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.mlir import ir

from pallas_models.kernels.common.backend import Backend
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.row_config import WARP, WARPGROUP
from pallas_models.kernels.mosaic.common.vectors import address, load_vector, moves, store_vector

if TYPE_CHECKING:
    from pallas_models.kernels.mosaic.common.rows import Blocks, Kind
else:
    Blocks = Kind = Any

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")


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
        (rows, width), lanes = blocks.shape, WARP // blocks.row_lanes
        row = inline.add(inline.times(i, rows), inline.times(self.row_of_warp, lanes), row_of_lane)
        self.rows = [inline.add(row, t * blocks.rows_at_once) for t in range(blocks.rows)]
        if j is not None:
            across = inline.times(self.warp_of_row, blocks.row_lanes * blocks.vector)
            column = inline.add(inline.times(j, width), across, inline.times(lane_of_row, blocks.vector))
            self.columns = [inline.add(column, u * blocks.step) for u in range(blocks.columns)]

    def rows_inside(self) -> list[Any]:
        """Whether each row is one; None where all are."""
        return [None if self.blocks.are_whole else _below(row, self.blocks.m) for row in self.rows]

    def columns_inside(self) -> list[Any]:
        """Whether each vector of columns lies in the row; None where all do."""
        blocks = self.blocks
        return [None if blocks.have_whole_columns else _below(column, blocks.n) for column in self.columns]

    def pointers(self, ref: Any, rows: Sequence[Any]) -> list[list[Any]]:
        """Where the vectors of rows of an array lie."""
        arith, long = inline.utils.arith, ir.IntegerType.get_signless(64)
        kind = ir.MemRefType(ref.type)
        size = inline.utils.bitwidth(kind.element_type) // 8
        first, row_size = address(ref, self.columns[0]), inline.utils.c(size * kind.shape[-1], long)
        begins = [
            first if row is None else arith.addi(first, arith.muli(arith.extui(long, row), row_size))
            for row in rows
        ]
        distances = [inline.utils.c(u * self.blocks.step * size, long) for u in range(self.blocks.columns)]
        return [[arith.addi(begin, distance) for distance in distances] for begin in begins]


def _below(value: Any, end: int) -> Any:
    return inline.utils.arith.cmpi(inline.utils.arith.CmpIPredicate.ult, value, inline.i32(end))


def _both(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else inline.utils.arith.andi(a, b)


def load(blocks: Blocks, repeat: int | None, _: Any, ref: Any, i: Any, j: Any) -> Any:
    thread = _Thread(blocks, i.registers.item(), j.registers.item())
    kind = ir.MemRefType(ref.type)
    if len(kind.shape) == 1:
        return _block(blocks, [_load_row(thread, ref, None, None)] * blocks.rows)
    rows = thread.rows
    if repeat is not None:
        arith = inline.utils.arith
        turns = [arith.divui(row, inline.i32(repeat)) for row in rows]
        rows = [arith.remui(turn, inline.i32(kind.shape[0])) for turn in turns]
    return _block(blocks, [_load_row(thread, ref, *row) for row in zip(rows, thread.rows_inside(), strict=True)])


def look_up(blocks: Blocks, _: Any, ref: Any, i: Any, j: Any, rows: Any) -> Any:
    thread = _Thread(blocks, i.registers.item(), j.registers.item())
    places = zip(_numbers(rows), thread.rows_inside(), strict=True)
    return _block(blocks, [_load_row(thread, ref, *place) for place in places])


def _block(blocks: Blocks, rows: list[list[Any]]) -> Any:
    """A block of the vectors of each row that a thread has a part of."""
    layout = blocks.layout.to_mgpu()
    registers = np.array([x for row in rows for x in row], dtype=object)
    is_signed = True if isinstance(ir.VectorType(rows[0][0].type).element_type, ir.IntegerType) else None
    registers = registers.reshape(layout.registers_shape(blocks.shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def _load_row(thread: _Thread, ref: Any, row: Any, is_inside: Any) -> list[Any]:
    element = ir.MemRefType(ref.type).element_type
    kind = ir.VectorType.get((thread.blocks.vector,), element)
    (pointers,) = thread.pointers(ref, [row])
    insides = [_both(is_inside, column) for column in thread.columns_inside()]
    return [load_vector(kind, *place) for place in zip(pointers, insides, strict=True)]


def store(blocks: Blocks, _: Any, ref: Any, i: Any, j: Any, x: Any) -> None:
    thread = _Thread(blocks, i.registers.item(), j.registers.item())
    registers = x.registers.reshape(blocks.rows, blocks.columns)
    columns_inside = thread.columns_inside()
    for vectors, pointers, row in zip(
        registers, thread.pointers(ref, thread.rows), thread.rows_inside(), strict=True
    ):
        for vector, pointer, column in zip(vectors, pointers, columns_inside, strict=True):
            store_vector(vector, pointer, _both(row, column))


def again(blocks: Blocks, _: Any, x: Any) -> Any:
    """The same registers, of which the compiler does not know that they are the same."""
    llvm, num_bytes = inline.utils.llvm, blocks.vector * inline.utils.bitwidth(x.mlir_dtype) // 8
    bits = 32 if num_bytes % 4 == 0 else 16 if num_bytes % 2 == 0 else 8
    word = ir.IntegerType.get_signless(bits)
    kind = ir.VectorType.get((8 * num_bytes // bits,), word)

    def opaque(vector: Any) -> Any:
        words = llvm.bitcast(kind, vector)
        parts = [inline.item(words, k) for k in range(kind.shape[0])]
        letter = "r" if bits == 32 else "h"
        parts = [llvm.inline_asm(word, [part], "", f"={letter},0", has_side_effects=True) for part in parts]
        return llvm.bitcast(vector.type, inline.utils.vector.from_elements(kind, parts))

    registers = np.array([opaque(vector) for vector in x.registers.flat], dtype=object)
    return _arrays.FragmentedArray(
        _registers=registers.reshape(x.registers.shape), _layout=x.layout, _is_signed=x.is_signed
    )


def rounded(blocks: Blocks, _: Any, x: Any) -> Any:
    f32 = ir.F32Type.get()
    return _as_numbers(blocks, [inline.utils.llvm.inline_asm(f32, [n], "", "=f,0") for n in _numbers(x)])


def store_numbers(blocks: Blocks, row: int, _: Any, ref: Any, i: Any, x: Any) -> None:
    thread = _Thread(blocks, i.registers.item(), None)
    arith, long = inline.utils.arith, ir.IntegerType.get_signless(64)
    kind = ir.VectorType.get((1,), ir.F32Type.get())
    for number, place, is_inside in zip(x.registers.flat, thread.rows, thread.rows_inside(), strict=True):
        index = arith.addi(arith.extui(long, place), inline.utils.c(row * blocks.m, long))
        store_vector(inline.utils.vector.broadcast(kind, number), address(ref, index), is_inside)


def _place(ref: Any, row: Any, column: Any) -> Any:
    """Where an element of rows (M, N), or of a vector for each row, lies."""
    arith, (*rows, n) = inline.utils.arith, ir.MemRefType(ref.type).shape
    long = ir.IntegerType.get_signless(64)
    index = arith.extui(long, column)
    if rows:
        index = arith.addi(index, arith.muli(arith.extui(long, row), inline.utils.c(n, long)))
    return address(ref, index)


def _numbers(x: Any) -> list[Any]:
    """The number of each row that a thread has a part of."""
    return [inline.item(n, 0) if isinstance(n.type, ir.VectorType) else n for n in x.registers.flat]


def _as_numbers(blocks: Blocks, numbers: list[Any]) -> Any:
    """An array of a number for each row."""
    is_signed = True if isinstance(numbers[0].type, ir.IntegerType) else None
    if not blocks.numbers_shape:
        return _arrays.FragmentedArray.splat(numbers[0], (), is_signed=is_signed)
    layout = blocks.numbers_layout.to_mgpu()
    kind = layout.registers_element_type(numbers[0].type)
    registers = np.array([inline.utils.vector.broadcast(kind, number) for number in numbers], dtype=object)
    registers = registers.reshape(layout.registers_shape(blocks.numbers_shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def load_numbers(blocks: Blocks, row: int, _: Any, ref: Any, i: Any, *columns: Any) -> Any:
    thread = _Thread(blocks, i.registers.item(), None)
    shape, element = ir.MemRefType(ref.type).shape, ir.MemRefType(ref.type).element_type
    places = _numbers(*columns) if columns else thread.rows
    numbers = []
    for own, is_row, place in zip(thread.rows, thread.rows_inside(), places, strict=True):
        is_there = _both(is_row, _below(place, shape[-1])) if columns else is_row
        kind = ir.VectorType.get((1,), element)
        numbers.append(
            inline.item(load_vector(kind, _place(ref, own if columns else inline.i32(row), place), is_there), 0)
        )
    return _as_numbers(blocks, numbers)


def store_at(blocks: Blocks, _: Any, ref: Any, i: Any, columns: Any, x: Any) -> None:
    thread = _Thread(blocks, i.registers.item(), None)
    kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
    for row, is_row, column, number in zip(
        thread.rows, thread.rows_inside(), _numbers(columns), _numbers(x), strict=True
    ):
        vector, is_column = inline.utils.vector.broadcast(kind, number), _below(column, blocks.n)
        store_vector(vector, _place(ref, row, column), _both(is_row, is_column))


def fold(blocks: Blocks, kind: Kind, x: Any) -> Any:
    return _of_numbers(blocks.of_threads, list(_of_thread(blocks, kind, x)))


def _of_numbers(blocks: Blocks, numbers: list[Any]) -> Any:
    """A block of vectors of one number each."""
    layout = blocks.layout.to_mgpu()
    one = ir.VectorType.get((1,), ir.F32Type.get())
    vectors = [inline.utils.vector.broadcast(one, number) for number in numbers]
    registers = np.array(vectors, dtype=object).reshape(layout.registers_shape(blocks.shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def unfold(blocks: Blocks, _: Any, x: Any) -> Any:
    layout = blocks.layout.to_mgpu()
    kind = layout.registers_element_type(ir.F32Type.get())
    vectors = [inline.utils.vector.broadcast(kind, number) for number in _numbers(x)]
    registers = np.array(vectors, dtype=object).repeat(blocks.columns)
    registers = registers.reshape(layout.registers_shape(blocks.shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _combine(kind: Kind) -> Callable[[Any, Any], Any]:
    add: Callable[[Any, Any], Any] = _arrays.addf  # which contracts products and sums
    return add if kind == "add" else inline.utils.arith.maximumf


def _of_thread(blocks: Blocks, kind: Kind, x: Any) -> Iterator[Any]:
    """The sum or the maximum of what a thread has of each row."""
    combine = _combine(kind)
    for vectors in x.registers.reshape(blocks.rows, blocks.columns):
        total = _tree(combine, list(vectors))
        yield _tree(combine, [inline.item(total, k) for k in range(blocks.vector)])


def reduce(blocks: Blocks, kind: Kind, sums: Any, *arrays: Any) -> list[Any]:
    combine, totals = _combine(kind), []
    for total in (total for x in arrays for total in _of_thread(blocks, kind, x)):
        distance = blocks.row_lanes // 2
        while distance:
            total = combine(total, inline.utils.shfl_bfly(total, distance))
            distance //= 2
        totals.append(total)
    if sums is not None:
        totals = _over_warps(blocks, combine, totals, sums)
    return [_as_numbers(blocks, totals[k : k + blocks.rows]) for k in range(0, len(totals), blocks.rows)]


def _tree(combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    while len(values) > 1:
        values = [functools.reduce(combine, values[k : k + 2]) for k in range(0, len(values), 2)]
    return values[0]


def _group_and_piece(blocks: Blocks) -> tuple[Any, Any]:
    """The set of warpgroups that share the rows of a thread, and which of these its own is."""
    arith = inline.utils.arith
    warpgroup = arith.divui(inline.thread_of_cta(), inline.i32(WARPGROUP))
    pieces = inline.i32(blocks.row_warpgroups)
    return arith.divui(warpgroup, pieces), arith.remui(warpgroup, pieces)


def _over_warps(blocks: Blocks, combine: Callable[[Any, Any], Any], totals: list[Any], sums: Any) -> list[Any]:
    """Each warp leaves its numbers in shared memory, and all threads of a row read the numbers of all its warps.

    Of several arrays the numbers of all rows lie one after another.
    """
    count, rows = blocks.row_warps * blocks.row_warpgroups, blocks.shape[0]
    thread = _Thread(blocks, inline.i32(0), None)
    group, piece = _group_and_piece(blocks)
    arrays = len(totals) // blocks.rows
    base = inline.add(inline.address(sums), inline.times(group, 4 * arrays * rows * count))
    warp = inline.add(inline.times(piece, blocks.row_warps), thread.warp_of_row)
    places = [
        inline.add(base, inline.times(row, 4 * count), 4 * k * rows * count)
        for k in range(arrays)
        for row in thread.rows
    ]
    for total, place in zip(totals, places, strict=True):
        text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.f32 [$0], $1; }"
        inline.asm(text, "r,f,r", inline.add(place, inline.times(warp, 4)), total, thread.lane)
    if blocks.row_warpgroups == blocks.warpgroups > 1:
        inline.asm("bar.sync 0;", "")
    else:
        inline.asm(f"bar.sync $0, {WARPGROUP * blocks.row_warpgroups};", "r", inline.add(group, 1))
    return [_tree(combine, _load_shared(place, count)) for place in places]


def store_sums(blocks: Blocks, _: Any, ref: Any, row: Any, j: Any, x: Any, columns: Any = None) -> None:
    """Warps with other rows leave their sums in shared memory, and all threads of the CTA add them up."""
    thread = _Thread(blocks, inline.i32(0), j.registers.item())
    sums = _over_lanes(blocks, _arrays.addf, x)
    if columns is None:
        is_first = None if blocks.row_lanes == WARP else _below(thread.lane, blocks.row_lanes)
        kind = ir.VectorType.get((blocks.vector,), ir.F32Type.get())
        (pointers,) = thread.pointers(ref, [row.registers.item()])
        for pointer, numbers, inside in zip(pointers, sums, thread.columns_inside(), strict=True):
            store_vector(inline.utils.vector.from_elements(kind, numbers), pointer, _both(is_first, inside))
        return
    inline.asm("bar.sync 0;", "")  # other sums that were left here have been read
    _leave_columns(thread, inline.address(columns), sums)
    inline.asm("bar.sync 0;", "")
    _store_totals(blocks, ref, row.registers.item(), inline.address(columns))


def reduce_rows(
    blocks: Blocks, of_columns: Blocks, kinds: Sequence[Kind], _: Any, columns: Any, *arrays: Any
) -> list[Any]:
    """As `store_sums`; threads keep what they find."""
    arith, nothing = inline.utils.arith, inline.utils.c(0.0, ir.F32Type.get())
    combines, size = [_combine(kind) for kind in kinds], blocks.row_groups * _row_bytes(blocks)
    numbers = [_over_lanes(blocks, *given) for given in zip(combines, arrays, strict=True)]
    places = [inline.add(inline.address(columns), size * k) for k in range(len(arrays))]
    thread = _Thread(blocks, inline.i32(0), _group_and_piece(blocks)[1])
    inline.asm("bar.sync 0;", "")  # other numbers that were left here have been read
    for place, left in zip(places, numbers, strict=True):
        _leave_columns(thread, place, left)
    inline.asm("bar.sync 0;", "")
    thread = _Thread(of_columns, inline.i32(0), _group_and_piece(of_columns)[1])
    insides = thread.columns_inside()

    def totals(combine: Callable[[Any, Any], Any], place: Any) -> Iterator[Any]:
        for column, inside in zip(thread.columns, insides, strict=True):
            if inside is None:
                yield _total(blocks, combine, place, column)
            else:
                total = _total(blocks, combine, place, arith.select(inside, column, inline.i32(0)))
                yield arith.select(inside, total, nothing)

    return [_of_numbers(of_columns, list(totals(*given))) for given in zip(combines, places, strict=True)]


def _over_lanes(blocks: Blocks, combine: Callable[[Any, Any], Any], x: Any) -> list[list[Any]]:
    """The sums or the maxima of what a warp has of each column, for each vector of a thread."""
    found = [_tree(combine, list(vectors)) for vectors in x.registers.reshape(blocks.rows, blocks.columns).T]
    found = [[inline.item(vector, k) for k in range(blocks.vector)] for vector in found]
    distance = blocks.row_lanes
    while distance < WARP:
        found = [[combine(y, inline.utils.shfl_bfly(y, distance)) for y in numbers] for numbers in found]
        distance *= 2
    return found


def _leave_columns(thread: _Thread, first: Any, found: list[list[Any]]) -> None:
    """Leaves what `_over_lanes` found in shared memory, from `first` on, in a row for each warp of other rows."""
    blocks = thread.blocks
    is_first = None if blocks.row_lanes == WARP else _below(thread.lane, blocks.row_lanes)
    group, _ = _group_and_piece(blocks)
    number = inline.add(inline.times(group, blocks.row_groups // blocks.groups), thread.row_of_warp)
    first = inline.add(first, inline.times(number, _row_bytes(blocks)))
    for column, numbers in zip(thread.columns, found, strict=True):
        _store_shared(inline.add(first, inline.times(column, 4)), numbers, is_first)


def _total(blocks: Blocks, combine: Callable[[Any, Any], Any], first: Any, column: Any) -> Any:
    """The sum or the maximum of a column of what `_leave_columns` has left."""
    place, size = inline.add(first, inline.times(column, 4)), _row_bytes(blocks)
    return _tree(combine, [_load_shared(inline.add(place, size * r), 1)[0] for r in range(blocks.row_groups)])


def _row_bytes(blocks: Blocks) -> int:
    """Bytes of shared memory for a number for each column."""
    return 4 * blocks.row_warpgroups * blocks.shape[1]


def _store_totals(blocks: Blocks, ref: Any, row: Any, first: Any) -> None:
    """Stores the sums of columns that `_leave_columns` has left, a column a thread."""
    arith, kind = inline.utils.arith, ir.VectorType.get((1,), ir.F32Type.get())
    threads = blocks.warpgroups * WARPGROUP
    for k in range(0, blocks.n, threads):
        column, inside = inline.add(inline.thread_of_cta(), k), None
        if k + threads > blocks.n:
            inside = _below(column, blocks.n)
            column = arith.select(inside, column, inline.i32(0))
        total = inline.utils.vector.broadcast(kind, _total(blocks, _arrays.addf, first, column))
        store_vector(total, address(ref, inline.add(inline.times(row, blocks.n), column)), inside)


def _store_shared(place: Any, numbers: list[Any], is_there: Any) -> None:
    """Stores numbers side by side in shared memory where `is_there`, as in `load_vector`, is true."""
    count = len(numbers)
    guard, operands, letters = ("", [], "r") if is_there is None else (f"@${count + 1} ", [is_there], "r,b")
    text = "".join(f"{guard}st.shared{size}.f32 [${count} + {at}], {of};" for at, size, of in moves(count))
    inline.asm(text, "f," * count + letters, *numbers, place, *operands)


def _load_shared(place: Any, count: int) -> list[Any]:
    """So many numbers that lie side by side in shared memory, the same ones in all threads of a row."""
    llvm, number = inline.utils.llvm, ir.F32Type.get()
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    text = "".join(f"ld.shared{size}.f32 {names}, [${count} + {at}];" for at, size, names in moves(count))
    found = llvm.inline_asm(struct, [place], text, "=&f," * count + "r", has_side_effects=True)
    return [llvm.extractvalue(number, found, ir.DenseI64ArrayAttr.get([k])) for k in range(count)]
