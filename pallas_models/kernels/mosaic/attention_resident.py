"""Attention of heads of 32 on Hopper GPUs: a CTA has few queries of a head, and all keys in shared memory.

With so narrow heads scores cost more instructions than products: exponentials must never wait. Of CTAs of one
warpgroup three or more share a multiprocessor, and while one waits for its products the others compute.
"""

import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.lines import of_pairs, of_rows
from pallas_models.kernels.common.scores import MASKING_BIAS, NO_KEY, exponents, lowest_score
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, load_transposed, tiled
from pallas_models.kernels.mosaic.common.products import multiply, product, put, with_sums
from pallas_models.kernels.mosaic.common.scores import exponent_scale, load_across, masked, softmax_weights
from pallas_models.target import Target

_ROWS = 64  # queries of a tile: the rows of one instruction of the tensor cores
_HEAD_DIM = 32
_MOST_KEYS = 512  # with which three CTAs fit on a multiprocessor

_Carry = tuple[jax.Array, jax.Array, jax.Array]  # weights, maxima and sums of rows


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve a call; None where it does."""
    del target
    head_dim, sm_scale, seq, kv_seq = form.head_dim, form.sm_scale, form.seq, form.kv_seq
    if form.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.dtype}"
    if head_dim != _HEAD_DIM:
        return f"takes heads of {_HEAD_DIM}, not {head_dim=}"
    with_bias = form.bias is not None and form.item_axis is None
    if form.causal or form.window is not None or with_bias or form.segment_ids is not None:
        return "takes no masks of pairs, and a bias for triangle attention alone"
    if form.bias is not None and form.item_axis == 2 and not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer to load a bias that it transposes, not {jax.__version__}"
    if sm_scale <= 0.0:
        return f"takes positive scales, not {sm_scale=}"
    if seq % _ROWS or kv_seq % _ROWS or kv_seq > _MOST_KEYS:
        return (
            f"takes lengths in multiples of {_ROWS}, up to {_MOST_KEYS} keys, not {seq} queries and {kv_seq} keys"
        )
    return None


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the faster kernel for a call that it serves, as measured on an H200."""
    del target
    if form.item_axis is not None:
        return False  # nobody has measured it
    rows = form.batch * form.num_heads * form.seq
    return form.kv_seq >= 128 and rows >= 32 * 12 * 512  # fewer do not pay for `_runs`, or wait


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What is known of a launch beforehand."""

    form: Form[Any]

    @property
    def tiles(self) -> int:
        """Tiles of queries of a CTA."""
        return 2 if self.form.seq % (2 * _ROWS) == 0 else 1

    @property
    def parts(self) -> int:
        """CTAs of a head."""
        return self.form.seq // (self.tiles * _ROWS)

    @property
    def block_kv(self) -> int:
        """Keys of a step."""
        return 128 if self.form.kv_seq % 128 == 0 else 64

    @property
    def blocks(self) -> int:
        """Blocks of keys."""
        return self.form.kv_seq // self.block_kv

    @property
    def scale(self) -> float:
        return exponent_scale(self.form)

    @property
    def has_keys_first(self) -> bool:
        """Whether the bias has an axis of keys, then one of queries."""
        return self.form.item_axis == 2

    def scratch_types(self) -> dict[str, Any]:
        """The shared memory and the barriers of a CTA."""
        tiles, blocks, dtype, row_bytes = self.tiles, self.blocks, self.form.dtype, 2 * _HEAD_DIM
        types = {
            "q_tiles": tiled((tiles, _ROWS, _HEAD_DIM), dtype, row_bytes),
            "k_blocks": tiled((blocks, self.block_kv, _HEAD_DIM), dtype, row_bytes),
            "v_blocks": tiled((blocks, self.block_kv, _HEAD_DIM), dtype, row_bytes),
            "q_ready": plgpu.Barrier(num_barriers=tiles),
            "k_ready": plgpu.Barrier(num_barriers=blocks),
            "v_ready": plgpu.Barrier(num_barriers=blocks),
        }
        if self.form.bias is not None:
            shape = (self.block_kv, _ROWS) if self.has_keys_first else (_ROWS, self.block_kv)
            types |= {"bias_tile": tiled(shape, self.form.bias.dtype), "bias_ready": plgpu.Barrier()}
        return types | ({"lse_tiles": plgpu.SMEM((tiles, _ROWS), jnp.float32)} if self.form.return_lse else {})


class _Head:
    """The tiles of queries of one head that this CTA has."""

    def __init__(self, refs: Refs, plan: _Plan) -> None:
        self.refs, self.plan, num_heads = refs, plan, plan.form.num_heads
        div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers
        cta = jax.lax.axis_index("cta")
        self.part, cta = rem(cta, plan.parts), div(cta, plan.parts)
        self.batch, self.head = div(cta, num_heads), rem(cta, num_heads)
        # Of the blocks of keys, those that are walked over and those that need no mask.
        self.end, self.whole = jnp.int32(plan.blocks), jnp.int32(plan.blocks)
        if refs.runs is not None:
            self.end, self.whole = refs.runs[self.batch, 0], refs.runs[self.batch, 1]

    def run(self) -> None:
        self.copy_queries(jnp.int32(0))
        if self.refs.bias is not None:
            self.copy_bias(jnp.int32(0), jnp.int32(0))
        pl.loop(0, self.end)(self.copy_keys)
        pl.loop(1, self.plan.tiles)(self.copy_queries)
        jax.lax.fori_loop(0, self.plan.tiles, lambda tile, _: self.attend(tile), None)
        plgpu.wait_smem_to_gmem(0)

    def columns(self, operand: int) -> pl.Slice:
        """The columns of the head in the array of operand 0, 1 or 2: the queries, the keys or the values."""
        index = jax.lax.div(self.head, self.plan.form.group) if operand else self.head
        return pl.Slice((self.plan.form.first_heads[operand] + index) * _HEAD_DIM, _HEAD_DIM)

    def rows_of(self, tile: jax.Array) -> pl.Slice:
        return pl.Slice((self.part * self.plan.tiles + tile) * _ROWS, _ROWS)

    def copy_queries(self, tile: jax.Array) -> None:
        refs = self.refs
        source = refs.q.at[self.batch, self.rows_of(tile), self.columns(0)]
        plgpu.copy_gmem_to_smem(source, refs.q_tiles.at[tile], refs.q_ready.at[tile])

    def copy_keys(self, j: jax.Array) -> None:
        """Copies block j of the keys, and of the values."""
        refs, rows = self.refs, pl.Slice(j * self.plan.block_kv, self.plan.block_kv)
        source = refs.k.at[self.batch, rows, self.columns(1)]
        plgpu.copy_gmem_to_smem(source, refs.k_blocks.at[j], refs.k_ready.at[j])
        source = refs.v.at[self.batch, rows, self.columns(2)]
        plgpu.copy_gmem_to_smem(source, refs.v_blocks.at[j], refs.v_ready.at[j])

    def attend(self, tile: jax.Array) -> None:
        """Computes and writes the results of a tile."""
        plgpu.barrier_wait(self.refs.q_ready.at[tile])
        first = self.softmax(self.scores(tile, jnp.int32(0)), lowest_score(self.plan.scale))
        with_sums(functools.partial(self.walk, tile, first), (_ROWS, _HEAD_DIM))

    def walk(self, tile: jax.Array, first: _Carry, sums: Ref) -> None:
        """Adds up all blocks, given the softmax of the first one."""

        def step(j: jax.Array, carry: _Carry) -> _Carry:
            weights, before, total = carry
            self.add_values(sums, tile, weights, j - 1)
            weights, peak, more = self.softmax(self.scores(tile, j), before)
            scale = self.plan.scale
            correction = jnp.exp2(exponents(before, scale)[1] - exponents(peak, scale)[1])
            value = sums[...]
            put(sums, value * jax.lax.broadcast_in_dim(correction, value.shape, [0]))
            return weights, peak, total * correction + more

        weights, peak, total = jax.lax.fori_loop(1, self.end, step, first) if self.plan.blocks > 1 else first
        self.add_values(sums, tile, weights, self.end - 1)
        self.finish(tile, sums[...], peak, total)

    def wait(self, tile: jax.Array, ready: Ref) -> None:
        """Waits for a block of keys or values, where this is the first tile that needs it."""
        pl.when(tile == 0)(lambda: plgpu.barrier_wait(ready))

    def scores(self, tile: jax.Array, j: jax.Array) -> jax.Array:
        """The scores of a tile and block j of the keys, -inf for masked keys."""
        refs = self.refs
        self.wait(tile, refs.k_ready.at[j])
        bias = None if refs.bias is None else self.load_bias(tile, j)
        scores = product(refs.q_tiles.at[tile], refs.k_blocks.at[j], transpose_b=True)
        if bias is not None:
            bias = bias.astype(jnp.float32)
            scores = jnp.where(bias > MASKING_BIAS, scores * self.plan.form.sm_scale + bias, -jnp.inf)
        if refs.mask is None:
            return scores

        def mask(scores: jax.Array) -> jax.Array:
            row = refs.mask.at[self.batch, pl.ds(j * self.plan.block_kv, self.plan.block_kv)]
            return masked(scores, [load_across(row, scores.shape, 1) != 0])

        unchanged: jax.Array = jax.lax.cond(j < self.whole, lambda x: x, mask, scores)
        return unchanged

    def copy_bias(self, tile: jax.Array, j: jax.Array) -> None:
        """Copies the bias of a tile and block j of the keys, as it lies."""
        refs, plan = self.refs, self.plan
        block = self.rows_of(tile), pl.Slice(j * plan.block_kv, plan.block_kv)
        element = jax.lax.div(self.batch, plan.form.items)
        source = refs.bias.at[element, self.head, *block[:: -1 if plan.has_keys_first else 1]]
        plgpu.copy_gmem_to_smem(source, refs.bias_tile, refs.bias_ready)

    def load_bias(self, tile: jax.Array, j: jax.Array) -> jax.Array:
        """The bias of a tile and block j of the keys, as tensor cores leave scores; has the next one copied."""
        refs = self.refs
        plgpu.barrier_wait(refs.bias_ready)
        bias = (load_transposed if self.plan.has_keys_first else load)(refs.bias_tile, plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # all warps have read it
        is_last = j + 1 == self.end
        tile, j = jnp.where(is_last, tile + 1, tile), jnp.where(is_last, 0, j + 1)
        pl.when(tile < self.plan.tiles)(functools.partial(self.copy_bias, tile, j))
        return bias

    def softmax(self, scores: jax.Array, peak: jax.Array | float) -> _Carry:
        """Weights, the maximum of each row and of those before, and the sum of its weights."""
        peak = jnp.maximum(jnp.max(scores, axis=1), peak)
        weights = softmax_weights(scores, peak, self.plan.scale)
        total = jnp.sum(weights, axis=1)
        # By their dtype weights are operands, which must not change while a product is under way.
        return weights.astype(self.refs.o.dtype), peak, total

    def add_values(self, sums: Ref, tile: jax.Array, weights: jax.Array, j: jax.Array) -> None:
        self.wait(tile, self.refs.v_ready.at[j])
        multiply(sums, weights, self.refs.v_blocks.at[j])

    def finish(self, tile: jax.Array, value: jax.Array, peak: jax.Array, total: jax.Array) -> None:
        """Writes the results of a tile, by way of the memory of its queries."""
        refs, queries = self.refs, self.refs.q_tiles.at[tile]
        empty = total == 0.0  # no key took part
        factor = jnp.where(empty, 0.0, 1.0 / total)
        queries[...] = (value * jax.lax.broadcast_in_dim(factor, value.shape, [0])).astype(refs.o.dtype)
        if refs.lse is not None:
            lse = jnp.where(empty, NO_KEY, peak * (self.plan.scale * math.log(2)) + jnp.log(total))
            refs.lse_tiles[tile] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, refs.o.at[self.batch, self.rows_of(tile), self.columns(0)])
        if refs.lse is not None:
            target = refs.lse.at[self.batch, self.head, self.rows_of(tile)]
            plgpu.copy_smem_to_gmem(refs.lse_tiles.at[tile], target)


def _attention_kernel(refs: Refs, *, plan: _Plan) -> None:
    """Attends for the tiles of this CTA.

    Args:
      refs: q (B, Sq, heads * 32), k and v (B, Skv, kv_heads * 32), or buffers that have these columns among
        others, or squares of pairs; mask (B, Skv) and runs (B, 2) or None; bias (B, heads, N, N) or None; o like
        q, and lse (B, heads, Sq) if asked for; and scratch memory.
    """
    pairs = {name: of_pairs(plan.form, getattr(refs, name)) for name in ("q", "k", "v", "o")}
    _Head(types.SimpleNamespace(**vars(refs) | pairs | dict(lse=of_rows(plan.form, refs.lse))), plan).run()


def _runs(mask: jax.Array, block_kv: int) -> jax.Array:
    """How many blocks of keys to walk over, at least one, and how many of the first need no mask: (B, 2) int32."""
    index = jnp.arange(mask.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(mask != 0, index, 0), axis=1)
    hole = jnp.min(jnp.where(mask != 0, mask.shape[1], index), axis=1)
    return jnp.stack([last // block_kv + 1, hole // block_kv], axis=1)


def attention(
    form: Form[jax.Array], *, config: None, target: Target, interpret: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention, (B, Sq, heads * head_dim), and the log-sum-exp that `return_lse` asks for."""
    del config, target  # there are no other tiles
    q, k, v = form.arrays
    # The mask of columns is transposed for the kernel: threads load neighbours together. It is a number a pair.
    plan, mask = _Plan(form=form.abstract()), form.mask_by_item
    runs = None if mask is None else _runs(mask, plan.block_kv)
    out_type = jax.ShapeDtypeStruct(form.out_shape, form.dtype)
    lse_type = jax.ShapeDtypeStruct(form.lse_shape, jnp.float32)
    out, *lse = launch(
        functools.partial(_attention_kernel, plan=plan),
        dict(q=q, k=k, v=v, mask=mask, runs=runs, bias=form.bias),
        dict(o=out_type, lse=lse_type if form.return_lse else None),
        plan.scratch_types(),
        name="attention_resident",
        num_ctas=form.batch * form.num_heads * plan.parts,
        num_warpgroups=1,
        interpret=interpret,
        reduction_scratch_bytes=0,
    )
    return (out, lse[0]) if form.return_lse else out
