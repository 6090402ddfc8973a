"""The cases of `ops.gated_matmul` and `ops.gated_mlp`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, shaped, sizes, zeros
from parity.cases.matmul import tiles
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def _arrays(seed: int, dtype: str, *rows: int, k: int, n: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return (
        normal(rng, *rows, k, dtype=dtype),
        normal(rng, k, 2, n, dtype=dtype, scale=k**-0.5),
        normal(rng, 2, n, dtype=dtype, shift=0.5),
    )


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, k, n = sizes(size)
    return _arrays(28, dtype, batch, tokens, k=k, n=n)


def _hopper(size: int, dtype: str) -> Arrays:
    m, k, n = (72, 192, 192) if size == 1 else (128, 128, 256)
    return _arrays(32, dtype, m, k=k, n=n)


def _arguments(x: Any, w_gate_up: Any, bias: Any) -> dict[str, Any]:
    return dict(x=x, w_gate_up=w_gate_up, bias=bias)


def _mlp_arguments(x: Any, w_gate_up: Any, w_down: Any, residual: Any) -> dict[str, Any]:
    return dict(x=x, w_gate_up=w_gate_up, w_down=w_down, residual=residual)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, columns, whole, heads = P("data"), P(None, "model"), P(), P(None, None, "model")
    arrays = normal(rng, 8, 6), normal(rng, 6, 2, 10), normal(rng, 2, 10)

    def call(name: str) -> Call:
        return Call(name, ops.gated_matmul, _arguments, lambda size, dtype: arrays, 3)

    return (
        Spread(call=call("rows"), specs=(data, whole, whole), result=data, sums=2),
        Spread(call=call("columns"), specs=(whole, heads, columns), result=columns, sums=1),
    )


def _spread_mlp(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    arrays = normal(rng, 8, 6), normal(rng, 6, 2, 10), normal(rng, 10, 6), normal(rng, 8, 6)
    call = Call("rows", ops.gated_mlp, _mlp_arguments, lambda size, dtype: arrays, 4)
    return (Spread(call=call, specs=(data, whole, whole, data), result=data, sums=2),)


def formula(
    *,
    dtype: str,
    x: Array,
    w_gate_up: Array,
    bias: Array | None = None,
    activation: str | None = "silu",
    precision: str | None = None,
    out_dtype: str | None = None,
    config: Any = None,
) -> Bounded:
    """activation(x w_gate) (x w_up)."""
    del config
    gate, up = (
        b.product(x, w_gate_up[:, i], None if bias is None else bias[i], dtype=dtype, precision=precision)
        for i in range(2)
    )
    return b.rounded(b.activation(activation, gate, out_dtype or dtype) * up, out_dtype or dtype)


def _mlp_formula(
    *,
    dtype: str,
    x: Array,
    w_gate_up: Array,
    w_down: Array,
    residual: Array | None = None,
    activation: str | None = "silu",
    precision: str | None = None,
) -> Bounded:
    """(activation(x w_gate) (x w_up)) w_down + residual."""
    hidden = formula(dtype=dtype, x=x, w_gate_up=w_gate_up, activation=activation, precision=precision)
    return b.rounded(b.product(b.held(hidden, dtype), w_down, residual, dtype=dtype, precision=precision), dtype)


def _draw_products(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, k, n = pick.product(mosaic)
    inputs = {
        "x": Input((m, k), dtype, limit=1e9),
        "w_gate_up": Input((k, 2, n), dtype, scale=k**-0.5, limit=1e6),
    }
    options = pick.precision(dtype) | {"activation": pick.of((None, *ops.ACTIVATIONS))}
    return inputs, options


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    inputs, options = _draw_products(pick, dtype, mosaic)
    options |= {"config": tiles(pick)} if not mosaic and pick.chance(0.3) else {}
    if pick.chance(0.5):
        inputs["bias"] = Input((2, inputs["w_gate_up"].shape[2]), pick.other(dtype), limit=1e9)
    return inputs, options | ({} if mosaic else pick.out_dtype(dtype))


def _draw_mlp(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    inputs, options = _draw_products(pick, dtype, mosaic)
    m, n = inputs["x"].shape[0], inputs["w_gate_up"].shape[2]
    d = 64 * pick.size(most=8) if mosaic else pick.size()
    inputs["w_down"] = Input((n, d), dtype, scale=n**-0.5, limit=1e3)
    if pick.chance(0.5):
        inputs["residual"] = Input((m, d), dtype if mosaic else pick.other(dtype))
    return inputs, options


_COMPOSED = Without("it is `gated_matmul` and `matmul`, one after the other, with no record of its own")
CASES = (
    Case(
        op=ops.gated_matmul,
        products="kernels",
        calls=(Call("gated_matmul", ops.gated_matmul, _arguments, _small, 3),),
        hopper_calls=(Call("gated_matmul", ops.gated_matmul, _arguments, _hopper, 3),),
        large={
            "gated": lambda dtype: dict(x=shaped(dtype, 4096, 4096), w_gate_up=shaped(dtype, 4096, 2, 12288)),
        },
        empty=(Empty(dict(x=zeros(3, 0), w_gate_up=zeros(0, 2, 4)), (3, 4)),),
        spread=_spread,
        formula=formula,
        draw=_draw,
        torch="gated_matmul",
    ),
    Case(
        op=ops.gated_mlp,
        products="kernels",
        calls=_COMPOSED,
        hopper_calls=_COMPOSED,
        large=_COMPOSED,
        empty=(Empty(dict(x=zeros(3, 0), w_gate_up=zeros(0, 2, 4), w_down=zeros(4, 5)), (3, 5)),),
        spread=_spread_mlp,
        formula=_mlp_formula,
        draw=_draw_mlp,
        torch="gated_mlp",
    ),
)
