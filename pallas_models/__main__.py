"""Embeds text: `python -m pallas_models embed sentences.txt --output embeddings.npy`."""

import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pallas_models import compilation_cache, files
from pallas_models.ops._dispatch import IMPLEMENTATIONS, check_implementation

EXAMPLES = (
    "A man is playing a guitar.",
    "Someone is making music on an instrument.",
    "A woman is slicing vegetables.",
    "The chef cuts an onion.",
    "The stock market fell sharply today.",
)
_LINE_END = re.compile("\r\n|\r|\n")
# A wider table does not fit a terminal.
_TABLE_SIZE = 12


def _read_lines(file: str | None) -> list[str]:
    if file is None:
        return list(EXAMPLES)
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = len(_LINE_END.split(content[: error.start].decode()))
        raise ValueError(f"{'stdin' if file == '-' else file}, line {line}: {error}; expected UTF-8") from error
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def _print_similarities(sentences: list[str], embeddings: np.ndarray) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = min(len(sentences), _TABLE_SIZE)
    title = "Cosine similarities" + (f", first {shown} of {len(sentences)}" if shown < len(sentences) else "")
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


def _embed(args: argparse.Namespace) -> None:
    from pallas_models.minilm import Encoder

    sentences = _read_lines(args.file)
    # Opened before the work, so that none is done for a path that cannot be written.
    with files.replacing(args.output) if args.output else contextlib.nullcontext() as file:
        encoder = Encoder.from_pretrained(
            args.model,
            dtype=args.dtype,
            implementation=args.implementation,
            compilation_cache=args.compilation_cache,
        )
        embeddings = encoder.encode(sentences, batch_size=args.batch_size)
        if file:
            np.save(file, embeddings)
    if args.similarities or not args.output:
        _print_similarities(sentences, embeddings)
    if args.output:
        print(f"{args.output}: {embeddings.shape[0]} x {embeddings.shape[1]} {embeddings.dtype}")


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


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_models", description="Models on Pallas kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    embed = commands.add_parser("embed", help="turn sentences into embeddings")
    embed.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="UTF-8 text, one sentence a line, - for stdin; an empty line is an empty sentence, so that row i "
        "is line i. Without FILE, built-in examples",
    )
    embed.add_argument("--model", default="all-MiniLM-L6-v2", help="folder, hub id or (default) %(default)s")
    embed.add_argument("--output", metavar="NPY", type=Path, help="write float32 (sentences, hidden size) here")
    embed.add_argument(
        "--similarities", action="store_true", help="show pairwise similarities; done anyway without --output"
    )
    embed.add_argument("--batch-size", type=_positive, default=32, help="sentences at a time (%(default)s)")
    embed.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float32")
    embed.add_argument(
        "--implementation",
        type=_implementations,
        help=f"of the ops: {', '.join(IMPLEMENTATIONS)}, or several with commas; default: the best available",
    )
    compilation_cache.add_arguments(embed)
    args = parser.parse_args(argv)
    try:
        _embed(args)
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
