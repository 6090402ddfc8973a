"""Classifiers of pairs of sentences, as transformers saves them: an encoder, and layers on its first token."""

import dataclasses
import os
from typing import Any, cast

from jax.typing import DTypeLike

from pallas_models._modules import Params
from pallas_models.sentence.heads import Dense, Head, Layer, LayerNorm, Pooling
from pallas_models.sentence.programs import Config, Encode
from weights import checkpoint, hub, lazy, loading, tree
from weights.checkpoint import CheckpointError, read_json, shown
from weights.families import Part, linear, same

_OUT = ("classifier.dense", "tanh"), ("classifier.out_proj", "identity")
# By model_type: the two dense layers, with their activations.
_LAYERS = {
    "bert": (("pooler.dense", "tanh"), ("classifier", "identity")),
    "roberta": _OUT,
    "xlm-roberta": _OUT,
    "camembert": _OUT,
    "mpnet": _OUT,
    "distilbert": (("pre_classifier", "relu"), ("classifier", "identity")),
    "modernbert": (("head.dense", "gelu"), ("classifier", "identity")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """An encoder and a head that makes scores of its hidden states, which `encode` computes."""

    params: Params
    config: Config
    encode: Encode
    head: Head
    head_params: Params


def load_classifier(path_or_name: str | os.PathLike[str], *, dtype: DTypeLike) -> Classifier:
    """Loads a model that transformers calls ForSequenceClassification.

    Raises:
      As `weights.load_minilm`; NotImplementedError for a family whose classifiers are not run here.
    """
    path, target = hub.resolve(path_or_name), checkpoint.float_dtype(dtype)
    family = loading.find_encoder(path)
    stated = read_json((path if path.is_dir() else path.parent) / "config.json")
    kind = stated["model_type"]
    if kind not in _LAYERS:
        raise NotImplementedError(f"{path} holds a {kind}; classifiers are of one of {', '.join(_LAYERS)}")
    config = loading.load_config(family, path)
    with lazy.open_tensors(path) as stored:
        tensors = loading.without_prefix(stored, family.prefix, path)
        (first, activation), (last, _) = _LAYERS[kind]
        out = tensors.get(f"{last}.weight")
        if out is None or len(out.shape) != 2:
            raise CheckpointError(f"{path} holds no classifier; expected a tensor {last}.weight")
        width, labels = config.hidden_size, out.shape[0]
        pooling: Pooling = "cls"
        layers: list[Layer] = [_dense(width, width, activation)]
        parts = {"0": _parts(first, width, width)}
        if kind == "modernbert":
            _check(path, stated, {"classifier_bias": (False,), "classifier_activation": ("gelu",)})
            _check(path, stated, {"classifier_pooling": ("cls", "mean")})
            pooling = cast(Pooling, stated.get("classifier_pooling", "cls"))
            layers = [_dense(width, width, activation, use_bias=False)]
            layers.append(LayerNorm(epsilon=config.epsilon, use_bias=False))
            del parts["0"]["bias"]
            parts["1"] = {"scale": same("head.norm.weight", width)}
        parts[str(len(layers))] = _parts(last, labels, width)
        layers.append(_dense(width, labels, "identity"))
        expected = {
            name: shape
            for made in parts.values()
            for part in made.values()
            for name, shape in part.tensors.items()
        }
        own = {name: tensor for name, tensor in tensors.items() if name in expected}
        checkpoint.check_tensors(path, own, expected)
        head_params = {
            index: tree.unflatten(loading.read_parameters(made, own, target, path))
            for index, made in parts.items()
        }
        rest = {name: tensor for name, tensor in tensors.items() if name not in expected}
        params = loading.convert(family, rest, config, dtype=target, source=path)
    head = Head(pooling=(pooling,), layers=tuple(layers))
    assert family.encode is not None
    return Classifier(params=params, config=config, encode=family.encode, head=head, head_params=head_params)


def _check(path: object, stated: dict[str, Any], values: dict[str, tuple[Any, ...]]) -> None:
    for key, allowed in values.items():
        if stated.get(key, allowed[0]) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise NotImplementedError(f"{path}: {key} is {shown(stated[key])}; expected {expected}")


def _dense(d_in: int, d_out: int, activation: str, use_bias: bool = True) -> Dense:
    return Dense(in_features=d_in, out_features=d_out, activation=activation, use_bias=use_bias)


def _parts(name: str, d_out: int, d_in: int) -> dict[str, Part]:
    return {"kernel": linear({f"{name}.weight": (d_out, d_in)}), "bias": same(f"{name}.bias", d_out)}
