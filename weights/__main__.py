"""Converts a PyTorch checkpoint: `python -m weights minilm|gpt2|qwen3 SRC DST [--dtype float16]`."""

import argparse
import contextlib
import gc
import sys
from pathlib import Path

from pallas_models import __version__, files
from pallas_models._processes import run_program
from weights import hub, loading, store
from weights.checkpoint import CheckpointError
from weights.families import FAMILIES, Family


def _convert(family: Family, src: str, dst: Path, dtype: str) -> None:
    source = hub.resolve(src)
    config = loading.load_config(family, source)
    params = loading.load(family, source, dtype)
    written = store.file_of(dst)
    alone = written == dst or not source.is_dir() or source.resolve() == dst.resolve()
    text = [] if alone else hub.text_files(source)
    # Files of the model that was converted into this folder before, which this model does not have.
    stale = [name for name in hub.text_files(dst) if name not in text] if written.is_file() and not alone else []
    dst.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext(dst) if alone else files.replacing_folder(dst) as draft:
        for name in text:
            (draft / name).parent.mkdir(exist_ok=True)
            files.write(draft / name, (source / name).read_bytes())
        for name in stale:
            (draft / name).unlink(missing_ok=True)
        store.save(params, draft, config=config)
    print(f"{written}: {dtype}, {written.stat().st_size:,} bytes; {config}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m weights", description="Convert PyTorch checkpoints.")
    parser.add_argument("--version", action="version", version=f"pallas_models {__version__}")
    models = parser.add_subparsers(dest="model", required=True)
    for family in FAMILIES.values():
        model = models.add_parser(family.name, help=family.description)
        model.add_argument("src", metavar="SRC", help=f"folder, file, hub id, or for minilm {hub.DEFAULT}")
        model.add_argument(
            "dst",
            metavar="DST",
            type=Path,
            help="a .safetensors file, or a folder: params.safetensors and the tokenizer's files",
        )
        model.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float32")
    args = parser.parse_args(argv)
    try:
        _convert(FAMILIES[args.model], args.src, args.dst, args.dtype)
    except (CheckpointError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    gc.freeze()  # to look for garbage among imported modules takes a seventh of a short run
    run_program(main)
