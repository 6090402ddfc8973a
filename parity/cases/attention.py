"""The cases of `ops.attention` and `ops.attention_qkv`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from pallas_models.kernels.triton.attention import Config
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import ON_GPU, array, normal, random_mask
from parity.support.draws import Drawn, Input, Pick

# Products of two, and sums of such scores over head and scale, are finite in float32.
_LARGEST = 1e15


def _small(size: int, dtype: str) -> Arrays:
    batch, seq, kv_seq, _ = sizes(size)
    rng = np.random.default_rng(29)
    d = 48 if size == 1 else 32
    return (
        normal(rng, batch, seq, 4, d, dtype=dtype),
        *(normal(rng, batch, kv_seq, 2, d, dtype=dtype) for _ in range(2)),
        normal(rng, 1, 4, seq, kv_seq, dtype=dtype),
        random_mask(rng, batch, kv_seq),
        *(array(rng.integers(0, 2, (batch, n)), "int32") for n in (seq, kv_seq)),
    )


def _small_qkv(size: int, dtype: str) -> Arrays:
    batch, seq, _, _ = sizes(size)
    rng = np.random.default_rng(23)
    width = 3 * 2 * (48 if size == 1 else 32)
    return normal(rng, batch, seq, width, dtype=dtype), random_mask(rng, batch, seq)


def _hopper(size: int, dtype: str) -> Arrays:
    seq, kv_seq, head_dim = (131, 205, 64) if size == 1 else (256, 256, 128)
    rng = np.random.default_rng(33)
    q = normal(rng, 2, seq, 4, head_dim, dtype=dtype)
    return q, *(normal(rng, 2, kv_seq, 2, head_dim, dtype=dtype) for _ in range(2))


def _hopper_masked(size: int, dtype: str) -> Arrays:
    q, k, v = _hopper(size, dtype)
    rng = np.random.default_rng(38)
    ids = (array(np.sort(rng.integers(0, 3, x.shape[:2]), 1), "int32") for x in (q, k))
    return q, k, v, array(rng.integers(0, 4, k.shape[:2]) > 0, "int32"), *ids


def _hopper_qkv(size: int, dtype: str) -> Arrays:
    seq, head_dim = (131, 64) if size == 1 else (256, 128)
    return (normal(np.random.default_rng(34), 2, seq, 3 * 2 * head_dim, dtype=dtype),)


def _resident(size: int, dtype: str) -> Arrays:
    """Heads of 32, all keys of which a CTA holds at once."""
    seq, rng = (64 if size == 1 else 320), np.random.default_rng(42)
    mask = array(np.arange(seq) < np.array([[seq], [seq // 3]]), "int32")
    return normal(rng, 2, seq, 3 * 2 * 32, dtype=dtype), mask


def _with_all(q: Any, k: Any, v: Any, bias: Any, mask: Any, ids: Any, kv_ids: Any) -> dict[str, Any]:
    masks = dict(mask=mask, segment_ids=ids, kv_segment_ids=kv_ids, causal=True, window=30)
    return dict(q=q, k=k, v=v, bias=bias) | masks


def _qkv(qkv: Any, mask: Any = None) -> dict[str, Any]:
    return dict(qkv=qkv, num_heads=2) | ({} if mask is None else dict(mask=mask))


def _masked(q: Any, k: Any, v: Any, mask: Any, ids: Any, kv_ids: Any) -> dict[str, Any]:
    return dict(q=q, k=k, v=v, mask=mask, segment_ids=ids, kv_segment_ids=kv_ids)


def _windowed(q: Any, k: Any, v: Any) -> dict[str, Any]:
    return dict(q=q, k=k, v=v, causal=True, window=70)


def _large_heads(dtype: str) -> dict[str, Any]:
    """Heads of queries in groups of four."""
    kv = shaped(dtype, 1, 4096, 8, 128)
    return dict(q=shaped(dtype, 1, 4096, 32, 128), k=kv, v=kv, causal=True)


def _large(dtype: str, batch: int, seq: int, heads: int, head_dim: int, causal: bool) -> dict[str, Any]:
    return dict(qkv=shaped(dtype, batch, seq, 3 * heads * head_dim), num_heads=heads, causal=causal)


def _weighted(out: tuple[jax.Array, jax.Array], *arrays: jax.Array) -> jax.Array:
    """Result and log-sum-exp as one array."""
    del arrays
    y, lse = out
    lse = jnp.where(lse > -jnp.inf, lse, 0.0)
    return y * lse.swapaxes(1, 2)[..., None]


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, columns, whole, heads = P("data"), P(None, "model"), P(), P(None, None, "model")
    qkv = normal(rng, 4, 5, 4, 16), *(normal(rng, 4, 7, 2, 16) for _ in range(2))
    arrays = *qkv, normal(rng, 1, 4, 5, 7), random_mask(rng, 4, 7)

    def arguments(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> dict[str, Any]:
        return dict(q=q, k=k, v=v, causal=True, mask=mask, bias=bias, return_lse=True)

    def call(name: str) -> Call:
        return Call(name, ops.attention, arguments, lambda size, dtype: arrays, 4, result=_weighted)

    return (
        Spread(
            call=call("batch"),
            specs=(data, data, data, whole, data),
            result=P("data", None, None, None),
            sums=1,
            kinds=("shard_map",),
        ),
        Spread(
            call=call("heads"),
            specs=(heads, heads, heads, columns, whole),
            result=P(None, None, "model", None),
            sums=0,
            kinds=("explicit",),
        ),
    )


def _visible(
    seq: int,
    kv_seq: int,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Array | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
) -> Array:
    """Which keys every query sees, (B or 1, 1, Sq, Skv)."""
    distance = np.arange(kv_seq - seq, kv_seq)[:, None] - np.arange(kv_seq)
    seen = np.ones((1, 1, seq, kv_seq), bool)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (np.abs(distance) < window)
    if mask is not None:
        seen = seen & (mask != 0)[:, None, None]
    if segment_ids is not None:
        others = segment_ids if kv_segment_ids is None else kv_segment_ids
        seen = seen & (segment_ids[:, :, None] == others[:, None])[:, None]
    return seen


def formula(
    *,
    dtype: str,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sm_scale: Array | float | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    config: Any = None,
    **masks: Any,
) -> Bounded | tuple[Bounded, ...]:
    """softmax(q k sm_scale + bias) v over the keys that a query sees, and the log-sum-exp of the scores."""
    (_, seq, _, head_dim), kv_seq, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    del config
    operand = b.operand(dtype, precision)
    by_head = b.exact(q.transpose(0, 2, 1, 3))
    if isinstance(sm_scale, np.ndarray):  # it goes into the queries, which are rounded again
        by_head, sm_scale = b.rounded(by_head * b.exact(sm_scale), dtype), 1.0
    k, v = (np.repeat(x.transpose(0, 2, 1, 3), group, 1) for x in (k, v))
    scores = b.dot(by_head, b.exact(np.swapaxes(k, -1, -2)), operand=operand, dtype=dtype)
    scores = scores * b.exact(head_dim**-0.5 if sm_scale is None else sm_scale)
    seen = _visible(seq, kv_seq, **masks)
    if bias is not None:
        seen = seen & (bias > -1e30)
        scores = scores + b.exact(np.where(bias > -1e30, bias, 0.0))
    seen = np.broadcast_to(seen, scores.value.shape)
    left = seen.any(-1, keepdims=True)
    scores = b.where(seen, scores, 0.0)
    peak = np.where(left, np.max(np.where(seen, scores.value, -np.inf), -1, keepdims=True), 0.0)
    # Scores stay unscaled up to the exponent, so that both the score and the maximum are rounded there. Weights
    # are relative to the computed weight of the maximum, which is 1: an error that all share does not matter.
    off = scores.error + 4 * b.UNIT * (np.abs(scores.value) + np.abs(peak))
    first = np.argmax(np.where(seen, scores.value, -np.inf), -1)[..., None]
    off = np.where(np.arange(kv_seq) == first, 0.0, off + np.take_along_axis(off, first, -1))
    weights = b.where(seen, b.exp(Bounded(scores.value - peak, off)), 0.0)
    used = b.where(seen, b.rounded(weights, dtype), 0.0)  # as operands of the second product
    sums = b.total(used)
    sums = Bounded(np.where(left, sums.value, 1.0), sums.error)
    out = b.dot(used, b.exact(v), operand=operand, dtype=dtype) / sums
    if dtype != "float32":  # the reference rounds weights after it divides: small ones are off by more
        sizes = np.abs(np.where(np.isfinite(v), v, 0.0))
        out = out.off(b.SMALLEST[dtype] * (1.0 - 1.0 / np.maximum(sums.value, 1.0)) * (seen @ sizes))
    out = b.where(left, b.rounded(out, dtype), 0.0).map(lambda a: a.transpose(0, 2, 1, 3))
    if not return_lse:
        return out
    # The maximum that the kernel has may be off, and the sum is then by as much: the two make up for it.
    lse = peak + np.log(sums.value)
    relative = np.minimum(sums.error / sums.value, 1e30)
    error = np.max(scores.error, -1, keepdims=True) + relative + 8 * b.UNIT * (1 + np.abs(peak) + np.abs(lse))
    return out, b.where(left, Bounded(lse, error), -np.inf).map(lambda a: a[..., 0])


def qkv_formula(*, dtype: str, qkv: Array, num_heads: int, num_kv_heads: int | None = None, **options: Any) -> Any:
    """The same for queries, keys and values in one buffer."""
    kv_heads = num_kv_heads or num_heads
    heads = qkv.reshape(*qkv.shape[:2], num_heads + 2 * kv_heads, -1)
    q, k, v = np.split(heads, (num_heads, num_heads + kv_heads), 2)
    result = formula(dtype=dtype, q=q, k=k, v=v, **options)
    out, *rest = result if isinstance(result, tuple) else (result,)
    out = out.map(lambda a: a.reshape(*a.shape[:2], -1))
    return (out, *rest) if rest else out


def _draw_masks(pick: Pick, batch: int, seq: int, kv_seq: int, heads: int, dtype: str, mosaic: bool) -> Drawn:
    inputs: dict[str, Input] = {}
    options: dict[str, Any] = {}
    if pick.chance(0.6):
        options["causal"] = True
    if pick.chance(0.4):
        options["window"] = int(pick.of((1, 2, 3, 17, 18, 31, 64, 10**12)))
    if pick.chance(0.2):
        options["sm_scale"] = pick.of((0.3, 1.0, 0.01))
    if pick.chance(0.3):
        options["return_lse"] = True
    if pick.chance(0.3):
        inputs["mask"] = Input((batch, kv_seq), pick.of(("bool", "int32")), "mask")
    if pick.chance(0.3):
        shape = (pick.of((1, batch)), pick.of((1, heads)), seq, kv_seq)
        inputs["bias"] = Input(shape, pick.other(dtype), "bias")
    if pick.chance(0.3):
        inputs["segment_ids"] = Input((batch, seq), "int32", "ids")
        if seq != kv_seq:
            inputs["kv_segment_ids"] = Input((batch, kv_seq), "int32", "ids")
    if not mosaic and pick.chance(0.3):
        blocks = dict(block_q=pick.of((16, 32)), block_kv=pick.of((16, 32)))
        options["config"] = Config(**blocks, num_warps=1, num_stages=2)
    elif "sm_scale" not in options and pick.chance(0.1):
        inputs["sm_scale"] = Input((), "float32", "scale")
    return inputs, options


def _draw_heads(pick: Pick, mosaic: bool) -> tuple[int, int, int, int]:
    kv_heads, group = pick.few(1, 2), pick.of((1, 2, 3))
    head_dims = (32, 64, 128) if mosaic else (16, 20, 32, 48, 64, *((80, 128) if ON_GPU else ()))
    return pick.few(1, 2), kv_heads * group, kv_heads, pick.of(head_dims)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    batch, heads, kv_heads, head_dim = _draw_heads(pick, mosaic)
    seq = pick.rows()
    kv_seq = seq if pick.chance(0.6) else pick.size()
    if seq * kv_seq > 2**20:
        batch, heads = 1, kv_heads
    masks, options = _draw_masks(pick, batch, seq, kv_seq, heads, dtype, mosaic)
    kv = Input((batch, kv_seq, kv_heads, head_dim), dtype, limit=_LARGEST)
    inputs = {"q": dataclasses.replace(kv, shape=(batch, seq, heads, head_dim)), "k": kv, "v": kv}
    return inputs | masks, options | pick.precision(dtype)


def _draw_qkv(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    batch, heads, kv_heads, head_dim = _draw_heads(pick, mosaic)
    seq = pick.size()
    masks, options = _draw_masks(pick, batch, seq, seq, heads, dtype, mosaic)
    inputs = {"qkv": Input((batch, seq, (heads + 2 * kv_heads) * head_dim), dtype, limit=_LARGEST)}
    heads_of = {"num_heads": heads} | ({} if heads == kv_heads else {"num_kv_heads": kv_heads})
    return inputs | masks, heads_of | options | pick.precision(dtype)


CASES = (
    Case(
        op=ops.attention,
        products="kernels",
        calls=(
            Call(
                "attention",
                ops.attention,
                _with_all,
                _small,
                4,
                (0, 1, 2, 4, 5, 6),
                symbols={2: "b", 7: "s", 33: "t"},
            ),
        ),
        hopper_calls=(
            Call("attention", ops.attention, _windowed, _hopper, 3),
            Call("attention_masked", ops.attention, _masked, _hopper_masked, 3),
        ),
        large={"attention-grouped": _large_heads},
        empty=(
            Empty(dict(q=zeros(2, 3, 2, 16), k=zeros(2, 0, 2, 16), v=zeros(2, 0, 2, 16)), (2, 3, 2, 16)),
            Empty(dict(q=zeros(2, 0, 2, 16), k=zeros(2, 3, 2, 16), v=zeros(2, 3, 2, 16)), (2, 0, 2, 16)),
        ),
        spread=_spread,
        formula=formula,
        draw=_draw,
        torch="attention",
    ),
    Case(
        op=ops.attention_qkv,
        products="kernels",
        calls=(Call("attention_qkv", ops.attention_qkv, _qkv, _small_qkv, 1, (0, 1)),),
        hopper_calls=(
            Call("attention_qkv", ops.attention_qkv, _qkv, _hopper_qkv, 1),
            Call("attention_resident", ops.attention_qkv, _qkv, _resident, 1, (0, 1)),
        ),
        large={
            "attention-32": lambda dtype: _large(dtype, 64, 128, 12, 32, False),
            "attention-64": lambda dtype: _large(dtype, 8, 1024, 12, 64, True),
            "attention-128": lambda dtype: _large(dtype, 1, 8192, 16, 128, True),
            "attention-256": lambda dtype: _large(dtype, 2, 300, 4, 256, False),
        },
        empty=(Empty(dict(qkv=zeros(2, 0, 96), num_heads=2), (2, 0, 32)),),
        spread=Without("it is `attention` of parts of one array"),
        formula=qkv_formula,
        draw=_draw_qkv,
        torch="attention_qkv",
    ),
)
