"""The cases of `ops.layer_norm_projections`."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Spread, Without, shaped, sizes
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def arrays(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], count: int, n: int, first: int) -> Arrays:
    """x, scale, offset, w, bias and w_first."""
    c = shape[-1]
    return (
        normal(rng, *shape, dtype=dtype),
        normal(rng, c, dtype=dtype, shift=1, scale=0.3),
        normal(rng, c, dtype=dtype),
        normal(rng, c, count, n, dtype=dtype, scale=c**-0.5),
        normal(rng, count, n, dtype=dtype),
        normal(rng, c, first, dtype=dtype, scale=c**-0.5),
    )


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, c, n = sizes(size)
    return arrays(np.random.default_rng(71), dtype, (batch, tokens, c), 2, n, 3)


def _hopper(size: int, dtype: str) -> Arrays:
    rows = 72 if size == 1 else 128
    return arrays(np.random.default_rng(72), dtype, (rows, 64), 2, 128, 4)


def _arguments(x: Any, scale: Any, offset: Any, w: Any, bias: Any, w_first: Any) -> dict[str, Any]:
    return dict(x=x, scale=scale, offset=offset, w=w, bias=bias, w_first=w_first, epsilon=0.1)


def _joined(out: Any, *_: Any) -> Any:
    """All results as one array, position by position: (..., G N + F + C)."""
    *outs, first, x = out
    return jnp.concatenate([*outs, jnp.moveaxis(first, 0, -1), x], axis=-1)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    some = arrays(rng, "float32", (8, 6), 2, 10, 3)
    call = Call(
        "rows", ops.layer_norm_projections, _arguments, lambda size, dtype: some, 6, result=_joined, kernels=4
    )
    specs = (P("data"), *[P()] * 5)
    sums = 3 + 2 * 2  # of w and of its bias a sum for each projection
    return (Spread(call=call, specs=specs, result=P("data"), sums=sums, kinds=("explicit",)),)


def _formula(
    *,
    dtype: str,
    x: Array,
    scale: Array,
    offset: Array,
    w: Array | None = None,
    bias: Array | None = None,
    w_first: Array | None = None,
    epsilon: float,
    precision: str | None = None,
) -> tuple[Bounded, ...]:
    """Products of layer_norm(x) scale + offset, rounded before them."""
    y = b.normalised(b.exact(x), epsilon, subtract_mean=True) * b.exact(scale)
    y = b.held(b.rounded(b.plus(y, offset), dtype), dtype)

    def product(w: Array, bias: Array | None = None) -> Bounded:
        return b.rounded(b.product(y, w, bias, dtype=dtype, precision=precision), dtype)

    columns = [] if w is None else list(np.moveaxis(w, 1, 0))
    outs = [product(column, None if bias is None else bias[i]) for i, column in enumerate(columns)]
    if w_first is not None:
        outs.append(product(w_first).map(lambda a: np.moveaxis(a, -1, 0)))
    return *outs, b.exact(x)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, count = pick.rows(), pick.of((1, 2, 4))
    c, n = (pick.of((64, 128)), pick.of((64, 128))) if mosaic else (pick.size(), pick.size())
    if mosaic:
        m += -m % 8
    inputs = {
        "x": Input((m, c), dtype),
        "scale": Input((c,), pick.other(dtype), scale=0.3, shift=1.0),
        "offset": Input((c,), pick.other(dtype)),
        "w": Input((c, count, n), dtype, scale=c**-0.5, limit=1e7),
    }
    if pick.chance(0.5):
        inputs["bias"] = Input((count, n), pick.other(dtype))
    options = pick.precision(dtype) | {"epsilon": pick.epsilon()}
    if pick.chance(0.5):
        inputs["w_first"] = Input((c, pick.of((1, 4, 8))), dtype, scale=c**-0.5, limit=1e7)
        if pick.chance(0.3):
            del inputs["w"]
            inputs.pop("bias", None)
            options["w"] = None
    return inputs, options


_CALL = Call(
    "layer_norm_projections", ops.layer_norm_projections, _arguments, _small, 6, result=_joined, kernels=4
)
CASES = (
    Case(
        op=ops.layer_norm_projections,
        products="kernels",
        calls=(_CALL,),
        hopper_calls=(
            Call(
                "layer_norm_projections",
                ops.layer_norm_projections,
                _arguments,
                _hopper,
                6,
                result=_joined,
            ),
        ),
        large={
            "pairs": lambda dtype: dict(
                x=shaped(dtype, 512, 512, 128),
                scale=shaped("float32", 128),
                offset=shaped("float32", 128),
                w=shaped(dtype, 128, 4, 128),
                w_first=shaped(dtype, 128, 4),
            ),
        },
        empty=Without("its results are several: parity/ops/test_layer_norm_projections.py"),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="layer_norm_projections",
    ),
)
