"""Small random sentence encoders of every family, written by transformers: what its own library reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from parity.weights import checkpoints

WORDS = checkpoints.WORDS
_SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
_POSITIONS = dict(max_position_embeddings=40)
# Positions of RoBERTa and MPNet are counted from 2.
_FROM_2 = dict(max_position_embeddings=42, pad_token_id=1)
# By model_type: the class of the config in transformers, and its arguments.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SIZES | _POSITIONS),
    "roberta": ("RobertaConfig", _SIZES | _FROM_2 | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaConfig", _SIZES | _FROM_2 | {"type_vocab_size": 1}),
    "mpnet": ("MPNetConfig", _SIZES | _FROM_2),
    "distilbert": (
        "DistilBertConfig",
        _POSITIONS | dict(vocab_size=40, dim=32, n_layers=2, n_heads=2, hidden_dim=48),
    ),
    "modernbert": (
        "ModernBertConfig",
        # Windows of 3 tokens on either side, in two layers of three.
        _SIZES | _POSITIONS | dict(num_hidden_layers=4, local_attention=6, pad_token_id=0),
    ),
    "qwen3": (
        "Qwen3Config",
        _SIZES | _POSITIONS | dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
    ),
}
# On a GPU, sizes that published ones have; heads of 32, 64 and 128.
_REAL = dict(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072)
_LONG = dict(max_position_embeddings=512)
REAL: dict[str, dict[str, Any]] = {
    "bert": _REAL | _LONG | dict(hidden_size=384, intermediate_size=1536),
    "roberta": _REAL | dict(max_position_embeddings=514),
    "xlm-roberta": _REAL | dict(max_position_embeddings=514, hidden_size=1024, num_attention_heads=16),
    "mpnet": _REAL | dict(max_position_embeddings=514),
    "distilbert": _LONG | dict(dim=768, n_layers=6, n_heads=12, hidden_dim=3072),
    "modernbert": _REAL | _LONG | dict(intermediate_size=1152, local_attention=128),
    "qwen3": _REAL | _LONG | dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128),
}


def tokenizer(kind: str) -> tokenizers.Tokenizer:
    """The tokenizer of `checkpoints`, with the special tokens of a family in its places."""
    found = checkpoints.word_tokenizer()
    if kind == "qwen3":  # nothing before a sentence, one token after it
        found.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A [SEP]", special_tokens=[("[SEP]", 3)]
        )
    return found


def randomize(model: Any) -> None:
    """Parameters of the size that trained ones have: initial ones hide what attention does."""
    torch = pytest.importorskip("torch")
    scale = 0.4 * (32 / model.config.hidden_size) ** 0.5
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # No bias on average: the same vector in all tokens would hide the sentence, layer after layer.
            mean = 1.0 if tensor.ndim == 1 and name.endswith("weight") else 0.0
            tensor.normal_(mean, 0.2 if tensor.ndim == 1 else scale)


def write(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes what `AutoModel.save_pretrained` and a tokenizer do; returns `folder`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name, options = FAMILIES[kind]
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(getattr(transformers, name)(**options | changes))
    randomize(model)
    model.save_pretrained(folder)
    tokenizer(kind).save(str(folder / "tokenizer.json"))
    special = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    stated = special | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def sentences(count: int, longest: int = 30, seed: int = 3) -> list[str]:
    """Random sentences of 1 to `longest` words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(count)]
