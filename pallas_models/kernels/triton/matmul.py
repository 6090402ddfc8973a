"""Matrix product: one program per output tile, the epilogue in registers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.triton._common import (
    Ref,
    activate,
    check_powers_of_two,
    in_bounds,
    load,
    local_gpu,
    power_of_two_blocks,
    span,
    store,
    tile_mask,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tile sizes: `block_m` x `block_n` outputs per program, `block_k` of the contraction per step.

    `group_m` row blocks are walked together before the next column block, so that programs running at
    the same time share operands in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_k", "num_warps")
        if self.block_n % 16:
            raise ValueError(f"{__name__}: block_n={self.block_n} must be a multiple of 16")


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


_LARGE = _config(128, 128, 64, 4, 2)
# Tiles for half precision and the rate each computes its outputs at, relative to the first: measured on an
# H200 over the products of MiniLM with 16 to 8192 rows.
_SMALLER = (
    (_config(64, 128, 64, 4, 3), 1.0),
    (_config(64, 64, 128, 4, 3), 0.85),
    (_config(64, 32, 128, 4, 3), 0.7),
    (_config(16, 32, 128, 4, 3), 0.3),
    (_config(16, 16, 128, 2, 3), 0.38),
)
_TILE_OVERHEAD = 1200  # what a tile costs besides its outputs, in outputs


def heuristic(m: int, n: int, k: int, dtype: DTypeLike, num_cores: int) -> Config:
    """Chooses tiles for x (m, k) and w (k, n).

    The largest tiles where there are two for every core; else those that keep the busiest core shortest.
    """
    if jnp.dtype(dtype).itemsize == 4:
        return _config(64, 64, 32, 4, 3)

    def tiles(config: Config) -> int:
        return pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n)

    def cost(candidate: tuple[Config, float]) -> float:
        config, rate = candidate
        return pl.cdiv(tiles(config), num_cores) * (config.block_m * config.block_n / rate + _TILE_OVERHEAD)

    return _LARGE if tiles(_LARGE) >= 2 * num_cores else min(_SMALLER, key=cost)[0]


def tile_order(pid: jax.Array, tiles_m: int, tiles_n: int, group_m: int) -> tuple[jax.Array, jax.Array]:
    """Row and column block of program `pid`: column by column within groups of `group_m` row blocks."""
    if tiles_m <= group_m:
        return pid % tiles_m, pid // tiles_m
    group, within = pid // (group_m * tiles_n), pid % (group_m * tiles_n)
    first = group * group_m
    height = jnp.minimum(tiles_m - first, group_m)
    return first + within % height, within // height


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The output tile of a program: its rows, and its columns as blocks of power-of-two width."""

    rows: pl.Slice
    row_mask: jax.Array | None
    columns: list[tuple[pl.Slice, jax.Array | None]]

    def load(self, ref: Ref, c: int) -> jax.Array:
        """The part of a matrix that lies under column block `c`, in float32."""
        columns, mask = self.columns[c]
        return load(ref.at[self.rows, columns], tile_mask(self.row_mask, mask)).astype(jnp.float32)

    def load_vector(self, ref: Ref, c: int) -> jax.Array:
        """The part of a vector that belongs to column block `c`, in float32, as a row."""
        columns, mask = self.columns[c]
        return load(ref.at[columns], mask).astype(jnp.float32)[None, :]

    def store(self, ref: Ref, c: int, value: jax.Array) -> None:
        """Stores `value` under column block `c`."""
        columns, mask = self.columns[c]
        store(ref.at[self.rows, columns], value, tile_mask(self.row_mask, mask))


def make_tile(config: Config, i: jax.Array, j: jax.Array, m: int, n: int) -> Tile:
    """The tile at row block i and column block j of an (m, n) output."""
    row, column = i * config.block_m, j * config.block_n
    exact = n % config.block_n == 0
    return Tile(
        span(row, config.block_m),
        in_bounds(row, config.block_m, m),
        [
            (span(column + start, block), None if exact else column + start + jnp.arange(block) < n)
            for start, block in power_of_two_blocks(config.block_n)
        ],
    )


def product(
    x_ref: Ref, w_ref: Ref, tile: Tile, config: Config, acc_dtype: DTypeLike, precision: jax.lax.Precision
) -> list[jax.Array]:
    """x @ w under a tile, in float32, one array per column block."""
    k, block_k = x_ref.shape[1], config.block_k

    def step(s: jax.Array, accs: list[jax.Array]) -> list[jax.Array]:
        ks, k_mask = span(s * block_k, block_k), in_bounds(s * block_k, block_k, k)
        x = load(x_ref.at[tile.rows, ks], tile_mask(tile.row_mask, k_mask))
        ws = [load(w_ref.at[ks, columns], tile_mask(k_mask, mask)) for columns, mask in tile.columns]
        return [
            acc + jax.lax.dot(x, w, precision=precision, preferred_element_type=acc_dtype)
            for acc, w in zip(accs, ws, strict=True)
        ]

    accs = [jnp.zeros((config.block_m, columns.size), acc_dtype) for columns, _ in tile.columns]
    accs = jax.lax.fori_loop(0, pl.cdiv(k, block_k), step, accs)
    return [acc.astype(jnp.float32) for acc in accs]


def _matmul_kernel(
    x_ref: Ref,  # (M, K)
    w_ref: Ref,  # (K, N)
    bias_ref: Ref | None,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    o_ref: Ref,  # (M, N)
    *,
    config: Config,
    activation: str | None,
    acc_dtype: DTypeLike,
    precision: jax.lax.Precision,
) -> None:
    m, n = o_ref.shape
    i, j = tile_order(pl.program_id(0), pl.cdiv(m, config.block_m), pl.cdiv(n, config.block_n), config.group_m)
    tile = make_tile(config, i, j, m, n)
    for c, y in enumerate(product(x_ref, w_ref, tile, config, acc_dtype, precision)):
        if bias_ref is not None:
            y += tile.load_vector(bias_ref, c)
        y = activate(activation, y)
        if residual_ref is not None:
            y += tile.load(residual_ref, c)
        tile.store(o_ref, c, y)


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    acc_dtype: DTypeLike,
    precision: jax.lax.Precision,
    out_dtype: DTypeLike,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """activation(x @ w + bias) + residual for x (M, K), w (K, N); see `pallas_models.ops.matmul`."""
    (m, k), n = x.shape, w.shape[1]
    config = config or heuristic(m, n, k, x.dtype, local_gpu().num_cores)
    kernel = functools.partial(
        _matmul_kernel, config=config, activation=activation, acc_dtype=acc_dtype, precision=precision
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="matmul",
    )(x, w, bias, residual)
