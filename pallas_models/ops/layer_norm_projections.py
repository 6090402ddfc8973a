"""A layer norm and several products of it: how attention with a gate begins."""

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
from pallas_models.kernels.forms.layer_norm_projections import Form
from pallas_models.kernels.mosaic import layer_norm_projections as mosaic
from pallas_models.kernels.mosaic import layer_norm_projections_backward as mosaic_backward
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.matmul import matmul
from pallas_models.ops.norm import layer_norm
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser


def layer_norm_projections(
    x: Array,
    scale: Array,
    offset: Array,
    w: Array | None,
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

    On Hopper the gradient is a kernel for x, scale and offset, and products of XLA for the weights, and keeps
    nothing beside the operands: for x in the dtype of `w` and F of 16 or less; None takes it for rows in
    multiples of 8. Else norm and products are differentiated each as itself, and the product with
    `w_first` in XLA where the implementation that is named has none of so few columns; the gradient then keeps y
    and three float32 numbers a row.

    ```
    x, ones, w = jnp.ones((8, 64)), jnp.ones(64), jnp.ones((64, 3, 128))
    q, k, v, _ = ops.layer_norm_projections(x, ones, ones, w)  # (8, 128) each
    ```

    Args:
      x: (..., C), float16, bfloat16 or float32.
      scale: (C,), scale of the layer norm, any float dtype.
      offset: (C,), bias of the layer norm, any float dtype.
      w: (C, G, N), G projections side by side, float16, bfloat16 or float32; or None where there is `w_first`.
      bias: (G, N), any float dtype, or None.
      w_first: (C, F), the dtype of `w`, of a projection whose columns come first, or None.
      epsilon: added to the variance.
      precision: of float32 products, as in `matmul`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves `w` of half
        precision, C and N of 64 or 128, and F of 64 or less.

    Returns:
      The G projections, (..., N) each, in the dtype of `w`; where there is `w_first` its projection, (F, ...); and
      x. What reads x later takes this one: the norm's kernel then adds both gradients.

    Raises:
      TypeError: an operand is not floating point, or `w` and `w_first` differ in dtype.
      ValueError: shapes do not fit, or there is neither `w` nor `w_first`.
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
    _, _, count, n = form.sizes
    outs = [out.reshape(*lead, n) for out in found[:count]]
    outs += [first.reshape(len(first), *lead) for first in found[count:]]
    return *outs, same.reshape(x.shape)


def _check(
    x: Array, scale: Array, offset: Array, w: Array | None, bias: Array | None, w_first: Array | None
) -> None:
    given = dict(w=w, bias=bias, w_first=w_first)
    arrays = {name: array for name, array in given.items() if array is not None}
    for name, array in (dict(x=x, scale=scale, offset=offset) | arrays).items():
        _checks.check_float(name, array)
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., C)")
    c = x.shape[-1]
    for name, vector in (("scale", scale), ("offset", offset)):
        _checks.check_shape(name, vector, (c,), "(C,)")
    if w is None and w_first is None:
        raise ValueError("w and w_first are None; expected one of them")
    if w is not None and (w.ndim != 3 or w.shape[0] != c):
        raise ValueError(f"w has shape {w.shape}; expected ({c}, G, N), (C, G, N)")
    if bias is not None:
        if w is None:
            raise ValueError("bias is of the projections by w, which is None")
        _checks.check_shape("bias", bias, w.shape[1:], "(G, N)")
    if w_first is not None:
        if w is not None and w_first.dtype != w.dtype:
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
    outs: list[jax.Array] = []
    if form.w is not None:
        biases = [None] * form.w.shape[1] if form.bias is None else list(form.bias)
        outs = [matmul(y, form.w[:, i], bias=bias, **options) for i, bias in enumerate(biases)]
    if form.w_first is not None:
        options["implementation"] = (*names, "xla") if names and "xla" not in names else names or None
        outs.append(matmul(form.w_first.T, y, transpose_w=True, **options))
    return (*outs, x)


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
    """The gradient of x and the norm by a kernel, of weights as products in XLA of the norm that it leaves."""
    del kept, config
    _, _, count, n = form.sizes
    *douts, dsame = cotangents
    dfirst = None if form.w_first is None else douts.pop()
    found = mosaic_backward.layer_norm_projections_backward(
        form, douts, dfirst, dsame, target=target, interpret=interpret
    )
    given = [jnp.zeros((form.x.shape[0], n), form.dtype) if d is None else d for d in douts]
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.DEFAULT, preferred_element_type=form.dtype)
    dw, dbias, dw_first = None, None, None
    if count and wanted[3]:
        dw = jnp.stack([product("mc,mn->cn", found.z, d) for d in given], axis=1)
    if form.bias is not None and wanted[4]:
        dbias = jnp.stack([jnp.sum(d, axis=0, dtype=jnp.float32) for d in given]).astype(form.bias.dtype)
    if form.w_first is not None and wanted[-1]:
        dw_first = jnp.zeros_like(form.w_first) if dfirst is None else product("mc,fm->cf", found.z, dfirst)
    dscale, doffset = found.scale.astype(form.scale.dtype), found.offset.astype(form.offset.dtype)
    return found.x, dscale, doffset, dw, dbias, dw_first


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    results = ["m N"] * form.sizes[2] + ["F m"] * (form.w_first is not None)
    return Sharding(equation=f"m C, C, C, C G N, G N, C F -> {', '.join(results)}, m C")


_OP: Op[Form[Any]] = Op(
    name="layer_norm_projections",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=_kernel,
            config=None,
            refuses=mosaic.unsupported,
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
    sharding=_sharding,
)
