"""The gradient of a gated MLP of a layer norm, for Hopper GPUs and 64 or 128 channels.

It computes what is hidden again: of 64 positions and 64 hidden channels at a time a gate, its product and the
cotangent of what the gate leaves, and of these the cotangents of gate and product. Their products with the weights
add up in registers to the cotangent of the norm; beside the norm and what the gate leaves they are stored for the
weights' own gradients, which are products over all positions.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.activations import slope
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.layer_norm_gated_mlp import Form
from pallas_models.kernels.mosaic import layer_norm_gated_mlp as forward
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import (
    PIECE,
    ROWS,
    along_rows,
    in_pieces,
    loaded,
    mean,
    pieces,
    same_rows,
)
from pallas_models.kernels.mosaic.common.device_sums import sums_of_parts
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS, layout_cast, load
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, with_sums
from pallas_models.kernels.mosaic.common.row_copies import copy_back
from pallas_models.kernels.mosaic.common.row_stores import SUMMED, column_sums
from pallas_models.kernels.mosaic.common.shared_memory import Buffer
from pallas_models.kernels.mosaic.common.turns import WORKERS
from pallas_models.kernels.mosaic.layer_norm_gated_mlp_walk import Steps, Walk
from pallas_models.target import Target

_STAGED = 3  # the cotangents of gate and product, and what the gate leaves


class Gradient(NamedTuple):
    """What the kernel computes.

    Attributes:
      x: (M, C), the cotangent.
      scale: (C,), the cotangent.
      offset: (C,), the cotangent.
      z: (M, C), the layer norm in the dtype of the weights.
      gate_up: (M, 2 H), the cotangents of the gate, and then of what it is multiplied by.
      hidden: (M, H), what the gate leaves.
    """

    x: jax.Array
    scale: jax.Array
    offset: jax.Array
    z: jax.Array
    gate_up: jax.Array
    hidden: jax.Array


def _walk(form: Form[Any], target: Target, *, interpret: bool = False) -> Walk:
    dtype = form.w_down.dtype
    kept = dict(staged_smem=Buffer((WORKERS, _STAGED, ROWS, PIECE), dtype, ROW_BYTES))
    return Walk.of(form, ("x", "dout"), kept, 1, target, num_cores=num_cores(target, interpret))


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `layer_norm_gated_mlp_backward` does not serve a call; None if it does."""
    if form.x.dtype != form.w_down.dtype:
        return f"takes x in the dtype of the weights, {form.w_down.dtype}, not {form.x.dtype}"
    return _walk(form, target).unsupported()


def prefer(form: Form[Any], target: Target) -> bool:
    """Whether it is the faster gradient: for as many positions as the forward pass wants, none of them copied."""
    return forward.prefer(form, target) and form.sizes[0] % TILE_ROWS == 0


def layer_norm_gated_mlp_backward(
    form: Form[jax.Array], dout: jax.Array, *, target: Target, interpret: bool
) -> Gradient:
    """The gradient but for the weights, of the cotangent (M, C) of the result."""
    m, c, h = form.sizes
    walk = _walk(form, target, interpret=interpret)
    dx, z, dgate_up, hidden, sums = walk.launch(
        _work,
        (form.x, dout),
        dict(
            dx=jax.ShapeDtypeStruct((1, m, c), form.x.dtype),
            z=jax.ShapeDtypeStruct((1, m, c), form.x.dtype),
            dgate_up=jax.ShapeDtypeStruct((1, m, 2 * h), form.x.dtype),
            hidden=jax.ShapeDtypeStruct((1, m, h), form.x.dtype),
            sums=jax.ShapeDtypeStruct((2, c // PIECE, walk.num_ctas, WORKERS, 4 * SUMMED), jnp.float32),
        ),
        name="layer_norm_gated_mlp_backward",
        interpret=interpret,
    )
    dscale, doffset = sums_of_parts(sums.reshape(2, c // PIECE, -1, SUMMED), axis=1)
    return Gradient(
        x=dx.reshape(m, c),
        scale=dscale.reshape(c),
        offset=doffset.reshape(c),
        z=z.reshape(m, c),
        gate_up=dgate_up.reshape(m, 2 * h),
        hidden=hidden.reshape(m, h),
    )


def _work(steps: Steps, own: jax.Array) -> None:
    """Takes all tiles of a warpgroup, and stores the sums over their positions."""
    refs, parts = steps.refs, len(pieces(steps.walk.form.x.shape[1]))
    layout = plgpu.Layout.WG_STRIDED((4 * SUMMED,), vec_size=2)
    zeros = layout_cast(jnp.zeros((4 * SUMMED,), jnp.float32), layout)
    tiles = _Tiles(steps, own)
    totals = jax.lax.fori_loop(0, steps.count, tiles.step, [[zeros] * parts] * 2)
    for i, some in enumerate(totals):
        for j, total in enumerate(some):
            refs.sums.at[i, j, steps.cta, own][...] = total


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of a warpgroup."""

    steps: Steps
    own: jax.Array

    @property
    def form(self) -> Form[Any]:
        return self.steps.walk.form

    def step(self, step: jax.Array, totals: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Stores all that positions of a step have, and adds to the sums over positions."""
        steps, refs, form, item = self.steps, self.steps.refs, self.form, jnp.int32(0)
        rows, c = steps.rows(step, self.own), form.x.shape[1]
        x_smem, dout = refs.x_smem.at[0, self.own], refs.dout_smem.at[0, self.own]
        steps.tiles.wait(jnp.int32(0))
        given = [load(x_smem.at[i], plgpu.Layout.WGMMA) for i in range(c // PIECE)]
        xs = [x.astype(jnp.float32) for x in given]
        center = mean(xs, c)
        xs = [x - along_rows(center, PIECE) for x in xs]
        inverse = jax.lax.rsqrt(mean([x * x for x in xs], c) + form.epsilon)
        # The norm takes the place of x, of which the registers have a copy, and the gradient that of the norm.
        for i, (x, piece) in enumerate(zip(xs, pieces(c), strict=True)):
            z = x * along_rows(inverse, PIECE) * same_rows(refs.scale.at[piece]) + same_rows(refs.offset.at[piece])
            x_smem[i] = z.astype(x_smem.dtype)
        plgpu.commit_smem()
        for i, piece in enumerate(pieces(c)):
            copy_back(x_smem.at[i], refs.z, (item, rows.start, piece.start))
        dzs = in_pieces(with_sums(lambda sums: self.pulled(step, rows, x_smem, dout, sums), (ROWS, c)))
        units = [(x.astype(jnp.float32) - along_rows(center, PIECE)) * along_rows(inverse, PIECE) for x in given]
        # The last tile may be that of both warpgroups.
        counts = jnp.broadcast_to(steps.tile(step, self.own) < steps.walk.tiles, (4 * SUMMED,))
        totals = [
            [total + jnp.where(counts, column_sums(term), 0.0) for total, term in zip(some, terms, strict=True)]
            for some, terms in zip(
                totals, ([d * unit for d, unit in zip(dzs, units, strict=True)], dzs), strict=True
            )
        ]
        dus = [d * same_rows(refs.scale.at[piece]) for d, piece in zip(dzs, pieces(c), strict=True)]
        average = along_rows(mean(dus, c), PIECE)
        along = along_rows(mean([du * unit for du, unit in zip(dus, units, strict=True)], c), PIECE)
        residuals = loaded(dout) if form.residual else [None] * len(dus)
        for i, (du, unit, residual) in enumerate(zip(dus, units, residuals, strict=True)):
            dx = (du - average - unit * along) * along_rows(inverse, PIECE)
            x_smem[i] = (dx if residual is None else dx + residual).astype(x_smem.dtype)
        plgpu.commit_smem()  # all have read
        for i, piece in enumerate(pieces(c)):
            copy_back(x_smem.at[i], refs.dx, (item, rows.start, piece.start))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        steps.tiles.release(jnp.int32(0))
        return totals

    def pulled(self, step: jax.Array, rows: pl.Slice, z: Ref, dout: Ref, sums: Ref) -> jax.Array:
        """The cotangent of the layer norm, times its scale and with its offset, added up in `sums`."""
        steps, refs, form = self.steps, self.steps.refs, self.form
        staged, item, h = refs.staged_smem.at[self.own], jnp.int32(0), form.w_down.shape[0]

        @pl.loop(0, steps.walk.chunks)
        def _(chunk: jax.Array) -> None:
            stage = steps.stage(step, chunk)
            gate_up, down = refs.gate_up_smem.at[stage], refs.down_smem.at[stage]
            gate, up, dhidden = _hidden(z, dout, gate_up, down)
            value, derivative = _activate_and_slope(form.activation, gate, form.x.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, part in enumerate((dhidden * up * derivative, dhidden * value, value * up)):
                staged[i] = part.astype(staged.dtype)
            plgpu.commit_smem()
            for i in range(2):
                multiply(sums, staged.at[i], gate_up.at[i], transpose_b=True)
            column = pl.multiple_of(chunk * PIECE, PIECE)
            for i in range(2):
                copy_back(staged.at[i], refs.dgate_up, (item, rows.start, i * h + column))
            copy_back(staged.at[2], refs.hidden, (item, rows.start, column))
            plgpu.wgmma_wait(0)
            steps.weights.release(stage)

        return in_layout(sums)


def _hidden(z: Ref, dout: Ref, gate_up: Ref, down: Ref) -> list[jax.Array]:
    """Of some hidden channels the gate, what it multiplies, and the cotangent of their product.

    Args:
      z: (pieces, ROWS, PIECE), as `dout`.
      gate_up: (2, C, PIECE), the weights.
      down: (PIECE, C), the weights.
    """

    def compute(*sums: Ref) -> list[jax.Array]:
        for i, piece in enumerate(pieces(down.shape[1])):
            for j in range(2):
                multiply(sums[j], z.at[i], gate_up.at[j, piece])
            multiply(sums[2], dout.at[i], down.at[:, piece], transpose_b=True)
        plgpu.wgmma_wait(0)
        return [in_layout(some) for some in sums]

    return with_sums(compute, *[(ROWS, PIECE)] * 3)


def _activate_and_slope(activation: str | None, x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`activate`, and the slope of the activation at `x`; of "silu" and "sigmoid" both by one exponential."""
    if activation is None:
        return x, jnp.ones_like(x)
    if activation not in ("silu", "sigmoid"):
        return activate(activation, x, dtype), slope(activation, x, jnp.exp2)
    s = activate("sigmoid", x, dtype)
    return (s, s * (1.0 - s)) if activation == "sigmoid" else (x * s, s * (1.0 + x * (1.0 - s)))
