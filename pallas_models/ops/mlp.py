"""Two products with an activation between them: the feed-forward half of a transformer block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Backward, Kernel, Op, Others
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding, Total
from pallas_models.kernels import forms
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.forms.mlp import Down, Form, Up
from pallas_models.kernels.mosaic import matmul as mosaic
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import backward as matmul_backward
from pallas_models.ops.matmul import finish, many_rows, matmul, mosaic_backward, refuses_mosaic_backward
from pallas_models.ops.matmul import reference as matmul_reference
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser

AnyProduct = Up[jax.ShapeDtypeStruct] | Down[jax.ShapeDtypeStruct]  # one of the two that an MLP is made of


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

    It runs the kernels of `matmul` twice. The hidden values are rounded to the dtype of `x`, beyond the end of
    float16 as in `gated_mlp`, and `jax.checkpoint` knows them as `mlp_up`. In the gradient of half precisions on
    Hopper, the activation's derivative is part of the product that gives the gradient of the hidden values.

    Beside the operands the gradient keeps the hidden values before and after the activation: twice (..., N) in the
    dtype of `x`.

    ```
    x, w_up, w_down = jnp.ones((8, 64)), jnp.ones((64, 256)), jnp.ones((256, 64))
    y = ops.mlp(x, w_up, w_down, residual=x)  # (8, 64)
    ```

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
        ("residual", residual, shape, "the shape of the result"),
    ):
        if term is not None:
            _checks.check_float(name, term)
            _checks.check_shape(name, term, size, expected)
    activations.check_activation(activation)
    if activation is None:
        raise ValueError(f"{activation=} is not supported; expected one of {tuple(activations.ACTIVATIONS)}")
    rows = math.prod(shape[:-1])
    form = Form(
        x=x.reshape(rows, x.shape[-1]),
        w_up=w_up,
        bias_up=bias_up,
        w_down=w_down,
        bias_down=bias_down,
        residual=None if residual is None else residual.reshape(rows, shape[-1]),
        activation=activation,
        precision=_checks.as_precision(precision),
    )
    return run(_OP, form, implementation=implementation).reshape(shape)


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """Two products, the first with an activation."""
    options: dict[str, Any] = dict(precision=form.precision, implementation=names or None)
    hidden = matmul(form.x, form.w_up, bias=form.bias_up, activation=form.activation, **options)
    hidden = checkpoint_name(hidden, "mlp_up")
    return matmul(hidden, form.w_down, bias=form.bias_down, residual=form.residual, **options)


def _together(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """Two products, differentiated by the values before the activation, not by the hidden values."""
    y, hidden = run(_UP, form.up, implementation=names or None)
    return run(_DOWN, form.down(y, jax.lax.stop_gradient(hidden)), implementation=names or None)


def _parts(form: Form[jax.ShapeDtypeStruct]) -> tuple[tuple[Op[Any], forms.Form], ...]:
    y = jax.ShapeDtypeStruct((form.x.shape[0], form.w_up.shape[1]), form.x.dtype)
    return (_UP, form.up), (_DOWN, form.down(y, y))


def _unsupported(form: AnyProduct, target: Target) -> str | None:
    return mosaic.unsupported(form.product, target)


def _prefer(form: AnyProduct, target: Target) -> bool:
    return mosaic.prefer(form.product, target)


def _backward_unsupported(form: AnyProduct, target: Target) -> str | None:
    return refuses_mosaic_backward(form.product.replace(activation=None), target)


def _prefer_backward(form: AnyProduct, target: Target) -> bool:
    return many_rows(form.product.x.shape[0])


def _up(form: Up[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What the activation is applied to, and the hidden values, in plain XLA."""
    hidden, y = matmul_reference(form.product)
    return y, hidden


def _up_kernel(
    form: Up[jax.Array], *, config: Chooser | None, target: Target, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    hidden, y = mosaic.matmul(form.product, config=config, target=target, interpret=interpret)
    return y, hidden


def _up_contracted(
    call: Callable[[Up[jax.Array]], Any], total: Total, form: Up[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    part, _ = call(form.replace(bias=None))
    hidden, y = finish(total(part).astype(jnp.float32), form.bias, None, form.activation)
    return y.astype(form.x.dtype), hidden.astype(form.x.dtype)


def _up_backward(
    gradient: Callable[..., Any],
    form: Up[jax.Array],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradients of a product without activation and residual, as `gradient` has them."""
    kernel: dict[str, Any] = dict(config=config, target=target, interpret=interpret)
    product = form.product.replace(activation=None)
    return tuple(gradient(product, kept, cotangents, wanted=(*wanted, False), **kernel)[:3])


_UP: Op[Up[Any]] = Op(
    name="mlp_up",
    reference=_up,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=_up_kernel,
            config=None,
            refuses=_unsupported,
            preferred=_prefer,
        ),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=functools.partial(_up_backward, mosaic_backward),
            refuses=_backward_unsupported,
            preferred=_prefer_backward,
        ),
        Backward(backend="xla", call=functools.partial(_up_backward, matmul_backward)),
    ),
    sharding=Sharding(equation="m k, k n, n -> m n, m n"),
    contracted=_up_contracted,
)


def _down(form: Down[jax.Array]) -> jax.Array:
    """The product of the hidden values in plain XLA."""
    out: jax.Array = matmul_reference(form.product)
    return out


def _down_derivative(form: Down[jax.Array]) -> jax.Array:
    """The product with the hidden values computed from y."""
    hidden = activations.apply(form.activation, form.y.astype(jnp.float32)).astype(form.hidden.dtype)
    return _down(form.replace(hidden=hidden))


def _down_kernel(form: Down[jax.Array], *, config: Chooser | None, target: Target, interpret: bool) -> jax.Array:
    out: jax.Array = mosaic.matmul(form.product, config=config, target=target, interpret=interpret)
    return out


def _down_backward(
    form: Down[jax.Array],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    kernel: dict[str, Any] = dict(config=config, target=target, interpret=interpret)
    dout, dy = cotangents[0], None
    if wanted[0]:  # dout w^T, the gradient of the hidden values, times the activation's derivative at y
        into_hidden = form.product.replace(x=dout, bias=None, residual=form.y, transpose_w=True)
        dy = mosaic.matmul(into_hidden, slope=form.activation, **kernel)
    _, *others = mosaic_backward(form.product, kept, cotangents, wanted=(False, *wanted[2:]), **kernel)
    return dy, None, *others


def _down_contracted(
    call: Callable[[Down[jax.Array]], jax.Array], total: Total, form: Down[jax.Array]
) -> jax.Array:
    out = total(call(form.replace(bias=None, residual=None))).astype(jnp.float32)
    return finish(out, form.bias, form.residual, None)[0].astype(form.hidden.dtype)


_DOWN: Op[Down[Any]] = Op(
    name="mlp_down",
    reference=_down,
    derivative=_down_derivative,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=_down_kernel,
            config=None,
            refuses=_unsupported,
            preferred=_prefer,
        ),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=_down_backward,
            refuses=_backward_unsupported,
            preferred=_prefer_backward,
        ),
    ),
    sharding=Sharding(equation="m n, m n, n d, d, m d -> m d"),
    contracted=_down_contracted,
)
_OP: Op[Form[Any]] = Op(
    name="mlp",
    kernels=(),
    stands_for=_apart,
    together=Others(parts=_parts, call=_together),
    sharding=Sharding(equation="m k, k n, n, n d, d, m d -> m d"),
)
