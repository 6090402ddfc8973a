"""The cases of `ops.rotary`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, k, _ = sizes(size)
    rng = np.random.default_rng(27)
    head_dim = 2 * (k // 2)
    return (
        normal(rng, batch, tokens, (3 + 2 * 2) * head_dim, dtype=dtype),
        *(normal(rng, batch, tokens, head_dim // 2) for _ in range(2)),
        *(normal(rng, head_dim, dtype=dtype, shift=1, scale=0.3) for _ in range(2)),
    )


def _arguments(qkv: Any, cos: Any, sin: Any, q_scale: Any, k_scale: Any) -> dict[str, Any]:
    arrays = dict(qkv=qkv, cos=cos, sin=sin, q_scale=q_scale, k_scale=k_scale)
    return arrays | dict(num_heads=3, num_kv_heads=2, epsilon=0.1)


def _large(dtype: str) -> dict[str, Any]:
    table = shaped("float32", 4096, 64)
    return dict(qkv=shaped(dtype, 1, 4096, 48 * 128), cos=table, sin=table, num_heads=32, num_kv_heads=8)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    arrays = normal(rng, 4, 6, 64), normal(rng, 6, 8), normal(rng, 6, 8)

    def arguments(qkv: Any, cos: Any, sin: Any) -> dict[str, Any]:
        return dict(qkv=qkv, cos=cos, sin=sin, num_heads=2, num_kv_heads=1)

    return (
        Spread(
            call=Call("batch and tokens", ops.rotary, arguments, lambda size, dtype: arrays, 1),
            specs=(P("data", "model"), P("model"), P("model")),
            result=P("data", "model", None),
            sums=0,
            kinds=("explicit",),
        ),
    )


def _formula(
    *,
    dtype: str,
    qkv: Array,
    cos: Array,
    sin: Array,
    num_heads: int,
    num_kv_heads: int,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    epsilon: float = 1e-6,
) -> Bounded:
    """Heads of queries and keys, normalised and turned; values as they are."""
    heads = qkv.reshape(*qkv.shape[:2], num_heads + 2 * num_kv_heads, -1)
    q, k, v = np.split(heads, (num_heads, num_heads + num_kv_heads), 2)
    half = q.shape[-1] // 2
    turn_cos, turn_sin = (b.exact(x[..., None, :] if x.ndim == 3 else x[None, :, None]) for x in (cos, sin))

    def rotate(x: Array, scale: Array | None) -> Bounded:
        y = b.exact(x)
        if scale is not None:
            y = b.normalised(y, epsilon, subtract_mean=False) * b.exact(scale)
        first, second = y.map(lambda a: a[..., :half]), y.map(lambda a: a[..., half:])
        parts = first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin
        # One of the two products may be kept exactly, the sum is rounded in relation to both.
        return b.rounded(b.joined(*parts), dtype)

    out = b.joined(rotate(q, q_scale), rotate(k, k_scale), b.exact(v), axis=2)
    return out.map(lambda a: a.reshape(qkv.shape))


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    del mosaic
    batch, seq, heads, kv_heads = pick.few(1, 2), pick.size(), pick.few(1, 2, 3), pick.few(1, 2)
    half = pick.of((1, 3, 8, 16, 32, 40, 64))
    table = Input((*((batch,) if pick.chance(0.5) else ()), seq, half), pick.other("float32"), "cos")
    inputs = {
        "qkv": Input((batch, seq, (heads + 2 * kv_heads) * 2 * half), dtype),
        "cos": table,
        "sin": table,
    }
    if pick.chance(0.6):
        inputs |= {f"{x}_scale": Input((2 * half,), pick.other(dtype), scale=0.3, shift=1.0) for x in "qk"}
    return inputs, {"num_heads": heads, "num_kv_heads": kv_heads, "epsilon": pick.epsilon()}


_CALLS = (Call("rotary", ops.rotary, _arguments, _small, 5, (0, 1, 2)),)
CASES = (
    Case(
        op=ops.rotary,
        products="none",
        calls=_CALLS,
        hopper_calls=_CALLS if jax.__version_info__ >= (0, 11) else Without("JAX 0.10 changes no array in place"),
        large={"rotary": _large},
        empty=(
            Empty(
                dict(qkv=zeros(2, 0, 48), cos=zeros(0, 8), sin=zeros(0, 8), num_heads=1, num_kv_heads=1),
                (2, 0, 48),
            ),
        ),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="rotary",
    ),
)
