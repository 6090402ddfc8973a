"""BERT checkpoints of PyTorch (all-MiniLM-L6-v2 and its relatives) to parameters of `pallas_models.minilm`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models.minilm import MiniLMConfig
from weights import checkpoint, hub, store, tree
from weights.checkpoint import CheckpointError

_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
}
# What the forward pass computes, and so what a config must say; a key that is absent means the same.
_CONFIG_VALUES = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}

# Modules of the parameter tree, and the modules of a BERT checkpoint that they are made from, in order.
_EMBEDDINGS = {
    "word": ("word_embeddings",),
    "position": ("position_embeddings",),
    "token_type": ("token_type_embeddings",),
    "norm": ("LayerNorm",),
}
_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
# A buffer (0, 1, 2, ...), and a layer on the first token that mean pooling does not use.
_IGNORED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


def load_minilm(
    path_or_name: str | os.PathLike[str] = hub.DEFAULT, *, dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """Loads the weights of all-MiniLM-L6-v2, or of another BERT encoder, as parameters.

    Args:
      path_or_name: a folder with config.json and model.safetensors or pytorch_model.bin, such a tensor
        file itself, what `weights.save` wrote, or a name that `weights.resolve` knows.
      dtype: float16, bfloat16 or float32, that of the matrices and so of the computation; biases and norm
        scales stay float32.

    Returns:
      Nested dict of arrays on the default device, as `minilm.init` returns it and `minilm.embed` takes
      it. Names may or may not start with `bert.`; a pooler and `embeddings.position_ids` are ignored.

    Raises:
      FileNotFoundError: a file or the name was not found.
      CheckpointError: a file is truncated or corrupt, the config is of another architecture, or tensors
        are missing, unexpected or misshapen (all are listed).
      ImportError: the checkpoint is a .bin or .pt file and torch is not installed.
      TypeError: `dtype` is none of the above.
    """
    target = checkpoint.float_dtype(dtype)
    path = hub.resolve(path_or_name)
    if store.is_stored(path):
        store.load_config_of(MiniLMConfig, path)
        return store.load(path, dtype=target)
    config = _read_config(path)
    return jax.device_put(convert(checkpoint.read_tensors(path), config, dtype=target, source=path))


def load_minilm_config(path_or_name: str | os.PathLike[str] = hub.DEFAULT) -> MiniLMConfig:
    """Reads the sizes of the model that `load_minilm` loads; argument and errors as there."""
    path = hub.resolve(path_or_name)
    return store.load_config_of(MiniLMConfig, path) if store.is_stored(path) else _read_config(path)


def _read_config(path: Path) -> MiniLMConfig:
    path = (path if path.is_dir() else path.parent) / "config.json"
    config = checkpoint.read_json(path)
    if config.get("model_type") != "bert":
        raise CheckpointError(f"{path} describes a model of type {config.get('model_type')!r}; expected 'bert'")
    problems = [
        f"{key} is {config[key]!r}; expected {value!r}"
        for key, value in _CONFIG_VALUES.items()
        if config.get(key, value) != value
    ]
    sizes: dict[str, Any] = {field: config.get(key) for field, key in _CONFIG_KEYS.items()}
    problems += [
        f"{_CONFIG_KEYS[field]} is {size!r}; expected a positive integer"
        for field, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    if problems:
        raise CheckpointError(f"{path} describes no model that this library runs:\n  " + "\n  ".join(problems))
    try:
        return MiniLMConfig(**sizes, epsilon=float(config.get("layer_norm_eps", 1e-12)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def convert(
    tensors: Mapping[str, np.ndarray],
    config: MiniLMConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    source: object = "the checkpoint",
) -> dict[str, Any]:
    """Converts the tensors of a BERT checkpoint.

    Args:
      tensors: by their official names, with or without the prefix `bert.`; linear weights (out, in).
      config: the model's sizes.
      dtype: float16, bfloat16 or float32, of the matrices; biases and norm scales are float32.
      source: where the tensors come from, for error messages.

    Returns:
      Nested dict of NumPy arrays: kernels (in, out); queries, keys and values in one projection, (H, 3H).

    Raises:
      CheckpointError: lists every missing, unexpected or misshapen tensor.
    """
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    shapes = tree.shapes(config)
    names = {parameter: _checkpoint_names(parameter) for parameter in shapes}
    expected = {
        name: _checkpoint_shape(parameter, shapes[parameter], len(parts))
        for parameter, parts in names.items()
        for name in parts
    }
    checkpoint.check_tensors(source, tensors, expected, ignored=_IGNORED)
    # PyTorch keeps linear weights (out, in). Only kernels of linear layers are transposed, not tables.
    flat = {
        parameter: np.concatenate([tensors[n].T if _is_kernel(parameter) else tensors[n] for n in parts], axis=-1)
        for parameter, parts in names.items()
    }
    return tree.unflatten(tree.astype(flat, dtype))


def _is_kernel(parameter: str) -> bool:
    return parameter.endswith(".kernel")


def _checkpoint_names(parameter: str) -> list[str]:
    """Names in the checkpoint of what `parameter` is made from, e.g. of layers.0.attention.qkv.kernel."""
    module, leaf = parameter.rsplit(".", 1)
    leaf = "bias" if leaf == "bias" else "weight"
    if module.startswith("embeddings."):
        return [f"embeddings.{part}.{leaf}" for part in _EMBEDDINGS[module.removeprefix("embeddings.")]]
    _, index, module = module.split(".", 2)
    return [f"encoder.layer.{index}.{part}.{leaf}" for part in _LAYER[module]]


def _checkpoint_shape(parameter: str, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    *rows, columns = shape
    shape = (*rows, columns // parts)
    return shape[::-1] if _is_kernel(parameter) else shape
