"""The parts that `Encoder` and `CrossEncoder` share: a model with a tokenizer, a limit of tokens, and prompts."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import compilation_cache as caches
from pallas_models._implementation import Implementation, check_implementation
from pallas_models._modules import Params
from pallas_models.sentence import inputs, packing
from pallas_models.sentence.heads import Head
from pallas_models.sentence.programs import Config, Encode, Programs

if TYPE_CHECKING:
    import tokenizers

CompilationCache = str | os.PathLike[str] | Literal[True]


class TextModel:
    """A model with its tokenizer, and programs that compute it on one device or several."""

    __slots__ = (
        "_config",
        "_folder",
        "_forward",
        "_head",
        "_implementation",
        "_max_length",
        "_params",
        "_places",
        "_programs",
        "_tokenizer",
        "default_prompt_name",
        "prompts",
    )
    _shortest: ClassVar[int]  # tokens of an empty text: `max_length` leaves room for them

    def __init__(
        self,
        params: Params,
        tokenizer: "tokenizers.Tokenizer",
        *,
        config: Config,
        forward: Encode,
        head: Head,
        head_params: Params,
        max_length: int | None,
        prompts: Mapping[str, str],
        default_prompt_name: str | None,
        implementation: Implementation | None,
        compilation_cache: CompilationCache | None,
        places: Sequence[jax.Device] = (),
    ):
        """Checks the parts and puts the parameters on the devices `places`; without any, where JAX puts arrays."""
        self._implementation = check_implementation(implementation) or None
        if (size := tokenizer.get_vocab_size()) > config.vocab_size:
            raise ValueError(f"the tokenizer has {size} ids, the model only {config.vocab_size}")
        self._config, self._forward, self._head = config, forward, head
        # A copy, as the caller's tokenizer keeps its own limits. Padding is done here, to shapes that repeat.
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self.max_length = config.max_positions if max_length is None else max_length
        self.prompts, self.default_prompt_name = dict(prompts), default_prompt_name
        inputs.find_prompt(self.prompts, default_prompt_name, None)
        folder = caches.default_folder() if compilation_cache is True else compilation_cache
        self._folder = None if folder is None else Path(folder)
        self._places = list(places)
        self._take(params, head_params)

    def _take(self, params: Params, head_params: Params) -> None:
        """Computes with these parameters from now on."""
        given = (params, head_params)
        self._params = params
        self._programs = [self._start(jax.device_put(given, place)) for place in self._places]
        self._programs = self._programs or [self._start(given)]

    def _start(self, params: tuple[Params, Params]) -> Programs:
        return Programs(params, self._encode(), self._config, self._implementation, self._folder)

    def _encode(self) -> Encode:
        """The function that makes hidden states of the tokens."""
        return self._forward

    def _parts(self) -> dict[str, Any]:
        """The named arguments of the constructor that make the same model, where JAX puts arrays."""
        return dict(
            config=self._config,
            forward=self._forward,
            head=self._head,
            head_params=self._programs[0].params[1],
            max_length=self._max_length,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            implementation=self._implementation,
            compilation_cache=self._folder,
        )

    @property
    def config(self) -> Any:
        return self._config

    @property
    def max_length(self) -> int:
        return self._max_length

    @max_length.setter
    def max_length(self, max_length: int) -> None:
        if not self._shortest <= max_length <= self._config.max_positions:
            raise ValueError(
                f"{max_length=}; expected {self._shortest} to {self._config.max_positions}, the model's positions"
            )
        self._max_length = max_length
        self._tokenizer.enable_truncation(max_length)

    max_seq_length = max_length

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        """The text before a sentence: `prompt`, or the prompt of this name, or the default, or none."""
        return inputs.find_prompt(self.prompts, self.default_prompt_name if name is None else name, prompt)

    def _budget(self, batch_size: int | None, platform: str) -> int:
        """The most tokens of a batch: as many as so many texts of `max_length`, or as suit the device."""
        if batch_size is None:
            return packing.budget(platform)
        return inputs.check_count("batch_size", batch_size) * self._max_length


def converted(rows: np.ndarray, *, to_numpy: bool, to_tensor: bool, single: bool) -> Any:
    """Rows as a call asks for them: an array of NumPy or of JAX, or a list of arrays; of a single text its row."""
    result: Any = rows
    if to_tensor or not to_numpy:
        result = jnp.asarray(rows) if to_tensor else list(jnp.asarray(rows))
    return result[0] if single else result
