"""Sentences to embeddings: an encoder with the methods of [sentence-transformers](https://sbert.net)."""

import functools
import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, Unpack

import jax.numpy as jnp
import numpy as np

from pallas_models.sentence import inputs as checks
from pallas_models.sentence import pipeline
from pallas_models.sentence.devices import Device
from pallas_models.sentence.embedding_model import EmbeddingModel
from pallas_models.sentence.quantization import Precision, check_precision, quantize_embeddings
from pallas_models.sentence.request import EncodeOptions, Request, StreamOptions
from pallas_models.sentence.text_model import converted


class Encoder(EmbeddingModel):
    """Turns sentences into embeddings, with the methods and the values of sentence-transformers.

    ```
    encoder = minilm.Encoder.from_pretrained()
    a, b = encoder.encode(["A man is playing a guitar.", "Someone plays an instrument."])
    similarity = a @ b
    ```

    It can be pickled, as joblib, Ray and Spark do: with its parameters, and nothing that is compiled.

    Attributes:
      params: the parameters of the model, as `weights.load_minilm` returns them.
      config: the model's sizes.
      dtype: of the matrices; the model computes in it.
      tokenizer: a `tokenizers.Tokenizer`, not to be changed.
      head: pooling, dense layers and normalisation after the model.
      max_seq_length: tokens kept of a sentence, special ones included; the rest is cut off. Can be set.
        `max_length` is another name for it.
      implementation: of the ops, or None for the best available.
      prompts (Mapping[str, str]): texts that are put before sentences, by name; "query" and "document" are
        always there.
      default_prompt_name (str | None): of the prompt where none is asked for, or None.
      similarity_fn_name: the measure of `similarity`: "cosine", "dot", "euclidean" or "manhattan".
      truncate_dim: dimensions kept of an embedding where a call does not say, or None for all.
    """

    __slots__ = ()

    def encode(
        self,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding", "token_embeddings"] = "sentence_embedding",
        precision: Precision = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Device | Sequence[Device] | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        *,
        inputs: str | Iterable[str] | None = None,
    ) -> Any:
        """Computes the embeddings of sentences.

        Sentences share rows of batches without padding to each other's length (`sentence.packing`), so that a list
        of any lengths takes five programs at most. The next sentences are tokenized while the device computes.

        Args:
          sentences: one sentence or many: a list, an array of NumPy or pyarrow, a column of pandas, or another
            iterable. An empty one is embedded as its special tokens, `[CLS] [SEP]`.
          prompt_name: the name of the prompt that is put before each sentence; the default prompt when None.
          prompt: the text to put before each sentence, in place of a named prompt.
          batch_size: bounds memory: a batch has no more tokens than so many sentences of `max_length` have. When
            None, as many as suit the device.
          show_progress_bar: None shows a bar for long work on a terminal.
          output_value: "token_embeddings" asks for the hidden states of all tokens, also of special tokens and of
            the prompt.
          precision: "float32", or "int8", "uint8", "binary", "ubinary" as in `quantization.quantize_embeddings`,
            with ranges taken from these sentences. One sentence spans no range, and is refused.
          convert_to_numpy: whether the result is one NumPy array; a list of JAX arrays otherwise.
          convert_to_tensor: whether it is one JAX array instead.
          device: computes, `"cpu"`, `"cuda:1"` or one of `jax.devices()`; several take turns. The parameters are
            copied there once. None is all devices of the encoder.
          normalize_embeddings: whether embeddings have unit L2 norm also where the model's own modules do not see
            to that, or after truncation.
          truncate_dim: dimensions kept, the first ones; the attribute of that name when None.
          inputs: what sentence-transformers calls `sentences` since version 6, in place of it.

        Returns:
          (D,) for a single string, else (number of sentences, D), float32 unless `precision` says otherwise, rows
          in the order of the sentences; (0, D) for none. Token embeddings are a list of float32
          (tokens, hidden_size), or one for a single string.

        Raises:
          TypeError: a sentence is not a string, sentences are a mapping or a table, `inputs` is given beside them,
            or a number is no integer.
          ValueError: `batch_size` or `truncate_dim` is below 1, a name is unknown, there is no such device, or a
            sentence is no valid Unicode.
        """
        sentences = checks.either("sentences", sentences, inputs)
        request = self._request(
            batch_size=batch_size,
            prompt_name=prompt_name,
            prompt=prompt,
            device=device,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
        )
        check_precision(precision)
        single = isinstance(sentences, str)
        given = [checks.check_sentence(sentences, "sentences")] if isinstance(sentences, str) else sentences
        chunks = pipeline.joined(list(checks.checked(given)))
        if output_value != "sentence_embedding":
            if output_value != "token_embeddings" or precision != "float32":
                raise ValueError(
                    f"{output_value=} and {precision=}; expected 'sentence_embedding', "
                    "or 'token_embeddings' in float32"
                )
            states: list[Any] = request.hidden_states(chunks)
            if convert_to_tensor or not convert_to_numpy:
                states = list(map(jnp.asarray, states))
            return states[0] if single else states
        embeddings = request.embeddings(chunks, show_progress_bar)
        if precision != "float32":
            embeddings = quantize_embeddings(embeddings, precision)
        return converted(embeddings, to_numpy=convert_to_numpy, to_tensor=convert_to_tensor, single=single)

    def encode_query(
        self,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *args: Any,
        **options: Unpack[EncodeOptions],
    ) -> Any:
        """Computes `encode`, whose other arguments it takes too, with the prompt "query" where none is given."""
        return self.encode(sentences, self._first_prompt(prompt_name, "query"), prompt, *args, **options)

    def encode_document(
        self,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *args: Any,
        **options: Unpack[EncodeOptions],
    ) -> Any:
        """Computes `encode` as `encode_query` does, with the prompt "document", "passage" or "corpus"."""
        name = self._first_prompt(prompt_name, "document", "passage", "corpus")
        return self.encode(sentences, name, prompt, *args, **options)

    def encode_iter(
        self,
        sentences: Iterable[str],
        *,
        batch_size: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        device: Device | Sequence[Device] | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Generator[np.ndarray]:
        """Computes the embeddings of sentences as they come, in memory that does not grow with their number.

        Args:
          sentences: any iterable; it is read a few chunks ahead.
          batch_size, prompt_name, prompt, device, normalize_embeddings, truncate_dim: as in `encode`.

        Yields:
          float32 (sentences of a chunk, D), chunk by chunk in the order of the sentences. `close()` ends the work
          that was begun for sentences that are not wanted any more.

        Raises:
          TypeError, ValueError: as `encode`; about a sentence once it is read.
        """
        request = self._request(
            batch_size=batch_size,
            prompt_name=prompt_name,
            prompt=prompt,
            device=device,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
        )
        return request.stream(checks.checked(sentences))

    def encode_chunks(
        self, chunks: Iterable[list[str]], **options: Unpack[StreamOptions]
    ) -> Generator[np.ndarray]:
        """Computes the embeddings of lists of sentences as they come, each list independently of the others.

        Args:
          chunks: any iterable of lists, read a few lists ahead. Lists of 16,384 sentences keep a device busy.
          options: of `encode_iter`.

        Yields:
          float32 (sentences of the list, D) for each list.

        Raises:
          TypeError, ValueError: as `encode`; about a sentence once it is read.
        """
        return self._request(**options).stream(checks.checked_chunks(chunks))

    def tokenize(self, texts: Iterable[str]) -> dict[str, np.ndarray]:
        """The tokens of texts: `input_ids` and `attention_mask`, (texts, longest) int32, 0 where there is none."""
        ids = self._tokenize(list(itertools.chain.from_iterable(checks.checked(texts, "texts"))))
        mask = np.arange(max(map(len, ids), default=0)) < np.array([len(row) for row in ids])[:, None]
        padded = np.zeros(mask.shape, np.int32)
        padded[mask] = list(itertools.chain.from_iterable(ids))
        return {"input_ids": padded, "attention_mask": mask.astype(np.int32)}

    def warm_up(
        self,
        sentences: Iterable[str] | None = None,
        *,
        lengths: Iterable[int] | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
    ) -> int:
        """Compiles ahead, side by side, the programs that `encode` will need.

        Args:
          sentences: a list that `encode` will be given.
          lengths: numbers of tokens that sentences will have: the programs for lists of them, and for one
            sentence alone. When neither is given, all lengths up to `max_length`.
          batch_size, normalize_embeddings: as `encode` will be given.
          show_progress_bar: None shows a bar on a terminal.

        Returns:
          How many programs there are now that were not before.

        Raises:
          TypeError: a sentence is not a string.
          ValueError: `batch_size` or a length is below 1.
        """
        request = self._request(batch_size=batch_size, normalize_embeddings=normalize_embeddings)
        if sentences is None and lengths is None:
            lengths = range(self._max_length, 0, -1)
        shapes = request.shapes_of_lengths(lengths or ())
        if sentences is not None:
            shapes += request.shapes_of(checks.checked(sentences))
        return request.compile(shapes, show_progress_bar)

    def _request(
        self,
        *,
        batch_size: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        device: Device | Sequence[Device] | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Request:
        truncate_dim = self.truncate_dim if truncate_dim is None else truncate_dim
        if truncate_dim is not None:
            checks.check_count("truncate_dim", truncate_dim)
        programs = self._programs_on(device)
        return Request(
            programs=programs,
            head=self._head.normalized() if normalize_embeddings and truncate_dim is None else self._head,
            width=self._head.features(self._config.hidden_size),
            tokenizer=self._tokenizer,
            tokenize=self._tokenize,
            elsewhere=functools.partial(self._elsewhere, programs),
            limit=self._max_length,
            budget=self._budget(batch_size, programs[0].platform),
            prompt=self._prompt(prompt_name, prompt),
            truncate_dim=truncate_dim,
            normalize=normalize_embeddings,
        )

    def _first_prompt(self, name: str | None, *names: str) -> str | None:
        return next((name for name in names if name in self.prompts), None) if name is None else name
