"""Qwen3 checkpoints of Hugging Face to parameters of `pallas_models.qwen3`."""

import dataclasses
import os
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import qwen3
from pallas_models.qwen3 import Qwen3Config, Qwen3EncoderConfig
from weights import loading
from weights.checkpoint import shown
from weights.families import Family, Part, gate_up, linear, register, same
from weights.tree import Placement


def load_qwen3(
    path_or_name: str | os.PathLike[str], *, dtype: DTypeLike = jnp.bfloat16, sharding: Placement = None
) -> dict[str, Any]:
    """Loads the weights of a dense Qwen3 model as parameters.

    Tensors are read and joined one parameter after another, so that no more than one is in memory beside the
    model.

    Args:
      path_or_name: a folder with config.json and model.safetensors, or with several such files and
        model.safetensors.index.json, such a file itself, a file or folder of `weights.save`, or a hub id such as
        `"Qwen/Qwen3-8B"`.
      dtype: float16, bfloat16 or float32, of the matrices and so of the computation; norm scales are float32.
      sharding: a `jax.sharding.Sharding` for all parameters, or a tree of them as `qwen3.shardings` gives it; the
        default device when None. Each device is sent its part alone: a model may be larger than any of them.

    Returns:
      Nested dict of arrays, as `qwen3.init` returns it and `qwen3.logits` takes it. Names
      may or may not start with `model.`.

    Raises:
      FileNotFoundError: a file or the name was not found, or a file that the index names.
      CheckpointError: a file is truncated or corrupt, the index and the files do not agree, the config is of
        another architecture, tensors are missing, unexpected or misshapen (all are listed), or a tied head is
        not the word embeddings.
      TypeError: `dtype` is none of the above.
      ValueError: `sharding` is a tree unlike the parameters.
    """
    return loading.load(_FAMILY, path_or_name, dtype, sharding)


def load_qwen3_config(path_or_name: str | os.PathLike[str]) -> Qwen3Config:
    """Reads the sizes of the model that `load_qwen3` loads; argument and errors as there."""
    return loading.load_config(_FAMILY, path_or_name)


def _adapt(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes {"rope_parameters": {"rope_type": "default", "rope_theta": ...}}, 4 the keys below.
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {shown(rope)}; expected an object")
    config = {"rope_theta": rope.get("rope_theta", 1e6), "rope_type": rope.get("rope_type", "default")} | config
    kinds = config.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types is {shown(kinds)}; expected a list")
    return config | {"layer_types": next((kind for kind in kinds if kind != "full_attention"), "full_attention")}


def _parts(config: Qwen3Config) -> dict[str, Part]:
    h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    parts = {
        "word.embedding": same("embed_tokens.weight", config.vocab_size, h),
        "norm.scale": same("norm.weight", h),
    }
    if not config.tie_embeddings:
        parts["head.kernel"] = linear({"lm_head.weight": (config.vocab_size, h)})
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        queries_keys_values = {"q": q, "k": kv, "v": kv}
        parts |= {
            f"{layer}.attention_norm.scale": same(f"{layer}.input_layernorm.weight", h),
            f"{layer}.attention.qkv.kernel": linear(
                {f"{attention}.{role}_proj.weight": (rows, h) for role, rows in queries_keys_values.items()}
            ),
            f"{layer}.attention.q_norm.scale": same(f"{attention}.q_norm.weight", d),
            f"{layer}.attention.k_norm.scale": same(f"{attention}.k_norm.weight", d),
            f"{layer}.attention.out.kernel": linear({f"{attention}.o_proj.weight": (h, q)}),
            f"{layer}.mlp_norm.scale": same(f"{layer}.post_attention_layernorm.weight", h),
            f"{layer}.mlp.gate_up.kernel": gate_up(
                {f"{mlp}.{role}_proj.weight": (f, h) for role in ("gate", "up")}
            ),
            f"{layer}.mlp.down.kernel": linear({f"{mlp}.down_proj.weight": (h, f)}),
        }
    return parts


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "epsilon": "rms_norm_eps",
}

_FAMILY = register(
    Family(
        name="qwen3",
        description="dense Qwen3 models, 0.6B to 32B",
        config=Qwen3Config,
        init=qwen3.init,
        model_types=("qwen3",),
        keys=_KEYS | {"tie_embeddings": "tie_word_embeddings"},
        defaults={"rope_theta": 1e6, "epsilon": 1e-6, "tie_embeddings": False},
        unbounded=("max_positions",),
        values={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "rope_scaling": (None,),
            "rope_type": ("default",),
            "layer_types": ("full_attention",),
        },
        adapt=_adapt,
        parts=_parts,
        prefix="model.",
        tied=lambda config: {"lm_head.weight": "embed_tokens.weight"} if config.tie_embeddings else {},
    )
)

# Encoders do not use the head of the language model, which their checkpoints may lack.
register(
    dataclasses.replace(
        _FAMILY,
        name="qwen3-embedding",
        description="Qwen3-Embedding, 0.6B to 8B",
        config=Qwen3EncoderConfig,
        keys=_KEYS,
        defaults={"rope_theta": 1e6, "epsilon": 1e-6},
        tied=lambda config: {},
        ignored=lambda config: ("lm_head.weight",),
        encode=qwen3.encode,
    )
)
