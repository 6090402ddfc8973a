"""Product over third positions of the triangle multiplicative update, for Hopper GPUs: a product per channel."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic._common import Ref, untiled
from pallas_models.kernels.mosaic._gemm import Block, Config, Refs, Tile, blocks, gemm, staging, store


def unsupported(sides: jax.Array | jax.ShapeDtypeStruct, *, config: Any = None) -> str | None:
    """Why `product` does not serve a call; None if it does."""
    if sides.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {sides.dtype}"
    if config is not None and not isinstance(config, Config):
        return f"takes a {Config.__module__}.Config, not {type(config)}"
    return untiled("sides", sides.shape, sides.dtype)


def heuristic(n: int) -> Config:
    """Chooses tiles for matrices (n, n); measured on an H200."""
    if n <= 192:
        return Config(block_m=64, block_n=n, num_stages=6, ping_pong=True)
    if n < 512 or pl.cdiv(n, 128) % 2:  # the latter would leave half of a tile of 256 columns empty
        return Config(block_m=128, block_n=128, num_stages=6, ping_pong=True)
    return Config(block_m=128, block_n=256, num_stages=4, ping_pong=False)


def product(
    sides: jax.Array,
    *,
    channels: int,
    incoming: bool,
    factor: float,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """`factor` times the sums over k for left and right in sides (B, 2 H', N, N), H' >= channels.

    Returns:
      (B, channels, N, N) in the dtype of `sides`.
    """
    b, padded, n, _ = sides.shape
    config = config or heuristic(n)
    parts = blocks(config, config.block_n, sides.dtype)
    largest = float(jnp.finfo(sides.dtype).max)

    def matrix(tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Which item of the batch, and which channel of it."""
        return jax.lax.div(tile.batch, channels), jax.lax.rem(tile.batch, channels)

    def part(refs: Refs, tile: Tile, side: int, positions: pl.Slice, ks: pl.Slice) -> Ref:
        item, channel = matrix(tile)
        return refs.sides.at[item, side + channel, *((ks, positions) if incoming else (positions, ks))]

    def epilogue(refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        def value(block: Block, _: Ref) -> jax.Array:
            y = (block.of(sums[0]) * factor).astype(sides.dtype)  # clipped by pairs, at half the cost
            return jnp.clip(y, -largest, largest)  # a norm of infinity would be NaN

        store(refs.slots.at[warpgroup], refs.y.at[matrix(tile)], tile, parts, value, wait=True)

    (y,) = gemm(
        dict(sides=sides),
        dict(y=jax.ShapeDtypeStruct((b, channels, n, n), sides.dtype)),
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
        scratch_types=dict(slots=staging(sides.dtype, min(len(parts), 2))),
        name="trimul_product",
        interpret=interpret,
    )
    return y
