"""Attention on Hopper's tensor cores, in the manner of [FlashAttention-3](https://arxiv.org/abs/2407.08608).

Blocks of threads stay on their multiprocessor and walk over tiles of queries. One warpgroup only copies keys and
values, into a ring in shared memory, ahead of those that have 64 queries each. While such a one takes the softmax
of a block of keys, the tensor cores add up the values of the block before, and compute products of the others.
Neither stops at the end of a tile: the first softmax of the next one is taken meanwhile.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels._common import LOWEST, Ref
from pallas_models.kernels.mosaic._common import interpreter_params, plgpu, tiled
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

ROWS = 64  # queries of a warpgroup: the rows of one instruction of the tensor cores
_CACHE = 16 * 2**20  # bytes of keys and values that stay in the L2 cache, of two parts with 25 MB each
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
    parts: tuple[jax.Array, ...],
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
    if parts[0].dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {parts[0].dtype}"
    if head_dim not in (64, 128):
        return f"takes heads of 64 and 128, not {head_dim=}"
    for name, x in (("mask", mask), ("bias", bias), ("segment_ids", segment_ids)):
        if x is not None:
            return f"takes no {name}"
    if sm_scale <= 0.0:
        return f"takes positive scales, not {sm_scale=}"
    return None


def prefer(parts: tuple[jax.Array, ...], *_: jax.Array | None, **__: Any) -> bool:
    """Whether it is the faster kernel for a call that it serves, as measured on an H200."""
    seq, kv_seq = parts[0].shape[1], parts[-1].shape[1]
    return min(seq, kv_seq) >= 128 and seq % 8 == kv_seq % 8 == 0  # others are padded, which is a copy


def heuristic(seq: int, heads: int, head_dim: int, target: Target, *, causal: bool) -> Config:
    """Chooses blocks for `heads` of all the batch, as measured on an H200."""
    if heads * pl.cdiv(seq, 2 * ROWS) < target.num_cores:
        return Config(block_q=ROWS, block_kv=128, num_stages=2)
    if head_dim == 64 and not causal and seq >= 2048:
        return Config(block_q=3 * ROWS, block_kv=128, num_stages=2)
    return Config(block_q=2 * ROWS, block_kv=128, num_stages=4 if head_dim == 64 else 2)


def candidates(seq: int) -> Iterator[Config]:
    """The blocks worth measuring."""
    for consumers, block_kv, num_stages in itertools.product((1, 2, 3), (64, 128), (2, 3, 4)):
        if (consumers - 1) * ROWS < seq:
            yield Config(block_q=consumers * ROWS, block_kv=block_kv, num_stages=num_stages)


def shared_memory(config: Config, head_dim: int) -> int:
    """Bytes of shared memory that a CTA takes: queries and results, keys and values of all stages, barriers."""
    return 2 * head_dim * 2 * (config.block_q + config.num_stages * config.block_kv) + 2048


def _reach(
    xp: Any, start: Any, *, config: Config, seq: int, kv_seq: int, causal: bool, window: int | None
) -> tuple[Any, Any, Any, Any]:
    """The blocks of keys that the tile from query `start` on needs: [first, end), every pair in [full, full_end).

    `xp` is numpy or jax.numpy. A tile that needs none has one all the same, which is masked.
    """
    block_q, block_kv = config.block_q, config.block_kv
    zero, end, full_end = 0 * start, pl.cdiv(kv_seq, block_kv) + 0 * start, kv_seq // block_kv + 0 * start
    if not causal:
        return zero, zero, full_end, end
    bits = block_kv.bit_length() - 1  # a shift rounds down, and is one instruction
    position = start + kv_seq - seq  # of the first query, among the keys
    end = xp.minimum(xp.maximum((position + block_q + block_kv - 1) >> bits, 1), end)
    full_end = xp.minimum(xp.maximum((position + 1) >> bits, 0), full_end)
    if window is None:
        return zero, zero, full_end, end
    first = xp.minimum(xp.maximum((position - window + 1) >> bits, 0), end - 1)
    return first, xp.maximum(position + block_q - window + block_kv - 1, 0) >> bits, full_end, end


def _group(blocks: Any, heads: int, in_cache: int, num_programs: int) -> int:
    """How many heads to walk together, given the blocks of keys of each tile of a head, in the order of the walk.

    As many as have keys and values `in_cache`, with which all programs take about as long; else a few more.
    """
    rounds = pl.cdiv(heads * len(blocks), num_programs)
    index = np.arange(rounds * num_programs).reshape(rounds, num_programs)
    index[1::2] = index[1::2, ::-1]

    def longest(group: int) -> int:
        work = np.where(index < heads * len(blocks), blocks[index % (group * len(blocks)) // group], 0)
        return int(np.max(np.sum(work, axis=0)))

    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    groups.sort(key=lambda n: (n > in_cache, n if n > in_cache else -n))
    enough = 1.05 * heads * np.sum(blocks) / num_programs
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


_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # weights, maxima and sums of rows, step in the ring


def _attention_kernel(
    q_ref: Ref,  # (B, Sq, heads * head_dim), or a buffer that has these columns among others; so k and v
    k_ref: Ref,  # (B, Skv, kv_heads * head_dim)
    v_ref: Ref,  # (B, Skv, kv_heads * head_dim)
    o_ref: Ref,  # (B, Sq, heads * head_dim)
    *lse_ref: Ref,  # (B, heads, queries of whole tiles), if asked for
    config: Config,
    num_programs: int,
    num_tiles: int,
    group: int,
    seq: int,
    kv_seq: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    first_heads: tuple[int, int, int],
    causal: bool,
    window: int | None,
    sm_scale: float,
    interpret: bool,
    q_tiles: Ref,
    k_blocks: Ref,
    v_blocks: Ref,
    o_tiles: Ref,
    q_ready: Ref,
    k_ready: Ref,
    v_ready: Ref,
    k_read: Ref,
    v_read: Ref,
    lse_tiles: Ref | None = None,
    sums: Ref | None = None,
) -> None:
    block_q, block_kv, num_stages = config.block_q, config.block_kv, config.num_stages
    consumers = block_q // ROWS
    program, warpgroup = jax.lax.axis_index("program"), jax.lax.axis_index("warpgroup")
    q_blocks = pl.cdiv(seq, block_q)
    offset = kv_seq - seq  # position of the first query, among the keys
    scale = sm_scale * math.log2(math.e)  # base-2 exponentials are the GPU's own

    div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers

    def index_of(i: jax.Array) -> jax.Array:
        """The i-th tile of this program. Programs take turns there and back, which evens out what they get."""
        return i * num_programs + jnp.where(rem(i, 2) == 0, program, num_programs - 1 - program)

    rounds = num_tiles // num_programs
    count, one_tile = rounds + (index_of(jnp.int32(rounds)) < num_tiles).astype(jnp.int32), num_tiles <= num_programs
    reach = functools.partial(_reach, jnp, config=config, seq=seq, kv_seq=kv_seq, causal=causal, window=window)

    def tile_of(i: jax.Array) -> _Tile:
        # Of `group` heads that are walked together, the tiles that take longest come first.
        index = index_of(i)
        section, index = div(index, group * q_blocks), rem(index, group * q_blocks)
        head = section * group + rem(index, group)
        start = (q_blocks - 1 - div(index, group)) * block_q
        return _Tile(div(head, num_heads), rem(head, num_heads), start, *reach(start))

    def columns(operand: int, head: jax.Array) -> pl.Slice:
        return pl.Slice((first_heads[operand] + head) * head_dim, head_dim)

    def after(slot: jax.Array) -> jax.Array:
        return jnp.where(slot == num_stages - 1, 0, slot + 1)

    def produce() -> None:
        def copy_tile(i: jax.Array, slot: jax.Array) -> jax.Array:
            tile = tile_of(i)
            kv_head = div(tile.head, num_heads // num_kv_heads)

            def copy(j: jax.Array, slot: jax.Array) -> jax.Array:
                rows = pl.Slice((tile.end - 1 - j) * block_kv, block_kv)
                for operand, ref, blocks, ready, read in (
                    (1, k_ref, k_blocks, k_ready, k_read),
                    (2, v_ref, v_blocks, v_ready, v_read),
                ):
                    plgpu.barrier_wait(read.at[slot])
                    source = ref.at[tile.batch, rows, columns(operand, kv_head)]
                    plgpu.copy_gmem_to_smem(source, blocks.at[slot], ready.at[slot])
                return after(slot)

            return jax.lax.fori_loop(0, tile.blocks, copy, slot)

        slot = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
        plgpu.barrier_wait(k_read.at[slot])
        plgpu.barrier_arrive(k_ready.at[slot])  # for those who wait for the keys after the last
        for i in range(num_stages):  # leave no barrier before everyone has arrived
            plgpu.barrier_wait(v_read.at[slot])
            slot = after(slot)
            if i < num_stages - 1:
                plgpu.barrier_wait(k_read.at[slot])

    def consume(sums: Ref) -> None:
        fresh = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
        queries, o_tile = q_tiles.at[warpgroup], o_tiles.at[warpgroup]

        def rows_of(tile: _Tile) -> pl.Slice:
            return pl.Slice(tile.start + warpgroup * ROWS, ROWS)

        def copy_queries(i: jax.Array) -> None:
            tile = tile_of(i)
            source = q_ref.at[tile.batch, rows_of(tile), columns(0, tile.head)]
            plgpu.copy_gmem_to_smem(source, queries, q_ready.at[warpgroup])

        def add_values(weights: jax.Array, slot: jax.Array) -> None:
            values = v_blocks.at[slot]
            plgpu.barrier_wait(v_ready.at[slot])
            if interpret:  # without products of what is in registers, and sums that can be set
                sums[...] += jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
            else:
                plgpu.wgmma(sums, weights, values)

        def take_sums(slot: jax.Array) -> jax.Array:
            value = sums[...]
            plgpu.barrier_arrive(v_read.at[slot])
            return value

        def products(slot: jax.Array, weights: jax.Array | None, before: jax.Array) -> jax.Array:
            """The scores of the keys in a slot; the tensor cores go on to add up the values in the one before."""
            keys = k_blocks.at[slot]

            def issue(scores: Ref) -> jax.Array:
                plgpu.wgmma(scores, queries, keys.transpose((1, 0)))
                if weights is None:
                    return scores[...]
                add_values(weights, before)
                return plgpu.wgmma_accumulator_load(scores, wait_n=1)

            if not interpret:
                scores = pl.run_scoped(issue, plgpu.ACC((ROWS, block_kv), jnp.float32))
            else:
                scores = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                if weights is not None:
                    add_values(weights, before)
            plgpu.barrier_arrive(k_read.at[slot])
            return scores

        def masked(scores: jax.Array, tile: _Tile, block: jax.Array) -> jax.Array:
            if not causal and kv_seq % block_kv == 0:
                return scores

            def mask(scores: jax.Array) -> jax.Array:
                # From vectors, of which a thread has few elements: the keys, and for each row the last that it sees.
                key = block * block_kv
                keys = jax.lax.broadcast_in_dim(jax.lax.iota(jnp.int32, block_kv), scores.shape, [1])
                if not causal:
                    return jnp.where(keys < kv_seq - key, scores, -jnp.inf)
                own = jax.lax.iota(jnp.int32, ROWS) + (tile.start + warpgroup * ROWS + offset - key)
                last = jnp.minimum(own, kv_seq - 1 - key) if kv_seq % block_kv else own
                valid = keys <= jax.lax.broadcast_in_dim(last, scores.shape, [0])
                if window is not None:
                    valid &= keys > jax.lax.broadcast_in_dim(own - window, scores.shape, [0])
                return jnp.where(valid, scores, -jnp.inf)

            full = (block >= tile.full) & (block < tile.full_end)
            return jax.lax.cond(full, lambda x: x, mask, scores)

        def softmax(scores: jax.Array, peak: jax.Array, total: jax.Array) -> tuple[jax.Array, ...]:
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores * scale - jax.lax.broadcast_in_dim(new_peak * scale, scores.shape, [0]))
            correction = jnp.exp2((peak - new_peak) * scale)
            total = total * correction + jnp.sum(weights, axis=1)
            # The compiler would first wait for all products, but for this and what may wait after it.
            return tuple(jax.lax.optimization_barrier((weights, new_peak, total, correction)))

        def finish(tile: _Tile, value: jax.Array, peak: jax.Array, total: jax.Array) -> None:
            empty = total == 0.0  # no key took part
            factor = jnp.where(empty, 0.0, 1.0 / total)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            o_tile[...] = (value * jax.lax.broadcast_in_dim(factor, value.shape, [0])).astype(o_tile.dtype)
            if lse_tiles is not None:
                lse_tiles[warpgroup] = jnp.where(empty, -jnp.inf, peak * sm_scale + jnp.log(total))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_tile, o_ref.at[tile.batch, rows_of(tile), columns(0, tile.head)])
            if lse_tiles is not None:
                plgpu.copy_smem_to_gmem(
                    lse_tiles.at[warpgroup], lse_ref[0].at[tile.batch, tile.head, rows_of(tile)]
                )

        def attend(i: jax.Array, carry: _Carry) -> _Carry:
            """Adds up all blocks of tile i; of the last tile all but one, for which there is no other to begin."""
            tile, following = tile_of(i), tile_of(i + 1)

            def add_block(j: jax.Array, carry: _Carry) -> _Carry:
                """Adds block j to the sums, and takes the softmax of the next one, which may be another tile's."""
                weights, peak, total, slot = carry
                next_slot = after(slot)
                if one_tile:
                    scores = masked(products(next_slot, weights, slot), tile, tile.end - 2 - j)
                    weights, new_peak, new_total, correction = softmax(scores, peak, total)
                else:
                    ends = j + 1 == tile.blocks
                    pl.when(ends)(lambda: plgpu.barrier_wait(q_ready.at[warpgroup]))
                    scores = products(next_slot, weights, slot)
                    # Once they have met their last keys, queries make room for those after them.
                    last = jnp.where(ends, following.blocks == 1, j + 2 == tile.blocks)
                    pl.when(last & (i + 1 + ends < count))(lambda: copy_queries(i + 1 + ends))
                    scores = masked(
                        scores,
                        jax.tree.map(functools.partial(jnp.where, ends), following, tile),
                        jnp.where(ends, following.end - 1, tile.end - 2 - j),
                    )
                    anew = jnp.broadcast_to(ends, (ROWS,))
                    base = jnp.where(anew, LOWEST, peak), jnp.where(anew, 0.0, total)
                    weights, new_peak, new_total, correction = softmax(scores, *base)
                plgpu.barrier_wait(k_ready.at[after(next_slot)])
                value = take_sums(slot)

                def scaled(value: jax.Array) -> jax.Array:
                    return value * jax.lax.broadcast_in_dim(correction, value.shape, [0])

                def finished(value: jax.Array) -> jax.Array:
                    finish(tile, value, peak, total)
                    return jnp.zeros_like(value)

                sums[...] = scaled(value) if one_tile else jax.lax.cond(ends, finished, scaled, value)
                # By their dtype weights are operands, which must not change while a product is under way.
                return weights.astype(q_ref.dtype), new_peak, new_total, next_slot

            return jax.lax.fori_loop(0, tile.blocks - (i + 1 == count), add_block, carry)

        for slot in range(num_stages):
            for read in (k_read, v_read):
                plgpu.barrier_arrive(read.at[slot])
        slot = jnp.int32(0)
        tile = tile_of(slot)
        copy_queries(slot)
        plgpu.barrier_wait(q_ready.at[warpgroup])
        plgpu.barrier_wait(k_ready.at[slot])
        scores = products(slot, None, slot)
        if not one_tile:
            pl.when((tile.blocks == 1) & (count > 1))(lambda: copy_queries(jnp.int32(1)))
        weights, peak, total, _ = softmax(masked(scores, tile, tile.end - 1), *fresh)
        plgpu.barrier_wait(k_ready.at[after(slot)])
        sums[...] = jnp.zeros(sums.shape, jnp.float32)
        carry = weights.astype(q_ref.dtype), peak, total, slot
        weights, peak, total, slot = jax.lax.fori_loop(0, count, attend, carry)
        add_values(weights, slot)
        finish(tile_of(count - 1), take_sums(slot), peak, total)
        plgpu.wait_smem_to_gmem(0)

    consumer_registers, producer_registers = _REGISTERS[consumers]

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        produce()

    @pl.when(warpgroup < consumers)
    def _() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        if sums is not None:
            consume(sums.at[warpgroup])
        else:
            pl.run_scoped(consume, plgpu.ACC((ROWS, head_dim), jnp.float32))


def attention(
    parts: tuple[jax.Array, ...],
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
    del mask, bias, segment_ids, kv_segment_ids, precision  # see `unsupported`
    fused = len(parts) == 1
    (batch, seq, _), kv_seq, dtype = parts[0].shape, parts[-1].shape[1], parts[0].dtype
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
            heuristic=functools.partial(heuristic, seq, batch * num_heads, head_dim, target, causal=causal),
            candidates=functools.partial(candidates, seq),
            shared_memory=functools.partial(shared_memory, head_dim=head_dim),
        ),
        target,
    )
    block_q, block_kv, num_stages = config.block_q, config.block_kv, config.num_stages
    consumers = block_q // ROWS

    # Copies cannot end within the eight rows of a tile of shared memory, nor be longer than the whole array.
    def pad(x: jax.Array, least: int) -> jax.Array:
        missing = max(pl.cdiv(x.shape[1], 8) * 8, least) - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x

    padded = [pad(x, max(ROWS, block_kv) if fused or i else ROWS) for i, x in enumerate(parts)]
    q, k, v = padded * 3 if fused else padded
    q_blocks, heads = pl.cdiv(seq, block_q), batch * num_heads
    num_tiles = heads * q_blocks
    num_programs = min(num_tiles, target.num_cores)
    starts = block_q * np.arange(q_blocks)[::-1]
    walk: dict[str, Any] = dict(config=config, seq=seq, kv_seq=kv_seq, causal=causal, window=window)
    first, _, _, end = _reach(np, starts, **walk)
    in_cache = _CACHE // (2 * kv_seq * head_dim * dtype.itemsize) * (num_heads // num_kv_heads)
    barrier = plgpu.Barrier
    scratch_types = {
        "q_tiles": tiled((consumers, ROWS, head_dim), dtype),
        "k_blocks": tiled((num_stages, block_kv, head_dim), dtype),
        "v_blocks": tiled((num_stages, block_kv, head_dim), dtype),
        "o_tiles": tiled((consumers, ROWS, head_dim), dtype),
        "q_ready": barrier(num_barriers=consumers),
        "k_ready": barrier(num_barriers=num_stages),
        "v_ready": barrier(num_barriers=num_stages),
        "k_read": barrier(num_arrivals=consumers, num_barriers=num_stages),
        "v_read": barrier(num_arrivals=consumers, num_barriers=num_stages),
    }
    out_type = [jax.ShapeDtypeStruct((batch, q.shape[1], num_heads * head_dim), dtype)]
    if return_lse:
        scratch_types["lse_tiles"] = plgpu.SMEM((consumers, ROWS), jnp.float32)
        out_type.append(jax.ShapeDtypeStruct((batch, num_heads, q_blocks * block_q), jnp.float32))
    if interpret:
        scratch_types["sums"] = plgpu.SMEM((consumers, ROWS, head_dim), jnp.float32)
    out, *lse = plgpu.kernel(
        functools.partial(
            _attention_kernel,
            num_programs=num_programs,
            num_tiles=num_tiles,
            group=_group(end - first, heads, in_cache, num_programs) if causal else 1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            first_heads=(0, num_heads, num_heads + num_kv_heads) if fused else (0, 0, 0),
            sm_scale=sm_scale,
            interpret=interpret,
            **walk,
        ),
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpreter_params() if interpret else False,
    )(q, k, v)
    return (out[:, :seq], lse[0][..., :seq]) if return_lse else out[:, :seq]
