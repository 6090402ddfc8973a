"""The encoder of a corpus. Its model is loaded when the first sentence comes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from pallas_models._implementation import Implementation, check_implementation
from pallas_models.sentence import pipeline

if TYPE_CHECKING:
    from pallas_models.sentence.encoder import Encoder


class EmbedderOptions(TypedDict, total=False):
    """The fields of an `Embedder`, as named arguments."""

    model: str
    compute_dtype: str | None
    implementation: Implementation | None
    compilation_cache: Path | None
    batch_size: int | None
    prompt: str | None
    prompt_name: str | None
    truncate_dim: int | None
    devices: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Embedder:
    """Turns sentences into embeddings; it can be pickled and sent to another machine.

    Attributes:
      model: the path or name that `Encoder.from_pretrained` takes.
      compute_dtype: float16, bfloat16 or float32, of the parameters and the computation; None as in
        `Encoder.from_pretrained`.
      implementation, compilation_cache: as in `Encoder.from_pretrained`.
      batch_size, prompt, prompt_name: as in `Encoder.encode_iter`.
      truncate_dim: the number of values of an embedding that are kept, the first ones, scaled to unit norm; None
        for all.
      devices: as in `Encoder.from_pretrained`, by their names.
    """

    model: str = "all-MiniLM-L6-v2"
    compute_dtype: str | None = None
    implementation: Implementation | None = None
    compilation_cache: Path | None = None
    batch_size: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    truncate_dim: int | None = None
    devices: tuple[str, ...] | None = None

    def load(self) -> "Encoder":
        """Returns the encoder; the first call loads it."""
        return self._encoder

    @functools.cached_property
    def _encoder(self) -> "Encoder":
        from pallas_models.sentence.encoder import Encoder

        encoder = Encoder.from_pretrained(
            self.model,
            dtype=self.compute_dtype,
            implementation=self.implementation,
            compilation_cache=self.compilation_cache,
            devices=self.devices,
        )
        dimension = encoder.get_sentence_embedding_dimension()
        if self.truncate_dim is not None and not 1 <= self.truncate_dim <= dimension:
            raise ValueError(f"truncate_dim={self.truncate_dim}; expected 1 to {dimension}")
        return encoder

    @property
    def settings(self) -> dict[str, object]:
        """The settings that decide the values of embeddings, apart from the model, as JSON gives them back."""
        from weights import hub, loading

        return {
            "compute_dtype": self.compute_dtype or loading.default_dtype(hub.resolve(self.model)),
            "implementation": list(check_implementation(self.implementation)),
            "batch_size": self.batch_size,
            "prompt": self.prompt,
            "prompt_name": self.prompt_name,
            "truncate_dim": self.truncate_dim,
        }

    @property
    def dimension(self) -> int:
        """The number of values of an embedding; the model is loaded to find it."""
        return self.truncate_dim or self.load().get_sentence_embedding_dimension()

    def __call__(self, chunks: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """Yields (n, dimension) float32 for each list of n sentences, independently of other lists."""
        chunks = iter(chunks)
        for first in chunks:  # without any, no model is loaded
            yield from self.load().encode_chunks(
                itertools.chain((first,), chunks),
                batch_size=self.batch_size,
                prompt=self.prompt,
                prompt_name=self.prompt_name,
                truncate_dim=self.truncate_dim,
                normalize_embeddings=self.truncate_dim is not None,
            )

    def embed(
        self, sentences: Iterable[str], watch: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    ) -> np.ndarray:
        """Returns (number of sentences, dimension) float32; `watch` is given the rows as they come."""
        rows = map(watch, self(pipeline.chunks(sentences, pipeline.CHUNK)))
        return np.concatenate([np.empty((0, self.dimension), np.float32), *rows])
