"""Softmax over rows: naive (three passes), online (one pass and the writing one), fused (row in registers)."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.forms.softmax import Algorithm, Form
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    exp2,
    in_bounds,
    launch,
    load,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LONGEST_FUSED = 32768  # columns: 32 warps of 32 elements a thread
_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` rows per program, walked in blocks of `block_n` columns; fused, `block_n` covers the row.

    With the online algorithm `splits` programs may share their rows: a first kernel leaves the maximum
    and the sum of each part of a row in memory, a second one merges them and writes.
    """

    block_m: int
    block_n: int
    num_warps: int
    splits: int = 1

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.splits < 1:
            raise ValueError(f"{__name__}: splits={self.splits} must be positive")


def fastest(n: int) -> Algorithm:
    """The algorithm for rows of `n` columns: registers while the row fits, memory is then read once."""
    return "fused" if n <= _LONGEST_FUSED else "online"


def heuristic(m: int, n: int, algorithm: Algorithm, target: Target) -> Config:
    """Chooses blocks for rows (m, n): about 32 elements a thread where a row is held, else 8.

    Rows too few to fill the GPU are split between programs, a block of columns or more for each.

    Raises:
      NotImplementedError: a row is too long for the fused algorithm.
    """
    if algorithm == "fused":
        if n > _LONGEST_FUSED:
            raise NotImplementedError(
                f"algorithm='fused' holds a row in registers: {n} columns are not supported, expected at most "
                f"{_LONGEST_FUSED}; use 'online'"
            )
        block_n = block_size(n, 16, _LONGEST_FUSED)
        block_m = block_size(min(2048 // block_n, pl.cdiv(m, 4 * target.num_cores)), 1, 64)
        return Config(block_m=block_m, block_n=block_n, num_warps=block_size(block_m * block_n // 1024, 1, 32))
    block_n = block_size(n, 16, 8192)
    block_m = block_size(min(2048 // block_n, pl.cdiv(m, 4 * target.num_cores)), 1, 64)
    num_warps = block_size(block_m * block_n // 256, 1, 32)
    splits = 1
    if algorithm == "online" and m < 2 * target.num_cores:
        splits = min(pl.cdiv(n, block_n), pl.cdiv(2 * target.num_cores, m))
        splits = 1 << splits.bit_length() - 1  # long rows are mostly powers of two: equal parts
    return Config(block_m=block_m, block_n=block_n, num_warps=num_warps, splits=splits)


def configs(m: int, n: int, algorithm: Algorithm) -> Iterator[Config]:
    """The blocks worth measuring for rows (m, n): 4 to 64 elements a thread; few rows are split too."""
    whole = block_size(n, 16, _LONGEST_FUSED)
    lengths = (whole,) if algorithm == "fused" or whole <= 2048 else (2048, 4096, 8192, 16384)
    splits = (1, 4, 16, 64) if algorithm == "online" and m <= 512 else (1,)
    for block_n, block_m, num_warps, split in itertools.product(
        lengths, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), splits
    ):
        if block_m <= m and 4 <= block_m * block_n // (32 * num_warps) <= 64 and (split - 1) * block_n < n:
            yield Config(block_m=block_m, block_n=block_n, num_warps=num_warps, splits=split)


def _halved(y: jax.Array) -> jax.Array:
    while y.shape[1] > 1:  # a power of two
        first, second = jnp.split(y, 2, axis=1)
        y = first + second
    return y[:, 0]


@meaning(_halved)
def _row_sums(y: jax.Array) -> jax.Array:
    """The sum of every row.

    A GPU adds the few values of each thread and then the threads' sums, in a tree. XLA for a CPU may
    add 8192 values one after another, and then loses all that are below half an ulp of the sum so far:
    the interpreter halves the row instead, so that its error is as on a GPU, on every CPU.
    """
    return jnp.sum(y, axis=1)


class _Rows:
    """The rows of one program, block of columns by block of columns."""

    def __init__(
        self,
        x_ref: Ref,  # (M, N)
        where_ref: Ref | None,  # (W, N)
        o_ref: Ref | None,  # (M, N)
        *,
        config: Config,
        scale: float,
        repeat: int,
    ) -> None:
        self.x_ref, self.where_ref, self.o_ref = x_ref, where_ref, o_ref
        self.config, self.scale, self.repeat = config, scale, repeat
        m, self.n = x_ref.shape
        self.start = pl.program_id(0) * config.block_m
        self.rows, self.row_mask = span(self.start, config.block_m), in_bounds(self.start, config.block_m, m)
        self.steps = pl.cdiv(self.n, config.block_n)

    def mask(self, s: jax.Array | int) -> tuple[jax.Array | None, jax.Array | None]:
        """The masks of the columns and of the whole of block `s`."""
        block_n = self.config.block_n
        columns = in_bounds(s * block_n, block_n, self.n)
        return columns, tile_mask(self.row_mask, columns)

    def read(self, s: jax.Array | int, eviction_policy: str | None = None) -> tuple[jax.Array, jax.Array | None]:
        """Block `s`, scaled, in float32, -inf past the end of a row and where it is masked; and the mask."""
        block_m, block_n = self.config.block_m, self.config.block_n
        column_mask, mask = self.mask(s)
        view = self.x_ref.at[self.rows, span(s * block_n, block_n)]
        y = load(view, mask, eviction_policy=eviction_policy).astype(jnp.float32)
        if self.scale != 1.0:
            y *= self.scale
        if self.where_ref is not None:
            row = (self.start + jnp.arange(block_m)) // self.repeat % self.where_ref.shape[0]
            column = s * block_n + jnp.arange(block_n)
            if mask is not None:
                mask = jnp.broadcast_to(mask, y.shape)
            valid = load(self.where_ref.at[row[:, None], column[None, :]], mask) != 0
            return jnp.where(valid, y, -jnp.inf), valid
        return (y if column_mask is None else jnp.where(column_mask[None, :], y, -jnp.inf)), None

    def exp(self, y: jax.Array, peak: jax.Array) -> jax.Array:
        """`exp(y - peak)`, subtracting first: the product with log2(e) would round a large y too coarsely."""
        return exp2((y - peak[:, None]) * _LOG2_E)

    def write(self, s: jax.Array | int, weight: jax.Array, valid: jax.Array | None, total: jax.Array) -> None:
        """Stores `weight / total` as block `s`, to be evicted first from the cache, as nothing here reads it."""
        assert self.o_ref is not None
        out = weight * (1.0 / total)[:, None]
        if valid is not None:
            out = jnp.where(valid, out, 0.0)  # in a row with nothing left it is NaN until here
        block_n = self.config.block_n
        view = self.o_ref.at[self.rows, span(s * block_n, block_n)]
        store(view, out, self.mask(s)[1], eviction_policy="evict_first")

    def write_all(self, start: jax.Array | int, stop: jax.Array | int, peak: jax.Array, total: jax.Array) -> None:
        """Reads blocks [start, stop) again, the latest first as it is likeliest in cache, and writes them."""

        def step(i: jax.Array, carry: None) -> None:
            s = start + stop - 1 - i
            y, valid = self.read(s, "evict_first")
            self.write(s, self.exp(y, peak), valid, total)

        jax.lax.fori_loop(start, stop, step, None)

    def full(self, value: float) -> jax.Array:
        return jnp.full((self.config.block_m, self.config.block_n), value, jnp.float32)

    def statistics(self, start: jax.Array | int, stop: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The maximum of every row over blocks [start, stop), and its sum of `exp(y - maximum)`, in one pass.

        Each position in the block keeps a maximum and a sum of its own, so that nothing is exchanged between
        threads before the end. The new maximum is either the old one or the new value, so a single exponential
        of their distance serves both to rescale the sum and to add to it. The initial maximum is finite, so that
        its distance to -inf is infinite and not NaN.
        """

        def step(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            peak, total = carry
            y, _ = self.read(s, "evict_last")  # it is read again
            e = exp2(jnp.abs(y - peak) * -_LOG2_E)
            above = y > peak
            return jnp.where(above, y, peak), jnp.where(above, total * e + 1.0, total + e)

        return self.merge(*jax.lax.fori_loop(start, stop, step, (self.full(_LOWEST), self.full(0.0))))

    def merge(self, peaks: jax.Array, totals: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Merges the maxima and sums of several parts of a row, along the second axis."""
        peak = jnp.max(peaks, axis=1)
        return peak, _row_sums(totals * self.exp(peaks, peak))


_MakeRows = Callable[..., _Rows]


def _naive_kernel(x_ref: Ref, where_ref: Ref | None, o_ref: Ref, *, make: _MakeRows) -> None:
    rows = make(x_ref, where_ref, o_ref)

    def add_peak(s: jax.Array, peak: jax.Array) -> jax.Array:
        return jnp.maximum(peak, rows.read(s)[0])

    def add_total(s: jax.Array, total: jax.Array) -> jax.Array:
        y, valid = rows.read(s)
        e = rows.exp(y, peak)
        return total + (e if valid is None else jnp.where(valid, e, 0.0))

    peak = jnp.max(jax.lax.fori_loop(0, rows.steps, add_peak, rows.full(-jnp.inf)), axis=1)
    total = _row_sums(jax.lax.fori_loop(0, rows.steps, add_total, rows.full(0.0)))
    rows.write_all(0, rows.steps, peak, total)


def _fused_kernel(x_ref: Ref, where_ref: Ref | None, o_ref: Ref, *, make: _MakeRows) -> None:
    rows = make(x_ref, where_ref, o_ref)
    y, valid = rows.read(0)
    e = rows.exp(y, jnp.max(y, axis=1))
    rows.write(0, e, valid, _row_sums(e))


def _online_kernel(x_ref: Ref, where_ref: Ref | None, o_ref: Ref, *, make: _MakeRows) -> None:
    rows = make(x_ref, where_ref, o_ref)
    rows.write_all(0, rows.steps, *rows.statistics(0, rows.steps))


def _part(rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """The blocks [start, stop) of this program's part of its rows."""
    index, splits = pl.program_id(1), rows.config.splits
    return index * rows.steps // splits, (index + 1) * rows.steps // splits


def _statistics_kernel(
    x_ref: Ref,
    where_ref: Ref | None,
    peak_ref: Ref,  # (M, splits)
    total_ref: Ref,  # (M, splits)
    *,
    make: _MakeRows,
) -> None:
    rows = make(x_ref, where_ref, None)
    peak, total = rows.statistics(*_part(rows))
    store(peak_ref.at[rows.rows, pl.program_id(1)], peak, rows.row_mask)
    store(total_ref.at[rows.rows, pl.program_id(1)], total, rows.row_mask)


def _write_kernel(
    x_ref: Ref,
    where_ref: Ref | None,
    peak_ref: Ref,  # (M, splits)
    total_ref: Ref,  # (M, splits)
    o_ref: Ref,
    *,
    make: _MakeRows,
) -> None:
    rows = make(x_ref, where_ref, o_ref)
    splits = rows.config.splits
    block = pl.next_power_of_2(splits)
    valid = in_bounds(0, block, splits)
    mask = tile_mask(rows.row_mask, valid)
    peaks = load(peak_ref.at[rows.rows, span(0, block)], mask)
    totals = load(total_ref.at[rows.rows, span(0, block)], mask)  # 0 past the last part
    if valid is not None:
        peaks = jnp.where(valid[None, :], peaks, _LOWEST)
    rows.write_all(*_part(rows), *rows.merge(peaks, totals))


def softmax(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Softmax over the rows of x (M, N), in the dtype of x."""
    x, where, scale, repeat = form.x, form.where, form.scale, form.repeat
    m, n = x.shape
    algorithm = form.algorithm or fastest(n)
    config = choose(
        config,
        Problem(
            backend="triton",
            op=f"softmax_{algorithm}",
            shape={"m": m, "n": n} | ({} if where is None else {"masked": 1}),
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, algorithm, target),
            candidates=functools.partial(configs, m, n, algorithm),
        ),
        target,
    )
    if algorithm == "fused" and config.block_n < n:
        raise ValueError(f"algorithm='fused' needs block_n of at least {n}, the length of a row; got {config}")
    if algorithm != "online" and config.splits > 1:
        raise ValueError(f"only algorithm='online' splits rows between programs; got {algorithm=} and {config}")

    def call(kernel: Callable[..., None], out_shape: object, name: str) -> Callable[..., jax.Array]:
        blocks = (pl.cdiv(m, config.block_m),)
        make = functools.partial(_Rows, config=config, scale=scale, repeat=repeat)
        return launch(
            functools.partial(kernel, make=make),
            out_shape=out_shape,
            grid=blocks if config.splits == 1 else (*blocks, config.splits),
            num_warps=config.num_warps,
            interpret=interpret,
            name=name,
        )

    out = jax.ShapeDtypeStruct((m, n), x.dtype)
    if config.splits == 1:
        kernel = {"naive": _naive_kernel, "online": _online_kernel, "fused": _fused_kernel}[algorithm]
        return call(kernel, out, f"softmax_{algorithm}")(x, where)
    part = jax.ShapeDtypeStruct((m, config.splits), jnp.float32)
    peaks, totals = call(_statistics_kernel, (part, part), "softmax_statistics")(x, where)
    return call(_write_kernel, out, "softmax_write")(x, where, peaks, totals)
