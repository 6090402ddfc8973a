"""The cases of `ops.triangle_update`."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import HALF_ULP, Array, Bounded
from parity.support.common import ON_GPU, array, normal
from parity.support.draws import DTYPES, Drawn, Input, Pick

_WEIGHTS = ("norm_scale", "norm_bias", "w_in", "out_norm_scale", "out_norm_bias", "w_gate", "w_out")


def _small(size: int, dtype: str) -> Arrays:
    batch, n, c, h = sizes(size)
    rng = np.random.default_rng(27)
    return (
        normal(rng, batch, n, n, c, dtype=dtype),
        normal(rng, c, dtype=dtype, shift=1, scale=0.3),
        normal(rng, c, dtype=dtype),
        normal(rng, c, 4, h, dtype=dtype, scale=c**-0.5),
        normal(rng, 4, h, dtype=dtype),
        normal(rng, h, dtype=dtype, shift=1, scale=0.3),
        normal(rng, h, dtype=dtype),
        normal(rng, c, c, dtype=dtype, scale=c**-0.5),
        normal(rng, c, dtype=dtype),
        normal(rng, h, c, dtype=dtype, scale=h**-0.5),
        normal(rng, c, dtype=dtype),
        array(rng.integers(0, 2, (batch, n, n)), "int32"),
    )


def _hopper(size: int, dtype: str, c: int = 128, less: int = 0) -> Arrays:
    batch, n, h = (1, 64 - less, 32) if size == 1 else (2, 128 - less, 128)
    rng = np.random.default_rng(35)
    shapes = ((c,), (c,), (c, 4, h), (4, h), (h,), (h,), (c, c), (c,), (h, c), (c,))
    weights = (normal(rng, *shape, dtype=dtype, scale=c**-0.5) for shape in shapes)
    mask = array(rng.integers(0, 2, (batch, n, n)), "int32")
    return normal(rng, batch, n, n, c, dtype=dtype), *weights, mask


def _arguments(x: Any, *weights_and_mask: Any) -> dict[str, Any]:
    norm_scale, norm_bias, w_in, b_in, out_scale, out_bias, w_gate, b_gate, w_out, b_out, mask = weights_and_mask
    weights = zip(_WEIGHTS, (norm_scale, norm_bias, w_in, out_scale, out_bias, w_gate, w_out), strict=True)
    biases = dict(b_in=b_in, b_gate=b_gate, b_out=b_out)
    form = dict(direction="incoming", gate_after=True, epsilon=0.1, compute_dtype=str(x.dtype))
    return dict(x=x, mask=mask) | dict(weights) | biases | form


def _again(*arrays: Any) -> dict[str, Any]:
    """Outgoing, with the gate before, x added, and a gradient that keeps nothing; as many channels as hidden."""
    return _arguments(*arrays) | dict(direction="outgoing", gate_after=False, residual=True, residuals="recompute")


def _square(size: int, dtype: str) -> Arrays:
    """`_small` with as many hidden channels as channels."""
    x, *_, mask = _small(size, dtype)
    c = x.shape[-1]
    shapes = ((c,), (c,), (c, 4, c), (4, c), (c,), (c,), (c, c), (c,), (c, c), (c,))
    rng = np.random.default_rng(28)
    return x, *(normal(rng, *shape, dtype=dtype, scale=c**-0.5) for shape in shapes), mask


def _large(dtype: str, n: int, c: int, gate_after: bool) -> dict[str, Any]:
    shapes = ((c,), (c,), (c, 4, c), (c,), (c,), (c, c), (c, c))
    weights = {name: shaped("float32", *shape) for name, shape in zip(_WEIGHTS, shapes, strict=True)}
    form = dict(direction="outgoing", gate_after=gate_after, compute_dtype=dtype)
    return dict(x=shaped("float32", 1, n, n, c)) | weights | form


def _outgoing(x: Any, *weights: Any) -> dict[str, Any]:
    """In float32: in float16, a last bit decides how a value beside a boundary is rounded."""
    return dict(x=x, direction="outgoing", compute_dtype="float32") | dict(zip(_WEIGHTS, weights, strict=True))


def _incoming(x: Any, *weights_and_mask: Any) -> dict[str, Any]:
    *weights, mask = weights_and_mask
    return _outgoing(x, *weights) | dict(direction="incoming", mask=mask, residual=True)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    def weights(c: int, h: int) -> Arrays:
        shapes = ((c,), (c,), (c, 4, h), (h,), (h,), (c, h), (h, c))
        return tuple(normal(rng, *shape) for shape in shapes)

    def pairs(rows: str | None, columns: str | None, *, masked: bool) -> Spread:
        """Pairs that are split by rows, columns or both: each device sends left and right of half of the hidden
        channels and their sums, twice; all of them once more for the gradient, and as much for its cotangents.
        """
        spec = P(None, rows, columns, None)
        arrays, specs = (normal(rng, 1, 8, 8, 16), *weights(16, 16)), (spec, *[P()] * 7)
        if masked:  # the largest factor of the mask scales left and right everywhere
            factors = normal(rng, 1, 8, 8).at[0, 0, 0].set(500.0)
            arrays, specs = (*arrays, factors), (*specs, P(None, rows, columns))
        axes = {"rows": rows, "columns": columns}
        split = [name for name in axes.values() if name]
        name = " and ".join(name for name, axis in axes.items() if axis)
        return Spread(
            call=Call(
                name, ops.triangle_update, _incoming if masked else _outgoing, lambda size, dtype: arrays, 8
            ),
            specs=specs,
            result=spec,
            sums=7 + masked,
            swaps=10 * math.prod({"data": 4, "model": 2}[axis] for axis in split),
            kinds=("explicit",) if columns and not rows else () if columns else ("shard_map",),
            of_part={} if columns else {"rows_over": (rows,)},
        )

    def items(name: str, c: int, *kinds: Literal["explicit", "shard_map"]) -> Spread:
        arrays = normal(rng, 4, 3, 3, c), *weights(c, 16)
        return Spread(
            call=Call(name, ops.triangle_update, _outgoing, lambda size, dtype: arrays, 8),
            specs=(P("data"), *[P()] * 7),
            result=P("data", None, None, None),
            sums=7,
            kinds=kinds,
        )

    return (
        items("batch", 8, "shard_map"),
        items("batch of more channels than kernels hold", 136),
        pairs("data", None, masked=False),
        pairs(None, "model", masked=True),
        pairs("data", "model", masked=True),
    )


def _formula(
    *,
    dtype: str,
    x: Array,
    norm_scale: Array,
    norm_bias: Array,
    w_in: Array,
    out_norm_scale: Array,
    out_norm_bias: Array,
    w_gate: Array,
    w_out: Array,
    direction: str,
    mask: Array | None = None,
    b_in: Array | None = None,
    b_gate: Array | None = None,
    b_out: Array | None = None,
    gate_after: bool = False,
    epsilon: float = 1e-5,
    compute_dtype: str = "float16",
    out_dtype: str | None = None,
    residual: bool = False,
    residuals: str = "save",
) -> Bounded:
    """The update as AlphaFold has it: norm, four projections, their product over a third node, norm, gate."""
    del residuals  # of the gradient
    half_ulp = 0.0 if compute_dtype == "float32" else HALF_ULP[compute_dtype]

    def operand(y: Bounded, scale: Array, bias: Array) -> Bounded:
        """The operand and, as the scale may be in the weights instead, their rounding in relation to its parts."""
        parts = np.abs(y.value * scale) + np.abs(bias)
        rounded = b.rounded(b.plus(y * b.exact(scale), bias), compute_dtype)
        return b.held(rounded.off(2 * half_ulp * parts), compute_dtype)

    def product(y: Bounded, w: Array, bias: Array | None) -> Bounded:
        return b.dot(y, b.exact(w).off(half_ulp * np.abs(w)), bias, dtype=compute_dtype)

    def sigmoid(y: Bounded) -> Bounded:  # half of 1 + tanh, which has 11 bits where operands have as many or fewer
        return b.activation("sigmoid", y).off(0.0 if compute_dtype == "float32" else 2.0**-12)

    if mask is not None:  # a masked position reaches its own result alone, which is compared elsewhere
        unknown = ~np.isfinite(x).all(-1, keepdims=True)
        x = np.where(unknown, 0.0, x)
    z = operand(b.normalised(b.exact(x), epsilon, subtract_mean=True), norm_scale, norm_bias)
    p = [product(z, w_in[:, i], None if b_in is None else b_in[i]) for i in range(4)]

    def side(values: Bounded, gate: Bounded) -> Bounded:
        y = values * sigmoid(gate)
        if mask is not None:
            y = b.where((mask != 0)[..., None], y * b.exact(mask[..., None]), 0.0)
        y = b.held(b.rounded(y, compute_dtype), compute_dtype)
        if mask is not None:
            y = b.where((mask != 0)[..., None], y, 0.0)
        # (..., H, i, k), so that y[i, j] is the sum over k of left[i, k] right[j, k]
        return y.map(lambda a: np.moveaxis(a if direction == "outgoing" else np.swapaxes(a, -2, -3), -1, -3))

    left, right = side(p[0], p[1]), side(p[2], p[3])
    y = b.dot(left, right.map(lambda a: np.swapaxes(a, -1, -2)), dtype=compute_dtype).map(
        lambda a: np.moveaxis(a, -3, -1)
    )
    # float16 holds the sums by a power of two, whose choice takes up to 2 bits of the smallest
    y = b.rounded(y, compute_dtype)
    if compute_dtype == "float16":
        y = y.off(4 * math.sqrt(x.shape[-2]) * b.SMALLEST["float16"])
    y = b.normalised(y, epsilon, subtract_mean=True)
    gate = b.rounded(sigmoid(product(z, w_gate, b_gate)), compute_dtype)
    if gate_after:
        out = product(operand(y, out_norm_scale, out_norm_bias), w_out, b_out) * gate
    else:
        parts = (np.abs(y.value * out_norm_scale) + np.abs(out_norm_bias)) * gate.value
        gated = b.rounded(b.plus(y * b.exact(out_norm_scale), out_norm_bias) * gate, compute_dtype)
        out = product(gated.off(2 * half_ulp * parts), w_out, b_out)
    out = b.rounded(b.plus(out, x) if residual else out, out_dtype or dtype)
    if mask is not None:
        out = Bounded(out.value, np.where(unknown, np.inf, out.error))
    return out


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    n = pick.of((61, 64, 100, 128) if ON_GPU else (61, 64)) if mosaic else pick.size(most=129 if ON_GPU else 33)
    batch = pick.few(1, 2) if n <= 64 else 1  # a reference of more takes half a minute
    c, h = (
        (pick.of((64, 96, 128)), pick.of((32, 64, 128))) if mosaic else (pick.size(most=128), pick.size(most=128))
    )
    if not ON_GPU:
        c, h = min(c, 64), min(h, 64)
    if pick.chance(0.1):  # whose gradient has products of XLA's
        c = pick.of((192, 256))
    options: dict[str, Any] = {
        "direction": pick.of(("outgoing", "incoming")),
        "gate_after": pick.chance(0.5),
        "epsilon": pick.epsilon(),
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
    masked = pick.chance(0.5)
    inputs = {"x": Input((batch, n, n, c), dtype, masked=("mask", (batch, n, n, 1)) if masked else None)}
    for name, (shape, scale, shift) in shapes.items():
        inputs[name] = Input(shape, pick.other(dtype), "weight", scale, shift)
    if masked:
        inputs["mask"] = Input((batch, n, n), pick.of(("bool", "int32", dtype)), "mask")
    if pick.chance(0.3):
        options["residual"] = True
    return inputs, options


def _none(n: int) -> dict[str, Any]:
    """No pairs, of 4 channels."""
    shapes = ((4,), (4,), (4, 4, 4), (4,), (4,), (4, 4), (4, 4))
    weights = {name: zeros(*shape) for name, shape in zip(_WEIGHTS, shapes, strict=True)}
    return dict(x=zeros(2, n, n, 4), direction="outgoing") | weights


_OP = ops.triangle_update
CASES = (
    Case(
        op=_OP,
        products="kernels",
        calls=(
            Call("triangle_update", _OP, _arguments, _small, 11, (0, 11), kernels=5),
            Call("triangle_update_again", _OP, _again, _square, 11, (0, 11), kernels=5),
        ),
        hopper_calls=(
            Call("triangle_update", _OP, _arguments, _hopper, 11),
            Call("triangle_update_wide", _OP, _arguments, functools.partial(_hopper, c=256), 11),
            Call("triangle_update_odd", _OP, _arguments, functools.partial(_hopper, less=3), 11),
        ),
        large={
            "triangle-128": lambda dtype: _large(dtype, 512, 128, False),
            "triangle-384": lambda dtype: _large(dtype, 512, 384, True),
        },
        empty=(Empty(_none(0), (2, 0, 0, 4)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch=Without("torch has it as modules with weights of their own: `parity.ops.reference_trimul`"),
    ),
)
