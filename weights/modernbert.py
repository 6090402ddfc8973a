"""ModernBERT checkpoints of Hugging Face to parameters of `pallas_models.modernbert`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_models import modernbert
from pallas_models.modernbert import ModernBertConfig
from weights import configs
from weights.checkpoint import shown
from weights.families import Family, Part, Shape, linear, register, same

_KINDS = ("full_attention", "sliding_attention")


def _adapt(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes layer_types and rope_parameters, 4 global_attn_every_n_layers and two thetas.
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not all(isinstance(rope.get(kind) or {}, dict) for kind in _KINDS):
        raise ValueError(f"rope_parameters is {shown(rope)}; expected an object for each kind of layer")
    thetas = {}
    for key, kind in zip(("global_rope_theta", "local_rope_theta"), _KINDS, strict=True):
        stated = rope.get(kind) or {}
        if stated.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters of {kind} are {shown(stated)}; expected the default type")
        if "rope_theta" in stated:
            thetas[key] = stated["rope_theta"]
    config = thetas | config
    kinds = config.get("layer_types")
    if kinds is None:
        return config
    if not isinstance(kinds, list) or not kinds:
        raise ValueError(f"layer_types is {shown(kinds)}; expected a list")
    every = next((i for i, kind in enumerate(kinds) if i and kind == _KINDS[0]), len(kinds))
    if kinds != _layer_types(len(kinds), every):
        raise ValueError(f"layer_types is {shown(kinds)}; expected full attention in the first of every n layers")
    return config | {"global_attn_every_n_layers": every}


def _layer_types(layers: int, every: int) -> list[str]:
    return [_KINDS[bool(i % every)] for i in range(layers)]


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    """Both spellings of config.json."""
    every, thetas = config["global_attn_every_n_layers"], (config["global_rope_theta"], config["local_rope_theta"])
    return config | {
        "pad_token_id": None,  # the default of transformers is right for one vocabulary only
        "layer_types": _layer_types(config["num_hidden_layers"], every),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(_KINDS, thetas, strict=True)
        },
    }


def _gate_up(name: str, d_out: int, d_in: int) -> Part:
    """The kernel (in, 2, out) of a gated product, from one weight of gate and up projection."""

    def join(weight: np.ndarray) -> np.ndarray:
        return weight.reshape(2, d_out, d_in).transpose(2, 0, 1)

    def split(kernel: np.ndarray, _: Sequence[Shape]) -> Sequence[np.ndarray]:
        return [kernel.transpose(1, 2, 0).reshape(2 * d_out, d_in)]

    return Part({name: (2 * d_out, d_in)}, join, split)


def _parts(config: ModernBertConfig) -> dict[str, Part]:
    h, f = config.hidden_size, config.intermediate_size
    parts = {
        "word.embedding": same("embeddings.tok_embeddings.weight", config.vocab_size, h),
        "word_norm.scale": same("embeddings.norm.weight", h),
        "norm.scale": same("final_norm.weight", h),
    }
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        if i:
            parts[f"{layer}.attention_norm.scale"] = same(f"{layer}.attn_norm.weight", h)
        parts |= {
            f"{layer}.attention.qkv.kernel": linear({f"{layer}.attn.Wqkv.weight": (3 * h, h)}),
            f"{layer}.attention.out.kernel": linear({f"{layer}.attn.Wo.weight": (h, h)}),
            f"{layer}.mlp_norm.scale": same(f"{layer}.mlp_norm.weight", h),
            f"{layer}.mlp.gate_up.kernel": _gate_up(f"{layer}.mlp.Wi.weight", f, h),
            f"{layer}.mlp.down.kernel": linear({f"{layer}.mlp.Wo.weight": (h, f)}),
        }
    return parts


register(
    Family(
        name="modernbert",
        description="ModernBERT encoders",
        config=ModernBertConfig,
        init=modernbert.init,
        model_types=("modernbert",),
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "intermediate_size": "intermediate_size",
            "max_positions": "max_position_embeddings",
            "local_attention": "local_attention",
            "global_every": "global_attn_every_n_layers",
            "global_theta": "global_rope_theta",
            "local_theta": "local_rope_theta",
            "epsilon": "norm_eps",
            "activation": "hidden_activation",
        },
        optional=("activation",),
        spellings={"activation": configs.ACTIVATIONS},
        defaults={
            "local_attention": 128,
            "global_every": 3,
            "global_theta": 160_000.0,
            "local_theta": 10_000.0,
            "epsilon": 1e-5,
        },
        unbounded=("max_positions", "local_attention", "global_every"),
        values={
            "norm_bias": (False,),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "rope_scaling": (None,),
        },
        adapt=_adapt,
        describe=_describe,
        parts=_parts,
        prefix="model.",
        # The heads of masked language models and of classifiers.
        ignored=lambda config: ("head.dense.weight", "head.norm.weight", "decoder.weight", "decoder.bias"),
        encode=modernbert.encode,
    )
)
