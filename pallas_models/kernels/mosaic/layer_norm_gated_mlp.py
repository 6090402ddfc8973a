"""A gated MLP of a layer norm, for Hopper GPUs and 64 or 128 channels.

What is hidden never leaves the registers: a warpgroup has a norm of 64 positions in registers, then 64 hidden
channels at a time a gate, its product and their part of the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.layer_norm_gated_mlp import Form
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import PIECE, ROWS, in_pieces, loaded, normed, pieces
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, with_sums
from pallas_models.kernels.mosaic.common.row_copies import copy_back
from pallas_models.kernels.mosaic.layer_norm_gated_mlp_walk import Steps, Walk
from pallas_models.target import Target

_SLOTS = 2  # for positions: the next ones are copied while results leave the place of those before


def _walk(form: Form[Any], target: Target, *, interpret: bool = False) -> Walk:
    return Walk.of(form, ("x",), {}, _SLOTS, target, num_cores=num_cores(target, interpret))


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `layer_norm_gated_mlp` does not serve a call; None if it does."""
    return _walk(form, target).unsupported()


def prefer(form: Form[Any], target: Target) -> bool:
    """Whether there are positions for all multiprocessors: each reads all weights, which takes 12 us."""
    return form.sizes[0] >= ROWS * target.num_cores


def layer_norm_gated_mlp(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """The result, (M, C), in one kernel."""
    del config
    (out,) = _walk(form, target, interpret=interpret).launch(
        _work,
        (form.x,),
        dict(out=jax.ShapeDtypeStruct((1, *form.x.shape), form.x.dtype)),
        name="layer_norm_gated_mlp",
        interpret=interpret,
    )
    return out.reshape(form.x.shape)


def _work(steps: Steps, own: jax.Array) -> None:
    """Computes the results of a warpgroup, each in the place of the positions that it is made of."""
    refs, form = steps.refs, steps.walk.form

    def leave(step: jax.Array) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        steps.tiles.release(jax.lax.rem(step, _SLOTS))

    @pl.loop(0, steps.count)
    def _(step: jax.Array) -> None:
        slot = jax.lax.rem(step, _SLOTS)
        x_smem = refs.x_smem.at[slot, own]
        steps.tiles.wait(slot)
        zs = normed(loaded(x_smem), form.epsilon, refs.scale, refs.offset)
        zs = [z.astype(form.w_down.dtype) for z in zs]

        @pl.when(step > 0)
        def _() -> None:
            leave(step - 1)

        def compute(sums: Ref) -> jax.Array:
            @pl.loop(0, steps.walk.chunks)
            def _(chunk: jax.Array) -> None:
                stage = steps.stage(step, chunk)
                hidden = _hidden(form, zs, refs.gate_up_smem.at[stage])
                multiply(sums, hidden, refs.down_smem.at[stage])
                plgpu.wgmma_wait(0)
                steps.weights.release(stage)

            return in_layout(sums)

        parts = in_pieces(with_sums(compute, (ROWS, refs.x.shape[2])))
        if form.residual:
            parts = [part + x for part, x in zip(parts, loaded(x_smem), strict=True)]
        for i, part in enumerate(parts):
            x_smem[i] = part.astype(x_smem.dtype)
        plgpu.commit_smem()
        for i, piece in enumerate(pieces(refs.x.shape[2])):
            copy_back(x_smem.at[i], refs.out, (jnp.int32(0), steps.rows(step, own).start, piece.start))

    leave(steps.count - 1)


def _hidden(form: Form[Any], zs: list[jax.Array], w: Ref) -> jax.Array:
    """What the gate leaves of some hidden channels, by their weights (2, C, PIECE)."""

    def compute(gate: Ref, up: Ref) -> list[jax.Array]:
        for i, sums in enumerate((gate, up)):
            for z, piece in zip(zs, pieces(form.x.shape[1]), strict=True):
                multiply(sums, z, w.at[i, piece])
                plgpu.wgmma_wait(1)  # each under way has a copy of z, and there is room for two
        plgpu.wgmma_wait(0)
        return [in_layout(sums) for sums in (gate, up)]

    gate, up = with_sums(compute, *[(ROWS, PIECE)] * 2)
    return (activate(form.activation, gate, form.w_down.dtype) * up).astype(form.w_down.dtype)
