"""Products of the references, whose gradients are as wide as their operands."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from pallas_models.dispatch.transposable import linear


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
    sums are float32 all the same. Tangents are not rounded, and float32 stays what it is.
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
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
    if not moving:
        return out, jnp.zeros_like(out)
    dtype, types = primals[0].dtype, [jax.typeof(primals[i]) for i in moving]

    def product(place: int, other: jax.Array, moved: jax.Array, dtype: DTypeLike) -> jax.Array:
        return _einsum(equation, *((moved, other) if place == 0 else (other, moved)), dtype)

    def tangent(others: list[jax.Array], moved: list[jax.Array]) -> list[jax.Array]:
        terms = (product(*each, acc_dtype) for each in zip(moving, others, moved, strict=True))
        return [functools.reduce(jnp.add, terms)]

    def transpose(others: list[jax.Array], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
        rounded = cotangents[0].astype(dtype)  # as the cotangent of a result of 16 bits is

        def pull(place: int, other: jax.Array, of: Any) -> jax.Array:
            of_moved = functools.partial(product, place, other, dtype=dtype)
            (change,) = jax.linear_transpose(of_moved, of)(rounded)
            return change

        each = zip(wanted, moving, others, types, strict=True)
        return [pull(place, other, of) if w else None for w, place, other, of in each]

    others = [primals[1 - i] for i in moving]
    return out, linear(tangent, transpose, others, [tangents[i] for i in moving])[0]


_half.defjvp(_half_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 4))
def rounded_einsum(
    equation: str,
    dtype: jnp.dtype,
    a: jax.Array,
    b: jax.Array,
    any_size: tuple[bool, bool] = (False, False),
) -> jax.Array:
    """`jnp.einsum` of two float32 operands that are rounded to 16 bits, summed in and returned as float32.

    Its gradients are such products of the cotangent, which may be of any size: for float16 an operand that may be,
    as `any_size` says, is multiplied by a power of two first, which the result is divided by.
    """
    (a, *from_a), (b, *from_b) = (_rounded(x, dtype, free) for x, free in zip((a, b), any_size, strict=True))
    out = _einsum(equation, a, b, jnp.float32)
    for factor in (*from_a, *from_b):
        out *= factor
    return out


def _rounded(x: jax.Array, dtype: jnp.dtype, any_size: bool) -> tuple[jax.Array, ...]:
    """x in 16 bits and, where it is scaled, the power of two that it was divided by before."""
    if not any_size or dtype != jnp.float16:
        return (x.astype(dtype),)
    exponent = (jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x)), jnp.int32) >> 23) - 127
    # The largest becomes 2**14 to 2**15, and both powers are within float32. Numbers that are not finite have
    # none.
    exponent = jnp.where(exponent < 128, jnp.clip(exponent - 14, -100, 113), 0)

    def power(exponent: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)

    return (x * power(-exponent)).astype(dtype), power(exponent)


def _rounded_jvp(
    equation: str, dtype: jnp.dtype, any_size: tuple[bool, bool], primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    axes = re.split(",|->", equation)  # of a, b and the result
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

    def product(change: jax.Array, place: int, other: int, primals: list[jax.Array], result: int) -> jax.Array:
        """The product of an operand and a change: a tangent of the other operand or a cotangent of the result."""
        terms = [(axes[place], change, True), (axes[other], primals[other], any_size[other])]
        # The axes of the result come in the order of the operands', or it would have to be transposed.
        (first, x, free_x), (second, y, free_y) = sorted(terms, key=lambda term: axes[result][0] not in term[0])
        return rounded_einsum(f"{first},{second}->{axes[result]}", dtype, x, y, (free_x, free_y))

    def tangent(primals: list[jax.Array], moved: list[jax.Array]) -> list[jax.Array]:
        terms = [product(x, i, 1 - i, primals, 2) for i, x in zip(moving, moved, strict=True)]
        return [functools.reduce(jnp.add, terms)]

    def transpose(primals: list[jax.Array], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
        return [
            product(cotangents[0], 2, 1 - i, primals, i) if w else None
            for i, w in zip(moving, wanted, strict=True)
        ]

    out = rounded_einsum(equation, dtype, *primals, any_size)
    if not moving:
        return out, jnp.zeros_like(out)
    return out, linear(tangent, transpose, list(primals), [tangents[i] for i in moving])[0]


rounded_einsum.defjvp(_rounded_jvp, symbolic_zeros=True)
