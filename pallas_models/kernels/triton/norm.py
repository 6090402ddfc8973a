"""Layer normalisation: a program per block of rows, a row in registers where it fits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.triton._common import (
    Ref,
    block_size,
    check_powers_of_two,
    in_bounds,
    load,
    span,
    store,
    tile_mask,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` rows per program, walked in chunks of `block_n` columns.

    With `block_n` at least the width a row is read once; narrower, it is read three times, the second
    and third from cache.
    """

    block_m: int
    block_n: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")


def heuristic(m: int, n: int) -> Config:
    """Chooses blocks for rows (m, n): whole rows up to 16384 columns, about 2048 elements a program."""
    block_n = block_size(n, 16, 16384)
    block_m = block_size(min(2048 // block_n, pl.cdiv(m, 528)), 1, 16)
    return Config(block_m=block_m, block_n=block_n, num_warps=block_size(block_m * block_n // 2048, 1, 16))


def _layer_norm_kernel(
    x_ref: Ref,  # (P, M, N)
    scale_ref: Ref,  # (N,)
    bias_ref: Ref,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    x_bias_ref: Ref | None,  # (N,)
    o_ref: Ref,  # (M, N)
    *,
    config: Config,
    epsilon: float,
) -> None:
    parts, m, n = x_ref.shape
    block_m, block_n = config.block_m, config.block_n
    start = pl.program_id(0) * block_m
    rows, row_mask = span(start, block_m), in_bounds(start, block_m, m)

    def read(s: jax.Array | int) -> tuple[jax.Array, pl.Slice, jax.Array | None]:
        columns, column_mask = span(s * block_n, block_n), in_bounds(s * block_n, block_n, n)
        mask = tile_mask(row_mask, column_mask)
        y = jnp.zeros((block_m, block_n), jnp.float32)
        for part in range(parts):
            y += load(x_ref.at[jnp.int32(part), rows, columns], mask).astype(jnp.float32)
        if x_bias_ref is not None:
            y += load(x_bias_ref.at[columns], column_mask).astype(jnp.float32)[None, :]
        if residual_ref is not None:
            y += load(residual_ref.at[rows, columns], mask).astype(jnp.float32)
        return y, columns, column_mask

    def deviation(y: jax.Array, mean: jax.Array, column_mask: jax.Array | None) -> jax.Array:
        d = y - mean[:, None]
        return d if column_mask is None else jnp.where(column_mask[None, :], d, 0.0)

    def write(d: jax.Array, variance: jax.Array, columns: pl.Slice, column_mask: jax.Array | None) -> None:
        scale = load(scale_ref.at[columns], column_mask).astype(jnp.float32)
        bias = load(bias_ref.at[columns], column_mask).astype(jnp.float32)
        y = d * jax.lax.rsqrt(variance + epsilon)[:, None] * scale[None, :] + bias[None, :]
        store(o_ref.at[rows, columns], y, tile_mask(row_mask, column_mask))

    if n <= block_n:
        y, columns, column_mask = read(0)
        d = deviation(y, jnp.sum(y, axis=1) / n, column_mask)
        write(d, jnp.sum(d * d, axis=1) / n, columns, column_mask)
        return

    def add_mean(s: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.sum(read(s)[0], axis=1)

    def add_variance(s: jax.Array, total: jax.Array) -> jax.Array:
        y, _, column_mask = read(s)
        return total + jnp.sum(jnp.square(deviation(y, mean, column_mask)), axis=1)

    def write_block(s: jax.Array, carry: None) -> None:
        y, columns, column_mask = read(s)
        write(deviation(y, mean, column_mask), variance, columns, column_mask)

    steps, zeros = pl.cdiv(n, block_n), jnp.zeros((block_m,), jnp.float32)
    mean = jax.lax.fori_loop(0, steps, add_mean, zeros) / n
    variance = jax.lax.fori_loop(0, steps, add_variance, zeros) / n
    jax.lax.fori_loop(0, steps, write_block, None)


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    *,
    epsilon: float,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """Layer norm over the rows of x (M, N); see `pallas_models.ops.layer_norm`."""
    return sum_layer_norm(
        x[None],
        scale,
        bias,
        residual,
        None,
        epsilon=epsilon,
        out_dtype=x.dtype,
        config=config,
        interpret=interpret,
    )


def sum_layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    epsilon: float,
    out_dtype: DTypeLike,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """Layer norm over the rows of `sum_p x[p] + x_bias + residual`, for x (P, M, N)."""
    _, m, n = x.shape
    config = config or heuristic(m, n)
    return pl.pallas_call(
        functools.partial(_layer_norm_kernel, config=config, epsilon=epsilon),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(pl.cdiv(m, config.block_m),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name="layer_norm",
    )(x, scale, bias, residual, x_bias)
