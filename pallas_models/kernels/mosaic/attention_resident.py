"""Attention of heads of 32 on Hopper GPUs: a CTA has few queries of a head, and all keys in shared memory.

With so narrow heads scores cost more instructions than products: exponentials must never wait. Of CTAs of one
warpgroup three or more share a multiprocessor, and while one waits for its products the others compute.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.scores import NO_KEY, exponents, first_heads_of, lowest_score
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, tiled
from pallas_models.kernels.mosaic.common.scores import softmax_weights
from pallas_models.target import Target

_ROWS = 64  # queries of a tile: the rows of one instruction of the tensor cores
_HEAD_DIM = 32
_MOST_KEYS = 512  # with which three CTAs fit on a multiprocessor


def unsupported(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    *,
    head_dim: int,
    causal: bool,
    window: int | None,
    sm_scale: float,
    **_: Any,
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    seq, kv_seq = qkv[0].shape[1], qkv[-1].shape[1]
    if qkv[0].dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {qkv[0].dtype}"
    if head_dim != _HEAD_DIM:
        return f"takes heads of {_HEAD_DIM}, not {head_dim=}"
    if causal or window is not None or bias is not None or segment_ids is not None:
        return "takes no masks of pairs and no bias"
    if sm_scale <= 0.0:
        return f"takes positive scales, not {sm_scale=}"
    if seq % _ROWS or kv_seq % _ROWS or kv_seq > _MOST_KEYS:
        return (
            f"takes lengths in multiples of {_ROWS}, up to {_MOST_KEYS} keys, not {seq} queries and {kv_seq} keys"
        )
    return None


def prefer(qkv: tuple[jax.Array, ...], *_: Any, num_heads: int, **__: Any) -> bool:
    """Whether it is the faster kernel for a call that it serves, as measured on an H200."""
    (batch, seq), kv_seq = qkv[0].shape[:2], qkv[-1].shape[1]
    return kv_seq >= 128 and batch * num_heads * seq >= 32 * 12 * 512  # fewer do not pay for `_runs`, or wait


def _attention_kernel(
    refs: Refs,
    *,
    tiles: int,
    block_kv: int,
    num_heads: int,
    num_kv_heads: int,
    first_heads: tuple[int, int, int],
    sm_scale: float,
    interpret: bool,
) -> None:
    """Attends for the tiles of this CTA.

    Args:
      refs: q (B, Sq, heads * 32), k and v (B, Skv, kv_heads * 32), or buffers that have these columns among
        others; mask (B, Skv) and runs (B, 2) or None; o like q, and lse (B, heads, Sq) if asked for; and scratch
        memory.
    """
    seq, kv_seq, dtype = refs.o.shape[1], refs.k.shape[1], refs.o.dtype
    count, parts = kv_seq // block_kv, seq // (tiles * _ROWS)
    # Base-2 exponentials are the GPU's own. Scores stay unscaled up to these.
    scale = sm_scale * math.log2(math.e)
    div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers
    cta = jax.lax.axis_index("cta")
    part, cta = rem(cta, parts), div(cta, parts)
    batch, head = div(cta, num_heads), rem(cta, num_heads)
    end, whole = jnp.int32(count), jnp.int32(count)
    if refs.runs is not None:
        end, whole = refs.runs[batch, 0], refs.runs[batch, 1]

    def columns(operand: int) -> pl.Slice:
        index = div(head, num_heads // num_kv_heads) if operand else head
        return pl.Slice((first_heads[operand] + index) * _HEAD_DIM, _HEAD_DIM)

    def rows_of(tile: jax.Array) -> pl.Slice:
        return pl.Slice((part * tiles + tile) * _ROWS, _ROWS)

    def copy_queries(tile: jax.Array) -> None:
        source = refs.q.at[batch, rows_of(tile), columns(0)]
        plgpu.copy_gmem_to_smem(source, refs.q_tiles.at[tile], refs.q_ready.at[tile])

    def copy_keys(j: jax.Array) -> None:
        rows = pl.Slice(j * block_kv, block_kv)
        plgpu.copy_gmem_to_smem(refs.k.at[batch, rows, columns(1)], refs.k_blocks.at[j], refs.k_ready.at[j])
        plgpu.copy_gmem_to_smem(refs.v.at[batch, rows, columns(2)], refs.v_blocks.at[j], refs.v_ready.at[j])

    def attend(tile: jax.Array, _: None) -> None:
        queries = refs.q_tiles.at[tile]
        plgpu.barrier_wait(refs.q_ready.at[tile])

        def wait(ready: Ref, j: jax.Array) -> None:
            pl.when(tile == 0)(lambda: plgpu.barrier_wait(ready.at[j]))

        def scores_of(j: jax.Array) -> jax.Array:
            wait(refs.k_ready, j)
            keys = refs.k_blocks.at[j]

            def product(scores: Ref) -> jax.Array:
                plgpu.wgmma(scores, queries, keys.transpose((1, 0)))
                return scores[...]

            def masked(scores: jax.Array) -> jax.Array:
                row = refs.mask.at[batch, pl.ds(j * block_kv, block_kv)]
                row = load(row, plgpu.Layout.WGMMA.reduce(0))
                row = jax.lax.broadcast_in_dim(row, scores.shape, [1])
                # Where that is not said, to infer the layouts of integers takes long.
                row = row if interpret else plgpu.layout_cast(row, plgpu.Layout.WGMMA)
                return jnp.where(row != 0, scores, -jnp.inf)

            if interpret:  # without products of what is in registers, and sums that can be set
                scores = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
            else:
                scores = pl.run_scoped(product, plgpu.ACC((_ROWS, block_kv), jnp.float32))
            return scores if refs.mask is None else jax.lax.cond(j < whole, lambda x: x, masked, scores)

        def add_values(sums: Ref, weights: jax.Array, j: jax.Array) -> None:
            wait(refs.v_ready, j)
            if interpret:
                sums[...] += jnp.dot(weights, refs.v_blocks[j], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
            else:
                plgpu.wgmma(sums, weights, refs.v_blocks.at[j])

        def weights_of(scores: jax.Array, peak: jax.Array | float) -> tuple[jax.Array, ...]:
            """Weights, the maximum of each row and those before, and the sum of its weights."""
            peak = jnp.maximum(jnp.max(scores, axis=1), peak)
            weights = softmax_weights(scores, peak, scale)
            total = jnp.sum(weights, axis=1)
            # By their dtype weights are operands, which must not change while a product is under way.
            return weights.astype(dtype), peak, total

        first = weights_of(scores_of(jnp.int32(0)), lowest_score(scale))

        def walk(sums: Ref) -> None:
            def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                weights, before, total = carry
                add_values(sums, weights, j - 1)
                weights, peak, more = weights_of(scores_of(j), before)
                correction = jnp.exp2(exponents(before, scale)[1] - exponents(peak, scale)[1])
                value = sums[...]
                sums[...] = value * jax.lax.broadcast_in_dim(correction, value.shape, [0])
                return weights, peak, total * correction + more

            weights, peak, total = jax.lax.fori_loop(1, end, step, first) if count > 1 else first
            add_values(sums, weights, end - 1)
            value = sums[...]
            empty = total == 0.0  # no key took part
            factor = jnp.where(empty, 0.0, 1.0 / total)
            queries[...] = (value * jax.lax.broadcast_in_dim(factor, value.shape, [0])).astype(dtype)
            if refs.lse is not None:
                lse = jnp.where(empty, NO_KEY, peak * (scale * math.log(2)) + jnp.log(total))
                refs.lse_tiles[tile] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, refs.o.at[batch, rows_of(tile), columns(0)])
            if refs.lse is not None:
                plgpu.copy_smem_to_gmem(refs.lse_tiles.at[tile], refs.lse.at[batch, head, rows_of(tile)])

        if interpret:
            refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
            walk(refs.sums)
        else:
            pl.run_scoped(walk, plgpu.ACC((_ROWS, _HEAD_DIM), jnp.float32))

    copy_queries(jnp.int32(0))
    pl.loop(0, end)(copy_keys)
    pl.loop(1, tiles)(copy_queries)
    jax.lax.fori_loop(0, tiles, attend, None)
    plgpu.wait_smem_to_gmem(0)


def _runs(mask: jax.Array, block_kv: int) -> jax.Array:
    """How many blocks of keys to walk over, at least one, and how many of the first need no mask: (B, 2) int32."""
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(mask != 0, index, 0), axis=1)
    hole = jnp.min(jnp.where(mask != 0, mask.shape[1], index), axis=1)
    return jnp.stack([last // block_kv + 1, hole // block_kv], axis=1)


def attention(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: None,
    segment_ids: None,
    kv_segment_ids: None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    window: None,
    sm_scale: float,
    return_lse: bool,
    precision: jax.lax.Precision,
    config: None,
    target: Target,
    interpret: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention as the other kernels of this name compute it, for the calls that are not `unsupported`."""
    del bias, segment_ids, kv_segment_ids, head_dim, causal, window, precision, config, target  # see `unsupported`
    q, k, v = qkv * 3 if len(qkv) == 1 else qkv
    (batch, seq, _), kv_seq, dtype = q.shape, k.shape[1], q.dtype
    block_kv = 128 if kv_seq % 128 == 0 else 64
    tiles = 2 if seq % (2 * _ROWS) == 0 else 1  # of queries
    count = kv_seq // block_kv
    row_bytes = 2 * _HEAD_DIM
    scratch_types = {
        "q_tiles": tiled((tiles, _ROWS, _HEAD_DIM), dtype, row_bytes),
        "k_blocks": tiled((count, block_kv, _HEAD_DIM), dtype, row_bytes),
        "v_blocks": tiled((count, block_kv, _HEAD_DIM), dtype, row_bytes),
        "q_ready": plgpu.Barrier(num_barriers=tiles),
        "k_ready": plgpu.Barrier(num_barriers=count),
        "v_ready": plgpu.Barrier(num_barriers=count),
    }
    if return_lse:
        scratch_types["lse_tiles"] = plgpu.SMEM((tiles, _ROWS), jnp.float32)
    if interpret:
        scratch_types["sums"] = plgpu.SMEM((_ROWS, _HEAD_DIM), jnp.float32)
    out_type = jax.ShapeDtypeStruct((batch, seq, num_heads * _HEAD_DIM), dtype)
    lse_type = jax.ShapeDtypeStruct((batch, num_heads, seq), jnp.float32)
    out, *lse = launch(
        functools.partial(
            _attention_kernel,
            tiles=tiles,
            block_kv=block_kv,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            first_heads=first_heads_of(qkv, num_heads, num_kv_heads),
            sm_scale=sm_scale,
            interpret=interpret,
        ),
        dict(q=q, k=k, v=v, mask=mask, runs=None if mask is None else _runs(mask, block_kv)),
        dict(o=out_type, lse=lse_type if return_lse else None),
        scratch_types,
        name="attention_resident",
        num_ctas=batch * num_heads * seq // (tiles * _ROWS),
        num_warpgroups=1,
        interpret=interpret,
        reduction_scratch_bytes=0,
    )
    return (out, lse[0]) if return_lse else out
