"""The project's own checkpoint file: safetensors, one tensor a parameter, the config in the metadata.

Tensors are named as in the parameter tree (`layers.0.attention.qkv.kernel`), so reading is no conversion.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save as serialize

from pallas_models import files
from pallas_models.bert import MiniLMConfig
from weights import checkpoint, configs, families, lazy, tree
from weights.checkpoint import CheckpointError
from weights.families import Family
from weights.tree import Placement

FILE_NAME = "params.safetensors"
_FORMAT = "pallas_models"


def save(
    params: Mapping[Any, Any],
    dst: str | os.PathLike[str],
    *,
    config: Any = MiniLMConfig(),
    dtype: DTypeLike | None = None,
) -> Path:
    """Writes parameters and their config to one safetensors file.

    Args:
      params: nested dict of float16, bfloat16 or float32 arrays, as `init` or `load_minilm` returns it.
      dst: a file that ends in .safetensors, or a folder, in which the file is params.safetensors. Parent
        folders are made; an existing file is replaced once the new one is complete.
      config: the model's sizes; its class says which model it is.
      dtype: of the stored matrices, float16, bfloat16 or float32 (biases and scales are then float32);
        the dtypes of `params` when None.

    Returns:
      The path of the file.

    Raises:
      CheckpointError: `config` describes no model, or `params` do not fit it or `dtype`; all errors are listed.
      OSError: `dst` cannot be written.
      TypeError: `dtype` is none of the above, or `config` is of no model.
    """
    path, family = file_of(dst), families.of(config)
    configs.from_fields(family, dataclasses.asdict(config), "config")  # so that the file can be read
    tensors = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
    checkpoint.check_tensors("params", tensors, families.shapes(config))
    if dtype is not None:
        checkpoint.check_range("params", tensors, checkpoint.float_dtype(dtype))
        tensors = tree.astype(tensors, dtype)
    metadata = {"format": _FORMAT, "model": family.name, "config": json.dumps(dataclasses.asdict(config))}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, serialize({name: np.ascontiguousarray(t) for name, t in tensors.items()}, metadata))
    return path


def load(
    path: str | os.PathLike[str], *, dtype: DTypeLike | None = None, sharding: Placement = None
) -> dict[str, Any]:
    """Reads the parameters that `save` wrote; torch is not needed.

    Args:
      path: the file, or the folder that holds it as params.safetensors.
      dtype: of matrices, float16, bfloat16 or float32 (biases and scales are then float32); the dtypes of
        the file when None.
      sharding: a `jax.sharding.Sharding` for all parameters, or a tree of them like the parameters; the default
        device when None. Each device is sent its part alone.

    Returns:
      The parameters, a nested dict of arrays.

    Raises:
      FileNotFoundError: no such file.
      ValueError: `sharding` is a tree unlike the parameters.
      CheckpointError: the file is truncated, corrupt, not written by `save`, or does not fit its config.
      TypeError: `dtype` is none of the above.
    """
    path = file_of(path)
    target = None if dtype is None else checkpoint.float_dtype(dtype)
    config = load_config(path)
    flat: dict[str, jax.Array] = {}
    with lazy.open_tensors(path) as tensors:
        configs.check_sizes(families.of(config), config, tensors, path)
        checkpoint.check_tensors(path, tensors, families.shapes(config))
        places = tree.shardings(sharding, tensors)
        for name, tensor in tensors.items():  # one after another: no model is in memory twice
            read = {name: tensor.read()}
            if target is not None:
                checkpoint.check_range(path, read, target)
                read = tree.astype(read, target)
            flat[name] = jax.device_put(read[name], places[name])
    return tree.unflatten(flat)


def load_config(path: str | os.PathLike[str]) -> Any:
    """Reads the config of the file that `save` wrote; path and errors as in `load`."""
    path = file_of(path)
    metadata = _metadata(path)
    family = families.named(metadata.get("model"), path)
    try:
        fields = json.loads(metadata.get("config", "null"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has metadata that is not a {family.name} config: {error}") from error
    return configs.from_fields(family, fields, path)


def load_config_of(family: Family, path: Path) -> Any:
    """Reads the config of a model of `family`; CheckpointError where it is of another family, or as in `load`."""
    config = load_config(path)
    if type(config) is not family.config:
        kind = family.config.__name__
        raise CheckpointError(f"{path} holds a model with a {type(config).__name__}; expected a {kind}")
    return config


def model_name(path: Path) -> str | None:
    """The family's name that the file of `save` states; path and errors as in `load`."""
    return _metadata(file_of(path)).get("model")


def dtype_of(path: Path) -> str:
    """The dtype of the matrices in the file of `save`; path and errors as in `load`."""
    with lazy.open_tensors(file_of(path)) as tensors:
        found = {tensor.dtype.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return found.pop() if len(found) == 1 else "float32"


def is_stored(path: Path) -> bool:
    """Whether `path` is a file of `save`, or a folder that holds one as params.safetensors."""
    path = file_of(path)
    return path.suffix == ".safetensors" and path.is_file() and _is_ours(lazy.read_metadata(path))


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file that `path` names: itself if it ends in .safetensors, else params.safetensors in that folder."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


def _is_ours(metadata: Mapping[str, str]) -> bool:
    return metadata.get("format") == _FORMAT


def _metadata(path: Path) -> dict[str, str]:
    metadata = lazy.read_metadata(path)
    if not _is_ours(metadata):
        raise CheckpointError(
            f"{path} was not written by weights.save (its metadata: {metadata}); "
            "convert a PyTorch checkpoint with `python -m weights MODEL SRC DST`"
        )
    return metadata
