"""The cases of `ops.linear_cross_entropy`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import array, normal
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, k, n = sizes(size)
    rng = np.random.default_rng(30)
    return (
        normal(rng, batch, tokens, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype),
        normal(rng, batch, tokens, dtype=dtype, shift=1, scale=0.3),
        array(rng.integers(0, n, (batch, tokens)), "int32"),
    )


def _arguments(
    x: Any, w: Any, bias: Any, weights: Any, labels: Any, *, reduction: str | None = None
) -> dict[str, Any]:
    arrays = dict(x=x, w=w, labels=labels, bias=bias, weights=weights)
    return arrays | dict(label_smoothing=0.1, reduction=reduction)


def _for_every_label(mean: jax.Array, *arrays: jax.Array) -> jax.Array:
    """With the axes of the operands, which the tests ask for."""
    return jnp.broadcast_to(mean, arrays[-1].shape)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    x, w, labels = normal(rng, 8, 6), normal(rng, 6, 10), array(rng.integers(0, 10, 8), "int32")
    transposed = x, normal(rng, 10, 6), normal(rng, 10), labels

    def tokens(x: Any, w: Any, bias: Any, labels: Any) -> dict[str, Any]:
        return dict(x=x, w=w, labels=labels, bias=bias, reduction=None, transpose_w=True)

    def mean(x: Any, w: Any, labels: Any) -> dict[str, Any]:
        return dict(x=x, w=w, labels=labels)

    return (
        Spread(
            call=Call("tokens", ops.linear_cross_entropy, tokens, lambda size, dtype: transposed, 3),
            specs=(data, whole, whole, data),
            result=data,
            sums=2,
            kinds=("shard_map",),
        ),
        Spread(
            call=Call("mean", ops.linear_cross_entropy, mean, lambda size, dtype: (x, w, labels), 2),
            specs=(data, whole, data),
            result=P(),
            sums=2,
            kinds=("explicit",),
        ),
    )


def _formula(
    *,
    dtype: str,
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None = None,
    weights: Array | None = None,
    transpose_w: bool = False,
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str | None = "mean",
    precision: str | None = None,
    config: Any = None,
) -> Bounded:
    """The cross entropy of softmax(x @ w + bias), weighted, and its sum or mean."""
    del config
    given = np.ones(labels.shape) if weights is None else weights
    counts = given != 0
    x = np.where(counts[..., None], x, 0.0)
    products = b.product(x, w.T if transpose_w else w, dtype=dtype, precision=precision)
    # The product may be rounded before the bias is added, and the sum again.
    y = b.held(b.plus(b.rounded(b.rounded(products, dtype), dtype), bias), dtype)
    y = b.rounded(y, dtype) if bias is not None else y
    if logit_softcap is not None:
        capped = logit_softcap * np.tanh(y.value / logit_softcap)
        y = Bounded(capped, y.error + 8 * b.UNIT * logit_softcap)
    size = y.value.shape[-1]
    peak = np.max(y.value, -1, keepdims=True)
    lse = peak + np.log(np.sum(np.exp(y.value - peak), -1, keepdims=True))
    # No logit moves it by more than it moves itself; the sum has terms of one sign.
    off = np.max(y.error, -1, keepdims=True) + b.UNIT * (size + 8 + 4 * np.abs(peak) + np.abs(lse))
    total = Bounded(lse, off)
    known = np.where(counts, labels, 0).astype(int)[..., None]
    label = y.map(lambda a: np.take_along_axis(a, known, -1))
    loss = total - label * b.exact(1.0 - label_smoothing) - b.mean(y) * b.exact(label_smoothing)
    loss = (loss + total * total * b.exact(z_loss)).map(lambda a: a[..., 0])
    weighted = b.where(counts, loss * b.exact(given), 0.0)
    if reduction is None:
        return weighted
    summed = b.total(weighted.map(np.ravel)).map(lambda a: a[0])
    if reduction == "sum" or np.sum(given) == 0:
        return summed
    return summed / b.total(b.exact(np.ravel(given))).map(lambda a: a[0])


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, k, v = pick.size(), pick.size(), pick.rows()
    options: dict[str, Any] = pick.precision(dtype) | {"reduction": pick.of(("mean", "sum", None))}
    if pick.chance(0.4):
        options["transpose_w"] = True
    if mosaic and pick.chance(0.5):
        options["config"] = pick.row_config()
    for name, values in (("label_smoothing", (0.1, 1.0)), ("logit_softcap", (5.0, 30.0)), ("z_loss", (1e-3, 0.1))):
        if pick.chance(0.3):
            options[name] = pick.of(values)
    weighted = pick.chance(0.5)
    inputs = {
        "x": Input((m, k), dtype, limit=1e4, masked=("weights", (m, 1)) if weighted else None),
        "w": Input((v, k) if options.get("transpose_w") else (k, v), dtype, scale=k**-0.5, limit=1e4),
        "labels": Input(
            (m,), pick.of(("int32", "int16")), "rows", scale=v, masked=("weights", (m,)) if weighted else None
        ),
    }
    if pick.chance(0.4):
        inputs["bias"] = Input((v,), pick.other(dtype), "weight")
    if weighted:
        inputs["weights"] = Input((m,), pick.of(("bool", "int32", "float32")), "mask")
    return inputs, options


_OP = ops.linear_cross_entropy
CASES = (
    Case(
        op=_OP,
        products="xla",
        calls=(
            Call("linear_cross_entropy", _OP, _arguments, _small, 4, (0, 3, 4)),
            Call(
                "linear_cross_entropy_mean",
                _OP,
                functools.partial(_arguments, reduction="mean"),
                _small,
                4,
                (0, 3, 4),
                result=_for_every_label,
            ),
        ),
        hopper_calls=(Call("linear_cross_entropy_rows", _OP, _arguments, _small, 4, (0, 3, 4)),),
        large={
            "linear-cross-entropy": lambda dtype: dict(
                x=shaped(dtype, 8192, 768), w=shaped(dtype, 768, 50257), labels=shaped("int32", 8192)
            ),
        },
        empty=(
            Empty(dict(x=zeros(0, 3), w=zeros(3, 4), labels=zeros(0, dtype="int32"), reduction=None), (0,)),
            Empty(dict(x=zeros(2, 0, 3), w=zeros(3, 4), labels=zeros(2, 0, dtype="int32")), ()),
        ),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="linear_cross_entropy",
    ),
)
