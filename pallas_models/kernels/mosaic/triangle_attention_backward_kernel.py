"""The kernel of `triangle_attention_backward` for Hopper GPUs: what each of its warpgroups does.

A warpgroup has 64 rows of a tile, of several lines in turn, which share each block of the bias: so the bias is
loaded, and its gradient leaves the registers, once for all of them. One warpgroup, the producer, copies ahead.
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
from pallas_models.kernels.mosaic.common.attention_walk import ROWS
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.device_sums import add_to_device
from pallas_models.kernels.mosaic.common.elementwise import elementwise
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import commit_reads, layout_cast, load, row
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, put, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.scores import load_across, masked
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.kernels.mosaic.triangle_attention_backward_plan import CONSUMERS, Group, Side

# Of a thread that computes and of one that copies, by whether tiles are of keys.
_REGISTERS = {False: (232, 40), True: (224, 56)}


def _rings(refs: Refs, side: Side) -> tuple[Ring, Ring, Ring]:
    """The rings of the tiles of lines, of the blocks that they meet, and of the bias."""
    return (
        Ring(refs.line_ready, refs.line_read, side.line_stages),
        Ring(refs.block_ready, refs.block_read, side.num_stages),
        Ring(refs.bias_ready, refs.bias_read, refs.bias_blocks.shape[0]),
    )


class _Producer:
    """The warpgroup that copies tiles, blocks and the bias to shared memory, ahead of those that compute."""

    def __init__(self, refs: Refs, side: Side) -> None:
        self.refs, self.side = refs, side
        self.tiles, self.blocks, self.bias = _rings(refs, side)

    def run(self) -> None:
        side = self.side
        groups, blocks = jax.lax.fori_loop(0, side.count, self.copy_unit, (jnp.int32(0), jnp.int32(0)))
        self.tiles.drain(groups * side.lines)
        self.blocks.drain(blocks * side.lines)
        self.bias.drain(blocks)

    def copy_unit(self, i: jax.Array, steps: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Copies what the i-th unit needs; returns how many groups and blocks there have been."""

        def copy_group(j: jax.Array, steps: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            groups, blocks = steps
            group = self.side.group(i, j, self.refs.found)
            copy = functools.partial(self.copy_block, group, groups)
            return groups + 1, jax.lax.fori_loop(0, group.count, copy, blocks)

        return jax.lax.fori_loop(0, self.side.groups_of(i), copy_group, steps)

    def copy_block(self, group: Group, groups: jax.Array, j: jax.Array, step: jax.Array) -> jax.Array:
        """Copies the j-th block of a group for all its lines, and with the first block their tiles."""
        block, lines = group.block(j), self.side.lines
        self.copy_bias(group, block, step)
        for n in range(lines):
            item = self.side.item(group.line, n)
            pl.when(j == 0)(functools.partial(self.copy_tile, group, item, groups * lines + n))
            self.copy_rows(group, item, block, step * lines + n, j < group.full_count)
        return step + 1

    def copy_bias(self, group: Group, block: jax.Array, step: jax.Array) -> None:
        refs, slot, columns = self.refs, self.bias.acquire(step), pl.Slice(block * ROWS, ROWS)
        for part in range(CONSUMERS):
            source = refs.bias.at[group.owner, pl.Slice(group.start + part * ROWS, ROWS), columns]
            plgpu.copy_gmem_to_smem(source, refs.bias_blocks.at[slot, part], refs.bias_ready.at[slot])

    def copy_tile(self, group: Group, item: jax.Array, step: jax.Array) -> None:
        """Copies the rows of a line."""
        refs, side, slot = self.refs, self.side, self.tiles.acquire(step)
        columns, ready = side.columns(group.head), refs.line_ready.at[slot]
        for part in range(CONSUMERS):
            rows = pl.Slice(group.start + part * ROWS, ROWS)
            for name, tiles in zip(side.operands, (refs.first_tiles, refs.second_tiles), strict=True):
                plgpu.copy_gmem_to_smem(getattr(refs, name).at[item, rows, columns], tiles.at[slot, part], ready)
            if not side.of_keys:
                for source, target in ((refs.shift, refs.shifts), (refs.delta, refs.deltas)):
                    plgpu.copy_gmem_to_smem(source.at[item, group.head, rows], target.at[slot, part], ready)
            elif refs.mask is not None:
                plgpu.copy_gmem_to_smem(refs.mask.at[item, rows], refs.masks.at[slot, part], ready)

    def copy_rows(
        self, group: Group, item: jax.Array, block: jax.Array, step: jax.Array, is_full: jax.Array
    ) -> None:
        """Copies a block of a line."""
        refs, side, slot = self.refs, self.side, self.blocks.acquire(step)
        columns, rows, ready = side.columns(group.head), pl.Slice(block * ROWS, ROWS), refs.block_ready.at[slot]
        for name, blocks in zip(side.others, (refs.first_blocks, refs.second_blocks), strict=True):
            plgpu.copy_gmem_to_smem(getattr(refs, name).at[item, rows, columns], blocks.at[slot], ready)
        if side.of_keys:
            for source, target in ((refs.shift, refs.shifts), (refs.delta, refs.deltas)):
                plgpu.copy_gmem_to_smem(source.at[item, group.head, rows], target.at[slot], ready)
        elif refs.mask is not None:
            ready = refs.mask_ready.at[slot]
            copy = functools.partial(plgpu.copy_gmem_to_smem, refs.mask.at[item, rows], refs.masks.at[slot], ready)
            pl.when(~is_full)(copy)


class _Consumer:
    """A warpgroup that computes the gradients of 64 rows of each tile."""

    def __init__(self, refs: Refs, side: Side, warpgroup: jax.Array) -> None:
        self.refs, self.side, self.warpgroup = refs, side, warpgroup
        self.tiles, self.blocks, self.bias = _rings(refs, side)

    def run(self) -> None:
        side = self.side
        with_sums(self.add_units, *[(ROWS, side.form.head_dim)] * (len(side.results) * side.lines))
        plgpu.wait_smem_to_gmem(0)

    def add_units(self, *sums: Ref) -> None:
        def add_unit(i: jax.Array, steps: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            add_group = functools.partial(self.add_group, sums, i)
            return jax.lax.fori_loop(0, self.side.groups_of(i), add_group, steps)

        jax.lax.fori_loop(0, self.side.count, add_unit, (jnp.int32(0), jnp.int32(0)))

    def add_group(
        self, sums: tuple[Ref, ...], i: jax.Array, j: jax.Array, steps: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Computes and writes the gradients of the j-th group of the i-th unit."""
        groups, blocks = steps
        side = self.side
        rows = _Rows(self, side.group(i, j, self.refs.found), groups, sums)
        add_full, add_masked = (functools.partial(rows.add_block, full=full) for full in (True, False))
        blocks = jax.lax.fori_loop(0, rows.group.full_count, add_full, blocks)
        if side.has_mask or side.items_left:
            blocks = jax.lax.fori_loop(rows.group.full_count, rows.group.count, add_masked, blocks)
        rows.write()
        return groups + 1, blocks


class _Rows:
    """The rows of a group that a warpgroup has, and the sums of their gradients."""

    def __init__(self, consumer: _Consumer, group: Group, groups: jax.Array, sums: tuple[Ref, ...]) -> None:
        self.refs, self.side, self.warpgroup = consumer.refs, consumer.side, consumer.warpgroup
        self.tiles, self.blocks, self.bias = consumer.tiles, consumer.blocks, consumer.bias
        self.group, self.sums = group, sums
        self.slots = [
            jax.lax.rem(groups * self.side.lines + n, self.side.line_stages) for n in range(self.side.lines)
        ]
        self.rows = pl.Slice(group.start + self.warpgroup * ROWS, ROWS)
        for total in sums:
            put(total, jnp.zeros(total.shape, jnp.float32))

    def of_line(self, n: int) -> tuple[Ref, ...]:
        """The sums of a line."""
        count = len(self.side.results)
        return self.sums[n * count : (n + 1) * count]

    def add_block(self, j: jax.Array, step: jax.Array, *, full: bool) -> jax.Array:
        """Adds the j-th block of all lines; `full`: it has nothing but valid pairs."""
        side, lines, block = self.side, self.side.lines, self.group.block(j)
        slot = jax.lax.rem(step, self.bias.num_stages)
        self.bias.wait(slot)
        bias = load(self.refs.bias_blocks.at[slot, self.warpgroup], plgpu.Layout.WGMMA)
        commit_reads()
        self.bias.release(slot)
        total = layout_cast(jnp.zeros((ROWS, ROWS), jnp.float32), plgpu.Layout.WGMMA) if side.adds_bias else None
        for n in range(lines):
            pl.when(j == 0)(functools.partial(self.tiles.wait, self.slots[n]))
            slot = jax.lax.rem(step * lines + n, side.num_stages)
            self.blocks.wait(slot)
            total = with_sums(
                functools.partial(self.add_line, n=n, slot=slot, bias=bias, total=total, full=full),
                (ROWS, ROWS),
                (ROWS, ROWS),
            )
            self.blocks.release(slot)
        if total is not None:
            self.write_bias(total, block)
        return step + 1

    def add_line(
        self,
        scores_sum: Ref,
        weights_sum: Ref,
        *,
        n: int,
        slot: jax.Array,
        bias: jax.Array,
        total: jax.Array | None,
        full: bool,
    ) -> jax.Array | None:
        """Adds a block to the sums of the n-th line, and the gradients of its scores to the total of all lines."""
        refs, side, shape, dtype = self.refs, self.side, scores_sum.shape, self.side.form.dtype
        own_first, own_second = (
            x.at[self.slots[n], self.warpgroup] for x in (refs.first_tiles, refs.second_tiles)
        )
        other_first, other_second = (x.at[slot] for x in (refs.first_blocks, refs.second_blocks))
        # What is subtracted from a sum is where it begins, which saves an operation for each pair.
        put(weights_sum, layout_cast(self.number(refs.deltas, n, slot, shape), plgpu.Layout.WGMMA))
        multiply(scores_sum, own_first, other_first, transpose_b=True)
        multiply(weights_sum, own_second, other_second, transpose_b=True)
        factor = other_first if full else self.kept(slot)  # while the tensor cores compute
        exponents = elementwise(self.biased, in_layout(scores_sum, 1), bias) * math.log2(math.e)
        exponents = exponents + self.number(refs.shifts, n, slot, shape)
        if not full:
            exponents = self.masked(exponents, n, slot)
        weights = jnp.exp2(exponents)
        sums = self.of_line(n)
        if side.of_keys:
            multiply(sums[1], weights.astype(dtype), other_second)
        dscores = weights * in_layout(weights_sum, 1 if side.of_keys else 0)
        multiply(sums[0], dscores.astype(dtype), factor)
        total = None if total is None else total + dscores
        plgpu.wgmma_wait(0)
        return total

    def biased(self, score: jax.Array, bias: jax.Array) -> jax.Array:
        return score * self.side.form.sm_scale + bias.astype(jnp.float32)

    def number(self, numbers: Ref, n: int, slot: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """A number of each query, shift or delta, for all pairs."""
        if self.side.of_keys:
            return row(numbers.at[slot], shape)
        return jax.lax.broadcast_in_dim(numbers[self.slots[n], self.warpgroup], shape, [0])

    def masked(self, exponents: jax.Array, n: int, slot: jax.Array) -> jax.Array:
        """The exponents of a line without pairs that are not valid."""
        refs, side = self.refs, self.side
        if side.items_left:
            is_there = self.group.line + n == side.item(self.group.line, n)
            exponents = exponents + jnp.where(is_there, 0.0, -jnp.inf)
        if refs.mask is None:
            return exponents
        place = (self.slots[n], self.warpgroup) if side.of_keys else slot
        return masked(
            exponents, [load_across(refs.masks.at[place], exponents.shape, 0 if side.of_keys else 1) != 0]
        )

    def kept(self, slot: jax.Array) -> Ref:
        """The block that gradients of scores are multiplied by: 0 for masked keys, which may hold NaN."""
        refs = self.refs
        block = refs.first_blocks.at[slot]
        if self.side.of_keys or refs.mask is None:
            return block
        plgpu.barrier_wait(refs.mask_ready.at[slot])
        kept, keys = refs.kept_keys.at[self.warpgroup], load(block, plgpu.Layout.WGMMA)
        valid = load_across(refs.masks.at[slot], keys.shape, 0) != 0
        kept[...] = jnp.where(valid, keys, jnp.zeros_like(keys))
        plgpu.commit_smem()
        return kept

    def write_bias(self, total: jax.Array, block: jax.Array) -> None:
        """Adds the gradient of a block of the bias to the part of these lines."""
        refs, group = self.refs, self.group
        plgpu.wait_smem_to_gmem(0)  # also until what was added to this block before is there: sums have one order
        tile = refs.dbias_tiles.at[self.warpgroup]
        tile[...] = total
        plgpu.commit_smem()
        target = refs.dbias.at[group.part, group.owner, self.rows, pl.Slice(block * ROWS, ROWS)]
        pl.when(group.is_first)(lambda: plgpu.copy_smem_to_gmem(tile, target))
        pl.when(~group.is_first)(lambda: add_to_device(tile, target))

    def write(self) -> None:
        """Writes the gradients by way of the tiles, which nobody reads any more, and makes room for others."""
        refs, side, columns = self.refs, self.side, self.side.columns(self.group.head)
        for n, slot in enumerate(self.slots):
            tiles = refs.first_tiles, refs.second_tiles
            for total, tile, result in zip(self.of_line(n), tiles, side.results, strict=False):
                factor = 1.0 if result == "dv" else side.form.sm_scale
                tile[slot, self.warpgroup] = (in_layout(total) * factor).astype(side.form.dtype)
        plgpu.commit_smem()
        for n, slot in enumerate(self.slots):
            item = side.item(self.group.line, n)
            for tiles, result in zip((refs.first_tiles, refs.second_tiles), side.results, strict=False):
                target = getattr(refs, result).at[item, self.rows, columns]
                copy = functools.partial(plgpu.copy_smem_to_gmem, tiles.at[slot, self.warpgroup], target)
                pl.when(self.group.line + n == item)(copy) if side.items_left else copy()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for slot in self.slots:
            self.tiles.release(slot)


def backward_kernel(refs: Refs, *, side: Side) -> None:
    """Computes gradients in this warpgroup.

    Args:
      refs: q, k, v and dout, squares of pairs (B, N, N, heads * head_dim); shift and delta (B, lines, heads, N);
        bias (B * heads, rows of tiles, rows of blocks), mask (B * lines, N) and found, None if absent; dq and
        dbias (parts, B * heads, rows of whole tiles, N), or dk and dv; scratch memory.
    """
    form = side.form
    pairs: dict[str, Any] = {name: of_pairs(form, getattr(refs, name)) for name in ("q", "k", "v", "dout")}
    pairs |= {name: of_pairs(form, getattr(refs, name)) for name in side.results}
    rows = {name: of_rows(form, getattr(refs, name)) for name in ("shift", "delta")}
    refs = types.SimpleNamespace(**vars(refs) | pairs | rows)
    consumer_registers, producer_registers = _REGISTERS[side.of_keys]
    specialize(
        Role(range(CONSUMERS, CONSUMERS + 1), producer_registers, lambda _: _Producer(refs, side).run()),
        Role(range(CONSUMERS), consumer_registers, lambda own: _Consumer(refs, side, own).run()),
    )
