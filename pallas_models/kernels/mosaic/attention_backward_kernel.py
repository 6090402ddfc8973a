"""The kernel of `attention_backward` for Hopper GPUs: what each of its warpgroups does.

One warpgroup, the producer, copies tiles, and to a ring the blocks that each is paired with. The consumers have 64
rows of a tile each, and sums of gradients in registers. Tiles of keys compute scores transposed, (keys, queries):
so weights and gradients of scores are operands of the next products as they are.
"""

import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.attention_backward_walk import CONSUMERS, Side, Tile
from pallas_models.kernels.mosaic.common.attention_walk import ROWS
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import layout_cast, row, row_bytes_of, tiled
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, put, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.scores import across, load_across, masked
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize

_REGISTERS = (240, 24)  # of a thread that computes and of one that copies


def scratch_types(sides: Sequence[Side]) -> Mapping[str, Any]:
    """The shared memory and the barriers of a CTA. The sides take turns in the largest of it."""
    form, block, num_stages = sides[0].form, sides[0].block, sides[0].num_stages
    tile, blocks = (CONSUMERS, ROWS, form.head_dim), (num_stages, block, form.head_dim)
    row_bytes = row_bytes_of(form.head_dim, form.dtype)
    shapes = dict(first_tiles=tile, second_tiles=tile, first_blocks=blocks, second_blocks=blocks, o_tiles=tile)
    shared: dict[str, Any] = {name: tiled(shape, form.dtype, row_bytes) for name, shape in shapes.items()}
    for side in sides:
        shared |= side.scratch_types()
    return shared


class _Producer:
    """The warpgroup that copies tiles and blocks of a side to shared memory, ahead of those that compute."""

    def __init__(self, refs: Refs, side: Side) -> None:
        self.refs, self.side = refs, side
        self.ring = Ring(refs.ready, refs.read, side.num_stages)
        self.heads = side.form.group if side.of_keys else 1  # of the blocks of a tile

    def run(self) -> None:
        count = self.side.count
        self.ring.drain(jax.lax.fori_loop(0, count, self.copy_all, jnp.int32(0)))
        pl.when(count > 0)(lambda: plgpu.barrier_wait(self.refs.tile_read))

    def copy_all(self, i: jax.Array, steps: jax.Array) -> jax.Array:
        """Copies the i-th tile, and its blocks to the slots from `steps` on; returns the step after the last."""
        tile = self.side.tile(i, self.refs.found)
        count = tile.count * self.heads

        def copy(j: jax.Array, steps: jax.Array) -> jax.Array:
            self.copy_block(tile, j, steps)
            # The ring is filled while the tile before is still needed.
            pl.when(j == jnp.minimum(count, self.side.num_stages) - 1)(lambda: self.copy_tile(tile, i == 0))
            return steps + 1

        pl.when(count == 0)(lambda: self.copy_tile(tile, i == 0))
        return jax.lax.fori_loop(0, count, copy, steps)

    def copy_tile(self, tile: Tile, is_first: jax.Array) -> None:
        refs, side = self.refs, self.side
        pl.when(~is_first)(lambda: plgpu.barrier_wait(refs.tile_read))
        for part in range(CONSUMERS):
            rows = pl.Slice(tile.start + part * ROWS, ROWS)
            for name, tiles in zip(side.operands, refs.tiles, strict=True):
                source = getattr(refs, name).at[tile.batch, rows, side.columns(name, tile.head)]
                plgpu.copy_gmem_to_smem(source, tiles.at[part], refs.tile_ready)
            for source, target in () if side.of_keys else zip((refs.shift, refs.delta), refs.numbers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[tile.batch, tile.head, rows], target.at[part], refs.tile_ready)
            for name in side.tile_ids:
                source, target = getattr(refs, name).at[tile.batch, rows], getattr(refs, f"{name}_ids").at[part]
                plgpu.copy_gmem_to_smem(source, target, refs.tile_ready)

    def copy_block(self, tile: Tile, j: jax.Array, step: jax.Array) -> None:
        """Copies the j-th block of a tile, counted over all heads that the tile meets."""
        refs, side, div, rem = self.refs, self.side, jax.lax.div, jax.lax.rem
        slot = self.ring.acquire(step)
        if self.heads > 1:
            head, j = tile.head * self.heads + div(j, tile.count), rem(j, tile.count)
        else:
            head = div(tile.head, 1 if side.of_keys else side.form.group)
        rows = pl.Slice(tile.block(j) * side.block, side.block)
        readies = (refs.ready, refs.second_ready)
        for name, blocks, ready in zip(side.others, refs.blocks, readies, strict=True):
            source = getattr(refs, name).at[tile.batch, rows, side.columns(name, head)]
            plgpu.copy_gmem_to_smem(source, blocks.at[slot], ready.at[slot])
        if side.of_keys:
            for source, target in zip((refs.shift, refs.delta), refs.numbers, strict=True):
                row_numbers = source.at[tile.batch, head, rows]
                plgpu.copy_gmem_to_smem(row_numbers, target.at[slot], refs.ready.at[slot])
        for name in side.block_ids:
            source, target = getattr(refs, name).at[tile.batch, rows], getattr(refs, f"{name}_ids").at[slot]
            plgpu.copy_gmem_to_smem(source, target, refs.ready.at[slot])


class _Consumer:
    """A warpgroup that computes the gradients of 64 rows of each tile of a side."""

    def __init__(self, refs: Refs, side: Side) -> None:
        self.refs, self.side, self.warpgroup = refs, side, jax.lax.axis_index("warpgroup")
        self.ring = Ring(refs.ready, refs.read, side.num_stages)

    def run(self) -> None:
        with_sums(self.add_tiles, *[(ROWS, self.side.form.head_dim)] * len(self.side.results))

    def add_tiles(self, *sums: Ref) -> None:
        jax.lax.fori_loop(0, self.side.count, functools.partial(self.add_tile, sums), jnp.int32(0))

    def add_tile(self, sums: tuple[Ref, ...], i: jax.Array, steps: jax.Array) -> jax.Array:
        """Computes and writes gradients of the i-th tile; returns the step of the ring after its blocks."""
        side = self.side
        rows = _Rows(self, side.tile(i, self.refs.found), sums)

        def add_head(_: jax.Array, steps: jax.Array) -> jax.Array:
            steps = jax.lax.fori_loop(0, rows.tile.full_count, rows.add_full, steps)
            if not side.has_masks:
                return steps
            return jax.lax.fori_loop(rows.tile.full_count, rows.tile.count, rows.add_masked, steps)

        if side.of_keys and side.form.group > 1:
            steps = jax.lax.fori_loop(0, side.form.group, add_head, steps)
        else:
            steps = add_head(jnp.int32(0), steps)
        plgpu.barrier_arrive(self.refs.tile_read)
        rows.write()
        return steps


class _Rows:
    """The rows of a tile that a warpgroup has, and the sums of their gradients."""

    def __init__(self, consumer: _Consumer, tile: Tile, sums: tuple[Ref, ...]) -> None:
        self.refs, self.side, self.ring = consumer.refs, consumer.side, consumer.ring
        self.warpgroup, self.tile, self.sums = consumer.warpgroup, tile, sums
        self.start = tile.start + self.warpgroup * ROWS
        plgpu.barrier_wait(self.refs.tile_ready)
        self.numbers = [] if self.side.of_keys else [ref[self.warpgroup] for ref in self.refs.numbers]
        for total in sums:
            put(total, jnp.zeros(total.shape, jnp.float32))

    def add_full(self, j: jax.Array, steps: jax.Array) -> jax.Array:
        """Adds the j-th block of the tile, which has nothing but valid pairs."""
        slot = jax.lax.rem(steps, self.side.num_stages)
        self.ring.wait(slot)  # here, that sums are known to be 0 where products begin
        self.add_pairs(slot, 0, self.side.block, self.tile.block(j) * self.side.block, full=True)
        self.ring.release(slot)
        return steps + 1

    def add_masked(self, j: jax.Array, steps: jax.Array) -> jax.Array:
        """Adds the parts of the j-th block, of 64 rows, in which positions leave any valid pair."""
        side, band = self.side, self.side.band
        slot = jax.lax.rem(steps, side.num_stages)
        self.ring.wait(slot)
        plgpu.barrier_wait(self.refs.second_ready.at[slot])
        other, parts = self.tile.block(j) * side.block, side.block // ROWS
        low, high = (band.high, band.low) if side.of_keys else (band.low, band.high)
        sign = -1 if side.of_keys else 1

        def part(row: jax.Array) -> jax.Array:
            return jnp.clip(jax.lax.div(row - other, ROWS), 0, parts)

        begin = 0 if low is None else part(self.start + sign * low)
        end = parts if high is None else part(self.start + sign * high + 2 * ROWS - 1)

        @pl.loop(begin, end)
        def _(i: jax.Array) -> None:
            self.add_pairs(slot, i * ROWS, ROWS, other + i * ROWS, full=False)

        self.ring.release(slot)
        return steps + 1

    def add_pairs(
        self, slot: jax.Array, first_column: jax.Array | int, size: int, other: jax.Array, *, full: bool
    ) -> None:
        """Adds the pairs of these rows and `size` columns of a slot, the first of which is row `other` there."""
        columns = pl.Slice(first_column, size)
        add = functools.partial(self.add_products, slot=slot, columns=columns, other=other, full=full)
        with_sums(add, (ROWS, size), (ROWS, size))

    def add_products(
        self,
        scores_sum: Ref,
        weights_sum: Ref,
        *,
        slot: jax.Array,
        columns: pl.Slice,
        other: jax.Array,
        full: bool,
    ) -> None:
        """`add_pairs` given sums for the scores and for the gradients of the weights."""
        refs, side, shape, dtype = self.refs, self.side, scores_sum.shape, self.refs.k.dtype
        own_first, own_second = (x.at[self.warpgroup] for x in refs.tiles)
        other_first, other_second = (x.at[slot, columns] for x in refs.blocks)
        # The tensor cores have the first part of a product while the operand of the second is computed.
        parts = [slice(i, i + ROWS) for i in range(0, shape[1], ROWS)]
        # What is subtracted from a sum is where it begins, which saves an operation for each pair.
        put(weights_sum, layout_cast(self.number(1, slot, columns, shape), plgpu.Layout.WGMMA))
        multiply(scores_sum, own_first, other_first, transpose_b=True)
        if full:
            plgpu.barrier_wait(refs.second_ready.at[slot])
        multiply(weights_sum, own_second, other_second, transpose_b=True)
        scale = side.form.sm_scale * math.log2(math.e)
        exponents = in_layout(scores_sum, 1) * scale + self.number(0, slot, columns, shape)
        if not full:
            exponents = self.masked(exponents, other, slot, columns)
        weights = [jnp.exp2(exponents[:, part]) for part in parts]
        if side.of_keys:
            for part, w in zip(parts, weights, strict=True):
                multiply(self.sums[1], w.astype(dtype), other_second.at[part])
        dweights = in_layout(weights_sum, len(parts) if side.of_keys else 0)
        for part, w in zip(parts, weights, strict=True):
            multiply(self.sums[0], (w * dweights[:, part]).astype(dtype), other_first.at[part])
        plgpu.wgmma_wait(0)

    def number(self, i: int, slot: jax.Array, columns: pl.Slice, shape: tuple[int, int]) -> jax.Array:
        """The i-th number of each query, shift or delta, for all pairs."""
        if self.side.of_keys:
            return row(self.refs.numbers[i].at[slot, columns], shape)
        return jax.lax.broadcast_in_dim(self.numbers[i], shape, [0])

    def masked(self, exponents: jax.Array, other: jax.Array, slot: jax.Array, columns: pl.Slice) -> jax.Array:
        """The exponents without pairs that are not valid; `other` is the row of the first column."""
        refs, side, band, shape = self.refs, self.side, self.side.band, exponents.shape
        key_axis, valid = 0 if side.of_keys else 1, []
        key, query = (self.start, other) if side.of_keys else (other, self.start)
        if side.is_ragged or band.high is not None:
            keys = across(jax.lax.iota(jnp.int32, shape[key_axis]) + key, shape, key_axis)
        if side.is_ragged:
            valid.append(keys < side.form.kv_seq)
        if band.high is not None:
            own = jax.lax.iota(jnp.int32, shape[1 - key_axis]) + query
            valid.append(keys <= across(own + band.high, shape, 1 - key_axis))
        if band.low is not None:
            valid.append(keys >= across(own + band.low, shape, 1 - key_axis))
        ids = {}
        for index, axis, names in ((self.warpgroup, 0, side.tile_ids), ((slot, columns), 1, side.block_ids)):
            for name in names:
                ids[name] = load_across(getattr(refs, f"{name}_ids").at[index], shape, axis)
        if "mask" in ids:
            valid.append(ids["mask"] != 0)
        if "segments" in ids:
            valid.append(ids["segments"] == ids["kv_segments"])
        return masked(exponents, valid)

    def write(self) -> None:
        """Writes the gradients, by way of one place in shared memory."""
        refs, side = self.refs, self.side
        o_tile = refs.o_tiles.at[self.warpgroup]
        for total, result in zip(self.sums, side.results, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            factor = 1.0 if result == "dv" else side.form.sm_scale
            o_tile[...] = (in_layout(total) * factor).astype(refs.k.dtype)
            plgpu.commit_smem()
            rows, columns = pl.Slice(self.start, ROWS), side.columns(result, self.tile.head)
            plgpu.copy_smem_to_gmem(o_tile, getattr(refs, result).at[self.tile.batch, rows, columns])


def _of_side(refs: Refs, side: Side) -> Refs:
    """The references, with what belongs to a side under names without the side's."""
    own = types.SimpleNamespace(**{n.removesuffix(f"_of_{side.name}"): ref for n, ref in vars(refs).items()})
    own.tiles, own.blocks = (refs.first_tiles, refs.second_tiles), (refs.first_blocks, refs.second_blocks)
    own.numbers = (own.shifts, own.deltas)
    return own


def backward_kernel(refs: Refs, *, sides: Sequence[Side]) -> None:
    """Computes gradients in this warpgroup.

    Args:
      refs: q, k and v (B, S, heads * head_dim), or buffers that have these columns among others; dout like q;
        shift and delta (B, heads, Sq); mask and kv_segments (B, Skv), segments (B, Sq), and for either side found
        (B or 1, tiles, 4), None if absent; dq, dk and dv as far as they are these sides', or one dqkv; scratch
        memory.
    """
    if refs.dqkv is not None:
        refs.dq = refs.dk = refs.dv = refs.dqkv

    def produce(_: jax.Array) -> None:
        for side in sides:
            _Producer(_of_side(refs, side), side).run()

    def consume(_: jax.Array) -> None:
        for side in sides:
            _Consumer(_of_side(refs, side), side).run()
        plgpu.wait_smem_to_gmem(0)

    consumer_registers, producer_registers = _REGISTERS
    specialize(
        Role(range(CONSUMERS, CONSUMERS + 1), producer_registers, produce),
        Role(range(CONSUMERS), consumer_registers, consume),
    )
