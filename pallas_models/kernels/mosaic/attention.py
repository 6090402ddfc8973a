"""Attention on Hopper's tensor cores, in the manner of [FlashAttention-3](https://arxiv.org/abs/2407.08608).

CTAs stay on their multiprocessor and walk over tiles of queries. One warpgroup only copies keys and
values, into a ring in shared memory, ahead of those that have 64 queries each. While such a one takes the softmax
of a block of keys, the tensor cores add up the values of the block before, and compute products of the others.
Neither stops at the end of a tile: the first softmax of the next one is taken meanwhile.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Runs, searched
from pallas_models.kernels.common.scores import MASKING_BIAS, NO_KEY, exponents, first_heads_of, lowest_score
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, load, tiled
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.scores import softmax_weights
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

ROWS = 64  # queries of a warpgroup: the rows of one instruction of the tensor cores
SEARCHED = 8  # blocks: from here on, masks are searched beforehand for blocks that they rule out
CACHE = 16 * 2**20  # bytes of keys and values that stay in the L2 cache, of two parts with 25 MB each
_REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32)}  # of a thread that computes and of one that copies


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of `block_q` queries, 64 a warpgroup, against `block_kv` keys a step, `num_stages` in the ring."""

    block_q: int
    block_kv: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_q not in (ROWS, 2 * ROWS, 3 * ROWS):
            raise ValueError(f"{__name__}: block_q={self.block_q} must be 64, 128 or 192")
        if self.block_kv not in (64, 128):
            raise ValueError(f"{__name__}: block_kv={self.block_kv} must be 64 or 128")
        if self.num_stages < 2:
            raise ValueError(f"{__name__}: num_stages={self.num_stages} must be at least 2")


def unsupported(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    *,
    head_dim: int,
    sm_scale: float,
    **_: Any,
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if qkv[0].dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {qkv[0].dtype}"
    if head_dim not in (64, 128):
        return f"takes heads of 64 and 128, not {head_dim=}"
    if sm_scale <= 0.0:
        return f"takes positive scales, not {sm_scale=}"
    return None


def prefer(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    *_: jax.Array | None,
    head_dim: int,
    window: int | None,
    **__: Any,
) -> bool:
    """Whether it is the faster kernel for a call that it serves, as measured on an H200."""
    # Triton's tiles are smaller, so that it skips more of what masks rule out.
    if head_dim == 64 and (mask is not None or segment_ids is not None):
        return False
    if window is not None and window < (1024 if head_dim == 64 else 128):
        return False
    seq, kv_seq = qkv[0].shape[1], qkv[-1].shape[1]
    return min(seq, kv_seq) >= 128 and seq % 8 == kv_seq % 8 == 0  # others are padded, which is a copy


def heuristic(seq: int, heads: int, head_dim: int, target: Target, *, masked: bool, bias_itemsize: int) -> Config:
    """Chooses blocks for `heads` of all the batch, as measured on an H200."""
    if heads * pl.cdiv(seq, 2 * ROWS) < target.num_cores:
        config = Config(block_q=ROWS, block_kv=128, num_stages=2)
    elif head_dim == 64 and not masked and not bias_itemsize and seq >= 2048:
        config = Config(block_q=3 * ROWS, block_kv=128, num_stages=2)
    else:
        config = Config(
            block_q=2 * ROWS, block_kv=128, num_stages=4 if head_dim == 64 and not bias_itemsize else 2
        )
    fits = shared_memory(config, head_dim, bias_itemsize) <= target.shared_memory
    return config if fits else dataclasses.replace(config, block_kv=64)


def candidates(seq: int) -> Iterator[Config]:
    """The blocks worth measuring."""
    for consumers, block_kv, num_stages in itertools.product((1, 2, 3), (64, 128), (2, 3, 4)):
        if (consumers - 1) * ROWS < seq:
            yield Config(block_q=consumers * ROWS, block_kv=block_kv, num_stages=num_stages)


def shared_memory(config: Config, head_dim: int, bias_itemsize: int = 0) -> int:
    """Bytes of shared memory that a CTA takes: queries, results, keys, values and masks of stages, barriers."""
    keys = config.num_stages * config.block_kv
    tiles = 2 * head_dim * 2 * (config.block_q + keys) + config.block_q * keys * bias_itemsize
    return tiles + 8 * (config.block_q + keys) + 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is attended to: lengths, heads, and where heads lie in the columns of queries, keys and values."""

    seq: int
    kv_seq: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_heads: tuple[int, int, int]
    causal: bool
    window: int | None

    @classmethod
    def of(cls, qkv: tuple[jax.Array, ...], num_heads: int, num_kv_heads: int, **others: Any) -> Self:
        return cls(
            seq=qkv[0].shape[1],
            kv_seq=qkv[-1].shape[1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            first_heads=first_heads_of(qkv, num_heads, num_kv_heads),
            **others,
        )

    @property
    def band(self) -> Band:
        return Band(seq=self.seq, kv_seq=self.kv_seq, causal=self.causal, window=self.window)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """How CTAs walk over the tiles of all heads: of `group` heads together, those that take longest come first."""

    num_ctas: int
    num_tiles: int
    group: int


def group_of_heads(runs: Runs, heads: int, tiles: int, in_cache: int, num_ctas: int) -> int:
    """How many heads to walk together, given the blocks of the tiles of each, in the order of the walk.

    As many as have blocks that stay `in_cache`, with which all CTAs take about as long; else a few more.
    """
    blocks = np.broadcast_to(np.maximum(np.subtract(runs[1], runs[0]), 1), tiles)
    rounds = pl.cdiv(heads * tiles, num_ctas)
    index = np.arange(rounds * num_ctas).reshape(rounds, num_ctas)
    index[1::2] = index[1::2, ::-1]

    def longest(group: int) -> int:
        work = np.where(index < heads * len(blocks), blocks[index % (group * len(blocks)) // group], 0)
        return int(np.max(np.sum(work, axis=0)))

    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    groups.sort(key=lambda n: (n > in_cache, n if n > in_cache else -n))
    enough = 1.05 * heads * np.sum(blocks) / num_ctas
    return next((n for n in groups if longest(n) <= enough), None) or min(groups, key=longest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """Queries of one head, and the blocks of keys that they need: [first, end), in [full, full_end) every pair."""

    batch: jax.Array
    head: jax.Array
    start: jax.Array  # the first query
    first: jax.Array
    full: jax.Array
    full_end: jax.Array
    end: jax.Array

    @property
    def blocks(self) -> jax.Array:
        return self.end - self.first


def narrowed(
    runs: Runs, found: Ref | None, batch: jax.Array, block: jax.Array, *, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The `Runs` of a block without what masks rule out.

    Args:
      found: what `searched` gave; where it is None and there are masks, no block counts for full.
      masked: whether there are masks besides the positions.
    """
    first, end, full, full_end = map(jnp.int32, runs)
    if found is None:
        return (first, end, first, first) if masked else (first, end, full, full_end)
    row = jnp.minimum(batch, found.shape[0] - 1)  # which may be one for all; and who has had all tiles asks on
    some, some_end, all_, all_end = (found[row, block, i] for i in range(4))
    least, most = jnp.maximum, jnp.minimum
    return least(first, some), most(end, some_end), least(full, all_), most(full_end, all_end)


_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # weights, maxima and sums of rows, step in the ring


def _attention_kernel(
    refs: Refs, *, config: Config, shape: Shape, walk: _Walk, sm_scale: float, interpret: bool
) -> None:
    """Attends in this warpgroup.

    Args:
      refs: q (B, Sq, heads * head_dim), k and v (B, Skv, kv_heads * head_dim), or buffers that have these columns
        among others; bias (B or 1, heads or 1, Sq, Skv), mask and kv_segments (B, Skv), segments (B, Sq), found
        (B or 1, blocks of queries, 4), None if absent; o like q, and lse (B, heads, queries of whole tiles) if
        asked for; and scratch memory.
    """
    block_q, block_kv, num_stages = config.block_q, config.block_kv, config.num_stages
    seq, kv_seq, head_dim, band = shape.seq, shape.kv_seq, shape.head_dim, shape.band
    consumers = block_q // ROWS
    cta, warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
    q_blocks, ragged = pl.cdiv(seq, block_q), kv_seq % block_kv > 0
    # Base-2 exponentials are the GPU's own. Scores stay unscaled up to these, except where a bias is added.
    scale = sm_scale * math.log2(math.e) if refs.bias is None else 1.0
    div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers
    keys_ring, values_ring = (
        Ring(full, read, num_stages) for full, read in ((refs.k_ready, refs.k_read), (refs.v_ready, refs.v_read))
    )
    after = keys_ring.after
    of_keys = [
        (ref, blocks)
        for ref, blocks in ((refs.mask, "mask_blocks"), (refs.kv_segments, "segment_blocks"))
        if ref is not None
    ]

    arrivals = 1 + len(of_keys) + (0 if refs.bias is None else consumers)  # of copies to a slot of the keys' ring

    def index_of(i: jax.Array) -> jax.Array:
        """The i-th tile of this CTA. CTAs take turns there and back, which evens out what they get."""
        return i * walk.num_ctas + jnp.where(rem(i, 2) == 0, cta, walk.num_ctas - 1 - cta)

    rounds = walk.num_tiles // walk.num_ctas
    count = rounds + (index_of(jnp.int32(rounds)) < walk.num_tiles).astype(jnp.int32)
    one_tile = walk.num_tiles <= walk.num_ctas

    def tile_of(i: jax.Array) -> _Tile:
        index = index_of(i)
        section, index = div(index, walk.group * q_blocks), rem(index, walk.group * q_blocks)
        head = section * walk.group + rem(index, walk.group)
        batch, block = div(head, shape.num_heads), q_blocks - 1 - div(index, walk.group)
        start = block * block_q
        runs = narrowed(band.keys_of(start, block_q, block_kv), refs.found, batch, block, masked=len(of_keys) > 0)
        first, end, full, full_end = runs
        end = jnp.maximum(end, 1)  # a tile that needs no block has one all the same, which is masked
        first = jnp.minimum(first, end - 1)
        return _Tile(batch, rem(head, shape.num_heads), start, first, full, full_end, end)

    def columns(operand: int, head: jax.Array) -> pl.Slice:
        return pl.Slice((shape.first_heads[operand] + head) * head_dim, head_dim)

    def produce() -> None:
        def copy_tile(i: jax.Array, step: jax.Array) -> jax.Array:
            tile = tile_of(i)
            kv_head = div(tile.head, shape.num_heads // shape.num_kv_heads)

            def copy(j: jax.Array, step: jax.Array) -> jax.Array:
                rows = pl.Slice((tile.end - 1 - j) * block_kv, block_kv)
                for operand, ref, blocks, ring in (
                    (1, refs.k, refs.k_blocks, keys_ring),
                    (2, refs.v, refs.v_blocks, values_ring),
                ):
                    slot = ring.acquire(step)
                    source = ref.at[tile.batch, rows, columns(operand, kv_head)]
                    plgpu.copy_gmem_to_smem(source, blocks.at[slot], ring.full_of(slot))
                    for of_key, name in of_keys if operand == 1 else ():
                        target = getattr(refs, name).at[slot]
                        plgpu.copy_gmem_to_smem(of_key.at[tile.batch, rows], target, ring.full_of(slot))
                    if operand == 1 and refs.bias is not None:
                        index = (
                            x if n > 1 else 0
                            for x, n in zip((tile.batch, tile.head), refs.bias.shape, strict=False)
                        )
                        bias = refs.bias.at[*index]
                        for part in range(consumers):
                            queries = pl.Slice(tile.start + part * ROWS, ROWS)
                            target = refs.bias_blocks.at[slot, part]
                            plgpu.copy_gmem_to_smem(bias.at[queries, rows], target, ring.full_of(slot))
                return step + 1

            return jax.lax.fori_loop(0, tile.blocks, copy, step)

        steps = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
        slot = keys_ring.acquire(steps)
        for _ in range(arrivals):  # for those who wait for the keys after the last
            plgpu.barrier_arrive(keys_ring.full_of(slot))
        keys_ring.drain(steps, acquired=1)
        values_ring.drain(steps)

    def consume() -> None:
        queries, q_ready = refs.q_tiles.at[warpgroup], refs.q_ready.at[warpgroup]
        o_tile = refs.o_tiles.at[warpgroup]

        def rows_of(tile: _Tile) -> pl.Slice:
            return pl.Slice(tile.start + warpgroup * ROWS, ROWS)

        def copy_queries(i: jax.Array) -> None:
            tile = tile_of(i)
            source = refs.q.at[tile.batch, rows_of(tile), columns(0, tile.head)]
            plgpu.copy_gmem_to_smem(source, queries, q_ready)
            if refs.segments is not None:  # those of the tile before are still compared
                target = refs.q_segments.at[warpgroup, rem(i, 2)]
                plgpu.copy_gmem_to_smem(refs.segments.at[tile.batch, rows_of(tile)], target, q_ready)

        def add_values(sums: Ref, weights: jax.Array, slot: jax.Array) -> None:
            values = refs.v_blocks.at[slot]
            values_ring.wait(slot)
            if interpret:  # without products of what is in registers, and sums that can be set
                sums[...] += jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
            else:
                plgpu.wgmma(sums, weights, values)

        def take_sums(sums: Ref, slot: jax.Array) -> jax.Array:
            value = sums[...]
            values_ring.release(slot)
            return value

        def release_keys(slot: jax.Array) -> None:
            if interpret:  # which counts reads as done before later copies only so
                plgpu.commit_smem()
            keys_ring.release(slot)

        def products(slot: jax.Array, then: Callable[[], None] | None = None) -> jax.Array:
            """The scores of the keys in a slot; what the tensor cores do `then` may go on."""
            keys = refs.k_blocks.at[slot]

            def issue(scores: Ref) -> jax.Array:
                plgpu.wgmma(scores, queries, keys.transpose((1, 0)))
                if then is None:
                    return scores[...]
                then()
                return plgpu.wgmma_accumulator_load(scores, wait_n=1)

            if not interpret:
                scores = pl.run_scoped(issue, plgpu.ACC((ROWS, block_kv), jnp.float32))
            else:
                scores = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                if then is not None:
                    then()
            if arrivals == 1:
                release_keys(slot)
            return scores

        def masked(scores: jax.Array, i: jax.Array, tile: _Tile, block: jax.Array, slot: jax.Array) -> jax.Array:
            """The scores of tile i and the keys in a slot, without pairs that are not valid."""

            def spread(x: jax.Array, axis: int) -> jax.Array:
                x = jax.lax.broadcast_in_dim(x, scores.shape, [axis])
                # Where that is not said, to infer the layouts of integers takes long.
                return x if interpret else plgpu.layout_cast(x, plgpu.Layout.WGMMA)

            def ids(ref: Ref, axis: int) -> jax.Array:
                return spread(load(ref, plgpu.Layout.WGMMA.reduce(1 - axis)), axis)

            def mask(scores: jax.Array) -> jax.Array:
                key, valid = block * block_kv, []
                if band.high is not None or ragged:
                    keys = spread(jax.lax.iota(jnp.int32, block_kv), 1)
                if band.high is not None:
                    # Of vectors a thread has few elements: the keys, and for each row the last one that it sees.
                    own = jax.lax.iota(jnp.int32, ROWS) + (tile.start + warpgroup * ROWS - key)
                    last = own + band.high
                    valid.append(keys <= spread(jnp.minimum(last, kv_seq - 1 - key) if ragged else last, 0))
                    if band.low is not None:
                        valid.append(keys >= spread(own + band.low, 0))
                elif ragged:
                    valid.append(keys < kv_seq - key)
                if refs.mask is not None:
                    valid.append(ids(refs.mask_blocks.at[slot], 1) != 0)
                if refs.segments is not None:
                    own_segments = ids(refs.q_segments.at[warpgroup, rem(i, 2)], 0)
                    valid.append(own_segments == ids(refs.segment_blocks.at[slot], 1))
                return jnp.where(functools.reduce(operator.and_, valid), scores, -jnp.inf)

            if refs.bias is not None:
                bias = refs.bias_blocks[slot, warpgroup].astype(jnp.float32)
                scores = scores * (sm_scale * math.log2(math.e)) + bias * math.log2(math.e)
                scores = jnp.where(bias > MASKING_BIAS, scores, -jnp.inf)
                if not of_keys:
                    release_keys(slot)
            if band.high is None and not ragged and not of_keys:
                return scores
            full = (block >= tile.full) & (block < tile.full_end)
            scores = jax.lax.cond(full, lambda x: x, mask, scores)
            if of_keys:
                release_keys(slot)
            return scores

        lowest = lowest_score(scale)

        def softmax(scores: jax.Array, peak: jax.Array, total: jax.Array) -> tuple[jax.Array, ...]:
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = softmax_weights(scores, new_peak, scale)
            correction = jnp.exp2(exponents(peak, scale)[1] - exponents(new_peak, scale)[1])
            total = total * correction + jnp.sum(weights, axis=1)
            # The compiler would first wait for all products, but for this and what may wait after it.
            return tuple(jax.lax.optimization_barrier((weights, new_peak, total, correction)))

        def finish(tile: _Tile, value: jax.Array, peak: jax.Array, total: jax.Array) -> None:
            empty = total == 0.0  # no key took part
            factor = jnp.where(empty, 0.0, 1.0 / total)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            o_tile[...] = (value * jax.lax.broadcast_in_dim(factor, value.shape, [0])).astype(o_tile.dtype)
            if refs.lse is not None:
                refs.lse_tiles[warpgroup] = jnp.where(empty, NO_KEY, peak * (scale * math.log(2)) + jnp.log(total))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_tile, refs.o.at[tile.batch, rows_of(tile), columns(0, tile.head)])
            if refs.lse is not None:
                target = refs.lse.at[tile.batch, tile.head, rows_of(tile)]
                plgpu.copy_smem_to_gmem(refs.lse_tiles.at[warpgroup], target)

        def attend(sums: Ref, i: jax.Array, carry: _Carry) -> _Carry:
            """Adds up all blocks of tile i; of the last tile all but one, for which there is no other to begin."""
            tile, following = tile_of(i), tile_of(i + 1)

            def add_block(j: jax.Array, carry: _Carry) -> _Carry:
                """Adds block j to the sums, and takes the softmax of the next one, which may be another tile's."""
                weights, peak, total, slot = carry
                next_slot = after(slot)
                then = functools.partial(add_values, sums, weights, slot)
                if one_tile:
                    scores = masked(products(next_slot, then), i, tile, tile.end - 2 - j, next_slot)
                    weights, new_peak, new_total, correction = softmax(scores, peak, total)
                else:
                    ends = j + 1 == tile.blocks
                    pl.when(ends)(lambda: plgpu.barrier_wait(q_ready))
                    scores = products(next_slot, then)
                    # Once they have met their last keys, queries make room for those after them.
                    last = jnp.where(ends, following.blocks == 1, j + 2 == tile.blocks)
                    pl.when(last & (i + 1 + ends < count))(lambda: copy_queries(i + 1 + ends))
                    scores = masked(
                        scores,
                        i + ends,
                        jax.tree.map(functools.partial(jnp.where, ends), following, tile),
                        jnp.where(ends, following.end - 1, tile.end - 2 - j),
                        next_slot,
                    )
                    anew = jnp.broadcast_to(ends, (ROWS,))
                    base = jnp.where(anew, lowest, peak), jnp.where(anew, 0.0, total)
                    weights, new_peak, new_total, correction = softmax(scores, *base)
                keys_ring.wait(after(next_slot))
                value = take_sums(sums, slot)

                def scaled(value: jax.Array) -> jax.Array:
                    return value * jax.lax.broadcast_in_dim(correction, value.shape, [0])

                def finished(value: jax.Array) -> jax.Array:
                    finish(tile, value, peak, total)
                    return jnp.zeros_like(value)

                sums[...] = scaled(value) if one_tile else jax.lax.cond(ends, finished, scaled, value)
                # By their dtype weights are operands, which must not change while a product is under way.
                return weights.astype(refs.q.dtype), new_peak, new_total, next_slot

            return jax.lax.fori_loop(0, tile.blocks - (i + 1 == count), add_block, carry)

        def walk_over(sums: Ref, carry: _Carry) -> None:
            """Attends for all tiles, given the softmax of the first block of keys."""
            weights, peak, total, slot = jax.lax.fori_loop(0, count, functools.partial(attend, sums), carry)
            add_values(sums, weights, slot)
            finish(tile_of(count - 1), take_sums(sums, slot), peak, total)
            plgpu.wait_smem_to_gmem(0)

        slot = jnp.int32(0)
        tile = tile_of(slot)
        copy_queries(slot)
        plgpu.barrier_wait(q_ready)
        keys_ring.wait(slot)
        scores = products(slot)
        if not one_tile:
            pl.when((tile.blocks == 1) & (count > 1))(lambda: copy_queries(jnp.int32(1)))
        peak, total = jnp.full((ROWS,), lowest, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
        weights, peak, total, _ = softmax(masked(scores, slot, tile, tile.end - 1, slot), peak, total)
        keys_ring.wait(after(slot))
        carry = weights.astype(refs.q.dtype), peak, total, slot
        if interpret:
            sums = refs.sums.at[warpgroup]
            sums[...] = jnp.zeros(sums.shape, jnp.float32)
            walk_over(sums, carry)
        else:
            pl.run_scoped(lambda sums: walk_over(sums, carry), plgpu.ACC((ROWS, head_dim), jnp.float32))

    consumer_registers, producer_registers = _REGISTERS[consumers]

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        produce()

    @pl.when(warpgroup < consumers)
    def _() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        consume()


def pad_rows(x: jax.Array, least: int) -> jax.Array:
    """x (B, S, columns) with as many rows as copies want.

    These cannot end within the eight rows of a tile of shared memory, nor be longer than the whole array.
    """
    missing = max(pl.cdiv(x.shape[1], 8) * 8, least) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x


def attention(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    window: int | None,
    sm_scale: float,
    return_lse: bool,
    precision: jax.lax.Precision,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention as the Triton kernel of this name computes it, for the calls that are not `unsupported`."""
    del precision  # see `unsupported`
    fused = len(qkv) == 1
    (batch, seq, _), kv_seq, dtype = qkv[0].shape, qkv[-1].shape[1], qkv[0].dtype
    masked = causal or window is not None or mask is not None or segment_ids is not None
    bias_itemsize = 0 if bias is None else bias.dtype.itemsize
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="attention",
            shape={
                "batch": batch,
                "q": seq,
                "kv": kv_seq,
                "heads": num_heads,
                "kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "causal": int(causal),
            },
            bucketed=("batch", "q", "kv"),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(
                heuristic, seq, batch * num_heads, head_dim, target, masked=masked, bias_itemsize=bias_itemsize
            ),
            candidates=functools.partial(candidates, seq),
            shared_memory=functools.partial(shared_memory, head_dim=head_dim, bias_itemsize=bias_itemsize),
        ),
        target,
    )
    block_q, block_kv, num_stages = config.block_q, config.block_kv, config.num_stages
    consumers = block_q // ROWS
    masks = mask, segment_ids, kv_segment_ids
    found = searched(*masks, seq=seq, kv_seq=kv_seq, block_q=block_q, block_kv=block_kv, least=SEARCHED)
    padded = [pad_rows(x, max(ROWS, block_kv) if fused or i else ROWS) for i, x in enumerate(qkv)]
    q, k, v = padded * 3 if fused else padded
    mask, segments, kv_segments = (
        None if x is None else jnp.pad(x, ((0, 0), (0, like.shape[1] - x.shape[1])))
        for x, like in zip(masks, (k, q, k), strict=True)
    )
    if bias is not None:
        columns = ROW_BYTES // bias_itemsize  # of a tile of shared memory, which is copied as a whole
        more = pl.cdiv(k.shape[1], columns) * columns - kv_seq
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, q.shape[1] - seq), (0, more)))
    arrivals = 1 + (mask is not None) + (kv_segments is not None) + (0 if bias is None else consumers)
    if interpret:
        check_interpreted_sizes(queries=(q.shape[1], block_q), keys=(k.shape[1], block_kv))
    q_blocks, heads = pl.cdiv(seq, block_q), batch * num_heads
    num_tiles = heads * q_blocks
    num_ctas = min(num_tiles, target.num_cores)
    shape = Shape.of(qkv, num_heads, num_kv_heads, head_dim=head_dim, causal=causal, window=window)
    runs = shape.band.keys_of(block_q * np.arange(q_blocks)[::-1], block_q, block_kv)
    in_cache = CACHE // (2 * kv_seq * head_dim * dtype.itemsize) * (num_heads // num_kv_heads)
    barrier = plgpu.Barrier
    scratch_types = {
        "q_tiles": tiled((consumers, ROWS, head_dim), dtype),
        "k_blocks": tiled((num_stages, block_kv, head_dim), dtype),
        "v_blocks": tiled((num_stages, block_kv, head_dim), dtype),
        "o_tiles": tiled((consumers, ROWS, head_dim), dtype),
        "q_ready": barrier(num_arrivals=1 if segments is None else 2, num_barriers=consumers),
        "k_ready": barrier(num_arrivals=arrivals, num_barriers=num_stages),
        "v_ready": barrier(num_barriers=num_stages),
        "k_read": barrier(num_arrivals=consumers, num_barriers=num_stages),
        "v_read": barrier(num_arrivals=consumers, num_barriers=num_stages),
    }
    if bias is not None:
        scratch_types["bias_blocks"] = tiled((num_stages, consumers, ROWS, block_kv), bias.dtype)
    if mask is not None:
        scratch_types["mask_blocks"] = plgpu.SMEM((num_stages, block_kv), jnp.int32)
    if segments is not None:
        scratch_types["segment_blocks"] = plgpu.SMEM((num_stages, block_kv), jnp.int32)
        scratch_types["q_segments"] = plgpu.SMEM((consumers, 2, ROWS), jnp.int32)
    if return_lse:
        scratch_types["lse_tiles"] = plgpu.SMEM((consumers, ROWS), jnp.float32)
    lse_type = jax.ShapeDtypeStruct((batch, num_heads, q_blocks * block_q), jnp.float32)
    out_type = {
        "o": jax.ShapeDtypeStruct((batch, q.shape[1], num_heads * head_dim), dtype),
        "lse": lse_type if return_lse else None,
    }
    if interpret:
        scratch_types["sums"] = plgpu.SMEM((consumers, ROWS, head_dim), jnp.float32)
    walk = _Walk(
        num_ctas=num_ctas,
        num_tiles=num_tiles,
        group=group_of_heads(runs, heads, q_blocks, in_cache, num_ctas) if causal else 1,
    )
    out, *lse = launch(
        functools.partial(
            _attention_kernel, config=config, shape=shape, walk=walk, sm_scale=sm_scale, interpret=interpret
        ),
        dict(q=q, k=k, v=v, bias=bias, mask=mask, segments=segments, kv_segments=kv_segments, found=found),
        out_type,
        scratch_types,
        name="attention",
        num_ctas=num_ctas,
        num_warpgroups=consumers + 1,
        interpret=interpret,
        reduction_scratch_bytes=0,
    )
    return (out[:, :seq], lse[0][..., :seq]) if return_lse else out[:, :seq]
