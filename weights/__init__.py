"""Turns PyTorch checkpoints into the parameters that `pallas_models` computes with.

Parameters are nested dicts of arrays, exactly as the `init` of a model returns them. Kernels are stored
(in, out) and queries, keys and values in one projection: the conversion happens here, once.
"""

from weights import bert, modernbert  # noqa: F401 (register families)
from weights.checkpoint import CheckpointError
from weights.encoders import load_encoder, load_encoder_config
from weights.exporting import export
from weights.gpt2 import load_gpt2, load_gpt2_block, load_gpt2_config
from weights.hub import resolve
from weights.minilm import load_minilm, load_minilm_config
from weights.pairformer import load_pairformer
from weights.qwen3 import load_qwen3, load_qwen3_config
from weights.store import load, load_config, save
from weights.trimul import load_trimul

__all__ = [
    "CheckpointError",
    "export",
    "load",
    "load_config",
    "load_encoder",
    "load_encoder_config",
    "load_gpt2",
    "load_gpt2_block",
    "load_gpt2_config",
    "load_minilm",
    "load_minilm_config",
    "load_pairformer",
    "load_qwen3",
    "load_qwen3_config",
    "load_trimul",
    "resolve",
    "save",
]
