"""Layer and RMS normalisation: a program per block of rows, a row in registers where it fits."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels._common import Ref
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
    """`block_m` rows per program, walked in chunks of `block_n` columns.

    With `block_n` at least the width a row is read once; narrower, it is read twice, the second time
    from cache where it is not too long.
    """

    block_m: int
    block_n: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")


def heuristic(m: int, n: int, parts: int = 1) -> Config:
    """Chooses blocks for rows (m, n): whole rows up to 16384 columns, about 2048 elements a program.

    A program that reads more, wider rows or several parts of them, gets more warps for its loads. Scale and bias
    are read once a program: where rows are as wide as 2048 to 4096 columns, two rows share them.
    """
    block_n = block_size(n, 16, 16384)
    wanted = 2 if parts == 1 and 2048 < block_n <= 4096 else 2048 // block_n
    block_m = block_size(min(wanted, pl.cdiv(m, 528)), 1, 16)
    elements = block_m * block_n
    elements_per_warp = max(512 // parts, 1) if parts > 1 or elements > 2048 else 2048
    return Config(block_m=block_m, block_n=block_n, num_warps=block_size(elements // elements_per_warp, 1, 8))


def configs(m: int, n: int) -> Iterator[Config]:
    """The blocks worth measuring for rows (m, n): 4 to 64 elements a thread."""
    whole = block_size(n, 16, 16384)
    lengths = [whole] if whole <= 4096 else [2048, 4096, 8192, 16384]
    for block_n, block_m, num_warps in itertools.product(lengths, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        if block_n <= whole and block_m <= m and 4 <= block_m * block_n // (32 * num_warps) <= 64:
            yield Config(block_m=block_m, block_n=block_n, num_warps=num_warps)


def _norm_kernel(
    x_ref: Ref,  # (P, M, N)
    scale_ref: Ref,  # (N,)
    bias_ref: Ref | None,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    x_bias_ref: Ref | None,  # (N,)
    o_ref: Ref,  # (M, N)
    sum_ref: Ref | None,  # (M, N)
    statistics_ref: Ref | None,  # (3 or 1, M)
    *,
    config: Config,
    epsilon: float,
    subtract_mean: bool,
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

    def kept(d: jax.Array, column_mask: jax.Array | None) -> jax.Array:
        return d if column_mask is None else jnp.where(column_mask[None, :], d, 0.0)

    def invert(variance: jax.Array, *means: jax.Array) -> jax.Array:
        """The factor that gives unit variance; for the gradient it and the mean in two parts go to memory."""
        factor = jax.lax.rsqrt(variance + epsilon)
        if statistics_ref is not None:
            for i, value in enumerate((*means, factor) if subtract_mean else (factor,)):
                store(statistics_ref.at[jnp.int32(i), rows], value, row_mask)
        return factor

    def write(
        y: jax.Array, d: jax.Array, factor: jax.Array, columns: pl.Slice, column_mask: jax.Array | None
    ) -> None:
        mask = tile_mask(row_mask, column_mask)
        scale = load(scale_ref.at[columns], column_mask).astype(jnp.float32)
        out = d * factor[:, None] * scale[None, :]
        if bias_ref is not None:
            out += load(bias_ref.at[columns], column_mask).astype(jnp.float32)[None, :]
        store(o_ref.at[rows, columns], out, mask)
        if sum_ref is not None:
            store(sum_ref.at[rows, columns], y, mask)

    if n <= block_n:
        y, columns, column_mask = read(0)
        if not subtract_mean:
            write(y, y, invert(jnp.sum(y * y, axis=1) / n), columns, column_mask)
            return
        mean = jnp.sum(y, axis=1) / n
        d = kept(y - mean[:, None], column_mask)
        correction = jnp.sum(d, axis=1) / n  # what rounding the mean left: it counts in rows that vary less
        variance = jnp.maximum(jnp.sum(d * d, axis=1) / n - correction * correction, 0.0)
        write(y, d - correction[:, None], invert(variance, mean, correction), columns, column_mask)
        return

    # One pass for the statistics, by Welford's method: each position in the block keeps a mean and a sum of
    # squared deviations of its own, and they are merged at the end. Sums of squares about 0 would cancel where
    # the mean is far from 0.
    def add(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        means, squares = carry
        y, _, column_mask = read(s)
        if not subtract_mean:
            return means, squares + y * y
        d = kept(y - means, column_mask)
        step = d * (1.0 / (s + 1).astype(jnp.float32))
        return means + step, squares + d * (d - step)

    steps, zeros = pl.cdiv(n, block_n), jnp.zeros((block_m, block_n), jnp.float32)
    means, squares = jax.lax.fori_loop(0, steps, add, (zeros, zeros))
    mean = correction = jnp.zeros((block_m,), jnp.float32)
    if subtract_mean:
        counts = ((n - 1 - jnp.arange(block_n)) // block_n + 1).astype(jnp.float32)[None, :]
        mean = jnp.sum(means * counts, axis=1) / n
        means -= mean[:, None]
        correction = jnp.sum(means * counts, axis=1) / n
        squares += counts * jnp.square(means - correction[:, None])
    factor = invert(jnp.sum(squares, axis=1) / n, mean, correction)

    def write_block(i: jax.Array, carry: None) -> None:
        y, columns, column_mask = read(steps - 1 - i)  # the last block read is the likeliest to be in cache still
        d = y - mean[:, None] - correction[:, None] if subtract_mean else y
        write(y, d, factor, columns, column_mask)

    jax.lax.fori_loop(0, steps, write_block, None)


def norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    subtract_mean: bool,
    return_residual: bool,
    epsilon: float,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
    return_statistics: bool = False,
) -> Any:
    """Layer norm or, without `subtract_mean`, RMS norm over the rows of x (M, N); see `pallas_models.ops`.

    Without a residual, the sum that `return_residual` asks for is x, which is not copied.
    """
    out, total, statistics = _call(
        x[None],
        scale,
        bias,
        residual,
        None,
        subtract_mean=subtract_mean,
        sum_dtype=x.dtype if return_residual and residual is not None else None,
        statistics=return_statistics,
        epsilon=epsilon,
        out_dtype=x.dtype,
        config=config,
        target=target,
        interpret=interpret,
    )
    result = (out, x if total is None else total) if return_residual else out
    return result if statistics is None else (result, statistics)


def sum_layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    epsilon: float,
    out_dtype: DTypeLike,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """Layer norm over the rows of `sum_p x[p] + x_bias + residual`, for x (P, M, N)."""
    out, _, _ = _call(
        x,
        scale,
        bias,
        residual,
        x_bias,
        subtract_mean=True,
        sum_dtype=None,
        statistics=False,
        epsilon=epsilon,
        out_dtype=out_dtype,
        config=config,
        target=target,
        interpret=interpret,
    )
    return out


def _call(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    x_bias: jax.Array | None,
    *,
    subtract_mean: bool,
    sum_dtype: DTypeLike | None,
    statistics: bool,
    epsilon: float,
    out_dtype: DTypeLike,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The norm and, unless `sum_dtype` is None, what was normalised; `statistics` of the rows for the gradient."""
    parts, m, n = x.shape
    name = "layer_norm" if subtract_mean else "rms_norm"
    variant = {"parts": parts} if parts > 1 else {}
    if residual is not None:
        variant["residual"] = 1
    if sum_dtype is not None:
        variant["sum"] = 1
    config = choose(
        config,
        Problem(
            backend="triton",
            op=name,
            shape={"m": m, "n": n} | variant,
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, parts),
            candidates=functools.partial(configs, m, n),
        ),
        target,
    )
    total = None if sum_dtype is None else jax.ShapeDtypeStruct((m, n), sum_dtype)
    return pl.pallas_call(
        functools.partial(_norm_kernel, config=config, epsilon=epsilon, subtract_mean=subtract_mean),
        out_shape=(
            jax.ShapeDtypeStruct((m, n), out_dtype),
            total,
            jax.ShapeDtypeStruct((3 if subtract_mean else 1, m), jnp.float32) if statistics else None,
        ),
        grid=(pl.cdiv(m, config.block_m),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name=name,
    )(x, scale, bias, residual, x_bias)
