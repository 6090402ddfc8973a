"""A linear function that brings its own transpose, under every transformation of JAX.

`jax.custom_derivatives.linear_call` is the same without `vmap`, and without derivatives in its other arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_models.dispatch.tangents import jvp_by

# `transpose(residuals, cotangents, wanted)`: a cotangent for each operand that is wanted, anything for the others.
# A cotangent of the result is None where it is zero.
Transpose = Callable[[list[Any], list[Any], tuple[bool, ...]], Sequence[Any]]


def linear(
    function: Callable[[list[Any], list[Any]], list[Any]],
    transpose: Transpose | None,
    residuals: list[jax.Array],
    operands: list[jax.Array],
) -> list[jax.Array]:
    """Computes `function(residuals, operands)`, which is linear in the operands.

    In reverse mode `transpose` is called; None leaves that to JAX, which keeps only the residuals for it. Function
    and transpose are differentiated themselves where the residuals are differentiated too.
    """
    return _linear.bind(
        *residuals,
        *operands,
        function=jax.make_jaxpr(function)(residuals, operands),
        transpose=transpose,
        num_residuals=len(residuals),
    )


_linear = Primitive("linear")
_linear.multiple_results = True


def _evaluate(*args: Any, function: ClosedJaxpr, transpose: Transpose | None, num_residuals: int) -> list[Any]:
    del transpose, num_residuals
    return jaxpr_as_fun(function)(*args)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    count = params["num_residuals"]
    out = _linear.bind(*primals, **params)
    changes = [ad.instantiate_zeros(t) for t in tangents[count:]]
    tangents_out = _linear.bind(*primals[:count], *changes, **params)
    moving = [i for i, t in enumerate(tangents[:count]) if not isinstance(t, ad.Zero)]
    if moving:
        function = jaxpr_as_fun(params["function"])
        _, more = jvp_by(function, primals, moving, [tangents[i] for i in moving])
        tangents_out = [jnp.add(a, b) for a, b in zip(tangents_out, more, strict=True)]
    return out, tangents_out


def _transpose(
    cotangents: Any, *args: Any, function: ClosedJaxpr, transpose: Transpose | None, num_residuals: int
) -> list[Any]:
    residuals, operands = list(args[:num_residuals]), args[num_residuals:]
    wanted = tuple(ad.is_undefined_primal(x) for x in operands)
    if transpose is None:

        def moved(unknown: list[Any]) -> list[Any]:
            values = iter(unknown)
            filled = [next(values) if w else x for x, w in zip(operands, wanted, strict=True)]
            return jaxpr_as_fun(function)(*residuals, *filled)

        unknown = [x.aval for x, w in zip(operands, wanted, strict=True) if w]
        (given,) = jax.linear_transpose(moved, unknown)([ad.instantiate_zeros(c) for c in cotangents])
        values = iter(given)
        found: list[Any] = [next(values) if w else None for w in wanted]
    else:
        zeroless = [None if isinstance(c, ad.Zero) else c for c in cotangents]
        found = list(transpose(residuals, zeroless, wanted))
    return [None] * num_residuals + [x if w else None for x, w in zip(found, wanted, strict=True)]


def _batch(
    args: Any, axes: Any, *, function: ClosedJaxpr, transpose: Transpose | None, num_residuals: int
) -> tuple[list[Any], list[int]]:
    residuals, operands = list(args[:num_residuals]), list(args[num_residuals:])
    residual_axes, operand_axes = list(axes[:num_residuals]), list(axes[num_residuals:])

    def mapped(residuals: list[Any], operands: list[Any]) -> list[Any]:
        return jax.vmap(jaxpr_as_fun(function), (*residual_axes, *operand_axes))(*residuals, *operands)

    def pull(residuals: list[Any], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
        assert transpose is not None

        def one(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
            found = transpose(residuals, cotangents, wanted)
            return [x if w else None for x, w in zip(found, wanted, strict=True)]

        found = jax.vmap(one, (residual_axes, 0))(residuals, cotangents)
        return [
            x if x is None else jnp.sum(x, axis=0) if axis is None else jnp.moveaxis(x, 0, axis)
            for x, axis in zip(found, operand_axes, strict=True)
        ]

    out = linear(mapped, None if transpose is None else pull, residuals, operands)
    return out, [0] * len(out)


_linear.def_impl(_evaluate)
_linear.def_abstract_eval(lambda *_, function, **__: function.out_avals)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
