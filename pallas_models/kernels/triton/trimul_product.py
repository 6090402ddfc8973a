"""Product over third positions of the triangle multiplicative update: a matrix product per hidden channel."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels._common import Ref, tile_order
from pallas_models.kernels.triton._common import (
    block_size,
    check_powers_of_two,
    in_bounds,
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
    """Bytes of shared memory that a CTA takes: the operands of all stages."""
    return config.num_stages * (config.block_m + config.block_n) * config.block_k * jnp.dtype(dtype).itemsize


def _product_kernel(
    sides_ref: Ref,  # (B, 2 H', N, N): left, then right, H' >= H channels
    o_ref: Ref,  # (B, H, N, N)
    *,
    config: Config,
    incoming: bool,
    factor: float,
    precision: jax.lax.Precision,
) -> None:
    _, h, n, _ = o_ref.shape
    padded = sides_ref.shape[1] // 2
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles_m, tiles_n = pl.cdiv(n, block_m), pl.cdiv(n, block_n)
    pid, tiles = pl.program_id(0), jnp.int32(tiles_m * tiles_n)
    i, j = tile_order(jax.lax.rem(pid, tiles), tiles_m, tiles_n, group_m=8)
    matrix = jax.lax.div(pid, tiles)
    batch, left = jax.lax.div(matrix, jnp.int32(h)), jax.lax.rem(matrix, jnp.int32(h))
    right = left + padded
    rows, row_mask = span(i * block_m, block_m), in_bounds(i * block_m, block_m, n)
    columns, column_mask = span(j * block_n, block_n), in_bounds(j * block_n, block_n, n)

    def step(s: jax.Array, acc: jax.Array) -> jax.Array:
        ks, k_mask = span(s * block_k, block_k), in_bounds(s * block_k, block_k, n)
        if incoming:
            a = load(sides_ref.at[batch, left, ks, rows], tile_mask(k_mask, row_mask))
            b = load(sides_ref.at[batch, right, ks, columns], tile_mask(k_mask, column_mask))
        else:
            a = load(sides_ref.at[batch, left, rows, ks], tile_mask(row_mask, k_mask))
            b = load(sides_ref.at[batch, right, columns, ks], tile_mask(column_mask, k_mask))
        return acc + plgpu.dot(a, b, trans_a=incoming, trans_b=not incoming, precision=precision)

    acc = jax.lax.fori_loop(0, pl.cdiv(n, block_k), step, jnp.zeros((block_m, block_n), jnp.float32))
    store(o_ref.at[batch, left, rows, columns], acc * factor, tile_mask(row_mask, column_mask))


def product(
    sides: jax.Array,
    *,
    channels: int,
    incoming: bool,
    factor: float,
    precision: jax.lax.Precision,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """`factor` times the sums over k for left and right in sides (B, 2 H', N, N), H' >= channels.

    Returns:
      (B, channels, N, N) in the dtype of `sides`.
    """
    b, _, n, _ = sides.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_product",
            shape={"b": b * channels, "n": n, "incoming": int(incoming)},
            bucketed=("b", "n"),
            dtype=sides.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, n, sides.dtype),
            candidates=functools.partial(configs, sides.dtype),
            shared_memory=functools.partial(shared_memory, dtype=sides.dtype),
        ),
        target,
    )
    kernel = functools.partial(
        _product_kernel, config=config, incoming=incoming, factor=factor, precision=precision
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((b, channels, n, n), sides.dtype),
        grid=(b * channels * pl.cdiv(n, config.block_m) * pl.cdiv(n, config.block_n),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="trimul_product",
    )(sides)
