"""The cases of `ops.gated_projection`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def arrays(rng: np.random.Generator, dtype: str, lead: tuple[int, ...], k: int, n: int) -> Arrays:
    """x, gate, w, bias and residual."""
    return (
        normal(rng, *lead, k, dtype=dtype),
        normal(rng, *lead, k, dtype=dtype, scale=2.0),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype),
        normal(rng, *lead, n, dtype=dtype),
    )


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, k, n = sizes(size)
    return arrays(np.random.default_rng(73), dtype, (batch, tokens), k, n)


def _hopper(size: int, dtype: str) -> Arrays:
    return arrays(np.random.default_rng(74), dtype, (72 if size == 1 else 128,), 64, 128)


def _arguments(x: Any, gate: Any, w: Any, bias: Any, residual: Any) -> dict[str, Any]:
    return dict(x=x, gate=gate, w=w, bias=bias, residual=residual)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    some, data = arrays(rng, "float32", (8,), 6, 10), P("data")
    call = Call("rows", ops.gated_projection, _arguments, lambda size, dtype: some, 5)
    return (Spread(call=call, specs=(data, data, P(), P(), data), result=data, sums=2, kinds=("explicit",)),)


def _formula(
    *,
    dtype: str,
    x: Array,
    gate: Array,
    w: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    out_dtype: str | None = None,
    precision: str | None = None,
) -> Bounded:
    """(x sigmoid(gate)) w + bias + residual; what is gated is rounded, in bfloat16 by a tanh of 11 bits."""
    gated = b.exact(x) * b.activation("sigmoid", b.exact(gate)).off(2.0**-12 if dtype == "bfloat16" else 0.0)
    y = b.product(b.rounded(gated, dtype), w, bias, residual, dtype=dtype, precision=precision)
    return b.rounded(y, out_dtype or dtype)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m = pick.rows()
    k, n = (pick.of((64, 128)), pick.of((64, 128))) if mosaic else (pick.size(), pick.size())
    if mosaic:
        m += -m % 8
    inputs = {
        "x": Input((m, k), dtype, limit=1e7),
        "gate": Input((m, k), dtype),
        "w": Input((k, n), dtype, scale=k**-0.5, limit=1e7),
    }
    if pick.chance(0.5):
        inputs["bias"] = Input((n,), pick.other(dtype))
    if pick.chance(0.5):
        inputs["residual"] = Input((m, n), dtype)
    return inputs, pick.precision(dtype)


CASES = (
    Case(
        op=ops.gated_projection,
        products="kernels",
        calls=(Call("gated_projection", ops.gated_projection, _arguments, _small, 5, (0, 1, 4)),),
        hopper_calls=(Call("gated_projection", ops.gated_projection, _arguments, _hopper, 5),),
        large={
            "pairs": lambda dtype: dict(
                x=shaped(dtype, 512, 512, 128),
                gate=shaped(dtype, 512, 512, 128),
                w=shaped(dtype, 128, 128),
                residual=shaped(dtype, 512, 512, 128),
            ),
        },
        empty=(Empty(dict(x=zeros(0, 4), gate=zeros(0, 4), w=zeros(4, 3)), (0, 3)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="gated_projection",
    ),
)
