"""Matrix product and layer norm: in one kernel, whose programs own every column of their rows, or in two."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul_layer_norm import Form
from pallas_models.kernels.triton import norm
from pallas_models.kernels.triton.common import launch
from pallas_models.kernels.triton.matmul import configs as product_configs
from pallas_models.kernels.triton.matmul import heuristic as product_heuristic
from pallas_models.kernels.triton.product import Config, Dot, make_tile, product, product_parts, shared_memory
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def heuristic(m: int, n: int, k: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses tiles for m rows of n columns: as wide as a row, or a product's where two kernels are faster.

    With one program per whole row, few rows leave cores idle and wide rows do not fit in registers.
    """
    two_kernels = product_heuristic(m, n, k, dtype, target, summed=True)
    if n > 512 or jnp.dtype(dtype).itemsize == 4:
        return two_kernels
    # Time in units of one round of 64-row programs over all cores, measured on an H200 at n = 384.
    time = {
        None: 1.13 * m / (64 * target.num_cores),
        64: float(pl.cdiv(m, 64 * target.num_cores)),
        128: 1.9 * pl.cdiv(m, 128 * target.num_cores),
    }
    block_m = min(time, key=lambda rows: time[rows])
    if block_m is None:
        return two_kernels
    block_n, block_k = whole_rows(n), 32
    stages = target.shared_memory // ((block_m + block_n) * block_k * jnp.dtype(dtype).itemsize)
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=8, num_stages=min(stages, 4))


def configs(m: int, n: int, k: int, num_cores: int) -> Iterator[Config]:
    """The tiles worth measuring: whole rows of at most 192 sums a thread, and some of a product."""
    for block_m, block_k, num_warps, num_stages in itertools.product(
        (16, 32, 64, 128), (32, 64), (4, 8), (2, 3, 4)
    ):
        if 2 <= block_m * whole_rows(n) // (32 * num_warps) <= 192 and block_m < 2 * max(m, 16):
            yield Config(
                block_m=block_m,
                block_n=whole_rows(n),
                block_k=block_k,
                num_warps=num_warps,
                num_stages=num_stages,
            )
    for config in product_configs(m, n, k, num_cores):
        if config.block_n < n and (config.block_k, config.num_stages) == (64, 3):
            yield config


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
    dot: Dot,
) -> None:
    m, n = o_ref.shape
    tile = make_tile(config, pl.program_id(0), 0, m, n)
    ys = product(x_ref, w_ref, tile, config, dot)
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
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Product and layer norm in one kernel where `block_n` covers a row and `splits` is 1, else in two."""
    (m, n, k), x, dot = form.sizes, form.x, Dot(precision=form.precision)
    config = choose(
        config,
        Problem(
            backend="triton",
            op="matmul_layer_norm",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, x.dtype, target),
            candidates=functools.partial(configs, m, n, k, target.num_cores),
            shared_memory=functools.partial(shared_memory, itemsize=x.dtype.itemsize),
        ),
        target,
    )
    if config.block_n < n or config.splits > 1:
        # Tiles of the product, maybe of parts of K in parallel, whose sum the layer norm takes.
        sums = product_parts(x, form.w, dot=dot, config=config, interpret=interpret)
        return norm.sum_layer_norm(
            sums,
            form.scale,
            form.offset,
            form.residual,
            form.bias,
            epsilon=form.epsilon,
            out_dtype=x.dtype,
            config=None,
            target=target,
            interpret=interpret,
        )
    kernel = functools.partial(_matmul_layer_norm_kernel, config=config, epsilon=form.epsilon, dot=dot)
    return launch(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(pl.cdiv(m, config.block_m),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="matmul_layer_norm",
    )(x, form.w, form.scale, form.offset, form.bias, form.residual)
