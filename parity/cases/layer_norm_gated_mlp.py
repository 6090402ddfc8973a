"""The cases of `ops.layer_norm_gated_mlp`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases import gated_mlp
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def arrays(rng: np.random.Generator, dtype: str, lead: tuple[int, ...], c: int, h: int) -> Arrays:
    """x, scale, offset, w_gate_up and w_down."""
    return (
        normal(rng, *lead, c, dtype=dtype),
        normal(rng, c, dtype=dtype, shift=1, scale=0.3),
        normal(rng, c, dtype=dtype),
        normal(rng, c, 2, h, dtype=dtype, scale=c**-0.5),
        normal(rng, h, c, dtype=dtype, scale=h**-0.5),
    )


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, c, h = sizes(size)
    return arrays(np.random.default_rng(75), dtype, (batch, tokens), c, h)


def _hopper(size: int, dtype: str) -> Arrays:
    return arrays(np.random.default_rng(76), dtype, (72 if size == 1 else 128,), 64, 128)


def _arguments(x: Any, scale: Any, offset: Any, w_gate_up: Any, w_down: Any) -> dict[str, Any]:
    return dict(x=x, scale=scale, offset=offset, w_gate_up=w_gate_up, w_down=w_down, residual=True, epsilon=0.1)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    some, data = arrays(rng, "float32", (8,), 6, 10), P("data")
    call = Call("rows", ops.layer_norm_gated_mlp, _arguments, lambda size, dtype: some, 5, kernels=3)
    return (Spread(call=call, specs=(data, *[P()] * 4), result=data, sums=4, kinds=("explicit",)),)


def _formula(
    *,
    dtype: str,
    x: Array,
    scale: Array,
    offset: Array,
    w_gate_up: Array,
    w_down: Array,
    residual: bool = False,
    activation: str | None = "silu",
    epsilon: float,
    precision: str | None = None,
) -> Bounded:
    """A gated MLP of layer_norm(x) scale + offset, rounded before and between its products."""
    y = b.normalised(b.exact(x), epsilon, subtract_mean=True) * b.exact(scale)
    y = b.held(b.rounded(b.plus(y, offset), dtype), dtype)
    options: dict[str, Any] = dict(dtype=dtype, precision=precision)
    hidden = b.held(gated_mlp.formula(x=y, w_gate_up=w_gate_up, activation=activation, **options), dtype)
    return b.rounded(b.product(hidden, w_down, x if residual else None, **options), dtype)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, c = pick.rows(), pick.of((64, 128)) if mosaic else pick.size()
    h = 64 * pick.of((1, 2, 3, 8)) if mosaic else pick.size()
    if mosaic:
        m += -m % 8
    inputs = {
        "x": Input((m, c), dtype),
        "scale": Input((c,), pick.other(dtype), scale=0.3, shift=1.0),
        "offset": Input((c,), pick.other(dtype), limit=1e7),
        "w_gate_up": Input((c, 2, h), dtype, scale=c**-0.5, limit=1e4),
        "w_down": Input((h, c), dtype, scale=h**-0.5, limit=1e3),
    }
    options = {"activation": pick.of((None, *ops.ACTIVATIONS)), "residual": pick.chance(0.5)}
    return inputs, pick.precision(dtype) | options | {"epsilon": pick.epsilon()}


CASES = (
    Case(
        op=ops.layer_norm_gated_mlp,
        products="kernels",
        calls=(Call("layer_norm_gated_mlp", ops.layer_norm_gated_mlp, _arguments, _small, 5, kernels=3),),
        hopper_calls=(Call("layer_norm_gated_mlp", ops.layer_norm_gated_mlp, _arguments, _hopper, 5),),
        large={
            "pairs": lambda dtype: dict(
                x=shaped(dtype, 512, 512, 128),
                scale=shaped("float32", 128),
                offset=shaped("float32", 128),
                w_gate_up=shaped(dtype, 128, 2, 512),
                w_down=shaped(dtype, 512, 128),
                residual=True,
            ),
        },
        empty=(
            Empty(
                dict(x=zeros(0, 4), scale=zeros(4), offset=zeros(4), w_gate_up=zeros(4, 2, 3), w_down=zeros(3, 4)),
                (0, 4),
            ),
        ),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="layer_norm_gated_mlp",
    ),
)
