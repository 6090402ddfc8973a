"""Calls of `Encoder` with all kinds of arguments, odd ones among them, against a loop over sentences.

Sentences come in every container that people have; sizes, prompts, precisions and kinds of result are drawn. A
wrong argument has to be refused by its name; every other call has to give the result of the loop.
"""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_models import minilm
from pallas_models.minilm import Encoder
from parity.campaign._case import Case
from parity.support.bounded import Array, apart
from parity.support.draws import Pick
from parity.support.tolerances import CHAIN
from parity.weights import checkpoints

CONFIG = dataclasses.replace(checkpoints.CONFIG, num_layers=1, hidden_size=32, num_heads=2)
PROMPTS = {"query": "a man ", "passage": "the ", "nothing": ""}
LENGTH = 12  # tokens kept of a sentence
WIDTH = CONFIG.hidden_size


@functools.cache
def _encoder(normalized: bool) -> Encoder:
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        folder = Path(name)
        checkpoints.write(
            folder, checkpoints.bert_tensors(CONFIG), checkpoints.bert_config(CONFIG), max_length=LENGTH
        )
        if not normalized:
            (folder / "modules.json").write_text(json.dumps(checkpoints.modules("Transformer", "Pooling")))
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
        return Encoder.from_pretrained(folder, implementation="xla")


@functools.cache
def _forward() -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(minilm.encode, config=CONFIG, implementation="xla"))


@functools.lru_cache(maxsize=4096)
def _states(text: str) -> Array:
    """The hidden states of the tokens of one text."""
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_truncation(LENGTH)
    tokens = tokenizer.encode(text).ids
    ids, mask = np.zeros((1, LENGTH), np.int32), np.zeros((1, LENGTH), np.int32)
    ids[0, : len(tokens)], mask[0, : len(tokens)] = tokens, 1
    hidden = _forward()(_encoder(True).params, ids, mask)
    return np.asarray(hidden)[0, : len(tokens)].astype(np.float64)


def _embedding(text: str, normalized: bool, normalize: bool, dimensions: int | None) -> Array:
    mean = _states(text).mean(0)
    unit = mean / np.linalg.norm(mean) if normalized else mean
    kept = unit[:dimensions]
    return kept / np.linalg.norm(kept) if normalize else kept


# What is given


class _Own(collections.abc.Sequence):  # type: ignore[type-arg]
    """A sequence of a user's own."""

    def __init__(self, values: list[str]) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


def _pandas(values: list[str]) -> Any:
    import pandas

    return pandas.Series(values, index=range(len(values), 0, -1), dtype=object)


def _arrow(values: list[str]) -> Any:
    import pyarrow

    return pyarrow.array(values, pyarrow.string())


def _chunked(values: list[str]) -> Any:
    import pyarrow

    return pyarrow.chunked_array([values[:1], values[1:]], pyarrow.string())


CONTAINERS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "generator": lambda values: (value for value in values),
    "map": lambda values: map(str, values),
    "deque": collections.deque,
    "array": np.array,
    "objects": lambda values: np.array(values, dtype=object),
    "of numpy": lambda values: [np.str_(value) for value in values],
    "keys": lambda values: dict(enumerate(values)).values(),
    "own": _Own,
    **({"pandas": _pandas} if importlib.util.find_spec("pandas") else {}),
    **({"pyarrow": _arrow, "chunked": _chunked} if importlib.util.find_spec("pyarrow") else {}),
}
# What is no text, and what is none of many.
WRONG: dict[str, Any] = {
    "None": None,
    "a number": 5,
    "bytes": b"a man",
    "a mapping": {"a man": 1},
    "None in a list": ["a man", None],
    "a number in a list": ["a man", 3],
    "NaN in an array": np.array(["a man", float("nan")], dtype=object),
    "bytes in a list": [b"a man"],
    "lists in a list": [["a man"]],
    "half of a pair": ["a man", "\ud800"],
    "an array of none": np.array("a man"),
}
# By argument: values that are right, and others.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "batch_size": ((None, 1, 2, 5, np.int64(3), 10**6), (0, -1, 1.5, "3")),
    "truncate_dim": ((None, 1, 7, np.int32(16), WIDTH, 1000), (0, -2, 2.5, "8")),
    "normalize_embeddings": ((False, True), ()),
    "prompt_name": ((None, "query", "passage", "nothing"), ("other", "")),
    "prompt": ((None, "", "the guitar "), (5, b"a")),
    "precision": (("float32", "int8", "uint8", "binary", "ubinary"), ("float16", "int4", None)),
    "device": ((None, "cpu"), ("nowhere", "cpu:77")),
    "convert_to_numpy": ((True, False), ()),
    "convert_to_tensor": ((False, True), ()),
    "show_progress_bar": ((None, False), ()),
    "output_value": (("sentence_embedding", "token_embeddings"), ("something",)),
}
_OF_A_STREAM = ("batch_size", "truncate_dim", "normalize_embeddings", "prompt_name", "prompt", "device")
METHODS = {"encode": 0.55, "encode_query": 0.1, "encode_document": 0.1, "encode_iter": 0.15, "encode_chunks": 0.1}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of the encoder, and which arguments are wrong."""

    method: str
    normalized: bool
    container: str
    sentences: Any
    options: dict[str, Any]
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        options = " ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.method} of {self.container} {self.sentences!r:.80} {options}"


def _text(pick: Pick) -> str:
    kind = pick.of(("words", "words", "words", "empty", "long", "other", "spaces"))
    words = [str(pick.of(checkpoints.WORDS)) for _ in range(pick.of((1, 2, 5, 8)))]
    texts = {
        "empty": "",
        "long": " ".join(words * 20),
        "other": "Über 今日 😀\n\t" + words[0],
        "spaces": "  a  man ",
    }
    return texts.get(kind, " ".join(words))


def call(seed: int, index: int) -> Call:
    """Call `index` of a campaign."""
    pick = Pick(np.random.default_rng([seed, index, 9]))
    method = pick.by(METHODS)
    streams = method in ("encode_iter", "encode_chunks")
    options, wrong = {}, []
    for name, (right, others) in ARGUMENTS.items():
        if (streams and name not in _OF_A_STREAM) or not pick.chance(0.35):
            continue
        if others and pick.chance(0.06):
            options[name], wrong = pick.of(others), [*wrong, name]
        else:
            options[name] = pick.of(right)
    if "prompt" in options and options["prompt"] is not None and "prompt_name" in wrong:
        wrong.remove("prompt_name")  # not asked for
    if method in ("encode_query", "encode_document") and "prompt_name" in options:
        del options["prompt_name"]
        wrong = [name for name in wrong if name != "prompt_name"]
    if options.get("output_value") == "token_embeddings" and options.get("precision", "float32") != "float32":
        del options["precision"]
        wrong = [name for name in wrong if name != "precision"]
    sentences = [_text(pick) for _ in range(pick.of((0, 1, 2, 3, 9, 30)))]
    container = pick.of(tuple(CONTAINERS))
    if method == "encode_chunks":
        container = "list"
    elif pick.chance(0.06):
        container = pick.of(tuple(WRONG))
        return Call(method, pick.chance(0.5), container, WRONG[container], options, (*wrong, "sentences"))
    elif method != "encode_iter" and pick.chance(0.15):
        container, sentences = pick.of(("str", "str of numpy")), sentences[0] if sentences else ""
    return Call(method, pick.chance(0.5), container, sentences, options, tuple(wrong))


def _given(call: Call) -> Any:
    if call.container in ("str", "str of numpy"):
        return np.str_(call.sentences) if call.container == "str of numpy" else call.sentences
    return CONTAINERS[call.container](call.sentences) if call.container in CONTAINERS else call.sentences


def _expected(call: Call) -> Array | list[Array]:
    """The result of a loop over the sentences, in float64: embeddings, or the states of tokens."""
    prompt = call.options.get("prompt")
    if prompt is None:
        name = {"encode_query": "query", "encode_document": "document"}.get(call.method)
        name = name or call.options.get("prompt_name")
        prompt = (PROMPTS | {"document": ""})[name] if name is not None else ""
    texts = [call.sentences] if isinstance(call.sentences, str) else call.sentences
    if call.options.get("output_value") == "token_embeddings":
        return [_states(prompt + text) for text in texts]
    dimensions = call.options.get("truncate_dim")
    normalize = call.options.get("normalize_embeddings", False)
    rows = [_embedding(prompt + text, call.normalized, normalize, dimensions) for text in texts]
    width = WIDTH if dimensions is None else min(WIDTH, int(dimensions))
    return np.stack(rows) if rows else np.zeros((0, width))


def _quantized(out: Array, expected: Array, precision: str) -> str | None:
    """What is wrong with embeddings in a byte or a bit a dimension, where rounding cannot make the difference."""
    if precision in ("binary", "ubinary"):
        bits = np.unpackbits(
            out.astype(np.int16).astype(np.uint8) ^ (128 if precision == "binary" else 0), axis=-1
        )
        bits, sure = bits[..., : expected.shape[-1]], np.abs(expected) > 1e-5
        return None if np.array_equal(bits[sure], (expected > 0)[sure]) else "bits are not the signs"
    low, high = expected.min(0), expected.max(0)
    steps = np.clip(np.floor((expected - low) / np.where(high == low, 1, (high - low) / 255)), 0, 255)
    off = np.abs(out.astype(int) + (128 if precision == "int8" else 0) - steps)
    varied = high - low > 1e-3  # of less, rounding is some steps
    return None if np.all(off[:, varied] <= 1) else f"a byte is off by {off[:, varied].max():.0f} steps"


def _checked(call: Call, out: Any) -> str | None:
    """What is wrong with a result."""
    expected = _expected(call)
    single = isinstance(call.sentences, str)
    if isinstance(expected, list):  # of tokens
        found = [out] if single else out
        if len(found) != len(expected):
            return f"{len(found)} results, expected {len(expected)}"
        return apart([np.asarray(x) for x in found], expected, 2 * CHAIN, 0.0)[0]
    tensor = call.options.get("convert_to_tensor", False)
    if tensor or call.options.get("convert_to_numpy", True):
        kind = jax.Array if tensor else np.ndarray
        if not isinstance(out, kind):
            return f"a {type(out).__name__}, expected {kind.__name__}"
    elif not single and not isinstance(out, list):
        return f"a {type(out).__name__}, expected a list"
    rows = np.asarray(
        out[None] if single else np.stack([np.asarray(x) for x in out]) if isinstance(out, list) and out else out
    )
    precision = call.options.get("precision", "float32")
    if isinstance(out, list) and not out:
        return None if not len(expected) else "nothing"
    dtype = {"binary": "int8", "ubinary": "uint8"}.get(precision, precision)
    if rows.dtype != dtype:
        return f"{rows.dtype}, expected {dtype}"
    if precision != "float32":
        width = -(-expected.shape[1] // 8) if "binary" in precision else expected.shape[1]
        if rows.shape != (len(expected), width):
            return f"shape {rows.shape}, expected {(len(expected), width)}"
        return _quantized(rows, expected, precision) if len(rows) else None
    return apart(rows, expected, 2 * CHAIN, 0.0)[0]


def _streamed(call: Call, encoder: Encoder, stop: bool) -> Any:
    """The rows of a stream; or only its first chunk, after which it is ended."""
    if call.method == "encode_chunks":
        chunks: Iterable[list[str]] = [call.sentences[i : i + 4] for i in range(0, len(call.sentences), 4)]
        stream: Any = encoder.encode_chunks(chunks, **call.options)
    else:
        stream = encoder.encode_iter(_given(call), **call.options)
    found = []
    for rows in stream:
        found.append(rows)
        if stop:
            stream.close()
            break
    return np.concatenate(found) if found else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int

    def __call__(self) -> str | None:
        made = call(self.seed, self.index)
        encoder = _encoder(made.normalized)
        stop = self.index % 3 == 0
        too_few = (
            made.options.get("precision") in ("int8", "uint8")
            and (isinstance(made.sentences, str) or len(made.sentences) == 1)
            if made.container not in WRONG
            else False
        )
        try:
            if made.method in ("encode_iter", "encode_chunks"):
                out = _streamed(made, encoder, stop)
                if made.wrong:
                    return f"{made.wrong} are taken" if made.sentences else None  # nothing was computed
                if out is None:
                    return None if not made.sentences else "no rows"
                kept = (
                    min(len(made.sentences), 4) if stop and made.method == "encode_chunks" else len(made.sentences)
                )
                return _checked(dataclasses.replace(made, sentences=list(made.sentences)[:kept]), out)
            out = getattr(encoder, made.method)(_given(made), **made.options)
        except (TypeError, ValueError) as error:
            message = str(error)
            if made.wrong:
                named = any(name in message or name.replace("_name", "") in message for name in made.wrong)
                return None if named else f"names none of {made.wrong}: {type(error).__name__}: {message:.200}"
            if too_few and "rows" in message:
                return None
            raise
        if made.wrong:
            return f"{made.wrong} are taken"
        return "ranges of one row" if too_few else _checked(made, out)


def cases(seed: int) -> Iterator[Case]:
    """Calls of an encoder; see the module."""
    for index in itertools.count():
        yield Case(str(call(seed, index)), _Trial(seed, index))
