"""The cases of `ops.triangle_attention`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from pallas_models.kernels.triton.attention import Config
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.cases.attention import formula as of_attention
from parity.support.bounded import Array, Bounded
from parity.support.common import ON_GPU, array, normal
from parity.support.draws import Drawn, Input, Pick

_LARGEST = 1e15  # as for attention: sums of products of two are finite in float32
_OP = ops.triangle_attention


def _small(size: int, dtype: str) -> Arrays:
    batch, n, _, _ = sizes(size)
    n, d = (n, 20) if size == 1 else (2 * size, 32)
    rng = np.random.default_rng(71)
    pairs = (normal(rng, batch, n, n, 4, d, dtype=dtype) for _ in range(3))
    return *pairs, normal(rng, batch, 4, n, n, dtype=dtype), array(rng.integers(0, 4, (batch, n, n)) > 0, "int32")


def _arguments(q: Any, k: Any, v: Any, bias: Any, mask: Any, *, direction: str) -> dict[str, Any]:
    return dict(q=q, k=k, v=v, bias=bias, mask=mask, direction=direction)


def _call(direction: str) -> Call:
    arguments = functools.partial(_arguments, direction=direction)
    return Call(f"triangle_attention_{direction}", _OP, arguments, _small, 4, (0, 1, 2, 3, 4))


def _resident(size: int, dtype: str, *, direction: str) -> Arrays:
    """Three lines of heads of 32, all keys of which a CTA holds at once; one keeps only its first keys."""
    n, rng = (64 if size == 1 else 320), np.random.default_rng(72)
    shape = (1, 3, n) if direction == "starting" else (1, n, 3)
    pairs = (normal(rng, *shape, 2, 32, dtype=dtype) for _ in range(3))
    mask = np.ones((1, 3, n), int)
    mask[0, 1, n // 3 :] = 0
    mask = mask if direction == "starting" else mask.swapaxes(1, 2)
    return *pairs, normal(rng, 1, 2, n, n, dtype=dtype), array(mask, "int32")


def _resident_call(direction: str) -> Call:
    arguments = functools.partial(_arguments, direction=direction)
    make = functools.partial(_resident, direction=direction)
    return Call(f"triangle_attention_resident_{direction}", _OP, arguments, make, 4, (0, 1, 2, 3, 4))


def _large(dtype: str, n: int, heads: int, head_dim: int, direction: str) -> dict[str, Any]:
    pairs, bias, mask = ((1, n, n, heads, head_dim), (1, heads, n, n), (1, n, n))
    arrays = (*[shaped(dtype, *pairs)] * 3, shaped(dtype, *bias), shaped("int32", *mask))
    return _arguments(*arrays, direction=direction)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    arrays = (
        *(normal(rng, 4, 8, 8, 2, 16) for _ in range(3)),
        normal(rng, 4, 2, 8, 8),
        array(rng.integers(0, 2, (4, 8, 8)), "int32"),
    )

    def spread(name: str, direction: str, *axes: str | None, bias: P, sums: int, kind: Any) -> Spread:
        """Operands that are split by batch, rows, columns or heads."""
        arguments = functools.partial(_arguments, direction=direction)
        return Spread(
            call=Call(name, _OP, arguments, lambda size, dtype: arrays, 4),
            specs=(*[P(*axes)] * 3, bias, P(*axes[:3])),
            result=P(*axes, *[None] * (5 - len(axes))),
            sums=sums,
            kinds=(kind,),
        )

    return (
        spread("batch", "starting", "data", bias=P("data"), sums=0, kind="shard_map"),
        spread("rows", "starting", None, "data", bias=P(), sums=1, kind="shard_map"),
        spread("columns", "ending", None, None, "data", bias=P(), sums=1, kind="explicit"),
        spread("heads", "ending", None, None, None, "model", bias=P(None, "model"), sums=0, kind="explicit"),
    )


def _formula(
    *,
    dtype: str,
    q: Array,
    k: Array,
    v: Array,
    direction: str,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: Array | float | None = None,
    **options: Any,
) -> Bounded:
    """Attention with the lines of all squares as its batch."""
    batch, *square = q.shape[:3]
    count, n = square if direction == "starting" else square[::-1]

    def lines(x: Array) -> Array:
        x = x if direction == "starting" else x.swapaxes(1, 2)
        return x.reshape(batch * count, n, *x.shape[3:])

    if bias is not None:
        bias = np.repeat(bias if direction == "starting" else bias.swapaxes(-1, -2), count, 0)
    if mask is not None:
        mask = lines(mask)
    out = of_attention(
        dtype=dtype, q=lines(q), k=lines(k), v=lines(v), bias=bias, mask=mask, sm_scale=scale, **options
    )
    assert isinstance(out, Bounded)

    def pairs(x: Array) -> Array:
        x = x.reshape(batch, count, n, *q.shape[3:])
        return x if direction == "starting" else x.swapaxes(1, 2)

    return out.map(pairs)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    n = 64 * pick.of((1, 2, 3)) if mosaic else pick.size(most=129 if ON_GPU else 24)
    batch, heads, lines = pick.few(1, 2), pick.few(1, 2), pick.of((1, 2, 3)) if mosaic else n
    head_dim = 32 if mosaic else pick.of((16, 20, 32, 48, 64))
    options: dict[str, Any] = {"direction": pick.of(("starting", "ending"))}
    square = (lines, n) if options["direction"] == "starting" else (n, lines)
    pairs = Input((batch, *square, heads, head_dim), dtype, limit=_LARGEST)
    inputs = {"q": pairs, "k": pairs, "v": pairs}
    if pick.chance(0.7):
        inputs["bias"] = Input((batch, heads, n, n), pick.other(dtype), "bias")
    if pick.chance(0.5):
        inputs["mask"] = Input((batch, *square), pick.of(("bool", "int32", dtype)), "mask")
    if pick.chance(0.2):
        options["scale"] = pick.of((0.3, 1.0, 0.01))
    elif pick.chance(0.1):
        inputs["scale"] = Input((), "float32", "scale")
    if not mosaic and "scale" not in inputs and pick.chance(0.3):
        blocks = dict(block_q=pick.of((16, 32)), block_kv=pick.of((16, 32)))
        options["config"] = Config(**blocks, num_warps=1, num_stages=2)
    return inputs, options | pick.precision(dtype)


# JAX 0.10 does not load the transpose of shared memory.
_ON_HOPPER = ("starting", "ending") if jax.__version_info__ >= (0, 11) else ("starting",)
_NONE = dict(zip("qkv", [zeros(2, 0, 0, 2, 16)] * 3, strict=True)) | dict(bias=zeros(2, 2, 0, 0))
CASES = (
    Case(
        op=_OP,
        products="kernels",
        calls=(_call("starting"), _call("ending")),
        hopper_calls=tuple(_resident_call(direction) for direction in _ON_HOPPER),
        large={
            "triangle-attention-32": lambda dtype: _large(dtype, 768, 4, 32, "ending"),
            "triangle-attention-64": lambda dtype: _large(dtype, 384, 8, 64, "starting"),
        },
        empty=(
            Empty(_NONE | dict(direction="starting"), (2, 0, 0, 2, 16)),
            Empty(_NONE | dict(direction="ending", bias=None), (2, 0, 0, 2, 16)),
        ),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="triangle_attention",
    ),
)
