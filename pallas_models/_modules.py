"""Building blocks of the models: modules that only hold parameters, and conversion between modules and pytrees."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models.ops import _checks
from pallas_models.ops._dispatch import check_implementation
from pallas_models.ops.embedding import rows_of

Params = dict[str, Any]
Module = TypeVar("Module", bound=nnx.Module, covariant=True)


class Projection(nnx.Module):
    """The parameter of `x @ kernel`."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (d_in, d_out), dtype))


class Linear(Projection):
    """Parameters of `x @ kernel + bias`."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(d_in, d_out, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((d_out,), jnp.float32))


class LayerNorm(nnx.Module):
    """Parameters of a layer norm."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))


class RMSNorm(nnx.Module):
    """The parameter of an RMS norm."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))


class Embedding(nnx.Module):
    """A table of vectors."""

    def __init__(self, rows: int, features: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (rows, features), dtype))


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows `ids` (B, S) of `table` (V, H); TypeError or ValueError where ids are not valid indices."""
    _checks.check_integer("ids", ids)
    _checks.check_rank("ids", ids, 2, "(B, S)")
    _checks.check_ids("ids", ids, table.shape[0], "rows of the vocabulary")
    return rows_of(table, ids)


def last_tokens(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The last position of each sequence in x (B, S, H), or the last whose mask is not 0: (B, H)."""
    if mask is None:
        return x[:, -1]
    last = x.shape[1] - 1 - jnp.argmax(mask[:, ::-1] != 0, axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("graph", "implementation"))
def _call(graph: Any, state: Any, *args: Any, implementation: Any) -> Any:
    return nnx.merge(graph, state)(*args, implementation=implementation)


def call_layer(module: nnx.Module, *args: Any, implementation: Any) -> Any:
    """Calls a layer of a stack; layers that are alike are traced and lowered once."""
    graph, state = nnx.split(module)
    return _call(graph, state, *args, implementation=check_implementation(implementation) or None)


class Kind(Hashable, Protocol[Module]):
    """A class of modules whose constructor takes a config."""

    def __call__(self, config: Any, *, dtype: DTypeLike = ..., rngs: nnx.Rngs) -> Module: ...


def init_params(kind: Kind[Any], config: Any, key: jax.Array, dtype: DTypeLike) -> Params:
    """The random parameters of a new module, as nested dicts of arrays."""
    return _with_keys(str, nnx.to_pure_dict(nnx.state(kind(config, dtype=dtype, rngs=nnx.Rngs(key)))))


def bind(kind: Kind[Module], config: Any, params: Params) -> Module:
    """The module with these parameters; ValueError listing every parameter that does not fit the config."""
    graph, state = _abstract(kind, config)
    params = _with_keys(int, params)
    expected, given = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (nnx.to_pure_dict(state), params)
    )
    wrong = [
        f"{path}: expected {expected.get(path, 'nothing')}, got {given.get(path, 'nothing')}"
        for path in sorted(expected.keys() | given.keys())
        if expected.get(path) != given.get(path)
    ]
    if wrong:
        raise ValueError("params do not fit the config:\n  " + "\n  ".join(wrong))
    return nnx.merge(graph, nnx.State(params))


@functools.cache
def _abstract(kind: Kind[Any], config: Any) -> tuple[nnx.GraphDef[Any], nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))


def _with_keys(kind: Callable[[str], Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """The nested dict with its numeric keys, those of the layers, converted to `kind`.

    NNX numbers the modules of a list by integers, and jax.export takes no dict with such keys.
    """
    return {
        kind(key) if str(key).isdecimal() else key: _with_keys(kind, leaf) if isinstance(leaf, Mapping) else leaf
        for key, leaf in tree.items()
    }
