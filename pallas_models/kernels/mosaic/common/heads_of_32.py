"""Attention of heads of 32 as the first part of a kernel whose CTAs have 64 rows: the queries of a tile."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.scores import exponents
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.elementwise import elementwise, load_vector
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.kernels.mosaic.common.products import products
from pallas_models.kernels.mosaic.common.ring import Ring

HEAD_DIM = 32
_ROWS = 64  # queries of a tile
_PAIR = 2  # heads that are attended to together
_COPIES = 2 * _PAIR  # to a slot
_SCALE = HEAD_DIM**-0.5 * math.log2(math.e)  # base-2 exponentials are the GPU's own


def slot_rows(keys: int) -> int:
    """Rows of `HEAD_DIM` elements that a slot needs for queries and so many keys of two heads."""
    return _PAIR * (_ROWS + keys)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heads:
    """Attention of `num_heads` heads within sequences of `keys` tokens, one tile or a few.

    Two heads come in two steps of a ring, queries and keys, then values: the next two heads are on their way while
    weights are computed.

    Attributes:
      ids: (B, keys) int32, tokens see tokens with their own id; None where they see all.
    """

    num_heads: int
    keys: int
    ids: jax.Array | None

    @property
    def operands(self) -> dict[str, jax.Array]:
        """The operands besides queries, keys and values, which are `refs.y`, (B * keys, 3 * columns)."""
        if self.ids is None:
            return {}
        return dict(ids=self.ids, alike=jnp.all(self.ids == self.ids[:, :1], axis=1).astype(jnp.int32))

    def scratch_types(self, num_barriers: int) -> dict[str, Any]:
        """The scratch memory that `refs` must have, with so many barriers for the ring."""
        types: dict[str, Any] = dict(heads_full=plgpu.Barrier(num_arrivals=_COPIES, num_barriers=num_barriers))
        if self.ids is None:
            return types
        return types | dict(ids_tile=plgpu.SMEM((self.keys,), jnp.int32), ids_full=plgpu.Barrier())

    def slots(self, count: int, rows: int, dtype: Any) -> Any:
        """Shared memory of slots of `rows` rows, at least `slot_rows`."""
        return tiled((count, rows, HEAD_DIM), dtype, 2 * HEAD_DIM)

    def copy_ids(self, refs: Refs, tile: jax.Array) -> None:
        if self.ids is not None:
            plgpu.copy_gmem_to_smem(refs.ids.at[self._place(tile)[0]], refs.ids_tile, refs.ids_full)

    def copy(self, refs: Refs, tile: jax.Array, pair: jax.Array, slot: Ref, full: Ref, *, values: bool) -> None:
        """Copies the queries and keys, or the values, of two heads to a slot."""
        first, half = self._place(tile)[0] * self.keys, self.keys // 2
        for head in range(_PAIR):
            start = head * (self.keys if values else _ROWS + self.keys)
            parts: Any = ((0, tile * _ROWS, _ROWS), (1, first, self.keys))
            if values:  # in as many copies
                parts = ((2, first, half), (2, first + half, half))
            for operand, row, count in parts:
                column = (operand * self.num_heads + pair * _PAIR + head) * HEAD_DIM
                source = refs.y.at[pl.Slice(row, count), pl.Slice(column, HEAD_DIM)]
                plgpu.copy_gmem_to_smem(source, slot.at[pl.ds(start, count)], full)
                start += count

    def wait_ids(self, refs: Refs) -> None:
        if self.ids is not None:
            plgpu.barrier_wait(refs.ids_full)

    def attend(
        self, refs: Refs, tile: jax.Array, slots: Ref, ring: Ring, steps: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """The results of a tile for two heads, side by side, which come in two steps of the ring."""
        first, second = (jax.lax.rem(step, ring.num_stages) for step in steps)
        ring.wait(first)
        pairs = []
        for head in range(_PAIR):
            start = head * (_ROWS + self.keys)
            queries, keys = (slots.at[first, pl.ds(*x)] for x in ((start, _ROWS), (start + _ROWS, self.keys)))
            pairs.append((queries, keys, True))
        scores = products(*pairs)
        ring.release(first)
        if self.ids is not None:
            sequence, part = self._place(tile)
            masked = functools.partial(self._masked, refs, part)
            scores = jax.lax.cond(refs.alike[sequence] != 0, lambda x: x, masked, scores)
        weights, totals = zip(*(self._weights(x, slots.dtype) for x in scores), strict=True)
        ring.wait(second)
        # By their dtype weights are operands, which must not change while a product is under way.
        values = products(
            *((x, slots.at[second, pl.ds(i * self.keys, self.keys)], False) for i, x in enumerate(weights))
        )
        ring.release(second)

        def mean(value: jax.Array, factor: jax.Array) -> jax.Array:
            return (value * factor).astype(slots.dtype)

        means = (elementwise(mean, x, rows=[1.0 / total]) for x, total in zip(values, totals, strict=True))
        return jnp.concatenate(list(means), axis=1)

    def _weights(self, scores: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Exponentials of scores, and the sum of each row."""

        def weight(score: jax.Array, factor: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = jnp.exp2(score * factor - shift)
            return value.astype(dtype), value

        peak = jnp.max(scores, axis=1)
        rows = [jnp.broadcast_to(x, peak.shape) for x in exponents(peak, _SCALE)]
        weights, values = elementwise(weight, scores, rows=rows)
        return weights, jnp.sum(values, axis=1)

    def _place(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which sequence a tile belongs to, and which of its tiles it is."""
        return jax.lax.div(tile, self.keys // _ROWS), jax.lax.rem(tile, self.keys // _ROWS)

    def _masked(self, refs: Refs, part: jax.Array, scores: list[jax.Array]) -> list[jax.Array]:
        own, theirs = (
            load_vector(ref, axis)
            for axis, ref in enumerate((refs.ids_tile.at[pl.ds(part * _ROWS, _ROWS)], refs.ids_tile))
        )

        def masked(score: jax.Array, own: jax.Array, theirs: jax.Array) -> jax.Array:
            return jnp.where(own == theirs, score, -jnp.inf)

        return [elementwise(masked, x, rows=[own], columns=[theirs]) for x in scores]
