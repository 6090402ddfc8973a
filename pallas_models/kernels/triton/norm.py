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
    fma,
    in_bounds,
    launch,
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

    With `block_n` at least the width a row is read once; narrower, it is read twice, the second time from cache
    where the row is not too long.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Some columns of the rows of a program, in float32; mask is None where all of them are in bounds."""

    y: jax.Array
    columns: pl.Slice
    mask: jax.Array | None


class _Rows:
    """The rows of one program."""

    def __init__(
        self,
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
    ) -> None:
        self.x_ref, self.scale_ref, self.bias_ref = x_ref, scale_ref, bias_ref
        self.residual_ref, self.x_bias_ref = residual_ref, x_bias_ref
        self.o_ref, self.sum_ref, self.statistics_ref = o_ref, sum_ref, statistics_ref
        self.config, self.epsilon = config, epsilon
        self.parts, m, self.n = x_ref.shape
        start = pl.program_id(0) * config.block_m
        self.rows, self.row_mask = span(start, config.block_m), in_bounds(start, config.block_m, m)

    def read(self, start: jax.Array | int, width: int) -> _Chunk:
        """The sum that is normalised, 0 past the end of a row."""
        columns, column_mask = span(start, width), in_bounds(start, width, self.n)
        mask = tile_mask(self.row_mask, column_mask)
        views = (self.x_ref.at[jnp.int32(part), self.rows, columns] for part in range(self.parts))
        y = functools.reduce(operator.add, (load(view, mask).astype(jnp.float32) for view in views))
        if self.x_bias_ref is not None:
            y += load(self.x_bias_ref.at[columns], column_mask).astype(jnp.float32)[None, :]
        if self.residual_ref is not None:
            y += load(self.residual_ref.at[self.rows, columns], mask).astype(jnp.float32)
        return _Chunk(y, columns, column_mask)

    def invert(self, variance: jax.Array, *means: jax.Array) -> jax.Array:
        """The factor that gives unit variance; for the gradient it and the mean in two parts go to memory."""
        factor = jax.lax.rsqrt(variance + self.epsilon)
        if self.statistics_ref is not None:
            for i, value in enumerate((*means, factor)):
                store(self.statistics_ref.at[jnp.int32(i), self.rows], value, self.row_mask)
        return factor

    def write(self, chunk: _Chunk, means: tuple[jax.Array, ...], factor: jax.Array) -> None:
        """Stores the norm of a chunk, and the sum that was normalised where it is asked for."""
        y, columns = chunk.y, chunk.columns
        mask = tile_mask(self.row_mask, chunk.mask)
        if means:
            mean, rest = means
            h = fma(y - mean[:, None], factor[:, None], (-rest * factor)[:, None])
        else:
            h = y * factor[:, None]
        scale = load(self.scale_ref.at[columns], chunk.mask).astype(jnp.float32)[None, :]
        if self.bias_ref is None:
            out = h * scale
        else:
            bias = load(self.bias_ref.at[columns], chunk.mask).astype(jnp.float32)[None, :]
            out = fma(h, scale, bias)
        store(self.o_ref.at[self.rows, columns], out, mask)
        if self.sum_ref is not None:
            store(self.sum_ref.at[self.rows, columns], y, mask)

    def mean(self, terms: list[jax.Array]) -> jax.Array:
        return jnp.sum(functools.reduce(operator.add, terms), axis=1) / self.n

    def mean_of_squares(self, terms: list[jax.Array]) -> jax.Array:
        squares = terms[0] * terms[0]
        for term in terms[1:]:
            squares = fma(term, term, squares)
        return jnp.sum(squares, axis=1) / self.n


def _kept(d: jax.Array, column_mask: jax.Array | None) -> jax.Array:
    """Deviations from the mean, 0 past the end of a row."""
    return d if column_mask is None else jnp.where(column_mask[None, :], d, 0.0)


def _norm_kernel(*refs: Ref | None, config: Config, epsilon: float, subtract_mean: bool) -> None:
    rows = _Rows(*refs, config=config, epsilon=epsilon)
    if rows.n <= config.block_n:
        _norm_held(rows, subtract_mean)
    else:
        _norm_walked(rows, subtract_mean)


def _norm_held(rows: _Rows, subtract_mean: bool) -> None:
    """Norm of rows that fit into registers."""
    n = rows.n
    width = n & -n  # of a chunk: 768 is 3 x 256, of which none is masked
    if width < 256 or n // width > 8:
        width = rows.config.block_n
    chunks = [rows.read(start, width) for start in range(0, n, width)]
    means: tuple[jax.Array, ...] = ()
    if subtract_mean:
        mean = rows.mean([chunk.y for chunk in chunks])
        ds = [_kept(chunk.y - mean[:, None], chunk.mask) for chunk in chunks]
        rest = rows.mean(ds)  # the error of the rounded mean: it counts in rows that vary less
        means = mean, rest
        variance = jnp.maximum(rows.mean_of_squares(ds) - rest * rest, 0.0)
    else:
        variance = rows.mean_of_squares([chunk.y for chunk in chunks])
    factor = rows.invert(variance, *means)
    for chunk in chunks:
        rows.write(chunk, means, factor)


def _norm_walked(rows: _Rows, subtract_mean: bool) -> None:
    """Norm of long rows, which are read twice, block by block.

    The first time for the statistics, by Welford's method: each position in the block keeps a mean and a sum of
    squared deviations of its own, and they are merged at the end. Sums of squares about 0 would cancel where the
    mean is far from 0.
    """
    n, block_m, block_n = rows.n, rows.config.block_m, rows.config.block_n

    def add(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        means, squares = carry
        chunk = rows.read(s * block_n, block_n)
        if not subtract_mean:
            return means, squares + chunk.y * chunk.y
        d = _kept(chunk.y - means, chunk.mask)
        step = d * (1.0 / (s + 1).astype(jnp.float32))
        return means + step, squares + d * (d - step)

    steps, zeros = pl.cdiv(n, block_n), jnp.zeros((block_m, block_n), jnp.float32)
    own, squares = jax.lax.fori_loop(0, steps, add, (zeros, zeros))
    means: tuple[jax.Array, ...] = ()
    if subtract_mean:
        counts = ((n - 1 - jnp.arange(block_n)) // block_n + 1).astype(jnp.float32)[None, :]
        mean = jnp.sum(own * counts, axis=1) / n
        own -= mean[:, None]
        rest = jnp.sum(own * counts, axis=1) / n
        means = mean, rest
        squares += counts * jnp.square(own - rest[:, None])
    factor = rows.invert(jnp.sum(squares, axis=1) / n, *means)

    def write_block(i: jax.Array, carry: None) -> None:
        # The last block read is the likeliest to be in cache still.
        rows.write(rows.read((steps - 1 - i) * block_n, block_n), means, factor)

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
    """The norm, the sum that was normalised unless `sum_dtype` is None, and `statistics` for the gradient."""
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
    return launch(
        functools.partial(_norm_kernel, config=config, epsilon=epsilon, subtract_mean=subtract_mean),
        out_shape=(
            jax.ShapeDtypeStruct((m, n), out_dtype),
            total,
            jax.ShapeDtypeStruct((3 if subtract_mean else 1, m), jnp.float32) if statistics else None,
        ),
        grid=(pl.cdiv(m, config.block_m),),
        num_warps=config.num_warps,
        interpret=interpret,
        name=name,
    )(x, scale, bias, residual, x_bias)
