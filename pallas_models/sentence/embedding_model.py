"""The parts and settings of an `Encoder`: how it is made, loaded, saved, and put on devices."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from pallas_models import bert
from pallas_models._implementation import Implementation
from pallas_models._modules import Params
from pallas_models.bert import MiniLMConfig
from pallas_models.sentence import pipeline, tokenizing
from pallas_models.sentence import similarity as similarities
from pallas_models.sentence.devices import Device, find_device, find_devices
from pallas_models.sentence.heads import HEAD, Head
from pallas_models.sentence.loading import begin_loading, check_weights_package
from pallas_models.sentence.programs import Config, Encode, Programs
from pallas_models.sentence.similarity import Similarity
from pallas_models.sentence.text_model import CompilationCache, TextModel

if TYPE_CHECKING:
    import tokenizers


class EmbeddingModel(TextModel):
    """A model of sentences with a head that makes embeddings; `Encoder` documents its attributes."""

    __slots__ = ("_processes", "_programs_elsewhere", "_similarity_fn_name", "truncate_dim")
    _shortest = 2

    def __init__(
        self,
        params: Params,
        tokenizer: "tokenizers.Tokenizer",
        *,
        config: Config = MiniLMConfig(),
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
        forward: Encode = bert.encode,
    ):
        """Makes an encoder from its parts; `from_pretrained` reads them from files.

        There are as many arguments as an encoder of sentence-transformers has settings, and the places it runs on.

        Args:
          params, config: of the model.
          tokenizer: its tokenizer, of which a copy is used.
          head: the layers after the model; by default the mean of the tokens, scaled to unit norm.
          head_params: the parameters of its dense layers, as `heads.apply` takes them.
          max_length, implementation, compilation_cache, devices, mesh: as in `from_pretrained`.
          prompts, default_prompt_name, similarity_fn_name, truncate_dim: the attributes.
          forward: computes the hidden states, called as `minilm.encode` is.

        Raises:
          ValueError: `max_length` is not in [2, config.max_positions], the tokenizer knows ids that the
            model does not, `default_prompt_name` is not one of `prompts`, a name is unknown, or there is no such
            device.
        """
        self.similarity_fn_name = similarity_fn_name
        self.truncate_dim = truncate_dim
        super().__init__(
            params,
            tokenizer,
            config=config,
            forward=forward,
            head=head,
            head_params=head_params or {},
            max_length=max_length,
            prompts={"query": "", "document": "", **(prompts or {})},
            default_prompt_name=default_prompt_name,
            implementation=implementation,
            compilation_cache=compilation_cache,
            places=find_devices(devices, mesh),
        )
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
    ) -> Self:
        """Loads an encoder from a folder of sentence-transformers or transformers.

        Beside weights and tokenizer, it reads modules.json (pooling, dense layers, normalisation; without it, as
        in sentence-transformers, the mean of the tokens, of any norm), config_sentence_transformers.json (prompts,
        similarity) and the length of sentences.

        Args:
          path: a folder of sentence-transformers, of transformers or of `python -m weights`, a hub id, or
            `"all-MiniLM-L6-v2"`. docs/models.md lists the models that are run.
          dtype: float16, bfloat16 or float32, of parameters and computation. None is the `--dtype` of a folder of
            `python -m weights`, and float32 for checkpoints of PyTorch, whatever they are stored in.
          max_length: tokens kept of a sentence. When None, as in sentence-transformers, `max_seq_length` of
            sentence_bert_config.json (256 for all-MiniLM-L6-v2), or `model_max_length` of tokenizer_config.json;
            without both the model's positions. A limit in tokenizer.json itself is not used.
          truncate_dim: the attribute.
          implementation: of the ops, or None for the best available.
          compilation_cache: a folder in which compiled programs are kept for other processes, or True for
            `$XDG_CACHE_HOME/pallas_models/compilation`. Compiled programs are code: nobody else may be able to
            write to the folder. None keeps no programs. JAX's own persistent cache takes its place where it is on;
            no setting of JAX is changed.
          devices: compute batches in turns, each with a copy of the parameters: `"cuda:1"` or one of
            `jax.devices()`. None is where JAX puts arrays.
          mesh: names the devices instead; the devices of this process are used.

        Raises:
          FileNotFoundError: the model or its tokenizer.json was not found.
          CheckpointError: a file is corrupt, or of a model that is not run here.
          ImportError: another module named `weights` hides the package that reads checkpoints.
          NotImplementedError: the folder asks for a module, or an option of one, that is not run here; names it.
          TypeError: `dtype` is none of the above.
          ValueError: an argument does not fit the model, or there is no such device.
        """
        begin_loading()
        from pallas_models.sentence import folders
        from weights import hub, loading

        found = hub.resolve(path)
        described = folders.describe(found if found.is_dir() else found.parent)
        source = described.transformer if found.is_dir() else found
        family = loading.find_encoder(source)
        assert family.encode is not None
        config = loading.load_config(family, source)
        dtype = loading.default_dtype(source) if dtype is None else dtype
        tokenizer = described.read_tokenizer()
        return cls(
            loading.load(family, source, dtype),
            tokenizer,
            config=config,
            head=described.head,
            head_params=folders.load_head(described, dtype),
            max_length=described.limit(config.max_positions) if max_length is None else max_length,
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
        super()._take(params, head_params)
        self._programs_elsewhere: dict[jax.Device, Programs] = {}

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """Pickled or copied, an encoder is made anew of its parts, where JAX puts arrays."""
        made = functools.partial(
            type(self),
            self._params,
            self._tokenizer,
            similarity_fn_name=self._similarity_fn_name,
            truncate_dim=self.truncate_dim,
            **self._parts(),
        )
        return made, ()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._config}, {self._head}, max_seq_length={self._max_length}, "
            f"dtype={self.dtype}, prompts={self.prompts}, default_prompt_name={self.default_prompt_name!r})"
        )

    @property
    def params(self) -> Params:
        return self._params

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
    def similarity_fn_name(self) -> Similarity:
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Similarity) -> None:
        similarities.check(name)
        self._similarity_fn_name = name

    @property
    def device(self) -> jax.Device:
        """The device on which it computes, or the first of several."""
        return next(iter(self._programs[0].devices))

    @contextlib.contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Sets the attribute `truncate_dim` while the context lasts."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings

    def half(self) -> Self:
        """Computes in float16 from now on, as with this `dtype` of `from_pretrained`; returns itself.

        Raises:
          CheckpointError: a number is beyond what float16 can hold.
        """
        check_weights_package()
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
          TypeError: `config` is of no family that `weights` knows.
        """
        check_weights_package()
        from pallas_models.sentence import saving

        saving.save_encoder(
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

    def similarity(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> np.ndarray:
        """The similarity of each of embeddings1, (N, D) or (D,), with each of embeddings2: (N, M) float32.

        Raises:
          ValueError: shapes do not fit.
        """
        return similarities.similarity(embeddings1, embeddings2, self._similarity_fn_name)

    def similarity_pairwise(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> np.ndarray:
        """The similarity of embeddings1[i] with embeddings2[i]: (N,) float32, or () for two (D,).

        Raises:
          ValueError: shapes do not fit.
        """
        return similarities.similarity_pairwise(embeddings1, embeddings2, self._similarity_fn_name)

    def _tokenize(self, sentences: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(sentences)]

    def _elsewhere(self, programs: list[Programs], count: int) -> Callable[[list[str]], tokenizing.Tokens] | None:
        """Tokenizes in processes, which start now if `count` sentences are many, or else when they are needed."""
        if not (processes := tokenizing.count(programs[0].platform, len(programs))):
            return None
        self._processes = self._processes or tokenizing.Processes(self._tokenizer, processes)
        if count > pipeline.MANY:
            self._processes.start()
        return functools.partial(self._processes, limit=self._max_length)

    def _programs_on(self, device: Device | Sequence[Device] | None) -> list[Programs]:
        if device is None:
            return self._programs
        if isinstance(device, list | tuple):
            return [programs for place in find_devices(device, None) for programs in self._programs_on(place)]
        place = find_device(device)
        if there := [programs for programs in self._programs if programs.devices == {place}]:
            return there
        if place not in self._programs_elsewhere:
            self._programs_elsewhere[place] = self._start(jax.device_put(self._programs[0].params, place))
        return [self._programs_elsewhere[place]]
