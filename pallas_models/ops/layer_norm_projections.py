"""A layer norm and several products of it: how attention with a gate begins."""

from __future__ import annotations

import math
from typing import Any

import jax

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Kernel, Op, by_name
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.layer_norm_projections import Form
from pallas_models.kernels.mosaic import layer_norm_projections as mosaic
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import matmul
from pallas_models.ops.norm import layer_norm
from pallas_models.target import HOPPER


def layer_norm_projections(
    x: Array,
    scale: Array,
    offset: Array,
    w: Array,
    *,
    bias: Array | None = None,
    w_first: Array | None = None,
    epsilon: float = 1e-5,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """Computes `y @ w[:, g] + bias[g]` for every g, and `(y @ w_first).T`; y is `layer_norm(x) * scale + offset`.

    These are queries, keys, values and gates of an attention, and the biases of its heads. y is normalised in
    float32 and rounded to the dtype of `w`. Where one kernel computes all of it y is never written;
    else it is rounded to the dtype of `x` before.

    Where it is differentiated, norm and products are kernels of their own, the product with `w_first` XLA's where
    the implementation that is named has none of so few columns. Beside the operands the gradient keeps y and three
    float32 numbers a row.

    ```
    x, ones, w = jnp.ones((8, 64)), jnp.ones(64), jnp.ones((64, 3, 128))
    q, k, v, _ = ops.layer_norm_projections(x, ones, ones, w)  # (8, 128) each
    ```

    Args:
      x: (..., C), float16, bfloat16 or float32.
      scale: (C,), scale of the layer norm, any float dtype.
      offset: (C,), bias of the layer norm, any float dtype.
      w: (C, G, N), G projections side by side, or none, float16, bfloat16 or float32.
      bias: (G, N), any float dtype, or None.
      w_first: (C, F), the dtype of `w`, of a projection whose columns come first, or None.
      epsilon: added to the variance.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves `w` of half
        precision, C and N of 64 or 128, and F of 64 or less, by a kernel that has not run on a GPU yet: None takes
        norm and products apart.

    Returns:
      The G projections, (..., N) each, in the dtype of `w`; where there is `w_first` its projection, (F, ...); and
      x. What reads x later takes this one: the norm's kernel then adds both gradients.

    Raises:
      TypeError: an operand is not floating point, or `w` and `w_first` differ in dtype.
      ValueError: shapes do not fit.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    _check(x, scale, offset, w, bias, w_first)
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    form = Form(
        x=x.reshape(m, x.shape[-1]),
        scale=scale,
        offset=offset,
        w=w,
        bias=bias,
        w_first=w_first,
        epsilon=epsilon,
        precision=_checks.as_precision(precision),
    )
    *found, same = run(_OP, form, config=None, implementation=implementation)
    outs = [out.reshape(*lead, w.shape[2]) for out in found[: w.shape[1]]]
    outs += [first.reshape(len(first), *lead) for first in found[w.shape[1] :]]
    return *outs, same.reshape(x.shape)


def _check(x: Array, scale: Array, offset: Array, w: Array, bias: Array | None, w_first: Array | None) -> None:
    for name, array in (("x", x), ("scale", scale), ("offset", offset), ("w", w)):
        _checks.check_float(name, array)
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., C)")
    c = x.shape[-1]
    if w.ndim != 3 or w.shape[0] != c:
        raise ValueError(f"w has shape {w.shape}; expected ({c}, G, N), (C, G, N)")
    for name, vector in (("scale", scale), ("offset", offset)):
        _checks.check_shape(name, vector, (c,), "(C,)")
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, w.shape[1:], "(G, N)")
    if w_first is None:
        return
    _checks.check_float("w_first", w_first)
    if w_first.dtype != w.dtype:
        raise TypeError(f"w_first has dtype {w_first.dtype}; expected {w.dtype}, as w has")
    if w_first.ndim != 2 or w_first.shape[0] != c:
        raise ValueError(f"w_first has shape {w_first.shape}; expected ({c}, F), (C, F)")


def _kernel(form: Form[jax.Array], **options: Any) -> tuple[jax.Array, ...]:
    """The results of the kernel, and x."""
    return (*mosaic.layer_norm_projections(form, **options), form.x)


def _apart(form: Form[jax.Array], names: tuple[Name, ...]) -> tuple[jax.Array, ...]:
    """A norm and products, which a call is differentiated as: each has the better gradient."""
    options: dict[str, Any] = dict(implementation=names or None)
    y, x = layer_norm(form.x, form.scale, form.offset, return_residual=True, epsilon=form.epsilon, **options)
    y, options = y.astype(form.dtype), options | dict(precision=form.precision)
    biases = [None] * form.w.shape[1] if form.bias is None else list(form.bias)
    outs = [matmul(y, form.w[:, i], bias=bias, **options) for i, bias in enumerate(biases)]
    if form.w_first is not None:
        options["implementation"] = (*names, "xla") if names and "xla" not in names else names or None
        outs.append(matmul(form.w_first.T, y, transpose_w=True, **options))
    return (*outs, x)


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    first = "" if form.w_first is None else ", F m"
    results = ", ".join(["m N"] * form.w.shape[1])
    return Sharding(equation=f"m C, C, C, C G N, G N, C F -> {results}{first}, m C")


_OP: Op[Form[Any]] = Op(
    name="layer_norm_projections",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=_kernel,
            config=None,
            refuses=mosaic.unsupported,
            preferred=by_name,
        ),
    ),
    stands_for=_apart,
    sharding=_sharding,
)
