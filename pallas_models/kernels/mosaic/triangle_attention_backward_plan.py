"""What is known of a launch of `triangle_attention_backward` beforehand, and what each CTA walks over."""

import dataclasses
import itertools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Runs
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.attention_walk import ROWS, joined, narrowed
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import row_bytes_of
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.target import Target

CONSUMERS = 2  # warpgroups that compute
TILE = ROWS * CONSUMERS
_BARRIERS = 1024  # bytes of shared memory that barriers take at the most
_BIAS_STAGES = 2
_LINES = {False: 3, True: 2}  # by whether tiles are of keys: as many as registers have sums for

div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Rows of one head of several lines, and the `count` blocks of the other side from `first` on.

    Of these the `full_count` from `full` on have nothing but valid pairs.
    """

    part: jax.Array  # which part of the bias's gradient the lines are added to
    owner: jax.Array  # of the bias: the element of the batch and the head, as one number
    head: jax.Array
    line: jax.Array  # the first
    start: jax.Array  # the first row
    is_first: jax.Array  # whether no other lines have been added to the part
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
    """The gradients of the queries and of the bias, or of the keys and the values.

    Attributes:
      form: the call.
      of_keys: whether tiles are of keys and blocks of queries; else it is the other way around.
      adds_bias: whether the gradients of scores are added up for the bias.
      lines: lines of a group, which take turns with a block of the bias; each has sums in registers.
      line_stages: places for tiles of a line: those that a group has no use for are filled for the next one.
      num_stages: blocks in the ring.
      parts: of the lines, each with a sum of its own for the bias.
      num_ctas: CTAs, which stay on their multiprocessors and take tiles in turn.
    """

    form: Form[Any]
    of_keys: bool
    adds_bias: bool = False
    lines: int
    line_stages: int
    num_stages: int
    parts: int = 1
    num_ctas: int = 1

    @classmethod
    def of(cls, form: Form[Any], target: Target, *, of_keys: bool, adds_bias: bool = False) -> Self:
        """The side with the blocks that shared memory holds and as many parts as keep all CTAs busy."""
        lines = _LINES[of_keys]
        sizes = itertools.product((lines, lines - 1, 1), (2, 1, 0), (6, 5, 4, 3, 2))
        sides = (
            cls(form=form, of_keys=of_keys, adds_bias=adds_bias, lines=n, line_stages=n + more, num_stages=stages)
            for n, more, stages in sizes
        )
        most = available(target) - _BARRIERS
        return next(x for x in sides if num_bytes(x.buffers().values()) <= most).spread(target.num_cores)

    def spread(self, num_cores: int) -> Self:
        """This side in as many parts as have the last CTA done first, and of these the fewest."""
        tiles, groups = self.tiles * self.owners, self.groups

        def longest(parts: int) -> int:
            return pl.cdiv(tiles * parts, num_cores) * pl.cdiv(groups, parts)

        parts = min(range(1, min(groups, 4 * num_cores) + 1), key=lambda n: (longest(n) + n // 8, n))
        parts = pl.cdiv(groups, pl.cdiv(groups, parts))  # none is empty
        return dataclasses.replace(self, parts=parts, num_ctas=min(tiles * parts, num_cores))

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
    def results(self) -> tuple[str, ...]:
        """The gradients, in the order of their sums. They leave by way of the tiles of `operands`."""
        return ("dk", "dv") if self.of_keys else ("dq",)

    @property
    def tiles(self) -> int:
        """Tiles of a line and head."""
        return pl.cdiv(self.form.seq, TILE)

    @property
    def owners(self) -> int:
        """Heads of all elements of the batch, which have a bias each."""
        return self.form.batch // self.form.items * self.form.num_heads

    @property
    def groups(self) -> int:
        """Groups of lines of an element of the batch."""
        return pl.cdiv(self.form.items, self.lines)

    @property
    def groups_of_part(self) -> int:
        return pl.cdiv(self.groups, self.parts)

    @property
    def units(self) -> int:
        """What CTAs take in turn: a tile, for all lines of a part."""
        return self.parts * self.owners * self.tiles

    @property
    def count(self) -> jax.Array:
        """How many units this CTA has."""
        return div(self.units - 1 - jax.lax.axis_index("cta"), self.num_ctas) + 1

    def groups_of(self, i: jax.Array) -> jax.Array:
        """How many groups the i-th unit of this CTA has."""
        return jnp.minimum(self.groups - self._unit(i)[0] * self.groups_of_part, self.groups_of_part)

    def _unit(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The part, the owner of the bias and the tile: CTAs have the same lines at a time."""
        unit = jax.lax.axis_index("cta") + i * self.num_ctas
        others, tile = div(unit, self.tiles), rem(unit, self.tiles)
        return div(others, self.owners), rem(others, self.owners), tile

    def group(self, i: jax.Array, j: jax.Array, found: Ref | None) -> Group:
        """The j-th group of the i-th unit, given the result of `searched`."""
        part, owner, tile = self._unit(i)
        first_line = (part * self.groups_of_part + j) * self.lines
        line = div(owner, self.form.num_heads) * self.form.items + first_line
        first, end, full, full_end = joined(
            [self._runs(self.item(line, n), tile, found) for n in range(self.lines)]
        )
        if self.items_left:  # lines past the last are masked
            full_end = jnp.where(first_line + self.lines > self.form.items, 0, full_end)
        is_first = j == 0
        if self.adds_bias:  # all blocks of a part have something written to
            first, end = jnp.where(is_first, 0, first), jnp.where(is_first, self.blocks, end)
        end = jnp.maximum(end, 1)  # there is a block in every case, which may be masked
        first = jnp.minimum(first, end - 1)
        full = jnp.clip(full, first, end)
        full_count = jnp.clip(full_end, full, end) - full
        head, start = rem(owner, self.form.num_heads), tile * TILE
        return Group(part, owner, head, line, start, is_first, first, end - first, full, full_count)

    def _runs(self, item: jax.Array, tile: jax.Array, found: Ref | None) -> Runs:
        band = Band.of(self.form)
        runs = (band.queries_of if self.of_keys else band.keys_of)(0, TILE, ROWS)
        return narrowed(runs, found, item, tile, masked=self.form.mask is not None)

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.form.seq, ROWS)

    @property
    def items_left(self) -> int:
        """Lines of the last group, where it has fewer than others."""
        return self.form.items % self.lines

    def item(self, first: jax.Array, line: int) -> jax.Array:
        """A line of a group, given the first one; for those past the last the last one."""
        if not self.items_left:
            return first + line
        items = self.form.items
        return jnp.minimum(first + line, (div(first, items) + 1) * items - 1)

    def columns(self, head: jax.Array) -> pl.Slice:
        return pl.Slice(head * self.form.head_dim, self.form.head_dim)

    @property
    def has_mask(self) -> bool:
        return self.form.mask is not None

    def buffers(self) -> dict[str, Buffer]:
        """The arrays in shared memory."""
        form, dtype = self.form, jnp.dtype(self.form.dtype)
        tile, row_bytes = (self.line_stages, CONSUMERS, ROWS), row_bytes_of(form.head_dim, dtype)
        block = self.num_stages, ROWS
        f32, i32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
        assert form.bias is not None
        bias = jnp.dtype(form.bias.dtype)
        arrays = {
            "first_tiles": Buffer((*tile, form.head_dim), dtype, row_bytes),
            "second_tiles": Buffer((*tile, form.head_dim), dtype, row_bytes),
            "first_blocks": Buffer((*block, form.head_dim), dtype, row_bytes),
            "second_blocks": Buffer((*block, form.head_dim), dtype, row_bytes),
            "bias_blocks": Buffer((_BIAS_STAGES, CONSUMERS, ROWS, ROWS), bias, row_bytes_of(ROWS, bias)),
            "shifts": Buffer(block if self.of_keys else tile, f32),
            "deltas": Buffer(block if self.of_keys else tile, f32),
        }
        if self.adds_bias:
            arrays["dbias_tiles"] = Buffer((CONSUMERS, ROWS, ROWS), f32, row_bytes_of(ROWS, f32))
        if self.has_mask:
            arrays["masks"] = Buffer(tile if self.of_keys else block, i32)
            if not self.of_keys:
                arrays["kept_keys"] = Buffer((CONSUMERS, ROWS, form.head_dim), dtype, row_bytes)
        return arrays

    def scratch_types(self) -> dict[str, Any]:
        """The shared memory and the barriers of a CTA."""
        barrier, keys = plgpu.Barrier, self.of_keys
        line_copies, block_copies = (2 + self.has_mask, 4) if keys else (4, 2)
        return {name: buffer.scratch_type for name, buffer in self.buffers().items()} | {
            "line_ready": barrier(num_arrivals=line_copies * CONSUMERS, num_barriers=self.line_stages),
            "line_read": barrier(num_arrivals=CONSUMERS, num_barriers=self.line_stages),
            "block_ready": barrier(num_arrivals=block_copies, num_barriers=self.num_stages),
            "mask_ready": barrier(num_barriers=self.num_stages),
            "block_read": barrier(num_arrivals=CONSUMERS, num_barriers=self.num_stages),
            "bias_ready": barrier(num_arrivals=CONSUMERS, num_barriers=_BIAS_STAGES),
            "bias_read": barrier(num_arrivals=CONSUMERS, num_barriers=_BIAS_STAGES),
        }
