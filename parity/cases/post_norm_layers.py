"""The cases of `ops.post_norm_layers`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.cases._records import Arrays, Call, Case, Empty, Spread, Without, zeros
from parity.cases.post_norm_mlp import NAMES
from parity.support.common import normal, random_mask

LAYER = ("w_qkv", "bias_qkv", *NAMES[2:])
_OTHERS = "its layers are `matmul` and `post_norm_mlp`"


def shapes(n: int, f: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a layer of width n and hidden width f."""
    wide = {"w_qkv": (n, 3 * n), "bias_qkv": (3 * n,), "w_out": (n, n), "w_up": (n, f), "bias_up": (f,)}
    return dict.fromkeys(LAYER, (n,)) | wide | {"w_down": (f, n)}


def layer(rng: np.random.Generator, n: int, f: int, dtype: str, factor: float = 1.0) -> dict[str, jax.Array]:
    """A layer, with weights larger by a factor."""

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name[0] == "w":
            return normal(rng, *shape, dtype=dtype, scale=factor * shape[0] ** -0.5)
        return normal(rng, *shape, shift=float("scale" in name), scale=0.3)

    return {name: draw(name, shape) for name, shape in shapes(n, f).items()}


def _small(size: int, dtype: str) -> Arrays:
    b, s, n = (2, 5, 32) if size == 1 else (2, 16, 64)
    rng = np.random.default_rng(48)
    return normal(rng, b, s, n, dtype=dtype), *layer(rng, n, 24, dtype).values(), random_mask(rng, b, s)


def _hopper(size: int, dtype: str) -> Arrays:
    b, s, n = (2, 4, 128) if size == 1 else (1, 16, 384)
    rng = np.random.default_rng(43)
    return normal(rng, b, s, n, dtype=dtype), *layer(rng, n, 4 * n, dtype).values(), random_mask(rng, b, s)


def _arguments(x: Any, *layer_and_mask: Any, layers: int = 3) -> dict[str, Any]:
    *arrays, mask = layer_and_mask
    alike = [dict(zip(LAYER, arrays, strict=True))] * layers
    return dict(x=x, layers=alike, num_heads=x.shape[-1] // 32, mask=mask, epsilon=0.1)


def _two(*arrays: Any) -> dict[str, Any]:
    return _arguments(*arrays, layers=2)


def _spread(rng: np.random.Generator) -> Sequence[Spread]:
    data, whole = P("data"), P()
    arrays = normal(rng, 4, 3, 32), *layer(rng, 32, 8, "float32").values(), random_mask(rng, 4, 3)
    return (
        Spread(
            call=Call("batch", ops.post_norm_layers, _two, lambda size, dtype: arrays, 13),
            specs=(data, *[whole] * len(LAYER), data),
            result=P("data", None, None),
            sums=2 * len(LAYER),  # each array stands for two
        ),
    )


CASES = (
    Case(
        op=ops.post_norm_layers,
        products="kernels",
        calls=Without(_OTHERS),
        hopper_calls=(
            Call(
                "post_norm_layers",
                ops.post_norm_layers,
                _arguments,
                _hopper,
                13,
                (0, 13),
                implementation=lambda name: name and (name, "triton"),  # which has the gradient
            ),
        ),
        large=Without("its kernel has no tiles to choose"),
        empty=(
            Empty(
                dict(
                    x=zeros(0, 3, 32),
                    layers=[{name: zeros(*shape) for name, shape in shapes(32, 8).items()}],
                    num_heads=1,
                ),
                (0, 3, 32),
            ),
        ),
        spread=_spread,
        formula=Without(_OTHERS),
        draw=Without(_OTHERS),
        torch="post_norm_layers",
    ),
)
