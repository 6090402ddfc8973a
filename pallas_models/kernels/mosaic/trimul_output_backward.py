"""The gradient of the end of the triangle multiplicative update, for Hopper GPUs and up to 128 channels.

What is added up is few products. With u the normalised y without scale and shift, d the cotangent of the result
times the gate, and U = u' d and s = 1' d their sums over positions, the norm and the projection after it give

    dw = scale U + shift s,  dscale = sum of w U over columns,  dshift = w s,  dbias = s,

so that neither scale nor shift is needed in between: what is multiplied is u, and w times the scale. Where the
gate comes before the projection, operands of products and cotangents of the norm are added up as they are.
"""

import jax
import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.common import trimul_output_scales, trimul_scales
from pallas_models.kernels.common.steps import shared_step
from pallas_models.kernels.forms.trimul import Output
from pallas_models.kernels.forms.trimul_backward import OfEnd
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import ROWS
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.launch import launch
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.kernels.mosaic.trimul_output_backward_kernel import PAIRS, PULLERS, Kernel, Numbers
from pallas_models.kernels.mosaic.trimul_project_parts import Tiles
from pallas_models.target import Target

_ONES = 8  # columns of ones: the fewest that tensor cores multiply
_WIDTHS = 64, 128


def unsupported(form: Output[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `output_backward` does not serve a call; None if it does."""
    del target
    (h, c), dtype = form.w.shape, form.w.dtype
    if not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer to read and store what it transposes, not {jax.__version__}"
    if dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {dtype}"
    if h not in _WIDTHS or c not in _WIDTHS:
        return f"takes 64 or 128 channels and hidden channels, not {c} and {h}"
    if len(form.ys) > 1 or form.ys[0].shape[2] % ROWS:
        return f"takes y in one part and positions in multiples of {ROWS}, not {[y.shape for y in form.ys]}"
    return None


@shared_step
def output_backward(
    form: Output[jax.Array],
    dout: jax.Array,
    scales: jax.Array | None,
    *,
    target: Target,
    interpret: bool,
) -> OfEnd:
    """The gradient of the end of the update, for the cotangent (B, M, C) of its result.

    Beside what `trimul_output_backward` of Triton rounds, it rounds w times the scale of the norm, and the
    normalised y without scale and shift; or, where the gate comes first, the cotangent of the norm.
    """
    (y,), (h, c), dtype = form.ys, form.w.shape, form.w.dtype
    (items, _, width), gates = y.shape, c if form.gate_after else h
    kept, rows = form.rows
    tiles = Tiles(items, width, kept, rows)
    num_ctas = min(num_cores(target, interpret), tiles.count)
    weights, numbers, vectors = _prepared(form, scales)
    float32 = jnp.dtype(jnp.float32)
    sums = [(h, c), (c, _ONES)] + ([] if form.gate_after else [(h, _ONES)])
    dout_slots = 2 if dout.dtype.itemsize == 2 else 1
    dy, dgate, *totals = launch(
        Kernel(tiles, num_ctas, form.gate_after, dout_slots),
        dict(
            y=y,
            gate=form.gate,
            dout=dout,
            w=weights,
            ones=jnp.broadcast_to(jnp.eye(2, _ONES, dtype=dtype)[..., None], (2, _ONES, ROWS)),
            numbers=jnp.stack(numbers),
            vectors=vectors,
        ),
        dict(
            dy=jax.ShapeDtypeStruct((items, h, width), dtype),
            dgate=jax.ShapeDtypeStruct((items, gates, width), dtype),
            **{f"sum{i}": jax.ShapeDtypeStruct((num_ctas, *shape), float32) for i, shape in enumerate(sums)},
        ),
        dict(
            w_smem=tiled((h, c), dtype),
            ones_smem=tiled((2, _ONES, ROWS), dtype),
            y_smem=tiled((PAIRS, h, ROWS), dtype),
            gate_smem=tiled((PAIRS, gates, ROWS), dtype),
            dout_smem=tiled((dout_slots, ROWS, c), dout.dtype),
            product_smem=tiled((PULLERS, ROWS, c if form.gate_after else max(h, c)), dtype),
            operand_smem=tiled((PULLERS, ROWS, h), dtype),
            weights_full=plgpu.Barrier(num_arrivals=2),
            pair_full=plgpu.Barrier(num_arrivals=2, num_barriers=PULLERS * PAIRS),
            pair_free=plgpu.Barrier(num_barriers=PAIRS),
            dout_full=plgpu.Barrier(num_barriers=PULLERS * dout_slots),
            dout_free=plgpu.Barrier(num_barriers=dout_slots),
            staged=plgpu.Barrier(num_barriers=PULLERS),
            added=plgpu.Barrier(num_barriers=PULLERS),
        ),
        name="trimul_output_backward",
        num_ctas=num_ctas,
        num_warpgroups=PULLERS + 2,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # each row is in the four threads that exchange sums of it
    )
    return _finished(form, numbers, dy, dgate, [jnp.sum(total, axis=0) for total in totals])


def _prepared(form: Output[jax.Array], scales: jax.Array | None) -> tuple[jax.Array, Numbers, jax.Array]:
    """The weights that are multiplied, the numbers, and vectors: of the result, (1, C), or of the norm, (2, H)."""
    dtype, ones = form.w.dtype, jnp.ones(3, jnp.float32)
    of_product, of_y, of_gate = ones if scales is None else scales
    # Powers of two, but for what is beyond float32, where no cotangent is but 0.
    of_y, of_gate = (jnp.minimum(by / of_product, 2.0**126) for by in (of_y, of_gate))
    y_scale, epsilon = trimul_output_scales.scaled(form)
    w, scale, shift = (a.astype(jnp.float32) for a in (form.w, form.scale, form.shift))
    is_half = dtype == jnp.float16
    if not form.gate_after:
        # No cotangent of the norm, nor its product with the normalised y, at most 12, is beyond float16.
        by = trimul_scales.powers_of_two(jnp.max(jnp.sum(jnp.abs(w), axis=1))) * 2.0**-18 if is_half else ones[0]
        numbers = Numbers(epsilon, of_product, of_y * y_scale, of_gate, by)
        return form.w, numbers, jnp.stack([scale, shift])
    w = w * scale[:, None]
    by = trimul_scales.powers_of_two(jnp.max(jnp.abs(w))) if is_half else ones[0]
    out = jnp.sum(shift[:, None] * form.w.astype(jnp.float32), axis=0)
    out = out if form.bias is None else out + form.bias
    numbers = Numbers(epsilon, of_product, of_y * (y_scale / by), of_gate / by, ones[0])
    return (w * by).astype(dtype), numbers, (out * of_gate)[None]


def _finished(
    form: Output[jax.Array], numbers: Numbers, dy: jax.Array, dgate: jax.Array, totals: list[jax.Array]
) -> OfEnd:
    """The cotangents, from the sums over positions."""
    dw, db, *of_norm = (total / numbers.of_product for total in totals)
    db, of_norm = db[:, 0], [total[:, i] / numbers.of_norm for total in of_norm for i in range(2)]
    if form.gate_after:
        w, scale, shift = (a.astype(jnp.float32) for a in (form.w, form.scale, form.shift))
        of_norm = [jnp.sum(w * dw, axis=1), jnp.sum(w * db, axis=1)]
        dw = scale[:, None] * dw + shift[:, None] * db
    return OfEnd(
        y=dy, gate=dgate, w=dw, scale=of_norm[0], shift=of_norm[1], bias=None if form.bias is None else db
    )
