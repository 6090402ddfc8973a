"""Matrix product, residual and layer norm: the end of both halves of a post-norm transformer layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.matmul_layer_norm import Form
from pallas_models.kernels.mosaic import matmul_layer_norm as mosaic
from pallas_models.kernels.mosaic import matmul_layer_norm_cluster as mosaic_cluster
from pallas_models.kernels.triton import matmul_layer_norm as triton
from pallas_models.ops import _checks, norm
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import check as check_matmul
from pallas_models.ops.matmul import matmul
from pallas_models.ops.matmul import reference as matmul_reference
from pallas_models.target import AMPERE_ON, HOPPER
from pallas_models.tuning import Chooser


def matmul_layer_norm(
    x: Array,
    w: Array,
    scale: Array,
    offset: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    epsilon: float = 1e-5,
    precision: jax.lax.PrecisionLike = None,
    config: triton.Config | mosaic.Config | mosaic_cluster.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `layer_norm(x @ w + bias + residual) * scale + offset`.

    The sum is normalised in float32. Where a CTA, or on Hopper GPUs a cluster, holds whole output rows it is never
    written; few or wide rows take two kernels, of which the first may split the contraction for parallelism.

    Where it is differentiated, product and norm are two kernels. Beside the operands the gradient keeps
    `x @ w + bias`, (..., N) rounded to the dtype of `x`, and three float32 numbers a row; `residual` is added in
    float32 both times, however far from 0 it is.

    ```
    x, w, scale, offset = jnp.ones((8, 64)), jnp.eye(64, 128), jnp.ones(128), jnp.zeros(128)
    y = ops.matmul_layer_norm(x, w, scale, offset)  # (8, 128)
    ```

    Args:
      x: (..., K), float16, bfloat16 or float32.
      w: (K, N), the dtype of `x`.
      scale: (N,), scale of the layer norm, any float dtype.
      offset: (N,), bias of the layer norm, any float dtype.
      bias: (N,), bias of the product, any float dtype, or None.
      residual: (..., N), any float dtype, or None.
      epsilon: added to the variance.
      precision: of float32 products, as in `matmul`.
      config: tile sizes of the Triton or of a Mosaic kernel; in Triton one kernel where `block_n` covers a row and
        `splits` is 1, else two. Chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves half
        precisions, rows in multiples of 8, K in multiples of 64, N of 128, 256, 384 or 512, and a residual of the
        dtype of `x`.

    Returns:
      (..., N) in the dtype of `x`.

    Raises:
      TypeError: an operand is not floating point, or `x` and `w` differ in dtype.
      ValueError: shapes do not fit.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    check_matmul(x, w, bias, None, residual, jnp.float32)
    for name, vector in (("scale", scale), ("offset", offset)):
        _checks.check_float(name, vector)
        _checks.check_shape(name, vector, (w.shape[1],), "(N,)")
    m, (k, n) = math.prod(x.shape[:-1]), w.shape
    form = Form(
        x=x.reshape(m, k),
        w=w,
        scale=scale,
        offset=offset,
        bias=bias,
        residual=None if residual is None else residual.reshape(m, n),
        epsilon=epsilon,
        precision=_checks.as_precision(precision),
    )
    return run(_OP, form, config=config, implementation=implementation).reshape(*x.shape[:-1], n)


def reference(form: Form[jax.Array]) -> jax.Array:
    """The product and the layer norm in plain XLA."""
    product, vectors = matmul_reference(form.product), (form.scale, form.offset)
    return norm.normalize(product, *vectors, form.residual, epsilon=form.epsilon).astype(form.x.dtype)


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """A product and a norm, which a call is differentiated as: each has the better gradient.

    The sum of product and residual is not rounded: of rows far from 0 that would leave little to normalise.
    """
    options: dict[str, Any] = dict(implementation=names or None)
    product = matmul(form.x, form.w, bias=form.bias, precision=form.precision, **options)
    vectors = form.scale, form.offset
    return norm.layer_norm(product, *vectors, residual=form.residual, epsilon=form.epsilon, **options)


_OP: Op[Form[Any]] = Op(
    name="matmul_layer_norm",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic_cluster.matmul_layer_norm,
            config=mosaic_cluster.Config,
            refuses=mosaic.unsupported,
            preferred=mosaic_cluster.prefer,
        ),
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.matmul_layer_norm,
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=mosaic.prefer,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.matmul_layer_norm, config=triton.Config),
    ),
    stands_for=_apart,
    sharding=Sharding(equation="m K, K N, N, N, N, m N -> m N"),
)
