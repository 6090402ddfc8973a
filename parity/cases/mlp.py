"""The cases of `ops.mlp`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, sizes, zeros
from parity.cases.matmul import formula as matmul
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def _arrays(rng: np.random.Generator, dtype: str, *rows: int, k: int, n: int, d: int) -> Arrays:
    up, down = (normal(rng, *shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in ((k, n), (n, d)))
    bias_up, bias_down = (normal(rng, width, dtype=dtype, shift=0.5) for width in (n, d))
    return normal(rng, *rows, k, dtype=dtype), up, bias_up, down, bias_down


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, k, n = sizes(size)
    return _arrays(np.random.default_rng(47), dtype, batch, tokens, k=k, n=n, d=k)


def _hopper(size: int, dtype: str) -> Arrays:
    m, k, n, d = (200, 192, 320, 128) if size == 1 else (256, 128, 256, 128)
    return _arrays(np.random.default_rng(37), dtype, m, k=k, n=n, d=d)


def _arguments(x: Any, w_up: Any, bias_up: Any, w_down: Any, bias_down: Any) -> dict[str, Any]:
    return dict(x=x, w_up=w_up, w_down=w_down, bias_up=bias_up, bias_down=bias_down, activation="gelu")


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    arrays = _arrays(rng, "float32", 8, k=6, n=10, d=6)
    call = Call("rows", ops.mlp, _arguments, lambda size, dtype: arrays, 5)
    return (Spread(call=call, specs=(data, whole, whole, whole, whole), result=data, sums=4),)


def _formula(
    *,
    dtype: str,
    x: Array,
    w_up: Array,
    w_down: Array,
    bias_up: Array | None = None,
    bias_down: Array | None = None,
    residual: Array | None = None,
    activation: str = "gelu_tanh",
    precision: str | None = None,
) -> Bounded:
    """activation(x w_up + bias_up) w_down + bias_down + residual."""
    form: dict[str, Any] = dict(dtype=dtype, precision=precision)
    hidden = b.held(matmul(x=x, w=w_up, bias=bias_up, activation=activation, **form), dtype)
    return b.rounded(b.product(hidden, w_down, bias_down, residual, **form), dtype)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
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


CASES = (
    Case(
        op=ops.mlp,
        products="kernels",
        calls=(Call("mlp", ops.mlp, _arguments, _small, 5, kernels=2),),
        hopper_calls=(Call("mlp", ops.mlp, _arguments, _hopper, 5),),
        large=Without("its kernels are `matmul`'s, with the same tiles"),
        empty=(Empty(dict(x=zeros(3, 0), w_up=zeros(0, 4), w_down=zeros(4, 5)), (3, 5)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="mlp",
    ),
)
