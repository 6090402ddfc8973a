"""Converts a PyTorch checkpoint: `python -m weights minilm|gpt2|qwen3 SRC DST [--dtype float16]`."""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weights import hub, store, tree
from weights.checkpoint import CheckpointError
from weights.gpt2 import load_gpt2, load_gpt2_config
from weights.minilm import load_minilm, load_minilm_config
from weights.qwen3 import load_qwen3, load_qwen3_config

# How each model is loaded, and what it is.
_MODELS: dict[str, tuple[Callable[..., Any], Callable[..., tree.Config], str]] = {
    "minilm": (load_minilm, load_minilm_config, "BERT sentence encoders such as all-MiniLM-L6-v2"),
    "gpt2": (load_gpt2, load_gpt2_config, "GPT-2 of any size"),
    "qwen3": (load_qwen3, load_qwen3_config, "dense Qwen3 models, 0.6B to 32B"),
}


def _convert(model: str, src: str, dst: Path, dtype: str) -> None:
    load, load_config, _ = _MODELS[model]
    source = hub.resolve(src)
    config = load_config(source)
    written = store.save(load(source, dtype=dtype), dst, config=config)
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
    for name, (_, _, description) in _MODELS.items():
        model = models.add_parser(name, help=description)
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
        _convert(args.model, args.src, args.dst, args.dtype)
    except (CheckpointError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
