"""Triangle multiplicative update: each pair (i, j) of a sequence learns from every third position k."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op, never
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.common.channel_exchange import AxisNames, ByChannels
from pallas_models.kernels.forms.trimul import DIRECTIONS, RESIDUALS, Direction, Form, Residuals
from pallas_models.kernels.schedules import trimul as schedules
from pallas_models.kernels.schedules import trimul_backward as backward_schedules
from pallas_models.kernels.schedules.trimul import Config
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.ops._trimul_reference import reference, row_bytes, with_unread
from pallas_models.target import AMPERE_ON, HOPPER, Target
from pallas_models.tuning import Chooser


def triangle_update(
    x: Array,
    norm_scale: Array,
    norm_bias: Array,
    w_in: Array,
    out_norm_scale: Array,
    out_norm_bias: Array,
    w_gate: Array,
    w_out: Array,
    *,
    direction: Direction,
    mask: Array | None = None,
    b_in: Array | None = None,
    b_gate: Array | None = None,
    b_out: Array | None = None,
    gate_after: bool = False,
    epsilon: float = 1e-5,
    compute_dtype: DTypeLike = jnp.float16,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: DTypeLike | None = None,
    residual: bool = False,
    rows_over: AxisNames = (),
    columns_over: AxisNames = (),
    residuals: Residuals = "save",
    max_temporary_bytes: int | None = None,
    config: Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes AlphaFold's triangle multiplicative update of a pair representation.

    With z = layer_norm(x) and the four projections z @ w_in[:, g] + b_in[g], which are p_left, g_left, p_right
    and g_right:

        left = mask * p_left * sigmoid(g_left);  right = mask * p_right * sigmoid(g_right)
        outgoing:  y[b, i, j, h] = sum_k left[b, i, k, h] * right[b, j, k, h]
        incoming:  y[b, i, j, h] = sum_k left[b, k, i, h] * right[b, k, j, h]
        gate = sigmoid(z @ w_gate + b_gate)
        out = (layer_norm(y) * gate) @ w_out + b_out         where not gate_after
        out = (layer_norm(y) @ w_out + b_out) * gate         where gate_after
        out += x                                             with residual

    Algorithms 11 and 12 of [AlphaFold 2](https://doi.org/10.1038/s41586-021-03819-2), whose gate comes after
    the output projection, as in AlphaFold 3, OpenFold, Boltz and Protenix. In lucidrains' module and in GPU
    MODE's TriMul the gate comes before it.

    Products, also in gradients, take operands of `compute_dtype` and accumulate in float32; norms and
    sigmoids are float32. Left and right are scaled by powers of two from the norm, the weights and the largest
    factor of a float mask, so that neither they nor their sums leave the range of float16, whatever x is; the
    layer norm of y takes the scales out again. Where no scale does that, as for normalised channels or weights
    beyond `compute_dtype`, and maybe for masks of more than 1024 in float16, the result is infinite or NaN.

    A position whose mask is 0 adds exactly nothing to other positions, even where its x is not finite.

    The gradient has kernels for products of 16 bits and pairs that are not split; beyond 128 channels or hidden
    channels the products with weights are XLA's, which write sums in float32: with them the temporaries are 4.1 KB
    for each pair of 384 channels and 128 hidden ones, 4.5 KB with `gate_after`. Else it is XLA's, which computes
    the forward pass again in float32. With `residuals="save"` the kernels' forward pass keeps left, right, y and
    the gate for it: 3 H + G numbers of `compute_dtype` for each pair, G being the channels of the gate; on Hopper
    GPUs, with N rows in multiples of 8 and N columns in multiples of 64. With `"recompute"` it keeps nothing but
    its operands, and the gradient computes these again. With what is kept the gradient takes 4 H + G numbers for
    each pair, and as many more as the larger of H and G, beside its results. It is the same, bit by bit, every
    time and with both, where all of it is kernels'. The gradient of the mask is 0 where the mask is 0.

    Devices that share pairs keep zeros instead, which nothing reads, so that a program of forward pass and
    gradient has none of them. Where the passes are programs of their own, a device has as many zeros as pairs of
    its own; but on Hopper GPUs, under `jax.jit` and where N is no multiple of 64, as many as there are pairs.

    Beside x and the result kernels take (3 H + G) P s bytes, where P is all pairs, with N in multiples of 64, and
    s the bytes of `compute_dtype`. G is 0 here on Hopper GPUs where C and H are 64 or 128 and products have 16
    bits: the last kernel computes the gate, where no gradient wants to keep it.
    Where `max_temporary_bytes` is less, they compute left, right and y for h of
    the hidden channels at a time, and then gate and result for r rows: the largest h, a divisor of H and multiple
    of 32, or H, and the largest r, G in multiples of 128, for which

        H P s + max(3 h P s, r P / N ((H + G) s + a pair of x and of the result))

    is within the bound. So y of all hidden channels is there as a whole. To this comes the mask, as kernels read
    it, up to 2 P s bytes; and, in Triton kernels where C is beyond 128 or no power of two, the normalised x, C P s
    bytes for left and right. Kernels of the same tiles give the same bits. XLA's program holds no tensor of all
    pairs: it computes some rows of y at a time, and right again for each; a row takes 16 (2 C + 4 H + G) P / N
    bytes. The gradient has no bound; where the forward pass has one, it is as with `"recompute"`.

    ```
    x, square, ones = jnp.ones((8, 8, 32)), jnp.eye(32), jnp.ones(32)
    w_in = jnp.stack([square] * 4, axis=1)
    y = ops.triangle_update(x, ones, ones, w_in, ones, ones, square, square, direction="outgoing")  # (8, 8, 32)
    ```

    Args:
      x: (..., N, N, C), float16, bfloat16 or float32.
      norm_scale: (C,), scale of the layer norm of x, any float dtype, like all other weights.
      norm_bias: (C,), its bias.
      w_in: (C, 4, H), projections: left, gate of left, right, gate of right.
      out_norm_scale: (H,), scale of the layer norm of y.
      out_norm_bias: (H,), its bias.
      w_gate: (C, H), or (C, C) where `gate_after`.
      w_out: (H, C).
      direction: `"outgoing"` or `"incoming"`.
      mask: (..., N, N), bool, integer or float, factors of left and right; all 1 when None.
      b_in: (4, H) or None.
      b_gate: (H,), or (C,) where `gate_after`, or None.
      b_out: (C,) or None.
      gate_after: whether the gate is applied to the output and not to the hidden channels.
      epsilon: added to the variances.
      compute_dtype: of the operands of products: float16, bfloat16, or float32 for float32 end to end.
      precision: of products of float32 operands, as in `matmul`.
      out_dtype: dtype of the result; the dtype of `x` when None.
      residual: whether x is added to the result, in float32, before it is rounded.
      rows_over: names of the axes of the mesh over which a `jax.shard_map` around this call has split the first
        axis N of x, mask and result, which then are a device's part. Under `jax.jit` there is no need of it.
      columns_over: names of the axes of the mesh over which it has split the second axis N.
      residuals: `"save"` or `"recompute"`: whether the gradient keeps results of the forward pass. It keeps none
        of a call with `max_temporary_bytes`.
      max_temporary_bytes: bounds the memory that tensors of pairs take beside x and the result, copies of weights
        not counted; for a device that has all pairs, and of each call that `jax.vmap` maps. No bound when None.
      config: tile sizes of the Triton kernels; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves a
        `compute_dtype` of 16 bits.

    Returns:
      (..., N, N, C) in `out_dtype`.

    Raises:
      TypeError: an operand is not floating point, or `max_temporary_bytes` no int.
      ValueError: shapes do not fit, an option is unknown, or `max_temporary_bytes` is less than what the smallest
        slices take.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    rows_over, columns_over = tuple(rows_over), tuple(columns_over)
    if direction not in DIRECTIONS:
        raise ValueError(f"{direction=} is unknown; expected one of {DIRECTIONS}")
    _check_pairs(x, mask, ByChannels.over(rows_over, columns_over).grid)
    if residuals not in RESIDUALS:
        raise ValueError(f"{residuals=} is unknown; expected one of {RESIDUALS}")
    if jnp.dtype(compute_dtype) not in _checks.FLOAT_DTYPES:
        raise ValueError(f"{compute_dtype=} is not supported; expected float16, bfloat16 or float32")
    batch = math.prod(x.shape[:-3])
    form = Form(
        x=x.reshape(batch, *x.shape[-3:]),
        mask=None if mask is None else mask.reshape(batch, *mask.shape[-2:]),
        norm_scale=norm_scale,
        norm_bias=norm_bias,
        w_in=w_in,
        b_in=b_in,
        out_norm_scale=out_norm_scale,
        out_norm_bias=out_norm_bias,
        w_gate=w_gate,
        b_gate=b_gate,
        w_out=w_out,
        b_out=b_out,
        direction=direction,
        gate_after=gate_after,
        epsilon=epsilon,
        compute_dtype=jnp.dtype(compute_dtype),
        precision=_checks.as_precision(precision),
        out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype),
        residual=residual,
        rows_over=rows_over,
        columns_over=columns_over,
        max_temporary_bytes=max_temporary_bytes,
        residuals=residuals if max_temporary_bytes is None else "recompute",
    )
    _check_weights(form)
    _check_bound(form)
    return run(_OP, form, config=config, implementation=implementation).reshape(x.shape)


def _forward(kernels: Callable[..., Any], keeping: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a kernel, which returns what the gradient keeps where it is asked to."""

    def call(form: Form[jax.Array], **options: Any) -> Any:
        if not form.return_residuals:
            return kernels(form, **options)
        if form.is_split:
            return with_unread(kernels(form.replace(padded=None), **options), form)
        return keeping(form, **options)

    return call


def _backward_of(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a gradient: of the reference for what a device has where it has but a part of the pairs."""

    def call(form: Form[jax.Array], *arrays: Any, wanted: tuple[bool, ...], **options: Any) -> Any:
        function = _backward if form.is_split else kernels
        return function(form, *arrays, wanted=wanted, **options)

    return call


def _backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> list[Any]:
    """The gradient of the reference: on each device, of the part that it has."""
    del kept, config, target, interpret
    form, operands = form.replace(max_temporary_bytes=None), form.operands

    def of_wanted(*some: jax.Array) -> jax.Array:
        given = iter(some)
        out: jax.Array = reference(
            form.of(tuple(next(given) if w else x for x, w in zip(operands, wanted, strict=True)))
        )
        return out

    _, pull = jax.vjp(of_wanted, *(x for x, w in zip(operands, wanted, strict=True) if w))
    found = iter(pull(cotangents[0]))
    return [next(found) if w else None for w in wanted]


def _gradients(backend: Literal["mosaic", "triton"], saving: Any, **record: Any) -> list[Backward[Form[Any]]]:
    """The records of a backend's gradient, one for each of `RESIDUALS`, with the options of the one that saves."""
    refuses = record.pop("refuses", never)

    def refuses_unless(residuals: Residuals, form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
        return refuses(form, target) if form.residuals == residuals else f"is for residuals={residuals!r}"

    return [
        Backward(
            backend=backend,
            refuses=functools.partial(refuses_unless, residuals),
            preferred=_prefer_kernels,
            keeps=-3 if residuals == "save" else 0,
            options=saving if residuals == "save" else {},
            **record,
        )
        for residuals in RESIDUALS
    ]


def _prefer_kernels(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether the gradient's kernels are faster than XLA: not in float32, which tensor cores do not multiply."""
    del target
    return form.compute_dtype.itemsize == 2


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    """Devices share items, rows and columns.

    Whole tiles that are kept are not split by rows and columns of x. Devices that share these keep zeros, and
    the rule's sum over devices adds up zeros.
    """
    rows, columns = ("i", "j") if form.padded is None else ("N", "N")
    kept = ", ".join(f"b {rows} {channels} {columns}" for channels in "HGH")
    return Sharding(
        equation=f"b i j C, b i j, C, C, C P H, P H, H, H, C G, G, H C, C -> b i j C, {kept}",
        over={"i": "rows_over", "j": "columns_over"},
    )


_OP: Op[Form[Any]] = Op(
    name="triangle_update",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=_forward(schedules.mosaic, backward_schedules.mosaic_with_residuals),
            config=None,
            refuses=schedules.unsupported_by_mosaic,
        ),
        Kernel(
            backend="triton",
            architectures=AMPERE_ON,
            call=_forward(schedules.triton, backward_schedules.triton_with_residuals),
            config=Config,
            refuses=schedules.unsupported,
        ),
    ),
    backward=(
        *_gradients(
            "mosaic",
            saving=backward_schedules.keeping_tiles,
            architectures=HOPPER,
            call=_backward_of(backward_schedules.mosaic_backward),
            refuses=backward_schedules.unsupported_by_mosaic,
        ),
        *_gradients(
            "triton",
            saving={"return_residuals": True},
            call=_backward_of(backward_schedules.triton_backward),
        ),
        Backward(backend="xla", call=_backward),
    ),
    sharding=_sharding,
)


def _check_pairs(x: Array, mask: Array | None, grid: tuple[int, int]) -> None:
    _checks.check_float("x", x)
    if x.ndim < 3 or x.shape[-3] * grid[0] != x.shape[-2] * grid[1]:
        parts = "" if grid == (1, 1) else f", of which a device has one of {grid[0]} x {grid[1]} parts"
        raise ValueError(f"x has shape {x.shape}; expected (..., N, N, C){parts}")
    if mask is not None:
        floating = getattr(mask, "dtype", None) in _checks.FLOAT_DTYPES
        check = _checks.check_shape if floating else _checks.check_mask
        check("mask", mask, x.shape[:-1], "(..., N, N)")


def _check_bound(form: Form[Array]) -> None:
    most = form.max_temporary_bytes
    if most is None:
        return
    if isinstance(most, bool) or not isinstance(most, int):
        raise TypeError(
            f"max_temporary_bytes={most!r} must be a number of bytes or None, not {type(most).__name__}"
        )
    if most < (least := row_bytes(form)):
        raise ValueError(f"max_temporary_bytes={most} is less than {least}: what a row of all matrices takes")
    if form.is_split:
        raise ValueError(
            f"max_temporary_bytes={most} is for a device that has all pairs; expected None with "
            f"rows_over={form.rows_over} and columns_over={form.columns_over}"
        )


def _check_weights(form: Form[Array]) -> None:
    out_norm_scale, gate_after = form.out_norm_scale, form.gate_after
    _checks.check_float("out_norm_scale", out_norm_scale)
    _checks.check_rank("out_norm_scale", out_norm_scale, 1, "(H,)")
    (c,), (h,) = form.x.shape[-1:], out_norm_scale.shape
    g, gate_axis = (c, "C") if gate_after else (h, "H")
    expected = {
        "norm_scale": ((c,), "(C,)"),
        "norm_bias": ((c,), "(C,)"),
        "w_in": ((c, 4, h), "(C, 4, H)"),
        "b_in": ((4, h), "(4, H)"),
        "out_norm_scale": ((h,), "(H,)"),
        "out_norm_bias": ((h,), "(H,)"),
        "w_gate": ((c, g), f"(C, {gate_axis}) with {gate_after=}"),
        "b_gate": ((g,), f"({gate_axis},) with {gate_after=}"),
        "w_out": ((h, c), "(H, C)"),
        "b_out": ((c,), "(C,)"),
    }
    for name in Form.WEIGHTS:
        weight, (shape, axes) = getattr(form, name), expected[name]
        if weight is not None or not name.startswith("b_"):
            _checks.check_float(name, weight)
            _checks.check_shape(name, weight, shape, axes)
