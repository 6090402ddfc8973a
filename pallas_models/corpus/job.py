"""From a corpus to a folder of files of embeddings; a run continues where an earlier one was stopped."""

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
# Makes (n, dimension) float32 of each list of n sentences, in order, and the same of the same list.
Encode = Callable[[Iterable[list[str]]], Iterable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How embeddings are written.

    Attributes:
      dtype: one of `writing.DTYPES`.
      format: one of `writing.FORMATS`.
      shard_size: sentences of a file of a folder; None for a file of embeddings for each file of sentences.
      keep: the column of the input that a Parquet file holds beside the embeddings, or None.
    """

    dtype: str
    format: str
    shard_size: int | None
    keep: str | None = None

    def beside(self, texts: list[str], ranges: Ranges = None) -> Beside:
        """The content of a file beside embeddings: ranges, and `texts` of the column that is kept."""
        return Beside(ranges, None if self.keep is None else (self.keep, texts))


@contextlib.contextmanager
def begin(folder: Path, planned: Manifest) -> Iterator[Manifest]:
    """Gives the manifest to go on with: the manifest in the folder, of an earlier run, or else `planned`.

    The folder is locked while the context lasts.

    Raises:
      OSError: the folder cannot be made or written, or another job writes to it.
      ValueError: it holds something else, or was begun with another model or other settings.
    """
    folder.mkdir(exist_ok=True)
    with files.locked(folder):
        earlier = manifest.read(folder)
        if earlier is None:
            planned.write(folder)  # so that the folder is known for what it is if this run is killed
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

    No list that is encoded has sentences of two shards, so that it does not matter with which shard a run begins.
    Shards are written side by side while the next ones are encoded.

    Args:
      sentences: all sentences, including those that are embedded already.
      encode: makes the embeddings; it is called once, for all shards.
      folder: takes the files.
      begun: the manifest that `begin` gave for the folder; it is kept up to date, in the folder too.
      layout: how to write.
      kept: a text for each sentence, of the column that the layout keeps.

    Raises:
      OSError: a file cannot be written.
      ValueError: a shard was made from other sentences before.
    """
    embedded = {shard.file: shard for shard in begun.shards}
    given: collections.deque[_Part] = collections.deque()  # parts that `encode` has taken and not given back
    parts = _missing(iter(sentences), iter(kept), folder, embedded, layout)
    failures: list[Exception] = []
    found: list[np.ndarray] = []  # rows that are not converted yet, since ranges follow from a whole shard
    converting: list[Future[np.ndarray]] = []  # rows of the shard that is being encoded
    in_hand: collections.deque[Future[None]] = collections.deque()

    def readable() -> Iterator[list[str]]:
        try:
            for part in parts:
                given.append(part)
                yield part.sentences
        except Exception as error:  # raised once all that was read before is written
            failures.append(error)

    listing = threading.Lock()

    def convert(rows: np.ndarray) -> np.ndarray:
        return writing.convert(rows, layout.dtype, begun.ranges)

    def write(part: _Part, rows: list[Future[np.ndarray]], dimension: int) -> None:
        converted = [future.result() for future in rows]
        rows.clear()  # so that only the list that is written keeps them
        beside = layout.beside(part.kept)
        shard = write_shard(folder / part.file, converted, dimension, part.digest, layout.format, beside)
        with listing:
            begun.add(shard, folder)

    # Rows are converted while they wait for their shard to be whole: they may take a quarter of the memory then.
    with ThreadPoolExecutor(1) as converter, ThreadPoolExecutor(_WRITERS) as writers:
        for rows in encode(readable()):
            part = given.popleft()
            found.append(rows)
            if begun.ranges is None and layout.dtype in writing.RANGED:
                if not part.ends:
                    continue
                begun.ranges = quantization.ranges_of(np.concatenate(found)).tolist()
            converting += [converter.submit(convert, waiting) for waiting in found]
            found.clear()
            if part.ends:
                if len(in_hand) == _WRITERS:
                    in_hand.popleft().result()
                in_hand.append(writers.submit(write, part, converting, rows.shape[1]))
                converting = []
        for written in in_hand:
            written.result()
    if failures:
        raise failures[0]
    for left in embedded.values():
        check_source(folder, left, Digest())
    finish(folder, begun)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A list of sentences of one shard; the last list of a shard `ends` it, and has the texts that are kept.

    Parts of a shard share its digest, which is whole with the last part: that is made when all have been read.
    """

    sentences: list[str]
    file: str
    digest: Digest
    ends: bool
    kept: list[str]


def _missing(
    sentences: Iterator[str], kept: Iterator[str], folder: Path, embedded: dict[str, Shard], layout: Layout
) -> Iterator[_Part]:
    """Yields the parts of the shards that are not among `embedded`; shards found unchanged are taken out of it."""
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
    """Raises ValueError unless a shard was made from the sentences of the digest `given`."""
    if (shard.sentences, shard.source) != (given.count, str(given)):
        raise ValueError(
            f"{folder / shard.file} was made from other sentences than those given now; "
            "expected the same input, or another folder"
        )


def write_shard(path: Path, parts: Parts, dimension: int, digest: Digest, format: str, beside: Beside) -> Shard:
    """Writes converted embeddings of the sentences of `digest` to a file; `dimension` is their size before."""
    sha256 = writing.write(path, parts, format, beside)
    return Shard(path.name, digest.count, dimension, path.stat().st_size, sha256, str(digest))


def finish(folder: Path, begun: Manifest) -> None:
    """Marks the manifest as complete, in the folder too."""
    if not begun.complete:
        begun.complete = True
        begun.write(folder)


def _is_there(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.bytes
