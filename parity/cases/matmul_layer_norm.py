"""The cases of `ops.matmul_layer_norm`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from pallas_models.kernels.mosaic import matmul_layer_norm_cluster as cluster
from pallas_models.kernels.triton import matmul_layer_norm as triton
from parity.cases import matmul
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    n = sizes(size)[-1]
    rng = np.random.default_rng(21)
    return (
        *matmul.small(size, dtype),
        normal(rng, n, dtype=dtype, shift=1, scale=0.3),
        normal(rng, n, dtype=dtype),
    )


def _hopper(size: int, dtype: str) -> Arrays:
    return matmul.for_hopper(36, dtype, *((72, 192, 128) if size == 1 else (128, 128, 384)), 0.5, 1.0, 0.0)


def _arguments(
    x: Any, residual: Any, w: Any, bias: Any, scale: Any, offset: Any, **options: Any
) -> dict[str, Any]:
    arrays = dict(x=x, w=w, scale=scale, offset=offset, bias=bias, residual=residual)
    return arrays | dict(epsilon=0.1) | options


def _fused(*arrays: Any) -> dict[str, Any]:
    """In one kernel: a tile is as wide as a row."""
    columns = -(-arrays[2].shape[1] // 16) * 16
    config = triton.Config(block_m=16, block_n=columns, block_k=32, num_warps=4, num_stages=2)
    return _arguments(*arrays, config=config)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    shapes = ((8, 6), (8, 10), (6, 10), (10,), (10,), (10,))
    arrays = tuple(normal(rng, *shape) for shape in shapes)
    call = Call("rows", ops.matmul_layer_norm, _arguments, lambda size, dtype: arrays, 6)
    specs = (data, data, whole, whole, whole, whole)
    return (Spread(call=call, specs=specs, result=data, sums=4, kinds=("explicit",)),)


def formula(
    *,
    dtype: str,
    x: Array | Bounded,
    w: Array,
    scale: Array,
    offset: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    epsilon: float,
    precision: str | None = None,
    config: Any = None,
) -> Bounded:
    """layer_norm(x w + bias + residual) scale + offset."""
    del config
    y = b.product(x, w, bias, residual, dtype=dtype, precision=precision)
    y = b.normalised(y, epsilon, subtract_mean=True) * b.exact(scale)
    return b.rounded(b.plus(y, offset), dtype)


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, k, n = pick.product(mosaic)
    if mosaic:
        n = pick.of((128, 256, 384))
    inputs = {
        "x": Input((m, k), dtype, limit=1e7),
        "w": Input((k, n), dtype, scale=k**-0.5, limit=1e7),
        "scale": Input((n,), pick.other(dtype), scale=0.3, shift=1.0),
        "offset": Input((n,), pick.other(dtype)),
    }
    if pick.chance(0.5):
        inputs["bias"] = Input((n,), pick.other(dtype))
    if pick.chance(0.5):
        inputs["residual"] = Input((m, n), dtype) if mosaic else pick.stream(m, n, dtype)
    options = pick.precision(dtype) | {"epsilon": pick.epsilon()}
    tiles = not mosaic and pick.chance(0.3)
    return inputs, options | ({"config": matmul.tiles(pick, splits=(1, 2))} if tiles else {})


CASES = (
    Case(
        op=ops.matmul_layer_norm,
        products="kernels",
        calls=(
            Call("matmul_layer_norm", ops.matmul_layer_norm, _arguments, _small, 6, (0, 1), kernels=2),
            Call("matmul_layer_norm_fused", ops.matmul_layer_norm, _fused, _small, 6, (0, 1)),
        ),
        hopper_calls=(
            Call("matmul_layer_norm", ops.matmul_layer_norm, _arguments, _hopper, 6),
            Call(
                "matmul_layer_norm_cluster",
                ops.matmul_layer_norm,
                functools.partial(_arguments, config=cluster.Config(block_n=64, block_k=64, num_stages=2)),
                _hopper,
                6,
            ),
        ),
        large={
            "matmul-layer-norm": lambda dtype: dict(
                x=shaped(dtype, 8192, 1536),
                w=shaped(dtype, 1536, 384),
                scale=shaped("float32", 384),
                offset=shaped("float32", 384),
            ),
        },
        empty=(
            Empty(dict(x=zeros(3, 4), w=zeros(4, 0), scale=zeros(0), offset=zeros(0)), (3, 0)),
            Empty(dict(x=zeros(3, 0), w=zeros(0, 4), scale=zeros(4), offset=zeros(4)), (3, 4)),
        ),
        spread=_spread,
        formula=formula,
        draw=_draw,
        torch="matmul_layer_norm",
    ),
)
