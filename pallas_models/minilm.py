"""all-MiniLM-L6-v2 and its relatives: the model on token ids (`encode`, `embed`), and on sentences (`Encoder`).

The model is in `pallas_models.bert`, and all that takes text in `pallas_models.sentence`.
"""

from pallas_models.bert import (
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
    contrastive_loss,
    embed,
    embed_packed,
    encode,
    init,
)
from pallas_models.sentence import heads, packing, similarity
from pallas_models.sentence.cross_encoder import CrossEncoder
from pallas_models.sentence.encoder import Encoder

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
    "heads",
    "init",
    "packing",
    "similarity",
]
