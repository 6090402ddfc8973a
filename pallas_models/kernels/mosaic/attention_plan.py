"""What is known of a launch of `attention` on Hopper beforehand, and the tiles that each CTA walks over."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.attention_walk import (
    ROWS,
    group_of_heads,
    heads_in_cache,
    joined,
    narrowed,
)
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import TILE_ROWS, row_bytes_of, tiled
from pallas_models.kernels.mosaic.common.scores import exponent_scale

div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is known of a launch beforehand.

    Attributes:
      form: the call.
      block_q: queries of a tile, 64 a consumer.
      lines: lines of pairs of a tile, which share its bias; each has consumers of its own.
      block_kv: keys of a step.
      num_stages: slots of a ring.
      num_ctas: CTAs, which stay on their multiprocessors and take tiles in turn.
      group: heads that are walked over together: of all their tiles those that take longest come first.
    """

    form: Form[Any]
    block_q: int
    block_kv: int
    num_stages: int
    num_ctas: int
    group: int = 1
    lines: int = 1

    @classmethod
    def of(cls, form: Form[Any], *, num_cores: int, **blocks: int) -> Self:
        """The plan for so many multiprocessors."""
        plan = cls(form=form, **blocks, num_ctas=num_cores)
        plan = dataclasses.replace(plan, num_ctas=min(plan.num_tiles, num_cores))
        if not form.causal:
            return plan
        block_q, block_kv = plan.block_q, plan.block_kv
        runs = plan.band.keys_of(block_q * np.arange(plan.q_blocks)[::-1], block_q, block_kv)
        in_cache = heads_in_cache(form, form.kv_seq) * form.group
        group = group_of_heads(runs, form.batch * form.num_heads, plan.q_blocks, in_cache, plan.num_ctas)
        return dataclasses.replace(plan, group=group)

    @property
    def band(self) -> Band:
        return Band.of(self.form)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.parts * self.lines

    @property
    def parts(self) -> int:
        """Consumers of a line."""
        return self.block_q // ROWS

    @property
    def line_groups(self) -> int:
        """Tiles of the lines that share a bias, for one head and one block of queries."""
        return pl.cdiv(self.form.items, self.lines)

    def item(self, first: jax.Array, line: jax.Array | int) -> jax.Array:
        """The item of a line of a tile, given the first line's; the last one for lines past it."""
        if self.lines == 1:
            return first
        items = self.form.items
        return jnp.minimum(first + line, (div(first, items) + 1) * items - 1)

    @property
    def q_blocks(self) -> int:
        """Tiles of a head."""
        return pl.cdiv(self.form.seq, self.block_q)

    @property
    def num_tiles(self) -> int:
        return self.form.batch // self.form.items * self.line_groups * self.form.num_heads * self.q_blocks

    @property
    def one_tile(self) -> bool:
        """Whether no CTA has more than one tile."""
        return self.num_tiles <= self.num_ctas

    @property
    def is_ragged(self) -> bool:
        """Whether the last block has keys past the end."""
        return self.form.kv_seq % self.block_kv > 0

    @property
    def scale(self) -> float:
        return exponent_scale(self.form)

    @property
    def row_bytes(self) -> int:
        """Of a row of a tile of queries, keys, values or results."""
        return row_bytes_of(self.form.head_dim, self.form.dtype)

    @property
    def tensor_sums(self) -> bool:
        """Whether tensor cores add up the weights, which are rounded, too: heads of pairs leave them time."""
        return self.form.item_axis is not None

    @property
    def line_copies(self) -> int:
        """Copies of keys or values of all lines of a tile.

        One brings them where rows of one square of pairs are the lines; columns do not lie together, and copies
        have five axes, of which tiles of shared memory take two.
        """
        return 1 if self.form.item_axis == 1 and self.form.batch == self.form.items else self.lines

    @property
    def key_copies(self) -> int:
        """Copies to a slot of the keys' ring: keys, their mask, segment ids and bias."""
        return self.line_copies + sum(
            x is not None for x in (self.form.mask, self.form.kv_segment_ids, self.form.bias)
        )

    def columns(self, operand: int, head: jax.Array) -> pl.Slice:
        """The columns of a head in the array of operand 0, 1 or 2: the queries, the keys or the values."""
        return pl.Slice((self.form.first_heads[operand] + head) * self.form.head_dim, self.form.head_dim)

    def scratch_types(self) -> dict[str, Any]:
        """The shared memory and the barriers of a CTA."""
        form, consumers, num_stages, block_kv = self.form, self.consumers, self.num_stages, self.block_kv
        barrier, tiles, blocks = plgpu.Barrier, (consumers, ROWS), (num_stages, self.lines, block_kv)
        types = {
            "q_tiles": tiled((*tiles, form.head_dim), form.dtype, self.row_bytes),
            "k_blocks": tiled((*blocks, form.head_dim), form.dtype, self.row_bytes),
            "v_blocks": tiled((*blocks, form.head_dim), form.dtype, self.row_bytes),
            "o_tiles": tiled((*tiles, form.head_dim), form.dtype, self.row_bytes),
            "q_ready": barrier(num_arrivals=1 if form.segment_ids is None else 2, num_barriers=consumers),
            "k_ready": barrier(num_arrivals=self.key_copies, num_barriers=num_stages),
            "v_ready": barrier(num_arrivals=self.line_copies, num_barriers=num_stages),
            "k_read": barrier(num_arrivals=consumers, num_barriers=num_stages),
            "v_read": barrier(num_arrivals=consumers, num_barriers=num_stages),
        }
        if self.tensor_sums:
            types["ones_tile"] = tiled((TILE_ROWS, block_kv), form.dtype)
            types["ones_ready"] = barrier()
        if form.bias is not None:
            types["bias_blocks"] = tiled((num_stages, self.block_q, block_kv), form.bias.dtype)
        if form.mask is not None:
            types["mask_blocks"] = plgpu.SMEM(blocks, jnp.int32)
        if form.segment_ids is not None:
            types["segment_blocks"] = plgpu.SMEM((num_stages, block_kv), jnp.int32)
            types["q_segments"] = plgpu.SMEM((consumers, 2, ROWS), jnp.int32)
        if form.return_lse:
            types["lse_tiles"] = plgpu.SMEM(tiles, jnp.float32)
        return types


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Queries of one head, and the blocks of keys that they need: [first, end), in [full, full_end) every pair."""

    batch: jax.Array  # of its lines the first
    head: jax.Array
    start: jax.Array  # the first query
    first: jax.Array
    full: jax.Array
    full_end: jax.Array
    end: jax.Array

    @property
    def blocks(self) -> jax.Array:
        return self.end - self.first


class Walk:
    """The tiles of this CTA."""

    def __init__(self, plan: Plan, found: Ref | None, cta: jax.Array) -> None:
        self.plan, self.found, self.cta = plan, found, cta
        rounds = plan.num_tiles // plan.num_ctas
        self.count = rounds + (self.index(jnp.int32(rounds)) < plan.num_tiles).astype(jnp.int32)

    def index(self, i: jax.Array) -> jax.Array:
        """The number of the i-th tile. CTAs take turns there and back, which evens out what they get."""
        num_ctas = self.plan.num_ctas
        return i * num_ctas + jnp.where(rem(i, 2) == 0, self.cta, num_ctas - 1 - self.cta)

    def tile(self, i: jax.Array) -> Tile:
        """The i-th tile."""
        plan, index = self.plan, self.index(i)
        section, index = div(index, plan.group * plan.q_blocks), rem(index, plan.group * plan.q_blocks)
        head = section * plan.group + rem(index, plan.group)
        batch, block = div(head, plan.form.num_heads), plan.q_blocks - 1 - div(index, plan.group)
        if plan.lines > 1:
            batch = div(batch, plan.line_groups) * plan.form.items + rem(batch, plan.line_groups) * plan.lines
        start = block * plan.block_q
        runs = plan.band.keys_of(start, plan.block_q, plan.block_kv)
        first, end, full, full_end = joined(
            [
                narrowed(runs, self.found, plan.item(batch, line), block, masked=plan.form.has_masks)
                for line in range(plan.lines)
            ]
        )
        end = jnp.maximum(end, 1)  # a tile that needs no block has one all the same, which is masked
        first = jnp.minimum(first, end - 1)
        return Tile(batch, rem(head, plan.form.num_heads), start, first, jnp.int32(full), jnp.int32(full_end), end)
