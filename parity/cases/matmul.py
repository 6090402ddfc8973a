"""The cases of `ops.matmul`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from pallas_models.kernels.forms.matmul import ALGORITHMS
from pallas_models.kernels.mosaic import matmul as mosaic
from pallas_models.kernels.triton import matmul as triton
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def small(size: int, dtype: str) -> Arrays:
    """Rows, a residual, a matrix and a bias."""
    batch, tokens, k, n = sizes(size)
    rng = np.random.default_rng(20)
    return (
        normal(rng, batch, tokens, k, dtype=dtype),
        normal(rng, batch, tokens, n, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=0.5),
    )


def _batched(size: int, dtype: str) -> Arrays:
    batch, tokens, k, n = sizes(size)
    rng = np.random.default_rng(27)
    return normal(rng, batch, tokens, k, dtype=dtype), normal(rng, batch, n, k, dtype=dtype, scale=k**-0.5)


def for_hopper(seed: int, dtype: str, m: int, k: int, n: int, *shifts: float) -> Arrays:
    """Rows, a residual, a matrix, and for each mean a vector."""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, m, n, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        *(normal(rng, n, dtype=dtype, shift=shift) for shift in shifts),
    )


def _hopper(size: int, dtype: str) -> Arrays:
    return for_hopper(31, dtype, *((72, 192, 320) if size == 1 else (128, 128, 256)), 0.5)


def _resident(size: int, dtype: str) -> Arrays:
    """Several tiles for each CTA of an H200."""
    return for_hopper(44, dtype, *((392, 192, 2112) if size == 1 else (384, 128, 2112)), 0.5)


def _linear(size: int, dtype: str) -> Arrays:
    x, _, w, bias = _hopper(size, dtype)
    return x, w, bias


def _arguments(x: Any, residual: Any, w: Any, bias: Any, **options: Any) -> dict[str, Any]:
    return dict(x=x, w=w, bias=bias, residual=residual, activation="gelu") | options


def _large(m: int, n: int, k: int, dtype: str, **options: Any) -> dict[str, Any]:
    return dict(x=shaped(dtype, m, k), w=shaped(dtype, k, n)) | options


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, columns, whole = P("data"), P(None, "model"), P()
    x, w, bias, residual = (normal(rng, *shape) for shape in ((8, 6), (6, 10), (10,), (8, 10)))

    def call(name: str, arguments: Any, *arrays: jax.Array) -> Call:
        return Call(name, ops.matmul, arguments, lambda size, dtype: arrays, len(arrays))

    def with_all(x: Any, w: Any, bias: Any, residual: Any) -> dict[str, Any]:
        return dict(x=x, w=w, bias=bias, residual=residual, activation="gelu")

    def product(name: str) -> Call:
        return call(name, with_all, x, w, bias, residual)

    def tied(x: Any, w: Any) -> dict[str, Any]:
        return dict(x=x, w=w, transpose_w=True)

    pair = P("data", None, None)
    whole_rows = normal(rng, 6, 6), w, bias, normal(rng, 6, 10)
    batched = normal(rng, 4, 3, 6), normal(rng, 4, 6, 10)
    return (
        Spread(call=product("rows"), specs=(data, whole, whole, data), result=data, sums=2, kinds=("shard_map",)),
        Spread(call=product("columns"), specs=(whole, columns, P("model"), columns), result=columns, sums=1),
        Spread(
            call=product("contraction"),
            specs=(columns, P("model"), whole, whole),
            result=P(None, None),
            sums=1,
            kinds=("explicit",),
        ),
        Spread(
            call=product("rows and columns"),
            specs=(data, columns, P("model"), P("data", "model")),
            result=P("data", "model"),
            sums=3,
            kinds=("explicit",),
        ),
        Spread(
            call=call("rows that 4 does not divide", with_all, *whole_rows),
            specs=(whole, whole, whole, whole),
            result=P(None, None),
            sums=0,
        ),
        Spread(
            call=call("of the vocabulary", tied, x, normal(rng, 10, 6)),
            specs=(data, P("model")),
            result=P("data", "model"),
            sums=2,
        ),
        Spread(
            call=call("batched", lambda x, w: dict(x=x, w=w), *batched),
            specs=(pair, pair),
            result=P("data", None, None),
            sums=0,
            kinds=("explicit",),
        ),
    )


def formula(
    *,
    dtype: str,
    x: Array | Bounded,
    w: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    transpose_w: bool = False,
    activation: str | None = None,
    acc_dtype: str = "float32",
    precision: str | None = None,
    out_dtype: str | None = None,
    algorithm: str | None = None,
    config: Any = None,
) -> Bounded:
    """activation(x w + bias) + residual."""
    del algorithm, config
    w, form = np.swapaxes(w, -1, -2) if transpose_w else w, dict(precision=precision, acc_dtype=acc_dtype)
    if activation is None:
        return b.rounded(b.product(x, w, bias, residual, dtype=dtype, **form), out_dtype or dtype)
    y = b.activation(activation, b.product(x, w, bias, dtype=dtype, **form), out_dtype or dtype)
    return b.rounded(b.plus(y, residual), out_dtype or dtype)


def tiles(pick: Pick, *, splits: Sequence[int] = (1,)) -> triton.Config:
    """Small tiles of a product, so that small arrays have several."""
    return triton.Config(
        block_m=pick.of((16, 32)),
        block_n=pick.of((32, 48)),
        block_k=pick.of((16, 32)),
        num_warps=pick.of((1, 2)),
        num_stages=pick.of((1, 2)),
        group_m=pick.of((1, 2, 8)),
        splits=pick.of(splits),
    )


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
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
        options["algorithm"] = pick.of(ALGORITHMS)
    elif not mosaic and pick.chance(0.3):
        options["config"] = tiles(pick, splits=(1, 2, 3))
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


CASES = (
    Case(
        op=ops.matmul,
        products="kernels",
        calls=(
            Call("matmul", ops.matmul, _arguments, small, 4, (0, 1)),
            Call(
                "matmul_split",
                ops.matmul,
                functools.partial(_arguments, algorithm="split_k"),
                small,
                4,
                (0, 1),
                kernels=2,
            ),
            Call("matmul_batched", ops.matmul, lambda x, w: dict(x=x, w=w, transpose_w=True), _batched, 2, (0, 1)),
        ),
        hopper_calls=(
            Call("matmul", ops.matmul, _arguments, _hopper, 4),
            Call(
                "matmul_resident",
                ops.matmul,
                functools.partial(
                    _arguments,
                    config=mosaic.Config(block_m=64, block_n=64, num_stages=2, ping_pong=True, resident=True),
                ),
                _resident,
                4,
            ),
            # Without an activation, whose gradient has a kernel.
            Call("matmul_linear", ops.matmul, lambda x, w, bias: dict(x=x, w=w, bias=bias), _linear, 3),
        ),
        large={
            "matmul-large": functools.partial(_large, 8192, 8192, 8192),
            "matmul-short": functools.partial(_large, 8192, 1152, 384),
            "matmul-few-rows": functools.partial(_large, 16, 768, 3072),
            "matmul-gelu": functools.partial(_large, 8192, 1536, 384, activation="gelu"),
            "matmul-split": functools.partial(_large, 64, 64, 8192, algorithm="split_k"),
        },
        empty=(
            Empty(dict(x=zeros(3, 0), w=zeros(0, 4), bias=np.ones(4, "float32")), (3, 4), 1.0),
            Empty(dict(x=zeros(0, 3), w=zeros(3, 4)), (0, 4)),
        ),
        spread=_spread,
        formula=formula,
        draw=_draw,
        torch="matmul",
    ),
)
