"""Gated matrix product, and the gated MLP that a down projection makes of it (SwiGLU and its kin)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models import _jax
from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.gated_mlp import Form
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.mosaic import gated_mlp as mosaic
from pallas_models.kernels.mosaic import gated_mlp_backward as mosaic_backward
from pallas_models.kernels.mosaic import gated_mlp_mma as mma
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_nowhere, prefer_on_hopper
from pallas_models.kernels.triton import gated_mlp as triton
from pallas_models.kernels.triton import gated_mlp_backward as triton_backward
from pallas_models.ops import _checks, _half_precision, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import matmul
from pallas_models.target import AMPERE_ON, HOPPER, Target
from pallas_models.tuning import Chooser

EQUATION = "mk,kgn->mgn"


def stack_gate_up(gate: Any, up: Any) -> Any:
    """The (K, 2, N) that `gated_matmul` takes, of gate and up; NumPy arrays give a NumPy array.

    ```
    w_gate_up = ops.stack_gate_up(jnp.ones((64, 128)), jnp.ones((64, 128)))  # (64, 2, 128)
    ```

    Args:
      gate: (K, N), of any dtype.
      up: as gate.

    Returns:
      (K, 2, N) in that dtype: gate, then up.

    Raises:
      ValueError: gate and up differ in shape.
    """
    stack = np.stack if isinstance(gate, np.ndarray) and isinstance(up, np.ndarray) else jnp.stack
    return stack([gate, up], axis=1)


def gated_matmul(
    x: Array,
    w_gate_up: Array,
    *,
    activation: Activation | None = "silu",
    bias: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: DTypeLike | None = None,
    config: triton.Config | mosaic.Config | mma.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `activation(x @ gate + gate_bias) * (x @ up + up_bias)`, both products over one read of `x`.

    With silu this is SwiGLU, with gelu GEGLU, with sigmoid GLU, with None bilinear
    (https://arxiv.org/abs/2002.05202). Sums, biases, activation and the product of the two are float32;
    the result is rounded once. Beside the operands the gradient keeps both products, (..., N) each in the dtype of
    `x`: where float16 does not hold one, beyond 65504, gradients are infinite or NaN.

    ```
    y = ops.gated_matmul(jnp.ones((8, 64)), jnp.ones((64, 2, 128)), activation="silu")  # (8, 128)
    ```

    Args:
      x: (..., K), float16, bfloat16 or float32.
      w_gate_up: (K, 2, N), gate then up, the dtype of `x`; `stack_gate_up` makes it of two matrices.
      activation: of the gate: `"silu"`, `"gelu"` (exact, with erf), `"gelu_tanh"`, `"relu"`, `"sigmoid"` or None.
      bias: (2, N), any float dtype, or None.
      precision: of float32 products, as in `matmul`.
      out_dtype: dtype of the result; the dtype of `x` when None.
      config: tile sizes of the Triton or the Mosaic kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves half
        precisions: with `wgmma` on Hopper rows in multiples of 8, N and K in multiples of 64; with `mma`, from JAX
        0.11 on, any rows, N and K in multiples of 32 on GPUs from Ampere on.

    Returns:
      (..., N) in `out_dtype`.

    Raises:
      TypeError: an operand is not floating point, or `x` and `w_gate_up` differ in dtype.
      ValueError: shapes do not fit, or an option is unknown.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    _checks.check_float("x", x)
    _checks.check_float("w_gate_up", w_gate_up)
    if x.dtype != w_gate_up.dtype:
        raise TypeError(f"x has dtype {x.dtype} and w_gate_up has dtype {w_gate_up.dtype}; expected the same")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., K)")
    _checks.check_rank("w_gate_up", w_gate_up, 3, "(K, 2, N)")
    k, _, n = w_gate_up.shape
    _checks.check_shape("w_gate_up", w_gate_up, (x.shape[-1], 2, n), f"(K, 2, N) with the K of x {x.shape}")
    activations.check_activation(activation)
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (2, n), "(2, N)")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), k)
    form = Form(
        x=rows,
        w_gate_up=w_gate_up,
        bias=bias,
        activation=activation,
        precision=_checks.as_precision(precision),
        out_dtype=out_dtype,
    )
    return run(_OP, form, config=config, implementation=implementation).reshape(*x.shape[:-1], n)


def reference(form: Form[jax.Array]) -> Any:
    """`gated_matmul` in plain XLA; with `return_products` a triple."""
    x = form.x
    y = _half_precision.einsum(EQUATION, x, form.w_gate_up, precision=form.precision)
    if form.bias is not None:
        y += form.bias.astype(jnp.float32)
    gate, up = y[:, 0], y[:, 1]
    out = _finish(gate, up, form.activation).astype(form.out_dtype)
    return (out, gate.astype(x.dtype), up.astype(x.dtype)) if form.return_products else out


def _finish(gate: jax.Array, up: jax.Array, activation: Activation | None) -> jax.Array:
    return activations.apply(activation, gate) * up


def _backward(
    form: Form[jax.Array],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
    epilogue: Callable[..., tuple[jax.Array, jax.Array | None]] | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients as products in XLA of x, both weights and the cotangents of both products.

    Args:
      kept: both products.
      epilogue: `gated_mlp_backward` of a backend, if a kernel is to compute their cotangents.
    """
    dout = cotangents[0]
    assert dout is not None
    if epilogue is not None:
        kernel: dict[str, Any] = dict(config=config, target=target, interpret=interpret)
        dy, dbias = epilogue(*kept, dout, activation=form.activation, has_bias=form.bias is not None, **kernel)
        dy = dy.astype(jnp.float32)
    else:
        finish = functools.partial(_finish, activation=form.activation)
        gate, up, wide = (y.astype(jnp.float32) for y in (*kept, dout))
        dy = jnp.stack(jax.vjp(finish, gate, up)[1](wide), axis=1)
        dbias = None if form.bias is None else jnp.sum(dy, axis=0)
    product = functools.partial(_half_precision.einsum, EQUATION, precision=form.precision)
    dx, dw = jax.vjp(product, form.x, form.w_gate_up)[1](dy)
    return dx, dw, None if form.bias is None or dbias is None else dbias.astype(form.bias.dtype)


def _prefer_mosaic_backward(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether Mosaic's kernel for the gradient of the epilogue is as fast as Triton's, by the results' columns."""
    return form.w_gate_up.shape[2] % 8 == 0 and prefer_on_hopper(form, target)


_PRODUCTS = {"return_products": True}


# It comes before Hopper's kernel, which counts where both serve a call and none is preferred.
_MMA = Kernel(
    backend="mosaic",
    architectures=AMPERE_ON,
    call=mma.gated_matmul,
    config=mma.Config,
    refuses=mma.unsupported,
    preferred=prefer_nowhere,
)
_OP: Op[Form[Any]] = Op(
    name="gated_matmul",
    reference=reference,
    kernels=(
        *([_MMA] if _jax.since(0, 11) else []),  # JAX 0.10 has no `mma`
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.gated_matmul,
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=mosaic.prefer,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.gated_matmul, config=triton.Config),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=PORTABLE,
            call=functools.partial(_backward, epilogue=mosaic_backward.gated_mlp_backward),
            keeps=-2,
            options=_PRODUCTS,
            preferred=_prefer_mosaic_backward,
        ),
        Backward(
            backend="triton",
            call=functools.partial(_backward, epilogue=triton_backward.gated_mlp_backward),
            keeps=-2,
            options=_PRODUCTS,
        ),
        Backward(backend="xla", call=_backward, keeps=-2, options=_PRODUCTS),
    ),
    sharding=Sharding(equation="m K, K G n, G n -> m n, m n, m n"),
)


def gated_mlp(
    x: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    residual: Array | None = None,
    activation: Activation | None = "silu",
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `(activation(x @ gate) * (x @ up)) @ w_down + residual`: the MLP of Llama, Qwen and Gemma.

    Two kernels: `gated_matmul`, whose result is rounded to the dtype of `x`, and `matmul`. In float16 a hidden
    value beyond 65504 is infinite, and makes its row of the result infinite, or NaN where it meets a 0 of `w_down`
    or an infinity of the other sign. bfloat16 has the range of float32.

    Beside the operands the gradient keeps both products and the hidden values: 3 N numbers a row, of the dtype of
    `x`.

    ```
    x, w_gate_up, w_down = jnp.ones((8, 64)), jnp.ones((64, 2, 128)), jnp.ones((128, 64))
    y = ops.gated_mlp(x, w_gate_up, w_down, residual=x)  # (8, 64)
    ```

    Args:
      x: (..., K), float16, bfloat16 or float32.
      w_gate_up: (K, 2, N), gate then up, the dtype of `x`.
      w_down: (N, D), the dtype of `x`.
      residual: (..., D), any float dtype, or None.
      activation: of the gate, as in `gated_matmul`.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      (..., D) in the dtype of `x`.

    Raises:
      TypeError: an operand is not floating point, or the dtypes of `x` and the weights differ.
      ValueError: shapes do not fit, or an option is unknown.
    """
    options: dict[str, Any] = dict(precision=precision, implementation=implementation)
    hidden = gated_matmul(x, w_gate_up, activation=activation, **options)
    return matmul(hidden, w_down, residual=residual, **options)
