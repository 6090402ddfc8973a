"""From a corpus to files of embeddings; a folder of them is continued where an earlier run was stopped."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pallas_models import quantization
from pallas_models.corpus import manifest, writing
from pallas_models.corpus.manifest import Digest, Manifest, Shard
from pallas_models.corpus.writing import Ranges

# Sentences to (n, dimension) float32, in order, some at a time, at least once; the same for the same sentences.
Encode = Callable[[Iterable[str]], Iterable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How embeddings are written.

    Attributes:
      dtype: one of `writing.DTYPES`.
      format: one of `writing.FORMATS`.
      shard_size: sentences of a file of a folder; None for a file of embeddings for each file of sentences.
    """

    dtype: str
    format: str
    shard_size: int | None


def begin(folder: Path, planned: Manifest) -> Manifest:
    """Returns the manifest to go on with: that of an earlier run where the folder has one, else `planned`.

    Raises:
      OSError: the folder cannot be made or written.
      ValueError: it holds something else, or was begun with another model or other settings.
    """
    folder.mkdir(exist_ok=True)
    earlier = manifest.read(folder)
    if earlier is None:
        planned.write(folder)  # so that what a killed run leaves is known for what it is
        return planned
    planned.check_continues(earlier, folder)
    there = [shard for shard in earlier.shards if _is_there(folder, shard)]
    return dataclasses.replace(earlier, shards=there, complete=earlier.complete and there == earlier.shards)


def embed_to_folder(
    sentences: Iterable[str], encode: Encode, folder: Path, begun: Manifest, layout: Layout
) -> None:
    """Embeds sentences into the shards that a folder does not have yet.

    Each shard is encoded by itself, so that it does not matter which one a run begins with, and written while the
    next one is encoded.

    Args:
      sentences: all of them, those that are embedded already too.
      encode: makes the embeddings of a shard.
      folder: where to.
      begun: what `begin` returned for the folder; it is kept up to date, in the folder too.
      layout: how to write.

    Raises:
      OSError: a file cannot be written.
      ValueError: the sentences are others than those that are embedded already.
    """
    sentences = iter(sentences)
    others = None if layout.shard_size is None else layout.shard_size - 1
    embedded = {shard.file: shard for shard in begun.shards}
    last: Future[None] | None = None
    with ThreadPoolExecutor(1) as writer:
        for name in (f"{i:06d}.{layout.format}" for i in itertools.count()):
            if (first := next(sentences, None)) is None:
                break
            digest = Digest()
            own = digest.of(itertools.chain((first,), itertools.islice(sentences, others)))
            if earlier := embedded.pop(name, None):
                collections.deque(own, 0)  # reads them
                check_source(folder, earlier, digest)
                continue
            embeddings = np.concatenate(list(encode(own)))
            if begun.ranges is None and layout.dtype in writing.RANGED:
                begun.ranges = quantization.ranges_of(embeddings).tolist()
            if last:
                last.result()
            last = writer.submit(_add, folder / name, embeddings, digest, begun, layout)
        if last:
            last.result()
    for shard in embedded.values():
        check_source(folder, shard, Digest())
    finish(folder, begun)


def check_source(folder: Path, shard: Shard, given: Digest) -> None:
    """Raises ValueError unless `given` are the sentences that a shard was made from."""
    if (shard.sentences, shard.source) != (given.count, str(given)):
        raise ValueError(
            f"{folder / shard.file} was made from other sentences than those given now; "
            "expected the same input, or another folder"
        )


def write_shard(path: Path, embeddings: np.ndarray, digest: Digest, layout: Layout, ranges: Ranges) -> Shard:
    """Writes (N, D) float32 embeddings of the sentences of `digest` to one file."""
    sha256 = writing.write(path, writing.convert(embeddings, layout.dtype, ranges), layout.format)
    return Shard(path.name, digest.count, embeddings.shape[1], path.stat().st_size, sha256, str(digest))


def finish(folder: Path, begun: Manifest) -> None:
    """Says in the folder that it holds all there is."""
    if not begun.complete:
        begun.complete = True
        begun.write(folder)


def _add(path: Path, embeddings: np.ndarray, digest: Digest, begun: Manifest, layout: Layout) -> None:
    begun.add(write_shard(path, embeddings, digest, layout, begun.ranges), path.parent)


def _is_there(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.bytes
