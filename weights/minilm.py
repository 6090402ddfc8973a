"""BERT checkpoints of PyTorch (all-MiniLM-L6-v2 and its relatives) to parameters of `pallas_models.bert`."""

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models.bert import MiniLMConfig, encode, init
from weights import bert, hub, lazy, loading
from weights.families import Family, register
from weights.tree import Placement


def load_minilm(
    path_or_name: str | os.PathLike[str] = hub.DEFAULT,
    *,
    dtype: DTypeLike | None = None,
    sharding: Placement = None,
) -> dict[str, Any]:
    """Loads the weights of all-MiniLM-L6-v2, or of another BERT encoder, as parameters.

    Args:
      path_or_name: a folder with config.json and model.safetensors (or several such files and their index) or
        pytorch_model.bin, such a tensor file itself, a file or folder of `weights.save`, or a name that
        `weights.resolve` knows.
      dtype: float16, bfloat16 or float32, of the matrices and so of the computation; biases and norm
        scales stay float32. None is the dtype in which `weights.save` stored them, and float32 for checkpoints
        of PyTorch.
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


_FAMILY = register(
    Family(
        name="minilm",
        description="BERT sentence encoders such as all-MiniLM-L6-v2",
        config=MiniLMConfig,
        init=init,
        model_types=("bert",),
        keys=bert.KEYS | {"num_token_types": "type_vocab_size"},
        defaults={"epsilon": 1e-12},
        optional=bert.OPTIONAL,
        spellings=bert.SPELLINGS,
        values=bert.VALUES,
        parts=bert.parts,
        prefix="bert.",
        ignored=lambda config: bert.UNUSED,
        encode=encode,
    )
)
