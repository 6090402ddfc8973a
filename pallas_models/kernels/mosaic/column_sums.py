"""Sums of the columns of few rows: the second stage of sums that CTAs began, each with its own rows.

Nothing here is of one generation of GPUs.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile

_COLUMNS, _VECTOR = 8, 4  # of a CTA, a sector of 32 bytes; of a thread
_UNROLLED = 8  # loads of a thread on their way at once


def _kernel(refs: Refs, *, tile: Tile, num_sums: int) -> None:
    n = refs.parts.shape[1]
    blocks, m = pl.cdiv(n, tile.columns), refs.parts.shape[0] // num_sums
    cta = jax.lax.axis_index("cta")
    vector, column = jax.lax.div(cta, blocks), jax.lax.rem(cta, blocks) * tile.columns

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        found = []
        for j in range(_UNROLLED):
            rows = (i * _UNROLLED + j) * tile.rows + tile.index()
            found.append(tile.load(refs.parts, jnp.where(rows < m, vector * m + rows, -1), column))
        return functools.reduce(jnp.add, found, total)

    total = jax.lax.fori_loop(0, pl.cdiv(m, _UNROLLED * tile.rows), step, tile.full(0.0))
    sums, first = tile.along(tile.sum_rows(total, refs.scratch)), jnp.where(tile.index() == 0, 0, -1)
    for i in range(num_sums):
        sums_ref = getattr(refs, f"sums{i}")
        pl.when(vector == i)(functools.partial(tile.store, sums_ref, first, sums, column))


def column_sums(parts: jax.Array, dtypes: Sequence[DTypeLike], *, interpret: bool) -> list[jax.Array]:
    """The sums over M of each of `parts` (V, M, N) float32, in these V dtypes: V arrays (N,), in one launch."""
    num_sums, m, n = parts.shape
    vector = math.gcd(n, _VECTOR)
    tile = Tile(_COLUMNS // vector, vector)
    sums = launch(
        functools.partial(_kernel, tile=tile, num_sums=num_sums),
        dict(parts=parts.reshape(num_sums * m, n)),
        {f"sums{i}": jax.ShapeDtypeStruct((1, n), dtype) for i, dtype in enumerate(dtypes)},
        dict(scratch=tile.scratch),
        name="column_sums",
        num_ctas=num_sums * pl.cdiv(n, tile.columns),
        num_warpgroups=1,
        interpret=interpret,
    )
    return [x.reshape(n) for x in sums]
