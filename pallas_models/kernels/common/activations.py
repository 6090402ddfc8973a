"""Constants of activations, and their derivatives."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# log2(erfc(a / sqrt(2)) / 2) as a polynomial in a, highest power first, fitted to minimise the error of
# gelu: below 5e-7 everywhere, in float32. Another power gives 1e-7 and costs a product 4% of its time.
GELU_POLYNOMIAL = (
    -4.73294012e-04,
    7.08446105e-03,
    -5.18271679e-02,
    -4.59992647e-01,
    -1.15078777,
    -1.00003763,
)
# The polynomial for results that are rounded to float16. Its error is 5.5e-5; between 0.5 and 1 rounding is off by
# up to 2.4e-4.
GELU_POLYNOMIAL_FLOAT16 = (-2.488561e-02, -4.988201e-01, -1.1292459, -1.00353174)
MINUS_LOG2_E = -math.log2(math.e)
GELU_TANH = math.sqrt(8.0 / math.pi) * MINUS_LOG2_E
# log2(erfc(a / sqrt(2)) / 2) as a polynomial in a, highest power first, fitted to minimise the error of erfc: it
# is below 1.5e-7 everywhere, in float32. For gelu itself it may be coarser near 0, where it meets a factor of a.
_TAIL = (
    1.91734121e-05,
    -6.58595127e-04,
    7.75438249e-03,
    -5.29653590e-02,
    -4.59060273e-01,
    -1.15112205,
    -9.99999694e-01,
)


def slope(activation: str, x: jax.Array, exp2: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The derivative at `x`, float32, of the activation named as in `pallas_models.ops.activations`."""
    match activation:
        case "gelu":  # with the normal distribution P and its density p it is P(x) + x p(x)
            a = jnp.minimum(jnp.abs(x), 16.0)
            polynomial = jnp.full_like(a, _TAIL[0])
            for coefficient in _TAIL[1:]:
                polynomial = polynomial * a + coefficient
            tail = exp2(polynomial)
            density = exp2(x * x * (MINUS_LOG2_E / 2)) / math.sqrt(2 * math.pi)
            return jnp.where(x < 0.0, tail, 1.0 - tail) + x * density
        case "gelu_tanh":  # x s(u) with u a polynomial in x
            s = 1.0 / (1.0 + exp2(x * (GELU_TANH + (0.044715 * GELU_TANH) * (x * x))))
            change = (GELU_TANH + (3 * 0.044715 * GELU_TANH) * (x * x)) / MINUS_LOG2_E
            return s + x * change * s * (1.0 - s)
        case "relu":
            return jnp.where(x > 0.0, 1.0, 0.0)
    s = 1.0 / (1.0 + exp2(x * MINUS_LOG2_E))
    return s * (1.0 - s) if activation == "sigmoid" else s * (1.0 + x * (1.0 - s))


def times(cotangent: jax.Array, factor: jax.Array) -> jax.Array:
    """A cotangent times a factor, which may be anything where the cotangent is 0."""
    return jnp.where(cotangent == 0.0, 0.0, cotangent * factor)
