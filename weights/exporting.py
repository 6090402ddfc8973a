"""Writes parameters for PyTorch's libraries: with Hugging Face's names and layouts, and the files beside them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save as serialize

from pallas_models import files
from pallas_models.bert import MiniLMConfig
from weights import checkpoint, configs, families, hub, lazy, loading, store, tree
from weights.checkpoint import CheckpointError
from weights.families import Part

# Files beside the tensors that stay true when these change, other than `hub.TEXT_FILES`.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)


def export(
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    config: Any = MiniLMConfig(),
    like: str | os.PathLike[str] | None = None,
    dtype: DTypeLike | None = None,
) -> Path:
    """Writes a folder that transformers loads, and sentence-transformers too if it can load `like`.

    The loaders of `weights` read it too, and give the same parameters back.

    Args:
      params: nested dict of float16, bfloat16 or float32 arrays, as the `init` of a model or a loader of `weights`
        returns it; `training.unstack_layers` undoes `training.stack_layers`.
      folder: it and its parents are made; files of the same names are replaced, all at once.
      config: the model's sizes; its class says which model it is.
      like: the model from which the parameters came before they were trained, as the loaders take it. Its
        config.json, the files of its tokenizer and of sentence-transformers are copied, and so are tensors that
        nothing here uses, such as a pooler. None writes a config.json alone.
      dtype: of the stored matrices, float16, bfloat16 or float32 (biases and scales are then float32); the dtypes
        of `params` when None.

    Returns:
      The path of model.safetensors in the folder.

    Raises:
      CheckpointError: `params` do not fit `config` or `dtype`, all at fault are listed; `like` is of other sizes.
      FileNotFoundError: there is nothing at `like`.
      OSError: the folder cannot be written.
      TypeError: `dtype` is none of the above, or `config` is of no model.
    """
    folder, family = Path(folder), families.of(config)
    flat = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
    checkpoint.check_tensors("params", flat, families.shapes(config))
    if dtype is not None:
        checkpoint.check_range("params", flat, checkpoint.float_dtype(dtype))
        flat = tree.astype(flat, dtype)
    tensors = split(family.parts(config), flat)
    beside: dict[str, Path] = {}
    if like is not None:
        found = hub.resolve(like)
        if (other := loading.load_config(family, found)) != config:
            raise CheckpointError(f"{found} holds a model with {other}; expected {config}")
        source = found if found.is_dir() else found.parent
        names = [*hub.text_files(source), *(name for name in _BESIDE if (source / name).is_file())]
        beside = {name: source / name for name in names}
        if not store.is_stored(found):
            with lazy.open_tensors(found) as stored:
                unused = family.ignored(config)
                kept = {name.removeprefix(family.prefix): tensor for name, tensor in stored.items()}
                tensors |= {name: tensor.read() for name, tensor in kept.items() if name in unused}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing_folder(folder) as draft:
        write_model(draft, tensors, config)
        for name, path in beside.items():
            (draft / name).parent.mkdir(exist_ok=True)
            files.write(draft / name, path.read_bytes())
    return folder / "model.safetensors"


def split(parts: Mapping[str, Part], flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that these parameters are made of."""
    tensors: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        pieces = part.split(flat[name], list(part.tensors.values()))
        tensors |= zip(part.tensors, map(np.ascontiguousarray, pieces), strict=True)
    return tensors


def write_model(draft: Path, tensors: Mapping[str, np.ndarray], config: Any) -> None:
    """Writes config.json and model.safetensors."""
    family = families.of(config)
    write_json(draft / "config.json", {"model_type": family.model_types[0], **configs.describe(family, config)})
    write_tensors(draft / "model.safetensors", tensors)
    (draft / store.FILE_NAME).unlink(missing_ok=True)  # else the loaders would read it instead


def write_json(path: Path, content: object) -> None:
    """Writes a file as JSON, and its folder where there is none."""
    path.parent.mkdir(exist_ok=True)
    files.write(path, json.dumps(content, indent=2))


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a .safetensors file as PyTorch's libraries expect it."""
    files.write(path, serialize(dict(tensors), {"format": "pt"}))
