"""How a kind of model is loaded, whichever it is: config.json, the checks, and one parameter after another."""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models.ops.gated_mlp import stack_gate_up
from weights import checkpoint, hub, lazy, store, tree
from weights.checkpoint import CheckpointError

Config = TypeVar("Config", bound=tree.Config)
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """The tensors of a checkpoint, names and shapes, that one parameter is made of, and how."""

    tensors: Mapping[str, Shape]
    join: Callable[..., jax.Array]


def same(name: str, *shape: int) -> Part:
    """A parameter that is a tensor of the checkpoint as it is."""
    return Part({name: shape}, _same)


def linear(tensors: Mapping[str, Shape]) -> Part:
    """A kernel (in, out) of the weights (out, in) of linear layers, side by side."""
    return Part(tensors, _beside)


def gate_up(tensors: Mapping[str, Shape]) -> Part:
    """The kernel of a gated product, of the weights of the gate and of what it gates."""
    return Part(tensors, _gate_up)


def _same(tensor: jax.Array) -> jax.Array:
    return tensor


def _beside(*weights: jax.Array) -> jax.Array:
    return jnp.concatenate([weight.T for weight in weights], axis=1)


def _gate_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    return stack_gate_up(gate.T, up.T)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _join(join: Callable[..., jax.Array], dtype: DTypeLike, *tensors: jax.Array) -> jax.Array:
    joined = join(*tensors)
    return joined.astype(jnp.float32 if joined.ndim == 1 else dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Generic[Config]):
    """What there is to know of a kind of model to load it.

    Attributes:
      config: the class of its config.
      model_type: what config.json calls it.
      sizes: the key in config.json of every field of the config that is a positive integer.
      others: the same of those that are not integers, each with the default where it is absent.
      values: what config.json has to say, as it is what the forward pass computes; a key that is absent means
        the first of them.
      adapt: makes of config.json one with all of these keys at its top.
      parts: what each parameter of a model of this config is made of.
      prefix: what the names of tensors may begin with.
      ignored: names that may be there and are not used.
      tied: a name that may be there and then has to hold what another does.
    """

    config: type[Config]
    model_type: str
    sizes: Mapping[str, str]
    others: Mapping[str, tuple[str, Any]]
    values: Mapping[str, tuple[Any, ...]]
    parts: Callable[[Config], dict[str, Part]]
    prefix: str
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    ignored: Callable[[Config], Collection[str]] = lambda config: ()
    tied: Callable[[Config], Mapping[str, str]] = lambda config: {}

    def load(self, path_or_name: str | os.PathLike[str], dtype: DTypeLike) -> dict[str, Any]:
        """Loads the parameters: a nested dict of arrays on the default device."""
        target = checkpoint.float_dtype(dtype)
        path = hub.resolve(path_or_name)
        if store.is_stored(path):
            store.load_config_of(self.config, path)
            return store.load(path, dtype=target)
        return self._convert(path, self._read_config(path), target)

    def load_config(self, path_or_name: str | os.PathLike[str]) -> Config:
        """Reads the config alone."""
        path = hub.resolve(path_or_name)
        return store.load_config_of(self.config, path) if store.is_stored(path) else self._read_config(path)

    def _read_config(self, path: Path) -> Config:
        path = (path if path.is_dir() else path.parent) / "config.json"
        given = checkpoint.read_json(path)
        if given.get("model_type") != self.model_type:
            raise CheckpointError(
                f"{path} describes a model of type {given.get('model_type')!r}; expected {self.model_type!r}"
            )
        given = self.adapt(given)
        fields: dict[str, Any] = {field: given.get(key) for field, key in self.sizes.items()}
        problems = [
            f"{key} is {given[key]!r}; expected {' or '.join(map(repr, allowed))}"
            for key, allowed in self.values.items()
            if given.get(key, allowed[0]) not in allowed
        ]
        problems += [
            f"{self.sizes[field]} is {size!r}; expected a positive integer"
            for field, size in fields.items()
            if type(size) is not int or size < 1
        ]
        for field, (key, default) in self.others.items():
            fields[field] = value = given.get(key, default)
            kinds = (bool,) if isinstance(default, bool) else (int, float)
            if type(value) not in kinds:
                problems.append(f"{key} is {value!r}; expected a {kinds[-1].__name__}")
        if problems:
            raise CheckpointError(f"{path} describes no model that this library runs:\n  " + "\n  ".join(problems))
        try:
            return self.config(**fields)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _convert(self, path: Path, config: Config, dtype: np.dtype) -> dict[str, Any]:
        parts = self.parts(config)
        expected = {name: shape for part in parts.values() for name, shape in part.tensors.items()}
        tied = self.tied(config)
        with lazy.open_tensors(path) as stored:
            tensors = {name.removeprefix(self.prefix): tensor for name, tensor in stored.items()}
            checkpoint.check_tensors(path, tensors, expected, ignored={*self.ignored(config), *tied})
            for name, other in tied.items():
                if name in tensors and not np.array_equal(tensors[name].read(), tensors[other].read()):
                    raise CheckpointError(
                        f"{path} holds {name} apart from {other}; expected the same, as they are tied"
                    )
            flat = {}
            for parameter, part in parts.items():
                # Waiting for each lets go of what was read before more is.
                read = [tensors[name].read() for name in part.tensors]
                flat[parameter] = jax.block_until_ready(_join(part.join, dtype, *read))
        return tree.unflatten(flat)
