"""The kernel of `attention` for Hopper GPUs: what each of its warpgroups does.

One warpgroup, the producer, only copies keys and values to two rings in shared memory, ahead of the consumers,
each with 64 queries. All walk over the same tiles, each of some queries of one head, in the same order.
"""

import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.lines import of_pairs, of_rows
from pallas_models.kernels.common.scores import NO_KEY, exponents, lowest_score
from pallas_models.kernels.mosaic.attention_plan import Plan, Tile, Walk, div, rem
from pallas_models.kernels.mosaic.common.attention_walk import ROWS
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.elementwise import elementwise
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import TILE_ROWS, commit_reads, load
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, product, put, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.scores import across, load_across, masked, softmax_weights
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize

# Of a thread that computes and of one that copies, by the number of warpgroups that compute.
_REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
_Sums = tuple[Ref, ...]  # of the values by their weights, and of the weights if tensor cores add those up
# Weights, maxima and sums of rows, slot of the keys.
_Carry = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]


def _rings(refs: Refs, plan: Plan) -> tuple[Ring, Ring]:
    """The rings of the keys and of the values."""
    keys, values = ((refs.k_ready, refs.k_read), (refs.v_ready, refs.v_read))
    return Ring(*keys, plan.num_stages), Ring(*values, plan.num_stages)


class _Producer:
    """The warpgroup that copies keys and values, the last block of a tile first."""

    def __init__(self, refs: Refs, plan: Plan, walk: Walk) -> None:
        self.refs, self.plan, self.walk = refs, plan, walk
        self.keys, self.values = _rings(refs, plan)

    def run(self) -> None:
        if self.plan.tensor_sums:
            plgpu.copy_gmem_to_smem(self.refs.ones, self.refs.ones_tile, self.refs.ones_ready)
        steps = jax.lax.fori_loop(0, self.walk.count, self.copy_tile, jnp.int32(0))
        slot = self.keys.acquire(steps)
        for _ in range(self.plan.key_copies):  # for consumers, which wait for the keys after the last
            plgpu.barrier_arrive(self.keys.full_of(slot))
        self.keys.drain(steps, acquired=1)
        self.values.drain(steps)

    def copy_tile(self, i: jax.Array, step: jax.Array) -> jax.Array:
        """Copies the blocks of the i-th tile to the slots from `step` on; returns the step after the last."""
        tile = self.walk.tile(i)
        kv_head = div(tile.head, self.plan.form.group)

        def copy(j: jax.Array, step: jax.Array) -> jax.Array:
            rows = pl.Slice((tile.end - 1 - j) * self.plan.block_kv, self.plan.block_kv)
            self.copy_keys(tile, kv_head, rows, step)
            slot = self.values.acquire(step)
            self.copy_lines(2, tile, kv_head, rows, self.refs.v_blocks.at[slot], self.values.full_of(slot))
            return step + 1

        return jax.lax.fori_loop(0, tile.blocks, copy, step)

    def copy_lines(
        self, operand: int, tile: Tile, kv_head: jax.Array, rows: pl.Slice, block: Ref, barrier: Ref
    ) -> None:
        """Copies keys or values, operand 1 or 2. Past the last line of all, copies bring zeros."""
        source, columns = (self.refs.k, self.refs.v)[operand - 1], self.plan.columns(operand, kv_head)
        if self.plan.line_copies < self.plan.lines:
            lines = pl.Slice(tile.batch, self.plan.lines)
            plgpu.copy_gmem_to_smem(source.at[lines, rows, columns], block, barrier)
            return
        for line in range(self.plan.lines):
            plgpu.copy_gmem_to_smem(source.at[tile.batch + line, rows, columns], block.at[line], barrier)

    def copy_keys(self, tile: Tile, kv_head: jax.Array, rows: pl.Slice, step: jax.Array) -> None:
        """Copies keys, and their mask, segment ids and bias."""
        refs = self.refs
        slot = self.keys.acquire(step)
        self.copy_lines(1, tile, kv_head, rows, refs.k_blocks.at[slot], self.keys.full_of(slot))
        if refs.mask is not None:
            source = refs.mask.at[pl.Slice(tile.batch, self.plan.lines), rows]
            plgpu.copy_gmem_to_smem(source, refs.mask_blocks.at[slot], self.keys.full_of(slot))
        if refs.kv_segments is not None:
            source = refs.kv_segments.at[tile.batch, rows]
            plgpu.copy_gmem_to_smem(source, refs.segment_blocks.at[slot], self.keys.full_of(slot))
        if refs.bias is not None:
            owner = div(tile.batch, self.plan.form.items), tile.head
            index = (x if n > 1 else 0 for x, n in zip(owner, refs.bias.shape, strict=False))
            source = refs.bias.at[*index, pl.Slice(tile.start, self.plan.block_q), rows]
            plgpu.copy_gmem_to_smem(source, refs.bias_blocks.at[slot], self.keys.full_of(slot))


class _Consumer:
    """A warpgroup that attends: 64 queries of each tile.

    While it takes the softmax of a block of keys, the tensor cores add up the values of the block before, and
    compute products of other warpgroups. It does not stop at the end of a tile either: it takes the first softmax
    of the next tile while the last values of this one are added.
    """

    def __init__(self, refs: Refs, plan: Plan, walk: Walk, warpgroup: jax.Array) -> None:
        self.refs, self.plan, self.walk, self.warpgroup = refs, plan, walk, warpgroup
        self.keys, self.values = _rings(refs, plan)
        self.queries, self.q_ready = refs.q_tiles.at[warpgroup], refs.q_ready.at[warpgroup]
        self.o_tile = refs.o_tiles.at[warpgroup]
        self.line: jax.Array | int = 0 if plan.lines == 1 else warpgroup
        self.part: jax.Array | int = warpgroup if plan.lines == 1 else 0
        self.lowest = lowest_score(plan.scale, with_bias=plan.form.bias is not None)

    def run(self) -> None:
        """Attends for all tiles."""
        slot = jnp.int32(0)
        tile = self.walk.tile(slot)
        self.copy_queries(slot)
        if self.plan.tensor_sums:
            plgpu.barrier_wait(self.refs.ones_ready)
        plgpu.barrier_wait(self.q_ready)
        self.keys.wait(slot)
        scores = product(self.queries, self.refs.k_blocks.at[slot, self.line], transpose_b=True)
        self.release_unmasked(slot)
        if not self.plan.one_tile:
            pl.when((tile.blocks == 1) & (self.walk.count > 1))(lambda: self.copy_queries(jnp.int32(1)))
        peak = jnp.full((ROWS,), self.lowest, jnp.float32)
        total = None if self.plan.tensor_sums else jnp.zeros((ROWS,), jnp.float32)
        scores = self.masked(scores, slot, tile, tile.end - 1, slot)
        weights, peak, total, _ = self.softmax(scores, peak, total)
        self.keys.wait(self.keys.after(slot))
        carry = weights.astype(self.refs.q.dtype), peak, total, slot
        totals = [(ROWS, TILE_ROWS)] * self.plan.tensor_sums
        with_sums(functools.partial(self.attend, carry), (ROWS, self.plan.form.head_dim), *totals)

    def attend(self, carry: _Carry, *sums: Ref) -> None:
        """Attends for all tiles, given the softmax of the first block of keys."""
        add_tile = functools.partial(self.add_tile, sums)
        weights, peak, total, slot = jax.lax.fori_loop(0, self.walk.count, add_tile, carry)
        self.add_values(sums, weights, slot)
        self.finish(self.walk.tile(self.walk.count - 1), self.take_sums(sums, slot), peak, total)
        plgpu.wait_smem_to_gmem(0)

    def add_tile(self, sums: _Sums, i: jax.Array, carry: _Carry) -> _Carry:
        """Adds up all blocks of tile i; of the last tile all but one, for which there is no other to begin."""
        tile, following = self.walk.tile(i), self.walk.tile(i + 1)
        add_block = functools.partial(self.add_block, sums, i, tile, following)
        return jax.lax.fori_loop(0, tile.blocks - (i + 1 == self.walk.count), add_block, carry)

    def add_block(
        self, sums: _Sums, i: jax.Array, tile: Tile, following: Tile, j: jax.Array, carry: _Carry
    ) -> _Carry:
        """Adds block j of tile i to the sums, and takes the softmax of the next block, be it of the next tile."""
        weights, peak, total, slot = carry
        next_slot, ends = self.keys.after(slot), None
        then, pending = functools.partial(self.add_values, sums, weights, slot), len(sums)
        keys = self.refs.k_blocks.at[next_slot, self.line]
        if self.plan.one_tile:
            scores = product(self.queries, keys, transpose_b=True, then=then, pending=pending)
            self.release_unmasked(next_slot)
            scores = self.masked(scores, i, tile, tile.end - 2 - j, next_slot)
            base = peak, total
        else:
            ends = j + 1 == tile.blocks
            pl.when(ends)(lambda: plgpu.barrier_wait(self.q_ready))
            scores = product(self.queries, keys, transpose_b=True, then=then, pending=pending)
            self.release_unmasked(next_slot)
            # Once they have met their last keys, queries make room for those after them.
            last = jnp.where(ends, following.blocks == 1, j + 2 == tile.blocks)
            pl.when(last & (i + 1 + ends < self.walk.count))(lambda: self.copy_queries(i + 1 + ends))
            scores = self.masked(
                scores,
                i + ends,
                jax.tree.map(functools.partial(jnp.where, ends), following, tile),
                jnp.where(ends, following.end - 1, tile.end - 2 - j),
                next_slot,
            )
            anew = jnp.broadcast_to(ends, (ROWS,))
            base = jnp.where(anew, self.lowest, peak), None if total is None else jnp.where(anew, 0.0, total)
        weights, new_peak, new_total, correction = self.softmax(scores, *base)
        self.keys.wait(self.keys.after(next_slot))
        values = self.take_sums(sums, slot)

        def scaled(values: list[jax.Array]) -> list[jax.Array]:
            return [value * jax.lax.broadcast_in_dim(correction, value.shape, [0]) for value in values]

        def finished(values: list[jax.Array]) -> list[jax.Array]:
            self.finish(tile, values, peak, total)
            return [jnp.zeros_like(value) for value in values]

        values = scaled(values) if ends is None else jax.lax.cond(ends, finished, scaled, values)
        for ref, value in zip(sums, values, strict=True):
            put(ref, value)
        # By their dtype weights are operands, which must not change while a product is under way.
        return weights.astype(self.refs.q.dtype), new_peak, new_total, next_slot

    def rows_of(self, tile: Tile) -> pl.Slice:
        """The rows of a tile that this warpgroup has."""
        return pl.Slice(tile.start + self.part * ROWS, ROWS)

    def item(self, tile: Tile) -> jax.Array:
        """The item of a tile that this warpgroup has."""
        return tile.batch + self.line

    def copy_queries(self, i: jax.Array) -> None:
        refs, tile = self.refs, self.walk.tile(i)
        source = refs.q.at[self.item(tile), self.rows_of(tile), self.plan.columns(0, tile.head)]
        plgpu.copy_gmem_to_smem(source, self.queries, self.q_ready)
        if refs.segments is not None:  # while the ids of the tile before are still compared
            target = refs.q_segments.at[self.warpgroup, rem(i, 2)]
            plgpu.copy_gmem_to_smem(refs.segments.at[tile.batch, self.rows_of(tile)], target, self.q_ready)

    def add_values(self, sums: _Sums, weights: jax.Array, slot: jax.Array) -> None:
        values = self.refs.v_blocks.at[slot, self.line]
        self.values.wait(slot)
        multiply(sums[0], weights, values)
        if self.plan.tensor_sums:
            multiply(sums[1], weights, self.refs.ones_tile, transpose_b=True)

    def take_sums(self, sums: _Sums, slot: jax.Array) -> list[jax.Array]:
        """The sums, with the values in a slot, which makes room."""
        values = [in_layout(ref) for ref in sums]
        self.values.release(slot)
        return values

    def release_keys(self, slot: jax.Array) -> None:
        commit_reads()
        self.keys.release(slot)

    def release_unmasked(self, slot: jax.Array) -> None:
        """Makes room for other keys, where nothing but the product reads what is in a slot."""
        if self.plan.form.bias is None and not self.plan.form.has_masks:
            self.release_keys(slot)

    def masked(self, scores: jax.Array, i: jax.Array, tile: Tile, block: jax.Array, slot: jax.Array) -> jax.Array:
        """The scores of tile i and the keys in a slot, a block of them, without pairs that are not valid."""
        refs, form = self.refs, self.plan.form
        if refs.bias is not None:
            rows = pl.Slice(self.part * ROWS, ROWS)
            bias = load(refs.bias_blocks.at[slot, rows], plgpu.Layout.WGMMA)
            scores = elementwise(self.biased, scores, bias)
            if not form.has_masks:
                self.release_keys(slot)
        if self.plan.band.high is None and not self.plan.is_ragged and not form.has_masks:
            return scores
        full = (block >= tile.full) & (block < tile.full_end)
        mask = functools.partial(self.mask, i=i, tile=tile, block=block, slot=slot)
        scores = jax.lax.cond(full, lambda x: x, mask, scores)
        if form.has_masks:
            self.release_keys(slot)
        return scores

    def biased(self, score: jax.Array, bias: jax.Array) -> jax.Array:
        return score * self.plan.form.sm_scale + bias.astype(jnp.float32)

    def mask(self, scores: jax.Array, *, i: jax.Array, tile: Tile, block: jax.Array, slot: jax.Array) -> jax.Array:
        """`masked` where some pairs of the block are not valid."""
        refs, band, kv_seq, ragged = self.refs, self.plan.band, self.plan.form.kv_seq, self.plan.is_ragged
        spread = functools.partial(across, shape=scores.shape)
        key, valid = block * self.plan.block_kv, []
        if band.high is not None or ragged:
            keys = spread(jax.lax.iota(jnp.int32, self.plan.block_kv), axis=1)
        if band.high is not None:
            # Of vectors a thread has few elements: the keys, and for each row the last one that it sees.
            own = jax.lax.iota(jnp.int32, ROWS) + (tile.start + self.part * ROWS - key)
            last = own + band.high
            valid.append(keys <= spread(jnp.minimum(last, kv_seq - 1 - key) if ragged else last, axis=0))
            if band.low is not None:
                valid.append(keys >= spread(own + band.low, axis=0))
        elif ragged:
            valid.append(keys < kv_seq - key)
        if refs.mask is not None:
            valid.append(load_across(refs.mask_blocks.at[slot, self.line], scores.shape, 1) != 0)
        if refs.segments is not None:
            own = load_across(refs.q_segments.at[self.warpgroup, rem(i, 2)], scores.shape, 0)
            valid.append(own == load_across(refs.segment_blocks.at[slot], scores.shape, 1))
        return masked(scores, valid)

    def softmax(self, scores: jax.Array, peak: jax.Array, total: jax.Array | None) -> tuple[Any, ...]:
        """Weights, the new maxima and sums of rows, and the factor for sums with the maxima from before."""
        scale = self.plan.scale
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = softmax_weights(scores, new_peak, scale)
        correction = jnp.exp2(exponents(peak, scale)[1] - exponents(new_peak, scale)[1])
        if total is not None:
            total = total * correction + jnp.sum(weights, axis=1)
        # The compiler would first wait for all products, but for this and what may wait after it.
        return tuple(jax.lax.optimization_barrier((weights, new_peak, total, correction)))

    def finish(self, tile: Tile, values: list[jax.Array], peak: jax.Array, total: jax.Array | None) -> None:
        """Writes the results of a tile."""
        refs, value = self.refs, values[0]
        if total is None:
            total = jnp.max(values[1], axis=1)  # all columns but the last are alike, and that is 0
        empty = total == 0.0  # no key took part
        factor = jnp.where(empty, 0.0, 1.0 / total)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
        self.o_tile[...] = (value * jax.lax.broadcast_in_dim(factor, value.shape, [0])).astype(self.o_tile.dtype)
        if refs.lse is not None:
            lse = jnp.where(empty, NO_KEY, peak * (self.plan.scale * math.log(2)) + jnp.log(total))
            refs.lse_tiles[self.warpgroup] = lse
        plgpu.commit_smem()
        if self.plan.lines == 1:
            self.write(tile)
        else:  # but no line past the last
            pl.when(self.item(tile) == self.plan.item(tile.batch, self.line))(lambda: self.write(tile))

    def write(self, tile: Tile) -> None:
        """Copies the results of a tile to device memory."""
        refs, item = self.refs, self.item(tile)
        target = refs.o.at[item, self.rows_of(tile), self.plan.columns(0, tile.head)]
        plgpu.copy_smem_to_gmem(self.o_tile, target)
        if refs.lse is not None:
            target = refs.lse.at[item, tile.head, self.rows_of(tile)]
            plgpu.copy_smem_to_gmem(refs.lse_tiles.at[self.warpgroup], target)


def attention_kernel(refs: Refs, *, plan: Plan) -> None:
    """Attends in this warpgroup.

    Args:
      refs: q (B, Sq, heads * head_dim), k and v (B, Skv, kv_heads * head_dim), or buffers that have these columns
        among others, or squares of pairs; bias (B or 1, heads or 1, Sq, Skv), mask and kv_segments (B, Skv),
        segments (B, Sq), found (B or 1, blocks of queries, 4), None if absent; o like q, and lse (B, heads,
        queries of whole tiles) if asked for; and scratch memory.
    """
    pairs = {name: of_pairs(plan.form, getattr(refs, name)) for name in ("q", "k", "v", "o")}
    refs = types.SimpleNamespace(**vars(refs) | pairs | dict(lse=of_rows(plan.form, refs.lse)))
    cta, warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
    walk = Walk(plan, refs.found, cta)
    consumer_registers, producer_registers = _REGISTERS[plan.consumers]
    specialize(
        Role(
            range(plan.consumers, plan.consumers + 1),
            producer_registers,
            lambda _: _Producer(refs, plan, walk).run(),
        ),
        Role(range(plan.consumers), consumer_registers, lambda own: _Consumer(refs, plan, walk, own).run()),
        warpgroup=warpgroup,
    )
