"""Small models of odd configs, written by transformers: each is right, or refused with the name of a field.

Configs are drawn as people have them: sizes, activations, heads, ids of padding, positions, tied embeddings and
scales. Hidden states, or logits of language models, are compared with torch's in float64.
"""

import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import weights
from pallas_models import gpt2, qwen3
from parity.campaign._case import Case
from parity.sentence import encoder_checkpoints
from parity.support.bounded import apart
from parity.support.common import KERNEL
from parity.support.draws import Pick
from parity.support.tolerances import DEEP
from weights import families

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

BATCH, SEQ = 3, 13
Config = dict[str, Any]


def _sizes(pick: Pick, head_dims: tuple[int, ...] = (16, 16, 16, 32, 32, 48, 8, 24)) -> Config:
    heads, head_dim = pick.of((1, 2, 3, 4)), pick.of(head_dims)
    return {
        "vocab_size": pick.of((17, 40, 61)),
        "hidden_size": heads * head_dim,
        "num_hidden_layers": pick.of((1, 1, 2, 3)),
        "num_attention_heads": heads,
        "intermediate_size": pick.of((1, 30, 48, 65)),
        "max_position_embeddings": SEQ + pick.of((0, 0, 1, 30)),
    }


def _some(pick: Pick, options: dict[str, tuple[Any, ...]], share: float = 0.3) -> Config:
    """Some of the options, each at a value of its own."""
    return {name: pick.of(values) for name, values in options.items() if pick.chance(share)}


_ACTIVATIONS = ("gelu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_EPSILONS = (1e-12, 1e-5, 0.1)


def _gpt2(pick: Pick) -> Config:
    sizes = _sizes(pick)
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    names |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
    config = {names.get(name, name): value for name, value in sizes.items()}
    if pick.chance(0.5):
        del config["n_inner"]
    return config | _some(
        pick,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu"),
            "layer_norm_epsilon": _EPSILONS,
            "scale_attn_weights": (False, True),
            "scale_attn_by_inverse_layer_idx": (True, False),
            "reorder_and_upcast_attn": (True,),
            "tie_word_embeddings": (False, True),
            "pad_token_id": (0, 5),
            "bos_token_id": (3,),
        },
        0.2,
    )


def _qwen3(pick: Pick) -> Config:
    config = _sizes(pick)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = pick.of([n for n in (1, 2, 3, 4) if heads % n == 0])
    config["head_dim"] = pick.of((16, 16, 32, 32, 48, 8))
    return config | _some(
        pick,
        {
            "hidden_act": ("silu", "gelu"),
            "rms_norm_eps": (1e-6, 1e-5, 0.1),
            "rope_theta": (1e6, 1e4, 10.0),
            "tie_word_embeddings": (True, False),
            "attention_bias": (True, False),
            "use_sliding_window": (False, True),
            "pad_token_id": (0, 2),
        },
        0.25,
    )


def _bert(pick: Pick) -> Config:
    options = {
        "hidden_act": _ACTIVATIONS,
        "layer_norm_eps": _EPSILONS,
        "type_vocab_size": (1, 2, 3),
        "pad_token_id": (0, 1, 3),
    }
    return _sizes(pick) | _some(pick, options)


def _roberta(pick: Pick) -> Config:
    config = _bert(pick) | {"type_vocab_size": pick.of((1, 1, 2))}
    config["pad_token_id"] = pick.of((1, 1, 1, 0, 3))
    config["max_position_embeddings"] += config["pad_token_id"] + 1  # positions are counted from there
    return config


def _mpnet(pick: Pick) -> Config:
    config = _roberta(pick)
    del config["type_vocab_size"]
    config["max_position_embeddings"] += (
        1 - config["pad_token_id"]
    )  # here they are counted from 2 whatever that is
    return config | _some(pick, {"relative_attention_num_buckets": (32, 16, 8)}, 0.2)


def _distilbert(pick: Pick) -> Config:
    sizes = _sizes(pick)
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    names |= {"intermediate_size": "hidden_dim"}
    options = {"activation": ("gelu", "relu"), "sinusoidal_pos_embds": (True, False), "pad_token_id": (0, 1)}
    return {names.get(name, name): value for name, value in sizes.items()} | _some(pick, options)


def _modernbert(pick: Pick) -> Config:
    config = _sizes(pick) | {"pad_token_id": pick.of((0, 1)), "num_hidden_layers": pick.of((1, 2, 3, 4))}
    options = {
        "hidden_activation": ("gelu", "silu"),
        "norm_eps": _EPSILONS,
        "norm_bias": (False, True),
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "local_attention": (2, 4, 6, 10, 128),
        "global_attn_every_n_layers": (1, 2, 3),
        "global_rope_theta": (160_000.0, 100.0),
        "local_rope_theta": (10_000.0, 100.0),
        "cls_token_id": (2,),
    }
    return config | _some(pick, options, 0.25)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of models: the class of its configs in transformers, how one is drawn, and whether it has a head."""

    config: str
    draw: Callable[[Pick], Config]
    causal: bool = False


KINDS = {
    "gpt2": Kind("GPT2Config", _gpt2, causal=True),
    "qwen3": Kind("Qwen3Config", _qwen3, causal=True),
    "qwen3 encoder": Kind("Qwen3Config", _qwen3),
    "bert": Kind("BertConfig", _bert),
    "roberta": Kind("RobertaConfig", _roberta),
    "xlm-roberta": Kind("XLMRobertaConfig", _roberta),
    "mpnet": Kind("MPNetConfig", _mpnet),
    "distilbert": Kind("DistilBertConfig", _distilbert),
    "modernbert": Kind("ModernBertConfig", _modernbert),
}


def draw(seed: int, index: int) -> tuple[str, Config, bool, str | None]:
    """Kind and config of case `index`, whether config.json is as old versions wrote it, and the implementation."""
    pick = Pick(np.random.default_rng([seed, index, 5]))
    name = pick.of(tuple(KINDS))
    return name, KINDS[name].draw(pick), pick.chance(0.1), pick.by({None: 0.9, KERNEL: 0.1})


def _age(folder: Path) -> None:
    """Writes config.json with the names that old versions had."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config.pop("n_positions")
    rope = config.pop("rope_parameters", None) or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    path.write_text(json.dumps(config))


@functools.lru_cache(maxsize=4)
def _forward(kind: str, config: Any, implementation: str | None) -> Callable[..., jax.Array]:
    function = {"gpt2": gpt2.logits, "qwen3": qwen3.logits}.get(kind) or families.of(config).encode
    assert function is not None
    return jax.jit(functools.partial(function, config=config, implementation=implementation))


def _ours(kind: str, folder: Path, implementation: str | None, ids: Any, mask: Any) -> jax.Array:
    if kind == "gpt2":
        config, params = weights.load_gpt2_config(folder), weights.load_gpt2(folder)
    elif kind == "qwen3":
        config, params = weights.load_qwen3_config(folder), weights.load_qwen3(folder, dtype="float32")
    else:
        config, params = weights.load_encoder_config(folder), weights.load_encoder(folder)
    return _forward(kind, config, implementation)(params, ids, mask)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int
    measured: dict[str, float]

    def __call__(self) -> str | None:
        name, config, old, implementation = draw(self.seed, self.index)
        kind, rng = KINDS[name], np.random.default_rng([self.seed, self.index, 6])
        mask = np.arange(SEQ) < np.append(SEQ, rng.integers(1, SEQ + 1, BATCH - 1))[:, None]
        pad = config.get("pad_token_id", 0)
        # No token is the one of padding, from which some models count positions.
        ids = np.where(mask, rng.integers(4, config["vocab_size"], mask.shape), pad).astype(np.int32)
        if "pad_token_id" in config:
            ids = np.where(mask & (ids == pad), pad + 4, ids)
        torch.manual_seed(int(rng.integers(2**31)))
        auto = transformers.AutoModelForCausalLM if kind.causal else transformers.AutoModel
        model = auto.from_config(getattr(transformers, kind.config)(**config)).eval()
        encoder_checkpoints.randomize(model)
        self.measured["cases"] = 1
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            model.save_pretrained(folder)
            if old:
                _age(Path(folder))
            try:
                out = _ours(name, Path(folder), implementation, jnp.asarray(ids), jnp.asarray(mask, jnp.int32))
            except (weights.CheckpointError, NotImplementedError) as error:
                self.measured["refused"] = 1
                named = ["head_dim", *config, *(("n_ctx", "n_positions") if old else ())]
                message = str(error).replace(folder, "")
                return None if any(field in message for field in named) else f"names no field: {message:.300}"
        with torch.inference_mode():
            given = torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
            found = model.double()(given[0], attention_mask=given[1])
        expected = (found.logits if kind.causal else found.last_hidden_state).numpy()
        wrong, part = apart(np.asarray(out)[mask], expected[mask], DEEP, 0.0)
        self.measured["largest part of its bound"] = part
        return wrong


def cases(seed: int) -> Iterator[Case]:
    """Models of drawn configs; see the module."""
    for index in itertools.count():
        name, config, old, implementation = draw(seed, index)
        trial = _Trial(seed, index, {})
        fields = " ".join(f"{key}={value}" for key, value in config.items())
        text = f"{name} {implementation}{' of old' if old else ''}: {fields}"
        yield Case(text, trial, (f"model {name}", "float32", str(implementation), "value"), trial.measured)
