"""The gradients of attention, in the manner of [FlashAttention-2](https://arxiv.org/abs/2307.08691).

Weights are computed again from scores and their log-sum-exp. Programs of one kernel have a block of keys each, and
add up the gradients of keys and values over queries and the heads of a group; those of another have a block of
queries, and those of a third a block of the bias. Each block is written once: results are the same every time.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Index, searched
from pallas_models.kernels.common.scores import MASKING_BIAS, first_heads_of, rows_of_backward
from pallas_models.kernels.triton._attention import SEARCHED, block_of_head, every, exp2_of, narrowed, walk
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    compiler_params,
    in_bounds,
    load,
    plgpu,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_q` queries against `block_kv` keys a step."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_q", "block_kv", "num_warps")


def shared_memory(config: Config, *, keys_first: bool, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that a CTA takes: two tiles of its own, two of every stage, and one of weights."""
    own, other = (config.block_kv, config.block_q) if keys_first else (config.block_q, config.block_kv)
    tiles = 2 * (own + config.num_stages * other) * block_of_head(head_dim)
    return (tiles + own * other) * itemsize + 8 * config.num_stages * other


def heuristic(
    seq: int, kv_seq: int, head_dim: int, target: Target, *, keys_first: bool, dtype: DTypeLike
) -> Config:
    """Chooses blocks as measured on an H200, smaller ones where shared memory asks for them."""
    itemsize, block_d = jnp.dtype(dtype).itemsize, block_of_head(head_dim)
    if itemsize == 4:  # as in the forward pass
        own, other, num_warps, num_stages = 32, 32 if block_d <= 64 else 16, 4, 1
    elif block_d <= 64:
        own, other, num_warps, num_stages = 64, 64, 4, 3
    elif block_d > 128:
        own, other, num_warps, num_stages = 64, 32, 8, 2
    elif keys_first:
        own, other, num_warps, num_stages = 64, 64, 4, 2
    else:
        own, other, num_warps, num_stages = 128, 32, 8, 3
    length, other_length = (kv_seq, seq) if keys_first else (seq, kv_seq)
    own, other = block_size(length, 16, own), block_size(other_length, 16, other)
    block_q, block_kv = (other, own) if keys_first else (own, other)
    config = Config(block_q=block_q, block_kv=block_kv, num_warps=min(num_warps, own // 16), num_stages=num_stages)
    size = functools.partial(shared_memory, keys_first=keys_first, head_dim=head_dim, itemsize=itemsize)
    return fitted(config, size, target)


def fitted(config: Config, size: Callable[[Config], int], target: Target) -> Config:
    """The config, or one with fewer stages or smaller blocks whose `size`, in bytes, shared memory holds."""
    while size(config) > target.shared_memory:
        if config.num_stages > 1:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_q >= config.block_kv:
            config = dataclasses.replace(config, block_q=config.block_q // 2)
        else:
            config = dataclasses.replace(config, block_kv=config.block_kv // 2)
    return config


def bias_shared_memory(config: Config, *, head_dim: int, itemsize: int) -> int:
    """Bytes that a CTA of the bias's gradient takes: each stage of its sum reads tiles of q, dout, k and v."""
    blocks = config.block_q + config.block_kv
    return config.num_stages * (2 * blocks * block_of_head(head_dim) * itemsize + 8 * config.block_q)


def configs(seq: int, kv_seq: int) -> Iterator[Config]:
    """The blocks worth measuring."""
    sizes = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
    for block_q, block_kv, num_warps, num_stages in sizes:
        if block_q <= block_size(seq, 32, 128) and block_kv <= block_size(kv_seq, 32, 128):
            yield Config(block_q=block_q, block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """What the kernels have in common: which pairs there are, where heads lie, and how scores are computed."""

    band: Band
    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_heads: tuple[int, int, int]
    sm_scale: float
    precision: jax.lax.Precision
    interpret: bool

    @property
    def group(self) -> int:
        """How many heads of queries a head of keys serves."""
        return self.num_heads // self.num_kv_heads

    def columns(self, head: Index, operand: int | None = None) -> pl.Slice:
        """Those of a head, among those of queries, keys or values in a buffer that may hold all three."""
        first = 0 if operand is None else self.first_heads[operand]
        return span((first + head) * self.head_dim, block_of_head(self.head_dim))


@dataclasses.dataclass(frozen=True, slots=True)
class _Refs:
    """What every kernel reads; None for what a call does not have."""

    q: Ref  # (B, Sq, heads * head_dim), or a buffer that has these columns among others; so k and v
    k: Ref  # (B, Skv, kv_heads * head_dim)
    v: Ref  # (B, Skv, kv_heads * head_dim)
    mask: Ref | None  # (B, Skv)
    bias: Ref | None  # (B or 1, heads or 1, Sq, Skv)
    segments: Ref | None  # (B, Sq)
    kv_segments: Ref | None  # (B, Skv)
    dout: Ref  # (B, Sq, heads * head_dim)
    shift: Ref  # (B, heads, Sq), float32: -lse in base 2, -inf for queries without a key
    delta: Ref  # (B, heads, Sq), float32: what is subtracted from the gradient of the weights
    found: Ref | None  # what `searched` gave


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    """Blocks of queries and of keys of one batch element, and what they give together.

    Arrays of pairs are (block_q, block_kv), or with `keys_first` (block_kv, block_q): they stay in registers as
    first operands of products, which sum over their second axis.
    """

    refs: _Refs
    form: _Form
    config: Config
    batch: Index
    keys_first: bool

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        return plgpu.dot(a, b, trans_b=trans_b, precision=self.form.precision)

    @property
    def depth(self) -> jax.Array | None:
        head_dim = self.form.head_dim
        return in_bounds(0, block_of_head(head_dim), head_dim)

    def queries(self, query: Index, head: Index) -> tuple[jax.Array, ...]:
        """Of the block from `query` on: queries, gradient of the output, shift and delta; 0 past the end."""
        refs, form, batch = self.refs, self.form, self.batch
        rows = span(query, self.config.block_q)
        in_range = in_bounds(query, self.config.block_q, form.band.seq)
        mask = tile_mask(in_range, self.depth)
        q = load(refs.q.at[batch, rows, form.columns(head, 0)], mask)
        dout = load(refs.dout.at[batch, rows, form.columns(head)], mask)
        shift, delta = (load(ref.at[batch, head, rows], in_range) for ref in (refs.shift, refs.delta))
        return q, dout, shift, delta

    def keys(self, key: Index, head: Index, *, full: bool = False) -> tuple[jax.Array, ...]:
        """Of the block from `key` on: keys and values, 0 where they take no part, lest NaN spreads from there."""
        in_range = None if full else self.take_part(key)
        mask, rows = tile_mask(in_range, self.depth), span(key, self.config.block_kv)
        columns = (self.form.columns(head // self.form.group, operand) for operand in (1, 2))
        k, v = (
            load(ref.at[self.batch, rows, c], mask)
            for ref, c in zip((self.refs.k, self.refs.v), columns, strict=True)
        )
        return k, v

    def take_part(self, key: Index) -> jax.Array | None:
        """Which keys of the block from `key` on are neither past the end nor masked; None for all."""
        in_range = in_bounds(key, self.config.block_kv, self.form.band.kv_seq)
        if self.refs.mask is None:
            return in_range
        return load(self.refs.mask.at[self.batch, span(key, self.config.block_kv)], in_range) != 0

    def valid(self, query: Index, key: Index) -> jax.Array | None:
        """Which pairs are valid, None if all are; broadcasts to an array of pairs."""
        refs, band, config, batch = self.refs, self.form.band, self.config, self.batch
        block_q, block_kv = config.block_q, config.block_kv

        def spread(x: jax.Array, *, of_keys: bool) -> jax.Array:
            return x[:, None] if of_keys == self.keys_first else x[None, :]

        take_part = self.take_part(key)
        terms = [] if take_part is None else [spread(take_part, of_keys=True)]
        if refs.segments is not None and refs.kv_segments is not None:
            own = load(refs.segments.at[batch, span(query, block_q)], in_bounds(query, block_q, band.seq))
            other = load(refs.kv_segments.at[batch, span(key, block_kv)], in_bounds(key, block_kv, band.kv_seq))
            terms.append(spread(own, of_keys=False) == spread(other, of_keys=True))
        return every(terms + band.valid(query, key, block_q, block_kv, keys_first=self.keys_first))

    def gradients(
        self,
        query: Index,
        key: Index,
        head: Index,
        queries: tuple[jax.Array, ...],
        keys: tuple[jax.Array, ...],
        *,
        full: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """The weights of the values, and the gradients of the scores."""
        (q, dout, shift, delta), (k, v) = queries, keys
        scale = self.form.sm_scale * math.log2(math.e)

        def products(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
            operands = (of_keys, of_queries) if self.keys_first else (of_queries, of_keys)
            return self.dot(*operands, trans_b=True)

        def row(x: jax.Array) -> jax.Array:
            return x[None, :] if self.keys_first else x[:, None]

        scores = products(q, k)
        if self.refs.bias is not None or scale <= 0:
            scores, scale = scores * scale, 1.0
        if self.refs.bias is not None:
            bias = self.bias(query, key, head)
            scores = jnp.where(bias > MASKING_BIAS, scores + bias * math.log2(math.e), -jnp.inf)
        valid = None if full else self.valid(query, key)
        if valid is not None:
            scores = jnp.where(valid, scores, -jnp.inf)
        p = exp2_of(scores, scale, row(shift), interpret=self.form.interpret)
        return p, p * (products(dout, v) - row(delta))

    def bias(self, query: Index, key: Index, head: Index) -> jax.Array:
        """The bias of the pairs, in float32."""
        ref, band, config = self.refs.bias, self.form.band, self.config
        assert ref is not None
        which = (i if n > 1 else jnp.int32(0) for i, n in zip((self.batch, head), ref.shape, strict=False))
        rows, keys = span(query, config.block_q), span(key, config.block_kv)
        mask = tile_mask(in_bounds(query, config.block_q, band.seq), in_bounds(key, config.block_kv, band.kv_seq))
        bias = load(ref.at[*which, rows, keys], mask).astype(jnp.float32)
        return bias.T if self.keys_first else bias


_READ = len(dataclasses.fields(_Refs))
_BIAS_PROGRAMS = 8  # on each core, that the gradient of a bias is split into where its own blocks are fewer


def _keys_kernel(_: Ref | None, *refs: Ref, form: _Form, config: Config) -> None:
    """Gradients of a block of keys and values.

    Args:
      refs: those of `_Refs`, then those of dk and dv, or of a buffer that has the columns of both.
    """
    inputs, outputs = _Refs(*refs[:_READ]), refs[_READ:]
    dk_ref, dv_ref = outputs if len(outputs) > 1 else outputs * 2
    band, block_q, block_kv = form.band, config.block_q, config.block_kv
    first, second, batch = (pl.program_id(axis) for axis in range(3))
    block, kv_head = (second, first) if band.causal else (first, second)  # those that take longest begin first
    blocks = _Blocks(refs=inputs, form=form, config=config, batch=batch, keys_first=True)
    key = block * block_kv
    runs = narrowed(
        band.queries_of(key, block_kv, block_q),
        pl.cdiv(band.seq, block_q),
        inputs.found,
        batch,
        block,
        masked=inputs.mask is not None or inputs.segments is not None,
    )
    keys = blocks.keys(key, kv_head * form.group)

    def add_head(head: Index, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def step(i: Index, carry: tuple[jax.Array, jax.Array], *, full: bool) -> tuple[jax.Array, jax.Array]:
            dk, dv = carry
            queries = blocks.queries(i * block_q, head)
            q, dout, *_ = queries
            p, ds = blocks.gradients(i * block_q, key, head, queries, keys, full=full)
            return dk + blocks.dot(ds.astype(q.dtype), q), dv + blocks.dot(p.astype(dout.dtype), dout)

        return walk(runs, step, carry)

    zero = jnp.zeros(keys[0].shape, jnp.float32)
    head = kv_head * form.group
    if form.group == 1:
        dk, dv = add_head(head, (zero, zero))
    else:
        dk, dv = jax.lax.fori_loop(head, head + form.group, add_head, (zero, zero))
    rows, mask = span(key, block_kv), tile_mask(in_bounds(key, block_kv, band.kv_seq), blocks.depth)
    store(dk_ref.at[batch, rows, form.columns(kv_head, 1)], dk * form.sm_scale, mask)
    store(dv_ref.at[batch, rows, form.columns(kv_head, 2)], dv, mask)


def _queries_kernel(*refs: Ref, form: _Form, config: Config) -> None:
    """Gradients of a block of queries.

    Args:
      refs: those of `_Refs`, then that of dq, or of a buffer that has its columns.
    """
    inputs, dq_ref = _Refs(*refs[:_READ]), refs[_READ]
    band, block_q, block_kv = form.band, config.block_q, config.block_kv
    first, second, batch = (pl.program_id(axis) for axis in range(3))
    block, head = (pl.cdiv(band.seq, block_q) - 1 - second, first) if band.causal else (first, second)
    blocks = _Blocks(refs=inputs, form=form, config=config, batch=batch, keys_first=False)
    query = block * block_q
    runs = narrowed(
        band.keys_of(query, block_q, block_kv),
        pl.cdiv(band.kv_seq, block_kv),
        inputs.found,
        batch,
        block,
        masked=inputs.mask is not None or inputs.segments is not None,
    )
    queries = blocks.queries(query, head)

    def step(i: Index, dq: jax.Array, *, full: bool) -> jax.Array:
        keys = blocks.keys(i * block_kv, head, full=full)
        _, ds = blocks.gradients(query, i * block_kv, head, queries, keys, full=full)
        return dq + blocks.dot(ds.astype(keys[0].dtype), keys[0])

    dq = walk(runs, step, jnp.zeros(queries[0].shape, jnp.float32))
    mask = tile_mask(in_bounds(query, block_q, band.seq), blocks.depth)
    store(dq_ref.at[batch, span(query, block_q), form.columns(head, 0)], dq * form.sm_scale, mask)


def _bias_kernel(*refs: Ref, form: _Form, config: Config, batch: int) -> None:
    """The gradient of a block of the bias, or a part of its sum over the axes that the bias does not have.

    Args:
      refs: those of `_Refs`, then that of the gradient, (parts, B or 1, heads or 1, Sq, Skv).
      batch: B.
    """
    inputs, dbias_ref = _Refs(*refs[:_READ]), refs[_READ]
    band, block_q, block_kv = form.band, config.block_q, config.block_kv
    parts, batches, heads = dbias_ref.shape[:3]
    key, query, index = pl.program_id(0) * block_kv, pl.program_id(1) * block_q, pl.program_id(2)
    own, part = index // parts, index % parts
    summed_heads = form.num_heads // heads  # all, or one
    summed = batch // batches * summed_heads

    def add(i: Index, total: jax.Array) -> jax.Array:
        b, head = (own // heads, own % heads)
        b = i // summed_heads if batches < batch else b
        head = i % summed_heads if heads < form.num_heads else head
        blocks = _Blocks(refs=inputs, form=form, config=config, batch=b, keys_first=False)
        queries, keys = blocks.queries(query, head), blocks.keys(key, head)
        return total + blocks.gradients(query, key, head, queries, keys, full=False)[1]

    size = pl.cdiv(summed, parts)
    start = part * size
    zero = jnp.zeros((block_q, block_kv), jnp.float32)
    total = jax.lax.fori_loop(start, jnp.minimum(start + size, summed), add, zero)
    mask = tile_mask(in_bounds(query, block_q, band.seq), in_bounds(key, block_kv, band.kv_seq))
    rows, columns = span(query, block_q), span(key, block_kv)
    store(dbias_ref.at[part, own // heads, own % heads, rows, columns], total, mask)


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
    """The gradients of `attention`'s operands, for those of its results.

    Args:
      out: (B, Sq, heads * head_dim), what the forward pass gave.
      lse: (B, heads, Sq) float32, the logarithms of the sums of its weights.
      dout: gradient of `out`.
      dlse: gradient of `lse`; None for zeros.
      wanted: for each of the five operands whether its gradient is.

    All other arguments are those of `attention`.

    Returns:
      For each operand its gradient, in its shape and dtype; None for integers, and for a bias that is absent or
      whose gradient is not wanted.
    """
    del return_lse
    fused = len(qkv) == 1
    q, k, v = qkv * 3 if fused else qkv
    (batch, seq, _), kv_seq, dtype = q.shape, k.shape[1], q.dtype
    ids = (segment_ids, kv_segment_ids)
    shift, delta = rows_of_backward(out, lse, dout, dlse, head_dim)
    form = _Form(
        band=Band(seq=seq, kv_seq=kv_seq, causal=causal, window=window),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        first_heads=first_heads_of(qkv, num_heads, num_kv_heads),
        sm_scale=sm_scale,
        precision=precision,
        interpret=interpret,
    )
    shape = {
        "batch": batch,
        "q": seq,
        "kv": kv_seq,
        "heads": num_heads,
        "kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "causal": int(causal),
    }

    def chosen(op: str, *, keys_first: bool) -> Config:
        problem = Problem(
            backend="triton",
            op=op,
            shape=shape,
            bucketed=("batch", "q", "kv"),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(
                heuristic, seq, kv_seq, head_dim, target, keys_first=keys_first, dtype=dtype
            ),
            candidates=functools.partial(configs, seq, kv_seq),
            shared_memory=functools.partial(
                shared_memory, keys_first=keys_first, head_dim=head_dim, itemsize=dtype.itemsize
            ),
        )
        return choose(config, problem, target)

    def call(
        kernel: Callable[..., None],
        config: Config,
        outputs: Sequence[jax.Array | jax.ShapeDtypeStruct],
        grid: tuple[int, ...],
        *buffer: jax.Array | None,
        keys_first: bool = False,
        **options: Any,
    ) -> Sequence[jax.Array]:
        found = searched(
            mask,
            *ids,
            seq=seq,
            kv_seq=kv_seq,
            block_q=config.block_q,
            block_kv=config.block_kv,
            least=SEARCHED,
            keys_first=keys_first,
        )
        return pl.pallas_call(
            functools.partial(kernel, form=form, config=config, **options),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
            grid=grid,
            # A buffer for the gradients of queries, keys and values gets those of the queries first.
            input_output_aliases={0: 0} if jax.tree.leaves(buffer) else {},
            compiler_params=compiler_params(num_warps=config.num_warps, num_stages=config.num_stages),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(*buffer, q, k, v, mask, bias, *ids, dout, shift, delta, found)

    def grid(heads: int, blocks: int) -> tuple[int, ...]:
        return (heads, blocks, batch) if causal else (blocks, heads, batch)

    for_queries = chosen("attention_queries", keys_first=False)
    for_keys = chosen("attention_keys", keys_first=True)
    (dq,) = call(_queries_kernel, for_queries, [q], grid(num_heads, pl.cdiv(seq, for_queries.block_q)))
    keys_grid = grid(num_kv_heads, pl.cdiv(kv_seq, for_keys.block_kv))
    if fused:
        dqkv = call(_keys_kernel, for_keys, [q], keys_grid, dq, keys_first=True)
    else:
        dqkv = (dq, *call(_keys_kernel, for_keys, [k, v], keys_grid, None, keys_first=True))
    if bias is None or not wanted[2]:
        return tuple(dqkv), None, None, None, None
    size = functools.partial(bias_shared_memory, head_dim=head_dim, itemsize=dtype.itemsize)
    for_bias = fitted(for_queries, size, target)
    kv_blocks, q_blocks = pl.cdiv(kv_seq, for_bias.block_kv), pl.cdiv(seq, for_bias.block_q)
    # Where few blocks fill no GPU, each is summed in parts.
    bias_blocks = kv_blocks * q_blocks * bias.shape[0] * bias.shape[1]
    summed = batch * num_heads // (bias.shape[0] * bias.shape[1])
    parts = min(pl.cdiv(_BIAS_PROGRAMS * target.num_cores, bias_blocks), summed)
    dbias_type = jax.ShapeDtypeStruct((parts, *bias.shape), bias.dtype if parts == 1 else jnp.float32)
    bias_grid = (kv_blocks, q_blocks, bias.shape[0] * bias.shape[1] * parts)
    (dbias,) = call(_bias_kernel, for_bias, [dbias_type], bias_grid, batch=batch)
    dbias = dbias[0] if parts == 1 else jnp.sum(dbias, axis=0).astype(bias.dtype)
    return tuple(dqkv), None, dbias, None, None
