"""Training any model: stacked layers, mixed precision, and how much a layer keeps for the backward pass.

A step is a function of float32 parameters that casts them, computes a loss and is differentiated:

    def loss(params, ids):
        params = training.cast(params, jnp.bfloat16)
        return gpt2.loss(params, ids, config=config, remat="block")

    value, gradients = jax.value_and_grad(loss)(params, ids)
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

P = ParamSpec("P")
T = TypeVar("T")
Params = dict[str, Any]
Policy = Callable[..., bool]
Remat = Literal["none", "block"] | Policy


def stack_layers(params: Mapping[str, Any]) -> Params:
    """Stacks the layers of a model: every array in `["layers"]` gets a leading axis, an entry for each layer.

    A model with stacked layers runs them in `jax.lax.scan`: one layer is compiled, however many there are. Values
    and gradients are the same.

    Args:
      params: nested dict of arrays with the layers as `["layers"]["0"]`, `["layers"]["1"]` and so on.

    Returns:
      The parameters with `["layers"]` like the parameters of one layer. The other arrays are not copied.

    Raises:
      ValueError: there are no layers to stack, or their numbers have gaps.
    """
    layers = params.get("layers")
    found = sorted(layers) if isinstance(layers, Mapping) else layers
    numbers = [str(number) for number in range(len(layers))] if isinstance(layers, Mapping) else []
    if not numbers or found != sorted(numbers):
        raise ValueError(f'params["layers"] has {found}; expected layers named "0", "1" and so on')
    ordered = (params["layers"][number] for number in numbers)
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)}


def unstack_layers(params: Mapping[str, Any]) -> Params:
    """Undoes `stack_layers`; `weights.save` takes layers one by one.

    Args:
      params: what `stack_layers` returned, or gradients in that tree.

    Returns:
      What `stack_layers` took: parameters with layers by their numbers.

    Raises:
      ValueError: the layers are not stacked.
    """
    if not is_stacked(params):
        raise ValueError('params["layers"] is not stacked; expected what stack_layers returns')
    number = len(jax.tree.leaves(params["layers"])[0])
    layers = {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(number)}
    return {**params, "layers": layers}


def is_stacked(params: Mapping[Any, Any]) -> bool:
    """Whether `stack_layers` stacked the layers of the parameters.

    Args:
      params: nested dict of arrays of a model, or a part of it.
    """
    layers = params.get("layers")
    return isinstance(layers, Mapping) and not all(str(name).isdecimal() for name in layers)


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Casts the kernels of a model; a model computes in their dtype.

    Embeddings, biases and scales keep their dtype: gradients of embeddings are sums over many tokens, which
    float32 holds and bfloat16 does not, and biases and scales are too few to matter. Inside of a function that
    is differentiated, the gradients have the dtype that the parameters had before the cast. A model's gradient
    keeps the kernels in `dtype`, beside the parameters.

    Args:
      params: nested dict of arrays of any model.
      dtype: float16, bfloat16 or float32.

    Returns:
      The parameters, kernels in `dtype` and all else as it was.
    """
    return jax.tree.map_with_path(
        lambda path, leaf: leaf.astype(dtype) if path[-1].key == "kernel" else leaf, params
    )


def checkpointed(function: Callable[P, T], remat: Remat, *, scanned: bool) -> Callable[P, T]:
    """The layer, made to keep for its derivatives only the values that `remat` asks for.

    Args:
      function: the layer.
      remat: "none" keeps all that derivatives need; "block" keeps the input of the layer and computes the rest
        again; a policy of `jax.checkpoint_policies` chooses among the values that the model names.
      scanned: whether `jax.lax.scan` calls the layer: `prevent_cse` is not needed then.

    Raises:
      ValueError: `remat` is none of these.
    """
    if remat == "none":
        return function
    if remat != "block" and not callable(remat):
        raise ValueError(f"{remat=} is unknown; expected 'none', 'block' or a policy of jax.checkpoint_policies")
    return jax.checkpoint(function, policy=None if remat == "block" else remat, prevent_cse=not scanned)
