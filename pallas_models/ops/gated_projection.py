"""The product of what a gate leaves of an array: how attention with a gate ends."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.gated_projection import Form
from pallas_models.kernels.mosaic import gated_projection as mosaic
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import check as check_matmul
from pallas_models.ops.matmul import matmul
from pallas_models.target import HOPPER


def gated_projection(
    x: Array,
    gate: Array,
    w: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    out_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `(x * sigmoid(gate)) @ w + bias + residual`.

    x is gated in float32 and rounded to its dtype before the product. Bias and residual are added in float32
    before the single rounding to `out_dtype`.

    Where it is differentiated, gate and product are kernels of their own. Beside the operands the gradient keeps
    what the gate leaves, (..., K).

    ```
    x, gate, w = jnp.ones((8, 64)), jnp.zeros((8, 64)), jnp.eye(64, 128)
    y = ops.gated_projection(x, gate, w)  # (8, 128)
    ```

    Args:
      x: (..., K), float16, bfloat16 or float32.
      gate: the shape and dtype of `x`.
      w: (K, N), the dtype of `x`.
      bias: (N,), any float dtype, or None.
      residual: (..., N), any float dtype, or None.
      out_dtype: dtype of the result; the dtype of `x` when None.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves half precisions
        and K and N of 64 or 128.

    Returns:
      (..., N) in `out_dtype`.

    Raises:
      TypeError: an operand is not floating point, or `x`, `gate` and `w` differ in dtype.
      ValueError: shapes do not fit.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    check_matmul(x, w, bias, None, residual, jnp.float32)
    _checks.check_float("gate", gate)
    if gate.dtype != x.dtype:
        raise TypeError(f"gate has dtype {gate.dtype}; expected {x.dtype}, as x has")
    _checks.check_shape("gate", gate, x.shape, "(..., K)")
    m, (k, n) = math.prod(x.shape[:-1]), w.shape
    form = Form(
        x=x.reshape(m, k),
        gate=gate.reshape(m, k),
        w=w,
        bias=bias,
        residual=None if residual is None else residual.reshape(m, n),
        out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype),
        precision=_checks.as_precision(precision),
    )
    return run(_OP, form, config=None, implementation=implementation).reshape(*x.shape[:-1], n)


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """The gate and a product, which a call is differentiated as."""
    gated = form.x.astype(jnp.float32) * jax.nn.sigmoid(form.gate.astype(jnp.float32))
    options: dict[str, Any] = dict(bias=form.bias, residual=form.residual, out_dtype=form.out_dtype)
    product = gated.astype(form.x.dtype)
    return matmul(product, form.w, precision=form.precision, implementation=names or None, **options)


_OP: Op[Form[Any]] = Op(
    name="gated_projection",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.gated_projection,
            config=None,
            refuses=mosaic.unsupported,
        ),
    ),
    stands_for=_apart,
    sharding=Sharding(equation="m K, m K, K N, N, m N -> m N"),
)
