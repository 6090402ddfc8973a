"""Matrix product whose epilogue normalises whole rows: a program owns every column of its rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.triton import matmul as tiled
from pallas_models.kernels.triton import norm
from pallas_models.kernels.triton._common import (
    Ref,
    check_powers_of_two,
    in_bounds,
    load,
    span,
    store,
    tile_mask,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` rows per program, in accumulators of at most `block_n` columns, `block_k` per step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")


def heuristic(m: int, n: int, dtype: DTypeLike) -> Config | None:
    """Chooses tiles for m rows of n columns; None where two kernels are faster.

    One program's rows are as wide as the output, so few rows leave most cores idle and wide rows do not
    fit in registers.
    """
    if m < 2048 or n > 512 or jnp.dtype(dtype).itemsize == 4:
        return None
    return Config(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=3)


def _matmul_layer_norm_kernel(
    x_ref: Ref,  # (M, K)
    w_ref: Ref,  # (K, N)
    scale_ref: Ref,  # (N,)
    offset_ref: Ref,  # (N,)
    bias_ref: Ref | None,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    o_ref: Ref,  # (M, N)
    *,
    config: Config,
    epsilon: float,
    precision: jax.lax.Precision,
) -> None:
    (m, k), n = x_ref.shape, w_ref.shape[1]
    block_m, block_k = config.block_m, config.block_k
    start = pl.program_id(0) * block_m
    rows, row_mask = span(start, block_m), in_bounds(start, block_m, m)
    # Blocks are powers of two and N need not be: 384 is held as three accumulators of 128.
    blocks = []
    while (left := n - sum(blocks)) > 0:
        blocks.append(min(config.block_n, max(pl.next_power_of_2(left), 16)))
    chunks = [
        (span(sum(blocks[:c]), block), in_bounds(sum(blocks[:c]), block, n)) for c, block in enumerate(blocks)
    ]

    def step(s: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ks, k_mask = span(s * block_k, block_k), in_bounds(s * block_k, block_k, k)
        x = load(x_ref.at[rows, ks], tile_mask(row_mask, k_mask))
        return tuple(
            acc + tiled.dot(x, load(w_ref.at[ks, columns], tile_mask(k_mask, mask)), acc.dtype, precision)
            for acc, (columns, mask) in zip(accs, chunks, strict=True)
        )

    accs = tuple(jnp.zeros((block_m, block), jnp.float32) for block in blocks)
    accs = jax.lax.fori_loop(0, pl.cdiv(k, block_k), step, accs)

    def vector(ref: Ref, columns: pl.Slice, mask: jax.Array | None) -> jax.Array:
        return load(ref.at[columns], mask).astype(jnp.float32)[None, :]

    ys = []
    for acc, (columns, mask) in zip(accs, chunks, strict=True):
        if bias_ref is not None:
            acc += vector(bias_ref, columns, mask)
        if residual_ref is not None:
            acc += load(residual_ref.at[rows, columns], tile_mask(row_mask, mask)).astype(jnp.float32)
        ys.append(acc)
    mean = sum(jnp.sum(y, axis=1, keepdims=True) for y in ys) / n
    ys = [
        y - mean if mask is None else jnp.where(mask[None, :], y - mean, 0.0)
        for y, (_, mask) in zip(ys, chunks, strict=True)
    ]
    variance = sum(jnp.sum(y * y, axis=1, keepdims=True) for y in ys) / n
    rstd = jax.lax.rsqrt(variance + epsilon)
    for y, (columns, mask) in zip(ys, chunks, strict=True):
        out = y * rstd * vector(scale_ref, columns, mask) + vector(offset_ref, columns, mask)
        store(o_ref.at[rows, columns], out, tile_mask(row_mask, mask))


def matmul_layer_norm(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    offset: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    epsilon: float,
    precision: jax.lax.Precision,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """layer_norm(x @ w + bias + residual) for x (M, K); see `pallas_models.ops.matmul_layer_norm`."""
    m, n = x.shape[0], w.shape[1]
    config = config or heuristic(m, n, x.dtype)
    if config is None:
        y = tiled.matmul(
            x,
            w,
            bias,
            residual,
            activation=None,
            acc_dtype=jnp.float32,
            precision=precision,
            out_dtype=x.dtype,
            config=None,
            interpret=interpret,
        )
        return norm.layer_norm(y, scale, offset, None, epsilon=epsilon, config=None, interpret=interpret)
    kernel = functools.partial(_matmul_layer_norm_kernel, config=config, epsilon=epsilon, precision=precision)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(pl.cdiv(m, config.block_m),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="matmul_layer_norm",
    )(x, w, scale, offset, bias, residual)
