"""Copies to shared memory, and from it, of blocks of arrays that are no whole tiles of these arrays."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS, transforms

_mosaic = Backend("jax.experimental.mosaic.gpu")


def copy_rows(
    ref: Ref, item: Any, rows: pl.Slice, columns: pl.Slice, slot: Ref, full: Ref, i: Any = None, *, row_bytes: int
) -> None:
    """Starts a copy of rows of `ref`, (items, rows, columns) in device memory, to `tiled` memory of `row_bytes`.

    The array may have any number of rows: past the end zeros are copied. Pallas's own copies split the rows of the
    array, too, into rows of tiles, and take none whose last tile is not full.

    Args:
      full: the barrier at which the copy arrives, or barriers, the i-th of which it is.
    """
    copy = _copy_whole_rows if ref.shape[1] % TILE_ROWS == 0 else _copy_ragged_rows
    copy(ref, item, rows, columns, slot, full, i, row_bytes)


def _copy_whole_rows(
    ref: Ref, item: Any, rows: pl.Slice, columns: pl.Slice, slot: Ref, full: Ref, i: Any, row_bytes: int
) -> None:
    plgpu.copy_gmem_to_smem(ref.at[item, rows, columns], slot, full if i is None else full.at[i])


@meaning(_copy_whole_rows)
def _copy_ragged_rows(
    ref: Ref, item: Any, rows: pl.Slice, columns: pl.Slice, slot: Ref, full: Ref, i: Any, row_bytes: int
) -> None:
    """`copy_rows` in bulk copies of rows that lie one after another in `slot`, all of them or a tile's."""
    shape, width = slot.shape, row_bytes // ref.dtype.itemsize
    num_bytes = shape[0] * shape[1] * ref.dtype.itemsize

    def inline(context: Any, ref: Any, slot: Any, *numbers: Any) -> None:
        utils = _mosaic.utils
        full, *first = (x.registers.item() for x in numbers)
        pointer = utils.llvm.inttoptr(utils.ir.Type.parse("!llvm.ptr<3>"), full)
        barrier = utils.BarrierRef(pointer, utils.c(0, full.type), None, 1)
        # As in Pallas's copies every thread of the warpgroup arrives, and one of them copies.
        barrier.arrive_expect_tx(num_bytes // utils.WARPGROUP_SIZE)
        one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        for box, place in _boxes(slot, shape, width, first):
            context.async_copy(
                src_ref=ref,
                dst_ref=box,
                gmem_slice=place,
                swizzle=row_bytes,
                barrier=barrier,
                arrive=False,
                predicate=one,
            )

    kinds = plgpu.RefType(), plgpu.RefType(transforms(row_bytes, ref.dtype))
    numbers = _jax.barrier_address(full) + 8 * (0 if i is None else i), item, rows.start, columns.start
    plgpu.inline_mgpu(arg_types=(*kinds, *[plgpu.Layout.WG_SPLAT] * len(numbers)))(inline)(
        ref, slot, *(jnp.asarray(x, jnp.int32) for x in numbers)
    )


def _copy_back(slot: Ref, ref: Ref, first: Sequence[Any], rows_axis: int = 1) -> None:
    place = list(first)
    place[rows_axis], place[-1] = (
        pl.ds(i, n) for i, n in zip((first[rows_axis], first[-1]), slot.shape, strict=True)
    )
    plgpu.copy_smem_to_gmem(slot, ref.at[tuple(place)])


@meaning(_copy_back)
def copy_back(slot: Ref, ref: Ref, first: Sequence[Any], rows_axis: int = 1) -> None:
    """Starts a copy of a slot, (rows, columns) of `tiled` memory, to a block of an array in device memory.

    The block may begin at any row, and at a column whose address is a multiple of 16 bytes. What reaches past the
    end of the array is not written. Pallas's own copies write whole tiles.

    Args:
      first: the index of the first element of the block in `ref`.
      rows_axis: the axis of the rows in `ref`; columns are the last.
    """
    shape, width = slot.shape, ROW_BYTES // ref.dtype.itemsize

    def inline(context: Any, ref: Any, slot: Any, *numbers: Any) -> None:
        utils = _mosaic.utils
        one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        for box, place in _boxes(slot, shape, width, [x.registers.item() for x in numbers], rows_axis):
            context.async_copy(
                src_ref=box, dst_ref=ref, gmem_slice=place, swizzle=ROW_BYTES, arrive=False, predicate=one
            )
        utils.nvvm.cp_async_bulk_commit_group()

    kinds = plgpu.RefType(), plgpu.RefType(transforms(ROW_BYTES, ref.dtype))
    plgpu.inline_mgpu(arg_types=(*kinds, *[plgpu.Layout.WG_SPLAT] * len(first)))(inline)(
        ref, slot, *(jnp.asarray(x, jnp.int32) for x in first)
    )


def _boxes(
    slot: Any, shape: tuple[int, int], width: int, first: Sequence[Any], rows_axis: int = 1
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The parts of a slot that lie in one piece, each with its place in an array.

    Args:
      shape: of the slot.
      width: columns of a tile of it.
      first: the index of the first element in the array.
      rows_axis: the axis of the rows in the array; columns are the last.
    """
    utils = _mosaic.utils
    rows = shape[0] if shape[1] == width else TILE_ROWS

    def index(x: Any) -> Any:
        return utils.arith.index_cast(utils.ir.IndexType.get(), x)

    def span(first: Any, more: int, size: int) -> Any:
        return utils.ds(index(utils.arith.addi(first, utils.c(more, first.type))), size)

    for i in range(0, shape[0], rows):
        tiles = slice(None) if rows == shape[0] else i // TILE_ROWS
        for j in range(0, shape[1], width):
            place = [index(x) for x in first]
            place[rows_axis], place[-1] = span(first[rows_axis], i, rows), span(first[-1], j, width)
            yield utils.memref_reshape(utils.memref_slice(slot, (tiles, j // width)), (rows, width)), tuple(place)
