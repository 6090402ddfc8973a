"""Matrix product with a fused epilogue."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.triton import matmul as triton
from pallas_models.ops import _checks, activations
from pallas_models.ops._dispatch import Implementation, run
from pallas_models.ops.activations import Activation
from pallas_models.tuning import Chooser


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
    acc_dtype: DTypeLike = jnp.float32,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: DTypeLike | None = None,
    config: triton.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `activation(x @ w + bias) + residual`.

    The product is accumulated in `acc_dtype`; bias, activation and residual are applied in float32
    before the single rounding to `out_dtype`.

    Args:
      x: (..., K), float16, bfloat16 or float32.
      w: (K, N), the dtype of `x`.
      bias: (N,), any float dtype, or None.
      activation: `"gelu"` (exact, with erf), `"gelu_tanh"`, `"relu"`, `"sigmoid"`, `"silu"` or None.
      residual: (..., N), any float dtype, or None.
      acc_dtype: float32, or float16 for float16 operands: on GeForce GPUs twice the tensor-core rate,
        at an error that grows with K.
      precision: of float32 products: None and HIGHEST are true float32, DEFAULT and HIGH allow TF32 on
        a GPU. Ignored for the half precisions.
      out_dtype: dtype of the result; that of `x` when None.
      config: tile sizes of the Triton kernel; chosen as `pallas_models.tuning` says when None.
      implementation: `"triton"`, `"xla"`, `"interpret"`, or None for the best available.

    Returns:
      (..., N) in `out_dtype`.

    Raises:
      TypeError: an operand is not floating point, or `x` and `w` differ in dtype.
      ValueError: shapes do not fit, or an option is unknown.
    """
    check(x, w, bias, activation, residual, acc_dtype)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    static: dict[str, Any] = dict(
        activation=activation,
        acc_dtype=jnp.dtype(acc_dtype),
        precision=_checks.as_precision(precision),
        out_dtype=out_dtype,
    )
    batch = x.shape[:-1]
    out = run(
        implementation,
        functools.partial(triton.matmul, config=config, **static),
        functools.partial(reference, **static),
        x.reshape(-1, x.shape[-1]),
        w,
        bias,
        None if residual is None else residual.reshape(-1, w.shape[1]),
    )
    return out.reshape(*batch, w.shape[1])


def reference(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    acc_dtype: DTypeLike,
    precision: jax.lax.Precision,
    out_dtype: DTypeLike,
) -> jax.Array:
    """The same in plain XLA, for x (M, K) and w (K, N)."""
    y = jnp.matmul(x, w, precision=precision, preferred_element_type=acc_dtype).astype(jnp.float32)
    if bias is not None:
        y += bias.astype(jnp.float32)
    y = activations.apply(activation, y)
    if residual is not None:
        y += residual.astype(jnp.float32)
    return y.astype(out_dtype)


def check(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    residual: jax.Array | None,
    acc_dtype: DTypeLike,
) -> None:
    """Raises TypeError or ValueError where the operands of a product with epilogue do not fit."""
    _checks.check_float("x", x)
    _checks.check_float("w", w)
    if x.dtype != w.dtype:
        raise TypeError(f"x has dtype {x.dtype} and w has dtype {w.dtype}; expected the same")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., K)")
    _checks.check_rank("w", w, 2, "(K, N)")
    if x.shape[-1] != w.shape[0]:
        raise ValueError(f"x has shape {x.shape} and w has shape {w.shape}; expected (..., K) and (K, N)")
    activations.check_activation(activation)
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (w.shape[1],), "(N,)")
    if residual is not None:
        _checks.check_float("residual", residual)
        _checks.check_shape("residual", residual, (*x.shape[:-1], w.shape[1]), "(..., N)")
    if jnp.dtype(acc_dtype) not in (jnp.float32, jnp.float16):
        raise ValueError(f"{acc_dtype=} is not supported; expected float32 or float16")
    if jnp.dtype(acc_dtype) == jnp.float16 and x.dtype != jnp.float16:
        raise ValueError(f"acc_dtype float16 needs float16 operands, got {x.dtype}")
