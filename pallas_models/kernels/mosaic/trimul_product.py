"""Product over third positions of the triangle multiplicative update, for Hopper GPUs: a product per channel."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.tiles import check_divides
from pallas_models.kernels.forms.trimul import Product
from pallas_models.kernels.mosaic.common import gemm
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.gemm_heuristic import candidates
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.common.staging import Block, Output, Staging, store
from pallas_models.kernels.mosaic.common.tile_walk import Tile
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
    return gemm.shared_memory(config, Staging.of(config, config.block_n, jnp.float16))


def product(
    form: Product[jax.Array],
    *,
    peers: Peers | None = None,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """`factor` times the sums over k for left and right in sides (B, 2 H', N, N), H' >= channels.

    With `by_rows`, sides are (B, N, 2 H', N'), and so is the result: matrices of all channels lie row by row
    beside one another, so that who writes or reads all channels of a few positions has them near one another. N'
    is N in multiples of 64; what lies beyond N is 0 in sides, and means nothing in the result.

    Without it, `pieces` of so many rows and columns lie one after another, row by row: (B * pieces, 2 H', N /
    rows, N / columns). So does the result. Tiles have to divide them.

    With `peers` piece i of an item is stored on GPU i, as the piece of this GPU's index: the result is what all
    GPUs stored here.

    Returns:
      (B, channels, N, N), or (B, N, channels, N'), in the dtype of `sides`.
    """
    sides, channels, incoming, factor = form.sides, form.channels, form.incoming, form.factor
    pieces, by_rows = form.pieces, form.by_rows
    b, n, padded = form.batch, form.size, 2 * form.padded_channels
    if pieces != (1, 1) and not isinstance(config, Config):
        config = heuristic(n)  # tiles of tables need not divide pieces
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
    check_divides(config, n, pieces)
    staging = Staging.of(config, config.block_n, sides.dtype)
    piece_rows, piece_columns = (n // count for count in pieces)

    def matrix(
        ref: Ref, tile: Tile, side: int, row: jax.Array | int, column: jax.Array | int
    ) -> tuple[Ref, Any, Any]:
        """The piece with an element of a tile's matrix, of channels from `side` on, and the element's place."""
        item, channel = jax.lax.div(tile.batch, channels), side + jax.lax.rem(tile.batch, channels)
        if by_rows:
            return ref.at[item, :, channel], row, column
        if pieces != (1, 1):
            i, j = jax.lax.div(row, piece_rows), jax.lax.div(column, piece_columns)
            item = (item * pieces[0] + i) * pieces[1] + j
            row, column = row - i * piece_rows, column - j * piece_columns
        return ref.at[item, channel], row, column

    def part(refs: Refs, tile: Tile, side: int, positions: pl.Slice, ks: pl.Slice) -> Ref:
        rows, columns = (ks, positions) if incoming else (positions, ks)
        ref, row, column = matrix(refs.sides, tile, side, rows.start, columns.start)
        return ref.at[pl.Slice(row, rows.size), pl.Slice(column, columns.size)]

    def epilogue(refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        def value(block: Block, _: Ref) -> jax.Array:
            return block.of(sums[0]) * factor

        copy, y = None, refs.y
        if peers is None:
            y, row, column = matrix(y, tile, 0, tile.row, tile.column)
        else:
            i, j = jax.lax.div(tile.row, piece_rows), jax.lax.div(tile.column, piece_columns)
            row, column = tile.row - i * piece_rows, tile.column - j * piece_columns
            item, channel = jax.lax.div(tile.batch, channels), jax.lax.rem(tile.batch, channels)

            def copy(slot: Ref, y: Ref, at: Callable[[Ref], Ref]) -> None:
                def there(y: Ref) -> Ref:
                    return at(y.at[item * peers.count + peers.index, channel])

                peers.store(slot, y, i * pieces[1] + j, there)

        tile = dataclasses.replace(tile, row=row, column=column)
        store(tile, staging, Output(refs.slots, warpgroup, y, value, copy), wait=True)

    width = sides.shape[3]
    shape = (b, n, channels, width) if by_rows else (len(sides), channels, *sides.shape[2:])
    (y,) = gemm.gemm(
        dict(sides=sides),
        dict(y=jax.ShapeDtypeStruct(shape, sides.dtype)),
        gemm.Product(
            batch=b * channels,
            m=n,
            n=n,
            k=n,
            dtype=sides.dtype,
            a=lambda refs, tile, ks: part(refs, tile, 0, tile.rows, ks),
            b=[lambda refs, tile, ks: part(refs, tile, padded // 2, tile.columns, ks)],
            transpose_a=incoming,
            transpose_b=not incoming,
        ),
        gemm.Epilogue(store=epilogue, scratch_types=dict(slots=staging.scratch_type), peers=peers),
        config=config,
        name="trimul_product",
        target=target,
        interpret=interpret,
    )
    return y
