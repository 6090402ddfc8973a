"""How a model of any family is loaded: config.json, the checks, and one parameter after another."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from weights import checkpoint, hub, lazy, store, tree
from weights.checkpoint import CheckpointError
from weights.families import FAMILIES, Family, Part, named


def load(family: Family, path_or_name: str | os.PathLike[str], dtype: DTypeLike) -> dict[str, Any]:
    """Loads the parameters of a model of `family`: a nested dict of arrays on the default device."""
    target = checkpoint.float_dtype(dtype)
    path = hub.resolve(path_or_name)
    if store.is_stored(path):
        store.load_config_of(family, path)
        return store.load(path, dtype=target)
    config = _read_config(family, path)
    with lazy.open_tensors(path) as tensors:
        return convert(family, tensors, config, dtype=target, source=path)


def load_config(family: Family, path_or_name: str | os.PathLike[str]) -> Any:
    """Reads the config alone."""
    path = hub.resolve(path_or_name)
    return store.load_config_of(family, path) if store.is_stored(path) else _read_config(family, path)


def find_family(path: Path) -> Family:
    """The family of the model at `path`, as its file or config.json says; CheckpointError if it is of none."""
    if store.is_stored(path):
        return named(store.model_name(path), path)
    path = _config_path(path)
    model_type = checkpoint.read_json(path).get("model_type")
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family
    known = " or ".join(repr(family.model_type) for family in FAMILIES.values())
    raise CheckpointError(f"{path} describes a model of type {model_type!r}; expected {known}")


def _config_path(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "config.json"


def _read_config(family: Family, path: Path) -> Any:
    path = _config_path(path)
    given = checkpoint.read_json(path)
    if given.get("model_type") != family.model_type:
        raise CheckpointError(
            f"{path} describes a model of type {given.get('model_type')!r}; expected {family.model_type!r}"
        )
    given = family.adapt(given)
    fields: dict[str, Any] = {field: given.get(key) for field, key in family.sizes.items()}
    wrong = [
        f"{key} is {given[key]!r}; expected {' or '.join(map(repr, allowed))}"
        for key, allowed in family.values.items()
        if given.get(key, allowed[0]) not in allowed
    ]
    wrong += [
        f"{family.sizes[field]} is {size!r}; expected a positive integer"
        for field, size in fields.items()
        if type(size) is not int or size < 1
    ]
    for field, (key, default) in family.others.items():
        fields[field] = value = given.get(key, default)
        kinds = (bool,) if isinstance(default, bool) else (int, float)
        if type(value) not in kinds:
            wrong.append(f"{key} is {value!r}; expected a {kinds[-1].__name__}")
    if wrong:
        raise CheckpointError(f"{path} describes no model that this library runs:\n  " + "\n  ".join(wrong))
    try:
        return family.config(**fields)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def convert(
    family: Family,
    stored: Mapping[str, lazy.LazyTensor],
    config: Any,
    *,
    dtype: DTypeLike,
    source: object,
) -> dict[str, Any]:
    """Converts the tensors of a checkpoint to parameters; CheckpointError lists all that do not fit."""
    parts = family.parts(config)
    expected = {name: shape for part in parts.values() for name, shape in part.tensors.items()}
    tied = family.tied(config)
    tensors = {name.removeprefix(family.prefix): tensor for name, tensor in stored.items()}
    checkpoint.check_tensors(source, tensors, expected, ignored={*family.ignored(config), *tied})
    for name, other in tied.items():
        if name in tensors and not np.array_equal(tensors[name].read(), tensors[other].read()):
            raise CheckpointError(f"{source} holds {name} apart from {other}; expected the same, as they are tied")
    # Waiting for each lets go of what was read before more is.
    flat = {name: jax.block_until_ready(_parameter(part, tensors, dtype)) for name, part in parts.items()}
    return tree.unflatten(flat)


def _parameter(part: Part, tensors: Mapping[str, lazy.LazyTensor], dtype: DTypeLike) -> jax.Array:
    """Makes a parameter on the host: on a GPU, compiling a program for each shape would take longer.

    JAX copies it, on a CPU too, so that it holds no memory of NumPy's.
    """
    joined = part.join(*(tensors[name].read() for name in part.tensors))
    (cast,) = tree.astype({"": joined}, dtype).values()
    return jax.device_put(cast, may_alias=False)
