"""Blocks of queries and keys in the kernels of attention's gradients."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band, Index, Runs
from pallas_models.kernels.common.lines import of_pairs, of_rows
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.triton.attention_blocks import (
    bias_index,
    biased,
    block_of_head,
    every,
    exp2_of,
    is_shared,
    narrowed,
)
from pallas_models.kernels.triton.common import in_bounds, load, plgpu, span, tile_mask


@dataclasses.dataclass(frozen=True, slots=True)
class Refs:
    """What every kernel reads; None for what a call does not have."""

    q: Ref  # (B, Sq, heads * head_dim), or a buffer that has these columns among others; so k and v
    k: Ref  # (B, Skv, kv_heads * head_dim)
    v: Ref  # (B, Skv, kv_heads * head_dim)
    mask: Ref | None  # (B, Skv)
    bias: (
        Ref | None
    )  # (B or 1, heads or 1, Sq, Skv), with keys first where items share it and the kernel has them first
    segments: Ref | None  # (B, Sq)
    kv_segments: Ref | None  # (B, Skv)
    dout: Ref  # (B, Sq, heads * head_dim)
    shift: Ref  # (B, heads, Sq), float32: -lse in base 2, -inf for queries without a key
    delta: Ref  # (B, heads, Sq), float32: subtracted from the gradient of the weights
    found: Ref | None  # the result of `searched`

    def by_item(self, form: Form[Any]) -> Self:
        """The same, each to be indexed as if all items of the call were a batch."""
        pairs = {name: of_pairs(form, getattr(self, name)) for name in ("q", "k", "v", "mask", "dout")}
        rows = {name: of_rows(form, getattr(self, name)) for name in ("shift", "delta")}
        return dataclasses.replace(self, **pairs, **rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of queries and of keys of one batch element, and the gradients of their scores.

    Arrays of pairs are (block_q, block_kv), or with `keys_first` (block_kv, block_q): they stay in registers as
    first operands of products, which sum over their second axis.
    """

    refs: Refs
    form: Form[Any]
    block_q: int
    block_kv: int
    batch: Index
    _: dataclasses.KW_ONLY
    keys_first: bool

    @property
    def band(self) -> Band:
        return Band.of(self.form)

    def columns(self, head: Index, operand: int | None = None) -> pl.Slice:
        """The columns of a head in the output; or in the array of operand 0, 1 or 2, queries, keys or values."""
        first = 0 if operand is None else self.form.first_heads[operand]
        return span((first + head) * self.form.head_dim, block_of_head(self.form.head_dim))

    def runs(self, block: jax.Array, start: jax.Array) -> Runs:
        """The blocks of the other side that a block is paired with, whose rows begin at `start`."""
        block_q, block_kv, band = self.block_q, self.block_kv, self.band
        if self.keys_first:
            runs, count = band.queries_of(start, block_kv, block_q), pl.cdiv(band.seq, block_q)
        else:
            runs, count = band.keys_of(start, block_q, block_kv), pl.cdiv(band.kv_seq, block_kv)
        return narrowed(runs, count, self.refs.found, self.batch, block, masked=self.form.has_masks)

    def dot(self, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
        product: jax.Array = plgpu.dot(a, b, trans_b=trans_b, precision=self.form.precision)
        return product

    @property
    def depth(self) -> jax.Array | None:
        head_dim = self.form.head_dim
        return in_bounds(0, block_of_head(head_dim), head_dim)

    def queries(self, query: Index, head: Index) -> tuple[jax.Array, ...]:
        """Queries, gradient of the output, shift and delta of the block from `query` on; 0 past the end."""
        refs, batch = self.refs, self.batch
        rows = span(query, self.block_q)
        in_range = in_bounds(query, self.block_q, self.form.seq)
        mask = tile_mask(in_range, self.depth)
        q = load(refs.q.at[batch, rows, self.columns(head, 0)], mask)
        dout = load(refs.dout.at[batch, rows, self.columns(head)], mask)
        shift, delta = (load(ref.at[batch, head, rows], in_range) for ref in (refs.shift, refs.delta))
        return q, dout, shift, delta

    def keys(self, key: Index, head: Index, *, full: bool = False) -> tuple[jax.Array, ...]:
        """Keys and values of the block from `key` on; 0 where they take no part, lest NaN spreads from there."""
        in_range = None if full else self.take_part(key)
        mask, rows = tile_mask(in_range, self.depth), span(key, self.block_kv)
        columns = (self.columns(head // self.form.group, operand) for operand in (1, 2))
        k, v = (
            load(ref.at[self.batch, rows, c], mask)
            for ref, c in zip((self.refs.k, self.refs.v), columns, strict=True)
        )
        return k, v

    def take_part(self, key: Index) -> jax.Array | None:
        """Which keys of the block from `key` on are neither past the end nor masked; None for all."""
        in_range = in_bounds(key, self.block_kv, self.form.kv_seq)
        if self.refs.mask is None:
            return in_range
        return load(self.refs.mask.at[self.batch, span(key, self.block_kv)], in_range) != 0

    def valid(self, query: Index, key: Index) -> jax.Array | None:
        """Which pairs are valid, None if all are; broadcasts to an array of pairs."""
        refs, band, batch = self.refs, self.band, self.batch
        block_q, block_kv = self.block_q, self.block_kv

        def spread(x: jax.Array, *, of_keys: bool) -> jax.Array:
            return x[:, None] if of_keys == self.keys_first else x[None, :]

        take_part = self.take_part(key)
        terms = [] if take_part is None else [spread(take_part, of_keys=True)]
        if refs.segments is not None and refs.kv_segments is not None:
            own = load(refs.segments.at[batch, span(query, block_q)], in_bounds(query, block_q, band.seq))
            other = load(refs.kv_segments.at[batch, span(key, block_kv)], in_bounds(key, block_kv, band.kv_seq))
            terms.append(spread(own, of_keys=False) == spread(other, of_keys=True))
        return every(terms + band.valid(query, key, block_q, block_kv, keys_first=self.keys_first))

    def gradients(
        self,
        query: Index,
        key: Index,
        head: Index,
        queries: tuple[jax.Array, ...],
        keys: tuple[jax.Array, ...],
        *,
        bias: jax.Array | None = None,
        full: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """The weights of the values, and the gradients of the scores. A `bias` that is not given is loaded."""
        (q, dout, shift, delta), (k, v) = queries, keys
        scale = self.form.sm_scale * math.log2(math.e)

        def products(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
            operands = (of_keys, of_queries) if self.keys_first else (of_queries, of_keys)
            return self.dot(*operands, trans_b=True)

        def row(x: jax.Array) -> jax.Array:
            return x[None, :] if self.keys_first else x[:, None]

        scores = products(q, k)
        if self.refs.bias is not None:  # as in the forward pass
            bias = self.bias(query, key, head) if bias is None else bias
            scores = biased(scores, self.form.sm_scale, bias)
            scale = math.log2(math.e)
        elif scale <= 0:
            scores, scale = scores * scale, 1.0
        valid = None if full else self.valid(query, key)
        if valid is not None:
            scores = jnp.where(valid, scores, -jnp.inf)
        p = exp2_of(scores, scale, row(shift))
        return p, p * (products(dout, v) - row(delta))

    def bias(self, query: Index, key: Index, head: Index) -> jax.Array:
        """The bias of the pairs; in float32 where keys come first: to unpack it there by `biased` takes longer."""
        ref, form, block_q, block_kv = self.refs.bias, self.form, self.block_q, self.block_kv
        assert ref is not None
        where = bias_index(form, ref.shape, self.batch, head)
        rows, keys = span(query, block_q), span(key, block_kv)
        masks = in_bounds(query, block_q, form.seq), in_bounds(key, block_kv, form.kv_seq)
        order = -1 if self.keys_first and is_shared(form) else 1
        spans, mask = (rows, keys)[::order], tile_mask(*masks[::order])
        bias = load(ref.at[*where, *spans], mask)
        bias = bias.astype(jnp.float32) if self.keys_first else bias
        return bias.T if self.keys_first and order == 1 else bias
