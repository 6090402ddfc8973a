"""Random calls of every op, each against float64 and a bound by error analysis.

Compiling takes most of the time, so that `DRAWS` cases after one another share a program, which is an op, shapes,
dtypes, options, a transformation and an implementation, and differ in what the arrays hold.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import ops
from pallas_models.dispatch import legacy
from pallas_models.dispatch.records import Op
from pallas_models.kernels.forms import matmul as matmul_form
from pallas_models.kernels.forms import softmax as softmax_form
from pallas_models.kernels.triton import attention as triton_attention
from pallas_models.kernels.triton import matmul as triton_matmul
from pallas_models.kernels.triton import norm as triton_norm
from pallas_models.kernels.triton import softmax as triton_softmax
from parity.campaign._case import Case
from parity.campaign._references import REFERENCES
from parity.support.bounded import HALF_ULP, UNIT, Array, Bounded, disagreement
from parity.support.common import ON_GPU, ON_HOPPER
from parity.support.tolerances import DEEP, OP

DRAWS = 16
DTYPES = ("float32", "float16", "bfloat16")
# How often each runs, where none is named.
if ON_HOPPER:
    SHARES: dict[str | None, float] = {"triton": 0.5, "mosaic": 0.3, None: 0.15, "xla": 0.05}
elif ON_GPU:
    SHARES = {"triton": 0.8, None: 0.15, "xla": 0.05}
else:
    # Not "mosaic_interpret", a case of which takes up to half a minute.
    SHARES = {"interpret": 0.8, "xla": 0.15, None: 0.05}
TRANSFORMATIONS = {"jit": 0.55, "eager": 0.05, "vmap": 0.12, "vjp": 0.1, "jvp": 0.06, "x64": 0.06, "strict": 0.06}
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72)
LARGE = (*SIZES, 80, 96, 127, 128, 129, 160, 192, 200, 255, 256, 257, 320)
_COPIES = 3  # that vmap maps over
# Products of two, and sums of such scores over head and scale, are finite in float32.
_LARGEST_OF_ATTENTION = 1e15


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An array of a call.

    Attributes:
      kind: what it is: `"normal"`, drawn in every way; `"weight"`, not too large; `"bias"` of scores, `"cos"`;
        of integers `"mask"`, `"ids"` of segments, `"rows"` of a table; a traced `"scale"`.
      scale: standard deviation where it is normal, `shift` the mean; of rows, how many there are.
      limit: the largest that it may hold, so that squares and products of float32 are finite.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    limit: float = 1e15


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is compiled once."""

    op: str
    dtype: str
    inputs: dict[str, Input]
    options: dict[str, Any]
    transformation: str
    implementation: str | None

    def __str__(self) -> str:
        shapes = " ".join(f"{name}={i.dtype}{list(i.shape)}" for name, i in self.inputs.items())
        options = " ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.op} {self.implementation} {self.transformation}: {shapes} {options}".rstrip()

    @property
    def floats(self) -> list[str]:
        """The arrays that have gradients."""
        return [name for name, i in self.inputs.items() if i.kind not in ("mask", "ids", "rows", "scale")]

    def call(self, arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
        """The results of the op, one or more."""
        out = getattr(ops, self.op)(**arrays, **self.options, implementation=self.implementation)
        return out if isinstance(out, tuple) else (out,)

    def expected(self, arrays: dict[str, Array]) -> tuple[Bounded, ...]:
        """The same by the reference, for arrays in float64."""
        out = REFERENCES[self.op](dtype=self.dtype, **arrays, **self.options)
        return out if isinstance(out, tuple) else (out,)


class Pick:
    """Draws by a seeded generator.

    Attributes:
      sizes: of long axes, those of this machine when None.
      times: what numbers of batches and heads are multiplied by, most of the time.
    """

    def __init__(self, rng: np.random.Generator, *, sizes: Sequence[int] | None = None, times: int = 1) -> None:
        self.rng, self.times = rng, times
        self.sizes = (LARGE if ON_GPU else SIZES) if sizes is None else sizes

    def of(self, values: Sequence[Any]) -> Any:
        return values[self.rng.integers(len(values))]

    def by(self, shares: dict[Any, float]) -> Any:
        total, point = sum(shares.values()), self.rng.random()
        for value, share in shares.items():
            point -= share / total
            if point < 0:
                return value
        return value

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def size(self, *, multiple: int = 1, most: int = 10**9) -> int:
        return int(self.of([n for n in self.sizes if n % multiple == 0 and n <= most]))

    def few(self, *sizes: int) -> int:
        """A number of batches or heads."""
        number = int(self.of(sizes))
        return number if self.times == 1 else number * self.of((1, self.times, self.times))

    def rows(self) -> int:
        """A long axis now and then, a short one most of the time."""
        return int(self.of((1000, 1024, 2049, 4100))) if ON_GPU and self.chance(0.15) else self.size()

    def product(self, mosaic: bool) -> tuple[int, int, int]:
        """Rows, depth and columns of a product; those that kernels for Hopper take, if so wanted."""
        if mosaic and ON_GPU and self.chance(0.2):  # the gradient of many rows has a kernel of its own
            return self.of((2048, 2056, 4096)), 64 * self.size(most=8), 64 * self.size(most=8)
        if mosaic:
            return 8 * self.size(most=64), 64 * self.size(most=8), 64 * self.size(most=8)
        return self.rows(), self.size(), self.size()

    def tiles(self, *, splits: Sequence[int] = (1,)) -> triton_matmul.Config:
        """Small tiles of a product, so that small arrays have several."""
        return triton_matmul.Config(
            block_m=self.of((16, 32)),
            block_n=self.of((32, 48)),
            block_k=self.of((16, 32)),
            num_warps=self.of((1, 2)),
            num_stages=self.of((1, 2)),
            group_m=self.of((1, 2, 8)),
            splits=self.of(splits),
        )

    def other(self, dtype: str) -> str:
        """The dtype of an operand that need not be that of the others."""
        return dtype if self.chance(0.7) else self.of(DTYPES)

    def precision(self, dtype: str) -> dict[str, Any]:
        return {"precision": "default"} if dtype == "float32" and self.chance(0.3) else {}

    def out_dtype(self, dtype: str) -> dict[str, Any]:
        return {"out_dtype": self.of(DTYPES)} if self.chance(0.2) else {}


_Drawn = tuple[dict[str, Input], dict[str, Any]]


def _matmul(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    m, k, n = pick.product(mosaic)
    batch = () if mosaic or pick.chance(0.75) else (pick.few(1, 2, 3),)
    options: dict[str, Any] = pick.precision(dtype) | ({} if mosaic else pick.out_dtype(dtype))
    out_dtype = options.get("out_dtype", dtype)
    if pick.chance(0.4):
        options["transpose_w"] = True
    if pick.chance(0.6):
        options["activation"] = pick.of(tuple(ops.ACTIVATIONS))
    if dtype == "float16" and pick.chance(0.1):
        options["acc_dtype"] = "float16"
    if not mosaic and not batch and pick.chance(0.3):
        options["algorithm"] = pick.of(matmul_form.ALGORITHMS)
    elif not mosaic and pick.chance(0.3):
        options["config"] = pick.tiles(splits=(1, 2, 3))
    w = (*batch, n, k) if options.get("transpose_w") else (*batch, k, n)
    inputs = {
        "x": Input((*batch, m, k) if batch or pick.chance(0.6) else (k,), dtype),
        "w": Input(w, dtype, scale=k**-0.5),
    }
    if mosaic:
        inputs["x"] = Input((m, k), dtype)
    if pick.chance(0.5):
        inputs["bias"] = Input((n,), pick.other(dtype))
    if pick.chance(0.4):
        residual = out_dtype if mosaic else pick.other(dtype)
        inputs["residual"] = Input((*inputs["x"].shape[:-1], n), residual)
    return inputs, options


def _mlp(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    m, k, n = pick.product(mosaic)
    d = pick.product(mosaic)[2]
    inputs = {
        "x": Input((m, k), dtype, limit=1e7),
        "w_up": Input((k, n), dtype, scale=k**-0.5, limit=1e3),
        "w_down": Input((n, d), dtype, scale=n**-0.5, limit=1e3),
    }
    for name, size in (("bias_up", n), ("bias_down", d)):
        if pick.chance(0.5):
            inputs[name] = Input((size,), pick.other(dtype), limit=1e3)
    if pick.chance(0.5):
        inputs["residual"] = Input((m, d), dtype if mosaic else pick.other(dtype))
    return inputs, pick.precision(dtype) | {"activation": pick.of(tuple(ops.ACTIVATIONS))}


def _gated(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    m, k, n = pick.product(mosaic)
    inputs = {
        "x": Input((m, k), dtype, limit=1e9),
        "w_gate_up": Input((k, 2, n), dtype, scale=k**-0.5, limit=1e6),
    }
    options = pick.precision(dtype) | {"activation": pick.of((None, *ops.ACTIVATIONS))}
    return inputs, options


def _gated_matmul(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    inputs, options = _gated(pick, dtype, mosaic)
    options |= {"config": pick.tiles()} if not mosaic and pick.chance(0.3) else {}
    if pick.chance(0.5):
        inputs["bias"] = Input((2, inputs["w_gate_up"].shape[2]), pick.other(dtype), limit=1e9)
    return inputs, options | ({} if mosaic else pick.out_dtype(dtype))


def _gated_mlp(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    inputs, options = _gated(pick, dtype, mosaic)
    m, n = inputs["x"].shape[0], inputs["w_gate_up"].shape[2]
    d = 64 * pick.size(most=8) if mosaic else pick.size()
    inputs["w_down"] = Input((n, d), dtype, scale=n**-0.5, limit=1e3)
    if pick.chance(0.5):
        inputs["residual"] = Input((m, d), dtype if mosaic else pick.other(dtype))
    return inputs, options


def _epsilon(pick: Pick) -> float:
    return pick.of((1e-12, 1e-6, 1e-5, 0.1))


def _stream(pick: Pick, m: int, n: int, dtype: str) -> Input:
    """What is added before a norm: it may be as far from 0 as the sum of all layers before."""
    return Input((m, n), pick.other(dtype), shift=0.0 if dtype == "float32" else pick.of((0.0, 1000.0)))


def _matmul_layer_norm(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    m, k, n = pick.product(mosaic)
    if mosaic:
        n = pick.of((128, 256, 384))
    inputs = {
        "x": Input((m, k), dtype, limit=1e7),
        "w": Input((k, n), dtype, scale=k**-0.5, limit=1e7),
        "scale": Input((n,), pick.other(dtype), scale=0.3, shift=1.0),
        "offset": Input((n,), pick.other(dtype)),
    }
    if pick.chance(0.5):
        inputs["bias"] = Input((n,), pick.other(dtype))
    if pick.chance(0.5):
        inputs["residual"] = Input((m, n), dtype) if mosaic else _stream(pick, m, n, dtype)
    options = pick.precision(dtype) | {"epsilon": _epsilon(pick)}
    return inputs, options | ({"config": pick.tiles(splits=(1, 2))} if not mosaic and pick.chance(0.3) else {})


def _post_norm_mlp(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    m, k, n, f = pick.rows(), pick.size(), pick.size(), pick.size()
    if mosaic:
        m, n = 8 * pick.size(most=64), pick.of((128, 256, 384))
        k, f = n, n * pick.of((1, 2, 4))
    inputs = {"y": Input((m, k), dtype, limit=1e3), "x": Input((m, n), dtype, limit=1e3)}
    for name, shape in (("w_out", (k, n)), ("w_up", (n, f)), ("w_down", (f, n))):
        inputs[name] = Input(shape, dtype, scale=shape[0] ** -0.5, limit=1e3)
    for name in ("out", "up", "down"):
        if mosaic or pick.chance(0.5):
            inputs[f"bias_{name}"] = Input((f if name == "up" else n,), pick.other(dtype), limit=1e3)
    for end in ("_out", ""):
        inputs[f"scale{end}"] = Input((n,), pick.other(dtype), scale=0.3, shift=1.0, limit=1e3)
        inputs[f"offset{end}"] = Input((n,), pick.other(dtype), limit=1e3)
    options = pick.precision(dtype) | {"epsilon": _epsilon(pick), "activation": pick.of(tuple(ops.ACTIVATIONS))}
    return inputs, options


def _norm(pick: Pick, dtype: str, _: bool) -> _Drawn:
    m, n = pick.rows(), pick.rows()
    inputs = {"x": Input((m, n), dtype), "scale": Input((n,), pick.other(dtype), scale=0.3, shift=1.0)}
    options: dict[str, Any] = {"epsilon": _epsilon(pick)}
    if pick.chance(0.5):
        inputs["residual"] = _stream(pick, m, n, dtype)
        options |= {"return_residual": True} if pick.chance(0.4) else {}
    if pick.chance(0.3):  # rows in several steps
        options["config"] = triton_norm.Config(block_m=pick.of((1, 2, 4)), block_n=16, num_warps=pick.of((1, 4)))
    return inputs, options


def _layer_norm(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    inputs, options = _norm(pick, dtype, mosaic)
    return inputs | {"bias": Input(inputs["scale"].shape, pick.other(dtype))}, options


def _softmax(pick: Pick, dtype: str, _: bool) -> _Drawn:
    shape = (pick.few(1, 2, 3), pick.size(), pick.rows())
    options: dict[str, Any] = {}
    if pick.chance(0.25):
        options["axis"] = pick.of((0, 1, -2))
    elif pick.chance(0.6):
        options["algorithm"] = pick.of(softmax_form.ALGORITHMS)
        if options["algorithm"] != "fused" and pick.chance(0.5):
            splits = pick.of((1, 2, 3)) if options["algorithm"] == "online" else 1
            options["config"] = triton_softmax.Config(
                block_m=pick.of((1, 2, 4)), block_n=16, num_warps=pick.of((1, 2)), splits=splits
            )
    if pick.chance(0.5):
        options["scale"] = pick.of((0.5, 0.125, 3.0, -1.0, 1e-3))
    inputs = {"x": Input(shape, dtype, scale=2.0, limit=1e30)}
    if pick.chance(0.5):
        kept = [shape, (shape[0], 1, shape[2]), (1, *shape[1:]), shape[2:], shape[1:]]
        inputs["where"] = Input(pick.of(kept), pick.of(("bool", "int32", "int8")), "mask")
    return inputs, options


def _masks(pick: Pick, batch: int, seq: int, kv_seq: int, heads: int, dtype: str, mosaic: bool) -> _Drawn:
    inputs: dict[str, Input] = {}
    options: dict[str, Any] = {}
    if pick.chance(0.6):
        options["causal"] = True
    if pick.chance(0.4):
        options["window"] = int(pick.of((1, 2, 3, 17, 18, 31, 64, 10**12)))
    if pick.chance(0.2):
        options["sm_scale"] = pick.of((0.3, 1.0, 0.01))
    if pick.chance(0.3):
        options["return_lse"] = True
    if pick.chance(0.3):
        inputs["mask"] = Input((batch, kv_seq), pick.of(("bool", "int32")), "mask")
    if pick.chance(0.3):
        shape = (pick.of((1, batch)), pick.of((1, heads)), seq, kv_seq)
        inputs["bias"] = Input(shape, pick.other(dtype), "bias")
    if pick.chance(0.3):
        inputs["segment_ids"] = Input((batch, seq), "int32", "ids")
        if seq != kv_seq:
            inputs["kv_segment_ids"] = Input((batch, kv_seq), "int32", "ids")
    if not mosaic and pick.chance(0.3):
        options["config"] = triton_attention.Config(
            block_q=pick.of((16, 32)), block_kv=pick.of((16, 32)), num_warps=1, num_stages=2
        )
    elif "sm_scale" not in options and pick.chance(0.1):
        inputs["sm_scale"] = Input((), "float32", "scale")
    return inputs, options


def _heads(pick: Pick, mosaic: bool) -> tuple[int, int, int, int]:
    kv_heads, group = pick.few(1, 2), pick.of((1, 2, 3))
    head_dim = pick.of((64, 128) if mosaic else (16, 20, 32, 48, 64, 80, 128) if ON_GPU else (16, 20, 32, 48, 64))
    return pick.few(1, 2), kv_heads * group, kv_heads, head_dim


def _attention(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    batch, heads, kv_heads, head_dim = _heads(pick, mosaic)
    seq = pick.rows()
    kv_seq = seq if pick.chance(0.6) else pick.size()
    if seq * kv_seq > 2**20:
        batch, heads = 1, kv_heads
    masks, options = _masks(pick, batch, seq, kv_seq, heads, dtype, mosaic)
    kv = Input((batch, kv_seq, kv_heads, head_dim), dtype, limit=_LARGEST_OF_ATTENTION)
    inputs = {"q": dataclasses.replace(kv, shape=(batch, seq, heads, head_dim)), "k": kv, "v": kv}
    return inputs | masks, options | pick.precision(dtype)


def _attention_qkv(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    batch, heads, kv_heads, head_dim = _heads(pick, mosaic)
    seq = pick.size()
    masks, options = _masks(pick, batch, seq, seq, heads, dtype, mosaic)
    inputs = {"qkv": Input((batch, seq, (heads + 2 * kv_heads) * head_dim), dtype, limit=_LARGEST_OF_ATTENTION)}
    heads_of = {"num_heads": heads} | ({} if heads == kv_heads else {"num_kv_heads": kv_heads})
    return inputs | masks, heads_of | options | pick.precision(dtype)


def _embed_tokens(pick: Pick, dtype: str, _: bool) -> _Drawn:
    batch, seq, n, vocabulary, types = (
        pick.few(1, 2, 3),
        pick.size(),
        pick.size(),
        pick.size(),
        pick.of((1, 2, 3)),
    )
    inputs = {
        "ids": Input((batch, seq), pick.of(("int32", "uint8", "uint32")), "rows", scale=vocabulary),
        "word": Input((vocabulary, n), dtype),
        "position": Input((seq + pick.of((0, 3)), n), dtype),
        "token_type": Input((types, n), dtype),
        "scale": Input((n,), pick.other(dtype), scale=0.3, shift=1.0),
        "bias": Input((n,), pick.other(dtype)),
    }
    if pick.chance(0.5):
        inputs["token_type_ids"] = Input((batch, seq), "int32", "rows", scale=types)
    if pick.chance(0.3):
        inputs["position_ids"] = Input((batch, seq), "int32", "rows", scale=seq)
    return inputs, {"epsilon": _epsilon(pick)}


def _rotary(pick: Pick, dtype: str, _: bool) -> _Drawn:
    batch, seq, heads, kv_heads = pick.few(1, 2), pick.size(), pick.few(1, 2, 3), pick.few(1, 2)
    half = pick.of((1, 3, 8, 16, 32, 40, 64))
    table = Input((*((batch,) if pick.chance(0.5) else ()), seq, half), pick.other("float32"), "cos")
    inputs = {
        "qkv": Input((batch, seq, (heads + 2 * kv_heads) * 2 * half), dtype),
        "cos": table,
        "sin": table,
    }
    if pick.chance(0.6):
        inputs |= {f"{x}_scale": Input((2 * half,), pick.other(dtype), scale=0.3, shift=1.0) for x in "qk"}
    return inputs, {"num_heads": heads, "num_kv_heads": kv_heads, "epsilon": _epsilon(pick)}


def _mean_pool(pick: Pick, dtype: str, _: bool) -> _Drawn:
    batch, seq, n = pick.few(1, 2, 5), pick.rows(), pick.size()
    inputs = {
        "x": Input((batch, seq, n), dtype),
        "mask": Input((batch, seq), pick.of(("bool", "int32", "int8")), "mask"),
    }
    return inputs, {"normalize": pick.chance(0.7), "epsilon": pick.of((1e-12, 1e-6, 0.1))}


def _segment_mean_pool(pick: Pick, dtype: str, _: bool) -> _Drawn:
    batch, seq, n = pick.few(1, 2, 5), pick.rows(), pick.size()
    inputs = {
        "x": Input((batch, seq, n), dtype),
        "segment_ids": Input((batch, seq), pick.of(("int32", "int8", "uint32")), "ids"),
    }
    return inputs, {"num_segments": pick.of((1, 3, 6)), "normalize": pick.chance(0.7)}


def _triangle_update(pick: Pick, dtype: str, mosaic: bool) -> _Drawn:
    n = pick.of((64, 128) if ON_GPU else (64,)) if mosaic else pick.size(most=129 if ON_GPU else 33)
    b = pick.few(1, 2) if n <= 64 else 1  # a reference of more takes half a minute
    c, h = (
        (pick.of((64, 96, 128)), pick.of((32, 64, 128))) if mosaic else (pick.size(most=128), pick.size(most=128))
    )
    if not ON_GPU:
        c, h = min(c, 64), min(h, 64)
    options: dict[str, Any] = {
        "direction": pick.of(("outgoing", "incoming")),
        "gate_after": pick.chance(0.5),
        "epsilon": _epsilon(pick),
        "compute_dtype": pick.of(DTYPES[1:] if mosaic else DTYPES),
    }
    g = c if options["gate_after"] else h
    shapes = {
        "norm_scale": ((c,), 0.3, 1.0),
        "norm_bias": ((c,), 1.0, 0.0),
        "w_in": ((c, 4, h), c**-0.5, 0.0),
        "out_norm_scale": ((h,), 0.3, 1.0),
        "out_norm_bias": ((h,), 1.0, 0.0),
        "w_gate": ((c, g), c**-0.5, 0.0),
        "w_out": ((h, c), h**-0.5, 0.0),
    }
    for name, shape in (("b_in", (4, h)), ("b_gate", (g,)), ("b_out", (c,))):
        if pick.chance(0.5):
            shapes[name] = (shape, 1.0, 0.0)
    inputs = {"x": Input((b, n, n, c), dtype)}
    for name, (shape, scale, shift) in shapes.items():
        inputs[name] = Input(shape, pick.other(dtype), "weight", scale, shift)
    if pick.chance(0.5):
        inputs["mask"] = Input((b, n, n), pick.of(("bool", "int32", dtype)), "mask")
    return inputs, options


def _linear_cross_entropy(pick: Pick, dtype: str, _: bool) -> _Drawn:
    m, k, v = pick.size(), pick.size(), pick.rows()
    options: dict[str, Any] = pick.precision(dtype) | {"reduction": pick.of(("mean", "sum", None))}
    if pick.chance(0.4):
        options["transpose_w"] = True
    for name, values in (("label_smoothing", (0.1, 1.0)), ("logit_softcap", (5.0, 30.0)), ("z_loss", (1e-3, 0.1))):
        if pick.chance(0.3):
            options[name] = pick.of(values)
    inputs = {
        "x": Input((m, k), dtype, limit=1e4),
        "w": Input((v, k) if options.get("transpose_w") else (k, v), dtype, scale=k**-0.5, limit=1e4),
        "labels": Input((m,), pick.of(("int32", "int16")), "rows", scale=v),
    }
    if pick.chance(0.4):
        inputs["bias"] = Input((v,), pick.other(dtype), "weight")
    if pick.chance(0.5):
        inputs["weights"] = Input((m,), pick.of(("bool", "int32", "float32")), "mask")
    return inputs, options


_DRAW: dict[str, Callable[[Pick, str, bool], _Drawn]] = {
    "matmul": _matmul,
    "mlp": _mlp,
    "gated_matmul": _gated_matmul,
    "gated_mlp": _gated_mlp,
    "matmul_layer_norm": _matmul_layer_norm,
    "post_norm_mlp": _post_norm_mlp,
    "layer_norm": _layer_norm,
    "rms_norm": _norm,
    "softmax": _softmax,
    "attention": _attention,
    "attention_qkv": _attention_qkv,
    "embed_tokens": _embed_tokens,
    "rotary": _rotary,
    "mean_pool": _mean_pool,
    "segment_mean_pool": _segment_mean_pool,
    "triangle_update": _triangle_update,
    "linear_cross_entropy": _linear_cross_entropy,
}


def _has_kernel(op: str, backend: str) -> bool:
    """Whether the module of an op has a record of a kernel of that backend."""
    module = sys.modules[getattr(ops, op).__module__]
    records = [value for value in vars(module).values() if isinstance(value, Op | legacy.Op)]
    return any(kernel.backend == backend for record in records for kernel in record.kernels)


MOSAIC = tuple(op for op in _DRAW if _has_kernel(op, "mosaic"))


def call(pick: Pick, implementation: str | None = None) -> Program:
    """A call of an op, not transformed; `implementation` in place of one that is drawn."""
    name = implementation or pick.by(SHARES)
    mosaic = name is not None and name.startswith("mosaic")
    op = pick.of(MOSAIC if mosaic else tuple(_DRAW))
    dtype = pick.of(DTYPES[1:] if mosaic else DTYPES)
    inputs, options = _DRAW[op](pick, dtype, mosaic)
    return Program(op, dtype, inputs, options, "", name)


def program(seed: int, index: int, implementation: str | None = None) -> Program:
    """Program `index` of a campaign; `implementation` in place of one that is drawn."""
    pick = Pick(np.random.default_rng([seed, index]))
    p = call(pick, implementation)
    inputs = p.inputs
    transformation = pick.by(TRANSFORMATIONS)
    if transformation in ("vjp", "jvp") and not differentiable(p):
        transformation = "jit"
    if transformation == "vmap" and any(i.kind == "scale" for i in inputs.values()):
        transformation = "jit"
    if transformation == "vmap":  # whatever subset of the arrays
        names = [key for key in inputs if pick.chance(0.5)] or [next(iter(inputs))]
        for key in names:
            inputs[key] = dataclasses.replace(inputs[key], shape=(_COPIES, *inputs[key].shape))
        transformation += f" over {' '.join(names)}"
    return dataclasses.replace(p, transformation=transformation)


def differentiable(p: Program) -> bool:
    """Whether the derivative is smooth enough for differences: wide rows, no kinks, no results of 16 bits."""
    inputs, options = p.inputs, p.options
    wide = all(size >= 7 for i in inputs.values() if i.kind != "mask" for size in i.shape[-1:])
    exact = options.get("acc_dtype") is None and options.get("precision") is None
    return (
        wide
        and exact
        and options.get("activation") != "relu"
        and not any(i.kind == "scale" for i in inputs.values())
    )


def values(rng: np.random.Generator, spec: Input, special: bool = False) -> Array:
    """What an array holds, in its dtype."""
    shape = spec.shape
    if spec.kind == "mask":
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0), p=(0.05, 0.2, 0.4, 0.25, 0.1))
        mask = rng.random(shape) < share
        if rng.random() < 0.3:  # padding at the end
            mask = np.broadcast_to(np.arange(shape[-1]) < rng.integers(0, shape[-1] + 1), shape)
        if spec.dtype in HALF_ULP and rng.random() < 0.5:
            return (mask * rng.normal(1.0, 0.5, shape)).astype(jnp.dtype(spec.dtype))
        return mask.astype(jnp.dtype(spec.dtype))
    if spec.kind == "rows":
        return rng.integers(0, int(spec.scale), shape).astype(spec.dtype)
    if spec.kind == "ids":
        ids = rng.integers(0, int(rng.integers(1, 5)), shape)
        return (ids if rng.random() < 0.3 else np.sort(ids, -1)).astype(spec.dtype)
    if spec.kind == "scale":
        return np.asarray(rng.choice((0.3, 0.05)), spec.dtype)
    x = rng.normal(spec.shift, spec.scale, shape)
    if spec.kind == "cos":
        x = np.cos(rng.normal(0.0, 30.0, shape))
    elif special and spec.kind != "scale":
        x = _special(rng, spec, x)
    limit = min(spec.limit, float(jnp.finfo(spec.dtype).max))
    return np.clip(x, -limit, limit).astype(jnp.dtype(spec.dtype)) if spec.kind != "bias" else _bias(rng, spec, x)


def _special(rng: np.random.Generator, spec: Input, x: Array) -> Array:
    """Values that are rare: large, small, constant, far from 0, on the edge of what a dtype holds."""
    largest = min(spec.limit, float(jnp.finfo(spec.dtype).max))
    match rng.integers(0, 9 if spec.kind != "weight" else 5):
        case 0:
            return np.zeros_like(x)
        case 1:  # rows that are constant
            return np.broadcast_to(x[..., :1], x.shape)
        case 2:  # one element of many
            return np.where(rng.random(x.shape) < 1 / max(x.shape[-1], 1), x, 0.0)
        case 3:  # powers of two of either sign
            return np.sign(x) * 2.0 ** rng.integers(-8, 5, x.shape)
        case 4:
            return x * 1e-3
        case 5:
            return x + rng.choice((10.0, 100.0, 1000.0))
        case 6:  # subnormal in float16
            return x * rng.choice((1e-5, 1e-7, 1e-20))
        case 7:
            return x * largest * 0.1
        case _:  # a few at the edge
            return np.where(rng.random(x.shape) < 0.05, np.sign(x) * largest, x)


def _bias(rng: np.random.Generator, spec: Input, x: Array) -> Array:
    lowest = -np.inf if rng.random() < 0.5 or spec.dtype == "float16" else -2e30
    return np.where(rng.random(x.shape) < rng.choice((0.0, 0.3)), lowest, x).astype(jnp.dtype(spec.dtype))


def arrays_of(program: Program, rng: np.random.Generator) -> tuple[dict[str, Array], bool]:
    """What the arrays of a call hold, and whether there are rare values in them.

    These are in masked places too, and so are infinities and NaN where it is documented what becomes of them.
    """
    derived = program.transformation in ("vjp", "jvp")
    special = not derived and bool(rng.random() < 0.6)
    out = {name: values(rng, spec, special and rng.random() < 0.6) for name, spec in program.inputs.items()}
    if derived:
        return out, False
    if program.op == "softmax":
        _fill(rng, out, "x", "where", program)
        if rng.random() < 0.2:
            out["x"] = np.where(rng.random(out["x"].shape) < 0.1, -np.inf, out["x"]).astype(out["x"].dtype)
    if program.op == "mean_pool":
        _fill(rng, out, "x", "mask", program)
    if program.op == "triangle_update":
        _fill(rng, out, "x", "mask", program)
    if program.op == "linear_cross_entropy":
        _fill(rng, out, "x", "weights", program)
        _fill(rng, out, "labels", "weights", program)
    return out, special


def _fill(rng: np.random.Generator, arrays: dict[str, Array], name: str, mask: str, program: Program) -> None:
    """Puts NaN or infinities where a mask is 0."""
    if mask not in arrays or "vmap" in program.transformation or rng.random() < 0.5:
        return
    masked, x = arrays[mask] == 0, arrays[name]
    if program.op != "softmax" and x.ndim > masked.ndim:
        masked = masked[..., None]
    fill = -100 if x.dtype.kind == "i" else rng.choice((np.nan, np.inf, -np.inf, 1e4))
    arrays[name] = np.where(np.broadcast_to(masked, arrays[name].shape), fill, arrays[name]).astype(
        arrays[name].dtype
    )


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


@functools.lru_cache(maxsize=1)
def _compiled(seed: int, index: int, implementation: str | None) -> tuple[Program, Callable[..., Any]]:
    """A program and its function of all arrays, compiled once for the cases that share it."""
    p = program(seed, index, implementation)
    match p.transformation.split()[0]:
        case "eager":
            return p, p.call
        case "vmap":
            names = p.transformation.split()[2:]
            return p, jax.jit(jax.vmap(p.call, ({key: 0 if key in names else None for key in p.inputs},)))
        case "vjp":
            return p, jax.jit(functools.partial(_pull_back, p))
        case "jvp":
            return p, jax.jit(functools.partial(_push_forward, p))
        case _:
            return p, jax.jit(p.call)


def _pull_back(p: Program, arrays: dict[str, Any], cotangents: tuple[Any, ...]) -> dict[str, jax.Array]:
    rest = {key: x for key, x in arrays.items() if key not in p.floats}
    _, pullback = jax.vjp(lambda floats: p.call(floats | rest), {key: arrays[key] for key in p.floats})
    return pullback(cotangents)[0]


def _push_forward(p: Program, arrays: dict[str, Any], tangents: dict[str, Any]) -> tuple[jax.Array, ...]:
    rest = {key: x for key, x in arrays.items() if key not in p.floats}
    floats = {key: arrays[key] for key in p.floats}
    return jax.jvp(lambda floats: p.call(floats | rest), (floats,), (tangents,))[1]


def _slope(p: Program, arrays: dict[str, Array], along: dict[str, Array], cotangents: Sequence[Array]) -> float:
    """The derivative of the sum of `cotangents` times results along a direction, by central differences."""
    step = 1e-5

    def at(t: float) -> float:
        moved = {key: x + t * along[key] if key in along else x for key, x in arrays.items()}
        return sum(
            float(np.sum(np.where(np.isfinite(out.value), out.value, 0.0) * ct))
            for out, ct in zip(p.expected(moved), cotangents, strict=True)
        )

    return (at(step) - at(-step)) / (2 * step)


def _check_derivative(
    p: Program, function: Callable[..., Any], arrays: dict[str, Array], rng: np.random.Generator
) -> tuple[str | None, float, float]:
    """Projections of derivatives on random directions, against differences in float64.

    Normal directions see the error of every element: the projection of an error is normal with its norm as the
    standard deviation, of which 6 are never passed.
    """
    wide = {key: _wide(x) for key, x in arrays.items()}
    values = [out.value for out in p.expected(wide)]
    cotangents = [rng.normal(size=value.shape) for value in values]
    used = {p.dtype, p.options.get("compute_dtype", p.dtype)}
    tolerance = max(DEEP if dtype == "float32" else 2 * OP[dtype] for dtype in used)  # one product after another
    along = {key: rng.normal(size=wide[key].shape) for key in p.floats}
    dtypes = [x.dtype for x in jax.eval_shape(p.call, arrays)]
    cotangents = [_wide(ct.astype(d)) for ct, d in zip(cotangents, dtypes, strict=True)]
    along = {key: _wide(t.astype(arrays[key].dtype)) for key, t in along.items()}
    if p.transformation == "jvp":
        tangents = {key: t.astype(arrays[key].dtype) for key, t in along.items()}
        moved = [_wide(np.asarray(x)) for x in function(arrays, tangents)]
        moved = [np.where(np.isfinite(x), x, 0.0) for x in moved]
        pairs = [(sum(float(np.sum(x * ct)) for x, ct in zip(moved, cotangents, strict=True)), along, moved)]
        names = ["the tangent"]
        tolerance += max(HALF_ULP[str(d)] for d in dtypes)
    else:
        gradients = function(arrays, tuple(ct.astype(d) for ct, d in zip(cotangents, dtypes, strict=True)))
        pairs = []
        for key in p.floats:
            gradient = _wide(np.asarray(gradients[key]))
            pairs.append((float(np.sum(gradient * along[key])), {key: along[key]}, [gradient]))
        names = [f"the gradient of {key}" for key in p.floats]
        tolerance += max(HALF_ULP[p.inputs[key].dtype] for key in p.floats)
    # A derivative that is 0, as that of a softmax of one score, is a difference of float32 sums of this size.
    cancelled = UNIT * sum(
        float(np.sum(np.abs(np.nan_to_num(ct * value, posinf=0.0, neginf=0.0))))
        for ct, value in zip(cotangents, values, strict=True)
    )
    worst = 0.0
    for name, (found, direction, parts) in zip(names, pairs, strict=True):
        norm = float(np.sqrt(sum(np.sum(np.square(part)) for part in parts)))
        expected = _slope(p, wide, direction, cotangents)
        length = math.sqrt(sum(float(np.sum(np.square(t))) for t in direction.values()))
        bound = 6 * tolerance * norm + cancelled * length + 1e-6
        if not abs(found - expected) <= bound:
            return (
                f"{name} along a direction is {found:.9g}, expected {expected:.9g} +- {bound:.2g}",
                np.inf,
                np.inf,
            )
        worst = max(worst, abs(found - expected) / bound)
    return None, worst, worst * 6 * tolerance


def _check(
    p: Program, function: Callable[..., Any], arrays: dict[str, Array], rng: np.random.Generator
) -> tuple[str | None, float, float]:
    """What is wrong with a call, its largest error as a part of the bound, and that in relation to the norm."""
    kind = p.transformation.split()[0]
    if kind in ("vjp", "jvp"):
        return _check_derivative(p, function, arrays, rng)
    if kind == "x64":
        with jax.enable_x64(True):
            outs = function(arrays)
    elif kind == "strict":
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            outs = function(jax.tree.map(jnp.asarray, arrays))
    else:
        outs = function(jax.tree.map(jnp.asarray, arrays))
    mapped = p.transformation.split()[2:] if kind == "vmap" else []
    results = []
    for i in range(_COPIES if mapped else 1):
        wide = {key: _wide(x[i] if key in mapped else x) for key, x in arrays.items()}
        for out, expected in zip(outs, p.expected(wide), strict=True):
            results.append(disagreement(out[i] if mapped else out, expected, str(out.dtype)))
    wrong = next((message for message, *_ in results if message), None)
    return wrong, max(part for _, part, _ in results), max(relative for _, _, relative in results)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int
    implementation: str | None
    measured: dict[str, float]

    def __call__(self) -> str | None:
        p, function = _compiled(self.seed, self.index // DRAWS, self.implementation)
        rng = np.random.default_rng([self.seed, *divmod(self.index, DRAWS)])
        arrays, special = arrays_of(p, rng)
        self.measured["cases"] = 1
        try:
            with np.errstate(all="ignore"):  # infinities and NaN are among the values
                message, part, relative = _check(p, function, arrays, rng)
        except NotImplementedError:
            if self.implementation is None and "mosaic" not in str(p.implementation):
                raise  # every other one serves every call
            self.measured["refused"] = 1
            return None
        self.measured["largest part of its bound"] = part
        if not special:  # of others it says little: most of the norm may be a value that is far from the rest
            self.measured["largest relative error"] = relative
        return message


def cases(seed: int, implementation: str | None = None) -> Iterator[Case]:
    """Calls of ops; see the module."""
    for number in itertools.count():
        p = program(seed, number, implementation)
        for draw in range(DRAWS):
            trial = _Trial(seed, number * DRAWS + draw, implementation, {})
            kind = "gradient" if p.transformation in ("vjp", "jvp") else "value"
            yield Case(str(p), trial, (p.op, p.dtype, str(p.implementation), kind), trial.measured)
