"""Attention, the product with its output projection, and layer norm, for few tokens: in two kernels.

Each head's product is one of parts, whose sum the layer norm takes.
"""

from typing import Any

import jax

from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.triton import norm
from pallas_models.kernels.triton.attention import attention
from pallas_models.target import Target

# Of 32 to 128 rows of 384 columns it takes 2 to 9% off MiniLM's forward pass; 160 rows of one sentence add 4%.
_MOST_ROWS = 128


def unsupported(
    qkv: jax.Array,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    residual: jax.Array,
    w: jax.Array,
    *_: jax.Array | None,
    num_heads: int,
    **__: Any,
) -> str | None:
    """Why `attention_matmul_layer_norm` does not serve a call; None if it does."""
    rows, (k, n) = residual.shape[0] * residual.shape[1], w.shape
    if rows > _MOST_ROWS or k != 32 * num_heads or n % 32 or n > 512:
        return (
            f"takes up to {_MOST_ROWS} rows, heads of 32 and up to 512 columns in multiples of 32, not "
            f"{rows}, {num_heads} heads of {k} columns and {n}"
        )
    return None


def prefer(qkv: jax.Array, *_: jax.Array | None, **__: Any) -> bool:
    """Whether it is the fastest way for a call that it serves; float32 was not measured."""
    return qkv.dtype.itemsize == 2


def attention_matmul_layer_norm(
    qkv: jax.Array,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    residual: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array,
    offset: jax.Array,
    *,
    num_heads: int,
    epsilon: float,
    precision: jax.lax.Precision,
    config: None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """layer_norm(attention(qkv) @ w + bias + residual) for qkv (B, S, 3 K) and residual (B, S, N)."""
    del config
    head_dim, n = w.shape[0] // num_heads, w.shape[1]
    form = Form(
        qkv=(qkv,),
        mask=mask,
        segment_ids=segment_ids,
        kv_segment_ids=segment_ids,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        sm_scale=head_dim**-0.5,
        precision=precision,
    )
    parts: Any = attention(form, config=None, target=target, interpret=interpret, w=w)
    out = norm.sum_layer_norm(
        parts.reshape(num_heads, -1, n),
        scale,
        offset,
        residual.reshape(-1, n),
        bias,
        epsilon=epsilon,
        out_dtype=residual.dtype,
        config=None,
        target=target,
        interpret=interpret,
    )
    return out.reshape(residual.shape)
