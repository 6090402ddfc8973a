"""The cases of `ops.post_norm_mlp`, with and without attention before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, zeros
from parity.cases.attention import qkv_formula
from parity.cases.matmul_layer_norm import formula as matmul_layer_norm
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import array, normal, random_mask
from parity.support.draws import Drawn, Input, Pick

NAMES = (
    *("y", "x", "w_out", "bias_out", "scale_out", "offset_out"),
    *("w_up", "bias_up", "w_down", "bias_down", "scale", "offset"),
)


def _small(size: int, dtype: str) -> Arrays:
    b, s, n, f = (2, 5, 32, 24) if size == 1 else (2, 40, 96, 64)
    rng = np.random.default_rng(44)
    tokens = (normal(rng, b, s, width, dtype=dtype) for width in (3 * n, n))
    weights = (normal(rng, *shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in ((n, n), (n, f), (f, n)))
    vectors = (normal(rng, n, dtype=dtype, shift=shift) for shift in (1.0, 0.0))
    return *tokens, *weights, *vectors, random_mask(rng, b, s)


def _hopper(size: int, dtype: str) -> Arrays:
    m, n, f = (72, 128, 128) if size == 1 else (192, 128, 256)
    rng = np.random.default_rng(39)
    shapes = ((m, n), (m, n), (n, n), (n,), (n,), (n,), (n, f), (f,), (f, n), (n,), (n,), (n,))
    return tuple(
        normal(rng, *shape, dtype=dtype, scale=n**-0.5 if name[0] == "w" else 1.0, shift=float("scale" in name))
        for name, shape in zip(NAMES, shapes, strict=True)
    )


def _hopper_with_attention(size: int, dtype: str) -> Arrays:
    b, s, n = (1 if size == 1 else 3), 64, 256
    rng = np.random.default_rng(43)
    shapes = ((b, s, 3 * n), (b, s, n), (n, n), (n,), (n,), (n,), (n, n), (n,), (n, n), (n,), (n,), (n,))
    arrays = (normal(rng, *shape, dtype=dtype, scale=n**-0.5 if len(shape) == 2 else 1.0) for shape in shapes)
    return *arrays, array(np.sort(rng.integers(0, 9, (b, s)), 1), "int32")


def _arguments(*arrays: Any) -> dict[str, Any]:
    return dict(zip(NAMES, arrays, strict=True)) | dict(epsilon=0.1)


def _with_attention(
    qkv: Any, x: Any, w_out: Any, w_up: Any, w_down: Any, scale: Any, offset: Any, mask: Any
) -> dict[str, Any]:
    """Both norms have the same scale and offset."""
    norms = dict(scale_out=scale, offset_out=offset, scale=scale, offset=offset)
    attention = dict(num_heads=x.shape[-1] // 32, mask=mask)
    return dict(y=qkv, x=x, w_out=w_out, w_up=w_up, w_down=w_down, attention=attention) | norms


def _with_segments(*arrays: Any) -> dict[str, Any]:
    *arrays, ids = arrays
    return _arguments(*arrays) | dict(attention=dict(num_heads=8, segment_ids=ids))


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()

    def arguments(qkv: Any, x: Any, w_out: Any, w_up: Any, w_down: Any, vector: Any, mask: Any) -> dict[str, Any]:
        return _with_attention(qkv, x, w_out, w_up, w_down, vector, vector, mask)

    arrays = (
        *(normal(rng, 4, 3, width) for width in (96, 32)),
        *(normal(rng, *shape, scale=0.2) for shape in ((32, 32), (32, 8), (8, 32), (32,))),
        random_mask(rng, 4, 3),
    )
    return (
        Spread(
            call=Call("batch", ops.post_norm_mlp, arguments, lambda size, dtype: arrays, 6),
            specs=(data, data, whole, whole, whole, whole, data),
            result=P("data", None, None),
            sums=3 + 4,  # the vector stands for four
        ),
    )


def _formula(
    *,
    dtype: str,
    y: Array,
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
    attention: Mapping[str, Any] | None = None,
    precision: str | None = None,
) -> Bounded:
    """z = norm(y w_out + bias_out + x), then norm(activation(z w_up + bias_up) w_down + bias_down + z)."""
    options: dict[str, Any] = dict(dtype=dtype, precision=precision)
    attended = y if attention is None else b.held(qkv_formula(qkv=y, **attention, **options), dtype)
    first = dict(x=attended, w=w_out, scale=scale_out, offset=offset_out, bias=bias_out, residual=x)
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
        calls=(
            Call(
                "attention_matmul_layer_norm",
                ops.post_norm_mlp,
                _with_attention,
                _small,
                7,
                (0, 1, 7),
                kernels=5,
            ),
        ),
        hopper_calls=(
            Call("post_norm_mlp", ops.post_norm_mlp, _arguments, _hopper, 12, (0, 1)),
            Call(
                "attention_post_norm_mlp",
                ops.post_norm_mlp,
                _with_segments,
                _hopper_with_attention,
                12,
                (0, 1, 12),
                implementation=lambda name: (name, "triton"),  # which has the gradient of attention
            ),
        ),
        large=Without("its kernels have no tiles to choose"),
        empty=(Empty(_OF_ROWS, (0, 4)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="post_norm_mlp",
    ),
)
