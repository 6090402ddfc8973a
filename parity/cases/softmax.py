"""The cases of `ops.softmax`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from pallas_models.kernels.forms.softmax import ALGORITHMS
from pallas_models.kernels.mosaic.softmax import Config as MosaicConfig
from pallas_models.kernels.triton.softmax import Config
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal, random_mask
from parity.support.draws import Drawn, Input, Pick

_SYMBOLS = {2: "b", 7: "s", 33: "t"}


def _small(size: int, dtype: str) -> Arrays:
    batch, rows, columns, _ = sizes(size)
    rng = np.random.default_rng(26)
    return normal(rng, batch, rows, columns, dtype=dtype, scale=2.0), random_mask(rng, batch, columns)


def _arguments(x: Any, mask: Any, **options: Any) -> dict[str, Any]:
    return dict(x=x, where=mask[:, None, :], scale=0.5) | options


_split = functools.partial(
    _arguments, algorithm="online", config=Config(block_m=4, block_n=16, num_warps=1, splits=2)
)

# Rows of several warps in several steps.
_walked = functools.partial(_arguments, config=MosaicConfig(threads=64, block_n=16, rows=2))


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data = P("data")
    arrays = normal(rng, 4, 3, 6), random_mask(rng, 4, 6)

    def arguments(x: Any, mask: Any) -> dict[str, Any]:
        return dict(x=x, where=mask[:, None, :])

    call = Call("rows", ops.softmax, arguments, lambda size, dtype: arrays, 1)
    return (Spread(call=call, specs=(data, data), result=P("data", None, None), sums=0, kinds=("shard_map",)),)


def _formula(
    *,
    dtype: str,
    x: Array,
    where: Array | None = None,
    axis: int = -1,
    scale: Array | float | None = None,
    algorithm: str | None = None,
    config: Any = None,
) -> Bounded:
    """exp(x scale) over their sum, of the elements that `where` keeps."""
    del algorithm, config
    kept = np.broadcast_to(np.ones_like(x, bool) if where is None else where != 0, x.shape)
    x, kept = np.moveaxis(x, axis, -1), np.moveaxis(kept, axis, -1)
    y = b.exact(np.where(kept, x, 0.0))
    if scale is not None:
        y = y * b.exact(np.float32(scale))
        y = Bounded(y.value, np.where(np.isfinite(y.value), y.error, 0.0))
    left = kept.any(-1, keepdims=True)
    peak = np.where(left, np.max(np.where(kept, y.value, -np.inf), -1, keepdims=True), 0.0)
    finite = np.isfinite(y.value)
    distance = y.value - peak
    # The maximum is one of the values: its scale is rounded once for both.
    e = b.exp(Bounded(distance, np.where(finite, y.error + b.UNIT * np.abs(np.where(finite, distance, 0.0)), 0.0)))
    e = b.where(kept, e, 0.0)
    sums = b.total(e)
    out = e / Bounded(np.where(left, sums.value, 1.0), sums.error)
    out = b.where(kept, b.rounded(out, dtype), 0.0)
    return out.map(lambda a: np.moveaxis(a, -1, axis))


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    shape = (pick.few(1, 2, 3), pick.size(), pick.rows())
    options: dict[str, Any] = {}
    if pick.chance(0.25):
        options["axis"] = pick.of((0, 1, -2))
    elif mosaic:
        options["algorithm"] = pick.of((None, "online", "fused"))
        if options["algorithm"] != "fused" and pick.chance(0.6):
            options["config"] = pick.row_config()
    elif pick.chance(0.6):
        options["algorithm"] = pick.of(ALGORITHMS)
        if options["algorithm"] != "fused" and pick.chance(0.5):
            splits = pick.of((1, 2, 3)) if options["algorithm"] == "online" else 1
            options["config"] = Config(
                block_m=pick.of((1, 2, 4)), block_n=16, num_warps=pick.of((1, 2)), splits=splits
            )
    if pick.chance(0.5):
        options["scale"] = pick.of((0.5, 0.125, 3.0, -1.0, 1e-3))
    x = Input(shape, dtype, scale=2.0, limit=1e30, infinite=True)
    if not pick.chance(0.5):
        return {"x": x}, options
    kept = pick.of([shape, (shape[0], 1, shape[2]), (1, *shape[1:]), shape[2:], shape[1:]])
    x = Input(shape, dtype, scale=2.0, limit=1e30, infinite=True, masked=("where", kept))
    return {"x": x, "where": Input(kept, pick.of(("bool", "int32", "int8")), "mask")}, options


CASES = (
    Case(
        op=ops.softmax,
        products="none",
        calls=(
            Call("softmax", ops.softmax, _arguments, _small, 1, (0, 1), symbols=_SYMBOLS),
            Call("softmax_split", ops.softmax, _split, _small, 1, (0, 1), kernels=2, symbols=_SYMBOLS),
        ),
        hopper_calls=(
            Call("softmax_short", ops.softmax, _arguments, _small, 1, (0, 1), symbols=_SYMBOLS),
            Call("softmax_walked", ops.softmax, _walked, _small, 1, (0, 1), symbols=_SYMBOLS),
        ),
        large={"softmax": lambda dtype: dict(x=shaped(dtype, 128, 65536))},
        empty=(
            Empty(dict(x=zeros(3, 0)), (3, 0)),
            Empty(dict(x=zeros(3, 0), where=zeros(3, 0, dtype="bool")), (3, 0)),
        ),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="softmax",
    ),
)
