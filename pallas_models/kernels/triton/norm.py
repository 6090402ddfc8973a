"""Layer and RMS normalisation: a program per block of rows, a row in registers where it fits."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    compiler_params,
    fma,
    in_bounds,
    load,
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
    interpret: bool,
) -> None:
    multiply_add = functools.partial(fma, interpret=interpret)
    parts, m, n = x_ref.shape
    block_m, block_n = config.block_m, config.block_n
    width = n & -n  # of a piece of a row that is held: 768 is 3 x 256, of which none is masked
    if width < 256 or n // width > 8:
        width = block_n
    start = pl.program_id(0) * block_m
    rows, row_mask = span(start, block_m), in_bounds(start, block_m, m)

    def read(start: jax.Array | int, width: int) -> tuple[jax.Array, pl.Slice, jax.Array | None]:
        columns, column_mask = span(start, width), in_bounds(start, width, n)
        mask = tile_mask(row_mask, column_mask)
        y = functools.reduce(
            operator.add,
            (load(x_ref.at[jnp.int32(part), rows, columns], mask).astype(jnp.float32) for part in range(parts)),
        )
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
            for i, value in enumerate((*means, factor)):
                store(statistics_ref.at[jnp.int32(i), rows], value, row_mask)
        return factor

    def write(
        y: jax.Array,
        means: tuple[jax.Array, ...],
        factor: jax.Array,
        columns: pl.Slice,
        column_mask: jax.Array | None,
    ) -> None:
        mask = tile_mask(row_mask, column_mask)
        if means:
            mean, rest = means
            h = multiply_add(y - mean[:, None], factor[:, None], (-rest * factor)[:, None])
        else:
            h = y * factor[:, None]
        scale = load(scale_ref.at[columns], column_mask).astype(jnp.float32)[None, :]
        if bias_ref is None:
            out = h * scale
        else:
            out = multiply_add(h, scale, load(bias_ref.at[columns], column_mask).astype(jnp.float32)[None, :])
        store(o_ref.at[rows, columns], out, mask)
        if sum_ref is not None:
            store(sum_ref.at[rows, columns], y, mask)

    def mean_of(terms: list[jax.Array]) -> jax.Array:
        return jnp.sum(functools.reduce(operator.add, terms), axis=1) / n

    def mean_of_squares(terms: list[jax.Array]) -> jax.Array:
        squares = terms[0] * terms[0]
        for term in terms[1:]:
            squares = multiply_add(term, term, squares)
        return jnp.sum(squares, axis=1) / n

    means: tuple[jax.Array, ...] = ()
    if n <= block_n:
        pieces = [read(start, width) for start in range(0, n, width)]
        ys = [y for y, *_ in pieces]
        if subtract_mean:
            mean = mean_of(ys)
            ds = [kept(y - mean[:, None], column_mask) for y, _, column_mask in pieces]
            rest = mean_of(ds)  # what rounding the mean left: it counts in rows that vary less
            means = mean, rest
            variance = jnp.maximum(mean_of_squares(ds) - rest * rest, 0.0)
        else:
            variance = mean_of_squares(ys)
        factor = invert(variance, *means)
        for y, columns, column_mask in pieces:
            write(y, means, factor, columns, column_mask)
        return

    # One pass for the statistics, by Welford's method: each position in the block keeps a mean and a sum of
    # squared deviations of its own, and they are merged at the end. Sums of squares about 0 would cancel where
    # the mean is far from 0.
    def add(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        means, squares = carry
        y, _, column_mask = read(s * block_n, block_n)
        if not subtract_mean:
            return means, squares + y * y
        d = kept(y - means, column_mask)
        step = d * (1.0 / (s + 1).astype(jnp.float32))
        return means + step, squares + d * (d - step)

    steps, zeros = pl.cdiv(n, block_n), jnp.zeros((block_m, block_n), jnp.float32)
    own, squares = jax.lax.fori_loop(0, steps, add, (zeros, zeros))
    if subtract_mean:
        counts = ((n - 1 - jnp.arange(block_n)) // block_n + 1).astype(jnp.float32)[None, :]
        mean = jnp.sum(own * counts, axis=1) / n
        own -= mean[:, None]
        rest = jnp.sum(own * counts, axis=1) / n
        means = mean, rest
        squares += counts * jnp.square(own - rest[:, None])
    factor = invert(jnp.sum(squares, axis=1) / n, *means)

    def write_block(i: jax.Array, carry: None) -> None:
        # The last block read is the likeliest to be in cache still.
        y, columns, column_mask = read((steps - 1 - i) * block_n, block_n)
        write(y, means, factor, columns, column_mask)

    jax.lax.fori_loop(0, steps, write_block, None)


def norm(form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool) -> Any:
    """Layer or RMS norm over the rows of x (M, N).

    Without a residual, the sum that `return_residual` asks for is x, which is not copied.
    """
    x = form.x
    out, total, statistics = _call(
        x[None],
        form.scale,
        form.bias,
        form.residual,
        None,
        subtract_mean=form.subtract_mean,
        sum_dtype=x.dtype if form.return_residual and form.residual is not None else None,
        statistics=form.return_statistics,
        epsilon=form.epsilon,
        out_dtype=x.dtype,
        config=config,
        target=target,
        interpret=interpret,
    )
    result = (out, x if total is None else total) if form.return_residual else out
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
        functools.partial(
            _norm_kernel, config=config, epsilon=epsilon, subtract_mean=subtract_mean, interpret=interpret
        ),
        out_shape=(
            jax.ShapeDtypeStruct((m, n), out_dtype),
            total,
            jax.ShapeDtypeStruct((3 if subtract_mean else 1, m), jnp.float32) if statistics else None,
        ),
        grid=(pl.cdiv(m, config.block_m),),
        compiler_params=compiler_params(num_warps=config.num_warps),
        interpret=interpret,
        name=name,
    )(x, scale, bias, residual, x_bias)
