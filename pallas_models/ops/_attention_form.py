"""The form of a call of attention, from arguments that are checked here."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models.kernels.common.scores import MASKING_BIAS
from pallas_models.kernels.forms.attention import Form
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array


def merged_heads(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Checks queries, keys and values of `attention`, and gives them as (B, S, heads * D)."""
    for name, x, length, heads in (("q", q, "Sq", "Hq"), ("k", k, "Skv", "Hkv"), ("v", v, "Skv", "Hkv")):
        _checks.check_float(name, x)
        _checks.check_rank(name, x, 4, f"(B, {length}, {heads}, D)")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and q has dtype {q.dtype}; expected the same")
    (batch, *_, head_dim), (kv_seq, num_kv_heads) = q.shape, k.shape[1:3]
    _checks.check_shape("k", k, (batch, kv_seq, num_kv_heads, head_dim), "(B, Skv, Hkv, D) with B and D of q")
    _checks.check_shape("v", v, k.shape, "the shape of k")
    return tuple(x.reshape(*x.shape[:2], x.shape[2] * head_dim) for x in (q, k, v))


def form_of(
    qkv: tuple[Array, ...],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool = False,
    window: int | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    sm_scale: float | Array | None = None,
    return_lse: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Form[jax.Array]:
    """The call with these arguments of `attention`, whose queries, keys and values are as a form has them."""
    (batch, seq), kv_seq = qkv[0].shape[:2], qkv[-1].shape[1]
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} is not a positive multiple of {num_kv_heads=}")
    if head_dim < 1:
        raise ValueError(f"{head_dim=} must be positive")
    window = _window_that_rules_out(window, seq, kv_seq, causal=causal)
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_rank("bias", bias, 4, "(B or 1, Hq or 1, Sq, Skv)")
        leading = tuple(1 if b == 1 else a for a, b in zip((batch, num_heads), bias.shape, strict=False))
        _checks.check_shape("bias", bias, (*leading, seq, kv_seq), "(B or 1, Hq or 1, Sq, Skv)")
    if mask is not None:
        mask, bias = _of_keys_or_pairs(mask, bias, (batch, num_heads, seq, kv_seq))
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids is given without segment_ids")
    if segment_ids is not None:
        if kv_segment_ids is None:
            kv_segment_ids = segment_ids
        for name, ids, length in (("segment_ids", segment_ids, seq), ("kv_segment_ids", kv_segment_ids, kv_seq)):
            _checks.check_integer(name, ids)
            _checks.check_shape(name, ids, (batch, length), "(B, Sq)" if name == "segment_ids" else "(B, Skv)")
        segment_ids, kv_segment_ids = _as_int32(segment_ids, kv_segment_ids)
    sm_scale = head_dim**-0.5 if sm_scale is None else _checks.as_scalar("sm_scale", sm_scale)
    form: Form[Any] = Form(
        qkv=qkv,
        mask=mask,
        bias=bias,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=causal,
        window=window,
        sm_scale=1.0 if isinstance(sm_scale, jax.Array) else float(sm_scale),
        return_lse=return_lse,
        precision=_checks.as_precision(precision),
    )
    if isinstance(sm_scale, jax.Array):  # kernels have their scale built in
        return form.replace(qkv=_scaled(form, sm_scale))
    return form


def separate(form: Form[jax.Array]) -> tuple[jax.Array, ...]:
    """The queries, the keys and the values, each as an array of its own."""
    if not form.is_fused:
        return form.qkv
    heads = form.num_heads, form.num_heads + form.num_kv_heads
    return tuple(jnp.split(form.qkv[0], [n * form.head_dim for n in heads], axis=-1))


def _scaled(form: Form[jax.Array], sm_scale: Array) -> tuple[jax.Array, ...]:
    """The queries times the scale, rounded to their dtype, and the keys and values."""
    q, k, v = separate(form)
    return (q.astype(jnp.float32) * sm_scale).astype(q.dtype), k, v


def _window_that_rules_out(window: int | None, seq: int, kv_seq: int, *, causal: bool) -> int | None:
    """The window, or None where it leaves every pair; what remains fits into the 32 bits of positions."""
    if window is None:
        return None
    if operator.index(window) < 1:
        raise ValueError(f"{window=} must be positive")
    longest = (kv_seq,) if causal else (seq, kv_seq)
    leaves_all = all(_checks.is_over(window + 1, length) for length in longest)
    return None if window >= np.iinfo(np.int32).max or leaves_all else window


def _of_keys_or_pairs(
    mask: Array, bias: Array | None, shape: tuple[int, ...]
) -> tuple[Array | None, Array | None]:
    """The mask of keys, (B, Skv), and the bias, in which a mask of pairs ends.

    Args:
      shape: (B, Hq, Sq, Skv).
    """
    batch, _, seq, kv_seq = shape
    if getattr(mask, "ndim", 2) == 4:
        leading = tuple(1 if m == 1 else n for m, n in zip(mask.shape, shape[:3], strict=False))
        _checks.check_mask("mask", mask, (*leading, kv_seq), "(B or 1, Hq or 1, Sq or 1, Skv)")
        if mask.shape[1:3] != (1, 1):
            # Half the memory of float32, with its range.
            dtype = jnp.bfloat16 if bias is None else jnp.promote_types(bias.dtype, jnp.bfloat16)
            kept = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)
            bias = jnp.where(mask.astype(bool), kept, jnp.asarray(2 * MASKING_BIAS, dtype))
            return None, jnp.broadcast_to(bias, (*bias.shape[:2], seq, kv_seq))
        mask = jnp.broadcast_to(mask[:, 0, 0], (batch, kv_seq))
    else:
        _checks.check_mask("mask", mask, (batch, kv_seq), "(B, Skv)")
    return _checks.as_int32(mask), bias


def _as_int32(*ids: Array) -> list[Array]:
    """Ids of 32 bits that are equal where the given ones are; ids of 64 bits are numbered anew, in their order."""
    if all(x.dtype.itemsize <= 4 for x in ids):
        return [x.astype(jnp.int32) for x in ids]
    xp = np if all(isinstance(x, np.ndarray) for x in ids) else jnp  # jnp may have 32 bits only
    known = xp.sort(xp.concatenate([x.ravel() for x in ids]))
    return [jnp.asarray(xp.searchsorted(known, x), jnp.int32) for x in ids]
