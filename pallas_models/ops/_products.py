"""Products of the references, whose gradients are as wide as their operands."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from pallas_models.ops._linear import linear


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def scaled_einsum(equation: str, dtype: jnp.dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two float32 operands that are rounded to 16 bits, summed in and returned as float32.

    For float16 each is multiplied by a power of two first, so that none of it leaves the range of that, whatever
    its size is; the result is divided by it. The gradients are such products, too, of the cotangent.
    """
    (a, *from_a), (b, *from_b) = (_rounded(x, dtype) for x in (a, b))
    out = _einsum(equation, a, b, jnp.float32)
    for factor in (*from_a, *from_b):
        out *= factor
    return out


def _rounded(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """x in 16 bits and, for float16, the power of two that it was divided by before."""
    if dtype != jnp.float16:
        return (x.astype(dtype),)
    exponent = (jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x)), jnp.int32) >> 23) - 127
    # The largest becomes 2**14 to 2**15; both powers are within float32, and what is not finite has none.
    exponent = jnp.where(exponent < 128, jnp.clip(exponent - 14, -100, 113), 0)

    def power(exponent: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)

    return (x * power(-exponent)).astype(dtype), power(exponent)


def _scaled_jvp(equation: str, dtype: jnp.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    axes = re.split(",|->", equation)  # of a, b and the result
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

    def product(operands: dict[int, jax.Array], result: int) -> jax.Array:
        # The axes of the result come in the order of the operands', or it would have to be transposed.
        (i, a), (j, b) = sorted(operands.items(), key=lambda item: axes[result][0] not in axes[item[0]])
        return scaled_einsum(f"{axes[i]},{axes[j]}->{axes[result]}", dtype, a, b)

    def tangent(primals: list[jax.Array], moved: list[jax.Array]) -> list[jax.Array]:
        terms = [product({i: x, 1 - i: primals[1 - i]}, 2) for i, x in zip(moving, moved, strict=True)]
        return [functools.reduce(jnp.add, terms)]

    def transpose(primals: list[jax.Array], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
        return [
            product({2: cotangents[0], 1 - i: primals[1 - i]}, i) if w else None
            for i, w in zip(moving, wanted, strict=True)
        ]

    out = scaled_einsum(equation, dtype, *primals)
    if not moving:
        return out, jnp.zeros_like(out)
    return out, linear(tangent, transpose, list(primals), [tangents[i] for i in moving])[0]


scaled_einsum.defjvp(_scaled_jvp, symbolic_zeros=True)
