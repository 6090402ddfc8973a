"""The cases of `ops.mean_pool` and `ops.segment_mean_pool`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import array, normal, random_mask
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, _, n = sizes(size)
    rng = np.random.default_rng(24)
    return normal(rng, batch, tokens, n, dtype=dtype), random_mask(rng, batch, tokens)


def _small_segments(size: int, dtype: str) -> Arrays:
    batch, tokens, _, n = sizes(size)
    rng = np.random.default_rng(32)
    ends = np.sort(rng.integers(0, tokens, (batch, 3)))
    places = 4 * np.arange(batch)[:, None] + np.sum(np.arange(tokens) >= ends[..., None], axis=1)
    return normal(rng, batch, tokens, n, dtype=dtype), array(np.where(places % 4 == 3, -1, places), "int32")


def _segments(x: Any, ids: Any) -> dict[str, Any]:
    return dict(x=x, segment_ids=ids, num_segments=4 * len(x))


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    arrays = normal(rng, 4, 5, 8), random_mask(rng, 4, 5)
    call = Call("batch", ops.mean_pool, lambda x, mask: dict(x=x, mask=mask), lambda size, dtype: arrays, 1)
    return (Spread(call=call, specs=(P("data"), P("data")), result=P("data"), sums=0),)


def _formula(*, dtype: str, x: Array, mask: Array, normalize: bool = True, epsilon: float = 1e-12) -> Bounded:
    """The mean of the tokens that a mask keeps, by its length where it is normalised."""
    del dtype  # the mean is in float32
    kept = b.exact(np.where((mask != 0)[:, :, None], x, 0.0)).map(lambda a: np.swapaxes(a, 1, 2))
    tokens = np.maximum(np.sum(mask != 0, 1), 1)
    pooled = (b.total(kept) / b.exact(tokens[:, None, None])).map(lambda a: a[..., 0])
    if not normalize:
        return pooled
    square = b.total(pooled * pooled)
    # max(|m|, epsilon) in float32, in which squares below TINY are 0
    limited = Bounded(np.maximum(square.value, max(epsilon, math.sqrt(b.TINY)) ** 2), square.error)
    return pooled * b.rsqrt(limited)


def _segment_formula(*, dtype: str, x: Array, segment_ids: Array, num_segments: int, **options: Any) -> Bounded:
    """The same of each segment, of all rows one after another."""
    rows, ids = x.reshape(1, -1, x.shape[-1]), segment_ids.reshape(1, -1)
    pooled = (_formula(dtype=dtype, x=rows, mask=ids == i, **options) for i in range(num_segments))
    return b.joined(*pooled, axis=0)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    del mosaic
    batch, seq, n = pick.few(1, 2, 5), pick.rows(), pick.size()
    inputs = {
        "x": Input((batch, seq, n), dtype, masked=("mask", (batch, seq, 1))),
        "mask": Input((batch, seq), pick.of(("bool", "int32", "int8")), "mask"),
    }
    return inputs, {"normalize": pick.chance(0.7), "epsilon": pick.of((1e-12, 1e-6, 0.1))}


def _draw_segments(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    del mosaic
    batch, seq, n = pick.few(1, 2, 5), pick.rows(), pick.size()
    inputs = {
        "x": Input((batch, seq, n), dtype),
        "segment_ids": Input((batch, seq), pick.of(("int32", "int8", "uint32")), "ids"),
    }
    return inputs, {"num_segments": pick.of((1, 3, 6)), "normalize": pick.chance(0.7)}


_CALLS = (Call("mean_pool", ops.mean_pool, lambda x, mask: dict(x=x, mask=mask), _small, 1, (0, 1)),)
_SEGMENT_CALLS = (
    Call(
        "segment_mean_pool",
        ops.segment_mean_pool,
        _segments,
        _small_segments,
        1,
        (0, 1),
        symbols={7: "s"},  # the number of segments is a number, and here the batch's
    ),
)
CASES = (
    Case(
        op=ops.mean_pool,
        products="none",
        calls=_CALLS,
        hopper_calls=_CALLS,
        large={"mean-pool": lambda dtype: dict(x=shaped(dtype, 64, 512, 384), mask=shaped("int32", 64, 512))},
        empty=(Empty(dict(x=zeros(2, 0, 4), mask=zeros(2, 0, dtype="int32")), (2, 4)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="mean_pool",
    ),
    Case(
        op=ops.segment_mean_pool,
        products="none",
        calls=_SEGMENT_CALLS,
        hopper_calls=_SEGMENT_CALLS,
        large={
            "segment-mean-pool": lambda dtype: dict(
                x=shaped(dtype, 64, 64, 384), segment_ids=shaped("int32", 64, 64), num_segments=512
            ),
        },
        empty=(Empty(dict(x=zeros(2, 0, 4), segment_ids=zeros(2, 0, dtype="int32"), num_segments=3), (3, 4)),),
        spread=Without("segments of a row can be anywhere, so that nothing can be split"),
        formula=_segment_formula,
        draw=_draw_segments,
        torch=Without("torch has no function for it; `mean_pool` of each segment is its formula"),
    ),
)
