"""Scores of pairs of sentences, each pair read together: rerankers, with the values of sentence-transformers."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models._implementation import Implementation
from pallas_models._modules import Params
from pallas_models.sentence import inputs as checks
from pallas_models.sentence import pipeline
from pallas_models.sentence.heads import Head
from pallas_models.sentence.loading import begin_loading
from pallas_models.sentence.programs import Config, Encode
from pallas_models.sentence.text_model import CompilationCache, TextModel, converted

if TYPE_CHECKING:
    import tokenizers

Pair = Sequence[str]
Activation = Callable[[np.ndarray], np.ndarray]


class PredictOptions(TypedDict, total=False):
    """The options of `CrossEncoder.predict` that `rank` takes too."""

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None
    activation_fn: Activation | None
    apply_softmax: bool


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


_ACTIVATIONS: dict[str, Activation] = {
    "identity": lambda x: x,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}


class CrossEncoder(TextModel):
    """Scores pairs of sentences.

    ```
    reranker = minilm.CrossEncoder.from_pretrained("cross-encoder/ms-marco-MiniLM-L6-v2")
    scores = reranker.predict([("how many people live in Berlin?", "Berlin has 3.7 million inhabitants.")])
    ```

    Attributes:
      config: the model's sizes.
      num_labels: scores of a pair.
      max_seq_length: tokens kept of a pair, special ones included; the longer sentence is cut first. Can be set.
        `max_length` is another name for it.
      prompts: texts that are put before the first sentence of a pair, by name.
      default_prompt_name: of the prompt where none is asked for, or None.
    """

    __slots__ = ("_activation",)
    _shortest = 4

    def __init__(
        self,
        params: Params,
        tokenizer: "tokenizers.Tokenizer",
        *,
        config: Config,
        forward: Encode,
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
          activation: of scores: "sigmoid", "tanh" or "identity". None is the first for one score a pair, and the
            last for several.
        """
        self._activation = activation or ("sigmoid" if head.features(config.hidden_size) == 1 else "identity")
        if self._activation not in _ACTIVATIONS:
            raise ValueError(f"{activation=} is unknown; expected one of {tuple(_ACTIVATIONS)}")
        super().__init__(
            params,
            tokenizer,
            config=config,
            forward=forward,
            head=head,
            head_params=head_params,
            max_length=max_length,
            prompts=prompts or {},
            default_prompt_name=default_prompt_name,
            implementation=implementation,
            compilation_cache=compilation_cache,
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
    ) -> Self:
        """Loads weights and tokenizer of a classifier, with arguments and errors as `Encoder.from_pretrained`."""
        begin_loading()
        from pallas_models.sentence import classifiers, folders
        from weights import hub

        folder = hub.resolve(path)
        described = folders.describe_pairs(folder)
        loaded = classifiers.load_classifier(folder, dtype=dtype)
        return cls(
            loaded.params,
            described.read_tokenizer(),
            config=loaded.config,
            forward=loaded.encode,
            head=loaded.head,
            head_params=loaded.head_params,
            activation=described.activation,
            max_length=described.limit(loaded.config.max_positions) if max_length is None else max_length,
            prompts=described.prompts,
            default_prompt_name=described.default_prompt_name,
            implementation=implementation,
            compilation_cache=compilation_cache,
        )

    @property
    def num_labels(self) -> int:
        return self._head.features(self._config.hidden_size)

    def predict(
        self,
        pairs: Pair | Iterable[Pair] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
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
          activation_fn: of scores, (number of pairs, num_labels) float32, in place of the model's own.
          apply_softmax: whether the scores of a pair, where it has several, are made to sum to 1.
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
        before = self._prompt(prompt_name, prompt)
        texts = [(before + first, second) for first, second in checked]
        (programs,) = self._programs
        budget = self._budget(batch_size, programs.platform)
        scores = np.empty((len(texts), self.num_labels), np.float32)
        show = checks.shows(show_progress_bar, len(texts) >= checks.TEXTS_WORTH_A_BAR)
        with checks.progress("pairs", len(texts), show) as advance:
            for rows in pipeline.run(
                pipeline.chunks(texts, pipeline.CHUNK),
                self._tokenize,
                [programs.of(self._head)],
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
        return converted(scores, to_numpy=convert_to_numpy, to_tensor=convert_to_tensor, single=single)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Unpack[PredictOptions],
    ) -> list[dict[str, Any]]:
        """Sorts documents by their score with a query, the best first.

        Args:
          top_k: how many are returned; all when None.
          return_documents: whether "text", the document, is returned too.
          **options: of `predict`.

        Returns:
          A dict for each document: "corpus_id", its index in `documents`, and "score".

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

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """Pickled or copied, a cross-encoder is made anew of its parts, where JAX puts arrays."""
        made = functools.partial(
            type(self), self._params, self._tokenizer, activation=self._activation, **self._parts()
        )
        return made, ()

    def __repr__(self) -> str:
        return f"CrossEncoder({self._config}, {self._head}, max_seq_length={self._max_length})"

    def _encode(self) -> Encode:
        return _with_token_types(self._forward)

    def _tokenize(self, pairs: list[tuple[str, str]]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch(pairs)
        if getattr(self._config, "num_token_types", 0) < 2:
            return [encoding.ids for encoding in encodings]
        # The type of a token travels with its id; `_with_token_types` takes them apart.
        size = self._config.vocab_size
        return [
            [token + size * kind for token, kind in zip(encoding.ids, encoding.type_ids, strict=True)]
            for encoding in encodings
        ]


@functools.cache
def _with_token_types(forward: Encode) -> Encode:
    """Makes `forward` take token ids that hold types; the same function for the same `forward`."""

    @functools.wraps(forward)
    def encode(
        params: Params,
        ids: jax.Array,
        mask: jax.Array | None,
        *,
        segment_ids: jax.Array | None = None,
        config: Config,
        implementation: Implementation | None,
    ) -> jax.Array:
        call = functools.partial(forward, segment_ids=segment_ids, config=config, implementation=implementation)
        if getattr(config, "num_token_types", 0) >= 2:
            call = functools.partial(call, token_type_ids=ids // config.vocab_size)
        return call(params, ids % config.vocab_size, mask)

    encode.__qualname__ += ".with_token_types"  # programs are kept by this name
    return encode


def _checked(pair: Pair, index: int) -> tuple[str, str]:
    if isinstance(pair, str) or len(pair) != 2:
        raise TypeError(f"pairs[{index}] is {pair!r}; expected two str")
    first, second = (checks.check_sentence(sentence, f"pairs[{index}]") for sentence in pair)
    return first, second
