"""The feed-forward half of a block."""

import dataclasses
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models._modules import GateUp, LayerNorm, Linear, Projection
from pallas_models.ops import _checks
from pallas_models.ops._checks import Array
from pallas_models.pairformer._numerics import Numerics, Options

Kind = Literal["swiglu", "relu"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransitionConfig:
    """Sizes and variant of a transition.

    Attributes:
      channels: of its input.
      hidden: channels between its projections: 4 times as many in AlphaFold.
      kind: `"swiglu"`, without biases, as in AlphaFold 3, Boltz and Protenix; `"relu"`, with biases, as in
        AlphaFold 2.
      epsilon: added to the variance of the layer norm.
    """

    channels: int = 128
    hidden: int = 512
    kind: Kind = "swiglu"
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.kind not in ("swiglu", "relu"):
            raise ValueError(f"kind={self.kind!r} is unknown; expected 'swiglu' or 'relu'")


class Transition(nnx.Module):
    """A layer norm and an MLP of each vector of (..., C)."""

    def __init__(self, config: TransitionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.norm = LayerNorm(config.channels)
        sizes = config.channels, config.hidden
        if config.kind == "swiglu":
            self.gate_up = GateUp(*sizes, dtype=dtype, rngs=rngs)
            self.down = Projection(*sizes[::-1], dtype=dtype, rngs=rngs)
        else:
            self.up = Linear(*sizes, dtype=dtype, rngs=rngs)
            self.down = Linear(*sizes[::-1], dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, *, residual: bool = False, **options: Unpack[Options]) -> jax.Array:
        """Computes the transition, with the arguments and errors of `transition`."""
        config, numerics = self.config, Numerics.of(self.config.epsilon, options)
        _checks.check_float("x", x)
        x = jnp.asarray(x)
        if x.shape[-1:] != (config.channels,):
            raise ValueError(f"x has shape {x.shape}; expected {config.channels} channels, as the parameters have")
        if not isinstance(self.down, Linear):
            return numerics.gated_mlp(x, self.norm, self.gate_up, self.down, residual=residual)
        y, x = numerics.norm(x, self.norm)
        hidden = numerics.product(y, self.up.kernel[...], self.up.bias[...], activation="relu")
        return numerics.product(
            hidden,
            self.down.kernel[...],
            self.down.bias[...],
            residual=x if residual else None,
            out_dtype=x.dtype,
        )
