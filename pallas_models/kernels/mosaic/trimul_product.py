"""Product over third positions of the triangle multiplicative update, for Hopper GPUs: a product per channel."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic._common import Ref
from pallas_models.kernels.mosaic._gemm import Block, Config, Refs, Tile, blocks, gemm, staging, store


def unsupported(n: int, dtype: DTypeLike, *, config: Any = None) -> str | None:
    """Why `product` does not serve a call; None if it does."""
    if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {jnp.dtype(dtype)}"
    if config is not None and not isinstance(config, Config):
        return f"takes a {Config.__module__}.Config, not {type(config)}"
    if n % 64:
        return f"takes N in multiples of 64, not {n}"
    return None


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
    """`factor` times the sums over k for left and right in sides (B, N, 2 H', N), H' >= channels.

    Matrices of all channels lie row by row beside one another, so that who writes or reads all channels of a few
    positions has them near one another.

    Returns:
      (B, N, channels, N) in the dtype of `sides`.
    """
    b, n, padded, _ = sides.shape
    config = config or heuristic(n)
    parts = blocks(config, config.block_n, sides.dtype)
    largest = float(jnp.finfo(sides.dtype).max)

    def matrix(tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Which item of the batch, and which channel of it."""
        return jax.lax.div(tile.batch, channels), jax.lax.rem(tile.batch, channels)

    def part(refs: Refs, tile: Tile, side: int, positions: pl.Slice, ks: pl.Slice) -> Ref:
        item, channel = matrix(tile)
        rows, columns = (ks, positions) if incoming else (positions, ks)
        return refs.sides.at[item, rows, side + channel, columns]

    def epilogue(refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        def value(block: Block, _: Ref) -> jax.Array:
            y = (block.of(sums[0]) * factor).astype(sides.dtype)  # clipped by pairs, at half the cost
            return jnp.clip(y, -largest, largest)  # a norm of infinity would be NaN

        item, channel = matrix(tile)
        store(refs.slots.at[warpgroup], refs.y.at[item, :, channel], tile, parts, value, wait=True)

    (y,) = gemm(
        dict(sides=sides),
        dict(y=jax.ShapeDtypeStruct((b, n, channels, n), sides.dtype)),
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
