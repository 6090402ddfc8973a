"""Masked mean over the sequence and L2 normalisation, a program per sentence."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels._common import TINY, Ref
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
    """`block_s` tokens of one sentence per step."""

    block_s: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_s", "num_warps")


def heuristic(seq: int, width: int) -> Config:
    """Chooses blocks for sentences of `seq` tokens: up to 65536 elements a step, short ones in one."""
    block_n = pl.next_power_of_2(width)
    block_s = block_size(seq, 1, max(65536 // block_n, 1))
    return Config(block_s=block_s, num_warps=block_size(block_s * block_n // 8192, 2, 8))


def configs(seq: int, width: int) -> Iterator[Config]:
    """The blocks worth measuring: 8 to 256 elements a thread."""
    for block_s, num_warps in itertools.product((1, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16)):
        if block_s < 2 * seq and 8 <= block_s * pl.next_power_of_2(width) // (32 * num_warps) <= 256:
            yield Config(block_s=block_s, num_warps=num_warps)


def _mean_pool_kernel(
    x_ref: Ref,  # (B, S, N)
    mask_ref: Ref,  # (B, S)
    o_ref: Ref,  # (B, N)
    *,
    config: Config,
    normalize: bool,
    epsilon: float,
) -> None:
    _, seq, n = x_ref.shape
    block_s, block_n = config.block_s, pl.next_power_of_2(n)
    batch = pl.program_id(0)
    columns, column_mask = span(0, block_n), in_bounds(0, block_n, n)

    def step(s: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, tokens = carry
        positions = span(s * block_s, block_s)
        valid = load(mask_ref.at[batch, positions], in_bounds(s * block_s, block_s, seq)) != 0
        # Padding is not read at all: a masked load gives 0, whatever the padding holds.
        x = load(x_ref.at[batch, positions, columns], tile_mask(valid, column_mask)).astype(jnp.float32)
        return total + jnp.sum(x, axis=0), tokens + jnp.sum(valid.astype(jnp.float32))

    carry = jnp.zeros((block_n,), jnp.float32), jnp.float32(0)
    total, tokens = jax.lax.fori_loop(0, pl.cdiv(seq, block_s), step, carry)
    mean = total / jnp.maximum(tokens, 1.0)
    if normalize:  # by its largest part or epsilon first, so that no square leaves float32
        peak = jnp.maximum(jnp.max(jnp.abs(mean)), epsilon)
        peak = jnp.where(peak == 0.0, 1.0, peak)
        mean /= peak
        floor = jnp.maximum((epsilon / peak) * (epsilon / peak), TINY)
        mean *= jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean), floor))
    store(o_ref.at[batch, columns], mean, column_mask)


def mean_pool(
    x: jax.Array,
    mask: jax.Array,
    *,
    normalize: bool,
    epsilon: float,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """Masked mean of x (B, S, N) over S; see `pallas_models.ops.mean_pool`."""
    batch, seq, n = x.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="mean_pool",
            shape={"batch": batch, "seq": seq, "n": n},
            bucketed=("batch", "seq"),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, seq, n),
            candidates=functools.partial(configs, seq, n),
        ),
        target,
    )
    return pl.pallas_call(
        functools.partial(_mean_pool_kernel, config=config, normalize=normalize, epsilon=epsilon),
        out_shape=jax.ShapeDtypeStruct((batch, n), jnp.float32),
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name="mean_pool",
    )(x, mask)
