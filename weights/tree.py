"""Parameter trees as flat dicts with dotted names, and the trees that the models expect."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models import gpt2, minilm, qwen3

Config = minilm.MiniLMConfig | gpt2.GPT2Config | qwen3.Qwen3Config
CONFIGS: dict[str, type[Config]] = {
    "minilm": minilm.MiniLMConfig,
    "gpt2": gpt2.GPT2Config,
    "qwen3": qwen3.Qwen3Config,
}


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
    return {name: leaf.astype(np.float32 if leaf.ndim == 1 else jnp.dtype(dtype)) for name, leaf in flat.items()}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `flatten`."""
    params: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = params
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return params


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the model of `config`, by dotted name."""
    match config:
        case minilm.MiniLMConfig():
            draw: Callable[..., Any] = minilm.init
        case gpt2.GPT2Config():
            draw = gpt2.init
        case qwen3.Qwen3Config():
            draw = qwen3.init
    params = jax.eval_shape(lambda: draw(jax.random.key(0), config))
    return {name: leaf.shape for name, leaf in flatten(params).items()}
