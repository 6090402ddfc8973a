"""The folder of a sentence-transformers model: its modules and their parameters, prompts, the length of sentences.

Both spellings are read, of versions up to 5 and of version 6.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from jax.typing import DTypeLike

from pallas_models.sentence.heads import ACTIVATIONS, Dense, Head, Normalize, Pooling
from pallas_models.sentence.similarity import Similarity
from weights import checkpoint, lazy, loading, text, tree
from weights.checkpoint import CheckpointError, read_json, shown
from weights.families import Part, linear, same

if TYPE_CHECKING:
    import tokenizers

# In the order in which sentence-transformers joins them.
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The names of sentence-transformers for the activations of a Dense.
_TORCH_ACTIVATIONS = {
    "identity": "torch.nn.modules.linear.Identity",
    **{
        name.lower(): f"torch.nn.modules.activation.{name}" for name in ("Tanh", "ReLU", "Sigmoid", "SiLU", "GELU")
    },
}
_EMBEDDING = "sentence_embedding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDescription:
    """The description of a model of texts in its folder.

    Attributes:
      transformer: the folder of config.json, tensors and tokenizer.
      max_length: tokens of a text, special ones included; None where nothing is stated.
      lower_case: whether texts are lower-cased before the tokenizer's own normalisation.
      prompts: texts that are put before a sentence, by name.
      default_prompt_name: of the prompt that is used where none is named, or None.
    """

    transformer: Path
    max_length: int | None
    lower_case: bool
    prompts: Mapping[str, str]
    default_prompt_name: str | None

    def limit(self, max_positions: int) -> int | None:
        """The stated length, as far as the model has positions; None where nothing is stated."""
        return None if self.max_length is None else min(self.max_length, max_positions)

    def read_tokenizer(self) -> "tokenizers.Tokenizer":
        """Reads the tokenizer; FileNotFoundError or CheckpointError naming the file."""
        return text.read_tokenizer(self.transformer, lower_case=self.lower_case)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description(TextDescription):
    """The description of a sentence encoder in its folder.

    Attributes:
      head: the modules after the transformer.
      dense: the folders with the parameters of the head's dense layers, by their index in `head.layers`.
      similarity: the measure that compares embeddings.
    """

    head: Head
    dense: Mapping[int, Path]
    similarity: Similarity


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairDescription(TextDescription):
    """The description of a cross-encoder in its folder.

    Attributes:
      activation: of scores, or None where nothing is stated.
    """

    activation: str | None


def describe(folder: Path) -> Description:
    """Reads a folder, but no tensors. Without modules.json its head is the mean, as in sentence-transformers.

    Raises:
      CheckpointError: a file is no JSON, or has a value of a wrong kind.
      NotImplementedError: the folder asks for a module or an option that is not run here; names it.
    """
    transformer, head, dense = _modules(folder)
    options, source = _transformer_options(transformer, "feature-extraction", "token_embeddings")
    stated = _read(folder / "config_sentence_transformers.json")
    kind = stated.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise NotImplementedError(f"{folder} holds a {shown(kind)}; only SentenceTransformer embeds sentences")
    prompts, default = _prompts(stated, folder)
    similarity: Any = stated.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        raise NotImplementedError(
            f"{folder} compares embeddings by {shown(similarity)}; expected one of {get_args(Similarity)}"
        )
    return Description(
        transformer=transformer,
        head=head,
        dense=dense,
        max_length=_max_length(transformer, options, source),
        lower_case=options.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt_name=default,
        similarity=similarity,
    )


def describe_pairs(folder: Path) -> PairDescription:
    """Reads the folder of a cross-encoder, a classifier of transformers with or without modules.json.

    Raises:
      CheckpointError, NotImplementedError: as `describe`.
    """
    path = folder / "modules.json"
    listed = [_name_and_place(m, folder, path) for m in read_json(path, list)] if path.is_file() else []
    if listed not in ([], [("Transformer", folder)]):
        raise NotImplementedError(f"{path} lists {[name for name, _ in listed]}; expected a Transformer alone")
    options, source = _transformer_options(folder, "sequence-classification", "scores")
    stated = _read(folder / "config_sentence_transformers.json")
    if (kind := stated.get("model_type", "CrossEncoder")) != "CrossEncoder":
        raise NotImplementedError(f"{folder} holds a {shown(kind)}; only CrossEncoder compares pairs of sentences")
    config = read_json(folder / "config.json")
    older = config.get("sentence_transformers")
    activation = stated.get("activation_fn") or (older.get("activation_fn") if isinstance(older, dict) else None)
    activation = activation or config.get("sbert_ce_default_activation_function")
    prompts, default = _prompts(stated, folder)
    return PairDescription(
        transformer=folder,
        max_length=_max_length(folder, options, source),
        lower_case=options.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt_name=default,
        activation=None if activation is None else _activation(activation, folder),
    )


def load_head(description: Description, dtype: DTypeLike) -> dict[str, Any]:
    """Loads the parameters of the dense layers for `heads.apply`; errors are as in `weights.load_minilm`."""
    params = {}
    for index, path in description.dense.items():
        layer = description.head.layers[index]
        assert isinstance(layer, Dense)
        parts = dense_parts(layer)
        with lazy.open_tensors(path) as tensors:
            expected = {name: shape for part in parts.values() for name, shape in part.tensors.items()}
            checkpoint.check_tensors(path, tensors, expected)
            params[str(index)] = tree.unflatten(
                loading.read_parameters(parts, tensors, checkpoint.float_dtype(dtype), path)
            )
    return params


def dense_parts(layer: Dense) -> dict[str, Part]:
    """How the parameters of a dense layer are made."""
    sizes = layer.out_features, layer.in_features
    parts = {"kernel": linear({"linear.weight": sizes})}
    if layer.use_bias:
        parts["bias"] = same("linear.bias", layer.out_features)
    if layer.residual and layer.in_features != layer.out_features:
        parts["residual"] = linear({"residual.weight": sizes})
    return parts


def describe_pooling(pooling: tuple[Pooling, ...], width: int) -> dict[str, Any]:
    """The config.json of a Pooling, which all versions can read unless it joins results in an order of its own."""
    stated: dict[str, Any] = {key: mode in pooling for key, mode in _OLD_POOLING.items()}
    if pooling != tuple(mode for mode in _OLD_POOLING.values() if mode in pooling):
        stated = {"pooling_mode": list(pooling)}
    return {"word_embedding_dimension": width, **stated}


def describe_dense(layer: Dense) -> dict[str, Any]:
    """The config.json of a Dense."""
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.use_bias,
        "activation_function": _TORCH_ACTIVATIONS[layer.activation],
        "use_residual": layer.residual,
    }


def _modules(folder: Path) -> tuple[Path, Head, dict[int, Path]]:
    path = folder / "modules.json"
    if not path.is_file():
        return folder, Head(layers=()), {}
    transformer: Path | None = None
    pooling: tuple[Pooling, ...] | None = None
    layers: list[Dense | Normalize] = []
    dense: dict[int, Path] = {}
    for module in read_json(path, list):
        name, place = _name_and_place(module, folder, path)
        if transformer is None and name == "Transformer":
            transformer = place
        elif transformer is not None and pooling is None and name == "Pooling":
            pooling = _pooling(place / "config.json")
        elif pooling is not None and name == "Dense":
            dense[len(layers)] = place
            layers.append(_dense(place / "config.json"))
        elif pooling is not None and name == "Normalize":
            _check_keys(place / "config.json", {key: _EMBEDDING for key in _PLACES})
            layers.append(Normalize())
        elif pooling is None or name != "Dropout":  # which does nothing but in training
            raise NotImplementedError(
                f"{path} lists {name} here; expected a Transformer, a Pooling, then any of Dense and Normalize"
            )
    if transformer is None or pooling is None:
        missing = "Transformer" if transformer is None else "Pooling"
        raise NotImplementedError(f"{path} lists no {missing}; expected a Transformer and a Pooling")
    return transformer, Head(pooling=pooling, layers=tuple(layers)), dense


def _prompts(stated: dict[str, Any], folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default prompt."""
    path = folder / "config_sentence_transformers.json"
    prompts, default = stated.get("prompts") or {}, stated.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts is {shown(prompts)}")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{path}: default_prompt_name is {shown(default)}; expected one of {sorted(prompts)}"
        )
    return {name: text or "" for name, text in prompts.items()}, default


_PLACES = ("module_input_name", "module_output_name")


def _name_and_place(module: object, folder: Path, path: Path) -> tuple[str, Path]:
    kind, place = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(place, str):
        raise CheckpointError(f"{path} lists {shown(module)}; expected an object with type and path")
    if not re.fullmatch(r"sentence_transformers(\.\w+)+", kind):
        raise NotImplementedError(f"{path} lists {shown(kind)}, which is no module of sentence-transformers")
    inside = PurePosixPath(place)
    if inside.is_absolute() or ".." in inside.parts or "\\" in place:
        raise CheckpointError(f"{path} names the folder {shown(place)}; expected one inside of its own")
    return kind.rsplit(".", 1)[1], folder / inside


def _pooling(path: Path) -> tuple[Pooling, ...]:
    given = read_json(path)
    if given.get("include_prompt") is False:
        raise NotImplementedError(
            f"{path}: include_prompt is False; only pooling over the prompt too is implemented"
        )
    modes = given.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_POOLING.items() if given.get(key) is True] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    known = get_args(Pooling)
    if not isinstance(modes, list) or not modes or any(mode not in known for mode in modes):
        raise NotImplementedError(f"{path}: pooling_mode is {shown(modes)}; expected some of {known}")
    return tuple(modes)


def _dense(path: Path) -> Dense:
    given = _check_keys(path, {"module_input_name": _EMBEDDING, "module_output_name": _EMBEDDING})
    activation = _activation(given.get("activation_function", "torch.nn.Tanh"), path)
    sizes: dict[str, Any] = {key: given.get(key) for key in ("in_features", "out_features")}
    for key, size in sizes.items():
        if type(size) is not int or not 0 < size < 2**31:
            raise CheckpointError(f"{path}: {key} is {shown(size)}; expected a positive integer")
    flags = {key: given.get(key, default) for key, default in (("bias", True), ("use_residual", False))}
    for key, flag in flags.items():
        if type(flag) is not bool:
            raise CheckpointError(f"{path}: {key} is {shown(flag)}; expected true or false")
    return Dense(**sizes, activation=activation, use_bias=flags["bias"], residual=flags["use_residual"])


def _activation(stated: object, source: object) -> str:
    """Our name of an activation that is stated as a class of torch."""
    name = stated.rsplit(".", 1)[1].lower() if isinstance(stated, str) and stated.startswith("torch.nn.") else None
    if name not in ACTIVATIONS:
        expected = f"a class of torch.nn: {', '.join(ACTIVATIONS)}"
        raise NotImplementedError(f"{source}: the activation function is {shown(stated)}; expected {expected}")
    return name


def _transformer_options(folder: Path, task: str, output: str) -> tuple[dict[str, Any], Path]:
    """The content of sentence_bert_config.json, or of a file with one of its other names; and the file."""
    kinds = ("bert", "roberta", "distilbert", "xlm-roberta")
    found = [path for kind in kinds if (path := folder / f"sentence_{kind}_config.json").is_file()]
    path = (found or [folder / "sentence_bert_config.json"])[0]
    expected: dict[str, Any] = {"transformer_task": task, "module_output_name": output}
    expected |= dict.fromkeys(("processing_kwargs", "query_length", "document_length", "query_expansion"))
    return _check_keys(path, expected), path


def _max_length(folder: Path, options: Mapping[str, Any], source: Path) -> int | None:
    """`max_seq_length`, or the length of the tokenizer, which version 6 writes instead."""
    stated = options.get("max_seq_length")
    key = "max_seq_length"
    if stated is None:
        source, key = folder / "tokenizer_config.json", "model_max_length"
        stated = _read(source).get(key)
        if isinstance(stated, int | float) and stated > np.iinfo(np.int32).max:  # 1e30 stands for no limit
            return None
    if stated is not None and (type(stated) is not int or stated < 2):
        raise CheckpointError(f"{source}: {key} is {shown(stated)}; expected an integer of at least 2")
    return stated


def _check_keys(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file; NotImplementedError where a key is there with another value than expected."""
    given = _read(path)
    for key, value in expected.items():
        if given.get(key, value) != value:
            raise NotImplementedError(f"{path}: {key} is {shown(given[key])}; only {value!r} is implemented")
    return given


def _read(path: Path) -> dict[str, Any]:
    """The JSON object of a file that may be absent."""
    return read_json(path) if path.is_file() else {}
