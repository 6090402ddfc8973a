"""Multi-head attention over a fused QKV buffer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.triton import attention as triton
from pallas_models.ops import _checks
from pallas_models.ops._dispatch import Implementation, run


def attention(
    qkv: jax.Array,
    *,
    num_heads: int,
    mask: jax.Array | None = None,
    sm_scale: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    config: triton.Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `softmax(q k^T * sm_scale) v` per head, from and to the layouts of the projections.

    The heads are read in place from the fused buffer and written to the merged layout; nothing is split,
    transposed or merged. Softmax runs online over blocks of keys in float32
    ([FlashAttention](https://arxiv.org/abs/2205.14135)), so any length works.

    Args:
      qkv: (B, S, 3 * num_heads * head_dim), float16, bfloat16 or float32: the queries of all heads, then
        the keys, then the values. head_dim is a multiple of 16 up to 256.
      num_heads: number of heads.
      mask: (B, S), bool or integer, 1 for a key that takes part and 0 for padding (holes allowed), or
        None. A masked key has exactly zero weight; where no key is left the result is zero.
      sm_scale: factor on the scores; 1 / sqrt(head_dim) when None.
      precision: of float32 products, as in `matmul`.
      config: block sizes of the Triton kernel; chosen from the shape when None.
      implementation: `"triton"`, `"xla"`, `"interpret"`, or None for the best available.

    Returns:
      (B, S, num_heads * head_dim) in the dtype of `qkv`.

    Raises:
      TypeError: `qkv` is not floating point or `mask` not bool or integer.
      ValueError: shapes do not fit, or a concrete `mask` holds anything but 0 and 1.
      NotImplementedError: head_dim is not a multiple of 16 or over 256.
    """
    _checks.check_float("qkv", qkv)
    _checks.check_rank("qkv", qkv, 3, "(B, S, 3 * num_heads * head_dim)")
    if num_heads < 1 or qkv.shape[-1] % (3 * num_heads):
        raise ValueError(f"qkv has shape {qkv.shape}; expected its width to be 3 * {num_heads=} * head_dim")
    head_dim = qkv.shape[-1] // (3 * num_heads)
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"{head_dim=} is not supported; expected a multiple of 16 up to 256")
    if mask is not None:
        _checks.check_mask("mask", mask, qkv.shape[:2], "(B, S)")
    static: dict[str, Any] = dict(
        num_heads=num_heads,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        precision=_checks.as_precision(precision),
    )
    return run(
        implementation,
        functools.partial(triton.attention, config=config, **static),
        functools.partial(reference, **static),
        qkv,
        None if mask is None else mask.astype(jnp.int32),
    )


def reference(
    qkv: jax.Array,
    mask: jax.Array | None,
    *,
    num_heads: int,
    sm_scale: float,
    precision: jax.lax.Precision,
) -> jax.Array:
    """The same in plain XLA."""
    batch, seq, width = qkv.shape
    heads = qkv.reshape(batch, seq, 3, num_heads, width // (3 * num_heads))
    q, k, v = jnp.unstack(heads, axis=2)  # (B, S, heads, head_dim)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores *= sm_scale
    where = None if mask is None else (mask != 0)[:, None, None, :]
    # With no key left the softmax over an empty set is 0, as the kernel has it, and its gradient too.
    weights = jax.nn.softmax(scores, axis=-1, where=where)
    if where is not None:
        weights = jnp.where(jnp.any(where, axis=-1, keepdims=True), weights, 0.0)
    out = jnp.einsum(
        "bhqk,bkhd->bqhd",
        weights.astype(qkv.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.astype(qkv.dtype).reshape(batch, seq, width // 3)
