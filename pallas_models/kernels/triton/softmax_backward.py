"""The gradient of softmax over rows, from its result: a row in registers, or walked twice where it is too long."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.softmax import Form
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LONGEST = 16384  # columns of a block: 32 warps of 16 elements a thread


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` rows per program, walked in blocks of `block_n` columns."""

    block_m: int
    block_n: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")


def heuristic(m: int, n: int) -> Config:
    """Chooses blocks for rows (m, n): about 2048 elements a program, 16 of them a thread."""
    block_n = block_size(n, 16, _LONGEST)
    block_m = block_size(min(2048 // block_n, pl.cdiv(m, 528)), 1, 64)
    return Config(block_m=block_m, block_n=block_n, num_warps=block_size(block_m * block_n // 512, 1, 32))


def configs(m: int, n: int) -> Iterator[Config]:
    """The blocks worth measuring: 4 to 32 elements a thread."""
    whole = block_size(n, 16, _LONGEST)
    lengths = (whole,) if n <= whole else (2048, 4096, 8192, 16384)
    for block_n, block_m, num_warps in itertools.product(lengths, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        if block_m <= m and 4 <= block_m * block_n // (32 * num_warps) <= 32:
            yield Config(block_m=block_m, block_n=block_n, num_warps=num_warps)


def _kernel(
    out_ref: Ref,  # (M, N)
    dout_ref: Ref,  # (M, N)
    dx_ref: Ref,  # (M, N)
    *,
    config: Config,
    scale: float,
) -> None:
    m, n = out_ref.shape
    block_m, block_n = config.block_m, config.block_n
    start = pl.program_id(0) * block_m
    rows, row_mask = span(start, block_m), in_bounds(start, block_m, m)

    def place(s: jax.Array | int) -> tuple[pl.Slice, jax.Array | None]:
        return span(s * block_n, block_n), tile_mask(row_mask, in_bounds(s * block_n, block_n, n))

    def read(s: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The result, and its cotangent where that is not 0: a masked entry has none, whatever is handed back."""
        columns, mask = place(s)
        out, dout = (load(ref.at[rows, columns], mask).astype(jnp.float32) for ref in (out_ref, dout_ref))
        return out, jnp.where(out == 0.0, 0.0, dout)

    def write(s: jax.Array | int, out: jax.Array, dout: jax.Array, mean: jax.Array) -> None:
        columns, mask = place(s)
        store(dx_ref.at[rows, columns], out * (dout - mean[:, None]) * scale, mask, eviction_policy="evict_first")

    if n <= block_n:
        out, dout = read(0)
        write(0, out, dout, jnp.sum(out * dout, axis=1))
        return

    def add(s: jax.Array, total: jax.Array) -> jax.Array:
        out, dout = read(s)
        return total + out * dout

    steps = pl.cdiv(n, block_n)
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((block_m, block_n), jnp.float32))
    mean = jnp.sum(total, axis=1)

    def write_block(i: jax.Array, carry: None) -> None:
        s = steps - 1 - i  # the last block read is the likeliest to be in cache still
        write(s, *read(s), mean)

    jax.lax.fori_loop(0, steps, write_block, None)


def softmax_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, None]:
    """The cotangent of x (M, N), `out * (dout - sum(out * dout)) * scale`, which is 0 wherever out is."""
    assert wanted[0], "where has no cotangent"
    (out,), (dout,) = kept, cotangents
    m, n = out.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="softmax_backward",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=out.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n),
            candidates=functools.partial(configs, m, n),
        ),
        target,
    )
    dx = launch(
        functools.partial(_kernel, config=config, scale=form.scale),
        out_shape=jax.ShapeDtypeStruct((m, n), form.x.dtype),
        grid=(pl.cdiv(m, config.block_m),),
        num_warps=config.num_warps,
        interpret=interpret,
        name="softmax_backward",
    )(out, dout)
    return dx, None
