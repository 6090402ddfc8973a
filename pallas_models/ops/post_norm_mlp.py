"""What follows attention in a post-norm transformer layer: projection and MLP, each with residual and norm."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.mosaic import post_norm_mlp as mosaic
from pallas_models.kernels.mosaic.matmul_layer_norm import fills
from pallas_models.ops import _checks, activations
from pallas_models.ops._dispatch import Implementation, Kernel, Op, differentiated_as, run, serves
from pallas_models.ops._sharding import Sharding
from pallas_models.ops.activations import Activation
from pallas_models.ops.matmul import matmul
from pallas_models.ops.matmul import reference as matmul_reference
from pallas_models.ops.matmul_layer_norm import matmul_layer_norm
from pallas_models.ops.matmul_layer_norm import reference as norm_reference


def post_norm_mlp(
    y: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    scale_out: jax.Array,
    offset_out: jax.Array,
    scale: jax.Array,
    offset: jax.Array,
    bias_out: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    bias_down: jax.Array | None = None,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes what follows attention in a layer whose norms come last, such as BERT's:

        z = layer_norm(y @ w_out + bias_out + x) * scale_out + offset_out
        layer_norm(activation(z @ w_up + bias_up) @ w_down + bias_down + z) * scale + offset

    On Hopper, where rows fill its multiprocessors, one kernel keeps `z` and the hidden values on chip; they are
    rounded to the dtype of `x` all the same. Elsewhere, and where it is differentiated, it is `matmul_layer_norm`,
    `matmul` and `matmul_layer_norm` again.

    Args:
      y: (..., K), the result of attention; float16, bfloat16 or float32.
      x: (..., N), what the layer began with, in the dtype of `y`.
      w_out: (K, N), the dtype of `y`; so are `w_up` (N, F) and `w_down` (F, N).
      scale_out, offset_out: (N,), of the first norm, any float dtype; `scale` and `offset` of the second.
      bias_out, bias_up, bias_down: (N,), (F,) and (N,), any float dtype, or None.
      activation: as in `matmul`.
      epsilon: added to variances.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves in one kernel
        half precisions, all biases, rows in multiples of 8, K and N of 128, 256 or 384 alike, and F in multiples
        of N; other calls in those that it stands for.

    Returns:
      (..., N) in the dtype of `y`.

    Raises:
      TypeError: an operand is not floating point, or `y`, `x` and the weights differ in dtype.
      ValueError: shapes do not fit, or `activation` is unknown.
      NotImplementedError: the kernels that `implementation` names do not serve the call.
    """
    _checks.check_float("y", y)
    for name, w, axes in (("w_out", w_out, "(K, N)"), ("w_up", w_up, "(N, F)"), ("w_down", w_down, "(F, N)")):
        if w.dtype != y.dtype:
            raise TypeError(f"y has dtype {y.dtype} and {name} has dtype {w.dtype}; expected the same")
        _checks.check_rank(name, w, 2, axes)
    if y.ndim < 1:
        raise ValueError(f"y has shape {y.shape}; expected (..., K)")
    n, f = w_up.shape
    _checks.check_shape("w_out", w_out, (y.shape[-1], n), f"(K, N) with the K of y {y.shape} and the N of w_up")
    _checks.check_shape("w_down", w_down, (f, n), f"(F, N) for w_up {w_up.shape}")
    _checks.check_shape("x", x, (*y.shape[:-1], n), "that of the result")
    if x.dtype != y.dtype:
        raise TypeError(f"y has dtype {y.dtype} and x has dtype {x.dtype}; expected the same")
    for name, vector, size in (
        ("scale_out", scale_out, n),
        ("offset_out", offset_out, n),
        ("scale", scale, n),
        ("offset", offset, n),
        ("bias_out", bias_out, n),
        ("bias_up", bias_up, f),
        ("bias_down", bias_down, n),
    ):
        if vector is not None:
            _checks.check_float(name, vector)
            _checks.check_shape(name, vector, (size,), "(F,)" if name == "bias_up" else "(N,)")
    activations.check_activation(activation)
    named: dict[str, Any] = dict(precision=precision, implementation=implementation)

    def apart(
        y: Any,
        x: Any,
        w_out: Any,
        bias_out: Any,
        scale_out: Any,
        offset_out: Any,
        w_up: Any,
        bias_up: Any,
        w_down: Any,
        bias_down: Any,
        scale: Any,
        offset: Any,
    ) -> jax.Array:
        norms = named | {"epsilon": epsilon}
        z = matmul_layer_norm(y, w_out, scale_out, offset_out, bias=bias_out, residual=x, **norms)
        hidden = matmul(z, w_up, bias=bias_up, activation=activation, **named)
        return matmul_layer_norm(hidden, w_down, scale, offset, bias=bias_down, residual=z, **norms)

    static: dict[str, Any] = dict(
        activation=activation, epsilon=epsilon, precision=_checks.as_precision(precision)
    )
    rows = math.prod(y.shape[:-1])
    arrays = (
        *(y.reshape(rows, y.shape[-1]), x.reshape(rows, n)),
        *(w_out, bias_out, scale_out, offset_out),
        *(w_up, bias_up, w_down, bias_down, scale, offset),
    )
    served = serves(_OP, *arrays, implementation=implementation, **static)
    # This is not in the record, so that what a device has of the rows runs in the kernel too, and not in XLA.
    if not served or (implementation is None and not fills(arrays[0])):
        return apart(*arrays).reshape(x.shape)

    def together(*arrays: Any) -> jax.Array:
        return run(_OP, *arrays, implementation=implementation, **static)

    return differentiated_as(together, apart)(*arrays).reshape(x.shape)


def reference(
    y: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    bias_out: jax.Array | None,
    scale_out: jax.Array,
    offset_out: jax.Array,
    w_up: jax.Array,
    bias_up: jax.Array | None,
    w_down: jax.Array,
    bias_down: jax.Array | None,
    scale: jax.Array,
    offset: jax.Array,
    *,
    activation: Activation,
    epsilon: float,
    precision: jax.lax.Precision,
) -> jax.Array:
    """The same in plain XLA, for y (M, K) and x (M, N)."""
    options: dict[str, Any] = dict(epsilon=epsilon, precision=precision)
    z = norm_reference(y, w_out, scale_out, offset_out, bias_out, x, **options)
    hidden = matmul_reference(
        z,
        w_up,
        bias_up,
        None,
        activation=activation,
        acc_dtype=jnp.float32,
        precision=precision,
        out_dtype=z.dtype,
    )
    out = norm_reference(hidden, w_down, scale, offset, bias_down, z, **options)
    assert isinstance(out, jax.Array)
    return out


_OP = Op(
    name="post_norm_mlp",
    reference=reference,
    kernels=(Kernel(backend="mosaic", call=mosaic.post_norm_mlp, config=None, refuses=mosaic.unsupported),),
    sharding=Sharding(equation="m K, m N, K N, N, N, N, N F, F, F N, N, N, N -> m N"),
)
