"""Checkpoints of GPT-2 and Qwen3 with official names, made from our parameters: the inverse of `weights`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from pallas_models.gpt2 import GPT2Config
from pallas_models.qwen3 import Qwen3Config
from weights import tree

Tensors = dict[str, np.ndarray]


def gpt2_json(config: GPT2Config) -> dict[str, Any]:
    """config.json of a GPT-2 model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.epsilon,
    }


_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_TOP = {"embeddings.word": "wte", "embeddings.position": "wpe", "norm": "ln_f"}


def gpt2_tensors(params: Mapping[str, Any]) -> Tensors:
    """Parameters of a GPT-2 model, or of a block, under their official names without `transformer.`."""
    tensors = {}
    for name, leaf in tree.flatten(jax.tree.map(np.asarray, params)).items():
        module, kind = name.rsplit(".", 1)
        prefix = ""
        if module.startswith("layers."):
            _, index, module = module.split(".", 2)
            prefix = f"h.{index}."
        official = (_GPT2_BLOCK | _GPT2_TOP)[module]
        tensors[f"{prefix}{official}.{'bias' if kind == 'bias' else 'weight'}"] = leaf
    return tensors


def qwen3_json(config: Qwen3Config) -> dict[str, Any]:
    """config.json of a Qwen3 model, as transformers 4 writes it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_scaling": None,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _qwen3_layer(params: Mapping[str, Any], prefix: str, config: Qwen3Config) -> Tensors:
    attention, mlp = params["attention"], params["mlp"]
    split = np.cumsum([config.num_heads, config.num_kv_heads]) * config.head_dim
    tensors = {
        "input_layernorm": params["attention_norm"]["scale"],
        "self_attn.q_norm": attention["q_norm"]["scale"],
        "self_attn.k_norm": attention["k_norm"]["scale"],
        "self_attn.o_proj": attention["out"]["kernel"].T,
        "post_attention_layernorm": params["mlp_norm"]["scale"],
        "mlp.gate_proj": mlp["gate_up"]["kernel"][:, 0].T,
        "mlp.up_proj": mlp["gate_up"]["kernel"][:, 1].T,
        "mlp.down_proj": mlp["down"]["kernel"].T,
    }
    for part, weight in zip("qkv", np.split(attention["qkv"]["kernel"].T, split), strict=True):
        tensors[f"self_attn.{part}_proj"] = weight
    return {f"{prefix}{name}.weight": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def qwen3_tensors(params: Mapping[str, Any], config: Qwen3Config) -> Tensors:
    """Parameters of a Qwen3 model, or of a layer, under their official names."""
    params = jax.tree.map(np.asarray, params)
    if "layers" not in params:
        return _qwen3_layer(params, "", config)
    tensors = {
        "model.embed_tokens.weight": params["word"]["embedding"],
        "model.norm.weight": params["norm"]["scale"],
    }
    for index, layer in params["layers"].items():
        tensors |= _qwen3_layer(layer, f"model.layers.{index}.", config)
    if "head" in params:
        tensors["lm_head.weight"] = np.ascontiguousarray(params["head"]["kernel"].T)
    return tensors


def write(folder: Path, tensors: Tensors, config: Mapping[str, Any], *, shards: int = 0) -> Path:
    """Writes a checkpoint folder, in one file or in `shards` files with an index; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, places = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]  # q, k and v of a layer lie in different files
        save_file({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
