"""Product over third positions of the triangle multiplicative update, for Hopper GPUs: a product per channel."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels._common import Ref
from pallas_models.kernels.mosaic import _gemm
from pallas_models.kernels.mosaic._gemm import Block, Config, Tile, blocks, candidates, gemm, staging, store
from pallas_models.kernels.mosaic._launch import Refs
from pallas_models.kernels.mosaic.matmul import num_slots
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def unsupported(dtype: DTypeLike) -> str | None:
    """Why `product` does not serve a call; None if it does."""
    if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {jnp.dtype(dtype)}"
    return None


def heuristic(n: int) -> Config:
    """Chooses tiles for matrices (n, n); measured on an H200."""
    if n <= 192:
        return Config(block_m=64, block_n=64 * pl.cdiv(n, 64), num_stages=6, ping_pong=True)
    if n < 512 or pl.cdiv(n, 128) % 2:  # the latter would leave half of a tile of 256 columns empty
        return Config(block_m=128, block_n=128, num_stages=6, ping_pong=True)
    return Config(block_m=128, block_n=256, num_stages=4, ping_pong=False)


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a CTA takes."""
    return _gemm.shared_memory(config, _num_slots(config))


def _num_slots(config: Config) -> int:
    return num_slots(config, config.block_n, jnp.float16, residual=False)


def product(
    sides: jax.Array,
    *,
    channels: int,
    incoming: bool,
    factor: float,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """`factor` times the sums over k for left and right in sides (B, N, 2 H', N'), H' >= channels.

    Matrices of all channels lie row by row beside one another, so that who writes or reads all channels of a few
    positions has them near one another. N' is N in whole `trimul_project.ALIGNMENT`; what lies beyond N is 0.

    Returns:
      (B, N, channels, N') in the dtype of `sides`; what lies beyond N means nothing.
    """
    b, n, padded, width = sides.shape
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="trimul_product",
            shape={"b": b * channels, "n": n, "incoming": int(incoming)},
            bucketed=("b", "n"),
            dtype=sides.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, n),
            candidates=functools.partial(candidates, n, n, shared_memory, target),
            shared_memory=shared_memory,
        ),
        target,
    )
    slots = _num_slots(config)
    parts = blocks(config, config.block_n, sides.dtype, slots)

    def matrix(tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Which item of the batch, and which channel of it."""
        return jax.lax.div(tile.batch, channels), jax.lax.rem(tile.batch, channels)

    def part(refs: Refs, tile: Tile, side: int, positions: pl.Slice, ks: pl.Slice) -> Ref:
        item, channel = matrix(tile)
        rows, columns = (ks, positions) if incoming else (positions, ks)
        return refs.sides.at[item, rows, side + channel, columns]

    def epilogue(refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        def value(block: Block, _: Ref) -> jax.Array:
            return block.of(sums[0]) * factor

        item, channel = matrix(tile)
        store(refs.slots.at[warpgroup], refs.y.at[item, :, channel], tile, parts, value, wait=True)

    (y,) = gemm(
        dict(sides=sides),
        dict(y=jax.ShapeDtypeStruct((b, n, channels, width), sides.dtype)),
        config=config,
        batch=b * channels,
        m=n,
        n=n,
        k=n,
        dtype=sides.dtype,
        a=lambda refs, tile, ks: part(refs, tile, 0, tile.rows, ks),
        b=[lambda refs, tile, ks: part(refs, tile, padded // 2, tile.columns, ks)],
        transpose_a=incoming,
        transpose_b=not incoming,
        epilogue=epilogue,
        scratch_types=dict(slots=staging(config, parts, sides.dtype, slots)),
        name="trimul_product",
        target=target,
        interpret=interpret,
    )
    return y
