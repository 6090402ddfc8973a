"""Gradients of layer and RMS norm: programs walk blocks of rows and sum for scale and bias on their way."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.triton.column_sums import column_sums
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

_LONGEST = 16384  # columns: 32 warps of 16 elements a thread
_OF_A_WARP = 512, 1024  # columns: more than the first and up to the second


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`num_programs` programs share the rows, `block_m` of them a step, and load `num_stages - 1` steps ahead.

    They hold rows in pieces of `block_n` columns, so that few are masked where rows are no power of two.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_programs: int
    num_stages: int = 1

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.num_programs < 1 or self.num_stages not in (1, 2):
            raise ValueError(f"{self}: num_programs must be positive and num_stages 1 or 2")


def heuristic(m: int, n: int, inputs: int, target: Target) -> Config:
    """Chooses a warp a row for 513 to 1024 columns, which then waits for no other; else 16 elements a thread.

    As many programs as fit at once; fewer, of more rows, for short rows: the sums of each program for scale and
    bias are added up afterwards, which takes long where programs have few rows. `inputs` arrays are as large as x.
    """
    if _OF_A_WARP[0] < n <= _OF_A_WARP[1]:
        return _row_of_a_warp(m, n, 12 if n <= 768 and inputs <= 3 else 8, target)
    block_n = block_size(n, 16, _LONGEST)
    block_m = block_size(2048 // block_n, 1, 16) if block_n <= 512 else 1
    num_warps = block_size(block_m * block_n // 512, 1, 32)
    at_once = max(16 // num_warps, 1)
    return Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_programs=min(pl.cdiv(m, block_m), at_once * target.num_cores),
        num_stages=1 if block_n <= 512 else 2,
    )


def _row_of_a_warp(m: int, n: int, at_once: int, target: Target) -> Config:
    programs = min(m, at_once * target.num_cores)
    return Config(block_m=1, block_n=256, num_warps=1, num_programs=programs, num_stages=2)


def configs(m: int, n: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: a row for each warp, or 4 to 16 elements a thread and row."""
    if _OF_A_WARP[0] < n <= _OF_A_WARP[1]:
        yield from (_row_of_a_warp(m, n, at_once, target) for at_once in (6, 8, 10, 12))
    block_n = block_size(n, 16, _LONGEST)
    for block_m, num_warps, at_once, stages in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2)
    ):
        if 4 <= block_n // (32 * num_warps) <= 16 and num_warps * at_once <= 64:
            programs = min(pl.cdiv(m, block_m), at_once * target.num_cores)
            yield Config(
                block_m=block_m, block_n=block_n, num_warps=num_warps, num_programs=programs, num_stages=stages
            )


def _kernel(
    x_ref: Ref,  # (M, N)
    scale_ref: Ref,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    statistics_ref: Ref,  # (3 or 1, M): the mean in two parts, the factor
    dout_ref: Ref,  # (M, N)
    dsum_ref: Ref | None,  # (M, N)
    dx_ref: Ref,  # (M, N)
    dresidual_ref: Ref | None,  # (M, N)
    dvectors_ref: Ref,  # (1 or 2, num_programs, N)
    *,
    config: Config,
    subtract_mean: bool,
) -> None:
    m, n = x_ref.shape
    block_m, block_n, programs = config.block_m, config.block_n, config.num_programs
    program, steps = pl.program_id(0), pl.cdiv(pl.cdiv(m, block_m), programs)
    starts = range(0, n, block_n)
    pieces = [(span(start, block_n), in_bounds(start, block_n, min(start + block_n, n))) for start in starts]
    scales = [load(scale_ref.at[columns], mask).astype(jnp.float32)[None, :] for columns, mask in pieces]
    inputs = [ref for ref in (x_ref, residual_ref, dout_ref, dsum_ref) if ref is not None]

    def each(f: Callable[..., jax.Array], *rows: list[jax.Array]) -> list[jax.Array]:
        return [f(*values) for values in zip(*rows, strict=True)]

    def place(i: jax.Array | int) -> tuple[pl.Slice, jax.Array | None]:
        """The rows of step i, and which of them there are."""
        # The last rows come first: the kernel before this one wrote them last, and the cache still holds them.
        start = ((steps - i) * programs - 1 - program) * block_m
        whole = m % (block_m * programs) == 0 and config.num_stages == 1  # and nothing is loaded past the end
        rows = start + jnp.arange(block_m)
        return span(start, block_m), None if whole else (rows >= 0) & (rows < m)

    def read(i: jax.Array | int) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        """The pieces of each input, and the statistics, which take as long to come."""
        rows, row_mask = place(i)
        masks = [tile_mask(row_mask, mask) for _, mask in pieces]
        values = [
            [load(ref.at[rows, columns], mask) for (columns, _), mask in zip(pieces, masks, strict=True)]
            for ref in inputs
        ]
        count = statistics_ref.shape[0]
        return values, [load(statistics_ref.at[jnp.int32(j), rows], row_mask)[:, None] for j in range(count)]

    def mean(terms: list[jax.Array]) -> jax.Array:
        return jnp.sum(functools.reduce(operator.add, terms), axis=1, keepdims=True) / n

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        ahead, (dscales, *dbiases) = carry
        values, (*means, factor) = ahead or read(i)
        arrays = iter([[a.astype(jnp.float32) for a in row] for row in values])
        ahead = read(i + 1) if ahead else ()  # after the above, or ptxas takes 12 registers more
        ys = next(arrays)
        if residual_ref is not None:
            ys = each(operator.add, ys, next(arrays))
        douts = next(arrays)
        # Past the last row normalised values are 0; past the last column they meet cotangents of 0.
        if subtract_mean:
            coarse, rest = means
            hs = [fma(y - coarse, factor, -rest * factor) for y in ys]
        else:
            hs = [y * factor for y in ys]
        # Before all else: then registers hold dout no longer than they must.
        totals = [each(fma, hs, douts, dscales), *(each(operator.add, dbias, douts) for dbias in dbiases)]
        dhs = each(operator.mul, douts, scales)
        products = dhs[0] * hs[0]
        for dh, h in zip(dhs[1:], hs[1:], strict=True):
            products = fma(dh, h, products)
        slope = -mean([products]) * factor
        if subtract_mean:
            shift = -mean(dhs) * factor
            dxs = [fma(dh, factor, shift) for dh in dhs]
        else:
            dxs = [dh * factor for dh in dhs]
        dxs = [fma(h, slope, dx) for h, dx in zip(hs, dxs, strict=True)]
        if dsum_ref is not None:
            dxs = each(operator.add, dxs, next(arrays))
        rows, row_mask = place(i)
        for (columns, column_mask), dx in zip(pieces, dxs, strict=True):
            mask = tile_mask(row_mask, column_mask)
            store(dx_ref.at[rows, columns], dx, mask)
            if dresidual_ref is not None:
                store(dresidual_ref.at[rows, columns], dx, mask)
        return ahead, totals

    first = read(0) if config.num_stages == 2 else ()
    zeros = [[jnp.zeros((block_m, block_n), jnp.float32)] * len(pieces)] * dvectors_ref.shape[0]
    _, totals = jax.lax.fori_loop(0, steps, step, (first, zeros))
    for i, total in enumerate(totals):
        for (columns, mask), part in zip(pieces, total, strict=True):
            store(dvectors_ref.at[jnp.int32(i), program, columns], jnp.sum(part, axis=0), mask)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why this does not serve a call: a row is held in registers."""
    n = form.x.shape[1]
    return f"holds rows of up to {_LONGEST} columns, not {n}" if n > _LONGEST else None


def norm_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of x (M, N), scale, bias and residual, from the statistics of the rows.

    With `h` the normalised rows, `f` the factor that they were multiplied by and `g = dout * scale`, it is
    `dx = (g - mean(g) - h * mean(g * h)) * f + dsum`, without `mean(g)` for the RMS norm. The gradients of scale
    and bias are summed in two stages, by each program and over the programs, always in the same order.
    """
    (statistics,), (dout, dsum) = kept, form.cotangents(cotangents)
    x, scale, bias, residual = form.operands
    m, n = x.shape
    name = f"{form.name}_backward"
    variant = form.variant(dsum)
    config = choose(
        config,
        Problem(
            backend="triton",
            op=name,
            shape={"m": m, "n": n} | variant,
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, 2 + len(variant), target),
            candidates=functools.partial(configs, m, n, target),
        ),
        target,
    )
    apart = residual is not None and residual.dtype != x.dtype
    vectors = jax.ShapeDtypeStruct((2 if form.subtract_mean else 1, config.num_programs, n), jnp.float32)
    dx, dresidual, dvectors = launch(
        functools.partial(_kernel, config=config, subtract_mean=form.subtract_mean),
        out_shape=(
            jax.ShapeDtypeStruct((m, n), x.dtype),
            jax.ShapeDtypeStruct((m, n), residual.dtype) if residual is not None and apart else None,
            vectors,
        ),
        grid=(config.num_programs,),
        num_warps=config.num_warps,
        interpret=interpret,
        name=name,
    )(x, scale, residual, statistics, dout, dsum)
    dtypes = [scale.dtype] + ([] if bias is None else [bias.dtype])
    return form.gradients(dx, column_sums(dvectors, dtypes, interpret=interpret), dresidual)
