"""The gradient of a product's epilogue: the activation's derivative and the sum for the bias in one pass."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.activations import slope
from pallas_models.kernels.common.backend import Ref
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Each program walks `block_n` columns of its share of the rows, one of `splits`, `block_m` rows a step."""

    block_m: int
    block_n: int
    num_warps: int
    splits: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.splits < 1:
            raise ValueError(f"{self}: splits must be positive")


def heuristic(m: int, n: int, target: Target) -> Config:
    """Chooses tiles of 8 x 256, 8 elements a thread, and 8 programs for each multiprocessor."""
    block_m, block_n = block_size(m, 1, 8), block_size(n, 16, 256)
    splits = max(min(8 * target.num_cores // pl.cdiv(n, block_n), pl.cdiv(m, block_m)), 1)
    return Config(
        block_m=block_m, block_n=block_n, num_warps=block_size(block_m * block_n // 256, 1, 8), splits=splits
    )


def configs(m: int, n: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: 8 to 32 elements a thread."""
    for block_m, block_n, num_warps, waves in itertools.product(
        (4, 8, 16), (128, 256, 512), (1, 2, 4, 8), (4, 8, 16)
    ):
        if 8 <= block_m * block_n // (32 * num_warps) <= 32:
            splits = max(min(waves * target.num_cores // pl.cdiv(n, block_n), pl.cdiv(m, block_m)), 1)
            yield Config(block_m=block_m, block_n=block_n, num_warps=num_warps, splits=splits)


def _kernel(
    y_ref: Ref,  # (M, N)
    dout_ref: Ref,  # (M, N)
    dy_ref: Ref,  # (M, N)
    dbias_ref: Ref,  # (splits, N)
    *,
    config: Config,
    activation: str,
) -> None:
    m, n = y_ref.shape
    block_m, block_n, splits = config.block_m, config.block_n, config.splits
    split, column = pl.program_id(0), pl.program_id(1) * block_n
    columns, column_mask = span(column, block_n), in_bounds(column, block_n, n)
    whole = m % (block_m * splits) == 0

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        start = (split + i * splits) * block_m
        rows = span(start, block_m)
        mask = tile_mask(None if whole else start + jnp.arange(block_m) < m, column_mask)
        y, dout = (load(ref.at[rows, columns], mask).astype(jnp.float32) for ref in (y_ref, dout_ref))
        dy = dout * slope(activation, y, exp2)
        store(dy_ref.at[rows, columns], dy, mask)
        return total + dy

    steps = pl.cdiv(pl.cdiv(m, block_m), splits)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((block_m, block_n), jnp.float32))
    store(dbias_ref.at[split, columns], jnp.sum(total, axis=0), column_mask)


def activation_backward(
    y: jax.Array,
    dout: jax.Array,
    *,
    activation: str,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The cotangent of y (M, N), in its dtype, from dout, the cotangent of activation(y), and its column sums."""
    m, n = y.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="activation_backward",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=y.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, target),
            candidates=functools.partial(configs, m, n, target),
        ),
        target,
    )
    dy, dbias = launch(
        functools.partial(_kernel, config=config, activation=activation),
        out_shape=(
            jax.ShapeDtypeStruct((m, n), y.dtype),
            jax.ShapeDtypeStruct((config.splits, n), jnp.float32),
        ),
        grid=(config.splits, pl.cdiv(n, config.block_n)),
        num_warps=config.num_warps,
        interpret=interpret,
        name="activation_backward",
    )(y, dout)
    return dy, jnp.sum(dbias, axis=0)
