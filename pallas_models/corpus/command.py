"""The command `python -m pallas_models embed`, once its options are read."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from pallas_models import files
from pallas_models.corpus import job, manifest, progress, reading, writing
from pallas_models.corpus.embedder import Embedder
from pallas_models.corpus.job import Layout
from pallas_models.sentence import quantization

EXAMPLES = (
    "A man is playing a guitar.",
    "Someone is making music on an instrument.",
    "A woman is slicing vegetables.",
    "The chef cuts an onion.",
    "The stock market fell sharply today.",
)
# A wider table does not fit a terminal.
_TABLE_SIZE = 12
# The ranges of fewer sentences are no good guess at the ranges of others; sentence-transformers warns so too.
_FEW = 100


def embed(args: argparse.Namespace) -> None:
    """Embeds the files that the options name, into the output that they name.

    Raises:
      ImportError, OSError, ValueError: an option is wrong or does not go with another, or the work cannot be done;
        the message is written for whoever typed the options.
    """
    _check_inputs(args)
    layout = _layout(args)
    _check_options(args, layout)
    embedder = Embedder(
        model=args.model,
        compute_dtype=args.compute_dtype,
        implementation=args.implementation,
        compilation_cache=args.compilation_cache,
        batch_size=args.batch_size,
        prompt=args.prompt,
        prompt_name=args.prompt_name,
        truncate_dim=args.truncate_dim,
        devices=args.devices,
    )
    corpus = reading.Corpus(args.inputs, args.column, args.input_format)
    ranges = manifest.read_ranges(args.ranges) if args.ranges else None
    if _to_folder(args):
        _embed_to_folder(args, corpus, embedder, layout, ranges)
    else:
        _embed_to_file(args, corpus, embedder, layout, ranges)


def _check_inputs(args: argparse.Namespace) -> None:
    if args.inputs:
        return
    given = [
        f"--{name}" for name in ("column", "input-format", "keep", "output") if vars(args)[name.replace("-", "_")]
    ]
    if given or _is_piped():
        why = f"{given[-1]} is given" if given else "standard input is a pipe or a file"
        raise ValueError(f"{why} but no FILE; expected files or folders, or - for standard input")


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, and not a terminal or the like."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # there is none, or an object of Python replaces it
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _layout(args: argparse.Namespace) -> Layout:
    dtype = "float32" if args.dtype == "bfloat16" else args.dtype  # numpy has no bfloat16
    if _to_folder(args):
        if args.similarities:
            raise ValueError(f"--similarities is for one file as --output; {args.output} is a folder")
        if args.ray and args.shard_size:
            raise ValueError("--shard-size goes without --ray, which makes a file for each file that it reads")
        shard_size = None if args.ray else args.shard_size or writing.SHARD_SIZE
        return Layout(dtype, args.format or "npy", shard_size, args.keep)
    for option in ("format", "shard_size", "ray"):
        if vars(args)[option]:
            is_file = f"; --output {args.output} names one file" if args.output else ""
            raise ValueError(
                f"--{option.replace('_', '-')} expects a folder as --output, such as embeddings/{is_file}"
            )
    return Layout(dtype, _format(args.output), None, args.keep)


def _format(output: str | None) -> str:
    """The format of a single file: what its suffix says, or .npy for standard output, a device or a pipe."""
    suffix = Path(output or "").suffix
    if suffix[1:].lower() in writing.FORMATS:
        return suffix[1:].lower()
    if output is None or output == "-" or (Path(output).exists() and not Path(output).is_file()):
        return "npy"
    formats = f".{', .'.join(writing.FORMATS)}"
    if suffix:
        raise ValueError(f"--output {output} ends in {suffix}; expected one of {formats}, or a folder: {output}/")
    raise ValueError(f"--output {output} is no folder and has no suffix; expected one of {formats}, or {output}/")


def _check_options(args: argparse.Namespace, layout: Layout) -> None:
    if args.workers and not args.ray:
        raise ValueError("--workers is an option of --ray; expected both, or neither")
    if args.ray and args.devices:
        raise ValueError("--devices goes without --ray, which gives each worker a GPU")
    is_ranged = layout.dtype in writing.RANGED
    if args.ranges and not is_ranged:
        raise ValueError(f"--ranges is an option of --dtype int8 and uint8, not {args.dtype}")
    if is_ranged and not args.ranges:
        if args.ray:
            raise ValueError(f"--dtype {layout.dtype} with --ray expects --ranges, that all workers share")
        if args.output and not _to_folder(args) and layout.format == "npy":
            raise ValueError(
                f"--dtype {layout.dtype} takes its ranges from the sentences, and --output {args.output} has no "
                "place for them; expected .npz, .parquet, .safetensors, a folder, or --ranges"
            )
    if layout.keep is not None and layout.format != "parquet":
        raise ValueError("--keep expects Parquet: an --output of .parquet, or --format parquet with a folder")
    if layout.keep == writing.EMBEDDING:
        raise ValueError(f"--keep {layout.keep} names the column of the embeddings themselves; expected another")
    if args.output == "-" and args.similarities:
        raise ValueError("--similarities goes without --output -, as both write to standard output")
    if args.output == "-" and sys.stdout.isatty():
        raise ValueError("--output - writes bytes to standard output, a terminal; expected a pipe or a file")
    writing.check_available(layout.format)
    if args.ray:
        from pallas_models import ray

        ray.check_available()


def _to_folder(args: argparse.Namespace) -> bool:
    return args.output is not None and (args.output.endswith("/") or Path(args.output).is_dir())


@contextlib.contextmanager
def _opened(output: str | None) -> Iterator[IO[bytes] | None]:
    if output == "-":
        yield sys.stdout.buffer
    elif output:
        with files.replacing(output) as file:
            yield file
    else:
        yield None


def _embed_to_file(
    args: argparse.Namespace,
    corpus: reading.Corpus,
    embedder: Embedder,
    layout: Layout,
    ranges: writing.Ranges,
) -> None:
    shown: list[str] = []

    def watched(sentences: Iterable[str]) -> Iterator[str]:
        for sentence in sentences:
            if len(shown) < _TABLE_SIZE:
                shown.append(sentence)
            yield sentence

    sentences = watched(corpus if args.inputs else EXAMPLES)
    kept = _kept(corpus, layout)
    # Opened before the work, so that none is done for a path that cannot be written.
    with _opened(args.output) as file:
        with progress.shown(corpus, args.progress) as advance:
            embeddings = embedder.embed(sentences, advance)
        if file:
            if layout.dtype in writing.RANGED and ranges is None and len(embeddings):
                ranges = quantization.ranges_of(embeddings).tolist()
                _warn_of_few(len(embeddings), args)
            written = writing.convert(embeddings, layout.dtype, ranges)
            writing.FORMATS[layout.format](file, [written], layout.beside(list(kept), ranges))
    if args.similarities or not args.output:
        _print_similarities(shown, embeddings)
    if args.output:
        # Not among the embeddings, where these go to standard output.
        said = sys.stderr if args.output == "-" else sys.stdout
        print(f"{args.output}: {written.shape[0]} x {written.shape[1]} {written.dtype}", file=said)


def _kept(corpus: reading.Corpus, layout: Layout) -> Iterator[str]:
    """The kept column; its first value is read at once, so that no work is done for a column that is missing."""
    texts = iter(() if layout.keep is None else corpus.kept(layout.keep))
    return itertools.chain(list(itertools.islice(texts, 1)), texts)


def _warn_of_few(sentences: int, args: argparse.Namespace) -> None:
    if sentences < _FEW:
        print(
            f"warning: the ranges of {args.dtype} come from {sentences} sentences; others may lie far outside. "
            f"Take them from {_FEW} or more: --ranges",
            file=sys.stderr,
        )


def _embed_to_folder(
    args: argparse.Namespace,
    corpus: reading.Corpus,
    embedder: Embedder,
    layout: Layout,
    ranges: writing.Ranges,
) -> None:
    from weights import hub

    folder = Path(args.output)
    for given in args.inputs:
        if folder.resolve().is_relative_to(Path(given).resolve()):
            raise ValueError(f"--output {folder} lies in {given}, which is read; expected a folder outside of it")
    planned = manifest.Manifest(
        manifest.describe_model(args.model, hub.resolve(args.model)),
        embedder.settings | dataclasses.asdict(layout),
        ranges,
    )
    if args.ray:
        from pallas_models import ray

        begun = ray.embed_files(corpus, embedder, folder, planned, layout, workers=args.workers)
    else:
        kept = _kept(corpus, layout)
        planned.environment = manifest.describe_environment()
        with job.begin(folder, planned) as begun, progress.shown(corpus, args.progress) as advance:
            job.embed_to_folder(corpus, lambda chunks: map(advance, embedder(chunks)), folder, begun, layout, kept)
    if layout.dtype in writing.RANGED and ranges is None and begun.shards:
        _warn_of_few(begun.shards[0].sentences, args)
    count = len(begun.shards)
    shards = "1 file" if count == 1 else f"{count} files"
    print(f"{folder}: {begun.sentences} x {begun.dimension} {layout.dtype} in {shards}")


def _print_similarities(sentences: list[str], embeddings: np.ndarray) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    count, shown = len(embeddings), len(sentences)
    title = "Cosine similarities" + (f", first {shown} of {count}" if shown < count else "")
    table = Table(title=title)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("sentence", max_width=48)  # the only one that gives way in a narrow terminal: by its texts
    for j in range(shown):
        table.add_column(str(j + 1), justify="right", no_wrap=True)
    for i, row in enumerate(embeddings[:shown] @ embeddings[:shown].T):
        # Text, as square brackets in a plain string would be read as markup, and without control characters.
        printable = "".join(c if c.isprintable() else "\ufffd" for c in sentences[i])
        sentence = Text(printable, no_wrap=True, overflow="ellipsis")
        table.add_row(str(i + 1), sentence, *(f"{similarity:.2f}" for similarity in row))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
