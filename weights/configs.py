"""Reads configs, from config.json and from the metadata of our own files. The class of a config is its schema."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pallas_models.ops.activations import Activation
from weights.checkpoint import CheckpointError, Described, read_json, shown
from weights.families import Family

# Our activations by the names of transformers.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
}

_FLOAT32 = np.finfo(np.float32)
_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: type(value) is int and 0 < value < 2**31, "a positive integer below 2**31"),
    float: (
        lambda value: type(value) in (int, float) and float(_FLOAT32.tiny) <= value <= float(_FLOAT32.max),
        f"a positive number from {_FLOAT32.tiny:.0e} to {_FLOAT32.max:.0e}",
    ),
    bool: (lambda value: type(value) is bool, "true or false"),
    Activation: (typing.get_args(Activation).__contains__, " or ".join(map(repr, typing.get_args(Activation)))),
}


def read(family: Family, path: Path) -> Any:
    """Reads the config of a model of `family` from a config.json.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: it describes a model of another type, or one that this library does not run; all that is
        wrong is listed.
    """
    given = read_json(path)
    if given.get("model_type") not in family.model_types:
        found, expected = shown(given.get("model_type")), " or ".join(map(repr, family.model_types))
        raise CheckpointError(f"{path} describes a model of type {found}; expected {expected}")
    try:
        given = family.adapt(given)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    wrong = [
        f"{key} is {shown(given[key])}; expected {' or '.join(map(repr, allowed))}"
        for key, allowed in family.values.items()
        if given.get(key, allowed[0]) not in allowed
    ]
    fields = {
        field: given.get(key, family.defaults.get(field))
        for field, key in family.keys.items()
        if key in given or field not in family.optional
    }
    return _build(family, fields, path, names=family.keys, spellings=family.spellings, wrong=wrong)


def describe(family: Family, config: Any) -> dict[str, Any]:
    """The content of a config.json for a config; undoes `read`."""

    def stated(field: str) -> Any:
        value = getattr(config, field)
        spelled = (theirs for theirs, ours in family.spellings.get(field, {}).items() if ours == value)
        return next(spelled, value)

    return family.describe({key: stated(field) for field, key in family.keys.items()})


def from_fields(family: Family, fields: object, source: object) -> Any:
    """The config with these fields; CheckpointError lists all that are wrong.

    Only fields that are optional in the family may be absent.
    """
    known = {field.name for field in dataclasses.fields(family.config)}
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"{source} has a config that is {shown(fields)}; expected an object")
    wrong = [f"{shown(name)} is no field of a {family.name} config" for name in fields if name not in known]
    return _build(family, fields, source, names={}, spellings={}, wrong=wrong)


def _build(
    family: Family,
    fields: Mapping[str, Any],
    source: object,
    *,
    names: Mapping[str, str],
    spellings: Mapping[str, Mapping[str, Any]],
    wrong: list[str],
) -> Any:
    values: dict[str, Any] = {}
    # A field without a key in config.json has one value in the family.
    fixed = {
        field.name: field.default for field in dataclasses.fields(family.config) if field.name not in family.keys
    }
    for name, kind in _kinds(family):
        if name in family.optional and name not in fields:
            continue
        value = fields.get(name, fixed.get(name))
        fits, expected = _KINDS[kind]
        if name in fixed:
            fits, expected = fixed[name].__eq__, repr(fixed[name])
        if name in spellings:
            fits, expected = tuple(spellings[name]).__contains__, " or ".join(map(repr, spellings[name]))
        if fits(value) is True:
            value = spellings[name][value] if name in spellings else value
            values[name] = float(value) if kind is float else value
        else:
            wrong.append(f"{names.get(name, name)} is {shown(value)}; expected {expected}")
    if wrong:
        raise CheckpointError(f"{source} describes no model that this library runs:\n  " + "\n  ".join(wrong))
    try:
        return family.config(**values)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _kinds(family: Family) -> list[tuple[str, Any]]:
    """The fields of the family's configs, and the type of each."""
    kinds = typing.get_type_hints(family.config)
    return [(field.name, kinds[field.name]) for field in dataclasses.fields(family.config)]


def check_sizes(family: Family, config: Any, tensors: Mapping[str, Described], source: object) -> None:
    """Raises CheckpointError where so large a model has more values or layers than there are tensors for.

    To be called before anything is made, or walked through, whose size a config states.
    """
    layers, values = len(tensors), sum(math.prod(tensor.shape) for tensor in tensors.values())
    wrong = [
        f"{name} is {getattr(config, name)}; expected at most {most:,}, the number of {of} that there are"
        for name, kind in _kinds(family)
        for most, of in [(layers, "tensors") if name == "num_layers" else (values, "values in the tensors")]
        if kind is int and name not in family.unbounded and getattr(config, name) > most
    ]
    if wrong:
        raise CheckpointError(f"{source} does not fit its config:\n  " + "\n  ".join(wrong))
