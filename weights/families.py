"""The families of models: one record for each, which loading, storing, the command line and `Encoder` read."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from weights import tree
from weights.checkpoint import CheckpointError

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """How one parameter is made: the names and shapes of tensors of a checkpoint, joined and split by functions.

    `join(*tensors)` gives the parameter, and `split(parameter, shapes)` the tensors of these shapes.
    """

    tensors: Mapping[str, Shape]
    join: Callable[..., np.ndarray]
    split: Callable[[np.ndarray, Sequence[Shape]], Sequence[np.ndarray]]


def same(name: str, *shape: int) -> Part:
    """A parameter that is one tensor of the checkpoint, unchanged."""
    return Part({name: shape}, _same, _one)


def linear(tensors: Mapping[str, Shape]) -> Part:
    """A kernel (in, out) made of the weights (out, in) of linear layers, side by side."""
    return Part(tensors, _beside, _rows)


def joined(tensors: Mapping[str, Shape]) -> Part:
    """A vector made of vectors, one after another."""
    return Part(tensors, _after, _pieces)


def gate_up(tensors: Mapping[str, Shape]) -> Part:
    """The kernel of a gated product, made of the weights of the gate and of the up projection."""
    return Part(tensors, _gate_up, _halves)


def _same(tensor: np.ndarray) -> np.ndarray:
    return tensor


# Transposing is left to `jax.device_put`, which does it as fast as it copies: NumPy takes five times as long.
def _beside(*weights: np.ndarray) -> np.ndarray:
    return np.concatenate(weights).T


def _after(*vectors: np.ndarray) -> np.ndarray:
    return np.concatenate(vectors)


def _gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.stack([gate, up]).transpose(2, 0, 1)


def _one(parameter: np.ndarray, _: Sequence[Shape]) -> Sequence[np.ndarray]:
    return [parameter]


def _pieces(parameter: np.ndarray, shapes: Sequence[Shape]) -> Sequence[np.ndarray]:
    return np.split(parameter, np.cumsum([shape[0] for shape in shapes])[:-1])


def _rows(kernel: np.ndarray, shapes: Sequence[Shape]) -> Sequence[np.ndarray]:
    return _pieces(kernel.T, shapes)


def _halves(kernel: np.ndarray, _: Sequence[Shape]) -> Sequence[np.ndarray]:
    return list(kernel.transpose(1, 2, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that loading, storing and running a family of models needs.

    Attributes:
      name: of the family, on the command line and in stored files.
      description: what belongs to it.
      config: the class of its configs.
      init: makes random parameters from a key and a config.
      model_types: its names in config.json; export writes the first.
      keys: the key of config.json for each field of the config.
      defaults: the values of fields whose key may be absent.
      optional: the fields that config.json and files of `weights.save` may lack; they have the default of the
        class then.
      spellings: for fields whose values have other names in config.json, our value by each name; export writes the
        first.
      values: the values of other keys in config.json that the forward pass implements; an absent key means the
        first of them.
      adapt: brings all of these keys to the top level of config.json; ValueError where their values are of a wrong
        kind.
      describe: undoes `adapt`, for export.
      unbounded: the integers among the fields that the shapes of the tensors do not depend on.
      parts: for a config, how each parameter is made, by its dotted name.
      prefix: with which the names of tensors may begin; it is dropped.
      ignored: names of tensors that are allowed and not used.
      tied: names of tensors that are allowed where they equal another tensor, with the name of the other.
      encode: computes the hidden states that `Encoder` pools, called as `bert.encode` is; None for a family
        that embeds no sentences.
    """

    name: str
    description: str
    config: type[Any]
    init: Callable[..., Any]
    model_types: tuple[str, ...]
    keys: Mapping[str, str]
    values: Mapping[str, tuple[Any, ...]]
    parts: Callable[[Any], dict[str, Part]]
    prefix: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optional: Collection[str] = ()
    spellings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    unbounded: Collection[str] = ()
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    describe: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    ignored: Callable[[Any], Collection[str]] = lambda config: ()
    tied: Callable[[Any], Mapping[str, str]] = lambda config: {}
    encode: Callable[..., jax.Array] | None = None


FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Adds a family to `FAMILIES`; returns it. Importing `weights` registers all that this library has."""
    FAMILIES[family.name] = family
    return family


def named(name: object, source: object) -> Family:
    """The family of that name; CheckpointError about `source` if there is none."""
    if name not in FAMILIES:
        raise CheckpointError(f"{source} holds a model {name!r}; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[str(name)]


def of(config: Any) -> Family:
    """The family of a config; TypeError if it is of none."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    kinds = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise TypeError(f"config is a {type(config).__name__}; expected one of {kinds}")


@functools.cache
def shapes(config: Any) -> Mapping[str, Shape]:
    """Returns the shape of every parameter of the model of `config`, by dotted name."""
    params = jax.eval_shape(lambda: of(config).init(jax.random.key(0), config))
    return {name: leaf.shape for name, leaf in tree.flatten(params).items()}
