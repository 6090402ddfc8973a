"""Matrix product: one program per output tile, the epilogue in registers."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

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
from pallas_models.tuning import Chooser, Problem, choose


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
        if self.block_n < 16 or self.block_n % 16:
            raise ValueError(f"{__name__}: block_n={self.block_n} must be a positive multiple of 16")


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


_LARGE = _config(128, 128, 64, 4, 2)
# Tiles for half precision and the rate at which each computes, relative to the first; measured on an H200
# over the products of MiniLM with 16 to 8192 rows, as is what follows.
_SMALLER = (
    (_config(64, 128, 64, 4, 3), 1.0),
    (_config(64, 64, 64, 4, 3), 0.82),
    (_config(64, 32, 128, 4, 3), 0.54),
    (_config(16, 32, 128, 4, 3), 0.16),
)
# What each part of K costs, in multiplications at rate 1: once, and for an output written and added up.
_PART_COST, _PART_OUTPUT_COST = 140_000, 2.2


def heuristic(m: int, n: int, k: int, dtype: DTypeLike, num_cores: int) -> Config:
    """Chooses tiles for x (m, k) and w (k, n): large ones where there are two for every core."""
    return split_heuristic(m, n, k, dtype, num_cores, splits=(1,))[0]


def split_heuristic(
    m: int, n: int, k: int, dtype: DTypeLike, num_cores: int, splits: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
) -> tuple[Config, int]:
    """Chooses tiles, and into how many parts to split the contraction, so that the busiest core ends first."""
    if jnp.dtype(dtype).itemsize == 4:
        return _config(64, 64, 32, 4, 3), 1
    if num_tiles(_LARGE, m, n) >= 2 * num_cores:
        return _LARGE, 1

    part_cost = _PART_COST + _PART_OUTPUT_COST * m * n

    def cost(choice: tuple[tuple[Config, float], int]) -> float:
        (config, rate), split = choice
        rounds = pl.cdiv(num_tiles(config, m, n) * split, num_cores)
        depth = steps_per_part(k, config, split) * config.block_k
        return rounds * depth * config.block_m * config.block_n / rate + split * part_cost

    (config, _), split = min(itertools.product(_SMALLER, splits), key=cost)
    return config, split


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

    def store(self, ref: Ref, c: int, value: jax.Array, *leading: jax.Array) -> None:
        """Stores `value` under column block `c`, of the matrix that `leading` indices select."""
        columns, mask = self.columns[c]
        store(ref.at[(*leading, self.rows, columns)], value, tile_mask(self.row_mask, mask))


def make_tile(config: Config, i: jax.Array, j: jax.Array | int, m: int, n: int, *, first: int = 0) -> Tile:
    """The tile at row block i and column block j of an (m, n) matrix that starts at column `first` of another."""
    row, column = i * config.block_m, j * config.block_n
    exact = n % config.block_n == 0
    return Tile(
        span(row, config.block_m),
        in_bounds(row, config.block_m, m),
        [
            (span(first + column + start, block), None if exact else column + start + jnp.arange(block) < n)
            for start, block in power_of_two_blocks(config.block_n)
        ],
    )


def program_tile(config: Config, m: int, n: int, *, first: int = 0) -> Tile:
    """The tile of this program, from the first axis of the grid."""
    i, j = tile_order(pl.program_id(0), pl.cdiv(m, config.block_m), pl.cdiv(n, config.block_n), config.group_m)
    return make_tile(config, i, j, m, n, first=first)


def num_tiles(config: Config, m: int, n: int) -> int:
    """The number of tiles of an (m, n) output."""
    return pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n)


def steps_per_part(k: int, config: Config, parts: int) -> int:
    """How many blocks of K each of `parts` programs takes."""
    return pl.cdiv(pl.cdiv(k, config.block_k), parts)


def product(
    x_ref: Ref,
    w_ref: Ref,
    tile: Tile,
    config: Config,
    acc_dtype: DTypeLike,
    precision: jax.lax.Precision,
    *,
    part: jax.Array | int = 0,
    parts: int = 1,
) -> list[jax.Array]:
    """x @ w under a tile, over one of equal parts of K, in float32, one array per column block."""
    k, block_k = x_ref.shape[1], config.block_k
    steps = steps_per_part(k, config, parts)

    exact = k == parts * steps * block_k

    def step(s: jax.Array, accs: list[jax.Array]) -> list[jax.Array]:
        start = (part * steps + s) * block_k
        ks, k_mask = span(start, block_k), None if exact else start + jnp.arange(block_k) < k
        x = load(x_ref.at[tile.rows, ks], tile_mask(tile.row_mask, k_mask))
        ws = [load(w_ref.at[ks, columns], tile_mask(k_mask, mask)) for columns, mask in tile.columns]
        return [
            acc + jax.lax.dot(x, w, precision=precision, preferred_element_type=acc_dtype)
            for acc, w in zip(accs, ws, strict=True)
        ]

    accs = [jnp.zeros((config.block_m, columns.size), acc_dtype) for columns, _ in tile.columns]
    accs = jax.lax.fori_loop(0, steps, step, accs)
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
    interpret: bool,
) -> None:
    tile = program_tile(config, *o_ref.shape)
    for c, y in enumerate(product(x_ref, w_ref, tile, config, acc_dtype, precision)):
        if bias_ref is not None:
            y += tile.load_vector(bias_ref, c)
        y = activate(activation, y, interpret=interpret)
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
    config: Config | Chooser | None,
    interpret: bool,
) -> jax.Array:
    """activation(x @ w + bias) + residual for x (M, K), w (K, N); see `pallas_models.ops.matmul`."""
    (m, k), n = x.shape, w.shape[1]
    config = choose(
        config,
        Problem(
            op="matmul",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, x.dtype, local_gpu().num_cores),
            candidates=functools.partial(configs, m, n, k, local_gpu().num_cores),
            shared_memory=functools.partial(shared_memory, itemsize=x.dtype.itemsize),
        ),
    )
    kernel = functools.partial(
        _matmul_kernel,
        config=config,
        activation=activation,
        acc_dtype=acc_dtype,
        precision=precision,
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(num_tiles(config, m, n),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="matmul",
    )(x, w, bias, residual)


def configs(m: int, n: int, k: int, num_cores: int) -> Iterator[Config]:
    """The tiles worth measuring: 64 to 128 sums a thread, or fewer where such tiles are too few for the cores."""
    fewest = 64 if num_tiles(_LARGE, m, n) >= 2 * num_cores else 16 if min(m, n) >= 64 else 4
    for block_m, block_n, block_k, num_warps, num_stages in itertools.product(
        (16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)
    ):
        fits = min(m, 64) <= block_m < 2 * max(m, 16) and block_n < 2 * max(n, 32)
        fits = fits and num_stages <= max(pl.cdiv(k, block_k), 2)
        if fits and fewest <= block_m * block_n // (32 * num_warps) <= 128:
            yield _config(block_m, block_n, block_k, num_warps, num_stages)


def shared_memory(config: Config, itemsize: int) -> int:
    """Bytes of shared memory that a program takes for the operands of its products."""
    return config.num_stages * (config.block_m + config.block_n) * config.block_k * itemsize
