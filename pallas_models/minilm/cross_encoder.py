"""Scores of pairs of sentences, each pair read together: rerankers, with the values of sentence-transformers."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models import compilation_cache as caches
from pallas_models._implementation import check_implementation
from pallas_models.minilm import inputs as checks
from pallas_models.minilm import packing, pipeline
from pallas_models.minilm.encoder import SENTENCES_WORTH_A_BAR, CompilationCache, begin_loading
from pallas_models.minilm.heads import Head
from pallas_models.minilm.model import Params
from pallas_models.minilm.programs import Programs
from pallas_models.ops import Implementation

if TYPE_CHECKING:
    import tokenizers

Pair = Sequence[str]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}


class CrossEncoder:
    """Scores pairs of sentences.

    ```
    reranker = CrossEncoder.from_pretrained("cross-encoder/ms-marco-MiniLM-L6-v2")
    scores = reranker.predict([("how many people live in Berlin?", "Berlin has 3.7 million inhabitants.")])
    ```

    Attributes:
      config: the model's sizes.
      num_labels: scores of a pair.
      max_seq_length: tokens kept of a pair, special ones included; the longer sentence is cut first. Can be set.
        `max_length` is the same.
      prompts: what is put before the first sentence of a pair, by name.
      default_prompt_name: of the prompt where none is asked for, or None.
    """

    __slots__ = (
        "_activation",
        "_given",
        "_head",
        "_max_length",
        "_programs",
        "_tokenizer",
        "config",
        "default_prompt_name",
        "prompts",
    )

    def __init__(
        self,
        params: Params,
        tokenizer: "tokenizers.Tokenizer",
        *,
        config: Any,
        forward: Callable[..., jax.Array],
        head: Head,
        head_params: Params,
        activation: str | None = None,
        max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        implementation: Implementation | None = None,
        compilation_cache: CompilationCache | None = None,
    ):
        """Makes a cross-encoder from its parts, as `Encoder` is made; `from_pretrained` reads them from files.

        Args:
          head: makes scores of hidden states.
          activation: what is applied to scores: "sigmoid", "tanh" or "identity". None is the first for one score,
            the last for several.
        """
        self.config, self._head = config, head
        self._activation = activation or ("sigmoid" if self.num_labels == 1 else "identity")
        if self._activation not in _ACTIVATIONS:
            raise ValueError(f"{activation=} is unknown; expected one of {tuple(_ACTIVATIONS)}")
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self.max_seq_length = config.max_positions if max_length is None else max_length
        self.prompts, self.default_prompt_name = dict(prompts or {}), default_prompt_name
        checks.find_prompt(self.prompts, default_prompt_name, None)
        folder = caches.default_folder() if compilation_cache is True else compilation_cache
        self._given: dict[str, Any] = dict(
            forward=forward, implementation=implementation, compilation_cache=folder
        )
        self._programs = Programs(
            (params, head_params),
            _with_token_types(forward),
            config,
            check_implementation(implementation) or None,
            None if folder is None else Path(folder),
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: DTypeLike = jnp.float32,
        max_length: int | None = None,
        implementation: Implementation | None = None,
        compilation_cache: CompilationCache | None = None,
    ) -> "CrossEncoder":
        """Loads weights and tokenizer of a classifier, with arguments and errors of `Encoder.from_pretrained`."""
        begin_loading()
        from weights import classifiers, hub, modules, text

        folder = hub.resolve(path)
        described = modules.describe_pairs(folder)
        loaded = classifiers.load_classifier(folder, dtype=dtype)
        if max_length is None and described.max_length is not None:
            max_length = min(described.max_length, loaded.config.max_positions)
        return cls(
            loaded.params,
            text.read_tokenizer(folder, lower_case=described.lower_case),
            config=loaded.config,
            forward=loaded.encode,
            head=loaded.head,
            head_params=loaded.head_params,
            activation=described.activation,
            max_length=max_length,
            prompts=described.prompts,
            default_prompt_name=described.default_prompt_name,
            implementation=implementation,
            compilation_cache=compilation_cache,
        )

    @property
    def num_labels(self) -> int:
        return self._head.features(self.config.hidden_size)

    @property
    def max_seq_length(self) -> int:
        return self._max_length

    @max_seq_length.setter
    def max_seq_length(self, max_length: int) -> None:
        if not 4 <= max_length <= self.config.max_positions:
            raise ValueError(f"{max_length=}; expected 4 to {self.config.max_positions}, the model's positions")
        self._max_length = max_length
        self._tokenizer.enable_truncation(max_length)

    max_length = max_seq_length

    def predict(
        self,
        pairs: Pair | Iterable[Pair] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[np.ndarray], np.ndarray] | None = None,
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        *,
        inputs: Pair | Iterable[Pair] | None = None,
    ) -> Any:
        """Computes the scores of pairs of sentences.

        Args:
          pairs: a pair of two str, or many.
          prompt_name, prompt: as in `Encoder.encode`, before the first sentence of each pair.
          batch_size, show_progress_bar: as in `Encoder.encode`.
          activation_fn: applied to scores, (number of pairs, num_labels) float32, in place of the model's own.
          apply_softmax: whether the scores of a pair that has several are made to sum to 1.
          convert_to_numpy, convert_to_tensor: as in `Encoder.encode`.
          inputs: what sentence-transformers calls `pairs` since version 6, in place of it.

        Returns:
          float32 (number of pairs,) where a pair has one score, else (number of pairs, num_labels); without the
          first axis for a single pair.

        Raises:
          TypeError: a pair is not one of two str.
          ValueError: `batch_size` is below 1, there is no such prompt, or a sentence is no valid Unicode.
        """
        given: list[Any] = list(checks.either("pairs", pairs, inputs, "pairs of str"))
        single = len(given) == 2 and all(isinstance(sentence, str) for sentence in given)
        checked = (_checked(pair, i) for i, pair in enumerate([given] if single else given))
        name = self.default_prompt_name if prompt_name is None else prompt_name
        before = checks.find_prompt(self.prompts, name, prompt)
        texts: list[Any] = [(before + first, second) for first, second in checked]
        budget = packing.budget(self._programs.platform)
        if batch_size is not None:
            budget = checks.check_count("batch_size", batch_size) * self._max_length
        scores = np.empty((len(texts), self.num_labels), np.float32)
        show = checks.shows(show_progress_bar, len(texts) >= SENTENCES_WORTH_A_BAR)
        with checks.progress("pairs", len(texts), show) as advance:
            for rows in pipeline.run(
                pipeline.chunks(texts, pipeline.CHUNK),
                self._tokenize,
                [self._programs.of(self._head)],
                width=self.num_labels,
                limit=self._max_length,
                budget=budget,
                out=scores,
            ):
                advance(len(rows))
        scores = (activation_fn or _ACTIVATIONS[self._activation])(scores)
        if self.num_labels == 1:
            scores = scores[:, 0]
        elif apply_softmax:
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        result: Any = scores
        if convert_to_tensor or not convert_to_numpy:
            result = jnp.asarray(scores) if convert_to_tensor else list(jnp.asarray(scores))
        return result[0] if single else result

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Sorts documents by their score with a query, the best first.

        Args:
          top_k: how many are returned; all when None.
          return_documents: whether "text", the document, is returned too.
          **options: of `predict`.

        Returns:
          A dict each: "corpus_id", the index in `documents`, and "score".

        Raises:
          ValueError: the model has more than one score for a pair; and as `predict`.
        """
        if self.num_labels != 1:
            raise ValueError(f"the model has {self.num_labels} scores for a pair; expected one to rank by")
        scores = self.predict([(query, document) for document in documents], **options)
        best = np.argsort(-scores, kind="stable")[:top_k]
        texts = [{"text": documents[i]} if return_documents else {} for i in best]
        return [
            {"corpus_id": int(i), "score": float(scores[i])} | text for i, text in zip(best, texts, strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """As that of `Encoder`."""
        params, head_params = self._programs.params
        parts = functools.partial(
            type(self),
            params,
            self._tokenizer,
            config=self.config,
            head=self._head,
            head_params=head_params,
            activation=self._activation,
            max_length=self._max_length,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            **self._given,
        )
        return parts, ()

    def __repr__(self) -> str:
        return f"CrossEncoder({self.config}, {self._head}, max_seq_length={self._max_length})"

    def _tokenize(self, pairs: list[Any]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch(pairs)
        if getattr(self.config, "num_token_types", 0) < 2:
            return [encoding.ids for encoding in encodings]
        # The type of a token travels with its id; `_with_token_types` takes them apart.
        size = self.config.vocab_size
        return [
            [token + size * kind for token, kind in zip(encoding.ids, encoding.type_ids, strict=True)]
            for encoding in encodings
        ]


@functools.cache
def _with_token_types(forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The hidden states of `forward`, of token ids that hold types; the same function for the same `forward`."""

    @functools.wraps(forward)
    def encode(
        params: Params, ids: jax.Array, mask: jax.Array | None, *, config: Any, **options: Any
    ) -> jax.Array:
        if getattr(config, "num_token_types", 0) >= 2:
            options["token_type_ids"] = ids // config.vocab_size
        return forward(params, ids % config.vocab_size, mask, config=config, **options)

    encode.__qualname__ += ".with_token_types"  # programs are kept by this name
    return encode


def _checked(pair: Pair, index: int) -> tuple[str, str]:
    if isinstance(pair, str) or len(pair) != 2:
        raise TypeError(f"pairs[{index}] is {pair!r}; expected two str")
    first, second = (checks.check_sentence(sentence, f"pairs[{index}]") for sentence in pair)
    return first, second
