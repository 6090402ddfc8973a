"""The cases of `ops.layer_norm` and `ops.rms_norm`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from pallas_models.kernels.mosaic.norm import Config
from pallas_models.kernels.triton import norm as triton
from parity.cases._records import Arrays, Call, Case, Empty, Spread, shaped, sizes, zeros
from parity.support import bounded as b
from parity.support.bounded import Array, Bounded
from parity.support.common import normal
from parity.support.draws import Drawn, Input, Pick


def _small(size: int, dtype: str) -> Arrays:
    batch, tokens, _, n = sizes(size)
    rng = np.random.default_rng(22)
    return (
        normal(rng, batch, tokens, n, dtype=dtype),
        normal(rng, batch, tokens, n, dtype=dtype),
        normal(rng, n, dtype=dtype, shift=1, scale=0.3),
        normal(rng, n, dtype=dtype),
    )


def _small_rms(size: int, dtype: str) -> Arrays:
    return _small(size, dtype)[:3]


def _hopper(size: int, dtype: str) -> Arrays:
    m, n = (19, 9216) if size == 1 else (40, 16384)
    rng = np.random.default_rng(40)
    return normal(rng, m, n, dtype=dtype), *(normal(rng, n, dtype=dtype, shift=shift) for shift in (1.0, 0.0))


def _eights(size: int, dtype: str) -> Arrays:
    """Rows of a multiple of 8 columns, of which the gradient has a kernel of Mosaic, too."""
    m, n = (5, 24) if size == 1 else (40, 64)
    rng = np.random.default_rng(41)
    vectors = normal(rng, n, dtype=dtype, shift=1, scale=0.3), normal(rng, n, dtype=dtype)
    return normal(rng, m, n, dtype=dtype), normal(rng, m, n, dtype=dtype), *vectors


def _eights_rms(size: int, dtype: str) -> Arrays:
    return _eights(size, dtype)[:3]


def _layer_norm(x: Any, residual: Any, scale: Any, bias: Any, **options: Any) -> dict[str, Any]:
    return dict(x=x, scale=scale, bias=bias, residual=residual, epsilon=0.1) | options


def _rms_norm(x: Any, residual: Any, scale: Any, **options: Any) -> dict[str, Any]:
    return dict(x=x, scale=scale, residual=residual, epsilon=0.1) | options


def _with_sum(*arrays: Any, **options: Any) -> dict[str, Any]:
    return _rms_norm(*arrays, **options) | dict(return_residual=True)


# Rows of several warps in several steps, and of a part of a warp.
_walked = functools.partial(_layer_norm, config=Config(threads=64, block_n=16, rows=2))
_walked_rms = functools.partial(_with_sum, config=Config(threads=2, block_n=16))


def _side_by_side(out: tuple[jax.Array, ...], *arrays: jax.Array) -> jax.Array:
    del arrays
    return jnp.concatenate(out, axis=-1)


def _product(out: tuple[jax.Array, ...], *arrays: jax.Array) -> jax.Array:
    del arrays
    y, total = out
    return y * total


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    arrays = normal(rng, 8, 6), normal(rng, 8, 6), normal(rng, 6), normal(rng, 6)

    def arguments(*arrays: Any) -> dict[str, Any]:
        return _layer_norm(*arrays) | dict(return_residual=True)

    call = Call("rows", ops.layer_norm, arguments, lambda size, dtype: arrays, 4, result=_product)
    return (Spread(call=call, specs=(data, data, whole, whole), result=data, sums=2, kinds=("explicit",)),)


def _spread_rms(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    arrays = normal(rng, 8, 6), normal(rng, 8, 6), normal(rng, 6)
    call = Call("rows", ops.rms_norm, _rms_norm, lambda size, dtype: arrays, 3)
    return (Spread(call=call, specs=(data, data, whole), result=data, sums=1),)


def _formula(
    *,
    dtype: str,
    x: Array,
    scale: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    epsilon: float,
    return_residual: bool = False,
    config: Any = None,
) -> Bounded | tuple[Bounded, ...]:
    """The norm of x + residual; the mean is subtracted if there is a bias, as for a layer norm."""
    del config
    y = b.plus(b.exact(x), residual)
    out = b.normalised(y, epsilon, subtract_mean=bias is not None) * b.exact(scale)
    out = b.rounded(b.plus(out, bias), dtype)
    return (out, b.rounded(y, dtype)) if return_residual else out


def _draw_rms(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    m, n = pick.rows(), pick.rows()
    inputs = {"x": Input((m, n), dtype), "scale": Input((n,), pick.other(dtype), scale=0.3, shift=1.0)}
    options: dict[str, Any] = {"epsilon": pick.epsilon()}
    if pick.chance(0.5):
        inputs["residual"] = pick.stream(m, n, dtype)
        options |= {"return_residual": True} if pick.chance(0.4) else {}
    if mosaic:
        options |= {"config": pick.row_config()} if pick.chance(0.6) else {}
    elif pick.chance(0.3):  # rows in several steps
        options["config"] = triton.Config(block_m=pick.of((1, 2, 4)), block_n=16, num_warps=pick.of((1, 4)))
    return inputs, options


def _draw(pick: Pick, dtype: str, mosaic: bool) -> Drawn:
    inputs, options = _draw_rms(pick, dtype, mosaic)
    return inputs | {"bias": Input(inputs["scale"].shape, pick.other(dtype))}, options


def _large(dtype: str) -> dict[str, Any]:
    return dict(x=shaped(dtype, 8192, 4096), scale=shaped("float32", 4096))


CASES = (
    Case(
        op=ops.layer_norm,
        products="none",
        calls=(Call("layer_norm", ops.layer_norm, _layer_norm, _small, 4, (0, 1)),),
        hopper_calls=(
            Call(
                "layer_norm",
                ops.layer_norm,
                lambda x, scale, bias: dict(x=x, scale=scale, bias=bias, epsilon=0.1),
                _hopper,
                3,
                (0, 1),
            ),
            Call("layer_norm_short", ops.layer_norm, _layer_norm, _small, 4, (0, 1)),
            Call("layer_norm_walked", ops.layer_norm, _walked, _small, 4, (0, 1)),
            Call("layer_norm_eights", ops.layer_norm, _layer_norm, _eights, 4, (0, 1)),
        ),
        large={"layer-norm": lambda dtype: _large(dtype) | dict(bias=shaped("float32", 4096))},
        empty=(Empty(dict(x=zeros(3, 0), scale=zeros(0), bias=zeros(0)), (3, 0)),),
        spread=_spread,
        formula=_formula,
        draw=_draw,
        torch="layer_norm",
    ),
    Case(
        op=ops.rms_norm,
        products="none",
        calls=(
            Call("rms_norm", ops.rms_norm, _rms_norm, _small_rms, 3, (0, 1)),
            Call("rms_norm_residual", ops.rms_norm, _with_sum, _small_rms, 3, (0, 1), result=_side_by_side),
        ),
        hopper_calls=(
            Call("rms_norm_short", ops.rms_norm, _with_sum, _small_rms, 3, (0, 1), result=_side_by_side),
            Call("rms_norm_walked", ops.rms_norm, _walked_rms, _small_rms, 3, (0, 1), result=_side_by_side),
            Call("rms_norm_eights", ops.rms_norm, _with_sum, _eights_rms, 3, (0, 1), result=_side_by_side),
        ),
        large={"rms-norm": _large},
        empty=(Empty(dict(x=zeros(3, 0), scale=zeros(0)), (3, 0)),),
        spread=_spread_rms,
        formula=_formula,
        draw=_draw_rms,
        torch="rms_norm",
    ),
)
