"""The gradients of triangle attention on Hopper's tensor cores.

Scores are computed twice: for the gradients of the queries and of the bias together, and for the gradients of the
keys and the values. One CTA writes each result, in a fixed order: results are the same every time. Here are the
launches; `triangle_attention_backward_kernel` has what the warpgroups of a CTA do, and
`triangle_attention_backward_plan` what CTAs walk over.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.scores import rows_of_backward
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic import attention
from pallas_models.kernels.mosaic.common.attention_walk import ROWS, searched
from pallas_models.kernels.mosaic.common.launch import launch
from pallas_models.kernels.mosaic.triangle_attention_backward_kernel import backward_kernel
from pallas_models.kernels.mosaic.triangle_attention_backward_plan import CONSUMERS, TILE, Side
from pallas_models.target import Target
from pallas_models.tuning import Chooser


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve a call; None where it does."""
    if form.bias is None:
        return "needs a bias"
    return attention.unsupported(form, target)


def triangle_attention_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[Any, ...]:
    """The gradients of the operands of `triangle_attention`, as Triton's `attention_backward` gives them."""
    del config
    (out, lse), (dout, dlse) = kept, cotangents
    assert dout is not None and form.bias is not None
    shift, delta = rows_of_backward(form, out, lse, dout, dlse)
    q, k, v = form.arrays
    read = dict(q=q, k=k, v=v, dout=dout, shift=shift, delta=-delta, mask=form.mask_by_item)

    def call(side: Side, **results: jax.ShapeDtypeStruct | None) -> list[jax.Array]:
        block_q, block_kv = (ROWS, TILE) if side.of_keys else (TILE, ROWS)
        found = searched(form, block_q=block_q, block_kv=block_kv, keys_first=side.of_keys)
        return launch(
            functools.partial(backward_kernel, side=side),
            read | dict(bias=_bias_of(form, side), found=found),
            dict.fromkeys(("dq", "dk", "dv", "dbias")) | results,
            side.scratch_types(),
            name=f"triangle_attention_backward_{side.name}",
            num_ctas=side.num_ctas,
            num_warpgroups=CONSUMERS + 1,
            interpret=interpret,
            reduction_scratch_bytes=0,
        )

    abstract, like = form.abstract(), jax.ShapeDtypeStruct(q.shape, q.dtype)
    of_queries = Side.of(abstract, target, of_keys=False, adds_bias=wanted[2])
    parts = of_queries.parts, of_queries.owners, of_queries.tiles * TILE, form.seq
    dq, *sums = call(of_queries, dq=like, dbias=jax.ShapeDtypeStruct(parts, jnp.float32) if wanted[2] else None)
    dk, dv = call(Side.of(abstract, target, of_keys=True), dk=like, dv=like)
    return (dq, dk, dv), None, _dbias(form, sums[0]) if wanted[2] else None, None, None


def _bias_of(form: Form[jax.Array], side: Side) -> jax.Array:
    """The bias of each element of the batch and head, (owners, rows of tiles, rows of blocks)."""
    assert form.bias is not None
    bias = form.bias.swapaxes(-2, -1) if side.of_keys != (form.item_axis == 2) else form.bias
    bias = bias.reshape(side.owners, *bias.shape[-2:])
    more = pl.cdiv(form.seq, TILE) * TILE - form.seq
    return jnp.pad(bias, ((0, 0), (0, more), (0, 0))) if more else bias


def _dbias(form: Form[jax.Array], parts: jax.Array) -> jax.Array:
    """The gradient of the bias, given its parts (parts, owners, rows of whole tiles, N)."""
    assert form.bias is not None
    dbias = jnp.sum(parts, axis=0)[:, : form.seq].reshape(form.bias.shape).astype(form.bias.dtype)
    return dbias.swapaxes(-2, -1) if form.item_axis == 2 else dbias
