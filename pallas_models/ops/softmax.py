"""Softmax over any axis, with mask and scale."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.softmax import ALGORITHMS, Algorithm, Form
from pallas_models.kernels.mosaic import softmax as mosaic
from pallas_models.kernels.mosaic import softmax_backward as mosaic_backward
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_on_hopper
from pallas_models.kernels.triton import softmax as triton
from pallas_models.kernels.triton.softmax_backward import softmax_backward
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON
from pallas_models.tuning import Chooser


def softmax(
    x: Array,
    axis: int = -1,
    *,
    where: Array | None = None,
    scale: float | Array | None = None,
    algorithm: Algorithm | None = None,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `where * exp(y - m) / sum(where * exp(y - m))`, `y = x * scale`, `m` the maximum of y.

    Maximum and sum run over `axis` and over the entries that `where` keeps, in float32. Values of other entries
    never reach the result, NaN and infinities included: they are exactly 0 there, and so is a row with no entry
    left, as is every gradient there. Otherwise infinities and NaN do as in torch: -inf counts
    for 0, and a row whose kept entries are all -inf, or hold +inf or NaN, is NaN wherever it is kept.

    Beside the operands the gradient keeps the result; of the operands it reads `where` alone.

    ```
    x, where = jnp.ones((2, 8)), jnp.arange(8) < 5
    y = ops.softmax(x, where=where, scale=0.5)  # 0.2 five times, then zeros
    ```

    Args:
      x: any shape but (), float16, bfloat16 or float32. Any axis but the last costs two transpositions.
      axis: the axis that sums to 1.
      where: bool or integers 0 and 1, broadcastable to the shape of `x`, or None to keep everything. Where it is
        traced, anything but 0 keeps. The kernels read it without a copy if it is integer and its axes of size 1
        come before or after all others but `axis`.
      scale: multiplies `x` first, in float32; 1 when None. It may be an array of one number, as when traced.
      algorithm: `"naive"` reads a row three times, for its maximum, its sum and to write; `"online"` twice,
        rescaling the sum when the maximum grows ([Milakov and Gimelshein](https://arxiv.org/abs/1805.02867)),
        and splits few long rows between programs; `"fused"` once, holding the row in registers, at most
        32768 columns. None chooses the fastest for the shape. Kernels only: ignored by `"xla"`. Mosaic's kernel
        has no naive algorithm, and splits no rows.
      config: block sizes of a kernel, Triton's or Mosaic's; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating point or `where` not bool or integer.
      ValueError: `axis` is out of range, `where` cannot be broadcast or, concrete, holds anything but 0 and
        1, `scale` is not one number, `algorithm` is unknown, or `config` does not fit it.
      NotImplementedError: rows too long for `"fused"`.
    """
    _checks.check_float("x", x)
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; expected at least one axis")
    if not -x.ndim <= operator.index(axis) < x.ndim:
        raise ValueError(f"{axis=} is out of range for x of shape {x.shape}")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm=} is unknown; expected None or one of {ALGORITHMS}")
    if where is not None:
        _check_where(where, x.shape)
        where = where if where.dtype.itemsize <= 4 else _checks.as_int32(where)
    if x.size == 0:
        return jnp.asarray(x)
    dtype = x.dtype
    scale = 1.0 if scale is None else _checks.as_scalar("scale", scale)
    if isinstance(scale, jax.Array):  # kernels have their scale built in
        x, scale = x.astype(jnp.float32) * scale, 1.0
    rows = jnp.moveaxis(x, axis, -1)
    *batch, n = rows.shape
    repeat = 1
    if where is not None:
        where, repeat = _mask_rows(where, x.shape, axis)
    form = Form(x=rows.reshape(-1, n), where=where, scale=float(scale), repeat=repeat, algorithm=algorithm)
    out = run(_OP, form, config=config, implementation=implementation)
    return jnp.moveaxis(out.reshape(*batch, n), -1, axis).astype(dtype)


def _check_where(where: Array, shape: tuple[int, ...]) -> None:
    _checks.check_mask("where", where, getattr(where, "shape", ()), "")
    if where.ndim > len(shape) or any(
        a not in (1, b) for a, b in zip(where.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"where has shape {where.shape}; expected one broadcastable to {shape}, the shape of x")


def _mask_rows(where: Array, shape: tuple[int, ...], axis: int) -> tuple[jax.Array, int]:
    """The mask as (W, N) for an x of `shape` as (M, N), and `repeat`: row i of x has mask i // repeat % W."""
    if where.dtype == jnp.bool_:
        where = where.astype(jnp.int8)  # Pallas holds bool as int32 in memory
    where = jnp.moveaxis(where.reshape((1,) * (len(shape) - where.ndim) + where.shape), axis, -1)
    n, batch = shape[axis], [size for i, size in enumerate(shape) if i != axis % len(shape)]
    varying = [i for i, size in enumerate(where.shape[:-1]) if size != 1]
    first, last = (varying[0], varying[-1] + 1) if varying else (0, 0)
    where = where.reshape(where.shape[first:last] + where.shape[-1:])
    repeat = math.prod(batch[last:]) if varying else 1
    return jnp.broadcast_to(where, (*batch[first:last], n)).reshape(-1, n), repeat


def reference(form: Form[jax.Array]) -> jax.Array:
    """Softmax over the rows of x (M, N) in plain XLA."""
    x, where, scale = form.x, form.where, form.scale
    if where is None:
        return jax.nn.softmax(x.astype(jnp.float32) * scale, axis=-1).astype(x.dtype)
    kept = where[:, None, :] != 0
    y = jnp.where(kept, x.reshape(-1, where.shape[0], form.repeat, x.shape[1]).astype(jnp.float32), 0.0) * scale
    # A row with nothing left has maximum 0 and sum 1, so that its result and its gradient are 0.
    left = jnp.any(kept, axis=-1, keepdims=True)
    peak = jnp.max(jnp.where(kept, y, -jnp.inf), axis=-1, keepdims=True)
    peak = jax.lax.stop_gradient(jnp.where(left, peak, 0.0))
    # The inner one is for the gradient, in which 0 times an overflown exponential would be NaN.
    e = jnp.where(kept, jnp.exp(jnp.where(kept, y - peak, 0.0)), 0.0)
    e /= jnp.where(left, jnp.sum(e, axis=-1, keepdims=True), 1.0)
    return jnp.where(kept, e, 0.0).reshape(x.shape).astype(x.dtype)  # not the NaN of a row of -inf


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    """Rows are split where rows of the mask are, or between repetitions of the whole mask."""
    if form.where is None:
        return Sharding(equation="m N, W N -> m N")
    rows = form.where.shape[0]
    times = form.x.shape[0] // (rows * form.repeat)
    if times > 1:
        return Sharding(equation="(t R) N, W N -> (t R) N", sizes={"t": times})
    return Sharding(equation="(w R) N, w N -> (w R) N", sizes={"w": rows})


_OP: Op[Form[Any]] = Op(
    name="softmax",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=mosaic.softmax,
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=mosaic.prefer,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.softmax, config=triton.Config),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=PORTABLE,
            call=mosaic_backward.softmax_backward,
            keeps=1,
            preferred=prefer_on_hopper,
        ),
        Backward(backend="triton", call=softmax_backward, keeps=1),
    ),
    sharding=_sharding,
)
