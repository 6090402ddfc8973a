"""Building blocks of the models.

First modules that only hold parameters, then steps that several models compute, then the conversion between
modules and pytrees of parameters.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops, training
from pallas_models._implementation import check_implementation
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.embedding import rows_of

Params = dict[str, Any]
"""Parameters: nested dicts, and lists of layers, of arrays."""
LayerInput = Array | tuple[jax.Array, jax.Array] | None  # such as a mask, or cos and sin of a rotation
Module = TypeVar("Module", bound=nnx.Module, covariant=True)


def random_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """A parameter drawn at random, or zeros where `rngs` is empty: they are traced in less time."""
    x = nnx.initializers.normal(0.02)(rngs.params(), shape, dtype) if rngs else jnp.zeros(shape, dtype)
    return nnx.Param(x)


class Projection(nnx.Module):
    """The kernel of the projection `x @ kernel`."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = random_param(rngs, (d_in, d_out), dtype)


class Linear(Projection):
    """Kernel and bias of the projection `x @ kernel + bias`."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(d_in, d_out, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((d_out,), jnp.float32))


class GateUp(nnx.Module):
    """The kernel (in, 2, out) of two projections of one input: the gate, and the values that it gates."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = random_param(rngs, (d_in, 2, d_out), dtype)


class GatedMLP(nnx.Module):
    """Parameters of a gated MLP: gate and up side by side, then down."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate_up = GateUp(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Projection(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)


class LayerNorm(nnx.Module):
    """Scale and bias of a layer norm."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))


class RMSNorm(nnx.Module):
    """The scale of an RMS norm."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))


class Embedding(nnx.Module):
    """A table of vectors, one a row."""

    def __init__(self, rows: int, features: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embedding = random_param(rngs, (rows, features), dtype)


def look_up(table: jax.Array, ids: Array) -> jax.Array:
    """The rows `ids` (B, S) of `table` (V, H); TypeError or ValueError where ids are not valid indices."""
    _checks.check_integer("ids", ids)
    _checks.check_rank("ids", ids, 2, "(B, S)")
    _checks.check_ids("ids", ids, table.shape[0], "rows of the vocabulary")
    return rows_of(table, ids)


def position_ids(segment_ids: Array) -> jax.Array:
    """The index of each token in its segment, of ids (B, S); 0 for padding, which has negative ids."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    first = jax.lax.cummax(jnp.where(segment_ids != before, index, 0), axis=1)
    return jnp.where(segment_ids < 0, 0, index - first)


def last_tokens(x: jax.Array, mask: Array | None) -> jax.Array:
    """The last token of each sequence in x (B, S, H), (B, H); without a mask the one at the last position."""
    if mask is None:
        return x[:, -1]
    last = x.shape[1] - 1 - jnp.argmax(mask[:, ::-1].astype(bool), axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


def next_token_logits(
    x: jax.Array, kernel: jax.Array, *, tied: bool, implementation: Implementation | None
) -> jax.Array:
    """The head of a language model in float32: logits (..., V) of x (..., H).

    The kernel is (H, V), or (V, H) where it is `tied` to the embeddings.
    """
    return ops.matmul(
        x, kernel.astype(x.dtype), transpose_w=tied, out_dtype=jnp.float32, implementation=implementation
    )


def next_token_loss(
    x: jax.Array,
    kernel: jax.Array,
    ids: Array,
    mask: Array | None,
    weights: Array | None,
    *,
    tied: bool,
    label_smoothing: float,
    reduction: Literal["mean", "sum"],
    implementation: Implementation | None,
) -> jax.Array:
    """The cross entropy of each token of ids (B, S) given the tokens before it.

    A position predicts the next one where both are tokens. The last position stays, with weight 0: a length that
    is a multiple of a tile remains one.

    Args:
      x: (B, S, H), the input of the head.
      kernel: of the head: (H, V), or (V, H) where it is `tied` to the embeddings.
      weights: (B, S), how much each token counts where it is predicted; 1 when None.
      label_smoothing, reduction: as in `ops.linear_cross_entropy`.
    """
    counts = jnp.ones(ids.shape, jnp.float32)
    if weights is not None:
        _checks.check_shape("weights", weights, ids.shape, "the shape of ids")
        counts = jnp.asarray(weights, jnp.float32)
    if mask is not None:
        is_token = mask.astype(bool)  # strict promotion has no comparison of a bool with 0
        both = is_token & jnp.roll(is_token, 1, axis=1)
        counts = jnp.where(both, counts, 0.0)
    return ops.linear_cross_entropy(
        x,
        kernel.astype(x.dtype),
        jnp.roll(ids, -1, axis=1),
        weights=jnp.roll(counts, -1, axis=1).at[:, -1].set(0.0),
        transpose_w=tied,
        label_smoothing=label_smoothing,
        reduction=reduction,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("graph", "options"))
def _call(
    graph: nnx.GraphDef[Any], state: nnx.State, *args: LayerInput, options: tuple[tuple[str, Hashable], ...]
) -> tuple[Any, ...]:
    out = nnx.merge(graph, state)(*args, **dict(options))
    return out if isinstance(out, tuple) else (out,)


def call_layers(
    layers: nnx.Module,
    x: jax.Array,
    *args: LayerInput,
    implementation: Implementation | None,
    remat: training.Remat = "none",
) -> jax.Array:
    """Calls the layers of a model one after another on `x`, in the dtype of their kernels.

    Args:
      layers, args, implementation, remat: as in `run_layers`.
      x: the input of the first layer.
    """
    x = x.astype(_kernel_dtype(layers))
    out: jax.Array = run_layers(layers, (x,), *args, implementation=implementation, remat=remat)[0]
    return out


def run_layers(
    layers: nnx.Module,
    carried: tuple[Any, ...],
    *args: LayerInput,
    implementation: Implementation | None,
    remat: training.Remat = "none",
    **options: Hashable,
) -> tuple[Any, ...]:
    """Calls layers one after another, each on what the one before it returned.

    Layers that are alike are traced and lowered once; stacked layers are also compiled once.

    Args:
      layers: a list of modules, or one module whose parameters `training.stack_layers` stacked.
      carried: the input of the first layer: what it takes first, and returns.
      *args: what each layer takes beside that.
      remat: as in `training.checkpointed`.
      **options: what each layer takes by name, beside `implementation`.
    """
    options["implementation"] = check_implementation(implementation) or None

    def step(graph: nnx.GraphDef[Any], *, scanned: bool) -> Callable[..., tuple[Any, ...]]:
        call = functools.partial(_call, graph, options=tuple(options.items()))
        return training.checkpointed(call, remat, scanned=scanned)

    if isinstance(layers, nnx.List):
        for layer in layers:
            graph, state = nnx.split(layer)
            carried = step(graph, scanned=False)(state, *carried, *args)
        return carried
    graph, states = nnx.split(layers)
    call = step(graph, scanned=True)
    return jax.lax.scan(lambda carried, state: (call(state, *carried, *args), None), carried, states)[0]


def _kernel_dtype(layers: nnx.Module) -> DTypeLike:
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(layers)))
    return next(leaf.dtype for path, leaf in leaves if path[-1].key == "kernel")


class Kind(Hashable, Protocol[Module]):
    """A class of modules that are made from a config."""

    def __call__(self, config: Any, *, dtype: DTypeLike = ..., rngs: nnx.Rngs) -> Module: ...


def init_params(kind: Kind[Any], config: Any, key: jax.Array, dtype: DTypeLike) -> Params:
    """The random parameters of a new module, as nested dicts of arrays."""
    return _with_keys(str, nnx.to_pure_dict(nnx.state(kind(config, dtype=dtype, rngs=nnx.Rngs(key)))))


def bind(kind: Kind[Module], config: Any, params: Params) -> Module:
    """The module with these parameters; ValueError listing every parameter that does not fit the config."""
    if isinstance(params, nnx.State):  # as nnx.split gives it
        params = nnx.to_pure_dict(params)
    graph, state = _abstract(kind, config, training.is_stacked(params))
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
def _abstract(kind: Kind[Any], config: Any, stacked: bool) -> tuple[nnx.GraphDef[Any], nnx.State]:
    def build() -> nnx.Module:
        module = kind(config, rngs=nnx.Rngs())
        if stacked:
            graphs, states = zip(*map(nnx.split, module.layers), strict=True)
            module.layers = nnx.merge(graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
        return module

    return nnx.split(nnx.eval_shape(build))


def _with_keys(kind: Callable[[str], Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """The nested dict with the numbers of its layers, which are keys, converted to `kind`.

    NNX numbers the modules of a list by integers, and jax.export takes no dict with such keys.
    """
    return {
        kind(key) if str(key).isdecimal() else key: _with_keys(kind, leaf) if isinstance(leaf, Mapping) else leaf
        for key, leaf in tree.items()
    }
