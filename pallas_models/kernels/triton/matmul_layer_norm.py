"""Matrix product whose epilogue normalises whole rows: a program owns every column of its rows."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.triton import norm
from pallas_models.kernels.triton._common import Gpu, Ref, local_gpu
from pallas_models.kernels.triton.matmul import Config, make_tile, product, product_parts
from pallas_models.kernels.triton.matmul import heuristic as product_heuristic


def heuristic(m: int, n: int, dtype: DTypeLike, gpu: Gpu) -> Config | None:
    """Chooses tiles for m rows of n columns; None where two kernels are faster.

    A program's rows are as wide as the output. Few rows leave cores idle, and wide ones fit no registers.
    """
    if n > 512 or jnp.dtype(dtype).itemsize == 4:
        return None
    # Time in units of one round of 64-row programs over all cores, measured on an H200 at n = 384.
    time = {
        None: 1.13 * m / (64 * gpu.num_cores),
        64: float(pl.cdiv(m, 64 * gpu.num_cores)),
        128: 1.9 * pl.cdiv(m, 128 * gpu.num_cores),
    }
    block_m = min(time, key=lambda rows: time[rows])
    if block_m is None:
        return None
    block_n, block_k = whole_rows(n), 32
    stages = gpu.shared_memory // ((block_m + block_n) * block_k * jnp.dtype(dtype).itemsize)
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=8, num_stages=min(stages, 4))


def whole_rows(n: int) -> int:
    """The least block_n that covers n columns."""
    return pl.cdiv(n, 16) * 16


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
    m, n = o_ref.shape
    tile = make_tile(config, pl.program_id(0), 0, m, n)
    ys = product(x_ref, w_ref, tile, config, jnp.float32, precision)
    for c in range(len(ys)):
        if bias_ref is not None:
            ys[c] += tile.load_vector(bias_ref, c)
        if residual_ref is not None:
            ys[c] += tile.load(residual_ref, c)
    # Columns past the end hold zeros, which the sum does not see and the variance must not.
    mean = sum(jnp.sum(y, axis=1, keepdims=True) for y in ys) / n
    ys = [
        y - mean if mask is None else jnp.where(mask[None, :], y - mean, 0.0)
        for y, (_, mask) in zip(ys, tile.columns, strict=True)
    ]
    rstd = jax.lax.rsqrt(sum(jnp.sum(y * y, axis=1, keepdims=True) for y in ys) / n + epsilon)
    for c, y in enumerate(ys):
        tile.store(o_ref, c, y * rstd * tile.load_vector(scale_ref, c) + tile.load_vector(offset_ref, c))


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
    (m, k), n = x.shape, w.shape[1]
    config = config or heuristic(m, n, x.dtype, local_gpu())
    if config is None:
        # Few rows: parts of K in parallel, whose sum the layer norm takes.
        config = product_heuristic(m, n, k, x.dtype, local_gpu().num_cores)
        sums = product_parts(x, w, precision=precision, config=config, interpret=interpret)
        return norm.sum_layer_norm(
            sums,
            scale,
            offset,
            residual,
            bias,
            epsilon=epsilon,
            out_dtype=x.dtype,
            config=None,
            interpret=interpret,
        )
    if config.block_n < n:
        raise ValueError(f"block_n={config.block_n} is too small; expected at least the {n} columns of a row")
    kernel = functools.partial(_matmul_layer_norm_kernel, config=config, epsilon=epsilon, precision=precision)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(pl.cdiv(m, config.block_m),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="matmul_layer_norm",
    )(x, w, scale, offset, bias, residual)
