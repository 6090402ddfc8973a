"""Tiles of a matrix product: which a program has, how operands are loaded, and the sum over all of K or a part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.tiles import tile_order
from pallas_models.kernels.triton.common import (
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    power_of_two_blocks,
    span,
    store,
    tile_mask,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tile sizes: `block_m` x `block_n` outputs per program, `block_k` of the contraction per step.

    `group_m` row blocks are walked together before the next column block, so that programs running at
    the same time share operands in L2. With `splits` above 1 that many programs each take a part of K for the same
    tile, and a second kernel adds up their partial sums.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    splits: int = 1

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_k", "num_warps")
        if self.block_n < 16 or self.block_n % 16:
            raise ValueError(f"{__name__}: block_n={self.block_n} must be a positive multiple of 16")
        if self.splits < 1:
            raise ValueError(f"{__name__}: splits={self.splits} must be positive")


def shared_memory(config: Config, itemsize: int) -> int:
    """Bytes of shared memory that a CTA takes: the operands of all stages."""
    return config.num_stages * (config.block_m + config.block_n) * config.block_k * itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a matrix: its rows, and its columns as blocks of power-of-two width."""

    rows: pl.Slice
    row_mask: jax.Array | None
    columns: list[tuple[pl.Slice, jax.Array | None]]

    def load(self, ref: Ref, c: int, *leading: jax.Array) -> jax.Array:
        """Column block `c` of this tile, in float32, of the matrix that `leading` indices select."""
        columns, mask = self.columns[c]
        block = ref.at[(*leading, self.rows, columns)]
        return load(block, tile_mask(self.row_mask, mask)).astype(jnp.float32)

    def load_vector(self, ref: Ref, c: int, *leading: jax.Array) -> jax.Array:
        """The part of a vector that belongs to column block `c`, in float32, as a row."""
        columns, mask = self.columns[c]
        return load(ref.at[(*leading, columns)], mask).astype(jnp.float32)[None, :]

    def store(self, ref: Ref, c: int, value: jax.Array, *leading: jax.Array) -> None:
        """Stores `value` as column block `c` of this tile, in the matrix that `leading` indices select."""
        columns, mask = self.columns[c]
        store(ref.at[(*leading, self.rows, columns)], value, tile_mask(self.row_mask, mask))


def make_tile(config: Config, i: jax.Array, j: jax.Array | int, m: int, n: int, *, largest: int = 256) -> Tile:
    """The tile at row block i and column block j of an (m, n) matrix, in blocks of up to `largest` columns."""
    row, column = i * config.block_m, j * config.block_n
    exact = n % config.block_n == 0
    return Tile(
        span(row, config.block_m),
        in_bounds(row, config.block_m, m),
        [
            (span(column + start, block), None if exact else column + start + jnp.arange(block) < n)
            for start, block in power_of_two_blocks(config.block_n, largest)
        ],
    )


def program_tile(config: Config, m: int, n: int, *, largest: int = 256) -> Tile:
    """The tile of this program, from the first axis of the grid."""
    i, j = tile_order(pl.program_id(0), pl.cdiv(m, config.block_m), pl.cdiv(n, config.block_n), config.group_m)
    return make_tile(config, i, j, m, n, largest=largest)


def num_tiles(config: Config, m: int, n: int) -> int:
    """The number of tiles of an (m, n) output."""
    return pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n)


def steps_per_part(k: int, config: Config, parts: int) -> int:
    """How many blocks of K each of `parts` programs takes."""
    return pl.cdiv(pl.cdiv(k, config.block_k), parts)


# Loads blocks of an operand, given a block of K and the mask of it.
Load = Callable[[pl.Slice, jax.Array | None], list[jax.Array]]


def load_rows(x_ref: Ref, tile: Tile) -> Load:
    """Loads the rows of x, (M, K), that belong to a tile."""
    return lambda ks, k_mask: [load(x_ref.at[tile.rows, ks], tile_mask(tile.row_mask, k_mask))]


def load_columns(w_ref: Ref, tile: Tile, *, transpose_w: bool = False) -> Load:
    """Loads the columns of w, (K, N) or, transposed, (N, K), that belong to a tile, block by block."""
    if transpose_w:
        return lambda ks, k_mask: [load(w_ref.at[ns, ks], tile_mask(mask, k_mask)) for ns, mask in tile.columns]
    return lambda ks, k_mask: [load(w_ref.at[ks, ns], tile_mask(k_mask, mask)) for ns, mask in tile.columns]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """How a block of x is multiplied with a block of w.

    Attributes:
      precision: of float32.
      acc_dtype: in which products are summed.
      transpose_w: whether w is (N, K).
      multiply: called as `jax.lax.dot_general` is.
    """

    precision: jax.lax.Precision
    acc_dtype: DTypeLike = jnp.float32
    transpose_w: bool = False
    multiply: Callable[..., jax.Array] = jax.lax.dot_general

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        contraction = (((1,), (1 if self.transpose_w else 0,)), ((), ()))
        return self.multiply(x, w, contraction, self.precision, self.acc_dtype)


def multiply_and_add(
    x: jax.Array, w: jax.Array, contraction: Any, precision: jax.lax.Precision, acc_dtype: DTypeLike
) -> jax.Array:
    """`dot_general` of one row, element by element: exact in float32 whatever `precision`, and no tensor cores."""
    ((_, (axis,)), _) = contraction
    terms = x.astype(acc_dtype).reshape((-1, 1) if axis == 0 else (1, -1)) * w.astype(acc_dtype)
    return jnp.sum(terms, axis=axis)[None, :]


def accumulate(
    load_x: Load,
    load_w: Load,
    widths: list[int],
    k: int,
    config: Config,
    dot: Dot,
    *,
    part: jax.Array | int = 0,
    parts: int = 1,
) -> list[jax.Array]:
    """The product of rows of x with blocks of `widths` columns of w, over one of equal parts of K, in float32."""
    steps, block_k = steps_per_part(k, config, parts), config.block_k
    exact = k == parts * steps * block_k

    def step(s: jax.Array, accs: list[jax.Array]) -> list[jax.Array]:
        start = (part * steps + s) * block_k
        ks, k_mask = span(start, block_k), None if exact else start + jnp.arange(block_k) < k
        (x,), ws = load_x(ks, k_mask), load_w(ks, k_mask)
        return [acc + dot(x, w) for acc, w in zip(accs, ws, strict=True)]

    accs = [jnp.zeros((config.block_m, width), dot.acc_dtype) for width in widths]
    return [acc.astype(jnp.float32) for acc in jax.lax.fori_loop(0, steps, step, accs)]


def product(
    x_ref: Ref,
    w_ref: Ref,
    tile: Tile,
    config: Config,
    dot: Dot,
    *,
    part: jax.Array | int = 0,
    parts: int = 1,
) -> list[jax.Array]:
    """A tile of x @ w over one of equal parts of K, one float32 array per column block."""
    return accumulate(
        load_rows(x_ref, tile),
        load_columns(w_ref, tile, transpose_w=dot.transpose_w),
        [int(ns.size) for ns, _ in tile.columns],
        x_ref.shape[1],
        config,
        dot,
        part=part,
        parts=parts,
    )


def _parts_kernel(
    x_ref: Ref,  # (M, K)
    w_ref: Ref,  # (K, N), or (N, K) if transposed
    o_ref: Ref,  # (P, M, N)
    *,
    config: Config,
    dot: Dot,
) -> None:
    parts, m, n = o_ref.shape
    part, tile = pl.program_id(1), program_tile(config, m, n)
    ys = product(x_ref, w_ref, tile, config, dot, part=part, parts=parts)
    for c, y in enumerate(ys):
        tile.store(o_ref, c, y, part)


def product_parts(x: jax.Array, w: jax.Array, *, dot: Dot, config: Config, interpret: bool) -> jax.Array:
    """The partial sums of x @ w, (splits, M, N) in float32, one for each part of K."""
    m, n = x.shape[0], w.shape[0 if dot.transpose_w else 1]
    return launch(
        functools.partial(_parts_kernel, config=config, dot=dot),
        out_shape=jax.ShapeDtypeStruct((config.splits, m, n), jnp.float32),
        grid=(num_tiles(config, m, n), config.splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="matmul_parts",
    )(x, w)
