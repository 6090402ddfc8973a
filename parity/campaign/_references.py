"""Every op in float64, with the bound that an implementation in float32 and `dtype` has to keep.

A reference takes the arrays of a call in float64 and its options, under the names that the op gives them, and
`dtype`, that of the operands. Where the kernels round on the way, as their docstrings say, so does it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parity.support import bounded as b
from parity.support.bounded import HALF_ULP, Array, Bounded, exact

TF32 = 2.0**-10  # operands cut off to 10 + 1 bits, where `precision` allows it


def _operand(dtype: str, precision: str | None) -> float:
    return TF32 if dtype == "float32" and precision is not None else 0.0


def _plus(y: Bounded, *terms: Array | None) -> Bounded:
    for term in terms:
        if term is not None:
            y = y + exact(term)
    return y


def _product(
    x: Array, w: Array, *terms: Array | None, dtype: str, precision: str | None, acc_dtype: str = "float32"
) -> Bounded:
    y = b.dot(exact(x), exact(w), *terms, operand=_operand(dtype, precision), dtype=dtype)
    if acc_dtype == "float16":  # every partial sum is rounded; where one leaves float16, so may the result
        size = x.shape[-1] * (np.abs(x) @ np.abs(w))
        y = y.off(
            np.where(size > 65504, np.inf, HALF_ULP["float16"] * 2 * size + x.shape[-1] * b.SMALLEST["float16"])
        )
    return y


def matmul(
    *,
    dtype: str,
    x: Array,
    w: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    transpose_w: bool = False,
    activation: str | None = None,
    acc_dtype: str = "float32",
    precision: str | None = None,
    out_dtype: str | None = None,
    **_: Any,
) -> Bounded:
    w, form = np.swapaxes(w, -1, -2) if transpose_w else w, dict(precision=precision, acc_dtype=acc_dtype)
    if activation is None:
        return b.rounded(_product(x, w, bias, residual, dtype=dtype, **form), out_dtype or dtype)
    y = b.activation(activation, _product(x, w, bias, dtype=dtype, **form), out_dtype or dtype)
    return b.rounded(_plus(y, residual), out_dtype or dtype)


def mlp(
    *,
    dtype: str,
    x: Array,
    w_up: Array,
    w_down: Array,
    bias_up: Array | None = None,
    bias_down: Array | None = None,
    residual: Array | None = None,
    activation: str = "gelu_tanh",
    precision: str | None = None,
    **_: Any,
) -> Bounded:
    form: dict[str, Any] = dict(dtype=dtype, precision=precision)
    hidden = b.held(matmul(x=x, w=w_up, bias=bias_up, activation=activation, **form), dtype)
    y = b.dot(hidden, exact(w_down), bias_down, residual, operand=_operand(dtype, precision), dtype=dtype)
    return b.rounded(y, dtype)


def gated_matmul(
    *,
    dtype: str,
    x: Array,
    w_gate_up: Array,
    bias: Array | None = None,
    activation: str | None = "silu",
    precision: str | None = None,
    out_dtype: str | None = None,
    **_: Any,
) -> Bounded:
    gate, up = (
        _product(x, w_gate_up[:, i], None if bias is None else bias[i], dtype=dtype, precision=precision)
        for i in range(2)
    )
    return b.rounded(b.activation(activation, gate, out_dtype or dtype) * up, out_dtype or dtype)


def gated_mlp(
    *,
    dtype: str,
    x: Array,
    w_gate_up: Array,
    w_down: Array,
    residual: Array | None = None,
    activation: str | None = "silu",
    precision: str | None = None,
    **_: Any,
) -> Bounded:
    hidden = gated_matmul(dtype=dtype, x=x, w_gate_up=w_gate_up, activation=activation, precision=precision)
    y = b.dot(b.held(hidden, dtype), exact(w_down), residual, operand=_operand(dtype, precision), dtype=dtype)
    return b.rounded(y, dtype)


def matmul_layer_norm(
    *,
    dtype: str,
    x: Array,
    w: Array,
    scale: Array,
    offset: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    epsilon: float,
    precision: str | None = None,
    **_: Any,
) -> Bounded:
    y = _product(x, w, bias, residual, dtype=dtype, precision=precision)
    y = b.normalised(y, epsilon, subtract_mean=True) * exact(scale)
    return b.rounded(_plus(y, offset), dtype)


def post_norm_mlp(
    *,
    dtype: str,
    y: Array,
    x: Array,
    w_out: Array,
    w_up: Array,
    w_down: Array,
    scale_out: Array,
    offset_out: Array,
    scale: Array,
    offset: Array,
    bias_out: Array | None = None,
    bias_up: Array | None = None,
    bias_down: Array | None = None,
    activation: str,
    epsilon: float,
    precision: str | None = None,
    **_: Any,
) -> Bounded:
    options: dict[str, Any] = dict(dtype=dtype, precision=precision)
    first = dict(x=y, w=w_out, scale=scale_out, offset=offset_out, bias=bias_out, residual=x)
    z = b.held(matmul_layer_norm(**first, epsilon=epsilon, **options), dtype)
    product = functools.partial(b.dot, operand=_operand(dtype, precision), dtype=dtype)
    hidden = b.rounded(b.activation(activation, product(z, exact(w_up), bias_up), dtype), dtype)
    total = product(b.held(hidden, dtype), exact(w_down), bias_down) + z
    total = total.off(w_down.shape[0] * b.UNIT * np.abs(z.value))  # a compiler may begin the sum with z
    normalised = b.normalised(total, epsilon, subtract_mean=True) * exact(scale)
    return b.rounded(_plus(normalised, offset), dtype)


def _norm(
    dtype: str,
    x: Array,
    scale: Array,
    bias: Array | None,
    residual: Array | None,
    epsilon: float,
    return_residual: bool,
) -> Bounded | tuple[Bounded, ...]:
    y = _plus(exact(x), residual)
    out = b.normalised(y, epsilon, subtract_mean=bias is not None) * exact(scale)
    out = b.rounded(_plus(out, bias), dtype)
    return (out, b.rounded(y, dtype)) if return_residual else out


def layer_norm(
    *,
    dtype: str,
    x: Array,
    scale: Array,
    bias: Array,
    residual: Array | None = None,
    epsilon: float,
    return_residual: bool = False,
    **_: Any,
) -> Bounded | tuple[Bounded, ...]:
    return _norm(dtype, x, scale, bias, residual, epsilon, return_residual)


def rms_norm(
    *,
    dtype: str,
    x: Array,
    scale: Array,
    residual: Array | None = None,
    epsilon: float,
    return_residual: bool = False,
    **_: Any,
) -> Bounded | tuple[Bounded, ...]:
    return _norm(dtype, x, scale, None, residual, epsilon, return_residual)


def softmax(
    *,
    dtype: str,
    x: Array,
    where: Array | None = None,
    axis: int = -1,
    scale: Array | float | None = None,
    **_: Any,
) -> Bounded:
    kept = np.broadcast_to(np.ones_like(x, bool) if where is None else where != 0, x.shape)
    x, kept = np.moveaxis(x, axis, -1), np.moveaxis(kept, axis, -1)
    y = exact(np.where(kept, x, 0.0))
    if scale is not None:
        y = y * exact(np.float32(scale))
        y = Bounded(y.value, np.where(np.isfinite(y.value), y.error, 0.0))
    left = kept.any(-1, keepdims=True)
    peak = np.where(left, np.max(np.where(kept, y.value, -np.inf), -1, keepdims=True), 0.0)
    finite = np.isfinite(y.value)
    distance = y.value - peak
    # The maximum is one of the values: what scales it is rounded once for both.
    e = b.exp(Bounded(distance, np.where(finite, y.error + b.UNIT * np.abs(np.where(finite, distance, 0.0)), 0.0)))
    e = b.where(kept, e, 0.0)
    sums = b.total(e)
    out = e / Bounded(np.where(left, sums.value, 1.0), sums.error)
    out = b.where(kept, b.rounded(out, dtype), 0.0)
    return out.map(lambda a: np.moveaxis(a, -1, axis))


def visible(
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


def attention(
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
    (_, seq, _, head_dim), kv_seq, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    del config
    operand = _operand(dtype, precision)
    by_head = exact(q.transpose(0, 2, 1, 3))
    if isinstance(sm_scale, np.ndarray):  # it goes into the queries, which are rounded again
        by_head, sm_scale = b.rounded(by_head * exact(sm_scale), dtype), 1.0
    k, v = (np.repeat(x.transpose(0, 2, 1, 3), group, 1) for x in (k, v))
    scores = b.dot(by_head, exact(np.swapaxes(k, -1, -2)), operand=operand, dtype=dtype)
    scores = scores * exact(head_dim**-0.5 if sm_scale is None else sm_scale)
    seen = visible(seq, kv_seq, **masks)
    if bias is not None:
        seen = seen & (bias > -1e30)
        scores = scores + exact(np.where(bias > -1e30, bias, 0.0))
    seen = np.broadcast_to(seen, scores.value.shape)
    left = seen.any(-1, keepdims=True)
    scores = b.where(seen, scores, 0.0)
    peak = np.where(left, np.max(np.where(seen, scores.value, -np.inf), -1, keepdims=True), 0.0)
    # Scores stay unscaled up to the exponent, so that both the score and the maximum are rounded there. Weights
    # are relative to the computed one of the maximum, which is 1: what they have in common does not matter.
    off = scores.error + 4 * b.UNIT * (np.abs(scores.value) + np.abs(peak))
    first = np.argmax(np.where(seen, scores.value, -np.inf), -1)[..., None]
    off = np.where(np.arange(kv_seq) == first, 0.0, off + np.take_along_axis(off, first, -1))
    weights = b.where(seen, b.exp(Bounded(scores.value - peak, off)), 0.0)
    used = b.where(seen, b.rounded(weights, dtype), 0.0)  # as operands of the second product
    sums = b.total(used)
    sums = Bounded(np.where(left, sums.value, 1.0), sums.error)
    out = b.dot(used, exact(v), operand=operand, dtype=dtype) / sums
    out = b.where(left, b.rounded(out, dtype), 0.0).map(lambda a: a.transpose(0, 2, 1, 3))
    if not return_lse:
        return out
    # The maximum that the kernel has may be off, and the sum is then by as much: the two make up for it.
    lse = peak + np.log(sums.value)
    relative = np.minimum(sums.error / sums.value, 1e30)
    error = np.max(scores.error, -1, keepdims=True) + relative + 8 * b.UNIT * (1 + np.abs(peak) + np.abs(lse))
    return out, b.where(left, Bounded(lse, error), -np.inf).map(lambda a: a[..., 0])


def attention_qkv(
    *, dtype: str, qkv: Array, num_heads: int, num_kv_heads: int | None = None, **options: Any
) -> Bounded | tuple[Bounded, ...]:
    kv_heads = num_kv_heads or num_heads
    heads = qkv.reshape(*qkv.shape[:2], num_heads + 2 * kv_heads, -1)
    q, k, v = np.split(heads, (num_heads, num_heads + kv_heads), 2)
    result = attention(dtype=dtype, q=q, k=k, v=v, **options)
    out, *rest = result if isinstance(result, tuple) else (result,)
    out = out.map(lambda a: a.reshape(*a.shape[:2], -1))
    return (out, *rest) if rest else out


def embed_tokens(
    *,
    dtype: str,
    ids: Array,
    word: Array,
    position: Array,
    token_type: Array,
    scale: Array,
    bias: Array,
    token_type_ids: Array | None = None,
    position_ids: Array | None = None,
    epsilon: float,
    **_: Any,
) -> Bounded:
    types = np.zeros_like(ids) if token_type_ids is None else token_type_ids
    positions = position[: ids.shape[1]] if position_ids is None else position[position_ids.astype(int)]
    y = exact(word[ids.astype(int)]) + exact(positions) + exact(token_type[types.astype(int)])
    # The sum may be made in another order.
    size = np.abs(word[ids.astype(int)]) + np.abs(positions) + np.abs(token_type[types.astype(int)])
    y = y.off(2 * b.UNIT * size)
    return b.rounded(_plus(b.normalised(y, epsilon, subtract_mean=True) * exact(scale), bias), dtype)


def rotary(
    *,
    dtype: str,
    qkv: Array,
    cos: Array,
    sin: Array,
    num_heads: int,
    num_kv_heads: int,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    epsilon: float = 1e-6,
    **_: Any,
) -> Bounded:
    heads = qkv.reshape(*qkv.shape[:2], num_heads + 2 * num_kv_heads, -1)
    q, k, v = np.split(heads, (num_heads, num_heads + num_kv_heads), 2)
    half = q.shape[-1] // 2
    turn_cos, turn_sin = (exact(x[..., None, :] if x.ndim == 3 else x[None, :, None]) for x in (cos, sin))

    def rotate(x: Array, scale: Array | None) -> Bounded:
        y = exact(x)
        if scale is not None:
            y = b.normalised(y, epsilon, subtract_mean=False) * exact(scale)
        first, second = y.map(lambda a: a[..., :half]), y.map(lambda a: a[..., half:])
        parts = first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin
        # One of the two products may be kept exactly, the sum is rounded in relation to both.
        return b.rounded(_joined(*parts), dtype)

    out = _joined(rotate(q, q_scale), rotate(k, k_scale), exact(v), axis=2)
    return out.map(lambda a: a.reshape(qkv.shape))


def _joined(*parts: Bounded, axis: int = -1) -> Bounded:
    return Bounded(
        np.concatenate([part.value for part in parts], axis), np.concatenate([part.error for part in parts], axis)
    )


def mean_pool(
    *, dtype: str, x: Array, mask: Array, normalize: bool = True, epsilon: float = 1e-12, **_: Any
) -> Bounded:
    kept = exact(np.where((mask != 0)[:, :, None], x, 0.0)).map(lambda a: np.swapaxes(a, 1, 2))
    tokens = np.maximum(np.sum(mask != 0, 1), 1)
    pooled = (b.total(kept) / exact(tokens[:, None, None])).map(lambda a: a[..., 0])
    if not normalize:
        return pooled
    square = b.total(pooled * pooled)
    # max(|m|, epsilon) in float32, in which squares below TINY are 0
    bounded = Bounded(np.maximum(square.value, max(epsilon, math.sqrt(b.TINY)) ** 2), square.error)
    return pooled * b.rsqrt(bounded)


def segment_mean_pool(*, dtype: str, x: Array, segment_ids: Array, num_segments: int, **options: Any) -> Bounded:
    rows, ids = x.reshape(1, -1, x.shape[-1]), segment_ids.reshape(1, -1)
    pooled = (mean_pool(dtype=dtype, x=rows, mask=ids == i, **options) for i in range(num_segments))
    return _joined(*pooled, axis=0)


def triangle_update(
    *,
    dtype: str,
    x: Array,
    norm_scale: Array,
    norm_bias: Array,
    w_in: Array,
    out_norm_scale: Array,
    out_norm_bias: Array,
    w_gate: Array,
    w_out: Array,
    direction: str,
    mask: Array | None = None,
    b_in: Array | None = None,
    b_gate: Array | None = None,
    b_out: Array | None = None,
    gate_after: bool = False,
    epsilon: float = 1e-5,
    compute_dtype: str = "float16",
    out_dtype: str | None = None,
    **_: Any,
) -> Bounded:
    half_ulp = 0.0 if compute_dtype == "float32" else HALF_ULP[compute_dtype]

    def operand(y: Bounded, scale: Array, bias: Array) -> Bounded:
        """The operand and, as the scale may be in the weights instead, their rounding in relation to its parts."""
        parts = np.abs(y.value * scale) + np.abs(bias)
        return b.held(
            b.rounded(_plus(y * exact(scale), bias), compute_dtype).off(2 * half_ulp * parts), compute_dtype
        )

    def product(y: Bounded, w: Array, bias: Array | None) -> Bounded:
        return b.dot(y, exact(w).off(half_ulp * np.abs(w)), bias, dtype=compute_dtype)

    def sigmoid(y: Bounded) -> Bounded:  # half of 1 + tanh, which has 11 bits where operands have as many or fewer
        return b.activation("sigmoid", y).off(0.0 if compute_dtype == "float32" else 2.0**-12)

    if mask is not None:  # what a masked position holds reaches its own result alone, which is compared elsewhere
        unknown = ~np.isfinite(x).all(-1, keepdims=True)
        x = np.where(unknown, 0.0, x)
    z = operand(b.normalised(exact(x), epsilon, subtract_mean=True), norm_scale, norm_bias)
    p = [product(z, w_in[:, i], None if b_in is None else b_in[i]) for i in range(4)]

    def side(values: Bounded, gate: Bounded) -> Bounded:
        y = values * sigmoid(gate)
        if mask is not None:
            y = b.where((mask != 0)[..., None], y * exact(mask[..., None]), 0.0)
        y = b.held(b.rounded(y, compute_dtype), compute_dtype)
        if mask is not None:
            y = b.where((mask != 0)[..., None], y, 0.0)
        # (..., H, i, k), so that y[i, j] is the sum over k of left[i, k] right[j, k]
        return y.map(lambda a: np.moveaxis(a if direction == "outgoing" else np.swapaxes(a, -2, -3), -1, -3))

    left, right = side(p[0], p[1]), side(p[2], p[3])
    y = b.dot(left, right.map(lambda a: np.swapaxes(a, -1, -2)), dtype=compute_dtype).map(
        lambda a: np.moveaxis(a, -3, -1)
    )
    # float16 holds the sums by a power of two, whose choice takes up to 2 bits of what is smallest
    y = b.rounded(y, compute_dtype)
    if compute_dtype == "float16":
        y = y.off(4 * math.sqrt(x.shape[-2]) * b.SMALLEST["float16"])
    y = b.normalised(y, epsilon, subtract_mean=True)
    gate = b.rounded(sigmoid(product(z, w_gate, b_gate)), compute_dtype)
    if gate_after:
        out = product(operand(y, out_norm_scale, out_norm_bias), w_out, b_out) * gate
    else:
        parts = (np.abs(y.value * out_norm_scale) + np.abs(out_norm_bias)) * gate.value
        gated = b.rounded(_plus(y * exact(out_norm_scale), out_norm_bias) * gate, compute_dtype)
        out = product(gated.off(2 * half_ulp * parts), w_out, b_out)
    out = b.rounded(out, out_dtype or dtype)
    if mask is not None:
        out = Bounded(out.value, np.where(unknown, np.inf, out.error))
    return out


def linear_cross_entropy(
    *,
    dtype: str,
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None = None,
    weights: Array | None = None,
    transpose_w: bool = False,
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str | None = "mean",
    precision: str | None = None,
) -> Bounded:
    given = np.ones(labels.shape) if weights is None else weights
    counts = given != 0
    x = np.where(counts[..., None], x, 0.0)
    products = _product(x, w.T if transpose_w else w, dtype=dtype, precision=precision)
    # The product may be rounded before the bias is added, and the sum again.
    y = b.held(_plus(b.rounded(b.rounded(products, dtype), dtype), bias), dtype)
    y = b.rounded(y, dtype) if bias is not None else y
    if logit_softcap is not None:
        capped = logit_softcap * np.tanh(y.value / logit_softcap)
        y = Bounded(capped, y.error + 8 * b.UNIT * logit_softcap)
    size = y.value.shape[-1]
    peak = np.max(y.value, -1, keepdims=True)
    lse = peak + np.log(np.sum(np.exp(y.value - peak), -1, keepdims=True))
    # No logit moves it by more than it moves itself; the sum has terms of one sign.
    off = np.max(y.error, -1, keepdims=True) + b.UNIT * (size + 8 + 4 * np.abs(peak) + np.abs(lse))
    total = Bounded(lse, off)
    known = np.where(counts, labels, 0).astype(int)[..., None]
    label = y.map(lambda a: np.take_along_axis(a, known, -1))
    loss = total - label * exact(1.0 - label_smoothing) - b.mean(y) * exact(label_smoothing)
    loss = (loss + total * total * exact(z_loss)).map(lambda a: a[..., 0])
    weighted = b.where(counts, loss * exact(given), 0.0)
    if reduction is None:
        return weighted
    summed = b.total(weighted.map(np.ravel)).map(lambda a: a[0])
    divisor = np.sum(given)
    return (
        summed
        if reduction == "sum" or divisor == 0
        else summed / b.total(exact(np.ravel(given))).map(lambda a: a[0])
    )


REFERENCES: dict[str, Callable[..., Bounded | tuple[Bounded, ...]]] = {
    function.__name__: function
    for function in (
        matmul,
        mlp,
        gated_matmul,
        gated_mlp,
        matmul_layer_norm,
        post_norm_mlp,
        layer_norm,
        rms_norm,
        softmax,
        attention,
        attention_qkv,
        embed_tokens,
        rotary,
        mean_pool,
        segment_mean_pool,
        triangle_update,
        linear_cross_entropy,
    )
}
