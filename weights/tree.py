"""Parameter trees as flat dicts with dotted names."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# Where parameters go: one sharding for all, a tree of them like the parameters, or the default device.
Placement = jax.sharding.Sharding | Mapping[str, Any] | None


def flatten(params: Mapping[Any, Any]) -> dict[str, Any]:
    """Flattens nested dicts: `{"layers": {"0": {"bias": b}}}` to `{"layers.0.bias": b}`."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": leaf for name, leaf in flatten(value).items()}
        else:
            flat[str(key)] = value
    return flat


def astype(flat: Mapping[str, np.ndarray], dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Casts matrices to `dtype` and vectors to float32.

    Biases and norm scales are a thousandth of the parameters, and in bfloat16 they would cause half of
    the error of the embeddings.
    """
    target = jnp.dtype(dtype)
    return {name: leaf.astype(np.float32 if leaf.ndim == 1 else target, copy=False) for name, leaf in flat.items()}


def shardings(given: Placement, names: Iterable[str]) -> dict[str, jax.sharding.Sharding | None]:
    """The sharding of each name, from one for all or a tree of them; ValueError where the tree does not fit."""
    names = set(names)
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    flat = flatten(given)
    if flat.keys() != names:
        missing, extra = sorted(names - flat.keys()), sorted(flat.keys() - names)
        raise ValueError(f"sharding does not fit the parameters: it lacks {missing} and has {extra} besides")
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `flatten`."""
    params: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return params
