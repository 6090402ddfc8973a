"""From texts to rows of embeddings: tokenizing, packing, computing and collecting, each while the others work."""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from pallas_models._processes import cores
from pallas_models.sentence import packing, tokenizing
from pallas_models.sentence.tokenizing import Tokenize, Tokens

T = TypeVar("T")
# Texts of a chunk: enough for all cores to tokenize and for a device to compute, few enough for little memory.
CHUNK = 16384
# Chunks that are tokenized while another is computed, for each device.
_AHEAD = 2
# Chunks that are tokenized ahead of a list, which is in memory already: none is taken during the second in which a
# program is traced and lowered.
_AHEAD_IN_A_LIST = 16
# Tokens of batches of a list that wait for their programs: a million short texts, in 128 MB.
_HELD = 2**24
# Pieces of a chunk are tokenized side by side. A thread waits for each piece, and a process has two at a time.
_PIECE = 1024
_THREADS = max(8, 2 * cores())
_FEW = 64  # to tokenize so many texts takes less time than to start a thread
# After so many texts others are tokenized by processes, which are up by then.
MANY = 2 * CHUNK
# Batches in flight on a device: enough to keep it busy while the next are packed, few enough that neither inputs
# nor results pile up there.
_BATCHES_IN_FLIGHT = 8
# Rows that are copied at a time: few enough to stay in a cache on their way.
_COPIED = 256


class Forward(Protocol):
    """Computes the results of batches, (segments, width); `prepare` is told their shapes beforehand."""

    def __call__(self, tokens: np.ndarray) -> jax.Array: ...

    def prepare(self, shapes: Iterable[tuple[int, ...]]) -> object: ...

    def is_ready(self, shape: tuple[int, ...]) -> bool:
        """Whether a batch of this shape does not wait for its program."""
        ...


@dataclasses.dataclass(slots=True)
class _Chunk:
    """The rows of a chunk, and its batches that are started."""

    rows: np.ndarray
    batches: int
    started: list[Future[None]] = dataclasses.field(default_factory=list)

    def is_done(self) -> bool:
        return len(self.started) == self.batches and all(batch.done() for batch in self.started)

    def result(self) -> np.ndarray:
        for batch in self.started:
            batch.result()
        return self.rows


@dataclasses.dataclass(slots=True)
class _Batches:
    """Batches in the order of their texts: packed, then computed on a device, then collected.

    Attributes:
      collector: its thread waits for results and copies them to their rows.
      most: batches that are computed at a time.
      held: tokens of the batches that are packed and not started.
    """

    collector: ThreadPoolExecutor
    most: int
    packed: collections.deque[tuple[Forward, packing.Batch, _Chunk]] = dataclasses.field(
        default_factory=collections.deque
    )
    in_flight: collections.deque[Future[None]] = dataclasses.field(default_factory=collections.deque)
    held: int = 0

    def add(self, chunk: _Chunk, batches: list[tuple[packing.Batch, Forward]]) -> None:
        self.packed.extend((forward, batch, chunk) for batch, forward in batches)
        self.held += sum(batch.tokens[0].size for batch, _ in batches)

    def start(self, held: int = 0) -> None:
        """Starts batches until the next waits for its program, and no more than `held` tokens are held."""
        while self.packed and (self.held > held or self._is_ready()):
            forward, batch, chunk = self.packed.popleft()
            self.held -= batch.tokens[0].size
            started = self.collector.submit(_collect, forward(batch.tokens), batch, chunk.rows)
            chunk.started.append(started)
            self.in_flight.append(started)
            if len(self.in_flight) > self.most:
                self.in_flight.popleft().result()

    def _is_ready(self) -> bool:
        forward, batch, _ = self.packed[0]
        return forward.is_ready(batch.tokens.shape)


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
    begun: Callable[[], object] | None = None,
) -> Generator[np.ndarray]:
    """Computes a row for each text.

    Memory does not grow with the number of chunks, which are read as they are needed, in this thread. No batch
    holds texts of two of them: the rows of a chunk do not depend on other chunks.

    Args:
      chunks: lists of texts, checked already; about `CHUNK` in each keep all busy.
      tokenize: gives the token ids of texts; called in other threads.
      forwards: start the computation of one batch of `packing.pack` and return before it is done; they take
        turns.
      width: of a row.
      limit: the most tokens that a text has.
      budget: the most tokens that a batch has.
      out: float32 (texts, width), into which rows are written; without it, each chunk has an array of its own.
        With it, chunks are taken for a list, which costs nothing to read: while programs are compiled, it is
        tokenized and packed far ahead.
      elsewhere: gives the tokens of texts where there are many; called in other threads.
      begun: called while the first texts are being tokenized.

    Yields:
      float32 (texts of the chunk, width), in the order of the texts, for each chunk.
    """
    chunks_begun: collections.deque[_Chunk] = collections.deque()
    turns = itertools.cycle(forwards)
    done = 0
    is_list = out is not None
    ahead = max(_AHEAD * len(forwards), _AHEAD_IN_A_LIST if is_list else 0)
    with _threads(_THREADS) as pool, _threads(1) as collector:
        queue = _Batches(collector, _BATCHES_IN_FLIGHT * len(forwards))
        for ids, lengths in _tokenized(pool, chunks, tokenize, elsewhere, ahead, begun):
            batches = list(zip(packing.pack(ids, lengths, limit, budget), turns))  # noqa: B905
            for forward in forwards:
                forward.prepare(batch.tokens.shape for batch, other in batches if other is forward)
            rows = np.empty((len(lengths), width), np.float32) if out is None else out[done : done + len(lengths)]
            rows[lengths == 0] = 0.0  # of texts that are in no batch
            done += len(rows)
            chunks_begun.append(_Chunk(rows, len(batches)))
            queue.add(chunks_begun[-1], batches)
            queue.start(_HELD if is_list else 0)
            while len(chunks_begun) > 1 and chunks_begun[0].is_done():
                yield chunks_begun.popleft().result()
        queue.start()
        while chunks_begun:
            yield chunks_begun.popleft().result()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that ends with the context; calls that have not begun by then are dropped."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(result: jax.Array, batch: packing.Batch, rows: np.ndarray) -> None:
    """Waits for the results of a batch and copies each to the row of its text."""
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
    begun: Callable[[], object] | None,
) -> Iterator[Tokens]:
    """Yields the tokens of each chunk, while the next `count` chunks are being tokenized."""
    seen = 0

    def start(chunk: list[Any]) -> list[Callable[[], Tokens]]:
        nonlocal seen
        here = functools.partial(tokenizing.tokens, tokenize)
        if len(chunk) <= _FEW:
            return [functools.partial(here, chunk)]
        call = elsewhere if elsewhere and seen >= MANY else here
        seen += len(chunk)
        return [pool.submit(call, piece).result for piece in chunks(chunk, _PIECE)]

    ahead = map(start, given)
    waiting = collections.deque(itertools.islice(ahead, count))
    if begun:
        begun()
    while waiting:
        waiting.extend(itertools.islice(ahead, 1))
        ids, lengths = zip(*(piece() for piece in waiting.popleft()), strict=True)
        yield Tokens(np.concatenate(ids), np.concatenate(lengths))


def joined(lists: list[list[T]]) -> list[list[T]]:
    """The chunks, with a short last one joined to the one before, so that it needs no program of its own shape."""
    if len(lists) > 1 and 2 * len(lists[-1]) < len(lists[-2]):
        *first, last, rest = lists
        return [*first, last + rest]
    return lists


def chunks(texts: Iterable[T], size: int) -> Iterator[list[T]]:
    """Divides texts into lists of `size`, the last of which may be shorter."""
    source = iter(texts)
    while chunk := list(itertools.islice(source, size)):
        yield chunk
