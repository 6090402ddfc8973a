"""Embeds text: `python -m pallas_models embed sentences.txt --output embeddings.npy`."""

import argparse
import gc
import sys
from pathlib import Path

from pallas_models import __version__, _options
from pallas_models._implementation import IMPLEMENTATIONS, Name, check_implementation
from pallas_models._processes import run_program
from pallas_models.corpus import writing
from pallas_models.corpus.writing import SHARD_SIZE

_COMPUTE_DTYPES = ("float16", "bfloat16", "float32")


def _embed(args: argparse.Namespace) -> None:
    from pallas_models.corpus import command  # not above: it imports JAX, which takes a second or two

    if __name__ == "__main__":
        gc.freeze()  # to look for garbage among imported modules takes a seventh of a short run
    command.embed(args)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _implementations(text: str) -> tuple[Name, ...]:
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
    parser = _options.Parser(prog="python -m pallas_models", description="Models on Pallas kernels.")
    parser.add_argument("--version", action="version", version=f"pallas_models {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    embed = commands.add_parser("embed", help="turn sentences into embeddings")
    embed.add_argument(
        "inputs",
        metavar="FILE",
        nargs="*",
        help="files, folders or - for stdin: UTF-8 text with one sentence a line, .csv, .tsv, .jsonl, .parquet, "
        "also with .gz or .zst. An empty line of text is an empty sentence, so that row i is line i. Without "
        "FILE and --output, the similarities of built-in examples",
    )
    embed.add_argument("--column", help="of a table: which one holds the sentences; default: the only one")
    embed.add_argument(
        "--keep",
        metavar="COLUMN",
        help="of a table, such as ids to join by: put it into Parquet beside embeddings",
    )
    embed.add_argument(
        "--input-format",
        help="what all inputs are, such as csv or jsonl.gz; default: what their suffixes say, or text",
    )
    embed.add_argument("--model", default="all-MiniLM-L6-v2", help="folder, hub id or (default) %(default)s")
    embed.add_argument(
        "--output",
        metavar="PATH",
        help="write (sentences, dimension) here: to one .npy, .npz, .parquet or .safetensors, or - for .npy to "
        "stdout; or, where PATH ends with / or is a folder, to many and a manifest, which the same command "
        "continues after a stop",
    )
    embed.add_argument("--format", choices=tuple(writing.FORMATS), help="of the files in a folder (npy)")
    embed.add_argument(
        "--shard-size",
        type=_positive,
        help=f"sentences of a file in a folder ({SHARD_SIZE}): what a kill may cost",
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
        metavar="PATH",
        type=Path,
        help="of int8 and uint8: take the ranges of a folder, or of an .npz, .parquet or .safetensors, written "
        "before; default: the first file's",
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
    _options.add_arguments(embed)
    args = parser.parse_args(argv)
    args.compute_dtype = args.compute_dtype or (args.dtype if args.dtype in ("float16", "bfloat16") else None)
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
    run_program(main)
