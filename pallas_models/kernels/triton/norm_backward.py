"""Gradients of layer and RMS norm: programs walk blocks of rows and sum for scale and bias on their way."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

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
from pallas_models.kernels.triton.column_sums import column_sums
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LONGEST = 16384  # columns: 32 warps of 16 elements a thread


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`num_programs` programs share the rows, `block_m` of them a step, and load `num_stages - 1` steps ahead."""

    block_m: int
    num_warps: int
    num_programs: int
    num_stages: int = 1

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "num_warps")
        if self.num_programs < 1 or self.num_stages not in (1, 2):
            raise ValueError(f"{self}: num_programs must be positive and num_stages 1 or 2")


def heuristic(m: int, n: int, target: Target) -> Config:
    """Chooses 16 elements a thread, and as many programs as fit at once; fewer, of more rows, for short rows.

    What each program sums for scale and bias is added up afterwards: it takes long where programs have few rows.
    """
    block_n = block_size(n, 16, _LONGEST)
    block_m = block_size(2048 // block_n, 1, 16) if block_n <= 512 else 1
    num_warps = block_size(block_m * block_n // 512, 1, 32)
    at_once = max(16 // num_warps, 1)
    return Config(
        block_m=block_m,
        num_warps=num_warps,
        num_programs=min(pl.cdiv(m, block_m), at_once * target.num_cores),
        num_stages=1 if block_n <= 1024 else 2,
    )


def configs(m: int, n: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: 4 to 16 elements a thread and row."""
    block_n = block_size(n, 16, _LONGEST)
    for block_m, num_warps, at_once, stages in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2)
    ):
        if 4 <= block_n // (32 * num_warps) <= 16 and num_warps * at_once <= 64:
            programs = min(pl.cdiv(m, block_m), at_once * target.num_cores)
            yield Config(block_m=block_m, num_warps=num_warps, num_programs=programs, num_stages=stages)


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
    block_m, block_n, programs = config.block_m, block_size(n, 16, _LONGEST), config.num_programs
    program = pl.program_id(0)
    columns, column_mask = span(0, block_n), in_bounds(0, block_n, n)
    scale = load(scale_ref.at[columns], column_mask).astype(jnp.float32)[None, :]
    inputs = [ref for ref in (x_ref, residual_ref, dout_ref, dsum_ref) if ref is not None]

    def place(i: jax.Array | int) -> tuple[pl.Slice, jax.Array | None]:
        """The rows of step i, and which of them there are."""
        start = (program + i * programs) * block_m
        whole = m % (block_m * programs) == 0 and config.num_stages == 1  # and nothing is loaded past the end
        return span(start, block_m), None if whole else start + jnp.arange(block_m) < m

    def read(i: jax.Array | int) -> list[jax.Array]:
        rows, row_mask = place(i)
        return [load(ref.at[rows, columns], tile_mask(row_mask, column_mask)) for ref in inputs]

    def mean(a: jax.Array) -> jax.Array:
        return jnp.sum(a, axis=1, keepdims=True) / n

    count = statistics_ref.shape[0]
    steps = pl.cdiv(pl.cdiv(m, block_m), programs)

    def step(
        i: jax.Array, carry: tuple[list[jax.Array], list[jax.Array]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        ahead, totals = carry
        values = iter([a.astype(jnp.float32) for a in (ahead or read(i))])
        ahead = read(i + 1) if ahead else []
        y = next(values)
        if residual_ref is not None:
            y += next(values)
        dout = next(values)
        rows, row_mask = place(i)
        *means, factor = (load(statistics_ref.at[jnp.int32(j), rows], row_mask)[:, None] for j in range(count))
        for part in means:
            y -= part
        y *= factor  # 0 past the last row; past the last column it meets cotangents of 0
        totals = [total + jnp.sum(a, axis=0) for total, a in zip(totals, (dout * y, dout), strict=False)]
        dy = dout * scale
        dx = dy - y * mean(dy * y)
        if subtract_mean:
            dx -= mean(dy)
        dx *= factor
        if dsum_ref is not None:
            dx += next(values)
        mask = tile_mask(row_mask, column_mask)
        store(dx_ref.at[rows, columns], dx, mask)
        if dresidual_ref is not None:
            store(dresidual_ref.at[rows, columns], dx, mask)
        return ahead, totals

    first = read(0) if config.num_stages == 2 else []
    zeros = [jnp.zeros((block_n,), jnp.float32)] * dvectors_ref.shape[0]
    _, totals = jax.lax.fori_loop(0, steps, step, (first, zeros))
    for i, total in enumerate(totals):
        store(dvectors_ref.at[jnp.int32(i), program, columns], total, column_mask)


def unsupported(x: jax.Array, *_: object, **__: object) -> str | None:
    """Why this does not serve a call: a row is held in registers."""
    return f"holds rows of up to {_LONGEST} columns, not {x.shape[1]}" if x.shape[1] > _LONGEST else None


def norm_backward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    statistics: jax.Array,
    dout: jax.Array,
    dsum: jax.Array | None,
    *_: None,
    subtract_mean: bool,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
    **__: object,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of x (M, N), scale, bias and residual, from those of the norm and of the sum x + residual.

    With `h` the normalised rows, `f` what they were multiplied by and `g = dout * scale`, it is
    `dx = (g - mean(g) - h * mean(g * h)) * f + dsum`, without `mean(g)` for the RMS norm. The sums for scale and
    bias are those of each program, and then those of all programs, always in the same order.
    """
    m, n = x.shape
    name = f"{'layer' if subtract_mean else 'rms'}_norm_backward"
    variant = {"residual": 1} if residual is not None else {}
    if dsum is not None:
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
            heuristic=functools.partial(heuristic, m, n, target),
            candidates=functools.partial(configs, m, n, target),
        ),
        target,
    )
    apart = residual is not None and residual.dtype != x.dtype
    vectors = jax.ShapeDtypeStruct((2 if subtract_mean else 1, config.num_programs, n), jnp.float32)
    dx, dresidual, dvectors = pl.pallas_call(
        functools.partial(_kernel, config=config, subtract_mean=subtract_mean),
        out_shape=(
            jax.ShapeDtypeStruct((m, n), x.dtype),
            jax.ShapeDtypeStruct((m, n), residual.dtype) if residual is not None and apart else None,
            vectors,
        ),
        grid=(config.num_programs,),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name=name,
    )(x, scale, residual, statistics, dout, dsum)
    dtypes = [scale.dtype] + ([] if bias is None else [bias.dtype])
    dscale, *dbias = column_sums(dvectors, dtypes, interpret=interpret)
    return (
        dx,
        dscale,
        None if bias is None else dbias[0],
        None if residual is None else dresidual if apart else dx,
    )
