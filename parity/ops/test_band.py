"""Which blocks of queries and keys belong together, against all pairs written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.common.band import Band, runs_of
from parity.support.common import assert_equal

BANDS = [
    Band(seq=40, kv_seq=40, causal=False, window=None),
    Band(seq=40, kv_seq=40, causal=True, window=None),
    Band(seq=33, kv_seq=71, causal=True, window=None),
    Band(seq=71, kv_seq=33, causal=True, window=None),
    Band(seq=64, kv_seq=64, causal=True, window=1),
    Band(seq=64, kv_seq=50, causal=True, window=20),
    Band(seq=50, kv_seq=90, causal=True, window=40),
    Band(seq=7, kv_seq=7, causal=True, window=3),
    Band(seq=64, kv_seq=64, causal=False, window=1),
    Band(seq=50, kv_seq=90, causal=False, window=17),
    Band(seq=90, kv_seq=50, causal=False, window=20),
]


def pairs_of(band: Band) -> np.ndarray:
    """(Sq, Skv): whether a query sees a key."""
    distance = np.arange(band.seq)[:, None] + band.kv_seq - band.seq - np.arange(band.kv_seq)
    within = np.abs(distance) < (np.inf if band.window is None else band.window)
    return (distance >= 0) & within if band.causal else within


@pytest.mark.parametrize("block, other_block", [(8, 8), (16, 8), (8, 16), (32, 16)])
@pytest.mark.parametrize("side", ["keys_of", "queries_of"])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_valid_pair_is_in_a_block_and_full_blocks_have_no_other(band, side, block, other_block):
    pairs = pairs_of(band) if side == "keys_of" else pairs_of(band).T
    count = -(-pairs.shape[1] // other_block)
    for start in range(0, pairs.shape[0], block):
        rows = pairs[start : start + block]
        blocks = [rows[:, i * other_block : (i + 1) * other_block] for i in range(count)]
        first, end, full, full_end = map(int, getattr(band, side)(np.asarray(start), block, other_block))
        some = [i for i in range(count) if blocks[i].any()]
        assert not some or (max(first, 0), min(end, count)) == (some[0], some[-1] + 1)
        for i in range(max(full, first), min(full_end, end)):
            assert blocks[i].all() and (side == "queries_of" or blocks[i].shape[1] == other_block)
        if rows.shape[0] == block:  # all that are full are found
            whole = [i for i in some if blocks[i].all() and blocks[i].shape[1] == other_block]
            assert set(whole) <= set(range(full, full_end))


def test_what_a_kernel_is_given_is_what_is_known_before():
    band, starts = Band(seq=50, kv_seq=90, causal=False, window=40), np.arange(0, 90, 16)
    for side in (band.keys_of, band.queries_of):
        traced = jax.jit(lambda x, side=side: side(x, 16, 8))(jnp.asarray(starts))
        for found, expected in zip(traced, side(starts, 16, 8), strict=True):
            assert_equal(found, expected)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("count", [1, 3, 31, 32])
def test_runs_of_blocks(count, alike):
    """Against blocks looked at one by one: as the bits of a number, more than it has, and all alike."""
    rng = np.random.default_rng(count)
    given = 1 if alike else count
    some = rng.random((64, given)) < rng.choice([0.0, 0.1, 0.5, 1.0], (64, 1))
    full = some & (rng.random((64, given)) < rng.choice([0.0, 0.5, 1.0], (64, 1)))
    found = np.stack(runs_of(jnp.asarray(some), jnp.asarray(full), count), -1).astype(int)
    for got, needed, whole in zip(found, *(np.broadcast_to(x, (64, count)) for x in (some, full)), strict=True):
        first, end, first_full, full_end = got
        of_needed, of_whole = np.flatnonzero(needed), np.flatnonzero(whole)
        assert (first, end) == ((of_needed[0], of_needed[-1] + 1) if needed.any() else (0, 0))
        if not whole.any():
            assert full_end == first_full
            continue
        assert first_full == of_whole[0] and whole[first_full:full_end].all()
        assert full_end == count or not whole[full_end]
