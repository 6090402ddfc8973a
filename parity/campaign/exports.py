"""Ops and models exported with a symbolic batch, symbolic lengths or both, then called at several sizes.

`DRAWS` cases after one another share an artefact. The largest sizes are declared or not, as users may know or not
know how many positions a model has. The artefacts are plain XLA, which serves sizes that are not known.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import symbolic_shape

from pallas_models import exporting, gpt2, minilm, modernbert, ops, qwen3, trimul
from parity.campaign._case import Case
from parity.cases import CALLS
from parity.support.bounded import Array, apart
from parity.support.common import random_params
from parity.support.draws import Pick
from parity.support.tolerances import DEEP, MODEL_GRADIENT

DRAWS = 4
POSITIONS = 16
CPU = jax.devices("cpu")[0]
BATCH, LENGTH = 2, 7  # sizes that stand for a batch and for a length
MOST = {"b": 6, "s": POSITIONS, "t": 40}


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program that is exported once.

    Attributes:
      name: of op or model, with its arguments.
      function: of the arrays and `implementation=`.
      arrays: of a size that stands for any.
      axes: for each array the symbols of its axes, "" for one of a known size.
      floats: how many arrays, the first ones, are differentiated; 0 for none.
      platforms: which artefacts are made for; they are called on a CPU.
      most: the largest size of each symbol, and
      declared: whether `jax.export` is told of them.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[Array, ...]
    axes: tuple[tuple[str, ...], ...]
    floats: int
    platforms: tuple[str, ...]
    most: dict[str, int]
    declared: bool

    def __str__(self) -> str:
        given = " ".join(
            f"{x.dtype}[{', '.join(name or str(size) for name, size in zip(names, x.shape, strict=True))}]"
            for x, names in zip(self.arrays, self.axes, strict=True)
        )
        return f"{'gradient of ' if self.floats else ''}{self.name} for {', '.join(self.platforms)}: {given}" + (
            "" if self.declared else ", of any size"
        )

    def of(self, implementation: str | None) -> Callable[..., Any]:
        function = functools.partial(self.function, implementation=implementation)
        if not self.floats:
            return function

        def with_gradient(*arrays: jax.Array) -> Any:
            floats, rest = arrays[: self.floats], arrays[self.floats :]
            out, pull = jax.vjp(lambda *floats: function(*floats, *rest), *floats)
            return out, pull(jnp.cos(out))

        return with_gradient

    def exported(self) -> exporting.Artefact:
        names = sorted({name for names in self.axes for name in names if name})
        limits = [f"{name} <= {self.most[name]}" for name in names] if self.declared else []
        symbols = (
            dict(zip(names, symbolic_shape(", ".join(names), constraints=limits), strict=True)) if names else {}
        )
        shapes = [
            jax.ShapeDtypeStruct([symbols.get(n, size) for n, size in zip(names, x.shape, strict=True)], x.dtype)
            for x, names in zip(self.arrays, self.axes, strict=True)
        ]
        return exporting.export(self.of(None), *shapes, platforms=self.platforms)

    def sized(self, sizes: dict[str, int]) -> list[jax.Array]:
        """The arrays with as many of each symbol: their elements begin anew where they end."""
        found = []
        for x, names in zip(self.arrays, self.axes, strict=True):
            for axis, name in enumerate(names):
                if name:
                    x = np.take(x, np.arange(sizes[name]) % x.shape[axis], axis)
            found.append(jax.device_put(x, CPU))
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """A function to export, and the sizes of it that can be open.

    Attributes:
      floats: how many of the arrays can be differentiated: the first ones.
      batched: the arrays that begin with a batch.
      symbols: which sizes of axes can be open.
      most: the largest size of a symbol, where `MOST` does not hold.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    floats: int
    batched: tuple[int, ...]
    symbols: Mapping[int, str] = dataclasses.field(default_factory=lambda: {BATCH: "b", LENGTH: "s"})
    most: Mapping[str, int] = dataclasses.field(default_factory=dict)


def _call(pick: Pick) -> _Drawn:
    """A small call of an op."""
    call = pick.of(CALLS)
    of_call = call.name, call.function, call.arrays(), call.floats, call.batched
    return _Drawn(*of_call, symbols=call.symbols, most=call.most)


def _attention(pick: Pick) -> _Drawn:
    """Attention of a sequence to itself with some of its masks."""
    rng = pick.rng
    options: dict[str, Any] = {"causal": True} if pick.chance(0.5) else {}
    if pick.chance(0.5):
        options["window"] = pick.of((1, 3, 6))
    masks = [name for name in ("mask", "segment_ids") if pick.chance(0.4)]
    qkv = [rng.normal(size=(BATCH, LENGTH, 2, 16)).astype(np.float32) for _ in range(3)]
    rows = [rng.integers(0, 2, (BATCH, LENGTH)).astype(np.int32) for _ in masks]

    def attention(q: Any, k: Any, v: Any, *rows: Any, implementation: Any) -> Any:
        named = dict(zip(masks, rows, strict=True))
        return ops.attention(q, k, v, **named, **options, implementation=implementation)

    return _Drawn(f"attention {options}", attention, (*qkv, *rows), 3, (0, 1, 2, 3, 4))


MODELS = (
    *("gpt2.logits", "gpt2.loss", "qwen3.logits", "qwen3.loss", "minilm.embed", "mpnet", "modernbert"),
    *("contrastive_loss", "embed_packed", "trimul"),
)
_SIZES: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=POSITIONS
)


def _model(pick: Pick) -> _Drawn:
    name = pick.of(MODELS)
    rng = pick.rng
    ids = rng.integers(4, 40, (BATCH, LENGTH)).astype(np.int32)
    mask = (np.arange(LENGTH) < [[LENGTH], [4]]).astype(np.int32)
    if name == "trimul":
        params = random_params(trimul.TriMulConfig(channels=16, hidden=16), init=trimul.init)
        x = rng.normal(size=(BATCH, LENGTH, LENGTH, 16)).astype(np.float32)
        return _Drawn(name, functools.partial(trimul.trimul, params, direction="outgoing"), (x,), 0, (0,))
    config: Any
    if name.startswith("qwen3"):
        config, module = qwen3.Qwen3Config(**_SIZES, num_kv_heads=1, head_dim=16), qwen3
    elif name.startswith("gpt2"):
        config, module = gpt2.GPT2Config(**_SIZES), gpt2  # type: ignore[assignment]
    elif name == "modernbert":
        config, module = modernbert.ModernBertConfig(**_SIZES, local_attention=4), modernbert  # type: ignore[assignment]
    else:
        made = minilm.MPNetConfig if name == "mpnet" else minilm.MiniLMConfig
        config, module = made(**_SIZES), minilm  # type: ignore[assignment]
    params = random_params(config, init=module.init)
    if name == "contrastive_loss":

        def contrastive(ids: Any, mask: Any, **options: Any) -> Any:
            return minilm.contrastive_loss(params, (ids, mask), (ids[::-1], mask[::-1]), config=config, **options)

        return _Drawn(name, contrastive, (ids, mask), 0, (0, 1))
    if name == "embed_packed":
        segments = np.where(mask == 1, [[0], [1]], -1).astype(np.int32)
        packed = functools.partial(minilm.embed_packed, params, num_segments=3, config=config)
        return _Drawn(name, packed, (ids, segments), 0, (0, 1))
    function = {"modernbert": "encode", "mpnet": "embed", "minilm.embed": "embed"}.get(name) or name.split(".")[1]
    masked = pick.chance(0.6) or function == "embed"
    options: dict[str, Any] = dict(config=config)
    if function == "encode" and not masked:
        options["mask"] = None
    applied = functools.partial(getattr(module, function), params, **options)
    return _Drawn(name, applied, (ids, mask) if masked else (ids,), 0, (0, 1))


def program(seed: int, index: int) -> Program:
    """Program `index` of a campaign."""
    pick = Pick(np.random.default_rng([seed, index, 7]))
    drawn = pick.by({_call: 0.45, _attention: 0.15, _model: 0.4})(pick)
    arrays = tuple(map(np.asarray, drawn.arrays))
    kinds = pick.of(("b", "b", "s", "bs")) if "b" in drawn.symbols.values() else "s"
    batched = {size: name for size, name in drawn.symbols.items() if name == "b" and "b" in kinds}
    lengths = {size: name for size, name in drawn.symbols.items() if name != "b" and "s" in kinds}
    axes = tuple(
        tuple(
            (batched if axis == 0 and i in drawn.batched else lengths).get(size, "")
            for axis, size in enumerate(x.shape)
        )
        for i, x in enumerate(arrays)
    )
    differentiated = drawn.floats if pick.chance(0.25) else 0
    platforms = pick.of((("cpu",), ("cpu",), ("cpu", "cuda")))
    most = MOST | drawn.most
    return Program(drawn.name, drawn.function, arrays, axes, differentiated, platforms, most, pick.chance(0.6))


@functools.lru_cache(maxsize=1)
def _artefact(seed: int, index: int) -> tuple[Program, exporting.Artefact, Callable[..., Any]]:
    p = program(seed, index)
    return p, p.exported(), jax.jit(p.of("xla"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int
    measured: dict[str, float]

    def __call__(self) -> str | None:
        p, artefact, function = _artefact(self.seed, self.index // DRAWS)
        rng = np.random.default_rng([self.seed, self.index, 8])
        sizes = {name: int(rng.integers(1, most + 1)) for name, most in p.most.items()}
        arrays = p.sized(sizes)
        self.measured["cases"] = 1
        tolerance = MODEL_GRADIENT if p.floats else DEEP
        wrong, part = apart(artefact.call(*arrays), function(*arrays), tolerance, tolerance * 0.1)
        self.measured["largest part of its bound"] = part
        return wrong and f"at {sizes}: {wrong}"


def cases(seed: int) -> Iterator[Case]:
    """Calls of artefacts; see the module."""
    for number in itertools.count():
        p = program(seed, number)
        kind = "gradient" if p.floats else "value"
        for draw in range(DRAWS):
            trial = _Trial(seed, number * DRAWS + draw, {})
            yield Case(str(p), trial, (f"exported {p.name.split()[0]}", "float32", "None", kind), trial.measured)
