"""The cases of `ops.post_norm_mlp`."""

from typing import Any

import numpy as np

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Without, zeros
from parity.cases.matmul_layer_norm import formula as matmul_layer_norm
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick

NAMES = (
    *("y", "x", "w_out", "bias_out", "scale_out", "offset_out"),
    *("w_up", "bias_up", "w_down", "bias_down", "scale", "offset"),
)


def _hopper(size: int, dtype: str) -> Arrays:
    m, n, f = (72, 128, 128) if size == 1 else (192, 128, 256)
    rng = np.random.default_rng(39)
    shapes = ((m, n), (m, n), (n, n), (n,), (n,), (n,), (n, f), (f,), (f, n), (n,), (n,), (n,))
    return tuple(
        normal(rng, *shape, dtype=dtype, scale=n**-0.5 if name[0] == "w" else 1.0, shift=float("scale" in name))
        for name, shape in zip(NAMES, shapes, strict=True)
    )


def _arguments(*arrays: Any) -> dict[str, Any]:
    return dict(zip(NAMES, arrays, strict=True)) | dict(epsilon=0.1)


def formula(
    *,
    dtype: str,
    y: Array | Bounded,
    x: Array,
    w_out: Array,
    w_up: Array,
    w_down: Array,
    scale_out: Array,
    offset_out: Array,
    scale: Array,
    offset: Array,
    bias_out: Array | None = None,
    bias_up: Array | None = None,
    bias_down: Array | None = None,
    activation: str = "gelu",
    epsilon: float = 1e-12,
    precision: str | None = None,
) -> Bounded:
    """z = norm(y w_out + bias_out + x), then norm(activation(z w_up + bias_up) w_down + bias_down + z)."""
    options: dict[str, Any] = dict(dtype=dtype, precision=precision)
    first = dict(x=y, w=w_out, scale=scale_out, offset=offset_out, bias=bias_out, residual=x)
    z = b.held(matmul_layer_norm(**first, epsilon=epsilon, **options), dtype)
    hidden = b.rounded(b.activation(activation, b.product(z, w_up, bias_up, **options), dtype), dtype)
    total = b.product(b.held(hidden, dtype), w_down, bias_down, **options) + z
    total = total.off(w_down.shape[0] * b.UNIT * np.abs(z.value))  # a compiler may begin the sum with z
    normalised = b.normalised(total, epsilon, subtract_mean=True) * b.exact(scale)
    return b.rounded(b.plus(normalised, offset), dtype)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, k, n, f = pick.rows(), pick.size(), pick.size(), pick.size()
    if mosaic:
        m, n = 8 * pick.size(most=64), pick.of((128, 256, 384))
        k, f = n, n * pick.of((1, 2, 4))
    inputs = {"y": Input((m, k), dtype, limit=1e3), "x": Input((m, n), dtype, limit=1e3)}
    weights, options = drawn_weights(pick, dtype, mosaic, k, n, f)
    return inputs | weights, options


def drawn_weights(pick: Pick, dtype: str, mosaic: bool, k: int, n: int, f: int) -> Drawn:
    """What follows attention: its weights, and the options of the op."""
    inputs: dict[str, Input] = {}
    for name, shape in (("w_out", (k, n)), ("w_up", (n, f)), ("w_down", (f, n))):
        inputs[name] = Input(shape, dtype, scale=shape[0] ** -0.5, limit=1e3)
    for name in ("out", "up", "down"):
        if mosaic or pick.chance(0.5):
            inputs[f"bias_{name}"] = Input((f if name == "up" else n,), pick.other(dtype), limit=1e3)
    for end in ("_out", ""):
        inputs[f"scale{end}"] = Input((n,), pick.other(dtype), scale=0.3, shift=1.0, limit=1e3)
        inputs[f"offset{end}"] = Input((n,), pick.other(dtype), limit=1e3)
    options = {"epsilon": pick.epsilon(), "activation": pick.of(tuple(ops.ACTIVATIONS))}
    return inputs, pick.precision(dtype) | options


_OF_ROWS = {name: zeros(0, 4) for name in ("y", "x")} | {name: zeros(4, 4) for name in ("w_out", "w_up", "w_down")}
_OF_ROWS |= {name: zeros(4) for name in ("scale_out", "offset_out", "scale", "offset")}

CASES = (
    Case(
        op=ops.post_norm_mlp,
        products="kernels",
        calls=Without("its parts are kernels of Triton, which other cases call"),
        hopper_calls=(Call("post_norm_mlp", ops.post_norm_mlp, _arguments, _hopper, 12, (0, 1)),),
        large=Without("its kernels have no tiles to choose"),
        empty=(Empty(_OF_ROWS, (0, 4)),),
        spread=Without("`attention_post_norm_mlp` has its kernel and the rule of it"),
        formula=formula,
        draw=_draw,
        torch="post_norm_mlp",
    ),
)
