"""The kernels that the gradient of the triangle multiplicative update is made of, on one GPU.

The forward pass keeps left and right, the gate and the sums over third positions, or the gradient computes them
again, by the same kernels. Then come the gradients of the end of the update, of the products, and of the
projections, first for x and then for the weights.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.common import trimul_output_scales as output_scales
from pallas_models.kernels.common import trimul_wide_backward as wide
from pallas_models.kernels.common.trimul_scales import powers_of_two
from pallas_models.kernels.forms.trimul import Form, Output, Product, Projection
from pallas_models.kernels.forms.trimul_backward import GATED, Given
from pallas_models.kernels.mosaic import trimul_output as mosaic_end
from pallas_models.kernels.mosaic import trimul_output_backward as mosaic_output
from pallas_models.kernels.mosaic import trimul_product as mosaic_product
from pallas_models.kernels.mosaic import trimul_project_backward as mosaic_project
from pallas_models.kernels.mosaic import trimul_weights_backward as mosaic_weights
from pallas_models.kernels.schedules.trimul import (
    ROW_TILE,
    Update,
    abstract_projection,
    batchable,
    mosaic_kernels,
    triton_kernels,
    unsupported_without_triton,
)
from pallas_models.kernels.schedules.trimul_kernels import Kernels
from pallas_models.kernels.triton import (
    trimul_output_backward,
    trimul_output_scales,
    trimul_project_backward,
    trimul_weights_backward,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser

_WIDEST = 128  # channels, and hidden channels, of which a program of a kernel holds all


class Residuals(NamedTuple):
    """What the forward pass keeps, in the compute dtype: channels between the rows and columns of `Form.padded`.

    Attributes:
      sides: (B, N', 2 H, N''), left and right, scaled.
      gate: (B, N', G, N'').
      y: (B, N', H, N''), the sums over third positions, scaled.
    """

    sides: jax.Array
    gate: jax.Array
    y: jax.Array

    @classmethod
    def unread(cls, form: Form[jax.Array]) -> Self:
        """Zeros, where the reference computes the gradient, and reads none of them."""
        b, rows, columns = len(form.x), *(form.padded or form.x.shape[1:3])
        channels = 2 * form.hidden, form.w_gate.shape[1], form.hidden
        return cls(*(jnp.zeros((b, rows, n, columns), form.compute_dtype) for n in channels))


def unsupported_by_mosaic(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `mosaic` does not serve a call; None if it does."""
    return mosaic_product.unsupported(form.compute_dtype) or (
        None if _jax.has_triton() else _unsupported_without_triton(form, target)
    )


def _unsupported_without_triton(form: Form[Any], target: Target) -> str | None:
    """Why Mosaic's kernels do not serve a call without some of Triton's; None if they do."""
    projection = abstract_projection(form)
    obstacle = unsupported_without_triton(form, target)
    if obstacle or _is_wide(projection):
        return obstacle
    return mosaic_project.unsupported(projection, target) or mosaic_weights.unsupported(projection, target)


def _is_wide(form: Projection[Any] | Output[Any]) -> bool:
    """Whether no kernel holds all channels of a step of the gradient, which is XLA's then."""
    return max(form.w.shape) > _WIDEST


def keeping_tiles(form: Form[Any]) -> dict[str, Any]:
    """The options of a forward pass that keeps whole tiles, as Mosaic's kernels write and read them."""
    sizes = form.x.shape[1:3]
    padded = tuple(n + -n % t for n, t in zip(sizes, ROW_TILE, strict=True))
    return dict(return_residuals=True, padded=None if form.is_split or padded == sizes else padded)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernels:
    """The kernels of the gradient and of the forward pass.

    Attributes:
      forward: of the forward pass.
      config: the configs of Triton's kernels.
      for_hopper: whether kernels for Hopper GPUs take the places of Triton's where they serve.
    """

    forward: Kernels
    config: Chooser | None
    for_hopper: bool

    def chosen(self, mosaic: Any, triton: Any, name: str, form: Any, target: Target, interpret: bool) -> Any:
        """The function `name` of one of two modules, for a call of it."""
        where = dict(target=target, interpret=interpret)
        if self.for_hopper and mosaic.unsupported(form.abstract(), target) is None:
            return functools.partial(getattr(mosaic, name), **where)
        if _is_wide(form):
            return getattr(wide, name)
        return functools.partial(getattr(triton, name), config=self.config, **where)


def _triton(config: Chooser | None) -> _Kernels:
    return _Kernels(forward=triton_kernels(config, by_rows=True), config=config, for_hopper=False)


def _mosaic(form: Form[jax.Array], config: Chooser | None, target: Target) -> _Kernels:
    return _Kernels(forward=mosaic_kernels(form, config, target, by_rows=True), config=config, for_hopper=True)


def triton_with_residuals(
    form: Form[jax.Array], *, config: Chooser | None, target: Target, interpret: bool
) -> tuple[jax.Array, Residuals]:
    """The update in Triton kernels, and what its gradient keeps."""
    return _with_residuals(form, _triton(config).forward, target=target, interpret=interpret)


def mosaic_with_residuals(
    form: Form[jax.Array], *, config: Chooser | None, target: Target, interpret: bool
) -> tuple[jax.Array, Residuals]:
    """The update with products for Hopper GPUs, and what its gradient keeps."""

    def update(*operands: Any) -> tuple[jax.Array, Residuals]:
        kernels = _mosaic(form, config, target).forward
        if not _jax.has_triton():  # whose end reads the gate that is kept; this one computes it again
            kernels = dataclasses.replace(kernels, finish_with_gate=mosaic_end.output)
        return _with_residuals(form.of(operands), kernels, target=target, interpret=interpret)

    out: tuple[jax.Array, Residuals] = batchable(update)(*form.operands)
    return out


def triton_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of the operands, in Triton kernels."""
    options: dict[str, Any] = dict(of_mask=wanted[1], target=target, interpret=interpret)
    return _gradient(form, kept, cotangents[0], _triton(config), **options)


def mosaic_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of the operands, with products for Hopper GPUs."""
    options: dict[str, Any] = dict(of_mask=wanted[1], target=target, interpret=interpret)

    # Operands have as many axes as a copy to shared memory can take: vmap takes one item after another.
    @jax.custom_batching.sequential_vmap
    def gradient(operands: Any, kept: list[jax.Array], dout: jax.Array) -> tuple[jax.Array | None, ...]:
        return _gradient(form.of(operands), kept, dout, _mosaic(form, config, target), **options)

    out: tuple[jax.Array | None, ...] = gradient(form.operands, kept, cotangents[0])
    return out


def _with_residuals(
    form: Form[jax.Array], kernels: Kernels, *, target: Target, interpret: bool
) -> tuple[jax.Array, Residuals]:
    """The update of x (B, N, N, C), and what the gradient keeps."""
    update = Update.of(form, kernels, target=target, interpret=interpret)
    found = _residuals(update)
    end = _end(update, found)
    if kernels.finish_with_gate is not None:
        end = end.replace(gate=None)
    return update.finish(end, update.projection).reshape(form.x.shape), found


def _residuals(update: Update) -> Residuals:
    """What the gradient keeps, with as many rows and columns as the kernels make."""
    projection, form = update.projection, update.form
    b, rows, h = len(form.x), projection.padded_rows, form.hidden
    sides, gate = update.project(projection)
    assert gate is not None
    if sides.shape[1] > 2 * h:
        sides = sides.reshape(b * rows, 2, -1, sides.shape[2])[:, :, :h]
    sides = sides.reshape(b, rows, 2 * h, -1)
    gate = gate[:, : projection.gates].reshape(b, rows, projection.gates, -1)
    return Residuals(sides=sides, gate=gate, y=update.multiply(sides, h))


def _end(update: Update, found: Residuals) -> Output[jax.Array]:
    return update.end([_in_rows(found.y)], _in_rows(found.gate))


def _in_rows(x: jax.Array) -> jax.Array:
    """(B, N, ...) as (B N, ...)."""
    return x.reshape(-1, *x.shape[2:])


def _gradient(
    form: Form[jax.Array],
    kept: list[jax.Array],
    dout: jax.Array,
    kernels: _Kernels,
    *,
    of_mask: bool,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of the operands, from what was kept or, where that is nothing, from the operands alone."""
    where: dict[str, Any] = dict(target=target, interpret=interpret)
    update = Update.of(form, kernels.forward, **where)
    found = Residuals(*kept) if kept else _residuals(update)
    end = _end(update, found)
    dout = _in_rows(dout)
    of_output = None  # other dtypes than float16 have the range of float32
    if form.compute_dtype == jnp.float16:
        if _jax.has_triton() and not _is_wide(end):
            largest = trimul_output_scales.find_largest(end, dout, **where)
        else:
            largest = output_scales.find_largest(end, dout)
        of_output = output_scales.scales(end, largest)
    of_end = kernels.chosen(mosaic_output, trimul_output_backward, "output_backward", end, **where)(
        end, dout, of_output
    )
    dsides = _sides_backward(update, found.sides, of_end.y.reshape(found.y.shape))
    scales = _scales(update, of_output)
    given = Given(left=_in_rows(dsides[0]), right=_in_rows(dsides[1]), gate=of_end.gate, scales=scales)
    projection = update.projection
    of_x = kernels.chosen(mosaic_project, trimul_project_backward, "project_backward", projection, **where)(
        projection, given, of_mask=of_mask
    )
    of_w = kernels.chosen(mosaic_weights, trimul_weights_backward, "weights_backward", projection, **where)(
        projection, of_x.z, given
    )
    dx = of_x.x
    if form.residual:
        dx = dx.astype(jnp.float32) + dout.reshape(dx.shape).astype(jnp.float32)
    # Of the projections, whose weights are scaled, and of their gates, whose are not.
    (left, right), (of_projections, of_gates, of_gate, _) = update.scales, scales
    by = jnp.stack([of_projections * left, of_gates, of_projections * right, of_gates])
    found_all = (
        dx.reshape(form.x.shape),
        None if of_x.mask is None else of_x.mask.reshape(form.x.shape[:3]),
        of_x.scale,
        of_x.shift,
        of_w.w * by[:, None],
        None if of_w.bias is None else of_w.bias * by[:, None],
        of_end.scale,
        of_end.shift,
        of_w.w_gate * of_gate,
        None if of_w.b_gate is None else of_w.b_gate * of_gate,
        of_end.w,
        of_end.bias,
    )
    return tuple(
        None if d is None or x is None else d.astype(x.dtype)
        for d, x in zip(found_all, form.operands, strict=True)
    )


def _sides_backward(update: Update, sides: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """The cotangents of left and of right, (B, N, H, N'), scaled by `Update.factor` and as both are."""
    h, incoming = update.form.hidden, update.form.direction == "incoming"

    def product(transpose: tuple[bool, bool], side: int) -> jax.Array:
        """The product of dy and a side, or for the incoming direction of a side and dy."""
        form = Product(
            sides=sides if incoming else dy,
            right=dy if incoming else sides,
            channels=h,
            left_from=side * h if incoming else 0,
            right_from=0 if incoming else side * h,
            transpose_left=transpose[0],
            transpose_right=transpose[1],
            factor=update.factor,
            precision=update.form.precision,
            by_rows=True,
        )
        return update.kernels.multiply(form, target=update.target, interpret=update.interpret)

    if incoming:  # y = left' right
        return [product((False, True), 1), product((False, False), 0)]
    return [product((False, False), 1), product((True, False), 0)]  # y = left right'


def _scales(update: Update, scales: jax.Array | None) -> jax.Array:
    """The scales of `Given`, from the scales of the end's cotangents."""
    of_y, of_gate = (jnp.float32(1.0), jnp.float32(1.0)) if scales is None else scales[1:]
    shrink = jnp.float32(1.0)
    if update.form.factors is not None and update.form.compute_dtype == jnp.float16:
        largest = jnp.maximum(jnp.max(update.bounds[:, 4]), 1.0)
        shrink = powers_of_two(largest) * 2.0**-14
    # The cotangent of a side is scaled by as much as the other side is, and its weights by as much as the side.
    left, right = update.scales
    both = 1.0 / (update.factor * of_y) / left / right
    return jnp.stack([both / shrink, both / GATED, 1.0 / of_gate, shrink])
