"""Which queries see which keys by their positions, and which blocks of them have any pair."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels.forms.attention import Form

Index = jax.Array | int
# The first and the end of the blocks with a valid pair, then of a run of blocks with nothing but valid pairs.
Runs = tuple[Index, Index, Index, Index]


def _numpy_of(x: Any) -> Any:
    """The module for an array of this kind: numbers that are known while a kernel is traced stay known."""
    return jnp if isinstance(x, jax.Array) else np


def _blocks(start: Any, block: int, low: int | None, high: int | None, other_block: int, size: int) -> Runs:
    """The blocks of another axis, of `size`, that [start, start + block) is paired with.

    Args:
      low: i is paired with no other index below i + low; None where it is paired with the first one.
      high: i is paired with no other index above i + high; None where it is paired with the last one.

    Returns:
      The first and the end of the blocks with a pair, then the first and the end of the blocks with nothing but
      pairs. The second end may come before the second first.
    """
    count, last, xp = pl.cdiv(size, other_block), start + block - 1, _numpy_of(start)

    def blocks(x: Any) -> Any:
        """Whole blocks of x, which for arrays in a kernel is cheaper by `div` than by `//`."""
        x = xp.maximum(x, 0)
        return jax.lax.div(x, other_block) if xp is jnp else x // other_block

    first: Index = 0
    end: Index = count
    full: Index = 0
    full_end: Index = count
    if low is not None:
        first = blocks(start + low) if count > 1 else 0
        full = blocks(last + low + other_block - 1)
    if high is not None:
        end = xp.minimum(blocks(last + high + other_block), count) if count > 1 else 1
        full_end = xp.minimum(blocks(start + high + 1), count)
    return first, end, full, full_end


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Which queries see which keys by their positions; the last query is at the position of the last key."""

    seq: int
    kv_seq: int
    causal: bool
    window: int | None

    @classmethod
    def of(cls, form: Form[Any]) -> Self:
        """The band of a call of attention."""
        return cls(seq=form.seq, kv_seq=form.kv_seq, causal=form.causal, window=form.window)

    @property
    def low(self) -> int | None:
        """Query i sees no key below i + low; None where it sees the first one."""
        return None if self.window is None else self.kv_seq - self.seq - self.window + 1

    @property
    def high(self) -> int | None:
        """Query i sees no key above i + high; None where it sees the last one."""
        offset = self.kv_seq - self.seq
        if self.causal:
            return offset
        return None if self.window is None else offset + self.window - 1

    def keys_of(self, query: Index | np.ndarray, block_q: int, block_kv: int) -> Runs:
        """The blocks of keys that the queries [query, query + block_q) need."""
        first, end, full, full_end = _blocks(query, block_q, self.low, self.high, block_kv, self.kv_seq)
        whole = self.kv_seq // block_kv  # blocks without keys past the end, which are masked
        if isinstance(full_end, int):
            return first, end, full, min(full_end, whole)
        return first, end, full, _numpy_of(full_end).minimum(full_end, whole)

    def queries_of(self, key: Index | np.ndarray, block_kv: int, block_q: int) -> Runs:
        """The blocks of queries that need the keys [key, key + block_kv)."""
        low, high = (None if x is None else -x for x in (self.high, self.low))
        return _blocks(key, block_kv, low, high, block_q, self.seq)

    def valid(
        self, query: Index, key: Index, block_q: int, block_kv: int, *, keys_first: bool = False
    ) -> list[jax.Array]:
        """Which pairs of two blocks are valid: terms (block_q, block_kv); (block_kv, block_q) if `keys_first`."""
        if self.high is None:
            return []
        shift = key - query
        if keys_first:
            distance = (shift + jnp.arange(block_kv))[:, None] - jnp.arange(block_q)[None, :]
        else:
            distance = (shift + jnp.arange(block_kv))[None, :] - jnp.arange(block_q)[:, None]
        below = [distance <= self.high]
        return below if self.low is None else [distance >= self.low, *below]


def searched(
    form: Form[jax.Array], *, block_q: int, block_kv: int, least: int, keys_first: bool = False
) -> jax.Array | None:
    """The `Runs` of blocks that masks leave, as far as the least and the largest segment id of a block tell.

    Args:
      form: the call, whose mask and segment ids are searched.
      least: how many blocks of the other side there must be for a search to pay.

    Returns:
      (B or 1, blocks of queries, 4): the blocks of keys that each block of queries needs; with `keys_first`
      (B or 1, blocks of keys, 4): the blocks of queries that need each. None where there are few, or no masks.
    """
    mask, segment_ids, kv_segment_ids = form.mask_by_item, form.segment_ids, form.kv_segment_ids
    q_blocks, kv_blocks = pl.cdiv(form.seq, block_q), pl.cdiv(form.kv_seq, block_kv)
    if (q_blocks if keys_first else kv_blocks) < least or not form.has_masks:
        return None

    def split(x: jax.Array, count: int, size: int, mode: str) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, count * size - x.shape[1])), mode=mode).reshape(-1, count, size)

    valid = jnp.ones((1, form.kv_seq), bool) if mask is None else mask != 0
    valid = split(valid, kv_blocks, block_kv, "constant")[:, None]
    some, full = jnp.any(valid, -1), jnp.all(valid, -1)
    if segment_ids is not None and kv_segment_ids is not None:
        q = split(segment_ids, q_blocks, block_q, "edge")[:, :, None]
        kv = split(kv_segment_ids, kv_blocks, block_kv, "edge")[:, None]
        q_low, q_high, kv_low, kv_high = jnp.min(q, -1), jnp.max(q, -1), jnp.min(kv, -1), jnp.max(kv, -1)
        some &= (q_low <= kv_high) & (kv_low <= q_high)
        full &= (q_low == kv_high) & (kv_low == q_high)
    if keys_first:
        some, full = some.swapaxes(1, 2), full.swapaxes(1, 2)
    blocks, others = (kv_blocks, q_blocks) if keys_first else (q_blocks, kv_blocks)
    runs = jnp.stack(runs_of(some, full, others), axis=-1).astype(jnp.int32)
    return jnp.broadcast_to(runs, (runs.shape[0], blocks, 4))


def runs_of(some: jax.Array, full: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """The begin and end of the blocks that are needed, and of the first run of full ones, (...) each.

    Args:
      some: (..., count), whether a block is needed; or (..., 1) where all are alike.
      full: likewise, whether a block is full.
    """
    if some.shape[-1] == 1:
        begin = jnp.zeros(some.shape[:-1], jnp.int32)
        return begin, count * some[..., 0], begin, count * full[..., 0]
    if count < 32:  # as the bits of a number, in fewer kernels of XLA than reductions that need one another
        bits = jnp.left_shift(jnp.uint32(1), jnp.arange(count, dtype=jnp.uint32))
        some, full = jnp.sum(jnp.where(jnp.stack([some, full]), bits, jnp.uint32(0)), -1, dtype=jnp.uint32)
        first, first_full = _lowest_bit(some), _lowest_bit(full)
        return first, 32 - jax.lax.clz(some), first_full, first_full + _lowest_bit(~(full >> first_full))
    first, first_full = jnp.argmax(some, -1), jnp.argmax(full, -1)
    end = jnp.where(jnp.any(some, -1), count - jnp.argmax(some[..., ::-1], -1), 0)
    after = ~full & (jnp.arange(count) >= first_full[..., None])
    full_end = jnp.where(jnp.any(after, -1), jnp.argmax(after, -1), count)
    return first, end, first_full, full_end


def _lowest_bit(x: jax.Array) -> jax.Array:
    """The number of the lowest bit that is set; 0 where none is."""
    return jnp.where(x == 0, 0, jax.lax.population_count(~x & (x - 1)))
