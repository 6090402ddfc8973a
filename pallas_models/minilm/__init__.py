"""all-MiniLM-L6-v2: the model on token ids (`encode`, `embed`), and `Encoder`, which takes sentences."""

from pallas_models.minilm.contrastive import contrastive_loss
from pallas_models.minilm.cross_encoder import CrossEncoder
from pallas_models.minilm.encoder import Encoder
from pallas_models.minilm.model import (
    MLP,
    Attention,
    DistilBertConfig,
    Embeddings,
    EncoderConfig,
    Layer,
    MiniLM,
    MiniLMConfig,
    MPNetConfig,
    Params,
    RobertaConfig,
    embed,
    embed_packed,
    encode,
    init,
)

__all__ = [
    "MLP",
    "Attention",
    "CrossEncoder",
    "DistilBertConfig",
    "Embeddings",
    "Encoder",
    "EncoderConfig",
    "Layer",
    "MPNetConfig",
    "MiniLM",
    "MiniLMConfig",
    "Params",
    "RobertaConfig",
    "contrastive_loss",
    "embed",
    "embed_packed",
    "encode",
    "init",
]
