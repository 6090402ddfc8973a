"""From texts to rows of embeddings: tokenizing, packing, computing and collecting, each while the others work."""

import collections
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from pallas_models._host import cores
from pallas_models.minilm import packing, tokenizing
from pallas_models.minilm.tokenizing import Tokenize, Tokens

# Texts of a chunk: enough for all cores to tokenize and for a device to compute, few enough for little memory.
CHUNK = 16384
# Chunks that are tokenized while another is computed, for each device.
_AHEAD = 2
# Pieces of a chunk are tokenized side by side. A thread each waits for a process, which has one piece more than it
# is at.
_PIECE = 1024
_THREADS = max(8, 2 * cores())
_FEW = 64  # texts are tokenized before a thread is started
# Texts that come after so many are tokenized by processes, which take half a second to start.
_MANY = 2 * CHUNK
# Batches in flight on a device: enough to keep it busy while the next are packed, few enough that neither inputs
# nor results pile up on it.
_BATCHES_IN_FLIGHT = 8
# Rows that are copied at a time: few enough to stay in a cache on their way.
_COPIED = 256


class Forward(Protocol):
    """Computes the results of batches, (segments, width); `prepare` is told beforehand what shapes there are."""

    def __call__(self, tokens: np.ndarray) -> jax.Array: ...

    def prepare(self, shapes: Iterable[tuple[int, ...]]) -> object: ...


def run(
    chunks: Iterable[list[Any]],
    tokenize: Tokenize,
    forwards: Sequence[Forward],
    *,
    width: int,
    limit: int,
    budget: int,
    out: np.ndarray | None = None,
    elsewhere: Callable[[list[Any]], Tokens] | None = None,
) -> Generator[np.ndarray]:
    """Computes a row for each text.

    Memory does not grow with the number of chunks, which are read as they are needed, in this thread. No batch
    holds texts of two of them: what is computed of a chunk does not depend on the others.

    Args:
      chunks: lists of texts, checked already; about `CHUNK` in each keep all busy.
      tokenize: gives the token ids of texts; called in other threads.
      forwards: start the computation of one batch of `packing.pack` and return before it is done; they take
        turns.
      width: of a row.
      limit: the most tokens that a text has.
      budget: the most tokens that a batch has.
      out: float32 (texts, width), which rows are written into, where there is a place for all; else each chunk has
        an array of its own.
      elsewhere: gives the tokens of texts where there are many; called in other threads.

    Yields:
      float32 (texts of the chunk, width), in the order of the texts, for each chunk.
    """
    started: collections.deque[tuple[np.ndarray, list[Future[None]]]] = collections.deque()
    in_flight: collections.deque[Future[None]] = collections.deque()
    turns = itertools.cycle(forwards)
    done = 0
    with ThreadPoolExecutor(_THREADS) as pool, ThreadPoolExecutor(1) as collector:
        for ids, lengths in _tokenized(pool, chunks, tokenize, elsewhere, _AHEAD * len(forwards)):
            batches = list(zip(packing.pack(ids, lengths, limit, budget), turns))  # noqa: B905
            for forward in forwards:
                forward.prepare(batch.tokens.shape for batch, other in batches if other is forward)
            rows = np.empty((len(lengths), width), np.float32) if out is None else out[done : done + len(lengths)]
            rows[lengths == 0] = 0.0  # of texts that are in no batch
            done += len(rows)
            started.append((rows, []))
            for batch, forward in batches:
                in_flight.append(collector.submit(_collect, forward(batch.tokens), batch, rows))
                started[-1][1].append(in_flight[-1])
                if len(in_flight) > _BATCHES_IN_FLIGHT * len(forwards):
                    in_flight.popleft().result()
            while len(started) > 1 and all(batch.done() for batch in started[0][1]):
                yield _finished(*started.popleft())
        while started:
            yield _finished(*started.popleft())


def _finished(rows: np.ndarray, batches: list[Future[None]]) -> np.ndarray:
    for batch in batches:
        batch.result()
    return rows


def _collect(result: jax.Array, batch: packing.Batch, rows: np.ndarray) -> None:
    """Waits for the results of a batch and puts them where they belong."""
    found = np.asarray(result)
    for start in range(0, len(batch.sentences), _COPIED):
        part = slice(start, start + _COPIED)
        rows[batch.sentences[part]] = found[batch.segments[part]]


def _tokenized(
    pool: ThreadPoolExecutor,
    given: Iterable[list[Any]],
    tokenize: Tokenize,
    elsewhere: Callable[[list[Any]], Tokens] | None,
    count: int,
) -> Iterator[Tokens]:
    """The tokens of each chunk; those of the next `count` are being made then."""
    seen = 0

    def start(chunk: list[Any]) -> list[Callable[[], Tokens]]:
        nonlocal seen
        here = functools.partial(tokenizing.tokens, tokenize)
        if len(chunk) <= _FEW:
            return [functools.partial(here, chunk)]
        call = elsewhere if elsewhere and seen >= _MANY else here
        seen += len(chunk)
        return [pool.submit(call, piece).result for piece in chunks(chunk, _PIECE)]

    ahead = map(start, given)
    waiting = collections.deque(itertools.islice(ahead, count))
    while waiting:
        waiting.extend(itertools.islice(ahead, 1))
        ids, lengths = zip(*(piece() for piece in waiting.popleft()), strict=True)
        yield Tokens(np.concatenate(ids), np.concatenate(lengths))


def chunks(texts: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Divides texts into lists of `size`, the last of which may be shorter."""
    source = iter(texts)
    while chunk := list(itertools.islice(source, size)):
        yield chunk
