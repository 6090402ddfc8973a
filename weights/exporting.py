"""Writes parameters as PyTorch's libraries read them: Hugging Face's names and layouts, and the files beside."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save as serialize

from pallas_models import files
from pallas_models.minilm.model import MiniLMConfig
from weights import checkpoint, configs, families, hub, lazy, loading, store, tree
from weights.checkpoint import CheckpointError

# What may lie beside the tensors and stays true when they change, other than `hub.TEXT_FILES`.
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
    """Writes a folder that transformers loads, and sentence-transformers where `like` is a folder of its.

    The loaders of `weights` read it too, and give the same parameters back.

    Args:
      params: nested dict of float16, bfloat16 or float32 arrays, as the `init` of a model or a loader of `weights`
        returns it; `training.unstack_layers` undoes what `training.stack_layers` did.
      folder: it and its parents are made; files of the same names are replaced, all at once.
      config: the model's sizes; its class says which model it is.
      like: where the parameters came from before they were trained, as the loaders take it. Its config.json, the
        files of its tokenizer and those of sentence-transformers are copied, and so are tensors that nothing here
        uses, such as a pooler. None writes a config.json alone.
      dtype: what to store matrices in, float16, bfloat16 or float32 (biases and scales are then float32); the
        dtypes of `params` when None.

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
    tensors: dict[str, np.ndarray] = {}
    for name, part in family.parts(config).items():
        pieces = part.split(flat[name], list(part.tensors.values()))
        tensors |= zip(part.tensors, map(np.ascontiguousarray, pieces), strict=True)
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
        if "config.json" not in beside:
            stated = {"model_type": family.model_types[0], **configs.describe(family, config)}
            files.write(draft / "config.json", json.dumps(stated, indent=2))
        for name, path in beside.items():
            (draft / name).parent.mkdir(exist_ok=True)
            files.write(draft / name, path.read_bytes())
        files.write(draft / "model.safetensors", serialize(tensors, {"format": "pt"}))
    return folder / "model.safetensors"
