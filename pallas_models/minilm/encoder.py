"""Sentences to embeddings: tokenizer, pipeline and the MiniLM encoder in one object.

Tokenizing follows [sentence-transformers](https://sbert.net), so results agree with it.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from pallas_models import compilation_cache as caches
from pallas_models import target as targets
from pallas_models._implementation import check_implementation
from pallas_models.minilm import inputs as checks
from pallas_models.minilm import model, packing, pipeline, tokenizing
from pallas_models.minilm import similarity as similarities
from pallas_models.minilm.heads import HEAD, Head
from pallas_models.minilm.model import MiniLMConfig, Params
from pallas_models.minilm.programs import Programs
from pallas_models.minilm.similarity import Similarity
from pallas_models.ops import Implementation
from pallas_models.quantization import Precision, check_precision, quantize_embeddings

if TYPE_CHECKING:
    import tokenizers

Device: TypeAlias = str | jax.Device
CompilationCache = str | os.PathLike[str] | Literal[True]

# With `show_progress_bar=None`, shorter lists show no bar.
SENTENCES_WORTH_A_BAR = 2 * pipeline.CHUNK


class Encoder:
    """Turns sentences into embeddings, with the methods and the values of sentence-transformers.

    ```
    encoder = Encoder.from_pretrained()
    a, b = encoder.encode(["A man is playing a guitar.", "Someone plays an instrument."])
    similarity = a @ b
    ```

    It can be pickled, as joblib, Ray and Spark do: with its parameters, and nothing that is compiled.

    Attributes:
      params: the parameters of the model, as `weights.load_minilm` returns them.
      config: the model's sizes.
      dtype: that of the matrices, and so of the computation.
      tokenizer: a `tokenizers.Tokenizer`, not to be changed.
      head: what follows the model: pooling, dense layers, normalisation.
      max_seq_length: tokens kept of a sentence, special ones included; what is beyond is cut off. Can be set.
        `max_length` is the same.
      implementation: that of the ops, or None for the best available.
      prompts: what is put before sentences, by name; "query" and "document" are always there.
      default_prompt_name: of the prompt where none is asked for, or None.
      similarity_fn_name: the measure of `similarity`: "cosine", "dot", "euclidean" or "manhattan".
      truncate_dim: dimensions kept of an embedding where a call does not say, or None for all.
    """

    __slots__ = (
        "_config",
        "_head",
        "_implementation",
        "_max_length",
        "_params",
        "_places",
        "_processes",
        "_programs",
        "_programs_elsewhere",
        "_similarity_fn_name",
        "_start",
        "_tokenizer",
        "default_prompt_name",
        "prompts",
        "truncate_dim",
    )

    def __init__(
        self,
        params: Params,
        tokenizer: "tokenizers.Tokenizer",
        *,
        config: Any = MiniLMConfig(),
        head: Head = HEAD,
        head_params: Params | None = None,
        max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: Similarity = "cosine",
        truncate_dim: int | None = None,
        implementation: Implementation | None = None,
        compilation_cache: CompilationCache | None = None,
        devices: Sequence[Device] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        forward: Callable[..., jax.Array] = model.encode,
    ):
        """Makes an encoder from its parts; `from_pretrained` reads them from files.

        Args:
          params, config: of the model.
          tokenizer: its tokenizer, of which a copy is used.
          head: what follows the model; by default the mean of the tokens, and unit norm.
          head_params: the parameters of its dense layers, as `heads.apply` takes them.
          max_length, implementation, compilation_cache, devices, mesh: as in `from_pretrained`.
          prompts, default_prompt_name, similarity_fn_name, truncate_dim: the attributes.
          forward: computes the hidden states, called as `minilm.encode` is.

        Raises:
          ValueError: `max_length` is not in [2, config.max_positions], the tokenizer knows ids that the
            model does not, `default_prompt_name` is not one of `prompts`, a name is unknown, or there is no such
            device.
        """
        implementation = check_implementation(implementation) or None
        if (size := tokenizer.get_vocab_size()) > config.vocab_size:
            raise ValueError(f"the tokenizer has {size} ids, the model only {config.vocab_size}")
        self._config, self._implementation, self._head = config, implementation, head
        # A copy, as the caller's tokenizer keeps its own limits. Padding is done here, to shapes that repeat.
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self.max_length = config.max_positions if max_length is None else max_length
        self.prompts = {"query": "", "document": "", **(prompts or {})}
        self.default_prompt_name, self.truncate_dim = default_prompt_name, truncate_dim
        checks.find_prompt(self.prompts, default_prompt_name, None)
        self.similarity_fn_name = similarity_fn_name
        folder = caches.default_folder() if compilation_cache is True else compilation_cache
        self._start = functools.partial(
            Programs,
            encode=forward,
            config=config,
            implementation=implementation,
            folder=None if folder is None else Path(folder),
        )
        self._places = _devices(devices, mesh)
        self._take(params, head_params or {})
        self._processes: tokenizing.Processes | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str] = "all-MiniLM-L6-v2",
        *,
        dtype: DTypeLike | None = None,
        max_length: int | None = None,
        truncate_dim: int | None = None,
        implementation: Implementation | None = None,
        compilation_cache: CompilationCache | None = None,
        devices: Sequence[Device] | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> "Encoder":
        """Loads weights, tokenizer, and what else a folder of sentence-transformers says.

        That is modules.json (pooling, dense layers, normalisation; without it, as in sentence-transformers, the
        mean of the tokens, of any norm), config_sentence_transformers.json (prompts, similarity) and the length of
        sentences.

        Args:
          path: a folder of sentence-transformers, of transformers or of `python -m weights`, a hub id, or
            `"all-MiniLM-L6-v2"`. docs/models.md lists the models that are run.
          dtype: float16, bfloat16 or float32, that of parameters and computation. None is the `--dtype` of a
            folder of `python -m weights`, and float32 for checkpoints of PyTorch, whatever they are stored in.
          max_length: tokens kept of a sentence. When None, as in sentence-transformers, `max_seq_length` of
            sentence_bert_config.json (256 for all-MiniLM-L6-v2), or `model_max_length` of tokenizer_config.json;
            without both the model's positions. A limit in tokenizer.json itself is not used.
          truncate_dim: the attribute.
          implementation: that of the ops, or None for the best available.
          compilation_cache: a folder in which compiled programs are kept for other processes, or True for
            `$XDG_CACHE_HOME/pallas_models/compilation`. Compiled programs are code: the folder must be one that
            nobody else can write to. None keeps none. JAX's own persistent cache takes its place where it is on;
            no setting of JAX is changed.
          devices: compute batches in turns, each with a copy of the parameters: `"cuda:1"` or one of
            `jax.devices()`. None is where JAX puts arrays.
          mesh: gives the devices instead, those of this process.

        Raises:
          FileNotFoundError: the model or its tokenizer.json was not found.
          CheckpointError: a file is corrupt, or of a model that is not run here.
          ImportError: another module named `weights` hides the package that reads checkpoints.
          NotImplementedError: the folder asks for a module, or an option of one, that is not run here; names it.
          TypeError: `dtype` is none of the above.
          ValueError: an argument does not fit the model, or there is no such device.
        """
        begin_loading()
        from weights import hub, loading, modules, text

        found = hub.resolve(path)
        described = modules.describe(found if found.is_dir() else found.parent)
        source = described.transformer if found.is_dir() else found
        family = loading.find_encoder(source)
        assert family.encode is not None
        config = loading.load_config(family, source)
        dtype = loading.default_dtype(source) if dtype is None else dtype
        if max_length is None and described.max_length is not None:
            max_length = min(described.max_length, config.max_positions)
        tokenizer = text.read_tokenizer(described.transformer, lower_case=described.lower_case)
        return cls(
            loading.load(family, source, dtype),
            tokenizer,
            config=config,
            head=described.head,
            head_params=modules.load_head(described, dtype),
            max_length=max_length,
            prompts=described.prompts,
            default_prompt_name=described.default_prompt_name,
            similarity_fn_name=described.similarity,
            truncate_dim=truncate_dim,
            implementation=implementation,
            compilation_cache=compilation_cache,
            devices=devices,
            mesh=mesh,
            forward=family.encode,
        )

    def _take(self, params: Params, head_params: Params) -> None:
        """Computes with these parameters from now on."""
        given = (params, head_params)
        self._params = params
        self._programs = [self._start(jax.device_put(given, place)) for place in self._places]
        self._programs = self._programs or [self._start(given)]
        self._programs_elsewhere: dict[jax.Device, Programs] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled or copied, it is made anew of its parts, where JAX puts arrays."""
        given = self._start.keywords
        parts = functools.partial(
            type(self),
            self._params,
            self._tokenizer,
            config=self._config,
            head=self._head,
            head_params=self._programs[0].params[1],
            max_length=self._max_length,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            similarity_fn_name=self._similarity_fn_name,
            truncate_dim=self.truncate_dim,
            implementation=self._implementation,
            compilation_cache=given["folder"],
            forward=given["encode"],
        )
        return parts, ()

    def __repr__(self) -> str:
        return (
            f"Encoder({self._config}, {self._head}, max_seq_length={self._max_length}, dtype={self.dtype}, "
            f"prompts={self.prompts}, default_prompt_name={self.default_prompt_name!r})"
        )

    @property
    def params(self) -> Params:
        return self._params

    @property
    def config(self) -> Any:
        return self._config

    @property
    def dtype(self) -> np.dtype:
        return next(leaf.dtype for leaf in jax.tree.leaves(self._params) if leaf.ndim > 1)

    @property
    def tokenizer(self) -> "tokenizers.Tokenizer":
        return self._tokenizer

    @property
    def head(self) -> Head:
        return self._head

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

    max_seq_length = max_length

    @property
    def similarity_fn_name(self) -> Similarity:
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Similarity) -> None:
        similarities.check(name)
        self._similarity_fn_name = name

    @property
    def device(self) -> jax.Device:
        """Where it computes, the first of several."""
        return next(iter(self._programs[0].devices))

    @contextlib.contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Sets the attribute `truncate_dim` for as long as the context lasts."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def half(self) -> "Encoder":
        """Computes in float16 from now on, as with this `dtype` of `from_pretrained`; returns itself.

        Raises:
          CheckpointError: a number is beyond what float16 can hold.
        """
        _check_weights_package()
        from weights import checkpoint, tree

        given = (self._params, self._programs[0].params[1])
        for params in given:
            flat = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
            checkpoint.check_range("the encoder", flat, jnp.float16)
        self._take(*jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf.astype(jnp.float16), given))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder that `from_pretrained`, sentence-transformers and transformers load.

        Matrices are in the encoder's dtype. Files of the same names are replaced, all at once.

        Raises:
          OSError: the folder cannot be written.
          TypeError: `config` is of none of the families that `weights` knows.
        """
        _check_weights_package()
        from weights import exporting

        exporting.export_encoder(
            self._params,
            path,
            config=self._config,
            tokenizer=self._tokenizer,
            head=self._head,
            head_params=self._programs[0].params[1],
            max_length=self._max_length,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            similarity=self._similarity_fn_name,
        )

    save_pretrained = save

    def get_max_seq_length(self) -> int:
        """The attribute `max_seq_length`."""
        return self.max_seq_length

    def get_embedding_dimension(self) -> int:
        """The number of dimensions of an embedding."""
        width = self._head.features(self._config.hidden_size)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    get_sentence_embedding_dimension = get_embedding_dimension

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

        Sentences share rows of batches without padding to each other's length (`pallas_models.minilm.packing`), so
        that a list of any lengths takes five programs at most. The next sentences are tokenized while the device
        computes.

        Args:
          sentences: one sentence or many: a list, an array of NumPy or pyarrow, a column of pandas, or another
            iterable. An empty one is embedded as its special tokens, [CLS] [SEP].
          prompt_name: of the prompt that is put before each sentence; the default prompt when None.
          prompt: the text to put there, in place of a named one.
          batch_size: bounds memory: a batch has no more tokens than so many sentences of `max_length` have. When
            None, what suits the device.
          show_progress_bar: None shows one for long work on a terminal.
          output_value: "token_embeddings" asks for the hidden states of all tokens, special ones and those of the
            prompt included.
          precision: "float32", or "int8", "uint8", "binary", "ubinary" as `quantization.quantize_embeddings` has
            them, with ranges taken from these sentences; those of one are none, which is refused.
          convert_to_numpy: whether the result is one NumPy array; a list of JAX arrays otherwise.
          convert_to_tensor: whether it is one JAX array instead.
          device: where to compute, `"cpu"`, `"cuda:1"` or one of `jax.devices()`, or several of them, which take
            turns; the parameters are copied there once. None is where they are, on all devices of the encoder.
          normalize_embeddings: whether embeddings have unit L2 norm where the model's own modules do not see to
            that already, or after truncation.
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
        call = self._call(batch_size, prompt, prompt_name, device, normalize_embeddings, truncate_dim)
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
            states: list[Any] = self._hidden_states(chunks, call)
            if convert_to_tensor or not convert_to_numpy:
                states = list(map(jnp.asarray, states))
            return states[0] if single else states
        embeddings = self._embeddings(chunks, call, show_progress_bar)
        if precision != "float32":
            embeddings = quantize_embeddings(embeddings, precision)
        result: Any = embeddings
        if convert_to_tensor or not convert_to_numpy:
            result = jnp.asarray(embeddings) if convert_to_tensor else list(jnp.asarray(embeddings))
        return result[0] if single else result

    def encode_query(
        self,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Computes `encode`, with the prompt "query" where none is given."""
        return self.encode(sentences, self._first_prompt(prompt_name, "query"), prompt, *args, **options)

    def encode_document(
        self,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Computes `encode`, with the prompt "document", "passage" or "corpus" where none is given."""
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
          sentences: any iterable, read a few chunks ahead of what is yielded.
          batch_size, prompt_name, prompt, device, normalize_embeddings, truncate_dim: as in `encode`.

        Yields:
          float32 (sentences of a chunk, D), chunk by chunk in the order of the sentences. `close()` ends what was
          started for those that are not wanted any more.

        Raises:
          TypeError, ValueError: as `encode`; about a sentence once it is read.
        """
        call = self._call(batch_size, prompt, prompt_name, device, normalize_embeddings, truncate_dim)
        return self._finished(checks.checked(sentences), call)

    def encode_chunks(self, chunks: Iterable[list[str]], **options: Any) -> Generator[np.ndarray]:
        """Computes the embeddings of lists of sentences as they come: those of a list do not depend on the others.

        Args:
          chunks: any iterable of lists, read a few lists ahead of what is yielded. A list of 16,384 sentences
            keeps a device busy.
          options: of `encode_iter`.

        Yields:
          float32 (sentences of the list, D) for each list.

        Raises:
          TypeError, ValueError: as `encode`; about a sentence once it is read.
        """
        call = self._call(**options)
        return self._finished(checks.checked_chunks(chunks), call)

    def similarity(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> np.ndarray:
        """The similarity of each of embeddings1, (N, D) or (D,), with each of embeddings2: (N, M) float32.

        Raises:
          ValueError: shapes do not fit.
        """
        return similarities.similarity(embeddings1, embeddings2, self._similarity_fn_name)

    def similarity_pairwise(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> np.ndarray:
        """The similarity of embeddings1[i] with embeddings2[i]: (N,) float32, or () for two (D,).

        Errors as `similarity`.
        """
        return similarities.similarity_pairwise(embeddings1, embeddings2, self._similarity_fn_name)

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
        call, limit = self._call(batch_size, normalize_embeddings=normalize_embeddings), self._max_length
        budget = call.budget
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
            for chunk in checks.checked(sentences):
                tokens, counts = tokenizing.tokens(self._tokenize, chunk)
                shapes |= {b.tokens.shape: None for b in packing.pack(tokens, counts, limit, budget)}
        show = checks.shows(show_progress_bar, len(shapes) > 1)
        with checks.progress("programs", len(shapes) * len(call.programs), show) as advance:
            started = [program for programs in call.programs for program in programs.prepare(shapes, call.head)]
            advance(len(shapes) * len(call.programs) - len(started))
            for program in started:
                program.result()
                advance(1)
        return len(started)

    def _embeddings(self, chunks: list[list[str]], call: "_Call", show_progress_bar: bool | None) -> np.ndarray:
        count = sum(map(len, chunks))
        if count == 1:
            tokens = self._tokenizer.encode(call.prompt + chunks[0][0]).ids  # sooner than a batch of one
            padded = np.full((1, packing.padded_length(len(tokens), self._max_length)), -1, np.int32)
            padded[0, : len(tokens)] = tokens
            return call.finish(np.array(call.programs[0](padded, call.head)))
        embeddings = np.empty((count, self._head.features(self._config.hidden_size)), np.float32)
        show = checks.shows(show_progress_bar, count >= SENTENCES_WORTH_A_BAR)
        with checks.progress("sentences", count, show) as advance:
            for rows in self._rows(chunks, call, embeddings):
                advance(len(rows))
        return call.finish(embeddings)

    def _finished(self, chunks: Iterable[list[str]], call: "_Call") -> Generator[np.ndarray]:
        with contextlib.closing(self._rows(chunks, call)) as parts:
            for rows in parts:
                yield call.finish(rows)

    def _prepare_likely(self, sample: list[str], call: "_Call") -> None:
        """Has the program of a long list's full batches compiled while its first chunk is tokenized."""
        lengths = tokenizing.tokens(self._tokenize, call.prompted(sample)).lengths
        row_length, sizes = next(iter(packing.shapes(self._max_length, call.budget).items()))
        if 2 * np.count_nonzero(lengths <= row_length) >= len(lengths):
            for programs in call.programs:
                programs.prepare([(2, *sizes[-1])], call.head)

    def _rows(
        self, chunks: Iterable[list[str]], call: "_Call", out: np.ndarray | None = None
    ) -> Generator[np.ndarray]:
        begun = None
        if out is not None and isinstance(chunks, list) and len(out) > pipeline.MANY:
            begun = functools.partial(self._prepare_likely, chunks[0][:: max(len(chunks[0]) // 64, 1)], call)
        return pipeline.run(
            map(call.prompted, chunks),
            self._tokenize,
            [programs.of(call.head) for programs in call.programs],
            width=self._head.features(self._config.hidden_size),
            limit=self._max_length,
            budget=call.budget,
            out=out,
            elsewhere=self._elsewhere(call, 0 if out is None else len(out)),
            begun=begun,
        )

    def _hidden_states(self, chunks: list[list[str]], call: "_Call") -> list[np.ndarray]:
        states: list[np.ndarray] = []
        for chunk in chunks:
            tokens, lengths = tokenizing.tokens(self._tokenize, call.prompted(chunk))
            of: list[np.ndarray] = [np.empty(0)] * len(chunk)
            for batch in packing.pack(tokens, lengths, self._max_length, call.budget):
                hidden = np.asarray(call.programs[0](batch.tokens, None))
                rows = hidden.reshape(-1, hidden.shape[-1])
                first = np.searchsorted(batch.tokens[1].ravel(), batch.segments)
                for sentence, place in zip(batch.sentences, first, strict=True):
                    of[sentence] = rows[place : place + lengths[sentence]].copy()
            states += of
        return states

    def _elsewhere(self, call: "_Call", count: int) -> Callable[[list[str]], tokenizing.Tokens] | None:
        """What tokenizes in processes, which start now for so many sentences, or else when they are needed."""
        if not (processes := tokenizing.count(call.platform, len(call.programs))):
            return None
        self._processes = self._processes or tokenizing.Processes(self._tokenizer, processes)
        if count > pipeline.MANY:
            self._processes.start()
        return functools.partial(self._processes, limit=self._max_length)

    def _tokenize(self, sentences: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(sentences)]

    def _call(
        self,
        batch_size: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        device: Device | Sequence[Device] | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> "_Call":
        truncate_dim = self.truncate_dim if truncate_dim is None else truncate_dim
        if truncate_dim is not None:
            checks.check_count("truncate_dim", truncate_dim)
        programs = self._programs_on(device)
        return _Call(
            programs=programs,
            head=self._head.normalized() if normalize_embeddings and truncate_dim is None else self._head,
            budget=self._budget(batch_size, programs[0].platform),
            prompt=checks.find_prompt(
                self.prompts, self.default_prompt_name if prompt_name is None else prompt_name, prompt
            ),
            truncate_dim=truncate_dim,
            normalize=normalize_embeddings,
        )

    def _budget(self, batch_size: int | None, platform: str) -> int:
        """The most tokens of a batch."""
        if batch_size is None:
            return packing.budget(platform)
        return checks.check_count("batch_size", batch_size) * self._max_length

    def _first_prompt(self, name: str | None, *names: str) -> str | None:
        return next((name for name in names if name in self.prompts), None) if name is None else name

    def _programs_on(self, device: Device | Sequence[Device] | None) -> list[Programs]:
        if device is None:
            return self._programs
        if isinstance(device, list | tuple):
            return [programs for place in _devices(device, None) for programs in self._programs_on(place)]
        place = _device(device)
        if there := [programs for programs in self._programs if programs.devices == {place}]:
            return there
        if place not in self._programs_elsewhere:
            self._programs_elsewhere[place] = self._start(jax.device_put(self._programs[0].params, place))
        return [self._programs_elsewhere[place]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What one call asks for: `normalize` and `truncate_dim` are those of `encode`."""

    programs: list[Programs]
    head: Head
    budget: int
    prompt: str
    truncate_dim: int | None
    normalize: bool

    @property
    def platform(self) -> str:
        return self.programs[0].platform

    def prompted(self, chunk: list[str]) -> list[str]:
        return [self.prompt + sentence for sentence in chunk] if self.prompt else chunk

    def finish(self, rows: np.ndarray) -> np.ndarray:
        """Truncates embeddings, here and not on the device, which would need other programs for it."""
        if self.truncate_dim is None:
            return rows
        rows = rows[:, : self.truncate_dim].copy()  # and let go of the rest
        if self.normalize:
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return rows


def _devices(devices: Sequence[Device] | None, mesh: jax.sharding.Mesh | None) -> list[jax.Device]:
    """The devices that are asked for, or none."""
    if devices is None:
        return [] if mesh is None else list(mesh.local_devices)
    places = [] if isinstance(devices, str) else [_device(device) for device in devices]
    if mesh is not None or not places or len(set(places)) < len(places):
        raise ValueError(f"{devices=} and {mesh=}; expected a list of one device or more, each once, or a mesh")
    return places


def _device(device: Device) -> jax.Device:
    """The device of a name such as "cpu" or "cuda:1"."""
    if not isinstance(device, str):
        return device
    platform, _, index = device.partition(":")
    try:
        return jax.devices(platform)[int(index or 0)]
    except (RuntimeError, IndexError, ValueError) as error:
        names = [f"{d.platform}:{d.id}" for d in jax.devices()]
        raise ValueError(f"{device=} is not there; expected one of {names}") from error


def begin_loading() -> None:
    """Starts the GPU in a thread: until parameters go there, all else can be read.

    Raises:
      ImportError: `import weights` would find another module than the one beside this package.
    """
    _check_weights_package()
    threading.Thread(target=targets.start).start()


def _check_weights_package() -> None:
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
