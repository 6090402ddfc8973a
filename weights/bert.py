"""BERT and its relatives: how each family names the tensors of one architecture."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_models import bert
from pallas_models.bert import DistilBertConfig, EncoderConfig, MPNetConfig, RobertaConfig
from weights import configs
from weights.checkpoint import shown
from weights.families import Family, Part, Shape, joined, linear, register, same

# MPNet, and RoBERTa as a rule, count positions from 2: row 1 stands for padding, and row 0 for nothing.
_FIRST_POSITION = 2
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "epsilon": "layer_norm_eps",
    "activation": "hidden_act",
}
OPTIONAL = ("activation",)
SPELLINGS = {"activation": configs.ACTIVATIONS}
VALUES = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
# A buffer (0, 1, 2, ...), and a layer on the first token that no pooling uses.
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names of a layer's tensors; the defaults are BERT's."""

    layers: str = "encoder.layer"
    queries_keys_values: tuple[str, str, str] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    attention_out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


def parts(config: EncoderConfig, names: Names = Names(), unused_positions: int = 0) -> dict[str, Part]:
    """How the parameters of a model are made; the first rows of the table of positions may be unused."""
    h, f = config.hidden_size, config.intermediate_size

    def norm(parameter: str, name: str) -> dict[str, Part]:
        return {f"{parameter}.scale": same(f"{name}.weight", h), f"{parameter}.bias": same(f"{name}.bias", h)}

    def dense(parameter: str, d_in: int, d_out: int, *names: str) -> dict[str, Part]:
        return {
            f"{parameter}.kernel": linear({f"{name}.weight": (d_out, d_in) for name in names}),
            f"{parameter}.bias": joined({f"{name}.bias": (d_out,) for name in names}),
        }

    position = "embeddings.position_embeddings.weight"
    found = {
        "embeddings.word.embedding": same("embeddings.word_embeddings.weight", config.vocab_size, h),
        "embeddings.position.embedding": _rows_from(unused_positions, position, config.max_positions, h),
    }
    if config.num_token_types:
        found["embeddings.token_type.embedding"] = same(
            "embeddings.token_type_embeddings.weight", config.num_token_types, h
        )
    found |= norm("embeddings.norm", "embeddings.LayerNorm")
    if config.relative_buckets:
        found["relative_bias.embedding"] = same(
            "encoder.relative_attention_bias.weight", config.relative_buckets, config.num_heads
        )
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"{names.layers}.{i}"
        found |= dense(f"{ours}.attention.qkv", h, h, *(f"{theirs}.{name}" for name in names.queries_keys_values))
        found |= dense(f"{ours}.attention.out", h, h, f"{theirs}.{names.attention_out}")
        found |= norm(f"{ours}.attention_norm", f"{theirs}.{names.attention_norm}")
        found |= dense(f"{ours}.mlp.up", h, f, f"{theirs}.{names.up}")
        found |= dense(f"{ours}.mlp.down", f, h, f"{theirs}.{names.down}")
        found |= norm(f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}")
    return found


def _rows_from(first: int, name: str, rows: int, features: int) -> Part:
    """A parameter that is a tensor from row `first` on; the rows before it are written as zeros."""

    def split(parameter: np.ndarray, _: Sequence[Shape]) -> Sequence[np.ndarray]:
        return [np.pad(parameter, ((first, 0), (0, 0)))]

    return Part({name: (first + rows, features)}, lambda tensor: tensor[first:], split)


def _used_positions(config: dict[str, Any], unused: int = _FIRST_POSITION) -> dict[str, Any]:
    """Subtracts the unused rows from the number of positions."""
    positions = config.get("max_position_embeddings")
    return config | {"max_position_embeddings": positions - unused} if type(positions) is int else config


def _adapt_roberta(config: dict[str, Any]) -> dict[str, Any]:
    """Counts positions from the row after the row of padding, whose number is the id of the padding token."""
    padding = config.get("pad_token_id", _FIRST_POSITION - 1)
    if type(padding) is not int or padding < 0:
        raise ValueError(f"pad_token_id is {shown(padding)}; expected an integer of at least 0")
    return _used_positions(config, padding + 1) | {"first_position": padding + 1}


def _describe_roberta(config: dict[str, Any]) -> dict[str, Any]:
    first = config.pop("first_position")
    return _used_positions(config, -first) | {"pad_token_id": first - 1}


register(
    Family(
        name="roberta",
        description="RoBERTa and XLM-RoBERTa encoders",
        config=RobertaConfig,
        init=bert.init,
        model_types=("roberta", "xlm-roberta", "camembert"),
        keys=KEYS | {"num_token_types": "type_vocab_size", "first_position": "first_position"},
        defaults={"epsilon": 1e-12},
        optional=(*OPTIONAL, "first_position"),
        spellings=SPELLINGS,
        values=VALUES,
        adapt=_adapt_roberta,
        describe=_describe_roberta,
        parts=lambda config: parts(config, unused_positions=config.first_position),
        prefix="roberta.",
        ignored=lambda config: UNUSED,
        encode=bert.encode,
    )
)

register(
    Family(
        name="mpnet",
        description="MPNet encoders such as all-mpnet-base-v2",
        config=MPNetConfig,
        init=bert.init,
        model_types=("mpnet",),
        keys=KEYS,
        defaults={"epsilon": 1e-12},
        optional=OPTIONAL,
        spellings=SPELLINGS,
        values=VALUES | {"relative_attention_num_buckets": (MPNetConfig().relative_buckets,)},
        adapt=_used_positions,
        describe=lambda config: _used_positions(config, -_FIRST_POSITION),
        parts=lambda config: parts(
            config,
            Names(
                queries_keys_values=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
                attention_out="attention.attn.o",
                attention_norm="attention.LayerNorm",
            ),
            unused_positions=_FIRST_POSITION,
        ),
        prefix="mpnet.",
        ignored=lambda config: UNUSED,
        encode=bert.encode,
    )
)

register(
    Family(
        name="distilbert",
        description="DistilBERT encoders",
        config=DistilBertConfig,
        init=bert.init,
        model_types=("distilbert",),
        keys=KEYS
        | {
            "hidden_size": "dim",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "activation": "activation",
        },
        defaults={"epsilon": 1e-12},
        optional=OPTIONAL,
        spellings=SPELLINGS,
        values={},  # sinusoidal positions are in the table like any other
        parts=lambda config: parts(
            config,
            Names(
                layers="transformer.layer",
                queries_keys_values=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
                attention_out="attention.out_lin",
                attention_norm="sa_layer_norm",
                up="ffn.lin1",
                down="ffn.lin2",
                mlp_norm="output_layer_norm",
            ),
        ),
        prefix="distilbert.",
        ignored=lambda config: UNUSED[:1],
        encode=bert.encode,
    )
)
