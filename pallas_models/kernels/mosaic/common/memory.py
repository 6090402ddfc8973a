"""Shared memory as the tensor cores read it, and how threads load it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models import _jax
from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import meaning

ROW_BYTES = 128  # of a row of a tile of shared memory
TILE_ROWS = 8  # of a tile of shared memory

_mosaic = Backend("jax.experimental.mosaic.gpu")


def tiled(shape: tuple[int, ...], dtype: DTypeLike, row_bytes: int = ROW_BYTES) -> Any:
    """Shared memory of arrays (..., rows, columns), laid out as the tensor cores read them.

    In tiles of 8 rows of `row_bytes` each: 128, or 64 or 32 where columns are few or taken a few at a time.
    """
    return plgpu.SMEM(shape, dtype, transforms=_transforms(row_bytes, dtype))


def _transforms(row_bytes: int, dtype: DTypeLike) -> tuple[Any, Any]:
    columns = row_bytes // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((TILE_ROWS, columns)), plgpu.SwizzleTransform(row_bytes)


def untiled(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Why an array (..., rows, columns) cannot be copied to or from `tiled` memory in parts; None if it can."""
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    if shape[-1] % columns or shape[-2] % TILE_ROWS:
        return f"takes rows in multiples of 8 and columns in multiples of {columns}, not {name} of shape {shape}"
    return None


_INDEX = () if _jax.since(0, 11) else ((),)  # JAX 0.10 wants one


@meaning(lambda ref, layout: ref[...])
def load(ref: Ref, layout: Any) -> jax.Array:
    """Loads what `ref` points at in device or shared memory, each thread the elements that it has in `layout`."""
    loaded: jax.Array = plgpu.load(ref, *_INDEX, layout=layout, optimized=False)
    return loaded


@meaning(lambda x, layout: x)
def layout_cast(x: jax.Array, layout: Any) -> jax.Array:
    """The same values, each in the thread that has it in `layout`; what is not said is inferred, slowly."""
    cast: jax.Array = plgpu.layout_cast(x, layout)
    return cast


@meaning(lambda shape, axis, layout: jax.lax.broadcasted_iota(jnp.int32, shape, axis))
def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """The index along an axis of each element of an array, int32."""
    index: jax.Array = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
    return index


@meaning(lambda: plgpu.commit_smem())
def commit_reads() -> None:
    """Counts all reads of shared memory so far as done before later copies; a GPU needs nothing for that."""


def row(ref: Ref, shape: tuple[int, ...]) -> jax.Array:
    """The vector in shared memory that `ref` points at, in float32, as every row of a matrix of `shape`."""
    return jax.lax.broadcast_in_dim(ref[...].astype(jnp.float32), shape, [1])


def _store_transposed(ref: Ref, x: jax.Array) -> None:
    ref[...] = x.T


@meaning(_store_transposed)
def store_transposed(ref: Ref, x: jax.Array) -> None:
    """Stores the transpose of x, which threads hold as tensor cores leave it, in `tiled` memory."""
    ref.T[...] = x


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

    kinds = plgpu.RefType(), plgpu.RefType(_transforms(row_bytes, ref.dtype))
    numbers = _jax.barrier_address(full) + 8 * (0 if i is None else i), item, rows.start, columns.start
    plgpu.inline_mgpu(arg_types=(*kinds, *[plgpu.Layout.WG_SPLAT] * len(numbers)))(inline)(
        ref, slot, *(jnp.asarray(x, jnp.int32) for x in numbers)
    )
