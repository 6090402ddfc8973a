"""The encoder of a corpus, which is loaded when the first sentence comes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pallas_models.sentence import pipeline

if TYPE_CHECKING:
    from pallas_models.sentence.encoder import Encoder


@dataclasses.dataclass(frozen=True)
class Embedder:
    """Turns sentences into embeddings; it can be pickled and sent to where it is to work.

    Attributes:
      model: what `Encoder.from_pretrained` takes.
      compute_dtype: float16, bfloat16 or float32, that of the parameters and the computation; None as in
        `Encoder.from_pretrained`.
      implementation, compilation_cache: as in `Encoder.from_pretrained`.
      batch_size, prompt, prompt_name: as in `Encoder.encode_iter`.
      devices: as in `Encoder.from_pretrained`, by their names.
      truncate_dim: how many of the first values of an embedding to keep, scaled to unit norm; None for all.
    """

    model: str = "all-MiniLM-L6-v2"
    compute_dtype: str | None = None
    implementation: Any = None
    compilation_cache: Path | None = None
    batch_size: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    truncate_dim: int | None = None
    devices: tuple[str, ...] | None = None

    def load(self) -> "Encoder":
        """Returns the encoder, which is loaded in the first call."""
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
    def settings(self) -> dict[str, Any]:
        """What decides the values, apart from the model."""
        from weights import hub, loading

        # As JSON gives them back.
        return {
            "compute_dtype": self.compute_dtype or loading.default_dtype(hub.resolve(self.model)),
            "implementation": list(self.implementation or ()),
            "batch_size": self.batch_size,
            "prompt": self.prompt,
            "prompt_name": self.prompt_name,
            "truncate_dim": self.truncate_dim,
        }

    @property
    def dimension(self) -> int:
        """Values of an embedding; the model is loaded for it."""
        return self.truncate_dim or self.load().get_sentence_embedding_dimension()

    def __call__(self, chunks: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """Yields (n, dimension) float32 for each list of n sentences, which does not depend on other lists."""
        chunks = iter(chunks)
        for first in chunks:  # where there is none, no model is loaded
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
