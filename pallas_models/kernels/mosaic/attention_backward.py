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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels._common import Ref, rows_of_backward
from pallas_models.kernels.mosaic._common import check_interpreted_sizes, plgpu, row, tiled
from pallas_models.kernels.mosaic._launch import Refs, launch
from pallas_models.kernels.mosaic._ring import Ring
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_ROWS = 64  # keys of a warpgroup: the rows of one instruction of the tensor cores
_CONSUMERS = 2
_BLOCK_KV = _ROWS * _CONSUMERS
_CACHE = 24 * 2**20  # bytes of queries and gradients that stay in the L2 cache
_REGISTERS = (240, 24)  # of a thread that computes and of one that copies


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`num_stages` blocks of queries in the ring; blocks have as many rows as make 16 KB."""

    num_stages: int

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise ValueError(f"{__name__}: num_stages={self.num_stages} must be at least 2")


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a CTA takes: keys, values, gradients of scores and queries, ring, barriers."""
    return (128 + 32 * config.num_stages) * 1024 + 2048 + config.num_stages * 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Lengths, heads, and where heads lie in the columns of queries, keys and values."""

    seq: int
    kv_seq: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_heads: tuple[int, int, int]
    causal: bool
    window: int | None

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


def _backward_kernel(
    refs: Refs, *, config: Config, shape: _Shape, walk: _Walk, sm_scale: float, interpret: bool
) -> None:
    """Computes gradients in this warpgroup.

    Args:
      refs: q, k and v (B, S, heads * head_dim), or buffers that have these columns among others; dout like q;
        shift and delta (B, heads, queries of whole blocks); dq, float32, dk and dv; and scratch memory.
    """
    seq, kv_seq, head_dim, block_q, offset = shape.seq, shape.kv_seq, shape.head_dim, shape.block_q, shape.offset
    cta, warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
    q_blocks, kv_blocks = pl.cdiv(seq, block_q), pl.cdiv(kv_seq, _BLOCK_KV)
    div, rem = jax.lax.div, jax.lax.rem
    ring = Ring(refs.q_ready, refs.read, config.num_stages)
    scale = sm_scale * math.log2(math.e)
    dtype = refs.k.dtype

    def index_of(i: jax.Array) -> jax.Array:
        """The i-th tile of this CTA. CTAs take turns there and back, which evens out what they get."""
        return i * walk.num_ctas + jnp.where(rem(i, 2) == 0, cta, walk.num_ctas - 1 - cta)

    rounds = walk.num_tiles // walk.num_ctas
    num_tiles = rounds + (index_of(jnp.int32(rounds)) < walk.num_tiles).astype(jnp.int32)

    def tile_of(i: jax.Array) -> _Tile:
        section, index = (f(index_of(i), walk.heads * kv_blocks) for f in (div, rem))
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
        count = jnp.maximum(tile.count, 1)
        head, block = tile.head * shape.group + div(i, count), tile.first + rem(i, count)
        rank = tile.block
        if shape.window is not None:
            rank -= div(jnp.maximum(block * block_q + offset - shape.window + 1, 0), _BLOCK_KV)
        return _Step(tile.batch, head, block, rank)

    def columns(head: jax.Array, operand: int | None = None) -> pl.Slice:
        first = 0 if operand is None else shape.first_heads[operand]
        return pl.Slice((first + head) * head_dim, head_dim)

    def produce() -> None:
        def add_queries(step: _Step, steps: jax.Array) -> None:
            """Adds the gradient of the queries of a step, the `steps`-th, once those before have been added."""
            plgpu.barrier_wait(refs.dq_ready)
            if not interpret:
                semaphore = refs.turns.at[(step.batch * shape.num_heads + step.head) * q_blocks + step.block]
                plgpu.semaphore_wait(semaphore, step.rank, decrement=False, memory_scope="gpu")
            for part in range(_CONSUMERS):
                start, column = step.block * block_q, step.head * head_dim
                if block_q > _ROWS:
                    start += part * _ROWS
                else:
                    column += part * _ROWS
                source = refs.dq_tiles.at[part]
                target = refs.dq.at[step.batch, pl.Slice(start, _ROWS), pl.Slice(column, _ROWS)]
                if interpret:  # which has no sums in device memory

                    @pl.when(step.rank > 0)
                    def _(source: Ref = source, target: Ref = target) -> None:
                        plgpu.copy_gmem_to_smem(target, refs.dq_before, refs.dq_loaded)
                        plgpu.barrier_wait(refs.dq_loaded)
                        source[...] += refs.dq_before[...]
                        plgpu.commit_smem()

                    plgpu.copy_smem_to_gmem(source, target)
                else:
                    pl.when(step.rank == 0)(functools.partial(plgpu.copy_smem_to_gmem, source, target))
                    add = functools.partial(plgpu.copy_smem_to_gmem, source, target, reduction_op="add")
                    pl.when(step.rank > 0)(add)
            plgpu.wait_smem_to_gmem(0)
            if not interpret:
                plgpu.semaphore_signal(semaphore, memory_scope="gpu")
            plgpu.barrier_arrive(refs.dq_read)

        def copy_tile(i: jax.Array, steps: jax.Array) -> jax.Array:
            tile = tile_of(i)

            @pl.when(i > 0)
            def _() -> None:
                plgpu.barrier_wait(refs.kv_read)

            for part in range(_CONSUMERS):
                rows = pl.Slice(tile.block * _BLOCK_KV + part * _ROWS, _ROWS)
                for operand, ref, tiles in ((1, refs.k, refs.k_tiles), (2, refs.v, refs.v_tiles)):
                    source = ref.at[tile.batch, rows, columns(tile.head, operand)]
                    plgpu.copy_gmem_to_smem(source, tiles.at[part], refs.kv_ready)

            def copy_step(j: jax.Array, steps: jax.Array) -> jax.Array:
                step = step_of(tile, j)
                slot = ring.acquire(steps)
                rows = pl.Slice(step.block * block_q, block_q)
                q_ready, dout_ready = refs.q_ready.at[slot], refs.dout_ready.at[slot]
                q = refs.q.at[step.batch, rows, columns(step.head, 0)]
                plgpu.copy_gmem_to_smem(q, refs.q_tiles.at[slot], q_ready)
                plgpu.copy_gmem_to_smem(refs.shift.at[step.batch, step.head, rows], refs.shifts.at[slot], q_ready)
                dout = refs.dout.at[step.batch, rows, columns(step.head)]
                plgpu.copy_gmem_to_smem(dout, refs.dout_tiles.at[slot], dout_ready)
                delta = refs.delta.at[step.batch, step.head, rows]
                plgpu.copy_gmem_to_smem(delta, refs.deltas.at[slot], dout_ready)
                pl.when(j > 0)(lambda: add_queries(step_of(tile, j - 1), steps))
                return steps + 1

            steps = jax.lax.fori_loop(0, steps_of(tile), copy_step, steps)
            pl.when(tile.count > 0)(lambda: add_queries(step_of(tile, steps_of(tile) - 1), steps))
            return steps

        steps = jax.lax.fori_loop(0, num_tiles, copy_tile, jnp.int32(0))
        ring.drain(steps)
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
            """Without the pairs that are not valid, of 64 keys from `key` on and queries from `query` on."""
            position = query + offset
            full = jnp.bool_(True)
            if kv_seq % _BLOCK_KV:
                full &= key + _ROWS <= kv_seq
            if shape.causal:
                full &= key + _ROWS - 1 <= position
            if shape.window is not None:
                full &= position + block_q - 1 - key < shape.window

            def mask(scores: jax.Array) -> jax.Array:
                keys = jax.lax.broadcast_in_dim(jax.lax.iota(jnp.int32, _ROWS) + key, scores.shape, [0])
                valid = keys < kv_seq
                if shape.causal:
                    own = jax.lax.iota(jnp.int32, block_q) + position
                    valid &= keys <= jax.lax.broadcast_in_dim(own, scores.shape, [1])
                    if shape.window is not None:
                        valid &= keys > jax.lax.broadcast_in_dim(own - shape.window, scores.shape, [1])
                return jnp.where(valid, scores, -jnp.inf)

            return jax.lax.cond(full, lambda x: x, mask, scores)

        def add_tile(dk: Ref, dv: Ref, i: jax.Array, steps: jax.Array) -> jax.Array:
            tile = tile_of(i)
            key = tile.block * _BLOCK_KV + warpgroup * _ROWS
            plgpu.barrier_wait(refs.kv_ready)

            def add_step(j: jax.Array, steps: jax.Array) -> jax.Array:
                query, slot = step_of(tile, j).block * block_q, rem(steps, config.num_stages)
                queries, dout = refs.q_tiles.at[slot], refs.dout_tiles.at[slot]
                own = refs.ds_tiles.at[rem(steps, 2)]

                def scores_and_gradients(scores_sum: Ref, weights_sum: Ref) -> None:
                    ring.wait(slot)
                    multiply(scores_sum, keys, queries, turn_b=True)
                    plgpu.barrier_wait(refs.dout_ready.at[slot])
                    multiply(weights_sum, values, dout, turn_b=True)
                    scores = masked(read(scores_sum, 1), key, query)
                    p = jnp.exp2(scores * scale + row(refs.shifts.at[slot], scores.shape))
                    multiply(dv, p.astype(dtype), dout)
                    dp = read(weights_sum, 1)
                    ds = (p * (dp - row(refs.deltas.at[slot], dp.shape))).astype(dtype)
                    own[warpgroup] = ds
                    plgpu.commit_smem()
                    multiply(dk, ds, queries)

                with_sums(scores_and_gradients, scores_sum=block_q, weights_sum=block_q)
                plgpu.barrier_arrive(refs.ds_ready)
                plgpu.barrier_wait(refs.ds_ready)

                def gradient_of_queries(dq_sum: Ref) -> None:
                    part = pl.Slice(warpgroup * _ROWS, _ROWS)  # of the queries, or of their columns
                    for other in range(_CONSUMERS):
                        ds, other_keys = own.at[other], refs.k_tiles.at[other]
                        if block_q > _ROWS:
                            ds = ds.at[:, part]
                        else:
                            other_keys = other_keys.at[:, part]
                        multiply(dq_sum, ds, other_keys, turn_a=True)
                    dq = read(dq_sum)
                    ring.release(slot)
                    pl.when(steps > 0)(lambda: plgpu.barrier_wait(refs.dq_read))
                    refs.dq_tiles[warpgroup] = dq
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(refs.dq_ready)

                with_sums(gradient_of_queries, dq_sum=_ROWS)
                return steps + 1

            dk[...] = jnp.zeros(dk.shape, jnp.float32)
            dv[...] = jnp.zeros(dv.shape, jnp.float32)
            steps = jax.lax.fori_loop(0, steps_of(tile), add_step, steps)
            # The values are not needed any more, and make room for the results.
            for ref, total, factor in ((refs.dv, dv, 1.0), (refs.dk, dk, sm_scale)):
                values[...] = (read(total) * factor).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(values, ref.at[tile.batch, pl.Slice(key, _ROWS), columns(tile.head)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs.kv_read)
            return steps

        def add_tiles(dk_sum: Ref, dv_sum: Ref) -> None:
            add = functools.partial(add_tile, dk_sum, dv_sum)
            steps = jax.lax.fori_loop(0, num_tiles, add, jnp.int32(0))
            pl.when(steps > 0)(lambda: plgpu.barrier_wait(refs.dq_read))
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
    config: Config | Chooser | None,
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
    shape = _Shape(
        seq=seq,
        kv_seq=kv_seq,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        first_heads=(0, num_heads, num_heads + num_kv_heads) if fused else (0, 0, 0),
        causal=causal,
        window=window,
    )
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="attention_backward",
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
            heuristic=lambda: Config(num_stages=2),
            candidates=lambda: (Config(num_stages=n) for n in (2, 3)),
            shared_memory=shared_memory,
        ),
        target,
    )
    block_q = shape.block_q
    q_blocks, kv_blocks = pl.cdiv(seq, block_q), pl.cdiv(kv_seq, _BLOCK_KV)

    # Copies cannot end within the eight rows of a tile of shared memory, nor be longer than the whole array.
    def pad(x: jax.Array, least: int) -> jax.Array:
        missing = max(pl.cdiv(x.shape[1], 8) * 8, least) - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x

    padded = [pad(x, max(block_q, _ROWS) if fused or i == 0 else _ROWS) for i, x in enumerate(qkv)]
    q, k, v = padded * 3 if fused else padded
    padded_dout = pad(dout, block_q)
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
    barrier, stages = plgpu.Barrier, config.num_stages
    scratch_types = {
        "k_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
        "v_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
        "q_tiles": tiled((stages, block_q, head_dim), dtype),
        "dout_tiles": tiled((stages, block_q, head_dim), dtype),
        "shifts": plgpu.SMEM((stages, block_q), jnp.float32),
        "deltas": plgpu.SMEM((stages, block_q), jnp.float32),
        "ds_tiles": tiled((2, _CONSUMERS, _ROWS, block_q), dtype),
        "dq_tiles": tiled((_CONSUMERS, _ROWS, _ROWS), jnp.float32),
        "kv_ready": barrier(num_arrivals=2 * _CONSUMERS),
        "kv_read": barrier(num_arrivals=_CONSUMERS),
        "q_ready": barrier(num_arrivals=2, num_barriers=stages),
        "dout_ready": barrier(num_arrivals=2, num_barriers=stages),
        "read": barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "ds_ready": barrier(num_arrivals=_CONSUMERS),
        "dq_ready": barrier(num_arrivals=_CONSUMERS),
        "dq_read": barrier(),
    }
    if interpret:
        sums = dict(scores_sum=block_q, weights_sum=block_q, dq_sum=_ROWS, dk_sum=head_dim, dv_sum=head_dim)
        scratch_types |= {
            f"{name}": plgpu.SMEM((_CONSUMERS, _ROWS, columns), jnp.float32) for name, columns in sums.items()
        }
        scratch_types |= {"dq_before": tiled((_ROWS, _ROWS), jnp.float32), "dq_loaded": barrier()}
    kernel = functools.partial(
        _backward_kernel, config=config, shape=shape, walk=walk, sm_scale=sm_scale, interpret=interpret
    )

    def body(refs: Refs) -> None:
        if not interpret:
            refs.turns = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * num_heads * q_blocks,)))
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
