"""Tiles of Mosaic's row kernels: what a GPU loads, stores and adds up, and its meaning for the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.mosaic.common import memory
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile
from pallas_models.kernels.mosaic.common.vectors import vector_length
from parity.ops.test_lowering import HOPPER
from parity.support.common import (
    MOSAIC,
    MOSAIC_CALL,
    assert_close,
    cuda_device,
    float64,
    interprets_mosaic,
    normal,
)
from parity.support.primitives import all_called
from parity.support.tolerances import LONG

M, N = 70, 44
# Rows shared by one warp, by several, by a part of one; columns past the end, several vectors a thread.
TILES = [Tile(32, 2), Tile(64, 1), Tile(128, 4), Tile(4, 4), Tile(2, 1), Tile(2, 4, 7)]


def moving(refs: Refs, *, tile: Tile) -> None:
    """Rows from a later one to the first; two are none."""
    index = tile.index()
    is_first = jnp.where(index == 0, 0, M)
    numbers = jnp.where(index == 1, M, jnp.where(index == 2, -1, tile.rows - index))
    for column in range(0, N, tile.columns):
        x = tile.load(refs.x, numbers, column)
        y = x.astype(jnp.float32) + tile.along(tile.load_row(refs.shift, column).astype(jnp.float32))
        tile.store(refs.y, tile.index(), y, column)
        tile.leave_sums(refs.left, x.astype(jnp.float32))
        memory.meet(refs)
        parts = [memory.load(refs.left.at[part], tile.layout.reduce(0)) for part in range(tile.row_warps)]
        tile.store(refs.sums, is_first, tile.along(functools.reduce(jnp.add, parts)), column)
        memory.meet(refs)
    tile.leave_sums(refs.counts, tile.index().astype(jnp.float32))
    memory.meet(refs)
    count = functools.reduce(jnp.add, (refs.counts[part, 0] for part in range(tile.row_warps)))
    tile.store(refs.count, is_first, tile.full(0.0) + count)
    for i, value in enumerate((None, 2)):
        bits = tile.bits(refs.marks, 3, 3 + marks_before_end(tile), value, tile.most_bits)
        tile.store(refs.bits, tile.index() + i * tile.rows, tile.across(bits))
    marked = tile.sum_marked(refs.x, 1, bits, rows_to_add(tile)) + tile.across(tile.count_bits(bits))
    tile.store(refs.marked, tile.index(), marked)


def rows_to_add(tile: Tile) -> int:
    return 2 if 1 + 2 * tile.rows <= M else 1


def marks_before_end(tile: Tile) -> int:
    """So many that the last bit of some rows is not among them."""
    return tile.most_bits * tile.rows - 1


def moved(arrays: dict[str, jax.Array], *, tile: Tile, interpret: bool) -> list[jax.Array]:
    return launch(
        functools.partial(moving, tile=tile),
        arrays,
        dict(
            y=jax.ShapeDtypeStruct((tile.rows, N), arrays["x"].dtype),
            sums=jax.ShapeDtypeStruct((1, N), jnp.float32),
            count=jax.ShapeDtypeStruct((1, N), jnp.float32),
            bits=jax.ShapeDtypeStruct((2 * tile.rows, N), jnp.int32),
            marked=jax.ShapeDtypeStruct((tile.rows, N), jnp.float32),
        ),
        dict(
            left=plgpu.SMEM((tile.row_warps, tile.columns), jnp.float32),
            counts=plgpu.SMEM((tile.row_warps, 1), jnp.float32),
            **memory.meeting(1, interpret),
        ),
        name="moved",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )


def operands(tile: Tile, dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(80)
    marks = rng.integers(0, 4, 3 + marks_before_end(tile) + 2)
    return dict(
        x=normal(rng, M, N, dtype=dtype),
        shift=normal(rng, N),
        marks=jnp.asarray(marks, jnp.int32),
    )


@interprets_mosaic
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile, dtype):
    arrays = operands(tile, dtype)
    with all_called("mosaic.common.tiles"):
        call = functools.partial(moved, tile=tile, interpret=MOSAIC != "mosaic")
        y, sums, count, bits, added = jax.jit(call)(arrays)
    x = np.concatenate([arrays["x"], np.zeros((1, N), dtype)])
    numbers = tile.rows - np.arange(tile.rows)
    numbers[1:3] = M  # there is no such row
    expected = x[numbers]
    assert_close(sums[0], expected.astype(np.float64).sum(0), LONG)
    shifted = expected.astype(np.float32) + np.asarray(arrays["shift"])
    np.testing.assert_array_equal(y, shifted.astype(dtype))
    assert count[0, 0] == sum(range(tile.rows))
    marks = np.append(np.asarray(arrays["marks"])[3 : 3 + marks_before_end(tile)], 0).reshape(-1, tile.rows)
    for found, is_marked in zip(np.split(np.asarray(bits[:, 0]), 2), (marks != 0, marks == 2), strict=True):
        packed = sum(is_marked[k].astype(np.uint32) << np.uint32(k) for k in range(tile.most_bits))
        np.testing.assert_array_equal(found.astype(np.uint32), packed)
    whole = np.sum(is_marked, axis=0)[:, None] + np.zeros((1, min(tile.columns, N)))
    for k in range(rows_to_add(tile)):
        rows = float64(arrays["x"])[1 + k * tile.rows :][: tile.rows, : whole.shape[1]]
        whole += np.where(is_marked[k][:, None], rows, 0.0)
    assert_close(added[:, : whole.shape[1]], whole, LONG)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_lower(tile):
    arrays = operands(tile, "float16")
    with cuda_device(*HOPPER):
        call = functools.partial(moved, tile=tile, interpret=False)
        text = jax.jit(call).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert MOSAIC_CALL in text


def test_a_tile_covers_whole_rows():
    for width in (1, 3, 44, 384, 1000, 4096):
        tile = Tile.of_rows(width, vector_length(width, "float16"))
        assert tile.columns >= width and width % tile.vector == 0
        assert tile.rows * tile.threads == 128
