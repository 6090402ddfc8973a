"""One call of an `Encoder`: its settings, and the steps that compute it."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from pallas_models.sentence import inputs, packing, pipeline, tokenizing
from pallas_models.sentence.devices import Device
from pallas_models.sentence.heads import Head
from pallas_models.sentence.programs import Programs, Shape
from pallas_models.sentence.quantization import Precision

if TYPE_CHECKING:
    import tokenizers


class StreamOptions(TypedDict, total=False):
    """The options of `Encoder.encode_iter`."""

    batch_size: int | None
    prompt_name: str | None
    prompt: str | None
    device: Device | Sequence[Device] | None
    normalize_embeddings: bool
    truncate_dim: int | None


class EncodeOptions(TypedDict, total=False):
    """The options of `Encoder.encode`, apart from prompts."""

    batch_size: int | None
    show_progress_bar: bool | None
    output_value: Literal["sentence_embedding", "token_embeddings"]
    precision: Precision
    convert_to_numpy: bool
    convert_to_tensor: bool
    device: Device | Sequence[Device] | None
    normalize_embeddings: bool
    truncate_dim: int | None
    inputs: str | Iterable[str] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The settings of one call.

    Attributes:
      programs: compute batches in turns, one for each device.
      head: makes embeddings of hidden states.
      width: dimensions that the head gives.
      tokenizer: of the encoder.
      tokenize: gives the token ids of texts, in this process.
      elsewhere: for a number of sentences that come, gives a function that tokenizes in other processes, or None.
      limit: the most tokens of a sentence.
      budget: the most tokens of a batch.
      prompt: the text before each sentence.
      truncate_dim: dimensions kept of an embedding, or None for all.
      normalize: whether embeddings have unit norm after truncation.
    """

    programs: list[Programs]
    head: Head
    width: int
    tokenizer: "tokenizers.Tokenizer"
    tokenize: tokenizing.Tokenize
    elsewhere: Callable[[int], Callable[[list[str]], tokenizing.Tokens] | None]
    limit: int
    budget: int
    prompt: str
    truncate_dim: int | None
    normalize: bool

    def embeddings(self, chunks: list[list[str]], show_progress_bar: bool | None) -> np.ndarray:
        """The embeddings (sentences, D) of all sentences."""
        count = sum(map(len, chunks))
        if count == 1:
            tokens = self.tokenizer.encode(self.prompt + chunks[0][0]).ids  # sooner than a batch of one
            padded = np.full((1, packing.padded_length(len(tokens), self.limit)), -1, np.int32)
            padded[0, : len(tokens)] = tokens
            return self._finish(np.array(self.programs[0](padded, self.head)))
        embeddings = np.empty((count, self.width), np.float32)
        show = inputs.shows(show_progress_bar, count >= inputs.TEXTS_WORTH_A_BAR)
        with inputs.progress("sentences", count, show) as advance:
            for rows in self._rows(chunks, embeddings):
                advance(len(rows))
        return self._finish(embeddings)

    def stream(self, chunks: Iterable[list[str]]) -> Generator[np.ndarray]:
        """Yields the embeddings of chunk after chunk; chunks are read a few ahead."""
        with contextlib.closing(self._rows(chunks)) as parts:
            for rows in parts:
                yield self._finish(rows)

    def hidden_states(self, chunks: list[list[str]]) -> list[np.ndarray]:
        """The hidden states (tokens, hidden_size) of each sentence."""
        states: list[np.ndarray] = []
        for chunk in chunks:
            tokens, lengths = tokenizing.tokens(self.tokenize, self._prompted(chunk))
            of_chunk: list[np.ndarray] = [np.empty(0)] * len(chunk)
            for batch in packing.pack(tokens, lengths, self.limit, self.budget):
                hidden = np.asarray(self.programs[0](batch.tokens, None))
                rows = hidden.reshape(-1, hidden.shape[-1])
                first = np.searchsorted(batch.tokens[1].ravel(), batch.segments)
                for sentence, place in zip(batch.sentences, first, strict=True):
                    of_chunk[sentence] = rows[place : place + lengths[sentence]].copy()
            states += of_chunk
        return states

    def shapes_of_lengths(self, lengths: Iterable[int]) -> list[Shape]:
        """The shapes of batches that lists of sentences of these lengths need, and one such sentence alone."""
        shapes: list[Shape] = []
        by_row_length = packing.shapes(self.limit, self.budget)
        for length in lengths:
            if length < 1:
                raise ValueError(f"lengths holds {length}; expected numbers of tokens, at least 1")
            row_length = next(row for row in by_row_length if min(length, self.limit) <= row)
            shapes += [(2, *shape) for shape in by_row_length[row_length]]
            shapes.append((1, packing.padded_length(length, self.limit)))
        return shapes

    def shapes_of(self, chunks: Iterable[list[str]]) -> list[Shape]:
        """The shapes of the batches of these sentences."""
        shapes: list[Shape] = []
        for chunk in chunks:
            tokens, lengths = tokenizing.tokens(self.tokenize, self._prompted(chunk))
            shapes += [batch.tokens.shape for batch in packing.pack(tokens, lengths, self.limit, self.budget)]
        return shapes

    def compile(self, shapes: Iterable[Shape], show_progress_bar: bool | None) -> int:
        """Compiles the programs of these shapes; returns how many there are now that were not before."""
        distinct = list(dict.fromkeys(shapes))
        total = len(distinct) * len(self.programs)
        show = inputs.shows(show_progress_bar, len(distinct) > 1)
        with inputs.progress("programs", total, show) as advance:
            started = [program for programs in self.programs for program in programs.prepare(distinct, self.head)]
            advance(total - len(started))
            for program in started:
                program.result()
                advance(1)
        return len(started)

    def _rows(self, chunks: Iterable[list[str]], out: np.ndarray | None = None) -> Generator[np.ndarray]:
        begun = None
        if out is not None and isinstance(chunks, list) and len(out) > pipeline.MANY:
            begun = functools.partial(self._prepare_likely, chunks[0][:: max(len(chunks[0]) // 64, 1)])
        return pipeline.run(
            map(self._prompted, chunks),
            self.tokenize,
            [programs.of(self.head) for programs in self.programs],
            width=self.width,
            limit=self.limit,
            budget=self.budget,
            out=out,
            elsewhere=self.elsewhere(0 if out is None else len(out)),
            begun=begun,
        )

    def _prepare_likely(self, sample: list[str]) -> None:
        """Has the program of a long list's full batches compiled while its first chunk is tokenized."""
        lengths = tokenizing.tokens(self.tokenize, self._prompted(sample)).lengths
        row_length, sizes = next(iter(packing.shapes(self.limit, self.budget).items()))
        if 2 * np.count_nonzero(lengths <= row_length) >= len(lengths):
            for programs in self.programs:
                programs.prepare([(2, *sizes[-1])], self.head)

    def _prompted(self, chunk: list[str]) -> list[str]:
        return [self.prompt + sentence for sentence in chunk] if self.prompt else chunk

    def _finish(self, rows: np.ndarray) -> np.ndarray:
        """Truncates embeddings, here and not on the device, which would need other programs for it."""
        if self.truncate_dim is None:
            return rows
        rows = rows[:, : self.truncate_dim].copy()  # so that the whole rows can be freed
        if self.normalize:
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return rows
