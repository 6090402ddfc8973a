"""Layer and RMS normalisation, with the residual addition that precedes them."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.mosaic import norm as mosaic
from pallas_models.kernels.mosaic import norm_backward as mosaic_backward
from pallas_models.kernels.mosaic import norm_backward_rows as mosaic_backward_rows
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_on_hopper
from pallas_models.kernels.triton import norm as triton
from pallas_models.kernels.triton import norm_backward as triton_backward
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, HOPPER, Target
from pallas_models.tuning import Chooser


@overload
def layer_norm(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    residual: Array | None = ...,
    return_residual: Literal[False] = ...,
    epsilon: float = ...,
    config: triton.Config | mosaic.Config | Chooser | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def layer_norm(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    residual: Array | None = ...,
    return_residual: Literal[True],
    epsilon: float = ...,
    config: triton.Config | mosaic.Config | Chooser | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def layer_norm(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    residual: Array | None = None,
    return_residual: bool = False,
    epsilon: float = 1e-5,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `(y - mean(y)) / sqrt(var(y) + epsilon) * scale + bias` with `y = x + residual`.

    Mean and (biased) variance run over the last axis, in float32
    ([Layer Normalization](https://arxiv.org/abs/1607.06450)). y itself is not rounded before it is normalised.

    Beside the operands the gradient keeps three float32 numbers a row, 12 bytes.

    ```
    y = ops.layer_norm(jax.random.normal(jax.random.key(0), (8, 64)), jnp.ones(64), jnp.zeros(64))  # (8, 64)
    ```

    Args:
      x: (..., D), float16, bfloat16 or float32; any D.
      scale: (D,), any float dtype.
      bias: (D,), any float dtype.
      residual: the shape of `x`, any float dtype, or None.
      return_residual: whether to return y too, the residual of the next layer.
      epsilon: added to the variance.
      config: block sizes of a kernel, Triton's or Mosaic's; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      The shape and dtype of `x`; with `return_residual` a pair of these, the second being y.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit.
    """
    return _norm(x, dict(scale=scale, bias=bias), residual, return_residual, epsilon, config, implementation)


@overload
def rms_norm(
    x: Array,
    scale: Array,
    *,
    residual: Array | None = ...,
    return_residual: Literal[False] = ...,
    epsilon: float = ...,
    config: triton.Config | mosaic.Config | Chooser | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def rms_norm(
    x: Array,
    scale: Array,
    *,
    residual: Array | None = ...,
    return_residual: Literal[True],
    epsilon: float = ...,
    config: triton.Config | mosaic.Config | Chooser | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def rms_norm(
    x: Array,
    scale: Array,
    *,
    residual: Array | None = None,
    return_residual: bool = False,
    epsilon: float = 1e-6,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `y / sqrt(mean(y**2) + epsilon) * scale` with `y = x + residual`.

    The mean runs over the last axis ([Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)).
    Everything is float32 and rounded once, to the result, as in torch's `rms_norm`. Hugging Face's LLaMA and
    Qwen3 round y before and the normalised y after, once more each: a difference of about a rounding.

    Beside the operands the gradient keeps a float32 number a row, 4 bytes.

    ```
    x = jax.random.normal(jax.random.key(0), (8, 64))
    y, x = ops.rms_norm(x, jnp.ones(64), residual=x, return_residual=True)  # (8, 64) each
    ```

    Args:
      x: (..., D), float16, bfloat16 or float32; any D.
      scale: (D,), any float dtype.
      residual: the shape of `x`, any float dtype, or None.
      return_residual: whether to return y too, the residual of the next layer.
      epsilon: added to the mean of squares.
      config: block sizes of a kernel, Triton's or Mosaic's; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      The shape and dtype of `x`; with `return_residual` a pair of these, the second being y.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit.
    """
    return _norm(x, dict(scale=scale), residual, return_residual, epsilon, config, implementation)


def _norm(
    x: Array,
    vectors: dict[str, Array],
    residual: Array | None,
    return_residual: bool,
    epsilon: float,
    config: triton.Config | mosaic.Config | Chooser | None,
    implementation: Implementation | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    _checks.check_float("x", x)
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., D)")
    for name, vector in vectors.items():
        _checks.check_float(name, vector)
        _checks.check_shape(name, vector, x.shape[-1:], "(D,)")
    if residual is not None:
        _checks.check_float("residual", residual)
        _checks.check_shape("residual", residual, x.shape, "the shape of x")
    rows = math.prod(x.shape[:-1]), x.shape[-1]
    form = Form(
        x=x.reshape(rows),
        scale=vectors["scale"],
        bias=vectors.get("bias"),
        residual=None if residual is None else residual.reshape(rows),
        subtract_mean="bias" in vectors,
        return_residual=return_residual,
        epsilon=epsilon,
    )
    out = run(_OP, form, config=config, implementation=implementation)
    return jax.tree.map(lambda leaf: leaf.reshape(x.shape), out)


def reference(form: Form[jax.Array]) -> Any:
    """Layer or RMS norm of a call in plain XLA."""
    return normalize(*form.operands, **form.options)


def normalize(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    subtract_mean: bool = True,
    return_residual: bool = False,
    return_statistics: bool = False,
    epsilon: float,
    axis: int = -1,
) -> Any:
    """Layer or RMS norm in plain XLA, over the last axis of x or another; the options are as in `Form`."""
    y = x.astype(jnp.float32)
    if residual is not None:
        y += residual.astype(jnp.float32)
    axis %= x.ndim

    def vector(v: jax.Array) -> jax.Array:
        return v.astype(jnp.float32).reshape(-1, *[1] * (x.ndim - 1 - axis))

    d, statistics = y, []
    # Twice: the error of the rounded mean counts in rows that vary less than it.
    for _ in range(2 if subtract_mean else 0):
        statistics.append(jnp.mean(d, axis=axis, keepdims=True))
        d -= statistics[-1]
    statistics.append(jax.lax.rsqrt(jnp.mean(jnp.square(d), axis=axis, keepdims=True) + epsilon))
    out = d * statistics[-1] * vector(scale)
    if bias is not None:
        out += vector(bias)
    out = out.astype(x.dtype)
    result = (out, y.astype(x.dtype)) if return_residual else out
    return (result, jnp.stack([jnp.squeeze(s, axis) for s in statistics])) if return_statistics else result


def _backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradient that `norm_backward` computes, in plain XLA, of rows that no kernel holds."""
    (statistics,), (dout, dsum) = kept, form.cotangents(cotangents)
    x, scale, bias, residual = form.operands
    *means, factor = statistics[:, :, None]
    h, dout = x.astype(jnp.float32), dout.astype(jnp.float32)
    if residual is not None:
        h += residual.astype(jnp.float32)
    for part in means:
        h -= part
    h *= factor
    dh = dout * scale.astype(jnp.float32)
    dx = dh - h * jnp.mean(dh * h, axis=1, keepdims=True)
    if form.subtract_mean:
        dx -= jnp.mean(dh, axis=1, keepdims=True)
    dx *= factor
    if dsum is not None:
        dx += dsum.astype(jnp.float32)
    return (
        dx.astype(x.dtype),
        jnp.sum(dout * h, axis=0).astype(scale.dtype),
        None if bias is None else jnp.sum(dout, axis=0).astype(bias.dtype),
        None if residual is None else dx.astype(residual.dtype),
    )


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    results = ["m D"] + form.return_residual * ["m D"] + form.return_statistics * ["S m"]
    return Sharding(equation=f"m D, D, D, m D -> {', '.join(results)}")


_STATISTICS = {"return_statistics": True}  # for the gradient, of the forward pass

_OP: Op[Form[Any]] = Op(
    name="norm",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=mosaic.norm,
            config=mosaic.Config,
            preferred=mosaic.prefer,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.norm, config=triton.Config),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic_backward.norm_backward,
            keeps=-1,
            options=_STATISTICS,
            refuses=mosaic_backward.unsupported,
        ),
        Backward(
            backend="mosaic",
            architectures=PORTABLE,
            call=mosaic_backward_rows.norm_backward,
            keeps=-1,
            options=_STATISTICS,
            refuses=mosaic_backward_rows.unsupported,
            preferred=prefer_on_hopper,
        ),
        Backward(
            backend="triton",
            call=triton_backward.norm_backward,
            keeps=-1,
            options=_STATISTICS,
            refuses=triton_backward.unsupported,
        ),
        Backward(backend="xla", call=_backward, keeps=-1, options=_STATISTICS),
    ),
    sharding=_sharding,
)
