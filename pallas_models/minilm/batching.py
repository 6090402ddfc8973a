"""Sentences of many lengths as batches of few shapes.

A GPU takes 1 to 3 s to compile a program for one shape, and about a millisecond for a batch: what padding adds to
batches costs more than another program only after thousands of them. So shapes are few:

- lengths are 16, 32, 64, 96, 128, 192, 256, ...: powers of two and, beyond 64, the halves between. There less than
  a third of a batch is padding, and sentences of up to 512 tokens take nine programs, those of ordinary text four;
- where there is more than one batch, all have `batch_size` rows, so that the last needs no program of its own; a
  list that is no more than one batch has 1, 8, 64, ... rows, at most `batch_size`.
"""

from collections.abc import Sequence

import numpy as np

_SHORTEST = 16


def padded_length(length: int, limit: int) -> int:
    """The length that a batch whose longest sentence has `length` tokens is padded to; at most `limit`."""
    power = max(_SHORTEST, 1 << (length - 1).bit_length())
    between = 3 * power // 4
    return min(between if length <= between and between > 4 * _SHORTEST else power, limit)


def padded_rows(sentences: int, batch_size: int) -> int:
    """The rows of each batch that so many sentences are divided into."""
    rows = 1
    while rows < min(sentences, batch_size):
        rows *= 8
    return min(rows, batch_size)


def pack(tokens: Sequence[Sequence[int]], rows: int, limit: int) -> np.ndarray:
    """One batch of token ids, int32 (rows, padded length), with -1 where there is no token."""
    packed = np.full((rows, padded_length(max(map(len, tokens)), limit)), -1, np.int32)
    for row, ids in zip(packed, tokens, strict=False):
        row[: len(ids)] = ids
    return packed
