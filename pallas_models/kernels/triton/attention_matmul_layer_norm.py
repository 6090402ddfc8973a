"""Attention, its output projection, and layer norm, for few tokens: in two kernels.

The first kernel multiplies the result of each head by the rows of the projection that belong to it. The second one
adds up these products, one a head, and normalises their sum.
"""

from typing import Any

import jax

from pallas_models.kernels.forms.attention_matmul_layer_norm import Form
from pallas_models.kernels.triton import norm
from pallas_models.kernels.triton.attention import attention
from pallas_models.target import Target

# Of 32 to 128 rows of 384 columns it takes 2 to 9% off MiniLM's forward pass; 160 rows of one sentence add 4%.
_MOST_ROWS = 128


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `attention_matmul_layer_norm` does not serve a call; None if it does."""
    del target
    rows, (k, n) = form.residual.shape[0] * form.residual.shape[1], form.w.shape
    if form.mask is not None and form.segment_ids is not None:
        return "takes a mask or segment ids, not both"
    if rows > _MOST_ROWS or k != 32 * form.num_heads or n % 32 or n > 512:
        return (
            f"takes up to {_MOST_ROWS} rows, heads of 32 and up to 512 columns in multiples of 32, not "
            f"{rows}, {form.num_heads} heads of {k} columns and {n}"
        )
    return None


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the fastest way for a call that it serves; float32 was not measured."""
    del target
    return bool(form.qkv.dtype.itemsize == 2)


def attention_matmul_layer_norm(
    form: Form[jax.Array], *, config: None, target: Target, interpret: bool
) -> jax.Array:
    """The call in one kernel for attention with each head's product, and one for their sum and its norm."""
    parts: Any = attention(form.attention, config=config, target=target, interpret=interpret, w=form.w)
    out = norm.sum_layer_norm(
        parts.reshape(form.num_heads, -1, form.w.shape[1]),
        form.scale,
        form.offset,
        form.residual.reshape(-1, form.w.shape[1]),
        form.bias,
        epsilon=form.epsilon,
        out_dtype=form.residual.dtype,
        config=config,
        target=target,
        interpret=interpret,
    )
    return out.reshape(form.residual.shape)
