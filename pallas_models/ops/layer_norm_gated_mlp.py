"""A layer norm and a gated MLP of it: the transition of AlphaFold 3."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.layer_norm_gated_mlp import Form
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.mosaic import layer_norm_gated_mlp as mosaic
from pallas_models.kernels.mosaic import layer_norm_gated_mlp_backward as mosaic_backward
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.gated_mlp import gated_matmul
from pallas_models.ops.matmul import matmul
from pallas_models.ops.norm import layer_norm
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser


def layer_norm_gated_mlp(
    x: Array,
    scale: Array,
    offset: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    residual: bool = False,
    activation: Activation | None = "silu",
    epsilon: float = 1e-5,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `(activation(y @ gate) * (y @ up)) @ w_down`, plus x if `residual`; y is the layer norm of x.

    With silu it is the transition of AlphaFold 3 (https://doi.org/10.1038/s41586-024-07487-w, algorithm 11). y,
    `layer_norm(x) * scale + offset`, is normalised in float32 and rounded to the dtype of the weights, as is what
    the gate leaves; sums are float32. Where one kernel computes all of it neither is written; else y is rounded to
    the dtype of `x` before.

    Where one kernel computes it and x has the dtype of the weights, so does the gradient of x and of the norm, and
    keeps the operands only; while it runs it takes C + 3 H numbers a row in their dtype for the gradients of the
    weights, which are products over all rows. Else the op is differentiated as `layer_norm`, `gated_matmul` and
    `matmul`, and the gradient keeps what theirs do beside the operands: y, three float32 numbers a row, both
    products and what the gate leaves.

    ```
    x, ones, zeros = jnp.ones((8, 64)), jnp.ones(64), jnp.zeros(64)
    w_gate_up, w_down = jnp.ones((64, 2, 256)), jnp.ones((256, 64))
    y = ops.layer_norm_gated_mlp(x, ones, zeros, w_gate_up, w_down, residual=True)  # (8, 64)
    ```

    Args:
      x: (..., C), float16, bfloat16 or float32.
      scale: (C,), scale of the layer norm, any float dtype.
      offset: (C,), bias of the layer norm, any float dtype.
      w_gate_up: (C, 2, H), gate then up, float16, bfloat16 or float32; `stack_gate_up` makes it of two matrices.
      w_down: (H, C), the dtype of `w_gate_up`.
      residual: whether x is added.
      activation: of the gate, as in `gated_matmul`.
      epsilon: added to the variance.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves weights of half
        precision, C of 64 or 128, and H in multiples of 64; None takes that kernel from some 8,000 rows on.

    Returns:
      (..., C) in the dtype of `x`.

    Raises:
      TypeError: an operand is not floating point, or the weights differ in dtype.
      ValueError: shapes do not fit, or an option is unknown.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    operands = dict(x=x, scale=scale, offset=offset, w_gate_up=w_gate_up, w_down=w_down)
    for name, array in operands.items():
        _checks.check_float(name, array)
    if w_down.dtype != w_gate_up.dtype:
        raise TypeError(f"w_down has dtype {w_down.dtype}; expected {w_gate_up.dtype}, as w_gate_up has")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., C)")
    c = x.shape[-1]
    for name, vector in (("scale", scale), ("offset", offset)):
        _checks.check_shape(name, vector, (c,), "(C,)")
    _checks.check_rank("w_gate_up", w_gate_up, 3, "(C, 2, H)")
    h = w_gate_up.shape[2]
    _checks.check_shape("w_gate_up", w_gate_up, (c, 2, h), f"(C, 2, H) with the C of x {x.shape}")
    _checks.check_shape("w_down", w_down, (h, c), "(H, C)")
    activations.check_activation(activation)
    form = Form(
        **operands | dict(x=x.reshape(math.prod(x.shape[:-1]), c)),
        activation=activation,
        residual=residual,
        epsilon=epsilon,
        precision=_checks.as_precision(precision),
    )
    return run(_OP, form, config=None, implementation=implementation).reshape(x.shape)


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """A norm and two products, which a call is differentiated as: each has the better gradient."""
    options: dict[str, Any] = dict(implementation=names or None)
    y, x = layer_norm(form.x, form.scale, form.offset, return_residual=True, epsilon=form.epsilon, **options)
    options |= dict(precision=form.precision)
    hidden = gated_matmul(y.astype(form.w_down.dtype), form.w_gate_up, activation=form.activation, **options)
    return matmul(hidden, form.w_down, residual=x if form.residual else None, out_dtype=x.dtype, **options)


def _backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradient of x and the norm by a kernel, of weights as products in XLA of what it leaves."""
    del kept, config
    dout = cotangents[0]
    found = mosaic_backward.layer_norm_gated_mlp_backward(form, dout, target=target, interpret=interpret)
    product = functools.partial(
        jnp.matmul, precision=jax.lax.Precision.DEFAULT, preferred_element_type=form.w_down.dtype
    )
    dgate_up = product(found.z.T, found.gate_up).reshape(form.w_gate_up.shape) if wanted[3] else None
    ddown = product(found.hidden.T, dout) if wanted[4] else None
    return found.x, found.scale.astype(form.scale.dtype), found.offset.astype(form.offset.dtype), dgate_up, ddown


_OP: Op[Form[Any]] = Op(
    name="layer_norm_gated_mlp",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.layer_norm_gated_mlp,
            config=None,
            refuses=mosaic.unsupported,
            preferred=mosaic.prefer,
        ),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=_backward,
            refuses=mosaic_backward.unsupported,
            preferred=mosaic_backward.prefer,
        ),
    ),
    stands_for=_apart,
    sharding=Sharding(equation="m C, C, C, C G H, H C -> m C"),
)
