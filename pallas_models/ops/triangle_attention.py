"""Triangle attention: the pairs of each row, or each column, attend to one another with a bias that all share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms import attention as attention_forms
from pallas_models.kernels.forms.triangle_attention import DIRECTIONS, Direction, Form
from pallas_models.kernels.mosaic import attention as mosaic
from pallas_models.kernels.mosaic import attention_mma as mma
from pallas_models.kernels.mosaic import triangle_attention_backward as mosaic_backward
from pallas_models.kernels.triton import attention as triton
from pallas_models.kernels.triton import attention_backward as triton_backward
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.attention import KERNELS, attend_to_all, backward_by_mma
from pallas_models.target import HOPPER
from pallas_models.tuning import Chooser


def triangle_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    direction: Direction,
    scale: float | Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    config: mosaic.Config | mma.Config | triton.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the attention of AlphaFold's triangles, between the pairs of a row or of a column.

    For each pair (i, j) and head h:

        starting:  out[i, j] = softmax over k of (scale q[i, j] . k[i, k] + bias[h, j, k])  times v[i, k]
        ending:    out[i, j] = softmax over k of (scale q[i, j] . k[k, j] + bias[h, k, i])  times v[k, j]

    over the k whose pair, (i, k) or (k, j), is kept by the mask. These are Algorithms 13 and 14 of
    [AlphaFold 2](https://doi.org/10.1038/s41586-021-03819-2) between the projections and the gate: q, k, v and
    bias are what linear layers make of the same pairs, each in the place of its pair. Kernels read and write them
    there: no array is transposed or copied, for columns either.

    Softmax runs online in float32. A key that is masked has exactly zero weight and may be anything, NaN too, but
    its value must be finite; a query that no key is left for gets zeros, and so do its gradients.

    Gradients come from kernels too, with scores computed again: beside the operands and their gradients memory
    holds a float32 for each pair and head, thrice, and never N x N x N. They add up in a fixed order, the sum over
    lines for the gradient of the bias too: the same operands give the same bits. Where the bias is small for the
    GPU, parts of that sum are held in float32, as many as fill it.

    Beside the operands the gradient keeps the result and the log-sum-exp, a float32 for each pair and head.

    ```
    q, k, v = (jnp.ones((8, 8, 4, 32)) for _ in range(3))
    y = ops.triangle_attention(q, k, v, bias=jnp.zeros((4, 8, 8)), direction="starting")  # (8, 8, 4, 32)
    ```

    Args:
      q: (..., N, N, H, D), float16, bfloat16 or float32. Kernels take D up to 256; powers of two are fastest. Of
        the lines, rows for "starting" and columns for "ending", there may be fewer: a device may hold a part.
      k: as q, in its dtype.
      v: as q, in its dtype.
      bias: (..., H, N, N) in any float dtype, added to the scaled scores; None for none. -1e30 and below count for
        -inf, which masks a pair in every line; above 1e38 scores, which kernels have to base 2, leave float32.
      mask: (..., N, N), bool, integer or float: pairs where it is not 0 take part as keys; all when None.
      direction: `"starting"` or `"ending"`: whether the pairs (i, k) of a row i attend, as those that start at one
        node, or the pairs (k, j) of a column j.
      scale: factor on the scores; 1 / sqrt(D) when None. Where it is an array of one number, as when traced, q is
        scaled and rounded to its dtype first.
      precision: of float32 products, as in `matmul`.
      config: block sizes of the kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available: Mosaic's where it serves a call
        with a bias, and Triton's. `"mosaic"` serves half precisions, N in multiples of 64 and a positive scale:
        on Hopper D of 32 from N of 128 on; with `mma`, from JAX 0.11 on, D of 16, 32, 64 and 128 on GPUs from
        Ampere on. It copies the mask and the bias of columns, and the bias of rows for the gradients.

    Returns:
      As q.

    Raises:
      TypeError: q, k, v or `bias` are not floating point, or q, k and v not of one dtype, or `mask` is no array of
        numbers.
      ValueError: shapes do not fit, or `direction` is unknown.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"{direction=} is unknown; expected one of {DIRECTIONS}")
    _check_pairs(q, k, v)
    *leading, rows, columns, num_heads, head_dim = q.shape
    batch, seq = math.prod(leading), columns if direction == "starting" else rows
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (*leading, num_heads, seq, seq), "(..., H, N, N)")
        bias = bias.reshape(batch, num_heads, seq, seq)
    if mask is not None:
        mask = _of_pairs(mask, q.shape[:-2]).reshape(batch, rows, columns)
    scale = head_dim**-0.5 if scale is None else _checks.as_scalar("scale", scale)
    if not isinstance(scale, float | int):  # kernels have their scale built in
        q, scale = (q.astype(jnp.float32) * scale).astype(q.dtype), 1.0
    form: Form[Any] = Form(
        qkv=tuple(x.reshape(batch, rows, columns, num_heads * head_dim) for x in (q, k, v)),
        mask=mask,
        bias=bias,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        sm_scale=float(scale),
        precision=_checks.as_precision(precision),
        direction=direction,
    )
    out: jax.Array = run(OP, form, config=config, implementation=implementation)
    return out.reshape(q.shape)


def _check_pairs(q: Array, k: Array, v: Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _checks.check_float(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and q has dtype {q.dtype}; expected the same")
    if q.ndim < 4 or 0 in q.shape[-2:]:
        raise ValueError(f"q has shape {q.shape}; expected (..., N, N, H, D) with positive H and D")
    _checks.check_shape("k", k, q.shape, "the shape of q")
    _checks.check_shape("v", v, q.shape, "the shape of q")


def _of_pairs(mask: Array, shape: tuple[int, ...]) -> Array:
    """The mask as kernels take it, int32, after checks."""
    if getattr(mask, "dtype", None) is None:
        raise TypeError(f"mask must be an array, got {type(mask).__name__}")
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.number)):
        raise TypeError(f"mask has dtype {mask.dtype}; expected bool, an integer or a float dtype")
    _checks.check_shape("mask", mask, shape, "(..., N, N), the pairs of q")
    return mask if mask.dtype == jnp.int32 else mask.astype(bool).astype(jnp.int32)  # as strict promotion takes it


def reference(form: Form[jax.Array]) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Triangle attention in plain XLA: attention with the lines as its batch."""

    def attend(
        qkv: tuple[jax.Array, ...], mask: jax.Array | None, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The results of the lines of one element of the batch."""
        options = {name: getattr(form, name) for name in ("num_heads", "num_kv_heads", "head_dim", "sm_scale")}
        bias = None if bias is None else bias[None]
        return attend_to_all(
            attention_forms.Form(qkv=qkv, mask=mask, bias=bias, precision=form.precision, **options)
        )

    def lines_first(x: jax.Array) -> jax.Array:
        return x if form.direction == "starting" else x.swapaxes(1, 2)

    mask = None if form.mask is None else lines_first(form.mask)
    bias = form.bias if form.bias is None or form.direction == "starting" else form.bias.swapaxes(-2, -1)
    out, lse = jax.vmap(attend)(tuple(map(lines_first, form.qkv)), mask, bias)
    out = checkpoint_name(lines_first(out), name=OP.name)  # as the results of kernels are
    return (out, lse) if form.return_lse else out


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    """Lines are apart from one another; the bias, which they share, has a gradient that is a sum over them."""
    pairs, mask = ("b l N (h D)", "b l N") if form.direction == "starting" else ("b N l (h D)", "b N l")
    return Sharding(
        equation=f"{pairs}, {pairs}, {pairs}, {mask}, b h N N, S, S -> {pairs}, b l h N",
        sizes={"h": form.num_heads},
        divides={"h": ("num_heads", "num_kv_heads")},
    )


OP: Op[Form[Any]] = Op(
    name="triangle_attention",
    reference=reference,
    kernels=KERNELS,
    backward=(
        Backward(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic_backward.triangle_attention_backward,
            keeps=2,
            options={"return_lse": True},
            refuses=mosaic_backward.unsupported,
        ),
        *backward_by_mma(mosaic_backward.unsupported),
        Backward(backend="triton", call=triton_backward.attention_backward, keeps=2, options={"return_lse": True}),
    ),
    sharding=_sharding,
)
