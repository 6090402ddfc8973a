"""Attention: a program per block of queries and head, softmax online, blocks that a mask rules out skipped."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Index, searched
from pallas_models.kernels.common.lines import of_pairs, of_rows
from pallas_models.kernels.common.scores import NO_KEY, exponents, lowest_score
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.triton.attention_blocks import (
    MOST_HEAD_DIM,
    arranged_bias,
    bias_index,
    biased,
    block_of_head,
    every,
    exp2_of,
    is_shared,
    joined,
    least_searched,
    narrowed,
    walk,
)
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    exp2,
    in_bounds,
    launch,
    load,
    plgpu,
    power_of_two_blocks,
    span,
    store,
    tile_mask,
)
from pallas_models.target import BLACKWELL, HOPPER, Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_q` queries per program, against `block_kv` keys per step, for `heads` heads one after the other.

    Where one step takes all keys, the operands of the next head are loaded while a head is computed. With
    `tensor_sums` the weights are added up by the tensor cores, as products with 1. `items` of a bias that they
    share go side by side, so that a block of it is loaded once for all of them.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    heads: int = 1
    tensor_sums: bool = False
    items: int = 1

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_q", "block_kv", "num_warps")
        for name in ("heads", "items"):
            if getattr(self, name) < 1:
                raise ValueError(f"{__name__}: {name}={getattr(self, name)} must be positive")


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why neither the kernel nor the kernels of the gradient serve a call; None where they do."""
    del target
    head_dim = form.head_dim
    return f"takes heads of up to {MOST_HEAD_DIM}, not {head_dim=}" if head_dim > MOST_HEAD_DIM else None


def shared_memory(config: Config, *, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that a CTA takes: queries, and keys and values of all stages.

    Where several items share a block of the bias, it is in the stages too.
    """
    q, kv = config.block_q, 2 * config.block_kv
    rows = config.num_stages * (q + kv) if config.heads > 1 else q + config.num_stages * kv
    bias = config.num_stages * config.block_q * config.block_kv if config.items > 1 else 0
    return (config.items * rows * block_of_head(head_dim) + bias) * itemsize


def heuristic(form: Form[Any], target: Target, *, projected: bool = False) -> Config:
    """Chooses blocks: all keys in one step where they are few, then several heads a program if that fills the GPU.

    Otherwise a program has 128 queries where that makes two programs for every core, which then shares them, or 64
    where items share a bias and heads are small. Where the results of attention are `projected`, four warps hold
    the columns of the product.
    """
    seq, kv_seq, num_heads, itemsize = form.seq, form.kv_seq, form.num_heads, form.dtype.itemsize
    block_d = block_of_head(form.head_dim)
    few = form.batch * num_heads * seq < 64 * target.num_cores
    # Elsewhere products have all operands in registers: blocks for Hopper GPUs would be pushed out of them.
    is_hopper = target.runs(HOPPER)
    if itemsize == 4:
        # Exact float32 products are unrolled to single FMAs: larger blocks take minutes to compile.
        most_kv = 64 if is_hopper else 32
        return Config(
            block_q=block_size(seq, 16, 32 if few or block_d > 64 or not is_hopper else 64),
            block_kv=block_size(kv_seq, 16, most_kv if block_d <= 64 else most_kv // 2),
            num_warps=4,
            num_stages=2 if block_d <= 64 else 1,
        )

    def programs(block_q: int) -> int:
        return form.batch * num_heads * pl.cdiv(seq, block_q)

    if kv_seq <= 128 and block_d <= 64:
        alone = block_d <= 32 and programs(16) <= target.num_cores  # each on a multiprocessor of its own
        block_q = 16 if alone else block_size(seq, 16, 32 if few and block_d <= 32 else 64)
        many = programs(block_q) >= 8 * target.num_cores
        block_kv = block_size(kv_seq, 16, 128 if few or many else 64)
        counts = (3, 2, 1) if block_kv == 128 else (2, 1)
        num_warps = block_size(block_q // (8 if alone else 16), 1, 4) if many or block_kv >= 64 else 1
        return Config(
            block_q=block_q,
            block_kv=block_kv,
            num_warps=4 if projected else num_warps,
            num_stages=2 if many else 3,
            heads=next(n for n in counts if num_heads % n == 0) if many else 1,
        )
    if is_shared(form) and block_d <= 32 and not projected:
        return Config(block_q=block_size(seq, 16, 64), block_kv=64, num_warps=4, num_stages=3, tensor_sums=True)
    tall = programs(128) >= 2 * target.num_cores and (block_d > 64 or not form.causal or seq >= 2048)
    block_q = block_size(seq, 16, 128 if tall or block_d > 128 else 64)
    config = Config(
        block_q=block_q,
        block_kv=128 if block_d <= 64 and not tall and programs(64) < 3 * target.num_cores else 64,
        num_warps=block_size(block_q // 16, 1, 8 if block_d > (128 if is_hopper else 64) else 4),
        num_stages=3 if is_hopper or block_d > 64 else 2,
        tensor_sums=64 <= block_d <= 128,
    )
    size = functools.partial(shared_memory, head_dim=form.head_dim, itemsize=itemsize)
    if 2 * size(config) > target.shared_memory:
        config = dataclasses.replace(config, num_stages=2)
    if block_d > 64 and target.runs(BLACKWELL):  # registers do not hold what is loaded ahead, too
        config = dataclasses.replace(config, num_stages=1)
    while size(config) > target.shared_memory:
        config = dataclasses.replace(config, block_kv=config.block_kv // 2)
    return config


def configs(form: Form[Any]) -> Iterator[Config]:
    """The blocks worth measuring: 16 or 32 rows a warp, up to 128 scores and sums a thread."""
    kv_seq, block_d = form.kv_seq, block_of_head(form.head_dim)
    items = (1, 2) if form.bias is not None and _sharing(form) > 1 else (1,)
    sizes = itertools.product(
        (16, 32, 64, 128, 256), (16, 32, 64, 128), (16, 32), (2, 3), (1, 2, 3), (False, True), items
    )
    for block_q, block_kv, rows, num_stages, heads, tensor_sums, side_by_side in sizes:
        num_warps = block_q // rows
        if not 1 <= num_warps <= 8 or max(block_kv, block_d) * rows // 32 > 128:
            continue
        if (
            block_q > block_size(form.seq, 16, 256)
            or block_kv > block_size(kv_seq, 16, 128)
            or block_kv < min(kv_seq, 64)
        ):
            continue
        if heads > 1 and (kv_seq > block_kv or form.num_heads % heads or tensor_sums or side_by_side > 1):
            continue
        yield Config(
            block_q=block_q,
            block_kv=block_kv,
            num_warps=num_warps,
            num_stages=num_stages,
            heads=heads,
            tensor_sums=tensor_sums,
            items=side_by_side,
        )


# Of each row: weighted sum of values, maximum, its exponent to the base 2, sum of weights.
_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class _Refs:
    """What the kernel reads and writes; None for what a call does not have."""

    q: Ref  # (B, Sq, heads * head_dim), or a buffer that has these columns among others; so k and v
    k: Ref  # (B, Skv, kv_heads * head_dim)
    v: Ref  # (B, Skv, kv_heads * head_dim)
    mask: Ref | None  # (B, Skv)
    bias: Ref | None  # (B or 1, heads or 1, Sq, Skv)
    segments: Ref | None  # (B, Sq)
    kv_segments: Ref | None  # (B, Skv)
    found: Ref | None  # the result of `searched`, (B or 1, blocks of queries, 4)
    w: Ref | None  # (heads * head_dim, N)
    o: Ref  # (B, Sq, heads * head_dim); with w (heads, B, Sq, N), what each head adds to the product
    lse: Ref | None  # (B, heads, Sq)

    def by_item(self, form: Form[Any]) -> Self:
        """The same, each to be indexed as if all items of the call were a batch."""
        pairs = {name: of_pairs(form, getattr(self, name)) for name in ("q", "k", "v", "mask", "o")}
        return dataclasses.replace(self, **pairs, lse=of_rows(form, self.lse))


class _Queries:
    """A block of queries of one batch element, which attends to the blocks of keys that it needs."""

    def __init__(
        self,
        refs: _Refs,
        form: Form[Any],
        config: Config,
        batch: jax.Array,
        block: jax.Array,
    ) -> None:
        self.refs, self.form, self.config, self.batch = refs, form, config, batch
        self.band, self.block_d = Band.of(form), block_of_head(form.head_dim)
        self.start = block * config.block_q
        self.depth = in_bounds(0, self.block_d, form.head_dim)
        self.rows = span(self.start, config.block_q)
        self.row_mask = in_bounds(self.start, config.block_q, form.seq)
        self.segments = None if refs.segments is None else load(refs.segments.at[batch, self.rows], self.row_mask)
        self.dot = functools.partial(plgpu.dot, precision=form.precision)
        # The GPU's exponentials are to the base 2, so log2(e) goes into the scale. Without a bias, scores stay
        # unscaled, and the scale is applied to score minus maximum, inside the exponential. With one, which stays
        # as it is, the scale is applied in the same instruction as the bias.
        scale = form.sm_scale * math.log2(math.e)
        self.early, self.late = (1.0, scale) if scale > 0 else (scale, 1.0)
        if refs.bias is not None:
            self.early, self.late = form.sm_scale, math.log2(math.e)
        self.ones = jnp.ones((config.block_kv, 8), refs.q.dtype) if config.tensor_sums else None
        self.runs = narrowed(
            self.band.keys_of(self.start, config.block_q, config.block_kv),
            pl.cdiv(form.kv_seq, config.block_kv),
            refs.found,
            batch,
            block,
            masked=form.has_masks,
        )

    def columns(self, operand: int, head: jax.Array) -> pl.Slice:
        """The columns of a head in the array of operand 0, 1 or 2: the queries, the keys or the values."""
        return span((self.form.first_heads[operand] + head) * self.form.head_dim, self.block_d)

    def begin(self, head: jax.Array) -> tuple[Callable[..., _Carry], _Carry, list[tuple[pl.Slice, jax.Array]]]:
        """The step of a head over a block of keys, what it begins with, and the head's `projection`."""
        refs, config = self.refs, self.config
        kv_head = head // self.form.group
        q_columns, k_columns, v_columns = (self.columns(i, x) for i, x in enumerate((head, kv_head, kv_head)))
        q = load(refs.q.at[self.batch, self.rows, q_columns], tile_mask(self.row_mask, self.depth))
        projection = self.projection(head)
        step = functools.partial(self.step, q, k_columns, v_columns)
        peak = jnp.full((config.block_q,), lowest_score(self.late, with_bias=refs.bias is not None), jnp.float32)
        carry = (
            jnp.zeros((config.block_q, self.block_d), jnp.float32),
            peak,
            exponents(peak, self.late)[1],
            jnp.zeros((config.block_q, 1 if self.ones is None else self.ones.shape[1]), jnp.float32),
        )
        return step, carry, projection

    def finish(self, head: jax.Array, carry: _Carry, projection: list[tuple[pl.Slice, jax.Array]]) -> None:
        """Writes the results of a head, given its sums over all keys."""
        refs = self.refs
        acc, peak, _, totals = carry
        total = jnp.max(totals, axis=1)
        empty = total == 0.0  # no key took part
        self.write(head, acc * jnp.where(empty, 0.0, 1.0 / total)[:, None], projection)
        if refs.lse is not None:
            lse = jnp.where(empty, NO_KEY, peak * (self.late * math.log(2)) + jnp.log(total))
            store(refs.lse.at[self.batch, head, self.rows], lse, self.row_mask)

    def step(
        self,
        q: jax.Array,
        k_columns: pl.Slice,
        v_columns: pl.Slice,
        s: Index,
        carry: _Carry,
        *,
        bias: Callable[[pl.Slice, jax.Array | None], jax.Array] | None,
        full: bool,
    ) -> _Carry:
        """Adds block `s` of the keys, of which each query sees each where it is `full`; `bias` gives theirs."""
        refs, block_kv, kv_seq = self.refs, self.config.block_kv, self.form.kv_seq
        acc, peak, old_shift, totals = carry
        key = s * block_kv
        keys, in_range = span(key, block_kv), None if full else in_bounds(key, block_kv, kv_seq)
        kv_mask = tile_mask(in_range, self.depth)
        k = load(refs.k.at[self.batch, keys, k_columns], kv_mask)
        scores = self.dot(q, k, trans_b=True)
        scores = scores * self.early if bias is None else biased(scores, self.early, bias(keys, in_range))
        valid = None if full else self.valid_pairs(key, in_range)
        if valid is not None:
            scores = jnp.where(valid, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        factor, shift = exponents(new_peak, self.late)
        factor = factor if isinstance(factor, float) else factor[:, None]
        p = exp2_of(scores, factor, -shift[:, None])
        correction = exp2(old_shift - shift)[:, None]
        v = load(refs.v.at[self.batch, keys, v_columns], kv_mask)
        acc = acc * correction + self.dot(p.astype(v.dtype), v)
        return acc, new_peak, shift, totals * correction + self.row_sum(p)

    def bias(self, head: jax.Array, keys: pl.Slice, in_range: jax.Array | None) -> jax.Array:
        """The bias of a block of keys."""
        ref = self.refs.bias
        assert ref is not None
        where = bias_index(self.form, ref.shape, self.batch, head)
        return load(ref.at[*where, self.rows, keys], tile_mask(self.row_mask, in_range))

    def valid_pairs(self, key: Index, in_range: jax.Array | None) -> jax.Array | None:
        """Which queries see which keys of a block, None if all see all; broadcast to (block_q, block_kv)."""
        refs, config, batch = self.refs, self.config, self.batch
        keys = span(key, config.block_kv)
        terms = [] if in_range is None else [in_range[None, :]]
        if refs.mask is not None:
            terms = [(load(refs.mask.at[batch, keys], in_range) != 0)[None, :]]
        if refs.kv_segments is not None:
            assert self.segments is not None
            terms.append(self.segments[:, None] == load(refs.kv_segments.at[batch, keys], in_range)[None, :])
        return every(terms + self.band.valid(self.start, key, config.block_q, config.block_kv))

    def row_sum(self, p: jax.Array) -> jax.Array:
        """The sums of the rows of p, (block_q, 1), or (block_q, 8) with all columns alike."""
        if self.ones is None:
            return jnp.sum(p, axis=1, keepdims=True)
        total: jax.Array = self.dot(p.astype(self.ones.dtype), self.ones)
        return total

    def projection(self, head: jax.Array) -> list[tuple[pl.Slice, jax.Array]]:
        """Blocks of the columns of w, and the rows of a head of each; none without w.

        They are on their way while the head attends: loaded after that, a call takes a fifth longer.
        """
        ref = self.refs.w
        if ref is None:
            return []
        loaded = []
        for columns in itertools.starmap(span, power_of_two_blocks(ref.shape[1])):
            w = load(ref.at[span(head * self.form.head_dim, self.block_d), columns], tile_mask(self.depth, None))
            loaded.append((columns, w))
        return loaded

    def write(self, head: jax.Array, out: jax.Array, projection: list[tuple[pl.Slice, jax.Array]]) -> None:
        """Writes the results of a head, or the product of them with the head's rows of w."""
        refs, batch, rows = self.refs, self.batch, self.rows
        if refs.w is None:
            columns = span(head * self.form.head_dim, self.block_d)
            store(refs.o.at[batch, rows, columns], out, tile_mask(self.row_mask, self.depth))
        for columns, w in projection:
            part = self.dot(out.astype(w.dtype), w)
            store(refs.o.at[head, batch, rows, columns], part, tile_mask(self.row_mask, None))


def attend(items: Sequence[_Queries], head: jax.Array) -> None:
    """Writes the results of one head for the same block of queries of items that share a bias, side by side."""
    first, begun = items[0], [queries.begin(head) for queries in items]

    def step(s: Index, carries: tuple[_Carry, ...], *, full: bool) -> tuple[_Carry, ...]:
        loaded: list[jax.Array] = []

        def bias(keys: pl.Slice, in_range: jax.Array | None) -> jax.Array:
            """Loaded for the first item, and kept for the others."""
            if not loaded:
                loaded.append(first.bias(head, keys, in_range))
            return loaded[0]

        steps = zip(begun, carries, strict=True)
        given = None if first.refs.bias is None else bias
        return tuple(one(s, carry, bias=given, full=full) for (one, _, _), carry in steps)

    runs = joined([queries.runs for queries in items])
    carries = walk(runs, step, tuple(carry for _, carry, _ in begun))
    for queries, carry, (_, _, projection) in zip(items, carries, begun, strict=True):
        queries.finish(head, carry, projection)


def _sharing(form: Form[Any]) -> int:
    """How many items in a row have the same bias."""
    return form.batch if form.bias is None else form.batch // form.bias.shape[0]


def _items(form: Form[Any], config: Config, program: jax.Array) -> list[jax.Array]:
    """The items of a program. Where they are too few for the last one, its last item is computed twice."""
    if config.items == 1:
        return [program]
    sharing = _sharing(form)
    groups = pl.cdiv(sharing, config.items)
    first = jax.lax.rem(program, groups) * config.items
    before = jax.lax.div(program, groups) * sharing
    return [before + jnp.minimum(first + i, sharing - 1) for i in range(config.items)]


def _attention_kernel(*refs: Ref, form: Form[Any], config: Config) -> None:
    """Attends in a program: a block of queries of one batch element, for one head or a few.

    Args:
      refs: in the order of `_Refs`.
    """
    block, program, batch = (pl.program_id(axis) for axis in range(3))
    if form.causal:  # blocks that take longest begin first
        block, program = pl.cdiv(form.seq, config.block_q) - 1 - program, block
    read = _Refs(*refs).by_item(form)
    items = [_Queries(read, form, config, item, block) for item in _items(form, config, batch)]
    if config.heads == 1:
        attend(items, program)
    else:
        first = program * config.heads
        jax.lax.fori_loop(first, first + config.heads, lambda head, _: attend(items, head), None)


def attention(
    form: Form[jax.Array],
    *,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
    w: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention, (B, Sq, heads * head_dim), and the log-sum-exp that `return_lse` asks for.

    With w (heads * head_dim, N) it gives what each head adds to the product with w, (heads, B, Sq, N) in float32.
    """
    call = form.abstract()
    config = choose(
        config,
        Problem(
            backend="triton",
            op="attention",
            shape=form.sizes | ({} if w is None else {"n": w.shape[1]}),
            bucketed=("batch", "q", "kv"),
            dtype=form.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, call, target, projected=w is not None),
            candidates=functools.partial(configs, call),
            shared_memory=functools.partial(shared_memory, head_dim=form.head_dim, itemsize=form.dtype.itemsize),
        ),
        target,
    )
    if form.num_heads % config.heads:
        raise ValueError(f"config: heads={config.heads} does not divide num_heads={form.num_heads}")
    found = searched(form, block_q=config.block_q, block_kv=config.block_kv, least=least_searched(form))
    sharing = _sharing(call)
    if config.items > sharing:
        raise ValueError(f"config: items={config.items} are more than the {sharing} that share a bias")
    q_blocks, programs = pl.cdiv(form.seq, config.block_q), form.num_heads // config.heads
    groups = form.batch // sharing * pl.cdiv(sharing, config.items)
    result = jax.ShapeDtypeStruct(form.out_shape, form.dtype)
    if w is not None:
        result = jax.ShapeDtypeStruct((form.num_heads, form.batch, form.seq, w.shape[1]), jnp.float32)
    lse_type = jax.ShapeDtypeStruct(form.lse_shape, jnp.float32)
    out, lse = launch(
        functools.partial(_attention_kernel, form=call, config=config),
        out_shape=(result, lse_type if form.return_lse else None),
        grid=(programs, q_blocks, groups) if form.causal else (q_blocks, programs, groups),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="attention" if w is None else "attention_matmul",
    )(*form.arrays, form.mask, arranged_bias(form), *form.operands[3:], found, w)
    return (out, lse) if form.return_lse else out
