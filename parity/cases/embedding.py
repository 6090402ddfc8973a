"""The cases of `ops.embed_tokens`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import array, normal
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, _, n = sizes(size)
    rng = np.random.default_rng(25)
    return (
        normal(rng, 50, n, dtype=dtype),
        normal(rng, tokens + 2, n, dtype=dtype),
        normal(rng, 3, n, dtype=dtype),
        normal(rng, n, dtype=dtype, shift=1, scale=0.3),
        normal(rng, n, dtype=dtype),
        array(rng.integers(0, 50, (batch, tokens)), "int32"),
        array(rng.integers(0, 3, (batch, tokens)), "int32"),
    )


def _arguments(
    word: Any, position: Any, token_type: Any, scale: Any, bias: Any, ids: Any, types: Any
) -> dict[str, Any]:
    tables = dict(word=word, position=position, token_type=token_type, scale=scale, bias=bias)
    return dict(ids=ids, token_type_ids=types, epsilon=0.1) | tables


def _large(dtype: str) -> dict[str, Any]:
    tables = dict(
        word=shaped(dtype, 30522, 384), position=shaped(dtype, 512, 384), token_type=shaped(dtype, 2, 384)
    )
    return dict(ids=shaped("int32", 64, 128), scale=shaped(dtype, 384), bias=shaped(dtype, 384)) | tables


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    ids = array(rng.integers(0, 12, (4, 5)), "int32")
    tables = *(normal(rng, n, 16) for n in (12, 6, 2)), normal(rng, 16), normal(rng, 16)
    names = ("word", "position", "token_type", "scale", "bias", "ids")
    call = Call(
        "batch",
        ops.embed_tokens,
        lambda *arrays: dict(zip(names, arrays, strict=True)),
        lambda size, dtype: (*tables, ids),
        5,
    )
    specs, result = (*[P()] * 5, P("data")), P("data", None, None)
    return (Spread(call=call, specs=specs, result=result, sums=5, kinds=("explicit",)),)


def _formula(
    *,
    dtype: str,
    ids: Array,
    word: Array,
    position: Array,
    token_type: Array,
    scale: Array,
    bias: Array,
    token_type_ids: Array | None = None,
    position_ids: Array | None = None,
    epsilon: float = 1e-12,
) -> Bounded:
    """The layer norm of the sum of three rows."""
    types = np.zeros_like(ids) if token_type_ids is None else token_type_ids
    positions = position[: ids.shape[1]] if position_ids is None else position[position_ids.astype(int)]
    y = b.plus(b.exact(word[ids.astype(int)]), positions, token_type[types.astype(int)])
    # The sum may be made in another order.
    size = np.abs(word[ids.astype(int)]) + np.abs(positions) + np.abs(token_type[types.astype(int)])
    y = y.off(2 * b.UNIT * size)
    out = b.normalised(y, epsilon, subtract_mean=True) * b.exact(scale)
    return b.rounded(b.plus(out, bias), dtype)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    del mosaic
    batch, seq, n, vocabulary = pick.few(1, 2, 3), pick.size(), pick.size(), pick.size()
    types = pick.of((1, 2, 3))
    inputs = {
        "ids": Input((batch, seq), pick.of(("int32", "uint8", "uint32")), "rows", scale=vocabulary),
        "word": Input((vocabulary, n), dtype),
        "position": Input((seq + pick.of((0, 3)), n), dtype),
        "token_type": Input((types, n), dtype),
        "scale": Input((n,), pick.other(dtype), scale=0.3, shift=1.0),
        "bias": Input((n,), pick.other(dtype)),
    }
    if pick.chance(0.5):
        inputs["token_type_ids"] = Input((batch, seq), "int32", "rows", scale=types)
    if pick.chance(0.3):
        inputs["position_ids"] = Input((batch, seq), "int32", "rows", scale=seq)
    return inputs, {"epsilon": pick.epsilon()}


_CALLS = (Call("embed_tokens", ops.embed_tokens, _arguments, _small, 5, (5, 6), most={"s": 9}),)  # positions
CASES = (
    Case(
        op=ops.embed_tokens,
        products="none",
        calls=_CALLS,
        hopper_calls=_CALLS,
        large={"embed-tokens": _large},
        empty=(
            Empty(
                dict(
                    ids=zeros(2, 0, dtype="int32"),
                    word=zeros(0, 4),
                    position=zeros(3, 4),
                    token_type=zeros(2, 4),
                    scale=zeros(4),
                    bias=zeros(4),
                ),
                (2, 0, 4),
            ),
        ),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="embed_tokens",
    ),
)
