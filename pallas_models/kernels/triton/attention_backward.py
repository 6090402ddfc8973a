"""The gradients of attention, in the manner of [FlashAttention-2](https://arxiv.org/abs/2307.08691).

Weights are computed again from scores and their log-sum-exp. One kernel has a program for each block of keys,
which adds up the gradients of keys and values over queries and the heads of a group; a second kernel has one for
each block of queries, and a third for each block of the bias. Each block is written once: results are the same
every time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Index, searched
from pallas_models.kernels.common.lines import of_pairs
from pallas_models.kernels.common.scores import rows_of_backward
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.triton.attention_backward_blocks import Blocks, Refs
from pallas_models.kernels.triton.attention_blocks import (
    arranged_bias,
    block_of_head,
    is_shared,
    least_searched,
    walk,
)
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    span,
    store,
    tile_mask,
)
from pallas_models.target import BLACKWELL, HOPPER, Target
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
    """Chooses blocks as measured on an H200, smaller ones where shared memory or registers ask for them."""
    itemsize, block_d = jnp.dtype(dtype).itemsize, block_of_head(head_dim)
    is_hopper = target.runs(HOPPER)
    if itemsize == 4:  # as in the forward pass
        own = 32 if is_hopper or keys_first or block_d <= 64 else 16
        other, num_stages = 32 if is_hopper and block_d <= 64 else 16, 1
        num_warps = 8 if keys_first and not is_hopper else 4
    elif block_d <= 64:
        own, other, num_warps, num_stages = 64, 64, 4, 3
    elif block_d > 128:
        own, other, num_warps, num_stages = 64, 32, 8, 2
    elif keys_first:
        own, other, num_warps, num_stages = 64, 64, 4, 2
    else:
        own, other, num_warps, num_stages = 128, 32, 8, 3
    if keys_first and itemsize < 4 and 32 < block_d <= 128 and not is_hopper:
        other = 32
    if itemsize < 4 and block_d <= 128 and target.runs(BLACKWELL):
        num_stages = 1  # registers do not hold what is loaded ahead, too
    length, other_length = (kv_seq, seq) if keys_first else (seq, kv_seq)
    own, other = block_size(length, 16, own), block_size(other_length, 16, other)
    block_q, block_kv = (other, own) if keys_first else (own, other)
    if is_hopper or itemsize < 4:  # a warp has 16 rows at the least
        num_warps = min(num_warps, own // 16)
    config = Config(block_q=block_q, block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)
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


_READ = len(dataclasses.fields(Refs))
_BIAS_PROGRAMS = 8  # on each core, that the gradient of a bias is split into where its own blocks are fewer


def _keys_kernel(_: Ref | None, *refs: Ref, form: Form[Any], config: Config) -> None:
    """Gradients of a block of keys and values.

    Args:
      refs: in the order of `Refs`, then dk and dv, or a buffer that has the columns of both.
    """
    inputs, outputs = Refs(*refs[:_READ]).by_item(form), [of_pairs(form, ref) for ref in refs[_READ:]]
    dk_ref, dv_ref = outputs if len(outputs) > 1 else outputs * 2
    block_q, block_kv = config.block_q, config.block_kv
    first, second, batch = (pl.program_id(axis) for axis in range(3))
    blocks = Blocks(inputs, form, block_q, block_kv, batch, keys_first=True)
    block, kv_head = (second, first) if form.causal else (first, second)  # those that take longest begin first
    key = block * block_kv
    runs = blocks.runs(block, key)
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
    rows, mask = span(key, block_kv), tile_mask(in_bounds(key, block_kv, form.kv_seq), blocks.depth)
    store(dk_ref.at[batch, rows, blocks.columns(kv_head, 1)], dk * form.sm_scale, mask)
    store(dv_ref.at[batch, rows, blocks.columns(kv_head, 2)], dv, mask)


def _queries_kernel(*refs: Ref, form: Form[Any], config: Config) -> None:
    """Gradients of a block of queries.

    Args:
      refs: in the order of `Refs`, then dq, or a buffer that has its columns.
    """
    inputs, dq_ref = Refs(*refs[:_READ]).by_item(form), of_pairs(form, refs[_READ])
    block_q, block_kv = config.block_q, config.block_kv
    first, second, batch = (pl.program_id(axis) for axis in range(3))
    blocks = Blocks(inputs, form, block_q, block_kv, batch, keys_first=False)
    block, head = (pl.cdiv(form.seq, block_q) - 1 - second, first) if form.causal else (first, second)
    query = block * block_q
    runs = blocks.runs(block, query)
    queries = blocks.queries(query, head)

    def step(i: Index, dq: jax.Array, *, full: bool) -> jax.Array:
        keys = blocks.keys(i * block_kv, head, full=full)
        _, ds = blocks.gradients(query, i * block_kv, head, queries, keys, full=full)
        return dq + blocks.dot(ds.astype(keys[0].dtype), keys[0])

    dq = walk(runs, step, jnp.zeros(queries[0].shape, jnp.float32))
    mask = tile_mask(in_bounds(query, block_q, form.seq), blocks.depth)
    store(dq_ref.at[batch, span(query, block_q), blocks.columns(head, 0)], dq * form.sm_scale, mask)


def _bias_kernel(*refs: Ref, form: Form[Any], config: Config) -> None:
    """The gradient of a block of the bias, or a part of its sum over the axes that the bias does not have.

    Args:
      refs: in the order of `Refs`, then the gradient, (parts, B or 1, heads or 1, Sq, Skv).
    """
    inputs, dbias_ref = Refs(*refs[:_READ]).by_item(form), refs[_READ]
    batch, block_q, block_kv = form.batch, config.block_q, config.block_kv
    parts, batches, heads = dbias_ref.shape[:3]
    key, query, index = pl.program_id(0) * block_kv, pl.program_id(1) * block_q, pl.program_id(2)
    own, part = index // parts, index % parts
    summed_heads = form.num_heads // heads  # all, or one
    summed = batch // batches * summed_heads

    bias = None
    if form.item_axis is not None:  # all lines have the bias of their element of the batch, and each head its own
        first = own // heads * form.items
        block = Blocks(inputs, form, block_q, block_kv, first, keys_first=False)
        bias = block.bias(query, key, own % heads).astype(jnp.float32)  # once for all lines

    def add(i: Index, total: jax.Array) -> jax.Array:
        b, head = (own // heads, own % heads)
        if batches < batch:
            b = i // summed_heads if batches == 1 else b * form.items + i // summed_heads
        head = i % summed_heads if heads < form.num_heads else head
        blocks = Blocks(inputs, form, block_q, block_kv, b, keys_first=False)
        queries, keys = blocks.queries(query, head), blocks.keys(key, head)
        return total + blocks.gradients(query, key, head, queries, keys, bias=bias, full=False)[1]

    size = pl.cdiv(summed, parts)
    start = part * size
    zero = jnp.zeros((block_q, block_kv), jnp.float32)
    total = jax.lax.fori_loop(start, jnp.minimum(start + size, summed), add, zero)
    mask = tile_mask(in_bounds(query, block_q, form.seq), in_bounds(key, block_kv, form.kv_seq))
    rows, columns = span(query, block_q), span(key, block_kv)
    store(dbias_ref.at[part, own // heads, own % heads, rows, columns], total, mask)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """The kernels' calls for one call of attention.

    Attributes:
      form: the call.
      rows: what the kernels read of each row of scores: the last of `Refs`, but for what `searched` gives.
      target: the GPU.
      interpret: whether the interpreter runs the kernels.
    """

    form: Form[jax.Array]
    rows: tuple[jax.Array, ...]
    target: Target
    interpret: bool

    def config(self, given: Config | Chooser | None, op: str, *, keys_first: bool) -> Config:
        """The blocks of the kernel with the name `op` in tables."""
        form = self.form
        return choose(
            given,
            Problem(
                backend="triton",
                op=op,
                shape=form.sizes,
                bucketed=("batch", "q", "kv"),
                dtype=form.dtype,
                config=Config,
                heuristic=functools.partial(
                    heuristic,
                    form.seq,
                    form.kv_seq,
                    form.head_dim,
                    self.target,
                    keys_first=keys_first,
                    dtype=form.dtype,
                ),
                candidates=functools.partial(configs, form.seq, form.kv_seq),
                shared_memory=functools.partial(
                    shared_memory,
                    keys_first=keys_first,
                    head_dim=form.head_dim,
                    itemsize=form.dtype.itemsize,
                ),
            ),
            self.target,
        )

    def grid(self, heads: int, blocks: int) -> tuple[int, ...]:
        """Programs for so many blocks of each of so many heads."""
        batch = self.form.batch
        return (heads, blocks, batch) if self.form.causal else (blocks, heads, batch)

    def call(
        self,
        kernel: Callable[..., None],
        config: Config,
        outputs: Sequence[jax.Array | jax.ShapeDtypeStruct],
        grid: tuple[int, ...],
        *buffer: jax.Array | None,
        keys_first: bool = False,
    ) -> Sequence[jax.Array]:
        """Runs a kernel.

        Args:
          outputs: arrays of the shapes and dtypes of the results.
          buffer: what the kernel takes before all else: the results so far, which it adds its own to, or None.
        """
        form, blocks = self.form, dict(block_q=config.block_q, block_kv=config.block_kv)
        bias = arranged_bias(form, keys_first=keys_first and is_shared(form))
        found = searched(form, **blocks, least=least_searched(form), keys_first=keys_first)
        return launch(
            functools.partial(kernel, form=form.abstract(), config=config),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
            grid=grid,
            # A buffer for the gradients of queries, keys and values gets the gradients of the queries first.
            input_output_aliases={0: 0} if jax.tree.leaves(buffer) else {},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            interpret=self.interpret,
            name=kernel.__name__.strip("_"),
        )(*buffer, *form.arrays, form.mask, bias, *form.operands[3:], *self.rows, found)

    def of_bias(self, bias: jax.Array, config: Config) -> jax.Array:
        """The gradient of the bias, by the blocks of the queries' kernel where shared memory holds them."""
        form = self.form
        size = functools.partial(bias_shared_memory, head_dim=form.head_dim, itemsize=form.dtype.itemsize)
        config = fitted(config, size, self.target)
        kv_blocks, q_blocks = pl.cdiv(form.kv_seq, config.block_kv), pl.cdiv(form.seq, config.block_q)
        # Where few blocks fill no GPU, each is summed in parts.
        own = bias.shape[0] * bias.shape[1]
        summed = form.batch * form.num_heads // own
        parts = min(pl.cdiv(_BIAS_PROGRAMS * self.target.num_cores, kv_blocks * q_blocks * own), summed)
        shape = parts, *bias.shape[:2], form.seq, form.kv_seq
        sums = jax.ShapeDtypeStruct(shape, bias.dtype if parts == 1 else jnp.float32)
        (dbias,) = self.call(_bias_kernel, config, [sums], (kv_blocks, q_blocks, own * parts))
        dbias = dbias[0] if parts == 1 else jnp.sum(dbias, axis=0).astype(bias.dtype)
        return dbias.swapaxes(-2, -1) if form.item_axis == 2 else dbias


def attention_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[Any, ...]:
    """The gradients of the operands of `attention`.

    Args:
      form: the call.
      kept: its output, (B, Sq, heads * head_dim), and log-sum-exp, (B, heads, Sq) in float32.
      cotangents: the gradients of both; None for zeros of the second.
      wanted: for each of the five operands whether its gradient is.

    Returns:
      For each operand its gradient, in its shape and dtype; None for integers, and for a bias that is absent or
      whose gradient is not wanted.
    """
    (out, lse), (dout, dlse) = kept, cotangents
    assert dout is not None
    shift, delta = rows_of_backward(form, out, lse, dout, dlse)
    q, k, v = form.arrays
    gradients = _Gradients(form=form, rows=(dout, shift, delta), target=target, interpret=interpret)
    for_queries = gradients.config(config, "attention_queries", keys_first=False)
    for_keys = gradients.config(config, "attention_keys", keys_first=True)
    queries_grid = gradients.grid(form.num_heads, pl.cdiv(form.seq, for_queries.block_q))
    keys_grid = gradients.grid(form.num_kv_heads, pl.cdiv(form.kv_seq, for_keys.block_kv))
    (dq,) = gradients.call(_queries_kernel, for_queries, [q], queries_grid)
    if form.is_fused:
        dqkv = gradients.call(_keys_kernel, for_keys, [q], keys_grid, dq, keys_first=True)
    else:
        dqkv = (dq, *gradients.call(_keys_kernel, for_keys, [k, v], keys_grid, None, keys_first=True))
    dbias = gradients.of_bias(form.bias, for_queries) if form.bias is not None and wanted[2] else None
    return tuple(dqkv), None, dbias, None, None
