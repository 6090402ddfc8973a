"""What no backend owns: the order of tiles, constants of activations, backends that are imported when wanted."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Ref = Any  # inside a kernel: a reference to an array in device or shared memory, for which JAX has no public type


class Backend:
    """A module of Pallas, imported when a kernel first wants something of it.

    A backend takes as long to import as the rest of this library, a process needs one of them at most, and JAX
    may cease to have it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


# What the maximum of a row of scores starts from: finite, so that a score of -inf less the maximum is no NaN.
LOWEST = float(np.finfo(np.float32).min)
# The log-sum-exp of a query that no key is left for: finite, as jax_debug_infs takes every infinity for a mistake.
NO_KEY = LOWEST
# A bias of this and below counts for -inf.
MASKING_BIAS = -1e30

TINY = float(jnp.finfo(jnp.float32).tiny)  # the least normal number: what is smaller counts for 0 on a GPU

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
# The same for what is rounded to float16: 5.5e-5, where rounding is off by up to 2.4e-4 between 0.5 and 1.
GELU_POLYNOMIAL_FLOAT16 = (-2.488561e-02, -4.988201e-01, -1.1292459, -1.00353174)
MINUS_LOG2_E = -math.log2(math.e)
GELU_TANH = math.sqrt(8.0 / math.pi) * MINUS_LOG2_E

# log2(erfc(a / sqrt(2)) / 2) as a polynomial in a, highest power first, fitted to minimise the error of erfc: it
# is below 1.5e-7 everywhere, in float32. That of gelu itself may be coarser near 0, where it meets a factor of a.
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


def check_divides(config: Any, n: int, pieces: tuple[int, int]) -> None:
    """Raises ValueError unless the tiles of a product divide the pieces of its matrices (n, n)."""
    blocks = config.block_m, config.block_n, config.block_k
    if pieces != (1, 1) and any(n // count % block for count in pieces for block in blocks):
        raise ValueError(
            f"{config} has tiles that do not divide {n // pieces[0]} rows and {n // pieces[1]} columns"
        )


def tile_order(pid: jax.Array, tiles_m: int, tiles_n: int, group_m: int) -> tuple[jax.Array, jax.Array]:
    """Row and column block of program `pid`: column by column within groups of `group_m` row blocks."""
    div, rem = jax.lax.div, jax.lax.rem  # which, unlike // and %, spend nothing on negative numbers
    if tiles_m <= group_m:
        return rem(pid, tiles_m), div(pid, tiles_m)
    group, within = div(pid, group_m * tiles_n), rem(pid, group_m * tiles_n)
    i, j = rem(within, group_m), div(within, group_m)
    if height := tiles_m % group_m:  # of the last group: dividing by constants is much cheaper than by a height
        is_last = group == tiles_m // group_m
        i, j = jnp.where(is_last, rem(within, height), i), jnp.where(is_last, div(within, height), j)
    return group * group_m + i, j


def first_heads_of(qkv: tuple[jax.Array, ...], num_heads: int, num_kv_heads: int) -> tuple[int, int, int]:
    """Which head of its array the queries, the keys and the values of attention begin with: one may hold all."""
    return (0, num_heads, num_heads + num_kv_heads) if len(qkv) == 1 else (0, 0, 0)


def lowest_score(scale: float) -> float:
    """What the maximum of a row starts from: finite when scaled too, so that a score of -inf less it is no NaN."""
    return LOWEST / max(_power_above(scale), 1.0)


def exponents(peak: jax.Array, scale: float) -> tuple[jax.Array | float, jax.Array]:
    """What makes exponents to the base 2 of scores, `score * factor - shift`, given the maximum of each row.

    The GPU rounds product and difference once, so that the maximum's exponent is off by what rounds the shift: by
    2 for a shift of 2**26, where weights of 16 bits begin to suffer. From there on scores are rounded to steps of
    more than 4 in the exponent, so that any factor as large does: a power of two, by which nothing is rounded.
    """
    power = _power_above(scale)
    factor = scale if power == scale else jnp.where(jnp.abs(peak) >= 2.0**26 / scale, power, scale)
    return factor, peak * factor


def _power_above(scale: float) -> float:
    return 2.0 ** math.ceil(math.log2(scale))


def rows_of_backward(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """What the backward of attention needs of each row of weights, both (B, heads, Sq) float32.

    Args:
      out: (B, Sq, heads * head_dim), the results.
      lse: (B, heads, Sq) float32, the log-sum-exp of the scores, `NO_KEY` for queries without one.
      dout: gradient of `out`.
      dlse: gradient of `lse`; None for zeros.

    Returns:
      What is added to scores to the base 2 before exponentials, and what is subtracted from gradients of weights.
    """
    by_head = (*out.shape[:2], -1, head_dim)
    product = out.astype(jnp.float32) * dout.astype(jnp.float32)
    delta = jnp.sum(product.reshape(by_head), axis=-1).swapaxes(1, 2)
    empty = lse == NO_KEY
    if dlse is not None:  # the gradient of lse is the weights themselves
        delta = jnp.where(empty, 0.0, delta - dlse)
    return jnp.where(empty, -jnp.inf, lse * -math.log2(math.e)), delta
