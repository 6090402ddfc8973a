"""Attention with its output projection and a layer norm, which `attention_post_norm_mlp` begins with."""

from __future__ import annotations

from typing import Any

import jax

from pallas_models._implementation import Name
from pallas_models.dispatch.records import Kernel, Op
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.attention_matmul_layer_norm import Form
from pallas_models.kernels.triton import attention_matmul_layer_norm as triton
from pallas_models.ops.attention import attention_qkv
from pallas_models.ops.matmul_layer_norm import matmul_layer_norm
from pallas_models.target import AMPERE_ON


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """Attention, and a product with norm."""
    options: dict[str, Any] = dict(precision=form.precision, implementation=names or None)
    masks: dict[str, Any] = dict(mask=form.mask, segment_ids=form.segment_ids)
    y = attention_qkv(form.qkv, num_heads=form.num_heads, **masks, **options)
    norm: dict[str, Any] = dict(epsilon=form.epsilon) | options
    return matmul_layer_norm(y, form.w, form.scale, form.offset, bias=form.bias, residual=form.residual, **norm)


OP: Op[Form[Any]] = Op(
    name="attention_matmul_layer_norm",
    kernels=(
        Kernel(
            backend="triton",
            architectures=AMPERE_ON,
            call=triton.attention_matmul_layer_norm,
            config=None,
            refuses=triton.unsupported,
            preferred=triton.prefer,
        ),
    ),
    stands_for=_apart,
    sharding=Sharding(equation="b S Q, b S, b S, b S N, K N, N, N, N -> b S N"),
)
