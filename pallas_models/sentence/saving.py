"""Writes an encoder as a folder of sentence-transformers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pallas_models import files
from pallas_models._modules import Params
from pallas_models.sentence import folders
from pallas_models.sentence.heads import Dense, Head
from pallas_models.sentence.programs import Config
from weights import exporting, families, tree

if TYPE_CHECKING:
    import tokenizers

# The special tokens of a tokenizer by the names that most families give them; the first that it has counts.
_SPECIAL_TOKENS = {
    "pad_token": ("[PAD]", "<pad>", "<|endoftext|>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}


def save_encoder(
    params: Params,
    folder: str | os.PathLike[str],
    *,
    config: Config,
    tokenizer: "tokenizers.Tokenizer",
    head: Head,
    head_params: Params,
    max_length: int,
    prompts: Mapping[str, str],
    default_prompt_name: str | None,
    similarity: str,
) -> None:
    """Writes a folder that sentence-transformers, transformers and `minilm.Encoder` load.

    Args:
      params, folder, config: as in `weights.export`.
      tokenizer: becomes tokenizer.json, without its limits.
      head, head_params: the layers after the transformer, of Dense and Normalize, and their parameters.
      max_length, prompts, default_prompt_name, similarity: of the encoder.

    Raises:
      As `weights.export`.
    """
    folder, family = Path(folder), families.of(config)
    flat = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
    tensors = exporting.split(family.parts(config), flat)
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {
        role: next((token for token in tokens if tokenizer.token_to_id(token) is not None), None)
        for role, tokens in _SPECIAL_TOKENS.items()
    }
    stated: dict[str, Any] = {role: token for role, token in special.items() if token is not None}
    stated |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    sentences = {"prompts": dict(prompts), "default_prompt_name": default_prompt_name}
    sentences |= {"similarity_fn_name": similarity, "model_type": "SentenceTransformer"}
    kinds = ["Transformer", "Pooling", *(type(layer).__name__ for layer in head.layers)]
    places = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing_folder(folder) as draft:
        exporting.write_model(draft, tensors, config)
        files.write(draft / "tokenizer.json", tokenizer.to_str(pretty=True))
        exporting.write_json(draft / "tokenizer_config.json", stated)
        exporting.write_json(
            draft / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
        )
        exporting.write_json(draft / "config_sentence_transformers.json", sentences)
        exporting.write_json(
            draft / "modules.json",
            [
                {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
            ],
        )
        exporting.write_json(
            draft / places[1] / "config.json", folders.describe_pooling(head.pooling, config.hidden_size)
        )
        for i, layer in enumerate(head.layers):
            place = draft / places[i + 2]
            if isinstance(layer, Dense):
                own = {name: np.asarray(leaf) for name, leaf in tree.flatten(head_params[str(i)]).items()}
                exporting.write_json(place / "config.json", folders.describe_dense(layer))
                exporting.write_tensors(
                    place / "model.safetensors", exporting.split(folders.dense_parts(layer), own)
                )
            else:
                exporting.write_json(place / "config.json", {})
