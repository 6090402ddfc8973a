"""Multi-head and grouped-query attention, over separate queries, keys and values or one fused buffer."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_models import _jax
from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.common.scores import LOWEST, MASKING_BIAS, NO_KEY, biased_in_xla
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic import attention as mosaic
from pallas_models.kernels.mosaic import attention_backward as mosaic_backward
from pallas_models.kernels.mosaic import attention_backward_mma as mma_backward
from pallas_models.kernels.mosaic import attention_mma as mma
from pallas_models.kernels.mosaic import attention_resident as mosaic_resident
from pallas_models.kernels.mosaic.common.backend import prefer_nowhere
from pallas_models.kernels.triton import attention as triton
from pallas_models.kernels.triton import attention_backward as triton_backward
from pallas_models.ops import _checks, _half_precision
from pallas_models.ops._attention_form import form_of, merged_heads, separate
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, HOPPER, Target
from pallas_models.tuning import Chooser


class _Options(TypedDict, total=False):
    causal: bool
    window: int | None
    mask: Array | None
    bias: Array | None
    segment_ids: Array | None
    sm_scale: float | Array | None
    precision: jax.lax.PrecisionLike
    config: triton.Config | mosaic.Config | mma.Config | Chooser | None
    implementation: Implementation | None


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    kv_segment_ids: Array | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    kv_segment_ids: Array | None = ...,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    sm_scale: float | Array | None = None,
    return_lse: bool = False,
    precision: jax.lax.PrecisionLike = None,
    config: triton.Config | mosaic.Config | mma.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `softmax(q k^T * sm_scale + bias) v` per head, over the keys that every mask given leaves.

    Softmax runs online over blocks of keys in float32 ([FlashAttention](https://arxiv.org/abs/2205.14135)),
    so any length works. The kernel skips blocks of keys that `causal` and `window` rule out, and of long
    rows those that a `mask` of keys and the segment ids do. A key that is masked has exactly zero weight, and
    with a `mask` of keys it may be anything, NaN too, but its value must be finite; a query that no key is left
    for gets zeros, where `jax.nn.dot_product_attention` gives the mean of all values.

    Gradients come from kernels too. They compute scores again, so that memory grows with the lengths, not with
    their product, and add up in a fixed order: the same operands give the same bits. In XLA queries are taken a
    block at a time, for the same reason. Results are right for scores of any size; kernels of gradients take
    weights from the log-sum-exp in float32, which puts these off by about its size times 2**-24.

    Queries and keys may differ in number: the last query is at the position of the last key. Sequences of
    any lengths are packed into one row by segment ids: sequences joined to q of (total, Hq, D) with
    cumulative lengths are `attention(q[None], k[None], v[None], segment_ids=ids[None])[0]` with
    `ids = segment_ids_from_cu_seqlens(cu_seqlens, total)`.

    Beside the operands the gradient keeps the result and the log-sum-exp, (B, Hq, Sq) float32.

    ```
    q, k, v = (jax.random.normal(key, (2, 16, 4, 32)) for key in jax.random.split(jax.random.key(0), 3))
    y = ops.attention(q, k, v, causal=True)  # (2, 16, 4, 32)
    ```

    Args:
      q: (B, Sq, Hq, D), float16, bfloat16 or float32. Kernels take D up to 256; powers of two are fastest.
      k: (B, Skv, Hkv, D) in the dtype of q. Hq is a multiple of Hkv: head h of q attends to head
        h // (Hq // Hkv) of k and v.
      v: as k.
      causal: whether a query sees no key after its position.
      window: a query sees only keys that are fewer positions than this away, or all where it is None: that at its
        position, `window - 1` before it and, without `causal`, as many after it.
      mask: (B, Skv), bool or integer, 1 for a key that takes part and 0 for padding (holes allowed), or None.
        Or of pairs, (B or 1, Hq or 1, Sq or 1, Skv), as `jax.nn.dot_product_attention` takes it: where it is not
        of keys alone, (B or 1, 1, 1, Skv), a bias is made of it.
      bias: added to the scaled scores; (B or 1, Hq or 1, Sq, Skv), float16, bfloat16 or float32. -1e30 and
        below count for -inf, which masks a pair; above 1e38 scores, which kernels have to base 2, leave float32.
      segment_ids: (B, Sq), integers. A query sees the keys with its own id. Equal ids need not be adjacent,
        but no block is skipped where ids are not sorted. `causal` compares positions in the row.
      kv_segment_ids: (B, Skv); `segment_ids` when None.
      sm_scale: factor on the scores; 1 / sqrt(D) when None. Where it is an array of one number, as when traced, q
        is scaled and rounded to its dtype first.
      return_lse: whether to return the logarithm of the sum of the exponentials of the scores too.
      precision: of float32 products, as in `matmul`.
      config: block sizes of the Triton or the Mosaic kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves half
        precisions and a positive scale: on Hopper D of 32, 64 or 128, by default not D of 32 but for many long
        rows; with `mma`, from JAX 0.11 on, D of 16 too and gradients with a bias, on GPUs from Ampere on.

    Returns:
      (B, Sq, Hq, D) in the dtype of q; with `return_lse` also (B, Hq, Sq) float32, -inf where no key is left.

    Raises:
      TypeError: q, k, v or `bias` are not floating point or not of one dtype, `mask` is not bool or integer,
        or segment ids are not integers.
      ValueError: shapes do not fit, Hq is no multiple of Hkv, `window` is not positive, or a concrete `mask`
        holds anything but 0 and 1.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    form = form_of(
        merged_heads(q, k, v),
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        causal=causal,
        window=window,
        mask=mask,
        bias=bias,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        sm_scale=sm_scale,
        return_lse=return_lse,
        precision=precision,
    )
    result = _attend(form, config, implementation)
    if isinstance(result, tuple):
        return result[0].reshape(q.shape), result[1]
    return result.reshape(q.shape)


@overload
def attention_qkv(
    qkv: Array,
    *,
    num_heads: int,
    num_kv_heads: int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def attention_qkv(
    qkv: Array,
    *,
    num_heads: int,
    num_kv_heads: int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


def attention_qkv(
    qkv: Array,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | None = None,
    sm_scale: float | Array | None = None,
    return_lse: bool = False,
    precision: jax.lax.PrecisionLike = None,
    config: triton.Config | mosaic.Config | mma.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `attention` from and to the layouts of the projections.

    The heads are read in place from the fused buffer and written to the merged layout; nothing is split,
    transposed or merged.

    Beside the operands the gradient keeps the result and the log-sum-exp, (B, num_heads, S) float32.

    ```
    y = ops.attention_qkv(jnp.ones((2, 16, 3 * 4 * 32)), num_heads=4, causal=True)  # (2, 16, 128)
    ```

    Args:
      qkv: (B, S, (num_heads + 2 * num_kv_heads) * head_dim): the queries of all heads, then the keys, then
        the values.
      num_heads: number of heads of the queries.
      num_kv_heads: number of heads of keys and of values, which divides `num_heads`; as many when None.

    All other arguments, and the errors, are as in `attention`.

    Returns:
      (B, S, num_heads * head_dim) in the dtype of `qkv`; with `return_lse` also (B, num_heads, S) float32.
    """
    if num_kv_heads is None:
        num_kv_heads = num_heads
    _checks.check_float("qkv", qkv)
    _checks.check_rank("qkv", qkv, 3, "(B, S, (num_heads + 2 * num_kv_heads) * head_dim)")
    total = num_heads + 2 * num_kv_heads
    if min(num_heads, num_kv_heads) < 1 or qkv.shape[-1] % total:
        raise ValueError(
            f"qkv has shape {qkv.shape}; expected its width to be ({num_heads=} + 2 * {num_kv_heads=}) * head_dim"
        )
    form = form_of(
        (qkv,),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=qkv.shape[-1] // total,
        causal=causal,
        window=window,
        mask=mask,
        bias=bias,
        segment_ids=segment_ids,
        sm_scale=sm_scale,
        return_lse=return_lse,
        precision=precision,
    )
    return _attend(form, config, implementation)


def segment_ids_from_cu_seqlens(cu_seqlens: Array, total: int) -> jax.Array:
    """The segment ids of sequences joined in one row, from their cumulative lengths.

    ```
    ids = ops.segment_ids_from_cu_seqlens(jnp.array([0, 3, 5]), 6)  # [0, 0, 0, 1, 1, 2]
    ```

    Args:
      cu_seqlens: (N + 1,), integers: 0 and the end of each sequence, not descending.
      total: length of the row. Positions from `cu_seqlens[-1]` on are a segment of their own.

    Returns:
      (total,) int32, i for the positions of sequence i.

    Raises:
      TypeError: cu_seqlens are not integers.
      ValueError: cu_seqlens are not of one dimension.
    """
    _checks.check_integer("cu_seqlens", cu_seqlens)
    _checks.check_rank("cu_seqlens", cu_seqlens, 1, "(N + 1,)")
    ended = jnp.zeros(total, jnp.int32).at[cu_seqlens[1:].astype(jnp.int32)].add(1, mode="drop")
    return jnp.cumsum(ended, dtype=jnp.int32)  # how many sequences end at a position or before it


def _attend(
    form: Form[jax.Array],
    config: triton.Config | mosaic.Config | mma.Config | Chooser | None,
    implementation: Implementation | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    result = run(OP, form, config=config, implementation=implementation)
    if not form.return_lse:
        out: jax.Array = result
        return out
    out, lse = result
    return out, jnp.where(lse == NO_KEY, -jnp.inf, lse)


_SCORES = 2**24  # of all heads that the reference holds at once, 64 MiB; more than enough to keep a device busy
_MOST_QUERIES = 512  # of a block, so that no array grows with the square of the length


def _block_of_queries(batch: int, num_heads: int, seq: int, kv_seq: int) -> int:
    """How many queries the reference takes at a time."""
    if not all(isinstance(n, int) for n in (batch, seq, kv_seq)):  # symbolic sizes
        return seq
    fitting = max(_SCORES // max(batch * num_heads * kv_seq, 1), 16)
    return min(seq, _MOST_QUERIES, 1 << fitting.bit_length() - 1)


def reference(form: Form[jax.Array]) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention in plain XLA."""
    out, lse = attend_to_all(form)
    out = checkpoint_name(out, name=OP.name)  # as the results of kernels are
    return (out, lse) if form.return_lse else out


def attend_to_all(form: Form[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp, `NO_KEY` where no key is left.

    Many queries are taken a block at a time, forward and, computed again, backward.
    """
    q, k, v = separate(form)
    batch, seq, kv_seq = form.batch, form.seq, form.kv_seq
    if form.mask is not None:  # what a masked key holds, NaN for one, would reach the gradients of all queries
        k = jnp.where((form.mask != 0)[:, :, None], k, 0)
    attend = functools.partial(_attend_block, form)
    block = _block_of_queries(batch, form.num_heads, seq, kv_seq)
    if block == seq:
        return attend(q, form.bias, form.segment_ids, kv_seq - seq, k=k, v=v)
    count = -(-seq // block)
    # The gradients of all blocks are added up in the dtype of what the blocks share.
    shared = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (k, v)]

    def blocks(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None:
            return None
        x = jnp.pad(x, [(0, count * block - seq if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)

    @jax.checkpoint
    def step(operands: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        start, q, bias, segment_ids = operands
        keys, values = (x.astype(q.dtype) for x in shared)
        return attend(q, bias, segment_ids, start + kv_seq - seq, k=keys, v=values)

    starts = jnp.arange(count) * block
    out, lse = jax.lax.map(step, (starts, blocks(q, 1), blocks(form.bias, 2), blocks(form.segment_ids, 1)))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, count * block, form.num_heads * form.head_dim)[:, :seq]
    lse = jnp.moveaxis(lse, 0, 2).reshape(batch, form.num_heads, count * block)[..., :seq]
    return out, lse


def _attend_block(
    form: Form[jax.Array],
    q: jax.Array,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    position: int | jax.Array,
    *,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of some queries, the first of which is at `position` among the keys.

    The log-sum-exp of a query that no key is left for is `NO_KEY`.

    Args:
      form: the call, of which these are queries.
      q: (B, queries, heads * head_dim); `bias` and `segment_ids` are of these queries too.
      k: all keys, where the mask leaves them and 0 elsewhere.
      v: all values.
    """
    (batch, seq, _), kv_seq, dtype = q.shape, k.shape[1], q.dtype
    num_heads, head_dim, sm_scale = form.num_heads, form.head_dim, form.sm_scale
    grouped = (form.num_kv_heads, form.group)
    q = q.reshape(batch, seq, *grouped, head_dim)
    k, v = (x.reshape(batch, kv_seq, form.num_kv_heads, head_dim) for x in (k, v))
    einsum = functools.partial(_half_precision.einsum, precision=form.precision)
    # Without a bias scores are scaled after the maximum is subtracted: XLA rounds a product and a difference once
    # where it takes exponentials, but not where it takes the maximum, whose exponent would not be 0.
    early, late = (
        (sm_scale, 1.0) if bias is not None or sm_scale == 0.0 else (math.copysign(1.0, sm_scale), abs(sm_scale))
    )
    scores = einsum("bqhgd,bkhd->bhgqk", q, k).reshape(batch, num_heads, seq, kv_seq)
    scores = scores * early if bias is None else biased_in_xla(scores, early, bias)
    valid = []
    if bias is not None:
        valid.append(bias.astype(jnp.float32) > MASKING_BIAS)
    if form.mask is not None:
        valid.append((form.mask != 0)[:, None, None, :])
    if segment_ids is not None and form.kv_segment_ids is not None:
        valid.append((segment_ids[:, :, None] == form.kv_segment_ids[:, None, :])[:, None])
    distance = (position + jnp.arange(seq))[:, None] - jnp.arange(kv_seq)
    if form.causal:
        valid.append(distance >= 0)
    if form.window is not None:
        valid.append(distance < form.window)
        if not form.causal:
            valid.append(distance > -form.window)
    if valid:
        scores = jnp.where(functools.reduce(operator.and_, valid), scores, -jnp.inf)
    # Where no key is left the maximum is finite, so the sum is 0, and so are the weights and their gradient.
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=LOWEST))
    weights = jnp.exp((scores - peak) * late)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    weights = (weights / total).astype(dtype).reshape(batch, *grouped, seq, kv_seq)
    out = einsum("bhgqk,bkhd->bqhgd", weights, v).astype(dtype).reshape(batch, seq, num_heads * head_dim)
    return out, jnp.where(empty, NO_KEY, peak * late + jnp.log(total))[..., 0]


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    """Queries go with the head of keys and values that they share; one buffer of all three has no such split."""
    if form.is_fused:
        return Sharding(equation="b S F, b T, b H S T, b S, b T -> b S F, b H S")
    return Sharding(
        equation="b S (g Q), b T (g D), b T (g D), b T, b (g R) S T, b S, b T -> b S (g Q), b (g R) S",
        sizes={"g": form.num_kv_heads},
        divides={"g": ("num_heads", "num_kv_heads")},
    )


# Of triangle attention, too: its form has all that they ask of one. The kernel by `mma` comes before those for
# Hopper, of which the last counts where several serve a call and none is preferred; JAX 0.10 has no `mma`.
_MMA = Kernel(
    backend="mosaic",
    architectures=AMPERE_ON,
    call=mma.attention,
    config=mma.Config,
    refuses=mma.unsupported,
    preferred=prefer_nowhere,
)
KERNELS: tuple[Kernel[Any], ...] = (
    *([_MMA] if _jax.since(0, 11) else ()),
    Kernel(
        backend="mosaic",
        architectures=HOPPER,
        call=mosaic.attention,
        config=mosaic.Config,
        refuses=mosaic.unsupported,
        preferred=mosaic.prefer,
    ),
    Kernel(
        backend="mosaic",
        architectures=HOPPER,
        call=mosaic_resident.attention,
        config=None,
        refuses=mosaic_resident.unsupported,
        preferred=mosaic_resident.prefer,
    ),
    Kernel(
        backend="triton",
        architectures=AMPERE_ON,
        call=triton.attention,
        config=triton.Config,
        refuses=triton.unsupported,
    ),
)


def backward_by_mma(for_hopper: Callable[[Any, Target], str | None]) -> tuple[Backward[Any], ...]:
    """The gradient by `mma`, for calls that a gradient for Hopper does not serve there; JAX 0.10 has no `mma`."""

    def refuses(form: Any, target: Target) -> str | None:
        if (target.runs(HOPPER) or not target.name) and not for_hopper(form, target):
            return "leaves the call to the gradient for Hopper"
        return mma.unsupported(form, target)

    backward = Backward(
        backend="mosaic",
        call=mma_backward.attention_backward,
        keeps=2,
        options={"return_lse": True},
        refuses=refuses,
        preferred=prefer_nowhere,
    )
    return (backward,) if _jax.since(0, 11) else ()


OP: Op[Form[Any]] = Op(
    name="attention",
    reference=reference,
    kernels=KERNELS,
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic_backward.attention_backward,
            keeps=2,
            options={"return_lse": True},
            refuses=mosaic_backward.unsupported,
            preferred=mosaic.prefer,
        ),
        *backward_by_mma(mosaic_backward.unsupported),
        Backward(backend="triton", call=triton_backward.attention_backward, keeps=2, options={"return_lse": True}),
    ),
    sharding=_sharding,
)
