"""Every op, written with torch.nn and torch.nn.functional only, for float64 tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
}


def tensor(x: Any, dtype: torch.dtype = torch.float64) -> Any:
    """An array as a tensor: floats in `dtype` without further rounding, integers as int64."""
    if isinstance(x, list | dict):
        return jax.tree.map(functools.partial(tensor, dtype=dtype), x)
    if not isinstance(x, jax.Array | np.ndarray):
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        return torch.tensor(np.asarray(x).astype(np.float64), dtype=dtype, device=DEVICE)
    return torch.tensor(np.asarray(x).astype(np.int64), device=DEVICE)


def compute(function: Callable[..., Tensor], *arrays: Any, **options: Any) -> np.ndarray:
    """Calls a reference on arrays; the result in float64."""
    with torch.no_grad():
        out = function(*map(tensor, arrays), **{name: tensor(value) for name, value in options.items()})
    return out.cpu().numpy()


def gradients(function: Callable[..., Tensor], arrays: Sequence[Any], cotangent: Any) -> list[np.ndarray]:
    """Gradients of a reference with respect to every array, by autograd."""
    leaves = [tensor(array).requires_grad_() for array in arrays]
    return [g.cpu().numpy() for g in torch.autograd.grad(function(*leaves), leaves, tensor(cotangent))]


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
    transpose_w: bool = False,
) -> Tensor:
    product = x @ (w.mT if transpose_w else w)
    y = ACTIVATIONS[activation](product if bias is None else product + bias)
    return y if residual is None else y + residual


def mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
) -> Tensor:
    return matmul(matmul(x, w_up, bias_up, activation=activation), w_down, bias_down, residual)


def gated_matmul(
    x: Tensor, w_gate_up: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> Tensor:
    gate, up = (F.linear(x, w_gate_up[:, i].T, None if bias is None else bias[i]) for i in range(2))
    return ACTIVATIONS[activation](gate) * up


def gated_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    residual: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> Tensor:
    y = F.linear(gated_matmul(x, w_gate_up, activation=activation), w_down.T)
    return y if residual is None else y + residual


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    labels: Tensor,
    transpose_w: bool = False,
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str | None = "mean",
) -> Tensor:
    y = F.linear(x, w if transpose_w else w.T, bias)
    if logit_softcap is not None:
        y = logit_softcap * torch.tanh(y / logit_softcap)
    loss = F.cross_entropy(y.mT if y.ndim > 2 else y, labels, reduction="none", label_smoothing=label_smoothing)
    loss = loss + z_loss * torch.logsumexp(y, -1) ** 2
    weights = torch.ones_like(loss) if weights is None else weights
    loss = loss * weights
    match reduction:
        case "mean":
            return loss.sum() / weights.sum()
        case "sum":
            return loss.sum()
        case _:
            return loss


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None = None, *, epsilon: float = 1e-5
) -> Tensor:
    return F.layer_norm(x if residual is None else x + residual, scale.shape, scale, bias, epsilon)


def rms_norm(
    x: Tensor,
    scale: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float = 1e-6,
    return_residual: bool = False,
) -> Any:
    total = x if residual is None else x + residual
    out = F.rms_norm(total, scale.shape, scale, epsilon)
    return (out, total) if return_residual else out


def matmul_layer_norm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
) -> Tensor:
    return layer_norm(matmul(x, w, bias, residual), scale, offset, epsilon=epsilon)


def gated_projection(
    x: Tensor, gate: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    return matmul(x * torch.sigmoid(gate), w, bias, residual)


def layer_norm_projections(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    w_first: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
) -> tuple[Tensor, ...]:
    y = layer_norm(x, scale, offset, epsilon=epsilon)
    outs = list(torch.einsum("...c,cgn->g...n", y, w).unbind())
    if bias is not None:
        outs = [out + b for out, b in zip(outs, bias, strict=True)]
    if w_first is not None:
        outs.append(torch.einsum("...c,cf->f...", y, w_first))
    return *outs, x


def layer_norm_gated_mlp(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    residual: bool = False,
    activation: str | None = "silu",
    epsilon: float = 1e-5,
) -> Tensor:
    y = layer_norm(x, scale, offset, epsilon=epsilon)
    return gated_mlp(y, w_gate_up, w_down, x if residual else None, activation=activation)


def post_norm_mlp(
    y: Tensor,
    x: Tensor,
    w_out: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    scale_out: Tensor,
    offset_out: Tensor,
    scale: Tensor,
    offset: Tensor,
    bias_out: Tensor | None = None,
    bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    activation: str = "gelu",
    epsilon: float = 1e-12,
    attention: Mapping[str, Any] | None = None,
) -> Tensor:
    y = y if attention is None else attention_qkv(y, **attention)
    z = matmul_layer_norm(y, w_out, scale_out, offset_out, bias_out, x, epsilon=epsilon)
    hidden = matmul(z, w_up, bias_up, activation=activation)
    return matmul_layer_norm(hidden, w_down, scale, offset, bias_down, z, epsilon=epsilon)


def _visible(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
) -> Tensor:
    """Which keys every query sees, with all masks of `attention` written out: (B, 1, Sq, Skv)."""
    (batch, seq), kv_seq = q.shape[:2], k.shape[1]
    visible = torch.ones(batch, 1, seq, kv_seq, dtype=torch.bool, device=q.device)
    if mask is not None:
        visible &= (mask != 0)[:, None, None]
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        visible &= (segment_ids[:, :, None] == kv_segment_ids[:, None])[:, None]
    if causal:
        visible = visible.tril(kv_seq - seq)
    if window is not None:
        visible = visible.triu(kv_seq - seq - window + 1).tril(kv_seq - seq + window - 1)
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    sm_scale: float | None = None,
) -> Tensor:
    visible = _visible(q, k, causal, window, mask, segment_ids, kv_segment_ids)
    # A row with no key at all is computed with every key, and then its result is zero.
    empty = ~visible.any(-1, keepdim=True)
    scores = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~(visible | empty), -torch.inf)
    if bias is not None:
        scores = scores + bias
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=scores, scale=sm_scale, enable_gqa=True)
    return out.masked_fill(empty, 0.0).transpose(1, 2)


def attention_lse(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    sm_scale: float | None = None,
) -> Tensor:
    visible = _visible(q, k, causal, window, mask, segment_ids, kv_segment_ids)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~visible, -torch.inf).logsumexp(-1)


def attention_qkv(qkv: Tensor, *, num_heads: int, num_kv_heads: int | None = None, **options: Any) -> Tensor:
    num_kv_heads = num_kv_heads or num_heads
    heads = qkv.view(*qkv.shape[:2], num_heads + 2 * num_kv_heads, -1)
    return attention(*heads.split((num_heads, num_kv_heads, num_kv_heads), 2), **options).flatten(2)


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    direction: str,
    scale: float | None = None,
) -> Tensor:
    """Algorithms 13 and 14 of AlphaFold 2, term by term."""
    starting = direction == "starting"
    third = "bikhd" if starting else "bkjhd"  # the pair of a key
    scores = torch.einsum(f"bijhd,{third}->bhijk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:  # of pair (j, k), or of (k, i)
        scores = scores + (bias[:, :, None] if starting else bias.mT[:, :, :, None])
    if mask is not None:
        kept = mask[:, None, :, None] if starting else mask.mT[:, None, None]
        scores = scores.masked_fill(kept == 0, -torch.inf)
    weights = torch.where((scores == -torch.inf).all(-1, keepdim=True), 0.0, scores).softmax(-1)
    return torch.einsum(f"bhijk,{third}->bijhd", weights.masked_fill(scores == -torch.inf, 0.0), v)


def post_norm_layers(
    x: Tensor,
    layers: Sequence[Mapping[str, Tensor]],
    *,
    num_heads: int,
    activation: str = "gelu",
    epsilon: float = 1e-12,
    **masks: Tensor | None,
) -> Tensor:
    for layer in layers:
        rest = dict(layer)
        qkv = matmul(x, rest.pop("w_qkv"), rest.pop("bias_qkv"))
        y = attention_qkv(qkv, num_heads=num_heads, **masks)
        x = post_norm_mlp(y, x, **rest, activation=activation, epsilon=epsilon)
    return x


def embed_tokens(
    ids: Tensor,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    epsilon: float = 1e-12,
) -> Tensor:
    types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids
    positions = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
    total = F.embedding(ids, word) + F.embedding(types, token_type) + F.embedding(positions, position)
    return F.layer_norm(total, scale.shape, scale, bias, epsilon)


def softmax(x: Tensor, axis: int = -1, *, where: Tensor | None = None, scale: float | None = None) -> Tensor:
    y = x if scale is None else x * scale
    if where is None:
        return F.softmax(y, axis)
    masked = (where == 0).expand(y.shape)
    # A row with nothing left is computed with everything, and then its result is zero.
    empty = masked.all(axis, keepdim=True)
    return F.softmax(y.masked_fill(masked & ~empty, -torch.inf), axis).masked_fill(masked, 0.0)


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float = 1e-6,
) -> Tensor:
    """Rotates pairs of elements as complex numbers."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, num_heads + 2 * num_kv_heads, -1).split(
        (num_heads, num_kv_heads, num_kv_heads), 2
    )
    turn = torch.complex(cos, sin)[..., None, :]

    def rotate(x: Tensor, scale: Tensor | None) -> Tensor:
        y = x if scale is None else F.rms_norm(x, scale.shape, scale, epsilon)
        z = turn * torch.complex(*y.chunk(2, -1))
        return torch.cat([z.real, z.imag], -1)

    return torch.cat([rotate(q, q_scale), rotate(k, k_scale), v], 2).view(qkv.shape)


def mean_pool(x: Tensor, mask: Tensor, *, normalize: bool = True) -> Tensor:
    total = x.masked_fill((mask == 0)[:, :, None], 0.0).sum(1)
    mean = total / mask.sum(1, keepdim=True).clamp(min=1)
    return F.normalize(mean, dim=-1) if normalize else mean
