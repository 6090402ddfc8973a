"""The gradients of attention on Hopper's tensor cores.

CTAs stay on their multiprocessor and walk over tiles: of queries for the gradients of queries, of keys for the
gradients of keys and values. Scores are computed twice, but each result is written once: nobody waits for others,
and results are the same every time. Here are the launches and their blocks; `attention_backward_kernel` has what
the warpgroups of a CTA do, and `attention_backward_walk` the tiles that they walk over.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.common.scores import rows_of_backward
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic import attention
from pallas_models.kernels.mosaic.attention_backward_kernel import backward_kernel, scratch_types
from pallas_models.kernels.mosaic.attention_backward_walk import CONSUMERS, TILE, Side
from pallas_models.kernels.mosaic.common.attention_together import join, join_rows, joined, part, together
from pallas_models.kernels.mosaic.common.attention_walk import pad_rows, padded_masks, searched
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import launch
from pallas_models.target import Target
from pallas_models.tuning import Chooser

# By head size, rows of a block and blocks in the ring: the fastest on an H200, for a side alone and for both.
# Queries whose masks want room too take the blocks for both.
# Heads of 32 take the blocks of 64; others have not been timed.
_OF_QUERIES = {32: (128, 4), 64: (128, 4), 128: (128, 2)}
_OF_KEYS = {32: (128, 3), 64: (128, 3), 128: (64, 3)}
_OF_BOTH = {32: (128, 4), 64: (128, 4), 128: (64, 3)}


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve a call; None where it does."""
    if form.bias is not None:
        return "takes no bias"
    return attention.unsupported(form, target)


def attention_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[Any, ...]:
    """The gradients of the operands of `attention`, as the Triton kernel of this name gives them."""
    (out, lse), (dout, dlse), head_dim = kept, cotangents, form.head_dim
    assert dout is not None
    if (count := together(form, TILE)) > 1:
        kept = [join(out, count), join_rows(lse, count)]
        cotangents = [join(dout, count), None if dlse is None else join_rows(dlse, count)]
        options: Any = dict(wanted=wanted, config=config, target=target, interpret=interpret)
        qkv, *others = attention_backward(joined(form, count), kept, cotangents, **options)
        return tuple(part(dx, count) for dx in qkv), *others
    del wanted, config  # there are no other operands with gradients, and no other tiles
    padded_dout, *padded = (pad_rows(x, TILE) for x in (dout, *form.qkv))
    q, k, v = form.replace(qkv=tuple(padded)).arrays
    rows, kv_rows = q.shape[1], k.shape[1]
    masks, read_heads = padded_masks(form, rows, kv_rows), form.first_heads
    if masks["mask"] is not None:  # what a masked key holds, NaN for one, would reach the gradients of queries
        width = form.num_kv_heads * head_dim
        k = jnp.where(masks["mask"][..., None] != 0, k[..., read_heads[1] * head_dim :][..., :width], 0)
        read_heads = (read_heads[0], 0, read_heads[2])
    shift, delta = rows_of_backward(form, out, lse, dout, dlse)
    shift, delta = (jnp.pad(x, ((0, 0), (0, 0), (0, rows - form.seq))) for x in (shift, -delta))
    if interpret:
        check_interpreted_sizes(queries=(rows, TILE), keys=(kv_rows, TILE))
    ids = {name: masks[name] for name in ("segments", "mask", "kv_segments")}
    read = dict(q=q, k=k, v=v, dout=padded_dout, shift=shift, delta=delta, **ids)

    def like(x: jax.Array, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:2], heads * head_dim), form.dtype)

    def call(
        blocks: tuple[int, int], *, of_keys: Sequence[bool], **results: jax.ShapeDtypeStruct
    ) -> list[jax.Array]:
        """Runs the kernel for some sides."""
        options = dict(zip(("block", "num_stages"), blocks, strict=True))
        sides = [Side(form=form.abstract(), read_heads=read_heads, of_keys=keys, **options) for keys in of_keys]
        found = {f"found_of_{side.name}": _searched(form, side) for side in sides}
        num_ctas = min(max(side.num_tiles for side in sides), target.num_cores)
        sides = [side.spread(num_ctas) for side in sides]
        sides[1:] = [side.after(sides[0]) for side in sides[1:]]
        return launch(
            functools.partial(backward_kernel, sides=sides),
            read | found,
            dict.fromkeys(("dq", "dk", "dv", "dqkv")) | results,
            scratch_types(sides),
            name="attention_backward",
            num_ctas=num_ctas,
            num_warpgroups=CONSUMERS + 1,
            interpret=interpret,
            reduction_scratch_bytes=0,
        )

    if form.is_fused:
        dqkv = like(q, form.num_heads + 2 * form.num_kv_heads)
        gradients = call(_OF_BOTH[head_dim], of_keys=(False, True), dqkv=dqkv)
    else:
        of_queries = _OF_BOTH if form.has_masks else _OF_QUERIES
        gradients = call(of_queries[head_dim], of_keys=(False,), dq=like(q, form.num_heads))
        of_keys = {"dk": like(k, form.num_kv_heads), "dv": like(v, form.num_kv_heads)}
        gradients += call(_OF_KEYS[head_dim], of_keys=(True,), **of_keys)
    return tuple(dx[:, : x.shape[1]] for dx, x in zip(gradients, form.qkv, strict=True)), None, None, None, None


def _searched(form: Form[jax.Array], side: Side) -> jax.Array | None:
    """The blocks that masks leave of a side."""
    block_q, block_kv = (side.block, TILE) if side.of_keys else (TILE, side.block)
    return searched(form, block_q=block_q, block_kv=block_kv, keys_first=side.of_keys)
