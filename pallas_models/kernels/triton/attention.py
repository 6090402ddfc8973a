"""Attention: a program per block of queries and head, softmax online, blocks that a mask rules out skipped."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Index, searched
from pallas_models.kernels.common.scores import MASKING_BIAS, NO_KEY, exponents, first_heads_of, lowest_score
from pallas_models.kernels.triton._attention import (
    MOST_HEAD_DIM,
    SEARCHED,
    block_of_head,
    every,
    exp2_of,
    narrowed,
    walk,
)
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    compiler_params,
    exp2,
    in_bounds,
    load,
    plgpu,
    power_of_two_blocks,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_q` queries per program, against `block_kv` keys per step, for `heads` heads one after the other.

    Where one step takes all keys, the operands of the next head are loaded while a head is computed. With
    `tensor_sums` the weights are added up by the tensor cores, as products with 1.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    heads: int = 1
    tensor_sums: bool = False

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_q", "block_kv", "num_warps")
        if self.heads < 1:
            raise ValueError(f"{__name__}: heads={self.heads} must be positive")


def unsupported(*_: Any, head_dim: int, **__: Any) -> str | None:
    """Why the kernels, those of the gradient too, do not serve a call; None if they do."""
    return f"takes heads of up to {MOST_HEAD_DIM}, not {head_dim=}" if head_dim > MOST_HEAD_DIM else None


def shared_memory(config: Config, *, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that a CTA takes: queries, and keys and values of all stages."""
    q, kv = config.block_q, 2 * config.block_kv
    rows = config.num_stages * (q + kv) if config.heads > 1 else q + config.num_stages * kv
    return rows * block_of_head(head_dim) * itemsize


def heuristic(
    batch: int,
    seq: int,
    kv_seq: int,
    num_heads: int,
    head_dim: int,
    target: Target,
    *,
    causal: bool,
    dtype: DTypeLike,
    projected: bool = False,
) -> Config:
    """Chooses blocks: all keys in one step where they are few, then several heads a program if that fills the GPU.

    Otherwise 128 queries a program where that leaves two for every core, which two then share. Where what is
    attended to is `projected`, four warps have the columns of the product.
    """
    itemsize, block_d = jnp.dtype(dtype).itemsize, block_of_head(head_dim)
    few = batch * num_heads * seq < 64 * target.num_cores
    if itemsize == 4:
        # Exact float32 products are unrolled to single FMAs: larger blocks take minutes to compile.
        return Config(
            block_q=block_size(seq, 16, 32 if few or block_d > 64 else 64),
            block_kv=block_size(kv_seq, 16, 64 if block_d <= 64 else 32),
            num_warps=4,
            num_stages=2 if block_d <= 64 else 1,
        )

    def programs(block_q: int) -> int:
        return batch * num_heads * pl.cdiv(seq, block_q)

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
    tall = programs(128) >= 2 * target.num_cores and (block_d > 64 or not causal or seq >= 2048)
    block_q = block_size(seq, 16, 128 if tall or block_d > 128 else 64)
    config = Config(
        block_q=block_q,
        block_kv=128 if block_d <= 64 and not tall and programs(64) < 3 * target.num_cores else 64,
        num_warps=block_size(block_q // 16, 1, 8 if block_d > 128 else 4),
        num_stages=3,
        tensor_sums=64 <= block_d <= 128,
    )
    size = functools.partial(shared_memory, head_dim=head_dim, itemsize=itemsize)
    if 2 * size(config) > target.shared_memory:
        config = dataclasses.replace(config, num_stages=2)
    while size(config) > target.shared_memory:
        config = dataclasses.replace(config, block_kv=config.block_kv // 2)
    return config


def configs(seq: int, kv_seq: int, num_heads: int, head_dim: int) -> Iterator[Config]:
    """The blocks worth measuring: 16 or 32 rows a warp, up to 128 scores and sums a thread."""
    block_d = block_of_head(head_dim)
    sizes = itertools.product(
        (16, 32, 64, 128, 256), (16, 32, 64, 128), (16, 32), (2, 3), (1, 2, 3), (False, True)
    )
    for block_q, block_kv, rows, num_stages, heads, tensor_sums in sizes:
        num_warps = block_q // rows
        if not 1 <= num_warps <= 8 or max(block_kv, block_d) * rows // 32 > 128:
            continue
        if (
            block_q > block_size(seq, 16, 256)
            or block_kv > block_size(kv_seq, 16, 128)
            or block_kv < min(kv_seq, 64)
        ):
            continue
        if heads > 1 and (kv_seq > block_kv or num_heads % heads or tensor_sums):
            continue
        yield Config(
            block_q=block_q,
            block_kv=block_kv,
            num_warps=num_warps,
            num_stages=num_stages,
            heads=heads,
            tensor_sums=tensor_sums,
        )


_Carry = tuple[jax.Array, jax.Array, jax.Array]  # of each row: weighted sum of values, maximum, sum of weights


def _attention_kernel(
    q_ref: Ref,  # (B, Sq, heads * head_dim), or a buffer that has these columns among others; so k and v
    k_ref: Ref,  # (B, Skv, kv_heads * head_dim)
    v_ref: Ref,  # (B, Skv, kv_heads * head_dim)
    mask_ref: Ref | None,  # (B, Skv)
    bias_ref: Ref | None,  # (B or 1, heads or 1, Sq, Skv)
    segment_ref: Ref | None,  # (B, Sq)
    kv_segment_ref: Ref | None,  # (B, Skv)
    reach_ref: Ref | None,  # (B or 1, blocks of queries, 4)
    w_ref: Ref | None,  # (heads * head_dim, N)
    o_ref: Ref,  # (B, Sq, heads * head_dim); with w (heads, B, Sq, N), what each head adds to the product
    lse_ref: Ref | None,  # (B, heads, Sq)
    *,
    config: Config,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    first_heads: tuple[int, int, int],
    causal: bool,
    window: int | None,
    sm_scale: float,
    precision: jax.lax.Precision,
    interpret: bool,
) -> None:
    seq, kv_seq = q_ref.shape[1], k_ref.shape[1]
    block_q, block_kv, block_d = config.block_q, config.block_kv, block_of_head(head_dim)
    band = Band(seq=seq, kv_seq=kv_seq, causal=causal, window=window)
    q_block, program, batch = (pl.program_id(axis) for axis in range(3))
    if causal:  # those that take longest begin first
        q_block, program = pl.cdiv(seq, block_q) - 1 - program, q_block
    start = q_block * block_q
    depth = in_bounds(0, block_d, head_dim)
    rows, row_mask = span(start, block_q), in_bounds(start, block_q, seq)
    segments = None if segment_ref is None else load(segment_ref.at[batch, rows], row_mask)
    dot = functools.partial(plgpu.dot, precision=precision)
    # The GPU's exponentials are to the base 2, so log2(e) goes into the scale. Without a bias, scores stay
    # unscaled, and the scale is applied to score minus maximum, inside the exponential.
    scale = sm_scale * math.log2(math.e)
    early, late = (1.0, scale) if bias_ref is None and scale > 0 else (scale, 1.0)

    ones = jnp.ones((block_kv, 8), q_ref.dtype) if config.tensor_sums else None

    def row_sum(p: jax.Array) -> jax.Array:
        """The sums of the rows of p, (block_q, 1), or (block_q, 8) with all columns alike."""
        return jnp.sum(p, axis=1, keepdims=True) if ones is None else dot(p.astype(ones.dtype), ones)

    def valid_pairs(key: Index, in_range: jax.Array | None) -> jax.Array | None:
        """Which queries see which keys of a block, None if all see all; broadcast to (block_q, block_kv)."""
        keys = span(key, block_kv)
        terms = [] if in_range is None else [in_range[None, :]]
        if mask_ref is not None:
            terms = [(load(mask_ref.at[batch, keys], in_range) != 0)[None, :]]
        if kv_segment_ref is not None:
            assert segments is not None
            terms.append(segments[:, None] == load(kv_segment_ref.at[batch, keys], in_range)[None, :])
        return every(terms + band.valid(start, key, block_q, block_kv))

    runs = narrowed(
        band.keys_of(start, block_q, block_kv),
        pl.cdiv(kv_seq, block_kv),
        reach_ref,
        batch,
        q_block,
        masked=mask_ref is not None or kv_segment_ref is not None,
    )

    def attend(head: jax.Array) -> None:
        kv_head = head // (num_heads // num_kv_heads)
        q_columns, k_columns, v_columns = (
            span((first + index) * head_dim, block_d)
            for first, index in zip(first_heads, (head, kv_head, kv_head), strict=True)
        )
        q = load(q_ref.at[batch, rows, q_columns], tile_mask(row_mask, depth))
        projection = []
        if w_ref is not None:  # on its way meanwhile: loaded after attention, a call takes a fifth longer
            for columns in itertools.starmap(span, power_of_two_blocks(w_ref.shape[1])):
                w = load(w_ref.at[span(head * head_dim, block_d), columns], tile_mask(depth, None))
                projection.append((columns, w))

        def step(s: Index, carry: _Carry, *, full: bool) -> _Carry:
            acc, m_i, l_i = carry
            key = s * block_kv
            keys, in_range = span(key, block_kv), None if full else in_bounds(key, block_kv, kv_seq)
            kv_mask = tile_mask(in_range, depth)
            k = load(k_ref.at[batch, keys, k_columns], kv_mask)
            scores = dot(q, k, trans_b=True) * early
            if bias_ref is not None:
                which = (i if n > 1 else jnp.int32(0) for i, n in zip((batch, head), bias_ref.shape, strict=False))
                bias = load(bias_ref.at[*which, rows, keys], tile_mask(row_mask, in_range))
                bias = bias.astype(jnp.float32)
                scores = jnp.where(bias > MASKING_BIAS, scores + bias * math.log2(math.e), -jnp.inf)
            valid = None if full else valid_pairs(key, in_range)
            if valid is not None:
                scores = jnp.where(valid, scores, -jnp.inf)
            m_new = jnp.maximum(m_i, jnp.max(scores, axis=1))
            factor, shift = exponents(m_new, late)
            factor = factor if isinstance(factor, float) else factor[:, None]
            p = exp2_of(scores, factor, -shift[:, None], interpret=interpret)
            correction = exp2(exponents(m_i, late)[1] - shift, interpret=interpret)[:, None]
            v = load(v_ref.at[batch, keys, v_columns], kv_mask)
            acc = acc * correction + dot(p.astype(v.dtype), v)
            return acc, m_new, l_i * correction + row_sum(p)

        carry = (
            jnp.zeros((block_q, block_d), jnp.float32),
            jnp.full((block_q,), lowest_score(late), jnp.float32),
            jnp.zeros((block_q, 1 if ones is None else ones.shape[1]), jnp.float32),
        )
        acc, m_i, l_i = walk(runs, step, carry)
        total = jnp.max(l_i, axis=1)
        empty = total == 0.0  # no key took part
        out = acc * jnp.where(empty, 0.0, 1.0 / total)[:, None]
        if w_ref is None:
            store(o_ref.at[batch, rows, span(head * head_dim, block_d)], out, tile_mask(row_mask, depth))
        for columns, w in projection:
            store(o_ref.at[head, batch, rows, columns], dot(out.astype(w.dtype), w), tile_mask(row_mask, None))
        if lse_ref is not None:
            lse = jnp.where(empty, NO_KEY, m_i * (late * math.log(2)) + jnp.log(total))
            store(lse_ref.at[batch, head, rows], lse, row_mask)

    if config.heads == 1:
        attend(program)
    else:
        start_head = program * config.heads
        jax.lax.fori_loop(start_head, start_head + config.heads, lambda head, _: attend(head), None)


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
    w: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of q, k, v (B, S, heads * head_dim), or of one buffer that holds them; see `pallas_models.ops`.

    With w (heads * head_dim, N) what each head adds to its product with w, (heads, B, S, N) in float32.
    """
    fused = len(qkv) == 1
    q, k, v = qkv * 3 if fused else qkv
    batch, seq, _ = q.shape
    kv_seq = k.shape[1]
    config = choose(
        config,
        Problem(
            backend="triton",
            op="attention",
            shape={
                "batch": batch,
                "q": seq,
                "kv": kv_seq,
                "heads": num_heads,
                "kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "causal": int(causal),
            }
            | ({} if w is None else {"n": w.shape[1]}),
            bucketed=("batch", "q", "kv"),
            dtype=q.dtype,
            config=Config,
            heuristic=functools.partial(
                heuristic,
                batch,
                seq,
                kv_seq,
                num_heads,
                head_dim,
                target,
                causal=causal,
                dtype=q.dtype,
                projected=w is not None,
            ),
            candidates=functools.partial(configs, seq, kv_seq, num_heads, head_dim),
            shared_memory=functools.partial(shared_memory, head_dim=head_dim, itemsize=q.dtype.itemsize),
        ),
        target,
    )
    if num_heads % config.heads:
        raise ValueError(f"config: heads={config.heads} does not divide {num_heads=}")
    ids = (segment_ids, kv_segment_ids)
    found = searched(
        mask, *ids, seq=seq, kv_seq=kv_seq, block_q=config.block_q, block_kv=config.block_kv, least=SEARCHED
    )
    kernel = functools.partial(
        _attention_kernel,
        config=config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        first_heads=first_heads_of(qkv, num_heads, num_kv_heads),
        causal=causal,
        window=window,
        sm_scale=sm_scale,
        precision=precision,
        interpret=interpret,
    )
    q_blocks, programs = pl.cdiv(seq, config.block_q), num_heads // config.heads
    result = jax.ShapeDtypeStruct((batch, seq, num_heads * head_dim), q.dtype)
    if w is not None:
        result = jax.ShapeDtypeStruct((num_heads, batch, seq, w.shape[1]), jnp.float32)
    out, lse = pl.pallas_call(
        kernel,
        out_shape=(
            result,
            jax.ShapeDtypeStruct((batch, num_heads, seq), jnp.float32) if return_lse else None,
        ),
        grid=(programs, q_blocks, batch) if causal else (q_blocks, programs, batch),
        compiler_params=compiler_params(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="attention" if w is None else "attention_matmul",
    )(q, k, v, mask, bias, *ids, found, w)
    return (out, lse) if return_lse else out
