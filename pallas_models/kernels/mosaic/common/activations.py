"""Activations and their derivatives in registers, as exact as the dtype of the result asks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.common.activations import (
    GELU_POLYNOMIAL,
    GELU_POLYNOMIAL_FLOAT16,
    GELU_TANH,
    MINUS_LOG2_E,
    slope,
)


def activate(activation: str | None, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Applies the activation named as in `pallas_models.ops.activations`; `x` is float32.

    Results in bfloat16 get by with a tanh of 11 bits, one instruction of the GPU, and results in float16 with a
    shorter polynomial: tensor cores wait for registers that others read, so every operation here takes their time.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        half = 0.5 * x
        match activation:
            case "gelu":  # fitted to minimise the error: 3e-4
                return half + half * jnp.tanh(x * (0.800157 + 0.034701 * (x * x)))
            case "gelu_tanh":
                factor = math.sqrt(2.0 / math.pi)
                return half + half * jnp.tanh(x * (factor + (0.044715 * factor) * (x * x)))
            case "sigmoid":
                return 0.5 + 0.5 * jnp.tanh(half)
            case "silu":
                return half + half * jnp.tanh(half)
    match activation:
        case "gelu":  # relu(x) - a erfc(a / sqrt(2)) / 2 with a = |x|
            a = jnp.minimum(jnp.abs(x), 16.0)
            first, *others = GELU_POLYNOMIAL_FLOAT16 if jnp.dtype(dtype) == jnp.float16 else GELU_POLYNOMIAL
            p: Any = first
            for coefficient in others:
                p = p * a + coefficient
            return jnp.maximum(x, 0.0) - a * jnp.exp2(p)
        case "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
            return x * _sigmoid(x * (GELU_TANH + (0.044715 * GELU_TANH) * (x * x)))
        case "relu":
            return jnp.maximum(x, 0.0)
        case "sigmoid":
            return _sigmoid(x * MINUS_LOG2_E)
        case "silu":
            return x * _sigmoid(x * MINUS_LOG2_E)
        case _:
            return x


def derivative(activation: str, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The slope at `x`, float16 or bfloat16, of the activation, in float32, as coarse as `activate` has it.

    For results in bfloat16 the slope of "gelu_tanh" is computed in float16, two numbers at a time.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and activation == "gelu_tanh":
        factor = math.sqrt(2.0 / math.pi)
        limit, a, b, c, half = (
            jnp.asarray(number, jnp.float16)
            for number in (8.0, factor, 0.044715 * factor, 3 * 0.044715 * factor, 0.5)
        )  # past the limit the slope is 0 or 1
        x = jnp.clip(x.astype(jnp.float32).astype(jnp.float16), -limit, limit)
        square = x * x
        t = _tanh(x * (a + b * square))
        value = half + half * t
        return (value + value * ((x - x * t) * (a + c * square))).astype(jnp.float32)
    return slope(activation, x.astype(jnp.float32), jnp.exp2)


def _tanh(x: jax.Array) -> jax.Array:
    """tanh of float16, which kernels of JAX 0.10 do not have."""
    if jax.__version_info__ >= (0, 11):
        return jnp.tanh(x)
    return jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)


def _sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + 2**x): a quotient costs ten instructions, and there is no other way to ask for a reciprocal."""
    root = jax.lax.rsqrt(1.0 + jnp.exp2(x))
    return root * root
