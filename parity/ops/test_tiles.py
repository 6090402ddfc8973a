"""Tiles of Mosaic's row kernels: what a GPU loads, stores and adds up, and its meaning for the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile
from pallas_models.kernels.mosaic.common.vectors import vector_length
from parity.ops.test_lowering import HOPPER
from parity.support.common import MOSAIC, MOSAIC_CALL, assert_close, cuda_device, interprets_mosaic, normal
from parity.support.primitives import all_called
from parity.support.tolerances import LONG

M, N = 70, 44
# Rows shared by one warp, by several, by a part of one; columns past the end, several vectors a thread.
TILES = [Tile(32, 2), Tile(64, 1), Tile(128, 4), Tile(4, 4), Tile(2, 1), Tile(2, 4, 7)]


def moving(refs: Refs, *, tile: Tile) -> None:
    """Rows after those that are named, from the last name to the first; two are none."""
    backwards = tile.rows - 2 - tile.index()  # the last one is below 0
    numbers = tile.gather(refs.numbers, backwards) + 1
    for column in range(0, N, tile.columns):
        x = tile.load(refs.x, numbers, column)
        y = x.astype(jnp.float32) + tile.along(tile.load_row(refs.shift, column).astype(jnp.float32))
        tile.store(refs.y, tile.index(), y, column)
        sums = tile.along(tile.sum_rows(x.astype(jnp.float32), refs.scratch))
        tile.store(refs.sums, jnp.where(tile.index() == 0, 0, M), sums, column)


def moved(arrays: dict[str, jax.Array], *, tile: Tile, interpret: bool) -> list[jax.Array]:
    return launch(
        functools.partial(moving, tile=tile),
        arrays,
        dict(
            y=jax.ShapeDtypeStruct((tile.rows, N), arrays["x"].dtype),
            sums=jax.ShapeDtypeStruct((1, N), jnp.float32),
        ),
        dict(scratch=tile.scratch),
        name="moved",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )


def operands(tile: Tile, dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(80)
    numbers = rng.permutation(M)[np.arange(tile.rows) % M] - 1
    numbers[0] = M - 1  # no row comes after the last one
    return dict(x=normal(rng, M, N, dtype=dtype), shift=normal(rng, N), numbers=jnp.asarray(numbers, jnp.int32))


@interprets_mosaic
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(tile, dtype):
    arrays = operands(tile, dtype)
    with all_called("mosaic.common.tiles"):
        call = functools.partial(moved, tile=tile, interpret=MOSAIC != "mosaic")
        y, sums = jax.jit(call)(arrays)
    x = np.concatenate([arrays["x"], np.zeros((1, N), dtype)])
    numbers = np.append(np.asarray(arrays["numbers"])[: tile.rows - 1][::-1], 0)  # what lies at -1 reads as 0
    expected = x[numbers + 1]
    assert_close(sums[0], expected.astype(np.float64).sum(0), LONG)
    shifted = expected.astype(np.float32) + np.asarray(arrays["shift"])
    np.testing.assert_array_equal(y, shifted.astype(dtype))


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
