"""The compiled programs of an encoder, one for each shape of a batch, made ahead of use and side by side."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models._modules import Params
from pallas_models._processes import cores
from pallas_models.compilation_cache import Executables, jax_setting
from pallas_models.ops import Implementation
from pallas_models.sentence import heads, packing
from pallas_models.sentence.heads import Head

Shape = tuple[int, ...]
Program = Future[jax.stages.Compiled]
Key = tuple[object, ...]


class Config(Protocol):
    """The sizes of a model that computes hidden states; it can be hashed."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


# Computes hidden states, and is called as `bert.encode` is: with parameters, ids and mask, and by their names
# `segment_ids`, `config` and `implementation`.
Encode = Callable[..., jax.Array]

# The programs for one sentence hold a copy of the parameters where these have at most so many bytes, and the
# sentence so many tokens.
_MOST_BOUND = 128 * 2**20
_MOST_TOKENS_BOUND = 64

# As with jax.jit, encoders of the same kind share compiled programs.
_COMPILED: dict[Key, dict[Key, Program]] = {}


class Programs:
    """Computes sentence embeddings, (n, D) float32, of batches that `packing.pack` makes, or of one sentence.

    A batch is (2, B, S), token ids and segment ids, and has `packing.num_segments((B, S))` embeddings. One
    sentence is (1, S), token ids and -1 for padding. A head makes embeddings of hidden states; without a head the
    hidden states are returned, (B, S, H) float32.

    Each array that is passed to a call costs about a microsecond. The parameters are flattened here, once. And the
    programs for one short sentence, which take no longer than passing all arrays, hold a copy of the parameters,
    unless programs are kept in files.
    """

    def __init__(
        self,
        params: tuple[Params, Params],
        encode: Encode,
        config: Config,
        implementation: Implementation | None,
        folder: Path | None,
    ):
        """Makes programs of the parameters of model and head.

        Args:
          encode: computes hidden states as `bert.encode` does.
          folder: keeps programs unless None.
        """
        leaves, tree = jax.tree.flatten(params)
        self._leaves = tuple(map(jnp.asarray, leaves))
        kinds = tuple((leaf.shape, leaf.dtype.name) for leaf in self._leaves)
        places = tuple((leaf.sharding, leaf.committed) for leaf in self._leaves)
        self._compiled = _COMPILED.setdefault((encode, config, implementation, tree, kinds, places, folder), {})
        self._key = (f"{encode.__module__}.{encode.__qualname__}", config, implementation, str(tree), kinds)
        self.params = params
        self.devices = devices = set().union(*(leaf.devices() for leaf in self._leaves))
        self.platform = next(iter(devices)).platform
        # Only our own code is part of the key under which a program is kept.
        ours = encode.__module__.startswith("pallas_models.")
        self._kept = Executables(folder, *devices) if folder and ours and len(devices) == 1 else None

        size = sum(leaf.nbytes for leaf in self._leaves)
        self._binds = not folder and size <= _MOST_BOUND and not any(leaf.committed for leaf in self._leaves)
        self._bound: dict[Key, Program] = {}

        def run(leaves: tuple[jax.Array, ...], tokens: jax.Array, head: Head | None) -> jax.Array:
            params, head_params = jax.tree.unflatten(tree, leaves)
            mask = segment_ids = count = None
            if tokens.ndim == 2:
                mask = (tokens >= 0).astype(jnp.int32)
                ids = jnp.maximum(tokens, 0)
                hidden = encode(params, ids, mask, config=config, implementation=implementation)
            else:
                ids, segment_ids = tokens
                count = packing.num_segments(ids.shape)
                hidden = encode(
                    params, ids, None, segment_ids=segment_ids, config=config, implementation=implementation
                )
            if head is None:
                return hidden.astype(jnp.float32)
            return heads.apply(
                head,
                head_params,
                hidden,
                mask,
                segment_ids=segment_ids,
                num_segments=count,
                implementation=implementation,
            )

        self._function = run
        self._jit = functools.partial(jax.jit, out_shardings=_on_the_host(devices))
        self._run = self._jit(run, static_argnums=2)

    def of(self, head: Head | None) -> "Forward":
        """Computes batches with this head."""
        return Forward(self, head)

    def __call__(self, tokens: np.ndarray, head: Head | None) -> jax.Array:
        """Starts the computation of one batch; returns before the device is done."""
        if jax_setting("jax_disable_jit"):
            return self._run(self._leaves, tokens, head)
        programs, key = self._programs(tokens.shape), _key(tokens.shape, head)
        if key not in programs:
            self.prepare([tokens.shape], head)
        try:
            program = programs[key].result()
        except BaseException:
            programs.pop(key, None)  # it may succeed another time
            raise
        return program(tokens) if programs is self._bound else program(self._leaves, tokens)

    def prepare(self, shapes: Iterable[Shape], head: Head | None) -> list[Program]:
        """Starts to compile the programs of these shapes that are not there yet, and returns these programs.

        They are lowered one after another, which is Python, and compiled side by side, which is not. The order of
        `shapes` is kept, so that the first batch can run while the programs of others are compiled.
        """
        missing = [shape for shape in dict.fromkeys(shapes) if _key(shape, head) not in self._programs(shape)]
        if not missing or jax_setting("jax_disable_jit"):
            return []
        pool = ThreadPoolExecutor(min(len(missing), cores()))
        try:
            # Named here, as the other threads do not see what JAX is set to in this one.
            names = [self._kept.name(*self._key, shape, head) if self._kept else None for shape in missing]
            loading = [pool.submit(self._load, name) for name in names]
            for shape, name, load in zip(missing, names, loading, strict=True):
                if load.result() is None:
                    program = pool.submit(self._compile, self._lower(shape, head), name)
                else:
                    program = cast(Program, load)
                self._programs(shape)[_key(shape, head)] = program
        finally:
            pool.shutdown(wait=False)
        return [self._programs(shape)[_key(shape, head)] for shape in missing]

    def is_ready(self, shape: Shape, head: Head | None) -> bool:
        """Whether a call with this shape need not wait for a program to be compiled."""
        program = self._programs(shape).get(_key(shape, head))
        return program is None or program.done()  # None where nothing is compiled ahead

    def _programs(self, shape: Shape) -> dict[Key, Program]:
        """The programs among which a shape's is: those that encoders share, or that hold this one's parameters."""
        short = len(shape) == 2 and shape[1] <= _MOST_TOKENS_BOUND
        alone = short and self._binds and not jax_setting("jax_compilation_cache_dir")
        return self._bound if alone else self._compiled

    def _load(self, name: str | None) -> jax.stages.Compiled | None:
        return self._kept.load(name) if self._kept and name else None

    def _lower(self, shape: Shape, head: Head | None) -> jax.stages.Lowered:
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        if self._programs(shape) is self._bound:
            return self._jit(lambda tokens: self._function(self._leaves, tokens, head)).lower(tokens)
        return self._run.lower(self._leaves, tokens, head)

    def _compile(self, lowered: jax.stages.Lowered, name: str | None) -> jax.stages.Compiled:
        compiled = lowered.compile()
        if self._kept and name:
            self._kept.save(name, compiled)
        return compiled


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """The programs with one head: a `pipeline.Forward`."""

    programs: Programs
    head: Head | None

    def __call__(self, tokens: np.ndarray) -> jax.Array:
        return self.programs(tokens, self.head)

    def prepare(self, shapes: Iterable[Shape]) -> list[Program]:
        return self.programs.prepare(shapes, self.head)

    def is_ready(self, shape: Shape) -> bool:
        return self.programs.is_ready(shape, self.head)


def _on_the_host(devices: set[jax.Device]) -> jax.sharding.Sharding | None:
    """Where a GPU leaves embeddings: in memory of the host, since a copy asked for later is another wait."""
    if len(devices) != 1 or (device := next(iter(devices))).platform != "gpu":
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def _key(shape: Shape, head: Head | None) -> Key:
    # With the settings of JAX that a function under jax.jit follows, and a compiled program does not.
    return shape, head, jax_setting("jax_default_matmul_precision"), jax_setting("jax_enable_x64")
