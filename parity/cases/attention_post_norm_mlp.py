"""The cases of `ops.attention_post_norm_mlp`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, zeros
from parity.cases.attention import qkv_formula
from parity.cases.post_norm_mlp import NAMES, drawn_weights
from parity.cases.post_norm_mlp import formula as post_norm_mlp
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import array, normal, random_mask
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    b, s, n, f = (2, 5, 32, 24) if size == 1 else (2, 40, 96, 64)
    rng = np.random.default_rng(44)
    tokens = (normal(rng, b, s, width, dtype=dtype) for width in (3 * n, n))
    weights = (normal(rng, *shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in ((n, n), (n, f), (f, n)))
    vectors = (normal(rng, n, dtype=dtype, shift=shift) for shift in (1.0, 0.0))
    return *tokens, *weights, *vectors, random_mask(rng, b, s)


def _hopper(size: int, dtype: str) -> Arrays:
    b, s, n = (1 if size == 1 else 3), 64, 256
    rng = np.random.default_rng(43)
    shapes = ((b, s, 3 * n), (b, s, n), (n, n), (n,), (n,), (n,), (n, n), (n,), (n, n), (n,), (n,), (n,))
    arrays = (normal(rng, *shape, dtype=dtype, scale=n**-0.5 if len(shape) == 2 else 1.0) for shape in shapes)
    return *arrays, array(np.sort(rng.integers(0, 9, (b, s)), 1), "int32")


def _with_mask(
    qkv: Any, x: Any, w_out: Any, w_up: Any, w_down: Any, scale: Any, offset: Any, mask: Any
) -> dict[str, Any]:
    """Both norms have the same scale and offset."""
    norms = dict(scale_out=scale, offset_out=offset, scale=scale, offset=offset)
    heads = dict(num_heads=x.shape[-1] // 32, mask=mask)
    return dict(qkv=qkv, x=x, w_out=w_out, w_up=w_up, w_down=w_down) | heads | norms


def _with_segments(qkv: Any, *arrays: Any) -> dict[str, Any]:
    *others, ids = arrays
    weights = dict(zip(NAMES[1:], others, strict=True))
    return dict(qkv=qkv, num_heads=8, segment_ids=ids, epsilon=0.1) | weights


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()

    def arguments(qkv: Any, x: Any, w_out: Any, w_up: Any, w_down: Any, vector: Any, mask: Any) -> dict[str, Any]:
        return _with_mask(qkv, x, w_out, w_up, w_down, vector, vector, mask)

    arrays = (
        *(normal(rng, 4, 3, width) for width in (96, 32)),
        *(normal(rng, *shape, scale=0.2) for shape in ((32, 32), (32, 8), (8, 32), (32,))),
        random_mask(rng, 4, 3),
    )
    return (
        Spread(
            call=Call("batch", ops.attention_post_norm_mlp, arguments, lambda size, dtype: arrays, 6),
            specs=(data, data, whole, whole, whole, whole, data),
            result=P("data", None, None),
            sums=3 + 4,  # the vector stands for four
        ),
    )


def _formula(
    *,
    dtype: str,
    qkv: Array,
    num_heads: int,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | None = None,
    precision: str | None = None,
    **others: Any,
) -> Bounded:
    """`post_norm_mlp` of the result of attention, which is rounded to the dtype."""
    masks = dict(mask=mask, bias=bias, segment_ids=segment_ids)
    y = qkv_formula(dtype=dtype, qkv=qkv, num_heads=num_heads, precision=precision, **masks)
    assert isinstance(y, Bounded)
    return post_norm_mlp(dtype=dtype, y=b.held(y, dtype), precision=precision, **others)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    """Without a mask: the results at tokens that it rules out have no meaning."""
    batch, heads, head_dim = pick.few(1, 2, 3), pick.few(1, 2, 3), pick.of((16, 32))
    seq, n = pick.size(), pick.size()
    if mosaic:
        seq, heads = pick.of(((64, 8), (64, 12), (128, 12)))
        head_dim, n = 32, 32 * heads
    k, f = heads * head_dim, n * pick.of((1, 2, 4)) if mosaic else pick.size()
    inputs = {
        "qkv": Input((batch, seq, 3 * k), dtype, limit=1e2),
        "x": Input((batch, seq, n), dtype, limit=1e3),
    }
    if pick.chance(0.4):
        inputs["segment_ids"] = Input((batch, seq), "int32", "ids")
    elif not mosaic and pick.chance(0.3):
        inputs["bias"] = Input((pick.of((1, batch)), pick.of((1, heads)), seq, seq), pick.other(dtype), "bias")
    weights, options = drawn_weights(pick, dtype, mosaic, k, n, f)
    return inputs | weights, options | {"num_heads": heads}


_OF_ROWS = dict(qkv=zeros(0, 3, 12), x=zeros(0, 3, 4), num_heads=1)
_OF_ROWS |= {name: zeros(4, 4) for name in ("w_out", "w_up", "w_down")}
_OF_ROWS |= {name: zeros(4) for name in ("scale_out", "offset_out", "scale", "offset")}

_OP = ops.attention_post_norm_mlp
CASES = (
    Case(
        op=_OP,
        products="kernels",
        calls=(Call("attention_matmul_layer_norm", _OP, _with_mask, _small, 7, (0, 1, 7), kernels=5),),
        hopper_calls=(
            Call(
                "attention_post_norm_mlp",
                _OP,
                _with_segments,
                _hopper,
                12,
                (0, 1, 12),
                implementation=lambda name: name and (name, "triton"),  # which has the gradient of attention
            ),
        ),
        large=Without("its kernels have no tiles to choose"),
        empty=(Empty(_OF_ROWS, (0, 3, 4)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch=Without("its parts have their own: attention and `post_norm_mlp`"),
    ),
)
