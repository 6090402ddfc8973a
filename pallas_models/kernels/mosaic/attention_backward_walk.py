"""How CTAs walk over tiles of queries, or of keys, in the gradients of attention."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Runs
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.attention_walk import ROWS, group_of_heads, heads_in_cache, narrowed
from pallas_models.kernels.mosaic.common.backend import plgpu

CONSUMERS = 2  # warpgroups that compute
TILE = ROWS * CONSUMERS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one head from `start` on, and the `count` blocks of the other side from `first` on.

    Of these the `full_count` from `full` on have nothing but valid pairs.
    """

    batch: jax.Array
    head: jax.Array
    start: jax.Array
    first: jax.Array
    count: jax.Array
    full: jax.Array
    full_count: jax.Array

    def block(self, j: jax.Array) -> jax.Array:
        """The j-th block: the full ones come first, then those before and after them."""
        masked = self.first + j - self.full_count
        masked = jnp.where(masked < self.full, masked, masked + self.full_count)
        return jnp.where(j < self.full_count, self.full + j, masked)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Tiles of keys or of queries, and how CTAs walk over the tiles of all heads.

    Attributes:
      form: the call of attention.
      read_heads: like `form.first_heads`, for the arrays that are read; the gradients have heads as the form has.
      of_keys: whether tiles are of keys and blocks of queries; else it is the other way around.
      block: rows of a block, the other side's of a step.
      num_stages: blocks in the ring.
      num_ctas: CTAs, which stay on their multiprocessors and take tiles in turn.
      group: heads that are walked over together: of all their tiles those that take longest come first.
      last_cta: which CTA walks as the first one would, the others counted back from it; None for the first itself.
    """

    form: Form[Any]
    read_heads: tuple[int, int, int]
    of_keys: bool
    block: int
    num_stages: int
    num_ctas: int = 1
    group: int = 1
    last_cta: int | None = None

    @property
    def name(self) -> str:
        return "keys" if self.of_keys else "queries"

    @property
    def operands(self) -> tuple[str, str]:
        """What a tile holds: factors of the scores, and of the gradients of weights."""
        return ("k", "v") if self.of_keys else ("q", "dout")

    @property
    def others(self) -> tuple[str, str]:
        """What a block holds: the other factors of the scores, and of the gradients of weights."""
        return ("q", "dout") if self.of_keys else ("k", "v")

    @property
    def tile_ids(self) -> list[str]:
        """Masks that a tile has rows of."""
        return self._ids(keys=self.of_keys)

    @property
    def block_ids(self) -> list[str]:
        """Masks that a block has rows of."""
        return self._ids(keys=not self.of_keys)

    def _ids(self, *, keys: bool) -> list[str]:
        if not keys:
            return [] if self.form.segment_ids is None else ["segments"]
        operands = {"mask": self.form.mask, "kv_segments": self.form.kv_segment_ids}
        return [name for name, operand in operands.items() if operand is not None]

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients, in the order of their sums."""
        return ("dk", "dv") if self.of_keys else ("dq",)

    @property
    def heads(self) -> int:
        return self.form.num_kv_heads if self.of_keys else self.form.num_heads

    @property
    def tiles(self) -> int:
        """Number of tiles of a head."""
        return pl.cdiv(self.form.kv_seq if self.of_keys else self.form.seq, TILE)

    @property
    def num_tiles(self) -> int:
        return self.form.batch * self.heads * self.tiles

    @property
    def band(self) -> Band:
        return Band.of(self.form)

    @property
    def is_ragged(self) -> bool:
        """Whether the last block has keys past the end; queries past the end have weights of 0."""
        return not self.of_keys and self.form.kv_seq % self.block > 0

    @property
    def has_masks(self) -> bool:
        """Whether any pairs of tiles and blocks are not valid."""
        return self.form.has_masks or self.band.high is not None or self.is_ragged

    def runs(self, start: Any) -> Runs:
        """The blocks that the tile from `start` on is paired with."""
        return (self.band.queries_of if self.of_keys else self.band.keys_of)(start, TILE, self.block)

    def start(self, place: Any) -> Any:
        """The first row of a tile: those that take longest have the first places."""
        return (place if self.of_keys else self.tiles - 1 - place) * TILE

    def tile(self, i: jax.Array, found: Ref | None) -> Tile:
        """The i-th tile of this CTA, given the result of `searched`."""
        div, rem = jax.lax.div, jax.lax.rem
        section, index = (f(self.index(i, self.cta), self.group * self.tiles) for f in (div, rem))
        head, start = section * self.group + rem(index, self.group), self.start(div(index, self.group))
        batch, masked = div(head, self.heads), self.form.has_masks
        first, end, full, full_end = narrowed(self.runs(start), found, batch, div(start, TILE), masked=masked)
        end = jnp.maximum(end, first)
        full = jnp.clip(full, first, end)
        full_count = jnp.clip(full_end, full, end) - full
        return Tile(batch, rem(head, self.heads), start, first, end - first, full, full_count)

    @property
    def cta(self) -> jax.Array:
        """The place of this CTA among those that take turns."""
        cta = jax.lax.axis_index("cta")
        return cta if self.last_cta is None else jax.lax.rem(self.last_cta + self.num_ctas - cta, self.num_ctas)

    def index(self, i: Any, cta: Any) -> Any:
        """The number of a CTA's i-th tile. CTAs take turns there and back, which evens out what they get."""
        return i * self.num_ctas + cta + (i & 1) * (self.num_ctas - 1 - 2 * cta)

    @property
    def count(self) -> jax.Array:
        """How many tiles this CTA has."""
        rounds = self.num_tiles // self.num_ctas
        return rounds + (self.index(jnp.int32(rounds), self.cta) < self.num_tiles).astype(jnp.int32)

    def columns(self, operand: str, head: jax.Array) -> pl.Slice:
        """The columns of a head of an operand, or of its gradient."""
        first = dict(zip("qkv", self.read_heads, strict=True))
        first |= dict(zip(("dq", "dk", "dv"), self.form.first_heads, strict=True))
        return pl.Slice((first.get(operand, 0) + head) * self.form.head_dim, self.form.head_dim)

    def products(self) -> np.ndarray:
        """How many products of a tile and a block CTAs compute, where nothing but positions rules blocks out."""
        index = self.index(*np.ogrid[: pl.cdiv(self.num_tiles, self.num_ctas), : self.num_ctas])
        first, end, *_ = self.runs(self.start(index % (self.group * self.tiles) // self.group))
        blocks = np.where(index < self.num_tiles, np.maximum(np.subtract(end, first), 0), 0)
        return np.sum(blocks, axis=0) * (2 + len(self.results))

    def after(self, other: Self) -> Self:
        """This side, to which CTAs turn after the other one: who had most to do there has least here."""
        mine, before = self.products()[::-1], other.products()
        longest = [np.max(before + np.roll(mine, last + 1)) for last in range(self.num_ctas)]
        return dataclasses.replace(self, last_cta=int(np.argmin(longest)))

    def spread(self, num_ctas: int) -> Self:
        """This side for so many CTAs, with as many heads together as give them all about as much to do."""
        if not self.form.causal:
            return dataclasses.replace(self, num_ctas=num_ctas)
        group = self.form.group
        rows = self.form.seq * group if self.of_keys else self.form.kv_seq
        in_cache = heads_in_cache(self.form, rows) * (1 if self.of_keys else group)
        runs = self.runs(self.start(np.arange(self.tiles)))
        together = group_of_heads(runs, self.form.batch * self.heads, self.tiles, in_cache, num_ctas)
        return dataclasses.replace(self, num_ctas=num_ctas, group=together)

    def scratch_types(self) -> dict[str, Any]:
        """The numbers, ids and barriers of a CTA that sides do not share, by names that have the side's name."""
        tile, block, num_stages = (CONSUMERS, ROWS), (self.num_stages, self.block), self.num_stages
        rows, barrier = block if self.of_keys else tile, plgpu.Barrier
        tile_copies = (2 if self.of_keys else 4) + len(self.tile_ids)
        own = {
            "shifts": plgpu.SMEM(rows, jnp.float32),
            "deltas": plgpu.SMEM(rows, jnp.float32),
            "tile_ready": barrier(num_arrivals=tile_copies * CONSUMERS),
            "tile_read": barrier(num_arrivals=CONSUMERS),
            "ready": barrier(num_arrivals=1 + 2 * self.of_keys + len(self.block_ids), num_barriers=num_stages),
            "second_ready": barrier(num_barriers=num_stages),
            "read": barrier(num_arrivals=CONSUMERS, num_barriers=num_stages),
        }
        for names, shape in ((self.tile_ids, tile), (self.block_ids, block)):
            own |= {f"{name}_ids": plgpu.SMEM(shape, jnp.int32) for name in names}
        return {f"{name}_of_{self.name}": scratch for name, scratch in own.items()}
