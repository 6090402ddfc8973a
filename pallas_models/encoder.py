"""Sentences to embeddings: tokenizer, batching and the MiniLM encoder in one object.

Tokenizing and batching follow [sentence-transformers](https://sbert.net), so results agree with it.
"""

import collections
import functools
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.typing import DTypeLike

import weights
from pallas_models import minilm, ops
from pallas_models.minilm import MiniLMConfig, Params
from pallas_models.ops import Implementation
from weights import hub
from weights.checkpoint import CheckpointError, read_json

# A length is rounded up to a multiple of this, so that a corpus compiles at most max_length / 16 programs
# a batch size. What a sentence longer by up to 15 positions costs is less than a compilation saves.
_LENGTH_STEP = 16
# Batches in flight: enough to keep a device busy while the next are tokenized, few enough that neither
# inputs nor results of a long list of sentences pile up on it.
_BATCHES_IN_FLIGHT = 8
# With `show_progress_bar=None`, shorter work shows no bar.
_BATCHES_WORTH_A_BAR = 32


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
      max_length: tokens kept of a sentence, [CLS] and [SEP] included; what is beyond is cut off.
      implementation: `"triton"`, `"xla"`, `"interpret"`, or None for the best available.
    """

    def __init__(
        self,
        params: Params,
        tokenizer: tokenizers.Tokenizer,
        *,
        config: MiniLMConfig = MiniLMConfig(),
        max_length: int | None = None,
        implementation: Implementation | None = None,
    ):
        """Makes an encoder from its parts; `from_pretrained` reads them from files.

        Raises:
          ValueError: `max_length` is not in [2, config.max_positions], the tokenizer knows ids that the
            model does not, or the implementation is unknown.
        """
        max_length = config.max_positions if max_length is None else max_length
        if not 2 <= max_length <= config.max_positions:
            raise ValueError(f"{max_length=}; expected 2 to {config.max_positions}, the model's positions")
        if implementation is not None and implementation not in ops.IMPLEMENTATIONS:
            raise ValueError(f"{implementation=} is unknown; expected None or one of {ops.IMPLEMENTATIONS}")
        if (size := tokenizer.get_vocab_size()) > config.vocab_size:
            raise ValueError(f"the tokenizer has {size} ids, the model only {config.vocab_size}")
        self.params, self.config = params, config
        self.max_length, self.implementation = max_length, implementation
        # A copy, as the caller's tokenizer keeps its own limits. Padding is done here, to shapes that repeat.
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str] = hub.DEFAULT,
        *,
        dtype: DTypeLike = jnp.float32,
        max_length: int | None = None,
        implementation: Implementation | None = None,
    ) -> "Encoder":
        """Loads weights and tokenizer.

        Args:
          path: what `weights.load_minilm` takes, with tokenizer.json in the same folder: a folder of
            PyTorch's or of `python -m weights minilm`, a hub id, or `"all-MiniLM-L6-v2"`.
          dtype: float16, bfloat16 or float32, that of parameters and computation.
          max_length: tokens kept of a sentence. When None, as in sentence-transformers, `max_seq_length` of
            sentence_bert_config.json (256 for all-MiniLM-L6-v2); without that file the model's positions.
            A limit in tokenizer.json itself is not used.
          implementation: `"triton"`, `"xla"`, `"interpret"`, or None for the best available.

        Raises:
          FileNotFoundError: the model or its tokenizer.json was not found.
          CheckpointError: a file is corrupt, or of a model that is not run here.
          NotImplementedError: the model pools in another way than by the mean.
          TypeError: `dtype` is none of the above.
          ValueError: an argument does not fit the model.
        """
        found = weights.resolve(path)
        folder = found if found.is_dir() else found.parent
        _check_pooling(folder / "1_Pooling" / "config.json")
        config = weights.load_minilm_config(found)
        if max_length is None:
            max_length = _stated_max_length(folder / "sentence_bert_config.json", config)
        return cls(
            weights.load_minilm(found, dtype=dtype),
            _read_tokenizer(folder / "tokenizer.json"),
            config=config,
            max_length=max_length,
            implementation=implementation,
        )

    def encode(
        self,
        sentences: str | Iterable[str],
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        normalize_embeddings: bool = True,
    ) -> np.ndarray:
        """Computes the embeddings of sentences.

        Sentences of similar length share a batch, padded to its longest sentence, rounded up to a multiple
        of 16; a batch that is not full is padded to a power of two with rows that are all mask. So few
        shapes occur, each compiled once. The next batch is tokenized while the device computes.

        Args:
          sentences: one sentence or many. An empty one is embedded as [CLS] [SEP].
          batch_size: sentences computed at a time, at least 1.
          show_progress_bar: None shows one for long work on a terminal.
          normalize_embeddings: whether embeddings have unit L2 norm, as all-MiniLM-L6-v2 defines them.

        Returns:
          float32, (hidden_size,) for a single string, else (number of sentences, hidden_size), rows in the
          order of the sentences; (0, hidden_size) for none.

        Raises:
          TypeError: a sentence is not a string.
          ValueError: `batch_size` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"{batch_size=}; expected at least 1")
        if isinstance(sentences, str):
            return self.encode([sentences], normalize_embeddings=normalize_embeddings)[0]
        sentences = list(sentences)
        for i, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise TypeError(f"sentences[{i}] is of type {type(sentence).__name__}; expected str")

        # Longest first: memory runs out at once if it runs out, and the progress bar errs on the safe side.
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]), reverse=True)
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        embeddings = np.empty((len(sentences), self.config.hidden_size), np.float32)
        pending: collections.deque[tuple[list[int], jax.Array]] = collections.deque()

        def collect() -> None:
            rows, result = pending.popleft()
            embeddings[rows] = np.asarray(result)[: len(rows)]

        for rows in _with_progress(batches, show_progress_bar):
            ids, mask = self._tokenize([sentences[i] for i in rows], batch_size)
            # Returns before the device is done; only batches from a while ago are waited for.
            result = _embed(
                self.params,
                ids,
                mask,
                config=self.config,
                normalize=normalize_embeddings,
                implementation=self.implementation,
            )
            pending.append((rows, result))
            if len(pending) > _BATCHES_IN_FLIGHT:
                collect()
        while pending:
            collect()
        return embeddings

    def _tokenize(self, sentences: list[str], batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and mask, int32 (B, S), of one batch; B and S as `encode` describes."""
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(sentences)]
        rows = min(1 << (len(tokens) - 1).bit_length(), batch_size)
        lengths = np.zeros((rows, 1), np.int32)
        lengths[: len(tokens), 0] = [len(t) for t in tokens]
        length = min(-(-int(lengths.max()) // _LENGTH_STEP) * _LENGTH_STEP, self.max_length)
        mask = np.arange(length) < lengths
        ids = np.zeros((rows, length), np.int32)
        ids[mask] = np.fromiter(itertools.chain.from_iterable(tokens), np.int32, lengths.sum())
        return ids, mask.astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "normalize", "implementation"))
def _embed(
    params: Params,
    ids: jax.Array,
    mask: jax.Array,
    *,
    config: MiniLMConfig,
    normalize: bool,
    implementation: Implementation | None,
) -> jax.Array:
    hidden = minilm.encode(params, ids, mask, config=config, implementation=implementation)
    return ops.mean_pool(hidden, mask, normalize=normalize, implementation=implementation)


def _with_progress(batches: list[list[int]], show: bool | None) -> Iterator[list[int]]:
    if show is None:
        show = len(batches) >= _BATCHES_WORTH_A_BAR and sys.stderr.isatty()
    if not show:
        yield from batches
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("sentences"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=sum(len(batch) for batch in batches))
        for batch in batches:
            yield batch
            progress.advance(task, len(batch))


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: text is tokenized as the model's tokenizer.json says")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error


def _stated_max_length(path: Path, config: MiniLMConfig) -> int | None:
    stated = read_json(path).get("max_seq_length") if path.is_file() else None
    if stated is None:
        return None
    if type(stated) is not int or stated < 2:
        raise CheckpointError(f"{path}: max_seq_length is {stated!r}; expected an integer of at least 2")
    return min(stated, config.max_positions)


def _check_pooling(path: Path) -> None:
    if not path.is_file():
        return
    modes = {key for key, value in read_json(path).items() if key.startswith("pooling_mode_") and value is True}
    if modes != {"pooling_mode_mean_tokens"}:
        raise NotImplementedError(f"{path} asks for {sorted(modes)}; only pooling_mode_mean_tokens is implemented")
