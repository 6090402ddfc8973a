"""From a corpus to files of embeddings; a folder of them is continued where an earlier run was stopped."""

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pallas_models import files
from pallas_models.corpus import manifest, writing
from pallas_models.corpus.manifest import Digest, Manifest, Shard
from pallas_models.corpus.writing import Beside, Parts, Ranges
from pallas_models.sentence import pipeline, quantization

# Shards that are written side by side. Parquet takes 5 us of one core for 384 values; the rest is disk and hash.
_WRITERS = 3
# Lists of n sentences to (n, dimension) float32 each, in order; the same for the same list.
Encode = Callable[[Iterable[list[str]]], Iterable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How embeddings are written.

    Attributes:
      dtype: one of `writing.DTYPES`.
      format: one of `writing.FORMATS`.
      shard_size: sentences of a file of a folder; None for a file of embeddings for each file of sentences.
      keep: the column of the input that a Parquet file has beside the embeddings.
    """

    dtype: str
    format: str
    shard_size: int | None
    keep: str | None = None

    def beside(self, texts: list[str], ranges: Ranges = None) -> Beside:
        """What a file has beside embeddings: ranges, and what is kept of the column of that name."""
        return Beside(ranges, None if self.keep is None else (self.keep, texts))


@contextlib.contextmanager
def begin(folder: Path, planned: Manifest) -> Iterator[Manifest]:
    """Gives the manifest to go on with: that of an earlier run where the folder has one, else `planned`.

    The folder is locked for as long as the context lasts.

    Raises:
      OSError: the folder cannot be made or written, or another job writes to it.
      ValueError: it holds something else, or was begun with another model or other settings.
    """
    folder.mkdir(exist_ok=True)
    with files.locked(folder):
        earlier = manifest.read(folder)
        if earlier is None:
            planned.write(folder)  # so that what a killed run leaves is known for what it is
            yield planned
            return
        planned.check_continues(earlier, folder)
        there = [shard for shard in earlier.shards if _is_there(folder, shard)]
        yield dataclasses.replace(earlier, shards=there, complete=earlier.complete and there == earlier.shards)


def embed_to_folder(
    sentences: Iterable[str],
    encode: Encode,
    folder: Path,
    begun: Manifest,
    layout: Layout,
    kept: Iterable[str] = (),
) -> None:
    """Embeds sentences into the shards that a folder does not have yet.

    No list that is encoded has sentences of two shards, so that it does not matter which one a run begins with.
    Shards are written side by side while the next ones are encoded.

    Args:
      sentences: all of them, those that are embedded already too.
      encode: makes the embeddings; it is called once, for all shards.
      folder: where to.
      begun: what `begin` gave for the folder; it is kept up to date, in the folder too.
      layout: how to write.
      kept: of the column that the layout keeps, a text for each sentence.

    Raises:
      OSError: a file cannot be written.
      ValueError: the sentences are others than those that are embedded already.
    """
    embedded = {shard.file: shard for shard in begun.shards}
    given: collections.deque[_Part] = collections.deque()  # to `encode`, which has not given it back
    parts = _missing(iter(sentences), iter(kept), folder, embedded, layout)
    failures: list[Exception] = []
    found: list[np.ndarray] = []  # what is not converted yet, since ranges follow from a whole shard
    shard: list[Future[np.ndarray]] = []
    in_hand: collections.deque[Future[None]] = collections.deque()

    def readable() -> Iterator[list[str]]:
        try:
            for part in parts:
                given.append(part)
                yield part.sentences
        except Exception as error:  # which waits until what was read before is written
            failures.append(error)

    listing = threading.Lock()

    def convert(rows: np.ndarray) -> np.ndarray:
        return writing.convert(rows, layout.dtype, begun.ranges)

    def write(part: _Part, rows: list[Future[np.ndarray]], dimension: int) -> None:
        converted = [future.result() for future in rows]
        rows.clear()  # so that nothing but the list that is written keeps them
        beside = layout.beside(part.kept)
        shard = write_shard(folder / part.file, converted, dimension, part.digest, layout.format, beside)
        with listing:
            begun.add(shard, folder)

    # What waits for its shard to be whole is converted, which may take a quarter of the memory.
    with ThreadPoolExecutor(1) as converter, ThreadPoolExecutor(_WRITERS) as writers:
        for rows in encode(readable()):
            part = given.popleft()
            found.append(rows)
            if begun.ranges is None and layout.dtype in writing.RANGED:
                if not part.ends:
                    continue
                begun.ranges = quantization.ranges_of(np.concatenate(found)).tolist()
            shard += [converter.submit(convert, rows) for rows in found]
            found.clear()
            if part.ends:
                if len(in_hand) == _WRITERS:
                    in_hand.popleft().result()
                in_hand.append(writers.submit(write, part, shard, rows.shape[1]))
                shard = []
        for written in in_hand:
            written.result()
    if failures:
        raise failures[0]
    for left in embedded.values():
        check_source(folder, left, Digest())
    finish(folder, begun)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A list of sentences of one shard, and whether it is the shard's last, with what is kept beside them all."""

    sentences: list[str]
    file: str
    digest: Digest
    ends: bool
    kept: list[str]


def _missing(
    sentences: Iterator[str], kept: Iterator[str], folder: Path, embedded: dict[str, Shard], layout: Layout
) -> Iterator[_Part]:
    """Yields the parts of the shards that are not among `embedded`; takes from there what it finds unchanged."""
    others = None if layout.shard_size is None else layout.shard_size - 1

    def kept_beside(digest: Digest) -> list[str]:
        if layout.keep is None:
            return []
        texts = list(itertools.islice(kept, digest.count))
        digest.keep(texts)
        return texts

    for name in (f"{i:06d}.{layout.format}" for i in itertools.count()):
        if (first := next(sentences, None)) is None:
            return
        digest = Digest()
        own = digest.of(itertools.chain((first,), itertools.islice(sentences, others)))
        if earlier := embedded.pop(name, None):
            collections.deque(own, 0)  # reads them
            kept_beside(digest)
            check_source(folder, earlier, digest)
            continue
        chunks = pipeline.chunks(own, pipeline.CHUNK)
        chunk = next(chunks)
        while chunk:
            following = next(chunks, [])
            yield _Part(chunk, name, digest, not following, [] if following else kept_beside(digest))
            chunk = following


def check_source(folder: Path, shard: Shard, given: Digest) -> None:
    """Raises ValueError unless `given` are the sentences that a shard was made from."""
    if (shard.sentences, shard.source) != (given.count, str(given)):
        raise ValueError(
            f"{folder / shard.file} was made from other sentences than those given now; "
            "expected the same input, or another folder"
        )


def write_shard(path: Path, parts: Parts, dimension: int, digest: Digest, format: str, beside: Beside) -> Shard:
    """Writes the embeddings of the sentences of `digest`, converted and of so many values before, to one file."""
    sha256 = writing.write(path, parts, format, beside)
    return Shard(path.name, digest.count, dimension, path.stat().st_size, sha256, str(digest))


def finish(folder: Path, begun: Manifest) -> None:
    """Says in the folder that it holds all there is."""
    if not begun.complete:
        begun.complete = True
        begun.write(folder)


def _is_there(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.bytes
