"""What both kernels of projections share: how columns make products, tiles of positions, gates and stores."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import ROWS
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, store_transposed
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.common.shared_memory import Buffer

COLUMNS = 64  # of projections, and as many of their gates, in one product
Place = tuple[jax.Array, pl.Slice]  # an item of the batch, and some of its positions


def unsupported_by_both(form: Projection[jax.ShapeDtypeStruct]) -> str | None:
    """Why neither kernel serves a call; None if one of them may."""
    if not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer to store what it transposes, not {jax.__version__}"
    if form.w.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {form.w.dtype}"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Products:
    """The products that a call takes, of `2 * COLUMNS` columns each.

    A product is one of `COLUMNS` projections and then their gates, or one of columns of the out gate, which come
    after all projections.

    Attributes:
      sides: how many are of projections.
      gates: how many are of the out gate.
    """

    sides: int
    gates: int

    @classmethod
    def of(cls, form: Projection[jax.Array] | Projection[jax.ShapeDtypeStruct]) -> Self:
        """The products of a call."""
        return cls(2 * form.hidden // COLUMNS, pl.cdiv(form.gates, 2 * COLUMNS))

    @property
    def count(self) -> int:
        """How many there are."""
        return self.sides + self.gates

    def out_types(self, form: Projection[jax.Array]) -> dict[str, jax.ShapeDtypeStruct | None]:
        """Left and right, (B', 2 H, M'), and the gate, (B', G', M'), None where there is no gate."""
        items, size = form.result
        channels = dict(sides=COLUMNS * self.sides, gate=2 * COLUMNS * self.gates)
        return {
            name: jax.ShapeDtypeStruct((items, n, ROWS * pl.cdiv(size, ROWS)), form.w.dtype) if n else None
            for name, n in channels.items()
        }

    def split(self, results: Sequence[jax.Array]) -> tuple[jax.Array | None, jax.Array | None]:
        """Left and right, and the gate, of the results that there are."""
        return results[0] if self.sides else None, results[-1] if self.gates else None


def arranged(sides: jax.Array, gate: jax.Array) -> jax.Array:
    """Halves of sides (..., 4, H) and gate (..., G) in blocks of one product's columns: (..., products, 128)."""
    lead, each = sides.shape[:-2], 2 * sides.shape[-1]
    # Projections of left and right, then their gates.
    sides = sides.reshape(*lead, 2, 2, each // 2).swapaxes(-3, -2)
    sides = sides.reshape(*lead, 2, each // COLUMNS, COLUMNS).swapaxes(-3, -2)
    gate = jnp.pad(gate, [(0, 0)] * len(lead) + [(0, -gate.shape[-1] % (2 * COLUMNS))])
    blocks = [
        part.reshape(*lead, part.size // math.prod(lead) // (2 * COLUMNS), 2 * COLUMNS) for part in (sides, gate)
    ]
    return 0.5 * jnp.concatenate(blocks, axis=-2)


def arranged_biases(form: Projection[jax.Array]) -> jax.Array | None:
    """`arranged` of both biases, zeros for one that is None; None if both are."""
    if form.bias is None and form.b_gate is None:
        return None
    return arranged(
        jnp.zeros((4, form.hidden)) if form.bias is None else form.bias,
        jnp.zeros(form.gates) if form.b_gate is None else form.b_gate,
    )


def whole_mask(form: Projection[jax.Array]) -> jax.Array | None:
    """The mask of all items of results in whole tiles, 0 past the end; None where it would be 1 everywhere.

    Unlike x it is small enough to be padded: it has a value where x has all channels.
    """
    (batch, size, _), mask, rows = form.x.shape, form.mask, form.padded_rows - form.rows
    if mask is None:
        if size % ROWS == 0 and not rows:
            return None
        mask = jnp.ones((batch, size), form.w.dtype)
    if rows:
        mask = jnp.pad(mask.reshape(-1, form.rows, size), ((0, 0), (0, rows), (0, 0))).reshape(-1, size)
    return jnp.pad(mask, ((0, 0), (0, -size % ROWS)))


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """The positions of all items of results, `ROWS` at a time.

    Attributes:
      batch: how many items there are.
      size: how many positions an item has.
      rows: as many of each `padded_rows` items are in x.
    """

    batch: int
    size: int
    rows: int
    padded_rows: int

    @classmethod
    def of(cls, form: Projection[jax.Array]) -> Self:
        """The positions of a call."""
        return cls(form.result[0], form.x.shape[1], form.rows, form.padded_rows)

    @property
    def per_item(self) -> int:
        """How many tiles an item has."""
        return pl.cdiv(self.size, ROWS)

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return self.batch * self.per_item

    def place(self, tile: jax.Array) -> Place:
        """Where a tile is; past the end, where the last one is. Positions may reach past the end of an item."""
        tile = jnp.minimum(tile, self.count - 1)
        start = pl.multiple_of(jax.lax.rem(tile, self.per_item) * ROWS, ROWS)
        return jax.lax.div(tile, self.per_item), pl.Slice(start, ROWS)

    def source(self, item: jax.Array) -> jax.Array:
        """The item of x of which an item of results is made; the last row of a matrix for those past its end."""
        if self.rows == self.padded_rows:
            return item
        matrix, row = jax.lax.div(item, self.padded_rows), jax.lax.rem(item, self.padded_rows)
        return matrix * self.rows + jnp.minimum(row, self.rows - 1)


def staging(num_warpgroups: int, columns: int, dtype: jnp.dtype) -> Buffer:
    """Shared memory through which so many columns at a time leave each warpgroup, position after position."""
    return Buffer((num_warpgroups, columns, ROWS), dtype, ROW_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Gating:
    """Gates the products of a warpgroup and stores them channel by channel.

    Attributes:
      refs: sides (B', 2 H, M') and gate (B', G', M'), of which one that is not there is None.
      slot: the `staging` of the warpgroup.
      products: of the call.
      peers: GPUs that get an equal part of the sides each, and have as many of each other.
    """

    refs: Refs
    slot: Ref
    products: Products
    peers: Peers | None = None

    def finish(self, y: jax.Array, j: jax.Array, place: Place, masked: Callable[[jax.Array], jax.Array]) -> None:
        """Gates and stores product j of the positions at a place.

        Args:
          y: (ROWS, 2 * COLUMNS) in float32, halves of sums: projections and then their gates, or the out gate.
          masked: what the mask makes of gated projections, (ROWS, COLUMNS).
        """
        (item, rows), halves = place, (y[:, :COLUMNS], y[:, COLUMNS:])

        def side() -> None:
            y = masked(halves[0] * (jnp.tanh(halves[1]) + 1.0))
            if self.peers is None:
                self._store(y, self._leaving(self.refs.sides.at[item, pl.ds(j * COLUMNS, COLUMNS), rows]))
            else:
                self._store(y, self._leaving_to(self.peers, j, place))

        def gate() -> None:
            for i, half in enumerate(halves):
                channels = pl.ds(((j - self.products.sides) * 2 + i) * COLUMNS, COLUMNS)
                self._store(0.5 * jnp.tanh(half) + 0.5, self._leaving(self.refs.gate.at[item, channels, rows]))

        if self.refs.sides is not None:
            pl.when(j < self.products.sides)(side)
        if self.refs.gate is not None:
            pl.when(j >= self.products.sides)(gate)

    def _store(self, y: jax.Array, leave: Callable[[pl.Slice], None]) -> None:
        """Stores the transpose of y, as many columns at a time as the slot holds: `leave(channels)` copies it."""
        y = y.astype(self.slot.dtype)
        for start in range(0, y.shape[1], self.slot.shape[0]):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the columns before have to leave first
            store_transposed(self.slot, y[:, start : start + self.slot.shape[0]])
            plgpu.commit_smem()
            leave(pl.Slice(start, self.slot.shape[0]))

    def _leaving(self, ref: Ref) -> Callable[[pl.Slice], None]:
        """Copies of the slot to channels of `ref`, (COLUMNS, ROWS), on this GPU."""
        return lambda channels: plgpu.copy_smem_to_gmem(self.slot, ref.at[channels])

    def _leaving_to(self, peers: Peers, j: jax.Array, place: Place) -> Callable[[pl.Slice], None]:
        """Copies of the slot to channels of product j on the GPU that multiplies them."""
        (item, rows), each = place, self.products.sides // peers.count

        def leave(channels: pl.Slice) -> None:
            def there(sides: Ref) -> Ref:
                columns = pl.ds((peers.index * each + jax.lax.rem(j, each)) * COLUMNS, COLUMNS)
                return sides.at[item, columns, rows].at[channels]

            peers.store(self.slot, self.refs.sides, jax.lax.div(j, each), there)

        return leave
