"""The families of models: one record for each, which loading, storing, the command line and `Encoder` read."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.ops.gated_mlp import stack_gate_up
from weights import tree
from weights.checkpoint import CheckpointError

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


def joined(tensors: Mapping[str, Shape]) -> Part:
    """A vector of vectors, one after another."""
    return Part(tensors, _after)


def gate_up(tensors: Mapping[str, Shape]) -> Part:
    """The kernel of a gated product, of the weights of the gate and of what it gates."""
    return Part(tensors, _gate_up)


def _same(tensor: jax.Array) -> jax.Array:
    return tensor


def _beside(*weights: jax.Array) -> jax.Array:
    return jnp.concatenate([weight.T for weight in weights], axis=1)


def _after(*vectors: jax.Array) -> jax.Array:
    return jnp.concatenate(vectors)


def _gate_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    return stack_gate_up(gate.T, up.T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What there is to know of a family of models.

    Attributes:
      name: of the family, on the command line and in stored files.
      description: what belongs to it.
      config: the class of its configs.
      init: draws random parameters of a key and a config.
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
      encode: computes the hidden states that `Encoder` pools, called as `minilm.encode` is; None for a family
        that embeds no sentences.
    """

    name: str
    description: str
    config: type[Any]
    init: Callable[..., Any]
    model_type: str
    sizes: Mapping[str, str]
    others: Mapping[str, tuple[str, Any]]
    values: Mapping[str, tuple[Any, ...]]
    parts: Callable[[Any], dict[str, Part]]
    prefix: str
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
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
        if isinstance(config, family.config):
            return family
    kinds = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise TypeError(f"config is a {type(config).__name__}; expected one of {kinds}")


@functools.cache
def shapes(config: Any) -> Mapping[str, Shape]:
    """Returns the shape of every parameter of the model of `config`, by dotted name."""
    params = jax.eval_shape(lambda: of(config).init(jax.random.key(0), config))
    return {name: leaf.shape for name, leaf in tree.flatten(params).items()}
