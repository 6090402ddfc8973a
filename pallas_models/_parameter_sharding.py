"""How the parameters of a decoder are spread over a mesh: by tensor parallelism, and fully sharded."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_models import training
from pallas_models._modules import Params

# By the end of a parameter's path, the axis that devices share in tensor parallelism: heads, columns or words.
_SPLIT = {
    "attention.qkv.kernel": 1,
    "attention.qkv.bias": 0,
    "attention.out.kernel": 0,
    "mlp.up.kernel": 1,
    "mlp.up.bias": 0,
    "mlp.gate_up.kernel": 2,
    "mlp.down.kernel": 0,
    "word.embedding": 0,
    "head.kernel": 1,
}


def shardings(
    init: Callable[..., Params],
    config: Any,
    mesh: Mesh,
    *,
    tensor: str | None,
    fsdp: str | None,
    stacked: bool,
) -> dict[str, Any]:
    """A sharding for each parameter that `init(key, config)` gives, in a tree like them: see `gpt2.shardings`."""
    for name, axis in (("tensor", tensor), ("fsdp", fsdp)):
        if axis is not None and axis not in mesh.shape:
            raise ValueError(f"{name}={axis!r} is no axis of the mesh; expected None or one of {mesh.axis_names}")

    def of_leaf(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = ".".join(str(entry.key) for entry in path)
        offset = 1 if stacked and name.startswith("layers.") else 0
        split = next((axis for end, axis in _SPLIT.items() if name.endswith(end)), None)
        spec: list[tuple[str, ...]] = [()] * leaf.ndim

        def spread(axis: int, over: str) -> None:
            wanted = (*spec[axis], over)
            if leaf.shape[axis] % math.prod(mesh.shape[a] for a in wanted) == 0:
                spec[axis] = wanted

        if tensor is not None and split is not None:
            spread(split + offset, tensor)
        if fsdp is not None and leaf.ndim - offset > 1:  # vectors are small
            # The axis of the inputs: XLA gathers the weights then. Where outputs are split it sends activations.
            spread(offset, fsdp)
        return NamedSharding(mesh, PartitionSpec(*(over or None for over in spec)))

    def build(key: jax.Array) -> Params:
        params = init(key, config)
        return training.stack_layers(params) if stacked else params

    return jax.tree.map_with_path(of_leaf, jax.eval_shape(build, jax.random.key(0)))


def group_heads(params: Params, given: int, wanted: int, heads: tuple[int, int]) -> Params:
    """Parameters whose QKV projections have `wanted` groups in place of `given`: see `gpt2.group_heads`.

    `heads` are the numbers of heads of queries, and of keys and values.
    """
    num_heads, num_kv_heads = heads
    total = num_heads + 2 * num_kv_heads
    ends = [num_heads // given, (num_heads + num_kv_heads) // given]

    def regrouped(x: jax.Array) -> jax.Array:
        *lead, width = x.shape
        parts = jnp.split(x.reshape(*lead, given, total // given, width // total), ends, axis=-2)
        parts = [part.reshape(*lead, wanted, -1, width // total) for part in parts]
        return jnp.concatenate(parts, axis=-2).reshape(x.shape)

    def of_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if not any(entry.key == "qkv" for entry in path):
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            return regrouped(leaf)
        return jax.device_put(regrouped(leaf), leaf.sharding)  # spread over the mesh as before

    return jax.tree.map_with_path(of_leaf, params)


def over_groups(function: Callable[[jax.Array], jax.Array], qkv: jax.Array, groups: int) -> jax.Array:
    """Calls `function` for each group of heads of the projections (B, S, groups * F); results are side by side.

    Groups are an axis of their own, which devices share as they share a batch.
    """
    if groups == 1:
        return function(qkv)
    by_group = qkv.reshape(*qkv.shape[:2], groups, -1)
    out = jax.vmap(function, in_axes=2, out_axes=2)(by_group)
    return out.reshape(*qkv.shape[:2], math.prod(out.shape[2:]))
