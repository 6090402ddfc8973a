"""Loads a model of any family: config.json, the checks, and one parameter after another."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from weights import checkpoint, configs, hub, lazy, store, tree
from weights.checkpoint import CheckpointError, shown
from weights.families import FAMILIES, Family, Part, named
from weights.tree import Placement


def load(
    family: Family, path_or_name: str | os.PathLike[str], dtype: DTypeLike | None, sharding: Placement = None
) -> dict[str, Any]:
    """Loads the parameters of a model of `family`: a nested dict of arrays, placed as `store.load` has it."""
    path = hub.resolve(path_or_name)
    target = checkpoint.float_dtype(default_dtype(path) if dtype is None else dtype)
    if store.is_stored(path):
        store.load_config_of(family, path)
        return store.load(path, dtype=target, sharding=sharding)
    config = configs.read(family, _config_path(path))
    with lazy.open_tensors(path) as tensors:
        return convert(family, tensors, config, dtype=target, source=path, sharding=sharding)


def default_dtype(path: Path) -> str:
    """The dtype of the model at `path` where none is asked for: as `save` stored it, or float32."""
    return store.dtype_of(path) if store.is_stored(path) else "float32"


def load_config(family: Family, path_or_name: str | os.PathLike[str]) -> Any:
    """Reads the config alone."""
    path = hub.resolve(path_or_name)
    if store.is_stored(path):
        return store.load_config_of(family, path)
    return configs.read(family, _config_path(path))


def find_family(path: Path, *, embeds: bool = False) -> Family:
    """The family of the model at `path`, as its file or config.json says; CheckpointError if it is of none.

    Where there is one for its language models and one that embeds sentences, `embeds` asks for the second.
    """
    if store.is_stored(path):
        return named(store.model_name(path), path)
    path = _config_path(path)
    model_type = checkpoint.read_json(path).get("model_type")
    families = [family for family in FAMILIES.values() if model_type in family.model_types]
    if embeds:
        families.sort(key=lambda family: family.encode is None)
    if families:
        return families[0]
    known = " or ".join(repr(kind) for kind in sorted({k for f in FAMILIES.values() for k in f.model_types}))
    raise CheckpointError(f"{path} describes a model of type {shown(model_type)}; expected {known}")


def find_encoder(path: Path) -> Family:
    """As `find_family`; CheckpointError where the family embeds no sentences."""
    family = find_family(path, embeds=True)
    if family.encode is None:
        raise CheckpointError(f"{path} holds a model of {family.name}, which embeds no sentences")
    return family


def _config_path(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "config.json"


def convert(
    family: Family,
    stored: Mapping[str, lazy.LazyTensor],
    config: Any,
    *,
    dtype: DTypeLike,
    source: object,
    sharding: Placement = None,
) -> dict[str, Any]:
    """Converts the tensors of a checkpoint to parameters; CheckpointError lists all that do not fit."""
    configs.check_sizes(family, config, stored, source)
    parts, tied = family.parts(config), family.tied(config)
    tensors = without_prefix(stored, family.prefix, source)
    expected = {name: shape for part in parts.values() for name, shape in part.tensors.items()}
    expected |= {name: expected[other] for name, other in tied.items() if name in tensors}
    checkpoint.check_tensors(source, tensors, expected, ignored=family.ignored(config))
    for name, other in tied.items():
        if name in tensors and not np.array_equal(tensors[name].read(), tensors[other].read()):
            raise CheckpointError(f"{source} holds {name} apart from {other}; expected the same, as they are tied")
    return tree.unflatten(read_parameters(parts, tensors, dtype, source, sharding))


def read_parameters(
    parts: Mapping[str, Part],
    tensors: Mapping[str, lazy.LazyTensor],
    dtype: DTypeLike,
    source: object,
    sharding: Placement = None,
) -> dict[str, jax.Array]:
    """Makes parameters of tensors that were checked, by their dotted names, placed as `store.load` has it."""
    places = tree.shardings(sharding, parts)
    # Waiting for each frees its tensors before more are read.
    return {
        name: jax.block_until_ready(_parameter(part, tensors, dtype, source, places[name]))
        for name, part in parts.items()
    }


def _parameter(
    part: Part,
    tensors: Mapping[str, lazy.LazyTensor],
    dtype: DTypeLike,
    source: object,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """Makes a parameter on the host: on a GPU, compiling a program for each shape would take longer.

    JAX copies it, on a CPU too, so that it holds no memory of NumPy's.
    """
    read = {name: tensors[name].read() for name in part.tensors}
    checkpoint.check_range(source, read, dtype)
    (cast,) = tree.astype({"": part.join(*read.values())}, dtype).values()
    return jax.device_put(cast, sharding, may_alias=False)


def without_prefix(
    stored: Mapping[str, lazy.LazyTensor], prefix: str, source: object
) -> dict[str, lazy.LazyTensor]:
    """The tensors by their names without the prefix; CheckpointError where a name occurs with it and without."""
    tensors: dict[str, lazy.LazyTensor] = {}
    for name, tensor in stored.items():
        short = name.removeprefix(prefix)
        if short in tensors:
            raise CheckpointError(
                f"{source} holds {short} twice, with and without {prefix!r}; expected one of them"
            )
        tensors[short] = tensor
    return tensors
