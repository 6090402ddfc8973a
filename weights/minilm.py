"""BERT checkpoints of PyTorch (all-MiniLM-L6-v2 and its relatives) to parameters of `pallas_models.minilm`."""

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models import minilm
from pallas_models.minilm import MiniLMConfig
from weights import hub, lazy, loading
from weights.families import Family, Part, joined, linear, register, same


def load_minilm(
    path_or_name: str | os.PathLike[str] = hub.DEFAULT, *, dtype: DTypeLike = jnp.float32, sharding: Any = None
) -> dict[str, Any]:
    """Loads the weights of all-MiniLM-L6-v2, or of another BERT encoder, as parameters.

    Args:
      path_or_name: a folder with config.json and model.safetensors (or several such files and their index) or
        pytorch_model.bin, such a tensor file itself, what `weights.save` wrote, or a name that
        `weights.resolve` knows.
      dtype: float16, bfloat16 or float32, that of the matrices and so of the computation; biases and norm
        scales stay float32.
      sharding: a `jax.sharding.Sharding` for all parameters, or a tree of them; the default device when None.

    Returns:
      Nested dict of arrays, as `minilm.init` returns it and `minilm.embed` takes
      it. Names may or may not start with `bert.`; a pooler and `embeddings.position_ids` are ignored.

    Raises:
      FileNotFoundError: a file or the name was not found.
      CheckpointError: a file is truncated or corrupt, the config is of another architecture, or tensors
        are missing, unexpected or misshapen (all are listed).
      ImportError: the checkpoint is a .bin or .pt file and torch is not installed.
      TypeError: `dtype` is none of the above.
      ValueError: `sharding` is a tree unlike the parameters.
    """
    return loading.load(_FAMILY, path_or_name, dtype, sharding)


def load_minilm_config(path_or_name: str | os.PathLike[str] = hub.DEFAULT) -> MiniLMConfig:
    """Reads the sizes of the model that `load_minilm` loads; argument and errors as there."""
    return loading.load_config(_FAMILY, path_or_name)


def convert(
    tensors: Mapping[str, np.ndarray],
    config: MiniLMConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    source: object = "the checkpoint",
) -> dict[str, Any]:
    """Converts the tensors of a BERT checkpoint that are in memory; the rest as in `load_minilm`.

    Args:
      tensors: by their official names, with or without the prefix `bert.`; linear weights (out, in).
      config: the model's sizes.
      dtype: float16, bfloat16 or float32, of the matrices.
      source: where the tensors come from, for error messages.
    """
    return loading.convert(_FAMILY, lazy.in_memory(tensors), config, dtype=dtype, source=source)


def _parts(config: MiniLMConfig) -> dict[str, Part]:
    h, f = config.hidden_size, config.intermediate_size

    def norm(parameter: str, name: str) -> dict[str, Part]:
        return {f"{parameter}.scale": same(f"{name}.weight", h), f"{parameter}.bias": same(f"{name}.bias", h)}

    def dense(parameter: str, d_in: int, d_out: int, *names: str) -> dict[str, Part]:
        return {
            f"{parameter}.kernel": linear({f"{name}.weight": (d_out, d_in) for name in names}),
            f"{parameter}.bias": joined({f"{name}.bias": (d_out,) for name in names}),
        }

    rows = {"word": config.vocab_size, "position": config.max_positions, "token_type": config.num_token_types}
    parts = {
        f"embeddings.{table}.embedding": same(f"embeddings.{table}_embeddings.weight", size, h)
        for table, size in rows.items()
    }
    parts |= norm("embeddings.norm", "embeddings.LayerNorm")
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        queries_keys_values = [f"{theirs}.attention.self.{role}" for role in ("query", "key", "value")]
        parts |= dense(f"{ours}.attention.qkv", h, h, *queries_keys_values)
        parts |= dense(f"{ours}.attention.out", h, h, f"{theirs}.attention.output.dense")
        parts |= norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        parts |= dense(f"{ours}.mlp.up", h, f, f"{theirs}.intermediate.dense")
        parts |= dense(f"{ours}.mlp.down", f, h, f"{theirs}.output.dense")
        parts |= norm(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
    return parts


_FAMILY = register(
    Family(
        name="minilm",
        description="BERT sentence encoders such as all-MiniLM-L6-v2",
        config=MiniLMConfig,
        init=minilm.init,
        model_type="bert",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "intermediate_size": "intermediate_size",
            "max_positions": "max_position_embeddings",
            "num_token_types": "type_vocab_size",
            "epsilon": "layer_norm_eps",
        },
        defaults={"epsilon": 1e-12},
        values={
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        parts=_parts,
        prefix="bert.",
        # A buffer (0, 1, 2, ...), and a layer on the first token that mean pooling does not use.
        ignored=lambda config: ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
        encode=minilm.encode,
    )
)
