"""Writes parameters as PyTorch's libraries read them: Hugging Face's names and layouts, and the files beside."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save as serialize

from pallas_models import files
from pallas_models.minilm.heads import Dense, Head
from pallas_models.minilm.model import MiniLMConfig
from weights import checkpoint, configs, families, hub, lazy, loading, modules, store, tree
from weights.checkpoint import CheckpointError
from weights.families import Part

if TYPE_CHECKING:
    import tokenizers

# What may lie beside the tensors and stays true when they change, other than `hub.TEXT_FILES`.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)


def export(
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    config: Any = MiniLMConfig(),
    like: str | os.PathLike[str] | None = None,
    dtype: DTypeLike | None = None,
) -> Path:
    """Writes a folder that transformers loads, and sentence-transformers where `like` is a folder of its.

    The loaders of `weights` read it too, and give the same parameters back.

    Args:
      params: nested dict of float16, bfloat16 or float32 arrays, as the `init` of a model or a loader of `weights`
        returns it; `training.unstack_layers` undoes what `training.stack_layers` did.
      folder: it and its parents are made; files of the same names are replaced, all at once.
      config: the model's sizes; its class says which model it is.
      like: where the parameters came from before they were trained, as the loaders take it. Its config.json, the
        files of its tokenizer and those of sentence-transformers are copied, and so are tensors that nothing here
        uses, such as a pooler. None writes a config.json alone.
      dtype: what to store matrices in, float16, bfloat16 or float32 (biases and scales are then float32); the
        dtypes of `params` when None.

    Returns:
      The path of model.safetensors in the folder.

    Raises:
      CheckpointError: `params` do not fit `config` or `dtype`, all at fault are listed; `like` is of other sizes.
      FileNotFoundError: there is nothing at `like`.
      OSError: the folder cannot be written.
      TypeError: `dtype` is none of the above, or `config` is of no model.
    """
    folder, family = Path(folder), families.of(config)
    flat = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
    checkpoint.check_tensors("params", flat, families.shapes(config))
    if dtype is not None:
        checkpoint.check_range("params", flat, checkpoint.float_dtype(dtype))
        flat = tree.astype(flat, dtype)
    tensors = _split(family.parts(config), flat)
    beside: dict[str, Path] = {}
    if like is not None:
        found = hub.resolve(like)
        if (other := loading.load_config(family, found)) != config:
            raise CheckpointError(f"{found} holds a model with {other}; expected {config}")
        source = found if found.is_dir() else found.parent
        names = [*hub.text_files(source), *(name for name in _BESIDE if (source / name).is_file())]
        beside = {name: source / name for name in names}
        if not store.is_stored(found):
            with lazy.open_tensors(found) as stored:
                unused = family.ignored(config)
                kept = {name.removeprefix(family.prefix): tensor for name, tensor in stored.items()}
                tensors |= {name: tensor.read() for name, tensor in kept.items() if name in unused}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing_folder(folder) as draft:
        _write_model(draft, tensors, config)
        for name, path in beside.items():
            (draft / name).parent.mkdir(exist_ok=True)
            files.write(draft / name, path.read_bytes())
    return folder / "model.safetensors"


def _split(parts: Mapping[str, Part], flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that these parameters are made of."""
    tensors: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        pieces = part.split(flat[name], list(part.tensors.values()))
        tensors |= zip(part.tensors, map(np.ascontiguousarray, pieces), strict=True)
    return tensors


def _write_model(draft: Path, tensors: Mapping[str, np.ndarray], config: Any) -> None:
    family = families.of(config)
    _write_json(draft / "config.json", {"model_type": family.model_types[0], **configs.describe(family, config)})
    _write_tensors(draft / "model.safetensors", tensors)
    (draft / store.FILE_NAME).unlink(missing_ok=True)  # which would be read in its place


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    files.write(path, json.dumps(content, indent=2))


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    files.write(path, serialize(dict(tensors), {"format": "pt"}))


# The special tokens of a tokenizer by what most families call them; the first that it has.
_SPECIAL_TOKENS = {
    "pad_token": ("[PAD]", "<pad>", "<|endoftext|>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}


def export_encoder(
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    config: Any,
    tokenizer: "tokenizers.Tokenizer",
    head: Head,
    head_params: Mapping[str, Any],
    max_length: int,
    prompts: Mapping[str, str],
    default_prompt_name: str | None,
    similarity: str,
) -> None:
    """Writes a folder of sentence-transformers, which it, transformers and `minilm.Encoder` load.

    Args:
      params, folder, config: as in `export`.
      tokenizer: without its limits it is tokenizer.json.
      head, head_params: what follows the transformer, of Dense and Normalize.
      max_length, prompts, default_prompt_name, similarity: of `minilm.Encoder`.

    Raises:
      As `export`.
    """
    folder, family = Path(folder), families.of(config)
    flat = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
    tensors = _split(family.parts(config), flat)
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
        _write_model(draft, tensors, config)
        files.write(draft / "tokenizer.json", tokenizer.to_str(pretty=True))
        _write_json(draft / "tokenizer_config.json", stated)
        _write_json(draft / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
        _write_json(draft / "config_sentence_transformers.json", sentences)
        _write_json(
            draft / "modules.json",
            [
                {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
            ],
        )
        _write_json(draft / places[1] / "config.json", modules.describe_pooling(head.pooling, config.hidden_size))
        for i, layer in enumerate(head.layers):
            place = draft / places[i + 2]
            if isinstance(layer, Dense):
                own = {name: np.asarray(leaf) for name, leaf in tree.flatten(head_params[str(i)]).items()}
                _write_json(place / "config.json", modules.describe_dense(layer))
                _write_tensors(place / "model.safetensors", _split(modules.dense_parts(layer), own))
            else:
                _write_json(place / "config.json", {})
