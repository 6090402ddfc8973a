"""Turns PyTorch checkpoints into the parameters that `pallas_models` computes with.

Parameters are nested dicts of arrays, exactly as the `init` of a model returns them. Kernels are stored
(in, out) and queries, keys and values in one projection: the conversion happens here, once.
"""

from weights.checkpoint import CheckpointError
from weights.hub import resolve
from weights.minilm import load_minilm, load_minilm_config
from weights.store import load, load_config, save
from weights.trimul import load_trimul

__all__ = [
    "CheckpointError",
    "load",
    "load_config",
    "load_minilm",
    "load_minilm_config",
    "load_trimul",
    "resolve",
    "save",
]
