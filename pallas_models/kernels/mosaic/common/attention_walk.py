"""Which blocks of keys a tile of attention needs, by band and masks, and how many heads go together."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels.common import band
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Runs
from pallas_models.kernels.forms.attention import Form

ROWS = 64  # of a warpgroup: the rows of one instruction of the tensor cores
# Blocks: from here on, masks are searched beforehand for blocks that they rule out. Lines of pairs are many.
SEARCHED, _SEARCHED_OF_PAIRS = 8, 4
_CACHE = 16 * 2**20  # bytes of keys and values that stay in the L2 cache, of two parts with 25 MB each


def heads_in_cache(form: Form[Any], rows: int) -> int:
    """The number of heads of which so many rows of two operands stay in the cache."""
    return _CACHE // (2 * rows * form.head_dim * form.dtype.itemsize)


def group_of_heads(runs: Runs, heads: int, tiles: int, in_cache: int, num_ctas: int) -> int:
    """How many heads to walk together, given the blocks of the tiles of each, in the order of the walk.

    As many as have blocks that stay `in_cache`, with which all CTAs take about as long; else a few more.
    """
    blocks = np.broadcast_to(np.maximum(np.subtract(runs[1], runs[0]), 1), tiles)
    rounds = pl.cdiv(heads * tiles, num_ctas)
    index = np.arange(rounds * num_ctas).reshape(rounds, num_ctas)
    index[1::2] = index[1::2, ::-1]

    def longest(group: int) -> int:
        work = np.where(index < heads * len(blocks), blocks[index % (group * len(blocks)) // group], 0)
        return int(np.max(np.sum(work, axis=0)))

    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    groups.sort(key=lambda n: (n > in_cache, n if n > in_cache else -n))
    enough = 1.05 * heads * np.sum(blocks) / num_ctas
    return next((n for n in groups if longest(n) <= enough), None) or min(groups, key=longest)


def searched(form: Form[jax.Array], *, block_q: int, block_kv: int, keys_first: bool = False) -> jax.Array | None:
    """The `Runs` of blocks that masks leave, as `band.searched` finds them; None where there are few blocks."""
    least = SEARCHED if form.item_axis is None else _SEARCHED_OF_PAIRS
    return band.searched(form, block_q=block_q, block_kv=block_kv, least=least, keys_first=keys_first)


def narrowed(
    runs: Runs, found: Ref | None, batch: jax.Array, block: jax.Array, *, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The `Runs` of a block without what masks rule out.

    Args:
      found: the result of `searched`; where it is None and there are masks, no block counts for full.
      masked: whether there are masks besides the positions.
    """
    first, end, full, full_end = map(jnp.int32, runs)
    if found is None:
        return (first, end, first, first) if masked else (first, end, full, full_end)
    row = jnp.minimum(batch, found.shape[0] - 1)  # which may be one for all; and who has had all tiles asks on
    some, some_end, all_, all_end = (found[row, block, i] for i in range(4))
    least, most = jnp.maximum, jnp.minimum
    return least(first, some), most(end, some_end), least(full, all_), most(full_end, all_end)


def joined(runs: Sequence[Runs]) -> Runs:
    """The `Runs` of blocks that one line or another needs, and the blocks that all of them need without a mask."""
    firsts, ends, fulls, full_ends = zip(*runs, strict=True)
    least, most = (functools.partial(functools.reduce, f) for f in (jnp.minimum, jnp.maximum))
    return least(firsts), most(ends), most(fulls), least(full_ends)


def pad_rows(x: jax.Array, least: int) -> jax.Array:
    """x (B, S, columns) with as many rows as copies want.

    These cannot end within the eight rows of a tile of shared memory, nor be longer than the whole array.
    """
    missing = max(pl.cdiv(x.shape[1], 8) * 8, least) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x


def padded_masks(form: Form[jax.Array], rows: int, kv_rows: int) -> dict[str, jax.Array | None]:
    """The mask and the segment ids by the names that kernels have for them, as long as padded queries and keys."""

    def padded(x: jax.Array | None, size: int) -> jax.Array | None:
        return None if x is None else jnp.pad(x, ((0, 0), (0, size - x.shape[1])))

    return dict(
        mask=padded(form.mask_by_item, kv_rows),
        segments=padded(form.segment_ids, rows),
        kv_segments=padded(form.kv_segment_ids, kv_rows),
    )
