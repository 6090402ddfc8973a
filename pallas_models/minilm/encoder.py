"""Sentences to embeddings: tokenizer, pipeline and the MiniLM encoder in one object.

Tokenizing follows [sentence-transformers](https://sbert.net), so results agree with it.
"""

import collections.abc
import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_models import compilation_cache as caches
from pallas_models.minilm import model, packing, pipeline
from pallas_models.minilm.model import MiniLMConfig, Params
from pallas_models.minilm.programs import Programs
from pallas_models.ops import Implementation
from pallas_models.ops._dispatch import check_implementation

if TYPE_CHECKING:
    import tokenizers

CompilationCache = str | os.PathLike[str] | Literal[True]

# With `show_progress_bar=None`, shorter lists show no bar.
_SENTENCES_WORTH_A_BAR = 2 * pipeline.CHUNK
# The most tokens of a batch, where `batch_size` does not say: enough to fill a GPU, few enough for a CPU's caches.
_BUDGET = {"gpu": 65536, "tpu": 65536, "cpu": 1024}


class Encoder:
    """Turns sentences into embeddings.

    ```
    encoder = Encoder.from_pretrained()
    a, b = encoder.encode(["A man is playing a guitar.", "Someone plays an instrument."])
    similarity = a @ b
    ```

    Attributes:
      params: the parameters, as `weights.load_minilm` returns them.
      config: the model's sizes.
      max_length: tokens kept of a sentence, [CLS] and [SEP] included; what is beyond is cut off. Can be set.
      implementation: that of the ops, or None for the best available.
    """

    __slots__ = ("_config", "_implementation", "_max_length", "_params", "_programs", "_tokenizer")

    def __init__(
        self,
        params: Params,
        tokenizer: "tokenizers.Tokenizer",
        *,
        config: MiniLMConfig = MiniLMConfig(),
        max_length: int | None = None,
        implementation: Implementation | None = None,
        compilation_cache: CompilationCache | None = None,
        forward: Callable[..., jax.Array] = model.encode,
    ):
        """Makes an encoder from its parts; `from_pretrained` reads them from files.

        Args:
          params, config: of the model.
          tokenizer: its tokenizer, of which a copy is used.
          max_length, implementation, compilation_cache: as in `from_pretrained`.
          forward: computes the hidden states, called as `minilm.encode` is.

        Raises:
          ValueError: `max_length` is not in [2, config.max_positions], the tokenizer knows ids that the
            model does not, or the implementation is unknown.
        """
        implementation = check_implementation(implementation) or None
        if (size := tokenizer.get_vocab_size()) > config.vocab_size:
            raise ValueError(f"the tokenizer has {size} ids, the model only {config.vocab_size}")
        self._params, self._config, self._implementation = params, config, implementation
        # A copy, as the caller's tokenizer keeps its own limits. Padding is done here, to shapes that repeat.
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self.max_length = config.max_positions if max_length is None else max_length
        folder = caches.default_folder() if compilation_cache is True else compilation_cache
        self._programs = Programs(
            params, forward, config, implementation, None if folder is None else Path(folder)
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str] = "all-MiniLM-L6-v2",
        *,
        dtype: DTypeLike = jnp.float32,
        max_length: int | None = None,
        implementation: Implementation | None = None,
        compilation_cache: CompilationCache | None = None,
    ) -> "Encoder":
        """Loads weights and tokenizer.

        Args:
          path: what `weights.load_minilm` takes, with tokenizer.json in the same folder: a folder of
            PyTorch's or of `python -m weights minilm`, a hub id, or `"all-MiniLM-L6-v2"`.
          dtype: float16, bfloat16 or float32, that of parameters and computation.
          max_length: tokens kept of a sentence. When None, as in sentence-transformers, `max_seq_length` of
            sentence_bert_config.json (256 for all-MiniLM-L6-v2); without that file the model's positions.
            A limit in tokenizer.json itself is not used.
          implementation: that of the ops, or None for the best available.
          compilation_cache: a folder in which compiled programs are kept for other processes, or True for
            `$XDG_CACHE_HOME/pallas_models/compilation`. Compiled programs are code: the folder must be one that
            nobody else can write to. None keeps none. JAX's own persistent cache takes its place where it is on;
            no setting of JAX is changed.

        Raises:
          FileNotFoundError: the model or its tokenizer.json was not found.
          CheckpointError: a file is corrupt, or of a model that is not run here.
          ImportError: another module named `weights` hides the package that reads checkpoints.
          NotImplementedError: the model pools in another way than by the mean.
          TypeError: `dtype` is none of the above.
          ValueError: an argument does not fit the model.
        """
        _check_weights_package()
        from weights import hub, loading, text
        from weights.checkpoint import CheckpointError

        found = hub.resolve(path)
        folder = found if found.is_dir() else found.parent
        text.check_pooling(folder)
        family = loading.find_family(found)
        if family.encode is None:
            raise CheckpointError(f"{found} holds a model of {family.name}, which embeds no sentences")
        config = loading.load_config(family, found)
        if max_length is None and (stated := text.stated_max_length(folder)) is not None:
            max_length = min(stated, config.max_positions)
        return cls(
            loading.load(family, found, dtype),
            text.read_tokenizer(folder),
            config=config,
            max_length=max_length,
            implementation=implementation,
            compilation_cache=compilation_cache,
            forward=family.encode,
        )

    @property
    def params(self) -> Params:
        return self._params

    @property
    def config(self) -> MiniLMConfig:
        return self._config

    @property
    def implementation(self) -> Implementation | None:
        return self._implementation

    @property
    def max_length(self) -> int:
        return self._max_length

    @max_length.setter
    def max_length(self, max_length: int) -> None:
        if not 2 <= max_length <= self.config.max_positions:
            raise ValueError(f"{max_length=}; expected 2 to {self.config.max_positions}, the model's positions")
        self._max_length = max_length
        self._tokenizer.enable_truncation(max_length)

    def encode(
        self,
        sentences: str | Iterable[str],
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        normalize_embeddings: bool = True,
    ) -> np.ndarray:
        """Computes the embeddings of sentences.

        Sentences share rows of batches without padding to each other's length (`pallas_models.minilm.packing`), so
        that a list of any lengths takes five programs at most. The next sentences are tokenized while the device
        computes.

        Args:
          sentences: one sentence or many. An empty one is embedded as [CLS] [SEP].
          batch_size: bounds memory: a batch has no more tokens than so many sentences of `max_length` have, and no
            less than 1024. When None, what suits the device.
          show_progress_bar: None shows one for long work on a terminal.
          normalize_embeddings: whether embeddings have unit L2 norm, as all-MiniLM-L6-v2 defines them.

        Returns:
          float32, (hidden_size,) for a single string, else (number of sentences, hidden_size), rows in the
          order of the sentences; (0, hidden_size) for none.

        Raises:
          TypeError: a sentence is not a string, or sentences are a mapping or a table.
          ValueError: `batch_size` is below 1, or a sentence is no valid Unicode.
        """
        budget = self._budget(batch_size)
        if isinstance(sentences, str):
            _check_unicode(sentences, "sentences")
            return self._encode_one(sentences, normalize_embeddings)
        sentences = list(_checked(sentences))
        if len(sentences) == 1:
            return self._encode_one(sentences[0], normalize_embeddings)[None]
        embeddings = np.empty((len(sentences), self.config.hidden_size), np.float32)
        done = 0
        show = _shows(show_progress_bar, len(sentences) >= _SENTENCES_WORTH_A_BAR)
        with _progress("sentences", len(sentences), show) as advance:
            for rows in self._rows(sentences, budget, normalize_embeddings):
                embeddings[done : done + len(rows)] = rows
                done += len(rows)
                advance(len(rows))
        return embeddings

    def encode_iter(
        self, sentences: Iterable[str], *, batch_size: int | None = None, normalize_embeddings: bool = True
    ) -> Iterator[np.ndarray]:
        """Computes the embeddings of sentences as they come, in memory that does not grow with their number.

        Args:
          sentences: any iterable, read a few chunks ahead of what is yielded.
          batch_size, normalize_embeddings: as in `encode`.

        Yields:
          float32 (sentences of a chunk, hidden_size), chunk by chunk in the order of the sentences.

        Raises:
          TypeError: sentences are a string, a mapping or a table; later, a sentence is not a string.
          ValueError: `batch_size` is below 1; later, a sentence is no valid Unicode.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences is a str; expected an iterable of str")
        return self._rows(_checked(sentences), self._budget(batch_size), normalize_embeddings)

    def warm_up(
        self,
        sentences: Iterable[str] | None = None,
        *,
        lengths: Iterable[int] | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = True,
    ) -> int:
        """Compiles ahead, side by side, what `encode` will need.

        Args:
          sentences: a list that `encode` will be given.
          lengths: numbers of tokens that sentences will have: the programs for lists of them, and for one
            sentence alone. When neither is given, all lengths up to `max_length`.
          batch_size, normalize_embeddings: as `encode` will be given.
          show_progress_bar: None shows one on a terminal.

        Returns:
          How many programs there are now that were not before.

        Raises:
          TypeError: a sentence is not a string.
          ValueError: `batch_size` or a length is below 1.
        """
        budget, limit = self._budget(batch_size), self._max_length
        shapes: dict[tuple[int, ...], None] = {}
        if sentences is None and lengths is None:
            lengths = range(limit, 0, -1)
        for length in lengths or ():
            if length < 1:
                raise ValueError(f"lengths holds {length}; expected numbers of tokens, at least 1")
            by_row_length = packing.shapes(limit, budget)
            batches = by_row_length[next(row for row in by_row_length if min(length, limit) <= row)]
            shapes |= {(2, *shape): None for shape in batches}
            shapes |= {(1, packing.padded_length(length, limit)): None}
        if sentences is not None:
            for chunk in pipeline.chunks(_checked(sentences), pipeline.CHUNK):
                tokens, counts = pipeline.tokens(self._tokenize, chunk)
                shapes |= {b.tokens.shape: None for b in packing.pack(tokens, counts, limit, budget)}
        show = _shows(show_progress_bar, len(shapes) > 1)
        with _progress("programs", len(shapes), show) as advance:
            started = self._programs.prepare(shapes, normalize_embeddings)
            advance(len(shapes) - len(started))
            for program in started:
                program.result()
                advance(1)
        return len(started)

    def _encode_one(self, sentence: str, normalize: bool) -> np.ndarray:
        ids = self._tokenizer.encode(sentence).ids
        tokens = np.full((1, packing.padded_length(len(ids), self._max_length)), -1, np.int32)
        tokens[0, : len(ids)] = ids
        return np.array(self._programs(tokens, normalize))[0]

    def _rows(self, sentences: Iterable[str], budget: int, normalize: bool) -> Iterator[np.ndarray]:
        return pipeline.run(
            sentences,
            self._tokenize,
            self._programs.of(normalize),
            width=self.config.hidden_size,
            limit=self._max_length,
            budget=budget,
        )

    def _tokenize(self, sentences: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(sentences)]

    def _budget(self, batch_size: int | None) -> int:
        """The most tokens of a batch."""
        if batch_size is None:
            return _BUDGET[self._programs.platform]
        if batch_size < 1:
            raise ValueError(f"{batch_size=}; expected at least 1")
        return batch_size * self._max_length


def _checked(sentences: Iterable[str]) -> Iterator[str]:
    """The sentences; TypeError and ValueError where one is no text."""
    if isinstance(sentences, collections.abc.Mapping) or hasattr(sentences, "columns"):
        raise TypeError(f"sentences is a {type(sentences).__name__}; expected a str or an iterable of str")
    return map(_check_sentence, sentences, itertools.count())


def _check_sentence(sentence: str, index: int) -> str:
    if not isinstance(sentence, str):
        raise TypeError(f"sentences[{index}] is of type {type(sentence).__name__}; expected str")
    if not sentence.isascii():
        _check_unicode(sentence, f"sentences[{index}]")
    return sentence


def _check_unicode(sentence: str, name: str) -> None:
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        found = ascii(sentence[error.start])
        raise ValueError(
            f"{name} holds {found} at {error.start}, half of a surrogate pair; expected valid Unicode"
        ) from error


def _shows(asked: bool | None, long: bool) -> bool:
    return long and sys.stderr.isatty() if asked is None else asked


@contextlib.contextmanager
def _progress(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar, if one is to be shown, for as long as the context lasts; what it gives advances it."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def _check_weights_package() -> None:
    """ImportError where `import weights` would find another module than the one beside this package."""
    ours = Path(__file__).parents[2] / "weights" / "__init__.py"
    spec = importlib.util.find_spec("weights")
    found = spec.origin if spec else None
    if found is None or not Path(found).exists() or not os.path.samefile(found, ours):
        raise ImportError(
            f"{found or 'nothing'} is what `import weights` finds, not {ours}, the package beside pallas_models "
            "that reads checkpoints; rename the file that is in its way, or take its folder off sys.path",
            name="weights",
            path=found,
        )
