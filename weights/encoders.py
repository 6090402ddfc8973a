"""Loads encoders of sentences of any family; their files say which it is."""

import os
from typing import Any

from jax.typing import DTypeLike

from weights import hub, loading


def load_encoder(path_or_name: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> dict[str, Any]:
    """Loads the weights of an encoder of sentences as parameters.

    Args:
      path_or_name: as in `weights.load_minilm`, of a model that docs/models.md lists.
      dtype: float16, bfloat16 or float32, of the matrices and so of the computation. None is the dtype in which
        `weights.save` stored them, and float32 for checkpoints of PyTorch.

    Returns:
      Nested dict of arrays on the default device, for `minilm.encode`, `modernbert.encode` or `qwen3.encode`,
      with the config of `load_encoder_config`. The layers after the transformer, such as pooling, are not read:
      `minilm.Encoder` reads them.

    Raises:
      FileNotFoundError: a file or the name was not found.
      CheckpointError: the model is of a family that embeds no sentences, or as for `weights.load_minilm`.
      ImportError: the checkpoint is a .bin or .pt file and torch is not installed.
      TypeError: `dtype` is none of the above.
    """
    path = hub.resolve(path_or_name)
    return loading.load(loading.find_encoder(path), path, dtype)


def load_encoder_config(path_or_name: str | os.PathLike[str]) -> Any:
    """Reads the sizes of the model that `load_encoder` loads; argument and errors as there."""
    path = hub.resolve(path_or_name)
    return loading.load_config(loading.find_encoder(path), path)
