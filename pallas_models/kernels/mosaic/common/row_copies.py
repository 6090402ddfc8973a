"""Copies of rows to shared memory from arrays whose rows are no whole tiles."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import TILE_ROWS, transforms

_mosaic = Backend("jax.experimental.mosaic.gpu")


def copy_rows(
    ref: Ref, item: Any, rows: pl.Slice, columns: pl.Slice, slot: Ref, full: Ref, i: Any = None, *, row_bytes: int
) -> None:
    """Starts a copy of rows of `ref`, (items, rows, columns) in device memory, to `tiled` memory of `row_bytes`.

    The array may have any number of rows: past the end zeros are copied. Pallas's own copies split the rows of the
    array, too, into those of tiles, and take none whose last tile is not full.

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
    """`copy_rows` in bulk copies of rows that lie one after another in `slot`, all of them or those of a tile."""
    tile = TILE_ROWS, row_bytes // ref.dtype.itemsize
    box = rows.size if columns.size == tile[1] else TILE_ROWS, tile[1]
    num_bytes = rows.size * columns.size * ref.dtype.itemsize

    def inline(context: Any, ref: Any, slot: Any, *numbers: Any) -> None:
        utils = _mosaic.utils
        full, item, row, column = (x.registers.item() for x in numbers)
        pointer = utils.llvm.inttoptr(utils.ir.Type.parse("!llvm.ptr<3>"), full)
        barrier = utils.BarrierRef(pointer, utils.c(0, full.type), None, 1)
        # As in Pallas's copies every thread of the warpgroup arrives, and one of them copies.
        barrier.arrive_expect_tx(num_bytes // utils.WARPGROUP_SIZE)
        one = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        index = functools.partial(utils.arith.index_cast, utils.ir.IndexType.get())

        def span(first: Any, more: int, size: Any) -> Any:
            return utils.ds(index(utils.arith.addi(first, utils.c(more, first.type))), size)

        for i in range(0, rows.size, box[0]):
            tiles = slice(None) if box[0] == rows.size else i // TILE_ROWS
            for j in range(0, columns.size, box[1]):
                context.async_copy(
                    src_ref=ref,
                    dst_ref=utils.memref_reshape(utils.memref_slice(slot, (tiles, j // box[1])), box),
                    gmem_slice=(index(item), span(row, i, box[0]), span(column, j, box[1])),
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
