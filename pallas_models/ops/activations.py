"""Activations that kernels apply in registers and references apply in XLA, under one set of names."""

import math
from collections.abc import Callable
from typing import Literal

import jax

Activation = Literal["gelu", "gelu_tanh", "relu", "sigmoid", "silu"]


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


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


def apply(activation: Activation | None, x: jax.Array) -> jax.Array:
    """Applies the named activation to `x`; None is the identity."""
    return x if activation is None else ACTIVATIONS[activation](x)


def check_activation(activation: str | None) -> None:
    """Raises ValueError unless `activation` is None or a known name."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{activation=} is unknown; expected None or one of {tuple(ACTIVATIONS)}")
