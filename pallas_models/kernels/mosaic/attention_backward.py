"""The gradients of attention on Hopper's tensor cores.

CTAs stay on their multiprocessor and walk over blocks of keys. Two warpgroups have 64 keys each, and the gradients
of these and of their values in registers, as [FlashAttention-3](https://arxiv.org/abs/2407.08608) does; a third
copies queries and gradients of the output to them, block by block. Scores are computed transposed, (keys,
queries): so weights and gradients of scores are operands of the next products as they are. What keys add to the
gradient of a block of queries is added in device memory, in float32, by the unit that copies: in the order of the
keys, so that results are the same every time.
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

from pallas_models.kernels._common import Ref, rows_of_backward
from pallas_models.kernels.mosaic import attention
from pallas_models.kernels.mosaic._common import check_interpreted_sizes, plgpu, row, tiled
from pallas_models.kernels.mosaic._launch import Refs, launch
from pallas_models.kernels.mosaic._ring import Ring
from pallas_models.target import Target
from pallas_models.tuning import Chooser

_ROWS = 64  # keys of a warpgroup: the rows of one instruction of the tensor cores
_CONSUMERS = 2
_BLOCK_KV = _ROWS * _CONSUMERS
_CACHE = 24 * 2**20  # bytes of queries and gradients that stay in the L2 cache
_STAGES = 2  # blocks of queries in the ring
_REGISTERS = (240, 24)  # of a thread that computes and of one that copies


def unsupported(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    **static: Any,
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    for name, x in (("mask", mask), ("segment_ids", segment_ids)):
        if x is not None:
            return f"takes no {name}"
    return attention.unsupported(qkv, mask, bias, segment_ids, kv_segment_ids, **static)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Shape(attention.Shape):
    """With what follows from it for the kernel."""

    @property
    def block_q(self) -> int:
        return 8192 // self.head_dim

    @property
    def offset(self) -> int:
        """The position of the first query, among the keys."""
        return self.kv_seq - self.seq

    @property
    def group(self) -> int:
        """How many heads of queries a head of keys serves."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """How CTAs walk over the blocks of keys of all heads: of `heads` together, from the first to the last."""

    num_ctas: int
    num_tiles: int
    heads: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """A block of keys of one head, and the blocks of queries that see some of them: [first, first + count)."""

    batch: jax.Array
    head: jax.Array  # of keys
    block: jax.Array
    first: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """A block of queries of one head; `rank` counts the blocks of keys before the tile's that it sees."""

    batch: jax.Array
    head: jax.Array
    block: jax.Array
    rank: jax.Array


def _backward_kernel(refs: Refs, *, shape: _Shape, walk: _Walk, sm_scale: float, interpret: bool) -> None:
    """Computes gradients in this warpgroup.

    Args:
      refs: q, k and v (B, S, heads * head_dim), or buffers that have these columns among others; dout like q;
        shift and delta (B, heads, queries of whole blocks); dq, float32, dk and dv; and scratch memory.
    """
    seq, kv_seq, head_dim, block_q, offset = shape.seq, shape.kv_seq, shape.head_dim, shape.block_q, shape.offset
    cta, warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
    q_blocks, kv_blocks = pl.cdiv(seq, block_q), pl.cdiv(kv_seq, _BLOCK_KV)
    div, rem = jax.lax.div, jax.lax.rem
    ring = Ring(refs.q_ready, refs.read, _STAGES)
    scale = sm_scale * math.log2(math.e)
    dtype = refs.k.dtype

    num_tiles = div(walk.num_tiles - 1 - cta, walk.num_ctas) + 1

    def tile_of(i: jax.Array) -> _Tile:
        section, index = (f(i * walk.num_ctas + cta, walk.heads * kv_blocks) for f in (div, rem))
        head, block = section * walk.heads + rem(index, walk.heads), div(index, walk.heads)
        key = block * _BLOCK_KV
        first, end = jnp.int32(0), jnp.int32(q_blocks)
        if shape.causal:
            first = jnp.minimum(div(jnp.maximum(key - offset, 0), block_q), end)
        if shape.window is not None:
            last = key + _BLOCK_KV - 1 + shape.window - 1 - offset
            end = jnp.maximum(jnp.minimum(div(jnp.maximum(last + block_q, 0), block_q), end), first)
        return _Tile(div(head, shape.num_kv_heads), rem(head, shape.num_kv_heads), block, first, end - first)

    def steps_of(tile: _Tile) -> jax.Array:
        return tile.count * shape.group

    def step_of(tile: _Tile, i: jax.Array) -> _Step:
        head, block = tile.head, tile.first + i
        if shape.group > 1:
            count = jnp.maximum(tile.count, 1)
            head, block = head * shape.group + div(i, count), tile.first + rem(i, count)
        rank = tile.block
        if shape.window is not None:
            rank -= div(jnp.maximum(block * block_q + offset - shape.window + 1, 0), _BLOCK_KV)
        return _Step(tile.batch, head, block, rank)

    def columns(head: jax.Array, operand: int | None = None) -> pl.Slice:
        first = 0 if operand is None else shape.first_heads[operand]
        return pl.Slice((first + head) * head_dim, head_dim)

    def produce() -> None:
        def copy_keys(tile: _Tile, is_first: jax.Array) -> None:
            pl.when(~is_first)(lambda: plgpu.barrier_wait(refs.kv_read))
            for part in range(_CONSUMERS):
                rows = pl.Slice(tile.block * _BLOCK_KV + part * _ROWS, _ROWS)
                for operand, ref, tiles in ((1, refs.k, refs.k_tiles), (2, refs.v, refs.v_tiles)):
                    source = ref.at[tile.batch, rows, columns(tile.head, operand)]
                    plgpu.copy_gmem_to_smem(source, tiles.at[part], refs.kv_ready)

        def copy_tile(i: jax.Array, steps: jax.Array) -> jax.Array:
            tile = tile_of(i)
            count = steps_of(tile)

            def copy_queries(j: jax.Array, steps: jax.Array) -> jax.Array:
                step, slot = step_of(tile, j), ring.acquire(steps)
                rows = pl.Slice(step.block * block_q, block_q)
                for ready, source, target in (
                    (refs.q_ready, refs.q.at[step.batch, rows, columns(step.head, 0)], refs.q_tiles),
                    (refs.q_ready, refs.shift.at[step.batch, step.head, rows], refs.shifts),
                    (refs.dout_ready, refs.dout.at[step.batch, rows, columns(step.head)], refs.dout_tiles),
                    (refs.dout_ready, refs.delta.at[step.batch, step.head, rows], refs.deltas),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], ready.at[slot])
                # The ring is filled while keys before these are still needed.
                pl.when(j == jnp.minimum(count, _STAGES) - 1)(lambda: copy_keys(tile, i == 0))
                return steps + 1

            pl.when(count == 0)(lambda: copy_keys(tile, i == 0))
            return jax.lax.fori_loop(0, count, copy_queries, steps)

        ring.drain(jax.lax.fori_loop(0, num_tiles, copy_tile, jnp.int32(0)))
        plgpu.barrier_wait(refs.kv_read)

    def consume() -> None:
        keys, values = refs.k_tiles.at[warpgroup], refs.v_tiles.at[warpgroup]

        def multiply(total: Ref, a: Any, b: Ref, *, turn_a: bool = False, turn_b: bool = False) -> None:
            """Adds a product of a and b, or of their transposes, to `total`; it is done when this is read."""
            if interpret:  # without products of what is in registers, and sums that can be set
                a, b = (x[...].T if turn else x[...] for x, turn in ((a, turn_a), (b, turn_b)))
                total[...] += jnp.dot(a, b, preferred_element_type=jnp.float32)
                plgpu.commit_smem()
            else:
                a, b = (x.transpose((1, 0)) if turn else x for x, turn in ((a, turn_a), (b, turn_b)))
                plgpu.wgmma(total, a, b)

        def read(total: Ref, pending: int = 0) -> jax.Array:
            """A sum, once all but the last products, `pending` of them, are done."""
            return total[...] if interpret else plgpu.wgmma_accumulator_load(total, wait_n=pending)

        def with_sums(function: Callable[..., Any], **columns: int) -> Any:
            """Calls a function with sums of products, 0, of 64 rows and so many columns."""
            if not interpret:
                return pl.run_scoped(
                    function, **{n: plgpu.ACC((_ROWS, c), jnp.float32) for n, c in columns.items()}
                )
            sums = {name: getattr(refs, name).at[warpgroup] for name in columns}
            for total in sums.values():
                total[...] = jnp.zeros(total.shape, jnp.float32)
            plgpu.commit_smem()
            return function(**sums)

        def masked(scores: jax.Array, key: jax.Array, query: jax.Array) -> jax.Array:
            """Without the pairs that are not valid, of 64 keys from `key` on and queries from `query` on.

            There is no branch around it: registers of products under way would have to keep still.
            """

            # JAX finds no layout in registers for an iota that nothing uses.
            def keys() -> jax.Array:
                return jax.lax.broadcast_in_dim(jax.lax.iota(jnp.int32, _ROWS) + key, scores.shape, [0])

            def least_key(window: int) -> jax.Array:
                """The first key of the last `window` that each query sees."""
                own = jax.lax.iota(jnp.int32, block_q) + (query + offset)
                return jax.lax.broadcast_in_dim(own - (window - 1), scores.shape, [1])

            terms = []
            if kv_seq % _BLOCK_KV:
                terms.append(keys() < kv_seq)
            if shape.causal:
                terms.append(keys() <= least_key(1))
            if shape.window is not None:
                terms.append(keys() >= least_key(shape.window))
            return jnp.where(functools.reduce(operator.and_, terms), scores, -jnp.inf) if terms else scores

        dq_tile = refs.dq_tiles.at[warpgroup]

        def turn_of(step: _Step) -> jax.Array:
            """Which counts the blocks of keys added to this warpgroup's part of the gradient of queries."""
            return ((step.batch * shape.num_heads + step.head) * q_blocks + step.block) * _CONSUMERS + warpgroup

        def end_turn(step: _Step, added: jax.Array) -> None:
            """Waits until all is in device memory, and says so if the gradient of queries is among it."""
            plgpu.wait_smem_to_gmem(0)
            if not interpret:  # the first is no one's
                turn = refs.turns.at[jnp.where(added, 1 + turn_of(step), 0)]
                plgpu.semaphore_signal(turn, memory_scope="gpu")

        def take_turn(step: _Step) -> None:
            """Adds the gradient of queries in shared memory to that in device memory, after those before it."""
            start, column = step.block * block_q, step.head * head_dim
            if block_q > _ROWS:
                start += warpgroup * _ROWS
            else:
                column += warpgroup * _ROWS
            target = refs.dq.at[step.batch, pl.Slice(start, _ROWS), pl.Slice(column, _ROWS)]
            if interpret:  # without sums in device memory

                @pl.when(step.rank > 0)
                def _() -> None:
                    loaded = refs.dq_loaded.at[warpgroup]
                    plgpu.copy_gmem_to_smem(target, refs.dq_before.at[warpgroup], loaded)
                    plgpu.barrier_wait(loaded)
                    dq_tile[...] += refs.dq_before[warpgroup]
                    plgpu.commit_smem()

                plgpu.copy_smem_to_gmem(dq_tile, target)
                return
            plgpu.semaphore_wait(refs.turns.at[1 + turn_of(step)], step.rank, decrement=False, memory_scope="gpu")
            pl.when(step.rank == 0)(functools.partial(plgpu.copy_smem_to_gmem, dq_tile, target))
            add = functools.partial(plgpu.copy_smem_to_gmem, dq_tile, target, reduction_op="add")
            pl.when(step.rank > 0)(add)

        def add_tile(dk: Ref, dv: Ref, i: jax.Array, steps: jax.Array) -> jax.Array:
            tile = tile_of(i)
            count = steps_of(tile)
            key = tile.block * _BLOCK_KV + warpgroup * _ROWS
            plgpu.barrier_wait(refs.kv_ready)

            def step_before(j: jax.Array, count: int) -> _Step:
                return step_of(tile, jnp.maximum(j - count, 0))

            def multiply_keys(dq_sum: Ref, steps: jax.Array) -> None:
                """Begins the gradient of queries of the `steps`-th step, from what both warpgroups have stored."""
                part = pl.Slice(warpgroup * _ROWS, _ROWS)  # of the queries, or of their columns
                for other in range(_CONSUMERS):
                    ds, other_keys = refs.ds_tiles.at[rem(steps, _STAGES), other], refs.k_tiles.at[other]
                    if block_q > _ROWS:
                        ds = ds.at[:, part]
                    else:
                        other_keys = other_keys.at[:, part]
                    multiply(dq_sum, ds, other_keys, turn_a=True)

            def add_step(j: jax.Array, steps: jax.Array) -> jax.Array:
                """Takes a step, and adds the gradient of queries of the one before."""
                step, slot = step_of(tile, j), rem(steps, _STAGES)
                queries, dout = refs.q_tiles.at[slot], refs.dout_tiles.at[slot]

                def products(scores_sum: Ref, weights_sum: Ref, dq_sum: Ref) -> None:
                    ring.wait(slot)
                    multiply(scores_sum, keys, queries, turn_b=True)
                    plgpu.barrier_wait(refs.dout_ready.at[slot])
                    multiply(weights_sum, values, dout, turn_b=True)
                    pl.when(j > 0)(lambda: plgpu.barrier_wait(refs.ds_ready))
                    multiply_keys(dq_sum, steps + 1)  # before the first step of what is there; it is not stored
                    scores = masked(read(scores_sum, 1 + _CONSUMERS), key, step.block * block_q)
                    p = jnp.exp2(scores * scale + row(refs.shifts.at[slot], scores.shape))
                    multiply(dv, p.astype(dtype), dout)
                    end_turn(step_before(j, 2), j > 1)
                    dp = read(weights_sum, 1 + _CONSUMERS)
                    ds = (p * (dp - row(refs.deltas.at[slot], dp.shape))).astype(dtype)
                    dq_tile[...] = read(dq_sum, 1)
                    refs.ds_tiles[slot, warpgroup] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(refs.ds_ready)
                    multiply(dk, ds, queries)
                    pl.when(j > 0)(lambda: take_turn(step_before(j, 1)))
                    if not interpret:
                        plgpu.wgmma_wait(0)
                    ring.release(slot)

                with_sums(products, scores_sum=block_q, weights_sum=block_q, dq_sum=_ROWS)
                return steps + 1

            def add_last(dq_sum: Ref) -> None:
                plgpu.barrier_wait(refs.ds_ready)
                multiply_keys(dq_sum, steps + 1)
                end_turn(step_before(count, 2), count > 1)
                dq_tile[...] = read(dq_sum)
                plgpu.commit_smem()
                take_turn(step_before(count, 1))

            dk[...] = jnp.zeros(dk.shape, jnp.float32)
            dv[...] = jnp.zeros(dv.shape, jnp.float32)
            steps = jax.lax.fori_loop(0, count, add_step, steps)
            pl.when(count > 0)(lambda: with_sums(add_last, dq_sum=_ROWS))
            plgpu.barrier_arrive(refs.kv_read)
            end_turn(step_before(count, 1), count > 0)
            for index, (ref, total, factor) in enumerate(((refs.dv, dv, 1.0), (refs.dk, dk, sm_scale))):
                if index == refs.o_tiles.shape[1]:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_tile = refs.o_tiles.at[warpgroup, index % refs.o_tiles.shape[1]]
                o_tile[...] = (read(total) * factor).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile, ref.at[tile.batch, pl.Slice(key, _ROWS), columns(tile.head)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return steps

        def add_tiles(dk_sum: Ref, dv_sum: Ref) -> None:
            add = functools.partial(add_tile, dk_sum, dv_sum)
            jax.lax.fori_loop(0, num_tiles, add, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        with_sums(add_tiles, dk_sum=head_dim, dv_sum=head_dim)

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        produce()

    @pl.when(warpgroup < _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        consume()


def attention_backward(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    wanted: tuple[bool, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    window: int | None,
    sm_scale: float,
    return_lse: bool,
    precision: jax.lax.Precision,
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[Any, ...]:
    """The gradients of `attention`'s operands, as the Triton kernel of this name gives them."""
    del (
        mask,
        bias,
        segment_ids,
        kv_segment_ids,
        precision,
        wanted,
        return_lse,
    )  # see `unsupported` of the forward pass
    fused = len(qkv) == 1
    (batch, seq, _), kv_seq, dtype = qkv[0].shape, qkv[-1].shape[1], qkv[0].dtype
    shape = _Shape.of(qkv, num_heads, num_kv_heads, head_dim=head_dim, causal=causal, window=window)
    block_q = shape.block_q
    q_blocks, kv_blocks = pl.cdiv(seq, block_q), pl.cdiv(kv_seq, _BLOCK_KV)
    padded = [attention.pad_rows(x, max(block_q, _ROWS) if fused or i == 0 else _ROWS) for i, x in enumerate(qkv)]
    q, k, v = padded * 3 if fused else padded
    padded_dout = attention.pad_rows(dout, block_q)
    if interpret:
        check_interpreted_sizes(queries=(q.shape[1], block_q), keys=(k.shape[1], _BLOCK_KV))
    shift, delta = rows_of_backward(out, lse, dout, dlse, head_dim)
    ends = ((0, 0), (0, 0), (0, q_blocks * block_q - seq))
    shift, delta = jnp.pad(shift, ends, constant_values=-jnp.inf), jnp.pad(delta, ends)
    heads = batch * num_kv_heads
    num_tiles = heads * kv_blocks
    # Blocks of keys wait for those before them of the same head, and less where CTAs walk over many heads at once.
    in_cache = max(_CACHE // (shape.group * seq * head_dim * (2 * dtype.itemsize + 4)), 1)
    walk = _Walk(
        num_ctas=1 if interpret else min(num_tiles, target.num_cores),
        num_tiles=num_tiles,
        heads=max(n for n in range(1, heads + 1) if heads % n == 0 and n <= in_cache),
    )
    barrier = plgpu.Barrier
    scratch_types = {
        "k_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
        "v_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
        "q_tiles": tiled((_STAGES, block_q, head_dim), dtype),
        "dout_tiles": tiled((_STAGES, block_q, head_dim), dtype),
        "shifts": plgpu.SMEM((_STAGES, block_q), jnp.float32),
        "deltas": plgpu.SMEM((_STAGES, block_q), jnp.float32),
        "ds_tiles": tiled((_STAGES, _CONSUMERS, _ROWS, block_q), dtype),
        "dq_tiles": tiled((_CONSUMERS, _ROWS, _ROWS), jnp.float32),
        "o_tiles": tiled((_CONSUMERS, 2 * _ROWS // head_dim, _ROWS, head_dim), dtype),
        "kv_ready": barrier(num_arrivals=2 * _CONSUMERS),
        "kv_read": barrier(num_arrivals=_CONSUMERS),
        "q_ready": barrier(num_arrivals=2, num_barriers=_STAGES),
        "dout_ready": barrier(num_arrivals=2, num_barriers=_STAGES),
        "read": barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
        "ds_ready": barrier(num_arrivals=_CONSUMERS),
    }
    if interpret:
        sums = dict(scores_sum=block_q, weights_sum=block_q, dq_sum=_ROWS, dk_sum=head_dim, dv_sum=head_dim)
        scratch_types |= {
            name: plgpu.SMEM((_CONSUMERS, _ROWS, columns), jnp.float32) for name, columns in sums.items()
        }
        scratch_types |= {
            "dq_before": tiled((_CONSUMERS, _ROWS, _ROWS), jnp.float32),
            "dq_loaded": barrier(num_barriers=_CONSUMERS),
        }
    kernel = functools.partial(_backward_kernel, shape=shape, walk=walk, sm_scale=sm_scale, interpret=interpret)

    def body(refs: Refs) -> None:
        if not interpret:
            refs.turns = pl.get_global(
                plgpu.SemaphoreType.REGULAR((1 + batch * num_heads * q_blocks * _CONSUMERS,))
            )
        kernel(refs)

    width = num_kv_heads * head_dim
    dq, dk, dv = launch(
        body,
        dict(q=q, k=k, v=v, dout=padded_dout, shift=shift, delta=delta),
        dict(
            dq=jax.ShapeDtypeStruct((batch, q_blocks * block_q, num_heads * head_dim), jnp.float32),
            dk=jax.ShapeDtypeStruct((batch, k.shape[1], width), dtype),
            dv=jax.ShapeDtypeStruct((batch, k.shape[1], width), dtype),
        ),
        scratch_types,
        name="attention_backward",
        num_ctas=walk.num_ctas,
        num_warpgroups=_CONSUMERS + 1,
        interpret=interpret,
        reduction_scratch_bytes=0,
    )
    # Of queries that see no key nothing was written.
    empty = jnp.repeat(jnp.isneginf(lse).swapaxes(1, 2), head_dim, axis=2)
    dq = jnp.where(empty, 0.0, dq[:, :seq] * sm_scale).astype(dtype)
    gradients = (dq, dk[:, :kv_seq], dv[:, :kv_seq])
    return (jnp.concatenate(gradients, axis=-1),) if fused else gradients, None, None, None, None
