"""Products of the triangle multiplicative update and of its gradient: a matrix product per hidden channel."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.tiles import check_divides, tile_order
from pallas_models.kernels.forms.trimul import Product
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    plgpu,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` x `block_n` positions (i, j) of one channel per program, `block_k` third positions per step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def heuristic(n: int, dtype: DTypeLike) -> Config:
    """Chooses tiles for matrices (n, n); measured on an H200."""
    if jnp.dtype(dtype).itemsize == 4:
        return _config(64, 64, 32, 4, 3)
    if n <= 128:
        side = block_size(n, 32, 64)
        return _config(side, side, 64, 4, 3)
    return _config(128, 128, 64, 4, 3) if n < 768 else _config(128, 256, 64, 8, 3)


def configs(dtype: DTypeLike) -> Iterator[Config]:
    """The tiles worth measuring."""
    sizes = (32, 64) if jnp.dtype(dtype).itemsize == 4 else (64, 128, 256)
    for block_m, block_n, num_warps in itertools.product(sizes, sizes, (4, 8)):
        if 16 <= block_m * block_n // (32 * num_warps) <= 128:
            yield from (
                _config(block_m, block_n, k, num_warps, s) for k, s in ((32, 4), (64, 2), (64, 3), (64, 4))
            )


def shared_memory(config: Config, dtype: DTypeLike) -> int:
    """Bytes of shared memory that the operands of all stages take."""
    return config.num_stages * (config.block_m + config.block_n) * config.block_k * jnp.dtype(dtype).itemsize


def _product_kernel(
    sides_ref: Ref,  # (B P, S, N / P rows, N / P columns): the left factors
    right_ref: Ref | None,  # (B P, S', N / P rows, N / P columns): the right ones, where they are apart
    o_ref: Ref,  # (B P, H, N / P rows, N / P columns)
    *,
    config: Config,
    form: Product[Any],
) -> None:
    h, n, pieces = form.channels, form.size, form.pieces
    piece_rows, piece_columns = n // pieces[0], n // pieces[1]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    trans_a, trans_b = form.transpose_left, form.transpose_right
    tiles_m, tiles_n = pl.cdiv(n, block_m), pl.cdiv(n, block_n)
    pid, tiles = pl.program_id(0), jnp.int32(tiles_m * tiles_n)
    i, j = tile_order(jax.lax.rem(pid, tiles), tiles_m, tiles_n, group_m=8)
    matrix = jax.lax.div(pid, tiles)
    batch, channel = jax.lax.div(matrix, jnp.int32(h)), jax.lax.rem(matrix, jnp.int32(h))
    left, right = (channel + first if first else channel for first in form.firsts)
    rows, columns = (i * block_m, block_m), (j * block_n, block_n)
    row_mask, column_mask = (in_bounds(*block, n) for block in (rows, columns))

    def at(ref: Ref, channel: jax.Array, rows: tuple[Any, int], columns: tuple[Any, int]) -> Ref:
        """Rows and columns of a matrix, (first, number) each."""
        if form.by_rows:
            return ref.at[batch, span(*rows), channel, span(*columns)]
        if pieces == (1, 1):
            return ref.at[batch, channel, span(*rows), span(*columns)]
        row, column = (
            jax.lax.div(x[0], jnp.int32(n // count)) for x, count in zip((rows, columns), pieces, strict=True)
        )
        piece = (batch * pieces[0] + row) * pieces[1] + column
        return ref.at[
            piece,
            channel,
            span(rows[0] - row * piece_rows, rows[1]),
            span(columns[0] - column * piece_columns, columns[1]),
        ]

    def step(s: jax.Array, acc: jax.Array) -> jax.Array:
        ks = s * block_k, block_k
        k_mask = in_bounds(*ks, n)
        if trans_a:
            a = load(at(sides_ref, left, ks, rows), tile_mask(k_mask, row_mask))
        else:
            a = load(at(sides_ref, left, rows, ks), tile_mask(row_mask, k_mask))
        ref = sides_ref if right_ref is None else right_ref
        if trans_b:
            b = load(at(ref, right, columns, ks), tile_mask(column_mask, k_mask))
        else:
            b = load(at(ref, right, ks, columns), tile_mask(k_mask, column_mask))
        return acc + plgpu.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=form.precision)

    acc = jax.lax.fori_loop(0, pl.cdiv(n, block_k), step, jnp.zeros((block_m, block_n), jnp.float32))
    store(at(o_ref, channel, rows, columns), acc * form.factor, tile_mask(row_mask, column_mask))


def product(
    form: Product[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """The products, in the dtype of the sides; with `by_rows` columns beyond N are left as they were."""
    sides, n = form.sides, form.size
    matrices = form.batch * form.channels
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_product",
            shape={"b": matrices, "n": n} | form.kind,
            bucketed=("b", "n"),
            dtype=sides.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, n, sides.dtype),
            candidates=functools.partial(configs, sides.dtype),
            shared_memory=functools.partial(shared_memory, dtype=sides.dtype),
        ),
        target,
    )
    check_divides(config, n, form.pieces)
    return launch(
        functools.partial(_product_kernel, config=config, form=form.abstract()),
        out_shape=jax.ShapeDtypeStruct(form.out_shape(), sides.dtype),
        grid=(matrices * pl.cdiv(n, config.block_m) * pl.cdiv(n, config.block_n),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="trimul_product",
    )(sides, form.right)
