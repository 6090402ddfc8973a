"""Embeds text: `python -m pallas_models embed sentences.txt --output embeddings.npy`."""

import argparse
import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pallas_models import __version__, compilation_cache, files
from pallas_models._host import run_program
from pallas_models.corpus import job, manifest, progress, reading, writing
from pallas_models.corpus.embedder import Embedder
from pallas_models.corpus.job import Layout
from pallas_models.ops._dispatch import IMPLEMENTATIONS, check_implementation

EXAMPLES = (
    "A man is playing a guitar.",
    "Someone is making music on an instrument.",
    "A woman is slicing vegetables.",
    "The chef cuts an onion.",
    "The stock market fell sharply today.",
)
# A wider table does not fit a terminal.
_TABLE_SIZE = 12
# Whole chunks of the encoder's pipeline; 200 MB of float32 with 384 values.
_SHARD_SIZE = 8 * 16384
_COMPUTE_DTYPES = ("float16", "bfloat16", "float32")


def _print_similarities(sentences: list[str], embeddings: np.ndarray) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    count, shown = len(embeddings), len(sentences)
    title = "Cosine similarities" + (f", first {shown} of {count}" if shown < count else "")
    table = Table(title=title)
    table.add_column("", justify="right")
    table.add_column("sentence", max_width=48, no_wrap=True, overflow="ellipsis")
    for j in range(shown):
        table.add_column(str(j + 1), justify="right", no_wrap=True)
    for i, row in enumerate(embeddings[:shown] @ embeddings[:shown].T):
        # Text, as square brackets in a plain string would be read as markup, and without what a terminal obeys.
        sentence = Text("".join(c if c.isprintable() else "\ufffd" for c in sentences[i]))
        table.add_row(str(i + 1), sentence, *(f"{similarity:.2f}" for similarity in row))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _layout(args: argparse.Namespace) -> Layout:
    dtype = "float32" if args.dtype == "bfloat16" else args.dtype  # numpy has no bfloat16
    if _to_folder(args):
        if args.similarities:
            raise ValueError(f"--similarities is for one file as --output; {args.output} is a folder")
        if args.ray and args.shard_size:
            raise ValueError("--shard-size goes without --ray, which makes a file for each file that it reads")
        return Layout(dtype, args.format or "npy", None if args.ray else args.shard_size or _SHARD_SIZE)
    if args.format or args.shard_size or args.ray:
        raise ValueError(
            f"--output {args.output} names one file; --format, --shard-size and --ray expect a folder, "
            "such as embeddings/"
        )
    suffix = Path(args.output or "").suffix[1:].lower()
    return Layout(dtype, suffix if suffix in writing.FORMATS else "npy", None)


def _to_folder(args: argparse.Namespace) -> bool:
    return args.output is not None and (args.output.endswith("/") or Path(args.output).is_dir())


def _embed(args: argparse.Namespace) -> None:
    layout = _layout(args)
    if args.ray and args.devices:
        raise ValueError("--devices goes without --ray, which gives each worker a GPU")
    writing.check_available(layout.format)
    embedder = Embedder(
        model=args.model,
        compute_dtype=args.compute_dtype or (args.dtype if args.dtype in ("float16", "bfloat16") else None),
        implementation=args.implementation,
        compilation_cache=args.compilation_cache,
        batch_size=args.batch_size,
        prompt=args.prompt,
        prompt_name=args.prompt_name,
        truncate_dim=args.truncate_dim,
        devices=args.devices,
    )
    corpus = reading.Corpus(args.inputs, args.column, args.input_format)
    if _to_folder(args):
        _embed_to_folder(args, corpus, embedder, layout)
        return
    shown: list[str] = []

    def watched(sentences: Iterable[str]) -> Iterator[str]:
        for sentence in sentences:
            if len(shown) < _TABLE_SIZE:
                shown.append(sentence)
            yield sentence

    sentences = watched(corpus if args.inputs else EXAMPLES)
    ranges = manifest.read_ranges(args.ranges) if args.ranges else None
    # Opened before the work, so that none is done for a path that cannot be written.
    with files.replacing(args.output) if args.output else contextlib.nullcontext() as file:
        with progress.shown(corpus, args.progress) as advance:
            embeddings = embedder.embed(sentences, advance)
        written = writing.convert(embeddings, layout.dtype, ranges)
        if file:
            writing.FORMATS[layout.format](file, [written])
    if args.similarities or not args.output:
        _print_similarities(shown, embeddings)
    if args.output:
        print(f"{args.output}: {written.shape[0]} x {written.shape[1]} {written.dtype}")


def _embed_to_folder(args: argparse.Namespace, corpus: reading.Corpus, embedder: Embedder, layout: Layout) -> None:
    from weights import hub

    folder = Path(args.output)
    for given in args.inputs:
        if folder.resolve().is_relative_to(Path(given).resolve()):
            raise ValueError(f"--output {folder} lies in {given}, which is read; expected a folder outside of it")
    planned = manifest.Manifest(
        manifest.describe_model(args.model, hub.resolve(args.model)),
        embedder.settings | dataclasses.asdict(layout),
        manifest.read_ranges(args.ranges) if args.ranges else None,
    )
    if args.ray:
        from pallas_models import ray

        begun = ray.embed_files(corpus, embedder, folder, planned, layout, workers=args.workers)
    else:
        planned.environment = manifest.describe_environment()
        begun = job.begin(folder, planned)
        with progress.shown(corpus, args.progress) as advance:
            job.embed_to_folder(corpus, lambda chunks: map(advance, embedder(chunks)), folder, begun, layout)
    print(f"{folder}: {begun.sentences} x {begun.dimension} {layout.dtype} in {len(begun.shards)} files")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _implementations(text: str) -> tuple[Any, ...]:
    try:
        return check_implementation(text.split(","))  # type: ignore[arg-type]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _devices(text: str) -> tuple[str, ...]:
    if text != "all":
        return tuple(text.split(","))
    import jax

    return tuple(f"{device.platform}:{i}" for i, device in enumerate(jax.local_devices()))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_models", description="Models on Pallas kernels.")
    parser.add_argument("--version", action="version", version=f"pallas_models {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    embed = commands.add_parser("embed", help="turn sentences into embeddings")
    embed.add_argument(
        "inputs",
        metavar="FILE",
        nargs="*",
        help="files, folders or - for stdin: UTF-8 text with one sentence a line, .csv, .tsv, .jsonl, .parquet, "
        "also with .gz or .zst. An empty line of text is an empty sentence, so that row i is line i. Without "
        "FILE, built-in examples",
    )
    embed.add_argument("--column", help="of a table: which one holds the sentences; default: the only one")
    embed.add_argument(
        "--input-format",
        help="what all inputs are, such as csv or jsonl.gz; default: what their suffixes say, or text",
    )
    embed.add_argument("--model", default="all-MiniLM-L6-v2", help="folder, hub id or (default) %(default)s")
    embed.add_argument(
        "--output",
        metavar="PATH",
        help="write (sentences, dimension) here: to one .npy, .npz, .parquet or .safetensors; or, where PATH ends "
        "with / or is a folder, to many and a manifest, which the same command continues after a stop",
    )
    embed.add_argument("--format", choices=tuple(writing.FORMATS), help="of the files in a folder (npy)")
    embed.add_argument(
        "--shard-size",
        type=_positive,
        help=f"sentences of a file in a folder ({_SHARD_SIZE}): what a kill may cost",
    )
    embed.add_argument(
        "--dtype",
        choices=(*writing.DTYPES, "bfloat16"),
        default="float32",
        help="what is written (%(default)s); int8 and uint8 are relative to --ranges; bfloat16 is what is "
        "computed in, and written as float32",
    )
    embed.add_argument(
        "--compute-dtype",
        choices=_COMPUTE_DTYPES,
        help="default: --dtype where that is float16 or bfloat16, else that in which python -m weights stored the "
        "model, else float32",
    )
    prompts = embed.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", help='put before each sentence, such as "query: "; default: what the model says'
    )
    prompts.add_argument("--prompt-name", metavar="NAME", help="the prompt that the model has under this name")
    embed.add_argument(
        "--truncate-dim", type=_positive, metavar="D", help="keep the first D values, scaled to unit norm"
    )
    embed.add_argument(
        "--ranges",
        metavar="FOLDER",
        type=Path,
        help="take those of a folder written before; default: the first file's",
    )
    embed.add_argument(
        "--similarities", action="store_true", help="show pairwise similarities; done anyway without --output"
    )
    embed.add_argument(
        "--batch-size", type=_positive, help="sentences at a time; default: as many as suit the device"
    )
    embed.add_argument(
        "--devices",
        type=_devices,
        metavar="NAMES",
        help='that compute batches in turns: "all", or names such as cuda:0,cuda:1; default: the first',
    )
    embed.add_argument(
        "--ray",
        action="store_true",
        help="embed each file on the Ray cluster that RAY_ADDRESS names, or this machine",
    )
    embed.add_argument("--workers", type=_positive, help="of --ray; default: one for each GPU of the cluster")
    embed.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show how far it is; default: on a terminal"
    )
    embed.add_argument(
        "--implementation",
        type=_implementations,
        help=f"of the ops: {', '.join(IMPLEMENTATIONS)}, or several with commas; default: the best available",
    )
    compilation_cache.add_arguments(embed)
    args = parser.parse_args(argv)
    try:
        _embed(args)
    except BrokenPipeError:
        raise
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    gc.freeze()  # to look for garbage in what is imported takes a seventh of a short run
    run_program(main)
