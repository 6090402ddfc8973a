"""Layer normalisation, with the residual addition that precedes it."""

import functools

import jax
import jax.numpy as jnp

from pallas_models.kernels.triton import norm as triton
from pallas_models.ops import _checks
from pallas_models.ops._dispatch import Implementation, run


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-5,
    config: triton.Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `(y - mean(y)) / sqrt(var(y) + epsilon) * scale + bias` with `y = x + residual`.

    Mean and (biased) variance run over the last axis, in float32
    ([Layer Normalization](https://arxiv.org/abs/1607.06450)).

    Args:
      x: (..., D), float16, bfloat16 or float32; any D.
      scale: (D,), any float dtype.
      bias: (D,), any float dtype.
      residual: the shape of `x`, any float dtype, or None.
      epsilon: added to the variance.
      config: block sizes of the Triton kernel; chosen from the shape when None.
      implementation: `"triton"`, `"xla"`, `"interpret"`, or None for the best available.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit.
    """
    _checks.check_float("x", x)
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., D)")
    for name, vector in (("scale", scale), ("bias", bias)):
        _checks.check_float(name, vector)
        _checks.check_shape(name, vector, x.shape[-1:], "(D,)")
    if residual is not None:
        _checks.check_float("residual", residual)
        _checks.check_shape("residual", residual, x.shape, "the shape of x")
    rows = (-1, x.shape[-1])
    out = run(
        implementation,
        functools.partial(triton.layer_norm, epsilon=epsilon, config=config),
        functools.partial(reference, epsilon=epsilon),
        x.reshape(rows),
        scale,
        bias,
        None if residual is None else residual.reshape(rows),
    )
    return out.reshape(x.shape)


def reference(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, *, epsilon: float
) -> jax.Array:
    """The same in plain XLA, over the last axis of x."""
    y = x.astype(jnp.float32)
    if residual is not None:
        y += residual.astype(jnp.float32)
    y -= jnp.mean(y, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(variance + epsilon)
    return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
