"""Sentences of any lengths joined in rows of one length, without padding to the longest of a batch.

A GPU takes 1 to 3 s to compile a program for one shape, and milliseconds for a batch. Packed, a batch has the
shape of its program, whatever sentences it holds: a corpus needs one program for each size of a batch.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

# The number of results is known beforehand: one for so many tokens of a batch. Sentences are longer on average;
# where all are shorter, a batch has as many segments as it may before all its tokens are used.
_TOKENS_PER_SEGMENT = 8
# Tokens of a row. Longer sentences have rows as long as the longest may be.
_ROW = 64
# The sizes of batches, as divisors of the largest number of tokens: for short rows, which are the most, and for
# long.
_PARTS = ((64, 8, 1), (64, 4))

Shape = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed sentences.

    Attributes:
      tokens: (2, rows, row length) int32: token ids, and segment ids in ascending order over rows. The rest of a
        row that no sentence fills is a segment of its own.
      segments: (n,), the segment id of each sentence.
      sentences: (n,), the index of each among the given sentences.
    """

    tokens: np.ndarray
    segments: np.ndarray
    sentences: np.ndarray


def fill(lengths: np.ndarray, row_length: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Divides sentences into rows: each row takes the longest that fits, then the longest that still fits.

    Rows that hold the same lengths are made at once: there is a step for each distinct set of lengths, not for
    each sentence.

    Args:
      lengths: (N,), tokens of each sentence, 1 to `row_length`.
      row_length: tokens of a row.
      most: sentences of a row.

    Yields:
      For each set of k lengths that n rows hold: the indices of the sentences, (n, k), and their lengths, (k,).
    """
    order = np.argsort(lengths, kind="stable")
    left = np.bincount(lengths, minlength=row_length + 1)  # sentences of each length
    ends = np.cumsum(left)  # where in `order` the sentences of each length end
    while left.any():
        room, free = row_length, left.copy()
        kinds: list[int] = []
        while len(kinds) < most and (fitting := np.flatnonzero(free[: room + 1])).size:
            kinds.append(int(fitting[-1]))
            free[kinds[-1]] -= 1
            room -= kinds[-1]
        rows = np.min(left[kinds] // (left - free)[kinds])
        chosen = []
        for kind in kinds:
            chosen.append(order[ends[kind] - rows : ends[kind]])
            ends[kind] -= rows
            left[kind] -= rows
        yield np.stack(chosen, axis=1), np.array(kinds)


def budget(platform: str) -> int:
    """The most tokens of a batch that suit a device: enough to fill a GPU, few enough for the caches of a CPU.

    Args:
      platform: as JAX names it, `"cpu"` or `"gpu"`.
    """
    return 2048 if platform == "cpu" else 65536


def shapes(limit: int, most: int) -> dict[int, list[Shape]]:
    """The shapes of batches, (rows, row length), by row length, small shapes first: five at most.

    Args:
      limit: tokens of the longest sentence.
      most: tokens of the largest batch, unless one row has more.
    """
    lengths = [_ROW, limit] if limit > _ROW else [limit]
    return {
        length: sorted({(max(most // part // length, 1), length) for part in parts})
        for length, parts in zip(lengths, _PARTS, strict=False)
    }


def padded_length(length: int, limit: int) -> int:
    """The length to which one sentence is padded that is computed alone; at most `limit`.

    Lengths are powers of two from 16 and, beyond 64, the halves between: up to 512 tokens there are nine.

    Args:
      length: its tokens.
      limit: tokens of the longest sentence.
    """
    power = max(16, 1 << (length - 1).bit_length())
    between = 3 * power // 4
    return min(between if length <= between and between > 64 else power, limit)


def num_segments(shape: Shape) -> int:
    """The most segments that a batch has.

    Args:
      shape: (rows, row length).
    """
    return max(shape[0] * shape[1] // _TOKENS_PER_SEGMENT, 2)


def pack(tokens: np.ndarray, lengths: np.ndarray, limit: int, most: int) -> Iterator[Batch]:
    """Divides sentences into batches of few shapes.

    Args:
      tokens: (total,) int32, token ids of all sentences, one after another.
      lengths: (N,), the number of tokens of each sentence, at most `limit`. Sentences without tokens are in no
        batch.
      limit, most: as in `shapes`.
    """
    starts = np.cumsum(lengths) - lengths
    above = 0
    for row_length, sizes in shapes(limit, most).items():
        chosen = np.flatnonzero((lengths > above) & (lengths <= row_length))
        above = row_length
        if chosen.size:
            rows = _rows(lengths[chosen], row_length, num_segments(sizes[0]) - 1)
            for which, offsets, row, shape in _divide(rows, row_length, sizes):
                sentences = chosen[which]
                places = row * row_length + offsets
                yield _batch(tokens, starts[sentences], lengths[sentences], places, sentences, shape)


def _rows(lengths: np.ndarray, row_length: int, most: int) -> tuple[np.ndarray, ...]:
    """For sentences in the order of rows their index, row and place in the row; then the segments of each row."""
    which, rows, offsets, counts = [], [], [], []
    count = 0
    for chosen, kinds in fill(lengths, row_length, most):
        n, k = chosen.shape
        which.append(chosen.ravel())
        rows.append(np.repeat(np.arange(count, count + n), k))
        offsets.append(np.tile(np.cumsum(kinds) - kinds, n))
        counts.append(np.full(n, k + (kinds.sum() < row_length)))
        count += n
    return tuple(np.concatenate(parts) for parts in (which, rows, offsets, counts))


def _divide(
    rows: tuple[np.ndarray, ...], row_length: int, sizes: list[Shape]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, Shape]]:
    """Divides rows into batches: the indices of sentences, their places and rows, and the shape of the batch."""
    which, row, offsets, counts = rows
    segments = np.concatenate([[0], np.cumsum(counts)])
    first, last = 0, len(counts)
    while first < last:
        needed = max(last - first, (segments[last] - segments[first]) * _TOKENS_PER_SEGMENT // row_length)
        # A batch that is a quarter full, or comes after four full ones, is cheaper than one more program.
        shape = next((size for size in reversed(sizes) if 4 * needed >= size[0] or first >= 4 * size[0]), sizes[0])
        room = np.searchsorted(segments, segments[first] + num_segments(shape), side="right") - 1
        end = min(first + shape[0], int(room), last)
        part = slice(*np.searchsorted(row, [first, end]))
        yield which[part], offsets[part], row[part] - first, shape
        first = end


def _batch(
    tokens: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    places: np.ndarray,
    sentences: np.ndarray,
    shape: Shape,
) -> Batch:
    """The batch that has each sentence at its place in the flattened rows."""
    packed = np.zeros((2, shape[0] * shape[1]), np.int32)
    ids, segments = packed
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    ids[np.repeat(places, lengths) + within] = tokens[np.repeat(starts, lengths) + within]
    segments[:: shape[1]] = 1  # a row begins
    segments[places] = 1
    ends = places + lengths
    segments[ends[ends < segments.size]] = 1
    np.cumsum(segments, out=segments)
    segments -= 1
    return Batch(tokens=packed.reshape(2, *shape), segments=segments[places], sentences=sentences)
