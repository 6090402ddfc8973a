"""Sums of the columns of few rows: the second stage of sums that programs began, each with its own rows."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.triton.common import in_bounds, launch, load, span, store, tile_mask

_COLUMNS = 16  # of a program: sectors of 64 bytes


def _kernel(parts_ref: Ref, *sums_refs: Ref, block_m: int) -> None:
    _, m, n = parts_ref.shape
    vector, column = pl.program_id(0), pl.program_id(1) * _COLUMNS
    columns, column_mask = span(column, _COLUMNS), in_bounds(column, _COLUMNS, n)

    def step(i: jax.Array | int, total: jax.Array) -> jax.Array:
        rows, row_mask = span(i * block_m, block_m), in_bounds(i * block_m, block_m, m)
        return total + load(parts_ref.at[vector, rows, columns], tile_mask(row_mask, column_mask))

    total = jax.lax.fori_loop(0, pl.cdiv(m, block_m), step, jnp.zeros((block_m, _COLUMNS), jnp.float32))
    for i, sums_ref in enumerate(sums_refs):
        write = functools.partial(store, sums_ref.at[columns], jnp.sum(total, axis=0), column_mask)
        pl.when(vector == i)(write)


def column_sums(parts: jax.Array, dtypes: Sequence[DTypeLike], *, interpret: bool) -> list[jax.Array]:
    """The sums over M of each of `parts` (V, M, N) float32, in these V dtypes: V arrays (N,), in one launch."""
    _, m, n = parts.shape
    block_m = 512 if m > 1280 else 256
    sums: list[jax.Array] = launch(
        functools.partial(_kernel, block_m=block_m),
        out_shape=[jax.ShapeDtypeStruct((n,), dtype) for dtype in dtypes],
        grid=(len(parts), pl.cdiv(n, _COLUMNS)),
        num_warps=block_m // 32,  # 16 elements a thread
        interpret=interpret,
        name="column_sums",
    )(parts)
    return sums
