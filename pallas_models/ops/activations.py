"""Activations that kernels apply in registers and references apply in XLA, under one set of names."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_models.kernels.forms.matmul import Activation as Activation


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


# JAX 0.12 cannot differentiate erf in a shard_map that checks its types.
@_gelu.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-0.5 * jnp.square(x)) / math.sqrt(2.0 * math.pi)
    return _gelu(x), (0.5 * jax.lax.erfc(-math.sqrt(0.5) * x) + x * density) * dx


def _gelu_tanh(x: jax.Array) -> jax.Array:
    # (1 + tanh(u)) / 2 is sigmoid(2 u): XLA's tanh is a long polynomial, which takes longer than reading x.
    return x * jax.nn.sigmoid(math.sqrt(8.0 / math.pi) * (x + 0.044715 * (x * x * x)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
}
"""Each activation by its name, as a function of float32 arrays."""


def apply(activation: Activation | None, x: jax.Array) -> jax.Array:
    """Applies the named activation to `x`; None is the identity."""
    return x if activation is None else ACTIVATIONS[activation](x)


def check_activation(activation: str | None) -> None:
    """Raises ValueError unless `activation` is None or a known name."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{activation=} is unknown; expected None or one of {tuple(ACTIVATIONS)}")
