"""Attention on Hopper's tensor cores, in the manner of [FlashAttention-3](https://arxiv.org/abs/2407.08608).

Blocks of threads stay on their multiprocessor and walk over tiles of queries. One warpgroup only copies keys and
values into a ring in shared memory, ahead of two or three that have 64 queries each: while one takes the softmax of
a block of keys, the tensor cores compute its products with the values of the block before, and products of the others.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic._common import Ref, interpreter_params, tiled
from pallas_models.kernels.triton._common import Gpu, local_gpu
from pallas_models.kernels.triton.attention import LOWEST

ROWS = 64  # queries of a warpgroup: the rows of one instruction of the tensor cores
_REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32)}  # of a thread that computes and of one that copies
_CACHE = 32 * 2**20  # bytes of keys and values in use at a time, well below the 50 MB of L2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of `block_q` queries, 64 a warpgroup, against `block_kv` keys a step, `num_stages` of them in the ring."""

    block_q: int
    block_kv: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_q not in (ROWS, 2 * ROWS, 3 * ROWS):
            raise ValueError(f"{__name__}: block_q={self.block_q} must be 64, 128 or 192")
        if self.block_kv not in (64, 128, 192, 256):
            raise ValueError(f"{__name__}: block_kv={self.block_kv} must be 64, 128, 192 or 256")
        if self.num_stages < 2:
            raise ValueError(f"{__name__}: num_stages={self.num_stages} must be at least 2")


def unsupported(
    dtype: DTypeLike,
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    *,
    head_dim: int,
    sm_scale: float,
) -> str | None:
    """Why the kernel cannot serve a call, or None."""
    if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16 in attention, not {jnp.dtype(dtype)}"
    if head_dim not in (64, 128):
        return f"takes heads of 64 and 128 in attention, not {head_dim=}"
    for name, x in (("mask", mask), ("bias", bias), ("segment_ids", segment_ids)):
        if x is not None:
            return f"takes no {name} in attention"
    if sm_scale <= 0:
        return f"takes positive scales in attention, not {sm_scale=}"
    return None


def heuristic(
    batch: int, seq: int, kv_seq: int, num_heads: int, head_dim: int, *, causal: bool, gpu: Gpu
) -> Config:
    """Chooses blocks, as measured on an H200."""
    return Config(block_q=128, block_kv=128, num_stages=2)


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
    turns: Ref,
    lse_tiles: Ref | None = None,
    sums: Ref | None = None,
) -> None:
    block_q, block_kv, num_stages = config.block_q, config.block_kv, config.num_stages
    consumers = block_q // ROWS
    program, warpgroup = jax.lax.axis_index("program"), jax.lax.axis_index("warpgroup")
    q_blocks, kv_blocks = pl.cdiv(seq, block_q), pl.cdiv(kv_seq, block_kv)
    offset = kv_seq - seq  # position of the first query, among the keys
    scale = sm_scale * math.log2(math.e)  # base-2 exponentials are the GPU's own

    def index_of(i: jax.Array | int) -> jax.Array:
        """The i-th tile of this program. Programs take turns there and back, which evens out what they get."""
        return i * num_programs + jnp.where(i % 2 == 0, program, num_programs - 1 - program)

    rounds = num_tiles // num_programs
    count = rounds + (index_of(rounds) < num_tiles).astype(jnp.int32)

    def tile_of(i: jax.Array | int) -> _Tile:
        # Of `group` heads, whose keys and values fit into the cache, the tiles that take longest come first.
        section, index = jnp.divmod(index_of(i), group * q_blocks)
        batch, head = jnp.divmod(section * group + index % group, num_heads)
        start = (q_blocks - 1 - index // group) * block_q
        first = full = jnp.int32(0)
        full_end, end = jnp.int32(kv_seq // block_kv), jnp.int32(kv_blocks)
        if causal:
            position = start + offset
            end = jnp.clip((position + block_q + block_kv - 1) // block_kv, 1, kv_blocks)
            full_end = jnp.clip((position + 1) // block_kv, 0, full_end)
            if window is not None:
                first = jnp.clip((position - window + 1) // block_kv, 0, end - 1)
                full = jnp.maximum(position + block_q - window + block_kv - 1, 0) // block_kv
        return _Tile(batch, head, start, first, full, full_end, end)

    def columns(operand: int, head: jax.Array) -> pl.Slice:
        return pl.ds((first_heads[operand] + head) * head_dim, head_dim)

    def slot_of(step: jax.Array) -> jax.Array:
        return jax.lax.rem(step, num_stages)

    def produce() -> None:
        def copy_tile(i: jax.Array, step: jax.Array) -> jax.Array:
            tile = tile_of(i)
            kv_head = tile.head // (num_heads // num_kv_heads)

            def copy(j: jax.Array, step: jax.Array) -> jax.Array:
                slot, rows = slot_of(step), pl.ds((tile.end - 1 - j) * block_kv, block_kv)
                for operand, ref, blocks, ready, read in (
                    (1, k_ref, k_blocks, k_ready, k_read),
                    (2, v_ref, v_blocks, v_ready, v_read),
                ):
                    plgpu.barrier_wait(read.at[slot])
                    source = ref.at[tile.batch, rows, columns(operand, kv_head)]
                    plgpu.copy_gmem_to_smem(source, blocks.at[slot], ready.at[slot])
                return step + 1

            return jax.lax.fori_loop(0, tile.end - tile.first, copy, step)

        step = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
        for i in range(num_stages):  # leave no barrier before everyone has arrived
            for read in (k_read, v_read):
                plgpu.barrier_wait(read.at[slot_of(step + i)])

    def consume(sums: Ref) -> None:
        q_tile, o_tile = q_tiles.at[warpgroup], o_tiles.at[warpgroup]

        def rows_of(tile: _Tile) -> pl.Slice:
            return pl.ds(tile.start + warpgroup * ROWS, ROWS)

        def copy_queries(i: jax.Array | int) -> None:
            tile = tile_of(i)
            source = q_ref.at[tile.batch, rows_of(tile), columns(0, tile.head)]
            plgpu.copy_gmem_to_smem(source, q_tile, q_ready.at[warpgroup])

        def add_product(weights: jax.Array, values: Ref) -> None:
            if interpret:  # it has no products of what is in registers
                sums[...] += jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
            else:
                plgpu.wgmma(sums, weights, values)

        def masked(scores: jax.Array, tile: _Tile, block: jax.Array) -> jax.Array:
            keys = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            key, terms = block * block_kv, []
            if causal:
                queries = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
                position = tile.start + warpgroup * ROWS + offset - key
                terms.append(keys <= queries + position)
                if window is not None:
                    terms.append(keys > queries + (position - window))
            if kv_seq % block_kv:
                terms.append(keys < kv_seq - key)
            return jnp.where(functools.reduce(operator.and_, terms), scores, -jnp.inf) if terms else scores

        def softmax(scores: jax.Array, peak: jax.Array, total: jax.Array) -> tuple[jax.Array, ...]:
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores * scale - jax.lax.broadcast_in_dim(new_peak * scale, scores.shape, [0]))
            correction = jnp.exp2((peak - new_peak) * scale)
            return weights, new_peak, total * correction + jnp.sum(weights, axis=1), correction

        def attend(i: jax.Array, step: jax.Array) -> jax.Array:
            tile = tile_of(i)
            blocks = tile.end - tile.first  # from the last to the first

            def await_keys(j: jax.Array | int, step: jax.Array) -> None:
                @pl.when(j < blocks)
                def _() -> None:
                    plgpu.barrier_wait(k_ready.at[slot_of(step)])

            def first_scores(scores: Ref) -> jax.Array:
                plgpu.wgmma(scores, q_tile, k_blocks.at[slot_of(step)].transpose((1, 0)))
                return scores[...]

            def next_block(masks: bool, j: jax.Array, carry: _Carry) -> _Carry:
                """Adds block j - 1 to the sums, and meanwhile takes the softmax of block j."""
                weights, peak, total, step = carry
                slot, next_slot = slot_of(step), slot_of(step + 1)

                def products(scores: Ref) -> jax.Array:
                    plgpu.barrier_wait(turns.at[warpgroup])
                    plgpu.wgmma(scores, q_tile, k_blocks.at[next_slot].transpose((1, 0)))
                    plgpu.barrier_wait(v_ready.at[slot])
                    add_product(weights, v_blocks.at[slot])
                    plgpu.barrier_arrive(turns.at[(warpgroup + 1) % consumers])
                    return plgpu.wgmma_accumulator_load(scores, wait_n=1)

                scores = pl.run_scoped(products, plgpu.ACC((ROWS, block_kv), jnp.float32))
                plgpu.barrier_arrive(k_read.at[next_slot])
                if masks:
                    scores = masked(scores, tile, tile.end - 1 - j)
                # The compiler would wait for the sums before it takes the softmax, but for this and for what may
                # wait; and the weights must not become operands of products, by their dtype, while one is running.
                weights, peak, total, correction = jax.lax.optimization_barrier(softmax(scores, peak, total))
                await_keys(j + 1, step + 2)
                value = sums[...]
                plgpu.barrier_arrive(v_read.at[slot])
                sums[...] = value * jax.lax.broadcast_in_dim(correction, value.shape, [0])
                return weights.astype(q_ref.dtype), peak, total, step + 1

            plgpu.barrier_wait(q_ready.at[warpgroup])
            await_keys(0, step)
            scores = pl.run_scoped(first_scores, plgpu.ACC((ROWS, block_kv), jnp.float32))
            plgpu.barrier_arrive(k_read.at[slot_of(step)])
            scores = masked(scores, tile, tile.end - 1)
            weights, peak, total, _ = softmax(
                scores, jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
            )
            await_keys(1, step + 1)
            sums[...] = jnp.zeros((ROWS, head_dim), jnp.float32)
            carry = (weights.astype(q_ref.dtype), peak, total, step)
            # The first block is always masked. Where tiles and blocks are alike, it is the only one on the diagonal.
            start, stop = jnp.int32(1), blocks
            if causal and (block_q != block_kv or offset % block_kv):
                start = jnp.clip(tile.end - tile.full_end, 1, blocks)
                carry = jax.lax.fori_loop(1, start, functools.partial(next_block, True), carry)
            if window is not None:
                stop = jnp.clip(tile.end - tile.full, start, blocks)
            carry = jax.lax.fori_loop(start, stop, functools.partial(next_block, False), carry)
            if window is not None:
                carry = jax.lax.fori_loop(stop, blocks, functools.partial(next_block, True), carry)
            weights, peak, total, step = carry

            @pl.when(i + 1 < count)
            def _() -> None:
                copy_queries(i + 1)

            plgpu.barrier_wait(v_ready.at[slot_of(step)])
            add_product(weights, v_blocks.at[slot_of(step)])
            empty = total == 0.0  # no key took part
            factor = jnp.where(empty, 0.0, 1.0 / total)
            value = sums[...]
            plgpu.barrier_arrive(v_read.at[slot_of(step)])
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
            return step + 1

        for slot in range(num_stages):
            for read in (k_read, v_read):
                plgpu.barrier_arrive(read.at[slot])

        copy_queries(0)

        @pl.when(warpgroup == consumers - 1)
        def _() -> None:
            plgpu.barrier_arrive(turns.at[0])

        jax.lax.fori_loop(0, count, attend, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_wait(turns.at[0])

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
    config: Config | None,
    interpret: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention as the Triton kernel of this name computes it, for the calls that are not `unsupported`."""
    del mask, bias, segment_ids, kv_segment_ids, precision
    fused = len(parts) == 1
    (batch, seq, _), kv_seq, dtype = parts[0].shape, parts[-1].shape[1], parts[0].dtype
    gpu = local_gpu()
    if config is None:
        config = heuristic(batch, seq, kv_seq, num_heads, head_dim, causal=causal, gpu=gpu)
    block_q, block_kv, num_stages = config.block_q, config.block_kv, config.num_stages
    consumers = block_q // ROWS

    # Copies cannot end within the eight rows of a tile of shared memory, nor be longer than the whole array.
    def pad(x: jax.Array, least: int) -> jax.Array:
        length = max(pl.cdiv(x.shape[1], 8) * 8, least)
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)))

    padded = [pad(x, max(ROWS, block_kv) if fused or i else ROWS) for i, x in enumerate(parts)]
    q, k, v = padded * 3 if fused else padded
    q_blocks, heads = pl.cdiv(seq, block_q), batch * num_heads
    num_tiles = heads * q_blocks
    num_programs = min(num_tiles, gpu.num_cores)
    in_cache = max(_CACHE // (2 * kv_seq * head_dim * dtype.itemsize), 1) * (num_heads // num_kv_heads)
    group = next(n for n in range(min(in_cache, heads), 0, -1) if heads % n == 0) if causal else 1
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
        "turns": barrier(num_barriers=consumers),
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
            config=config,
            num_programs=num_programs,
            num_tiles=num_tiles,
            group=group,
            seq=seq,
            kv_seq=kv_seq,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            first_heads=(0, num_heads, num_heads + num_kv_heads) if fused else (0, 0, 0),
            causal=causal,
            window=window,
            sm_scale=sm_scale,
            interpret=interpret,
        ),
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpreter_params() if interpret else False,
    )(q, k, v)
    return (out[:, :seq], lse[0][..., :seq]) if return_lse else out[:, :seq]
