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
from pallas_models.kernels.mosaic.common.row_copies import copy_back
from pallas_models.kernels.mosaic.common.staging import Block, Output, Staging, store
from pallas_models.kernels.mosaic.common.tile_walk import Tile
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_Index = Any  # an array or a number


def unsupported(dtype: DTypeLike) -> str | None:
    """Why `product` does not serve a call; None if it does."""
    if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {jnp.dtype(dtype)}"
    return None


def heuristic(n: int, columns: int = 128) -> Config:
    """Chooses tiles for matrices (n, n), which have a multiple of `columns` columns; measured on an H200."""
    if n <= 192:
        return Config(block_m=64, block_n=64 * pl.cdiv(n, 64), num_stages=6, ping_pong=True)
    narrow = Config(block_m=128, block_n=128, num_stages=6, ping_pong=True)
    if n < 512:
        return narrow
    if pl.cdiv(n, 128) % 2 == 0:
        return Config(block_m=128, block_n=256, num_stages=4, ping_pong=False)
    # 256 columns would leave half of a tile empty. At 1032 these took 486, 505 and 664 us, the first where right
    # factors are transposed: the tensor cores read others 64 columns at a time.
    choices = (
        Config(block_m=128, block_n=208, num_stages=4, ping_pong=False),
        Config(block_m=128, block_n=192, num_stages=4, ping_pong=True),
        narrow,
    )
    fitting = [config for config in choices if config.block_n % columns == 0]
    return min(fitting, key=lambda config: pl.cdiv(n, config.block_n) * config.block_n)


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
    """The products, in the dtype of the sides.

    With `by_rows` N' is N in multiples of 64: what lies beyond N is 0 in the sides, and of no meaning in the sums.
    With `peers` piece i of an item is stored on GPU i, as the piece of this GPU's index: the result is what all
    GPUs stored here.
    """
    sides, n = form.sides, form.size
    matrices = form.batch * form.channels
    columns = 16 if form.transpose_right and form.pieces == (1, 1) else 64
    if form.pieces != (1, 1) and not isinstance(config, Config):
        config = heuristic(n)  # tiles of tables need not divide pieces
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="trimul_product",
            shape={"b": matrices, "n": n} | form.kind,
            bucketed=("b", "n"),
            dtype=sides.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, n, columns),
            candidates=functools.partial(candidates, n, n, shared_memory, target),
            shared_memory=shared_memory,
        ),
        target,
    )
    check_divides(config, n, form.pieces)
    staging = Staging.of(config, config.block_n, sides.dtype)
    kernel = _Matrices(form.abstract(), staging, peers)
    (y,) = gemm.gemm(
        dict(sides=sides, right=form.right),
        dict(y=kernel.out_type),
        gemm.Product(
            batch=matrices,
            m=n,
            n=n,
            k=n,
            dtype=sides.dtype,
            a=kernel.left,
            b=[kernel.right],
            transpose_a=form.transpose_left,
            transpose_b=form.transpose_right,
            columns=columns,
        ),
        gemm.Epilogue(store=kernel.store, scratch_types=dict(slots=staging.scratch_type), peers=peers),
        config=config,
        name="trimul_product",
        target=target,
        interpret=interpret,
    )
    return y


@dataclasses.dataclass(frozen=True, slots=True)
class _Matrices:
    """Where the tiles of the matrices of all items and channels lie.

    Attributes:
      staging: shared memory through which the sums leave.
      peers: the GPUs that the sums are stored to, a piece each; None for this GPU.
    """

    form: Product[Any]
    staging: Staging
    peers: Peers | None

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        """The sums, laid out as the sides are."""
        return jax.ShapeDtypeStruct(self.form.out_shape(), self.form.sides.dtype)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a piece."""
        n, (rows, columns) = self.form.size, self.form.pieces
        return n // rows, n // columns

    def piece_of(self, row: _Index, column: _Index) -> tuple[jax.Array, jax.Array]:
        """Which row and which column of pieces an element is in."""
        rows, columns = self.piece
        return jax.lax.div(row, rows), jax.lax.div(column, columns)

    def channel_of(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """The item and the channel whose matrix a tile is of."""
        channels = self.form.channels
        return jax.lax.div(tile.batch, channels), jax.lax.rem(tile.batch, channels)

    def matrix(self, ref: Ref, tile: Tile, first: int, row: _Index, column: _Index) -> tuple[Ref, _Index, _Index]:
        """The piece with an element of a tile's matrix, in channels from `first` on, and the element's place."""
        form, (item, channel) = self.form, self.channel_of(tile)
        channel = first + channel
        if form.by_rows:
            return ref.at[item, :, channel], row, column
        if form.pieces != (1, 1):
            i, j = self.piece_of(row, column)
            item = (item * form.pieces[0] + i) * form.pieces[1] + j
            row, column = row - i * self.piece[0], column - j * self.piece[1]
        return ref.at[item, channel], row, column

    def left(self, refs: Refs, tile: Tile, ks: pl.Slice) -> Ref:
        """The rows of a tile, at some third positions, of the left matrix."""
        places = (ks, tile.rows) if self.form.transpose_left else (tile.rows, ks)
        return self._side(refs.sides, tile, self.form.firsts[0], *places)

    def right(self, refs: Refs, tile: Tile, ks: pl.Slice) -> Ref:
        """The columns of a tile, at some third positions, of the right matrix."""
        places = (tile.columns, ks) if self.form.transpose_right else (ks, tile.columns)
        ref = refs.sides if refs.right is None else refs.right
        return self._side(ref, tile, self.form.firsts[1], *places)

    def _side(self, ref: Ref, tile: Tile, first: int, rows: pl.Slice, columns: pl.Slice) -> Ref:
        ref, row, column = self.matrix(ref, tile, first, rows.start, columns.start)
        return ref.at[pl.Slice(row, rows.size), pl.Slice(column, columns.size)]

    def store(self, refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        """Stores the sums of a tile, here or on the GPU whose piece it is in."""

        def value(block: Block, _: Ref) -> jax.Array:
            return block.of(sums[0]) * self.form.factor

        if self.peers is not None:
            i, j = self.piece_of(tile.row, tile.column)
            row, column = tile.row - i * self.piece[0], tile.column - j * self.piece[1]
            output = Output(refs.slots, warpgroup, refs.y, value, self._copy_to(self.peers, tile, i, j))
        elif tile.num_columns % 64:
            row, column = tile.row, tile.column
            output = Output(refs.slots, warpgroup, refs.y, value, self._copy_back)
        else:
            y, row, column = self.matrix(refs.y, tile, 0, tile.row, tile.column)
            output = Output(refs.slots, warpgroup, y, value)
        tile = dataclasses.replace(tile, row=row, column=column)
        store(tile, self.staging, output, wait=True)

    def _copy_back(self, slot: Ref, y: Ref, block: Block, tile: Tile) -> None:
        """Copies a slot to a block that is no whole tiles of memory."""
        (item, channel), by_rows = self.channel_of(tile), self.form.by_rows
        row, column = tile.row + block.row, tile.column + block.column
        first = (item, row, channel, column) if by_rows else (item, channel, row, column)
        copy_back(slot, y, first, rows_axis=1 if by_rows else 2)

    def _copy_to(
        self, peers: Peers, tile: Tile, i: jax.Array, j: jax.Array
    ) -> Callable[[Ref, Ref, Block, Tile], None]:
        """What copies a slot to the GPU that has piece (i, j)."""
        item, channel = self.channel_of(tile)

        def copy(slot: Ref, y: Ref, block: Block, tile: Tile) -> None:
            def there(y: Ref) -> Ref:
                return block.at(y.at[item * peers.count + peers.index, channel], tile)

            peers.store(slot, y, i * self.form.pieces[1] + j, there)

        return copy
