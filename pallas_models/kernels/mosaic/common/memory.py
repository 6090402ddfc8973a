"""Shared memory as the tensor cores read it, and how threads load it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu

ROW_BYTES = 128  # of a row of a tile of shared memory
TILE_ROWS = 8  # of a tile of shared memory


def row_bytes_of(columns: int, dtype: DTypeLike) -> int:
    """Bytes of a row of a tile of shared memory for rows of so many columns."""
    return min(ROW_BYTES, columns * jnp.dtype(dtype).itemsize)


def tiled(shape: tuple[int, ...], dtype: DTypeLike, row_bytes: int = ROW_BYTES) -> Any:
    """Shared memory of arrays (..., rows, columns), laid out as the tensor cores read them.

    In tiles of 8 rows of `row_bytes` each: 128, or 64 or 32 where columns are few or taken a few at a time.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(row_bytes, dtype))


def transforms(row_bytes: int, dtype: DTypeLike) -> tuple[Any, Any]:
    """How arrays lie in `tiled` memory."""
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


@meaning(lambda ref, layout: ref[...].T)
def load_transposed(ref: Ref, layout: Any) -> jax.Array:
    """Loads the transpose of what `ref` points at in `tiled` memory, as `load` does."""
    return load(ref.T, layout)


def _assign(ref: Ref, x: jax.Array) -> None:
    ref[...] = x


@meaning(_assign)
def store(ref: Ref, x: jax.Array) -> None:
    """Stores x in device memory, each thread the elements that it has, be they parts of a sector of 32 bytes."""
    if _jax.since(0, 12):  # which refuses parts, unless it is told not to
        plgpu.store(ref, x, optimized=False)
    else:
        _assign(ref, x)


@meaning(lambda x, layout: x)
def layout_cast(x: jax.Array, layout: Any) -> jax.Array:
    """The same values, each in the thread that has it in `layout`; what is not said is inferred, slowly.

    An array that is a constant needs it where `plgpu.inline_mgpu` takes it. A number has none.
    """
    cast: jax.Array = plgpu.layout_cast(x, layout) if x.shape else x
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


def _interpreted_meet(refs: Any) -> None:
    plgpu.barrier_arrive(refs.met)
    plgpu.barrier_wait(refs.met)


def meeting(num_warpgroups: int, interpret: bool) -> dict[str, Any]:
    """What `meet` needs in the scratch memory of a CTA."""
    return dict(met=plgpu.Barrier(num_arrivals=num_warpgroups)) if interpret else {}


@meaning(_interpreted_meet)
def meet(refs: Any) -> None:
    """All threads of a CTA wait for one another, and see what others have left in shared memory."""
    del refs

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        inline.utils.gpu.barrier()

    wait()
