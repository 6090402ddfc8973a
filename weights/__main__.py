"""Converts a PyTorch checkpoint: `python -m weights minilm SRC DST [--dtype float16]`."""

import argparse
import shutil
import sys
from pathlib import Path

from weights import hub, store
from weights.checkpoint import CheckpointError
from weights.minilm import load_minilm, load_minilm_config


def _convert(src: str, dst: Path, dtype: str) -> None:
    source = hub.resolve(src)
    config = load_minilm_config(source)
    written = store.save(load_minilm(source, dtype=dtype), dst, config=config)
    print(f"{written}: {dtype}, {written.stat().st_size:,} bytes; {config}")
    if written.parent == dst and source.is_dir():
        for name in hub.TEXT_FILES:
            if (source / name).is_file() and source.resolve() != dst.resolve():
                (dst / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, dst / name)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m weights", description="Convert PyTorch checkpoints.")
    models = parser.add_subparsers(dest="model", required=True)
    minilm = models.add_parser("minilm", help="BERT sentence encoders such as all-MiniLM-L6-v2")
    minilm.add_argument("src", metavar="SRC", help=f"folder, file, hub id, or {hub.DEFAULT}")
    minilm.add_argument(
        "dst",
        metavar="DST",
        type=Path,
        help="a .safetensors file, or a folder: params.safetensors and the tokenizer's files",
    )
    minilm.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float32")
    args = parser.parse_args(argv)
    try:
        _convert(args.src, args.dst, args.dtype)
    except (CheckpointError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
