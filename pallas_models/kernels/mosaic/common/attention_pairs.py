"""Blocks of queries and of keys for `mma`: how they are padded and copied, and which pairs of them take part."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Band
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.mosaic.common.attention_walk import pad_rows, padded_masks
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import row_bytes_of, transforms
from pallas_models.kernels.mosaic.common.scores import across, load_across, masked


def whole(size: int, block: int) -> int:
    """The size in whole blocks."""
    return pl.cdiv(size, block) * block


def flat(form: Form[Any], x: jax.Array) -> jax.Array:
    """Queries, keys, values or results as (items, S, columns), without a copy.

    Where columns of pairs are the lines, they are among the columns: (B, N, lines * columns).
    """
    if form.item_axis is None:
        return x
    return x.reshape(-1, form.seq, x.shape[-1] if form.item_axis == 1 else form.items * x.shape[-1])


def result(form: Form[Any], rows: int, heads: int) -> jax.ShapeDtypeStruct:
    """A `flat` array of so many heads that a kernel writes."""
    first, lines = (form.batch, 1) if form.item_axis != 2 else (form.batch // form.items, form.items)
    return jax.ShapeDtypeStruct((first, rows, lines * heads * form.head_dim), form.dtype)


def padded(form: Form[jax.Array], block_q: int, block_kv: int) -> dict[str, Any]:
    """The operands by the names that kernels have for them, in whole blocks; lines of pairs are whole."""
    rows, kv_rows = whole(form.seq, block_q), whole(form.kv_seq, block_kv)
    q, k, v = (pad_rows(flat(form, x), n) for x, n in zip(form.arrays, (rows, kv_rows, kv_rows), strict=True))
    bias = form.bias
    if bias is not None:
        bias = bias.swapaxes(-2, -1) if form.item_axis == 2 else bias
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, rows - form.seq), (0, kv_rows - form.kv_seq)))
    return dict(q=q, k=k, v=v, bias=bias, **padded_masks(form, rows, kv_rows))


def place(form: Form[Any], operand: int | None, item: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where a head of an item lies in a `flat` array: the first index, and its number among the columns.

    Args:
      form: the call.
      operand: 0, 1 or 2: of queries, keys or values; None: of a result that has no others beside it.
      item: of the batch, or a line of pairs.
      head: of that operand.
    """
    first = 0 if operand is None else form.first_heads[operand]
    if form.item_axis != 2:
        return item, first + head
    width = form.qkv[operand or 0].shape[-1] // form.head_dim
    return jax.lax.div(item, form.items), jax.lax.rem(item, form.items) * width + first + head


def of_head(
    form: Form[Any], ref: Ref, operand: int | None, item: jax.Array, rows: pl.Slice, head: jax.Array
) -> Ref:
    """The rows of a head."""
    index, column = place(form, operand, item, head)
    return ref.at[index, rows, pl.Slice(column * form.head_dim, form.head_dim)]


def head_spec(form: Form[Any], operand: int | None, block: int, where: Callable[..., Any]) -> Any:
    """How blocks of rows of a head are copied, one a step: `where` is the item, the block and the head."""

    def index(*step: jax.Array) -> tuple[Any, ...]:
        item, rows, head = where(*step)
        first, column = place(form, operand, item, head)
        return first, rows, column

    row_bytes = row_bytes_of(form.head_dim, form.dtype)
    return plgpu.BlockSpec((None, block, form.head_dim), index, transforms=transforms(row_bytes, form.dtype))


def bias_spec(form: Form[Any], shape: tuple[int, int], where: Callable[..., Any]) -> Any:
    """How blocks of the bias are copied; `where` is the item, the head and the block's number along each axis."""
    bias: Any = form.bias

    def index(*step: jax.Array) -> tuple[Any, ...]:
        item, head, *block = where(*step)
        owner = jax.lax.div(item, form.items), head
        return (*(x if n > 1 else 0 for x, n in zip(owner, bias.shape, strict=False)), *block)

    row_bytes = row_bytes_of(shape[1], bias.dtype)
    return plgpu.BlockSpec((None, None, *shape), index, transforms=transforms(row_bytes, bias.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of blocks of one item.

    Attributes:
      form: the call.
      refs: mask and kv_segments (B, Skv), segments (B, Sq), in device memory; None if absent.
      item: of the batch.
      block_q: queries of a block.
      block_kv: keys of a block.
      keys_first: whether rows of scores are of keys, and columns of queries.
    """

    form: Form[Any]
    refs: Refs
    item: jax.Array
    block_q: int
    block_kv: int
    keys_first: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of a block of scores."""
        return (self.block_kv, self.block_q) if self.keys_first else (self.block_q, self.block_kv)

    @property
    def query_axis(self) -> int:
        """The axis of scores that queries are on; keys are on the other."""
        return int(self.keys_first)

    def masked(self, scores: jax.Array, query: jax.Array, key: jax.Array, full: jax.Array) -> jax.Array:
        """The scores of the blocks that begin there, -inf where a pair takes no part; in `full` ones all do."""
        form = self.form
        ragged = form.kv_seq % self.block_kv > 0
        if Band.of(form).high is None and not ragged and not form.has_masks:
            return scores
        return jax.lax.cond(full, lambda x: x, lambda x: masked(x, self.valid(query, key, ragged)), scores)

    def valid(self, query: jax.Array, key: jax.Array, ragged: bool) -> list[jax.Array]:
        """What all must hold for a pair to take part."""
        refs, band, of_queries = self.refs, Band.of(self.form), self.query_axis
        found = []
        if band.high is not None or ragged:
            keys = self.along(jax.lax.iota(jnp.int32, self.block_kv), 1 - of_queries)
        if ragged:
            found.append(keys < self.form.kv_seq - key)
        if band.high is not None:
            # Of vectors a thread has few elements: for each query the last key that it sees.
            own = jax.lax.iota(jnp.int32, self.block_q) + (query - key)
            found.append(keys <= self.along(own + band.high, of_queries))
            if band.low is not None:
                found.append(keys >= self.along(own + band.low, of_queries))
        of_keys = self.item, pl.Slice(key, self.block_kv)
        if refs.mask is not None:
            found.append(load_across(refs.mask.at[of_keys], self.shape, 1 - of_queries) != 0)
        if refs.segments is not None:
            own = load_across(refs.segments.at[self.item, pl.Slice(query, self.block_q)], self.shape, of_queries)
            found.append(own == load_across(refs.kv_segments.at[of_keys], self.shape, 1 - of_queries))
        return found

    def along(self, vector: jax.Array, axis: int) -> jax.Array:
        """A number for each query or key, for each score."""
        return across(vector, self.shape, axis)
