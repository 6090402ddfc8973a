"""Two products with an activation between them: the feed-forward half of a transformer block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_models._implementation import Implementation
from pallas_models.dispatch.derivatives import differentiated_as
from pallas_models.dispatch.legacy import Op, has_backward, run
from pallas_models.dispatch.records import Backward, Kernel
from pallas_models.dispatch.sharding import Sharding, Total
from pallas_models.kernels.mosaic import matmul as mosaic
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.activations import Activation
from pallas_models.ops.matmul import backward as matmul_backward
from pallas_models.ops.matmul import finish, many_rows, matmul, mosaic_backward, refuses_mosaic_backward
from pallas_models.ops.matmul import reference as matmul_reference
from pallas_models.target import HOPPER


def mlp(
    x: Array,
    w_up: Array,
    w_down: Array,
    *,
    bias_up: Array | None = None,
    bias_down: Array | None = None,
    activation: Activation = "gelu_tanh",
    residual: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `activation(x @ w_up + bias_up) @ w_down + bias_down + residual`.

    Two kernels, those of `matmul`; the hidden values are rounded to the dtype of `x`, beyond the end of float16 as
    in `gated_mlp`, and `jax.checkpoint` knows them as `mlp_up`. In the gradient of half precisions on Hopper, the
    activation's derivative is part of the product that gives the gradient of the hidden values.

    Args:
      x: (..., K), float16, bfloat16 or float32.
      w_up: (K, N), the dtype of `x`.
      w_down: (N, D), the dtype of `x`.
      bias_up: (N,), any float dtype, or None.
      bias_down: (D,), any float dtype, or None.
      activation: as in `matmul`, but not None.
      residual: (..., D), any float dtype, or None.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      (..., D) in the dtype of `x`.

    Raises:
      TypeError: an operand is not floating point, or `x` and the weights differ in dtype.
      ValueError: shapes do not fit, or `activation` is unknown.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    _checks.check_float("x", x)
    for name, w in (("w_up", w_up), ("w_down", w_down)):
        if x.dtype != w.dtype:
            raise TypeError(f"x has dtype {x.dtype} and {name} has dtype {w.dtype}; expected the same")
        _checks.check_rank(name, w, 2, "(K, N)" if name == "w_up" else "(N, D)")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., K)")
    n, d = w_down.shape
    expected = f"(K, N) with the K of x {x.shape} and the N of w_down {w_down.shape}"
    _checks.check_shape("w_up", w_up, (x.shape[-1], n), expected)
    shape = (*x.shape[:-1], d)
    for name, term, size, expected in (
        ("bias_up", bias_up, (n,), "(N,)"),
        ("bias_down", bias_down, (d,), "(D,)"),
        ("residual", residual, shape, "that of the result"),
    ):
        if term is not None:
            _checks.check_float(name, term)
            _checks.check_shape(name, term, size, expected)
    activations.check_activation(activation)
    if activation is None:
        raise ValueError(f"{activation=} is not supported; expected one of {tuple(activations.ACTIVATIONS)}")
    options: dict[str, Any] = dict(precision=_checks.as_precision(precision), implementation=implementation)
    rows = math.prod(shape[:-1])
    x, y = x.reshape(rows, x.shape[-1]), jax.ShapeDtypeStruct((rows, n), x.dtype)
    residual = None if residual is None else residual.reshape(rows, shape[-1])

    def apart(x: Any, w_up: Any, bias_up: Any, w_down: Any, bias_down: Any, residual: Any) -> jax.Array:
        hidden = matmul(x, w_up, bias=bias_up, activation=activation, **options)
        hidden = checkpoint_name(hidden, "mlp_up")
        return matmul(hidden, w_down, bias=bias_down, residual=residual, **options)

    def together(x: Any, w_up: Any, bias_up: Any, w_down: Any, bias_down: Any, residual: Any) -> jax.Array:
        """The same as a function of what the activation is applied to; the hidden values are constants in it."""
        y, hidden = run(_UP, x, w_up, bias_up, activation=activation, **options)
        return run(
            _DOWN, y, jax.lax.stop_gradient(hidden), w_down, bias_down, residual, activation=activation, **options
        )

    arrays = x, w_up, bias_up, w_down, bias_down, residual
    static = dict(activation=activation) | options
    if has_backward(_UP, *arrays[:3], **static) and has_backward(_DOWN, y, y, *arrays[3:], **static):
        return differentiated_as(apart, together)(*arrays).reshape(shape)
    return apart(*arrays).reshape(shape)


def _product(x: Any, **options: Any) -> dict[str, Any]:
    """What products take beside arrays and these options."""
    fixed: dict[str, Any] = dict(transpose_w=False, acc_dtype=jnp.dtype(jnp.float32), out_dtype=x.dtype)
    return fixed | dict(algorithm=None, batch=1) | options


def _up(call: Callable[..., Any], x: jax.Array, w: jax.Array, bias: jax.Array | None, **static: Any) -> Any:
    """What the activation is applied to, and the hidden values, (M, N) in the dtype of x."""
    hidden, y = call(x, w, bias, None, return_preactivation=True, **_product(x, **static))
    return y, hidden


def _up_refuses(x: jax.Array, w: jax.Array, bias: jax.Array | None, **static: Any) -> str | None:
    return mosaic.unsupported(x, w, bias, None, **_product(x, **static))


def _up_contracted(
    call: Callable[..., Any],
    total: Total,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    part, _ = call(x, w, None, activation=activation, **static)
    hidden, y = finish(total(part).astype(jnp.float32), bias, None, activation)
    return y.astype(x.dtype), hidden.astype(x.dtype)


def _up_backward(
    call: Callable[..., Any],
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    dy: jax.Array,
    *_: None,
    wanted: tuple[bool, ...],
    **static: Any,
) -> tuple[jax.Array | None, ...]:
    options = _product(x, **static | {"activation": None, "wanted": (*wanted, False)})
    return tuple(call(x, w, bias, None, dy, **options)[:3])


def _up_backward_refuses(x: jax.Array, w: jax.Array, bias: jax.Array | None, **static: Any) -> str | None:
    return refuses_mosaic_backward(x, w, bias, None, **_product(x, **static | {"activation": None}))


_UP = Op(
    name="mlp_up",
    reference=functools.partial(_up, matmul_reference),
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=functools.partial(_up, mosaic.matmul),
            config=None,
            refuses=_up_refuses,
            preferred=mosaic.prefer,
        ),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=functools.partial(_up_backward, mosaic_backward),
            refuses=_up_backward_refuses,
            preferred=many_rows,
        ),
        Backward(backend="xla", call=functools.partial(_up_backward, matmul_backward)),
    ),
    sharding=Sharding(equation="m k, k n, n -> m n, m n"),
    contracted=_up_contracted,
)


def _down(
    call: Callable[..., Any],
    y: jax.Array,
    hidden: jax.Array,
    *arrays: jax.Array | None,
    activation: Activation,
    **static: Any,
) -> Any:
    """hidden @ w + bias + residual; hidden (M, N) is activation(y), kept from where y was computed."""
    del y, activation
    return call(hidden, *arrays, **_product(hidden, activation=None, **static))


def _down_derivative(
    y: jax.Array, hidden: jax.Array, *arrays: jax.Array | None, activation: Activation, **static: Any
) -> Any:
    """The same as a function of y."""
    hidden = activations.apply(activation, y.astype(jnp.float32)).astype(hidden.dtype)
    return _down(matmul_reference, y, hidden, *arrays, activation=activation, **static)


def _down_refuses(y: jax.Array, hidden: jax.Array, *arrays: jax.Array | None, **static: Any) -> str | None:
    del y
    return mosaic.unsupported(hidden, *arrays, **_product(hidden, **static))  # type: ignore[arg-type]


def _down_backward(
    y: jax.Array,
    hidden: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    dout: jax.Array,
    *,
    activation: Activation,
    wanted: tuple[bool, ...],
    **static: Any,
) -> tuple[jax.Array | None, ...]:
    options = _product(hidden, activation=None, **static)
    # dout w^T, the gradient of the hidden values, times the activation's derivative at y.
    dy = (
        mosaic.matmul(dout, w, None, y, slope=activation, **options | {"transpose_w": True}) if wanted[0] else None
    )
    _, *others = mosaic_backward(hidden, w, bias, residual, dout, wanted=(False, *wanted[2:]), **options)
    return dy, None, *others


def _down_backward_refuses(
    y: jax.Array, hidden: jax.Array, *arrays: jax.Array | None, **static: Any
) -> str | None:
    del y
    options = _product(hidden, **static | {"activation": None})
    return refuses_mosaic_backward(hidden, *arrays, **options)  # type: ignore[arg-type]


def _down_contracted(
    call: Callable[..., jax.Array],
    total: Total,
    y: jax.Array,
    hidden: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    **static: Any,
) -> jax.Array:
    out = total(call(y, hidden, w, None, None, **static)).astype(jnp.float32)
    return finish(out, bias, residual, None)[0].astype(hidden.dtype)


_DOWN = Op(
    name="mlp_down",
    reference=functools.partial(_down, matmul_reference),
    derivative=_down_derivative,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=functools.partial(_down, mosaic.matmul),
            config=None,
            refuses=_down_refuses,
            preferred=mosaic.prefer,
        ),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=_down_backward,
            refuses=_down_backward_refuses,
            preferred=many_rows,
        ),
    ),
    sharding=Sharding(equation="m n, m n, n d, d, m d -> m d"),
    contracted=_down_contracted,
)
