"""Products of the references, whose gradients are as wide as their operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike


def einsum(
    equation: str,
    a: jax.Array,
    b: jax.Array,
    *,
    precision: jax.lax.Precision,
    acc_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """`jnp.einsum` of two operands, summed in and returned as `acc_dtype`.

    JAX widens 16-bit operands to the cotangent, which is of `acc_dtype`: off the tensor cores, at `precision`.
    Here the cotangent is rounded to the dtype of the operands instead, and a product of these gives each gradient;
    sums are float32 all the same. float32 stays what it is.
    """
    if a.dtype.itemsize > 2:
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=acc_dtype)
    return _half(equation, jnp.dtype(acc_dtype), a, b)


def _einsum(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.DEFAULT, preferred_element_type=dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _half(equation: str, acc_dtype: jnp.dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    return _einsum(equation, a, b, acc_dtype)


def _half_jvp(equation: str, acc_dtype: jnp.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    out = _half(equation, acc_dtype, *primals)
    (a, b), (da, db) = primals, tangents
    pairs = [pair for pair, moving in (((da, b), da), ((a, db), db)) if not isinstance(moving, SymbolicZero)]
    # As a result of 16 bits, its cotangent has 16 bits.
    return out, sum((_einsum(equation, *pair, a.dtype).astype(acc_dtype) for pair in pairs), jnp.zeros_like(out))


_half.defjvp(_half_jvp, symbolic_zeros=True)
