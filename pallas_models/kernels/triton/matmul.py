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
        check_powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")


def heuristic(m: int, n: int, k: int, dtype: DTypeLike, num_cores: int = 132) -> Config:
    """Chooses tiles for x (m, k) and w (k, n): the largest that still give every core a program."""
    if jnp.dtype(dtype).itemsize == 4:
        return Config(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3)
    for block_m, block_n, num_warps in ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4), (32, 64, 4)):
        if pl.cdiv(m, block_m) * pl.cdiv(n, block_n) >= num_cores and m > block_m // 2:
            return Config(block_m=block_m, block_n=block_n, block_k=64, num_warps=num_warps, num_stages=3)
    return Config(block_m=16 if m <= 16 else 32, block_n=32, block_k=128, num_warps=4, num_stages=3)


def tile_order(pid: jax.Array, tiles_m: int, tiles_n: int, group_m: int) -> tuple[jax.Array, jax.Array]:
    """Row and column block of program `pid`: column by column within groups of `group_m` row blocks."""
    if tiles_m <= group_m:
        return pid % tiles_m, pid // tiles_m
    group, within = pid // (group_m * tiles_n), pid % (group_m * tiles_n)
    first = group * group_m
    height = jnp.minimum(tiles_m - first, group_m)
    return first + within % height, within // height


def dot(x: jax.Array, w: jax.Array, acc_dtype: DTypeLike, precision: jax.lax.Precision) -> jax.Array:
    """x @ w for two tiles, accumulated in `acc_dtype`."""
    return jax.lax.dot_general(
        x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=acc_dtype
    )


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
    (m, k), n = x_ref.shape, w_ref.shape[1]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    i, j = tile_order(pl.program_id(0), pl.cdiv(m, block_m), pl.cdiv(n, block_n), config.group_m)
    rows, columns = span(i * block_m, block_m), span(j * block_n, block_n)
    row_mask, column_mask = in_bounds(i * block_m, block_m, m), in_bounds(j * block_n, block_n, n)

    def step(s: jax.Array, acc: jax.Array) -> jax.Array:
        ks, k_mask = span(s * block_k, block_k), in_bounds(s * block_k, block_k, k)
        x = load(x_ref.at[rows, ks], tile_mask(row_mask, k_mask))
        w = load(w_ref.at[ks, columns], tile_mask(k_mask, column_mask))
        return acc + dot(x, w, acc_dtype, precision)

    acc = jnp.zeros((block_m, block_n), acc_dtype)
    acc = jax.lax.fori_loop(0, pl.cdiv(k, block_k), step, acc).astype(jnp.float32)
    if bias_ref is not None:
        acc += load(bias_ref.at[columns], column_mask).astype(jnp.float32)[None, :]
    acc = activate(activation, acc)
    mask = tile_mask(row_mask, column_mask)
    if residual_ref is not None:
        acc += load(residual_ref.at[rows, columns], mask).astype(jnp.float32)
    store(o_ref.at[rows, columns], acc, mask)


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
    config = config or heuristic(m, n, k, x.dtype)
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
