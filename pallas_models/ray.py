"""Embeds on a Ray cluster: `Embed` in a pipeline of Ray Data, `embed_files` from files to files."""

import collections
import dataclasses
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from pallas_models.corpus import job, manifest, writing
from pallas_models.corpus.embedder import Embedder, EmbedderOptions
from pallas_models.corpus.job import Layout
from pallas_models.corpus.manifest import Digest, Manifest, Shard
from pallas_models.corpus.reading import Corpus
from pallas_models.corpus.writing import Ranges


class Embed:
    """Adds embeddings to batches of Ray Data; each actor loads the model once.

    ```
    rows = ray.data.read_parquet("corpus/").map_batches(
        Embed,
        fn_constructor_kwargs={"column": "text"},
        compute=ray.data.ActorPoolStrategy(size=4),
        batch_size=16384,
        num_gpus=1,
    )
    ```
    """

    def __init__(
        self,
        column: str,
        *,
        output_column: str = "embedding",
        dtype: str = "float32",
        ranges: Ranges = None,
        **options: Unpack[EmbedderOptions],
    ):
        """Loads the model.

        Args:
          column: holds the sentences.
          output_column: takes the embeddings.
          dtype, ranges: of the embeddings, as in `corpus.writing.convert`.
          options: fields of `corpus.embedder.Embedder`: model, compute_dtype, batch_size, truncate_dim and others.

        Raises:
          ValueError: `dtype` is int8 or uint8 and there are no ranges: each batch would have its own.
        """
        _check_ranges(dtype, ranges)
        self._column, self._output_column, self._dtype, self._ranges = column, output_column, dtype, ranges
        self._embedder = Embedder(**options)
        self._embedder.load()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the batch with (N, dimension) embeddings of its N sentences beside its columns."""
        if self._column not in batch:
            raise ValueError(f"a batch has the columns {', '.join(batch)}; expected {self._column!r} among them")
        embeddings = self._embedder.embed(batch[self._column])
        return batch | {self._output_column: writing.convert(embeddings, self._dtype, self._ranges)}


def check_available() -> None:
    """Raises ImportError unless Ray is installed.

    ```
    ray.check_available()
    ```
    """
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise ImportError("embedding on a Ray cluster needs Ray: pip install 'pallas-models[ray]'") from error


def embed_files(
    corpus: Corpus,
    embedder: Embedder,
    folder: Path,
    planned: Manifest,
    layout: Layout,
    *,
    workers: int | None = None,
) -> Manifest:
    """Embeds each file of a corpus into a file of a folder, on a cluster; files that are embedded already stay.

    The cluster is the one that this process is connected to, or that RAY_ADDRESS names, or else this machine. A
    worker that dies is replaced, and its file done again. All machines see both folders under the same paths.
    `python -m pallas_models embed CORPUS --output FOLDER --ray` calls it with what it takes.

    Args:
      corpus: files, of which each fits into memory with its embeddings.
      embedder: sent to the workers, which load its model once.
      folder: takes the files of embeddings.
      planned: the manifest to begin with; it gets the environment of a worker.
      layout: how to write; its `shard_size` is None.
      workers: their number; when None, one for each GPU, or one. Each takes a GPU where there are any.

    Raises:
      ImportError: Ray is not installed.
      OSError: the folder cannot be written, or another job writes to it.
      ValueError: an input cannot be read, the folder holds something else, int8 and uint8 have no ranges.
    """
    check_available()
    import ray

    _check_ranges(layout.dtype, planned.ranges)
    if "-" in corpus.paths:
        raise ValueError("standard input cannot be read by the machines of a cluster; expected files")
    ray.init(ignore_reinit_error=True, logging_level="warning")
    gpus = int(ray.cluster_resources().get("GPU", 0))
    resources = {"num_gpus": 1 if gpus else 0}
    planned.environment = ray.get(ray.remote(**resources)(manifest.describe_environment).remote())
    with job.begin(folder, planned) as begun:
        _embed_missing(corpus, embedder, folder, begun, layout, workers or gpus or 1, resources)
    return begun


def _embed_missing(
    corpus: Corpus,
    embedder: Embedder,
    folder: Path,
    begun: Manifest,
    layout: Layout,
    workers: int,
    resources: dict[str, int],
) -> None:
    import ray

    files = {f"{i:06d}.{layout.format}": str(Path(path).resolve()) for i, path in enumerate(corpus.paths)}
    embedded = {shard.file: shard for shard in begun.shards}
    for name in embedded.keys() - files.keys():
        job.check_source(folder, embedded[name], Digest())
    rows = [{"name": name, "path": path} for name, path in files.items()]
    shards = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        _EmbedFile,
        fn_constructor_args=(corpus, embedder, folder.resolve(), embedded, begun.ranges, layout),
        # A worker has one file at a time, so that none is idle while files wait at another.
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        **resources,
    )
    for row in shards.iter_rows():
        if row["error"]:
            raise ValueError(row["error"])
        shard = Shard(**row["shard"])
        if shard.file not in embedded:
            begun.add(shard, folder)
    job.finish(folder, begun)


class _Outcome(TypedDict):
    """The fields of the shard that a file became, or the error in its place."""

    shard: dict[str, str | int] | None
    error: str | None


class _EmbedFile:
    """Embeds one file of a corpus into one file of a folder."""

    def __init__(
        self,
        corpus: Corpus,
        embedder: Embedder,
        folder: Path,
        embedded: dict[str, Shard],
        ranges: Ranges,
        layout: Layout,
    ):
        self._corpus, self._embedder, self._folder = corpus, embedder, folder
        self._embedded, self._ranges, self._layout = embedded, ranges, layout

    def __call__(self, row: dict[str, str]) -> _Outcome:
        try:
            shard = self._embed(row["path"], row["name"])
        except (ImportError, OSError, ValueError) as error:
            return {"shard": None, "error": str(error)}  # raised in the driver; raised here it would be a log
        return {"shard": dataclasses.asdict(shard), "error": None}

    def _embed(self, path: str, name: str) -> Shard:
        digest = Digest()
        only, keep = self._corpus.only(path), self._layout.keep
        sentences = digest.of(only)
        kept = [] if keep is None else list(only.kept(keep))
        if earlier := self._embedded.get(name):
            collections.deque(sentences, 0)  # reads them
            if keep is not None:
                digest.keep(kept)
            job.check_source(self._folder, earlier, digest)
            return earlier
        embeddings = self._embedder.embed(sentences)
        if keep is not None:
            digest.keep(kept)
        written = writing.convert(embeddings, self._layout.dtype, self._ranges)
        beside = self._layout.beside(kept)
        return job.write_shard(
            self._folder / name, [written], embeddings.shape[1], digest, self._layout.format, beside
        )


def _check_ranges(dtype: str, ranges: Ranges) -> None:
    if dtype in writing.RANGED and ranges is None:
        raise ValueError(
            f"{dtype=} needs ranges that all workers share; expected ranges of a sample, as a folder that "
            "was written before has them (`--ranges FOLDER` of the command), not None"
        )
