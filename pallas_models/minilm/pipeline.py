"""From texts to rows of embeddings: tokenizing, packing, computing and collecting, each while the others work."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import numpy as np

from pallas_models.minilm import packing

# Texts of a chunk: enough for all cores to tokenize and for a device to compute, few enough for little memory.
CHUNK = 16384
# Chunks that are tokenized while another is computed.
_AHEAD = 2
# Texts are tokenized by all cores. What takes the ids out of the tokenizer's objects is Python, which leaves cores
# idle unless other threads have pieces of their own.
_THREADS = 8
_PIECE = 512
_FEW = 64  # texts are tokenized before a thread is started
# Batches in flight: enough to keep a device busy while the next are packed, few enough that neither inputs nor
# results pile up on it.
_BATCHES_IN_FLIGHT = 8


class Forward(Protocol):
    """Computes the results of batches, (segments, width); `prepare` is told beforehand what shapes there are."""

    def __call__(self, tokens: np.ndarray) -> jax.Array: ...

    def prepare(self, shapes: Iterable[tuple[int, ...]]) -> object: ...


Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]


def run(
    texts: Iterable[str],
    tokenize: Tokenize,
    forward: Forward,
    *,
    width: int,
    limit: int,
    budget: int,
    out: np.ndarray | None = None,
    chunk: int = CHUNK,
) -> Iterator[np.ndarray]:
    """Computes a row for each text.

    Memory does not grow with the number of texts, which are read as they are needed, in this thread.

    Args:
      texts: checked already.
      tokenize: gives the token ids of texts; called in another thread.
      forward: starts the computation of one batch of `packing.pack` and returns before it is done.
      width: of a row.
      limit: the most tokens that a text has.
      budget: the most tokens that a batch has.
      out: float32 (texts, width), which rows are written into, where there is a place for all; else each chunk has
        an array of its own.
      chunk: how many texts are taken at a time.

    Yields:
      float32 (texts of the chunk, width), in the order of the texts.
    """
    started: collections.deque[_Rows] = collections.deque()
    in_flight: collections.deque[_Rows] = collections.deque()
    done = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for ids, lengths in _tokenized(pool, texts, tokenize, chunk):
            batches = list(packing.pack(ids, lengths, limit, budget))
            forward.prepare(batch.tokens.shape for batch in batches)
            rows = np.empty((len(lengths), width), np.float32) if out is None else out[done : done + len(lengths)]
            rows[lengths == 0] = 0.0  # of texts that are in no batch
            done += len(rows)
            started.append(_Rows(rows))
            for batch in batches:
                started[-1].pending.append((batch, forward(batch.tokens)))
                in_flight.append(started[-1])
                if len(in_flight) > _BATCHES_IN_FLIGHT:
                    in_flight.popleft().collect()
            while len(started) > 1 and not started[0].pending:
                yield started.popleft().rows
    for last in started:
        while last.pending:
            last.collect()
        yield last.rows


def _tokenized(
    pool: ThreadPoolExecutor, texts: Iterable[str], tokenize: Tokenize, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The `tokens` of each chunk; those of the next are being made then."""

    def start(chunk: list[str]) -> list[Callable[[], tuple[np.ndarray, np.ndarray]]]:
        if len(chunk) <= _FEW:
            return [functools.partial(tokens, tokenize, chunk)]
        return [pool.submit(tokens, tokenize, piece).result for piece in chunks(chunk, _PIECE)]

    ahead = map(start, chunks(texts, size))
    waiting = collections.deque(itertools.islice(ahead, _AHEAD))
    while waiting:
        waiting.extend(itertools.islice(ahead, 1))
        ids, lengths = zip(*(piece() for piece in waiting.popleft()), strict=True)
        yield np.concatenate(ids), np.concatenate(lengths)


class _Rows:
    """The rows of one chunk, and its batches that are being computed."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows
        self.pending: collections.deque[tuple[packing.Batch, jax.Array]] = collections.deque()

    def collect(self) -> None:
        """Waits for the oldest batch."""
        batch, result = self.pending.popleft()
        self.rows[batch.sentences] = np.asarray(result)[batch.segments]


def chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Divides texts into lists of `size`, the last of which may be shorter."""
    source = iter(texts)
    while chunk := list(itertools.islice(source, size)):
        yield chunk


def tokens(tokenize: Tokenize, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of all texts, one after another, and how many each has."""
    ids = tokenize(texts)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32, lengths.sum()), lengths
