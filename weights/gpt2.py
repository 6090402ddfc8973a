"""GPT-2 checkpoints of Hugging Face, and single blocks in a flat buffer, to parameters of `pallas_models.gpt2`."""

import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models import gpt2
from pallas_models.gpt2 import GPT2Config
from weights import checkpoint, configs, loading, tree
from weights.checkpoint import CheckpointError
from weights.families import Family, Part, linear, register, same
from weights.tree import Placement


def load_gpt2(
    path_or_name: str | os.PathLike[str], *, dtype: DTypeLike | None = None, sharding: Placement = None
) -> dict[str, Any]:
    """Loads the weights of GPT-2, of any size, as parameters.

    Args:
      path_or_name: a folder with config.json and model.safetensors (or several such files and their index) or
        pytorch_model.bin, such a tensor file itself, a file or folder of `weights.save`, or a hub id such as
        `"openai-community/gpt2"`.
      dtype: float16, bfloat16 or float32, of the matrices and so of the computation; biases and norm
        scales stay float32. None is the dtype in which `weights.save` stored them, and float32 for checkpoints
        of PyTorch.
      sharding: a `jax.sharding.Sharding` for all parameters, or a tree of them as `gpt2.shardings` gives it; the
        default device when None. Each device is sent its part alone: a model may be larger than any of them.

    Returns:
      Nested dict of arrays, as `gpt2.init` returns it and `gpt2.logits` takes it. Names
      may or may not start with `transformer.`; the buffers `attn.bias` and `attn.masked_bias` are ignored.

    Raises:
      FileNotFoundError: a file or the name was not found.
      CheckpointError: a file is truncated or corrupt, the config is of another architecture, tensors are
        missing, unexpected or misshapen (all are listed), or a tied head is not the word embeddings.
      ImportError: the checkpoint is a .bin or .pt file and torch is not installed.
      TypeError: `dtype` is none of the above.
      ValueError: `sharding` is a tree unlike the parameters.
    """
    return loading.load(_FAMILY, path_or_name, dtype, sharding)


def load_gpt2_config(path_or_name: str | os.PathLike[str]) -> GPT2Config:
    """Reads the sizes of the model that `load_gpt2` loads; argument and errors as there."""
    return loading.load_config(_FAMILY, path_or_name)


def load_gpt2_block(
    source: str | os.PathLike[str] | np.ndarray, *, dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """Loads one block of GPT-2 small from a flat buffer, in the layout of `gpt2.unpack`.

    Args:
      source: the buffer, 7,087,872 floats: an array, a .npy file, or a file of nothing but float32.
      dtype: float16, bfloat16 or float32, of the matrices; biases and norm scales are float32.

    Returns:
      Nested dict of arrays on the default device, as `gpt2.block` takes it.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: the file is no .npy file in spite of its name, or the buffer is not of that size, not
        floating point, or beyond what `dtype` can hold.
      TypeError: `dtype` is none of the above.
    """
    target = checkpoint.float_dtype(dtype)
    place = source if isinstance(source, str | os.PathLike) else "the buffer"
    flat = _read_buffer(Path(source)) if isinstance(source, str | os.PathLike) else np.asarray(source)
    expected = {"weights": (gpt2.FLAT_SIZE,)}
    checkpoint.check_tensors(place, {"weights": flat}, expected, what="a block of GPT-2 small")
    checkpoint.check_range(place, {"weights": flat}, jnp.float32)
    params = gpt2.unpack(jnp.asarray(flat, jnp.float32))
    checkpoint.check_range(place, {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}, target)
    return jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf.astype(target), params)


def _read_buffer(path: Path) -> np.ndarray:
    """The array of a file, still in it: whatever size it claims, nothing is allocated."""
    checkpoint.check_content(path)
    try:
        flat = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, np.float32, "r")
    except Exception as error:  # NumPy's error depends on where the header is damaged
        raise checkpoint.unreadable(path, "NumPy", error) from error
    if not isinstance(flat, np.ndarray):  # a .npz archive under the name of an array
        raise CheckpointError(f"{path} is an archive; expected one array, as np.save writes it")
    return flat


def _adapt(config: dict[str, Any]) -> dict[str, Any]:
    if "n_ctx" in config:  # the key of the first versions
        config = {"n_positions": config["n_ctx"]} | config
    if config.get("n_inner") is None and isinstance(config.get("n_embd"), int):
        return config | {"n_inner": 4 * config["n_embd"]}
    return config


def _with_queries_times(part: Part, h: int, factor: float) -> Part:
    """A parameter of queries, keys and values, (..., 3 h), with queries multiplied by the scale of the scores."""
    if factor == 1.0:
        return part

    def times(factor: float, array: np.ndarray) -> np.ndarray:
        scaled = np.array(array, np.float32)
        scaled[..., :h] *= factor
        return scaled.astype(array.dtype)

    return Part(
        part.tensors,
        lambda tensor: times(factor, part.join(tensor)),
        lambda parameter, shapes: part.split(times(1.0 / factor, parameter), shapes),
    )


def _parts(config: GPT2Config) -> dict[str, Part]:
    h, f = config.hidden_size, config.intermediate_size
    unscaled = 1.0 if config.scale_attn_weights else math.sqrt(h // config.num_heads)

    def norm(parameter: str, name: str) -> dict[str, Part]:
        return {
            f"{parameter}.scale": same(f"{name}.weight", h),
            f"{parameter}.bias": same(f"{name}.bias", h),
        }

    def conv1d(parameter: str, name: str, d_in: int, d_out: int) -> dict[str, Part]:
        return {
            f"{parameter}.kernel": same(f"{name}.weight", d_in, d_out),  # (in, out), as we have it
            f"{parameter}.bias": same(f"{name}.bias", d_out),
        }

    parts = {
        "embeddings.word.embedding": same("wte.weight", config.vocab_size, h),
        "embeddings.position.embedding": same("wpe.weight", config.max_positions, h),
        **norm("norm", "ln_f"),
    }
    if not config.tie_embeddings:
        parts["head.kernel"] = linear({"lm_head.weight": (config.vocab_size, h)})
    for i in range(config.num_layers):
        parts |= norm(f"layers.{i}.attention_norm", f"h.{i}.ln_1")
        factor = unscaled / (i + 1 if config.scale_attn_by_inverse_layer_idx else 1)
        qkv = conv1d(f"layers.{i}.attention.qkv", f"h.{i}.attn.c_attn", h, 3 * h)
        parts |= {name: _with_queries_times(part, h, factor) for name, part in qkv.items()}
        parts |= conv1d(f"layers.{i}.attention.out", f"h.{i}.attn.c_proj", h, h)
        parts |= norm(f"layers.{i}.mlp_norm", f"h.{i}.ln_2")
        parts |= conv1d(f"layers.{i}.mlp.up", f"h.{i}.mlp.c_fc", h, f)
        parts |= conv1d(f"layers.{i}.mlp.down", f"h.{i}.mlp.c_proj", f, h)
    return parts


_FAMILY = register(
    Family(
        name="gpt2",
        description="GPT-2 of any size",
        config=GPT2Config,
        init=gpt2.init,
        model_types=("gpt2",),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_positions": "n_positions",
            "epsilon": "layer_norm_epsilon",
            "activation": "activation_function",
            "tie_embeddings": "tie_word_embeddings",
            "scale_attn_weights": "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
        },
        defaults={"epsilon": 1e-5},
        optional=("activation", "tie_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        spellings={"activation": configs.ACTIVATIONS},
        values={"add_cross_attention": (False,)},
        adapt=_adapt,
        parts=_parts,
        prefix="transformer.",
        # The causal mask, as old versions saved it.
        ignored=lambda config: {
            f"h.{i}.attn.{b}" for i in range(config.num_layers) for b in ("bias", "masked_bias")
        },
        tied=lambda config: {"lm_head.weight": "wte.weight"} if config.tie_embeddings else {},
    )
)
