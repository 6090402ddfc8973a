"""A function whose sums are off by as much as float32 may round them: how far off that makes its results.

A derivative that cancels has an error of the size of its terms. Neither its own size tells that, nor do errors of
operands: the gradient of a softmax over one key, p (dp - sum(p dp)), is 0 for all of them, and off by roundings of
dp where a kernel takes the second sum from elsewhere, in another order. So each term of a sum is made larger or
smaller, of either sign, by what the roundings of so long a sum come to in relation to its terms: Monte Carlo
arithmetic (Parker, Monte Carlo Arithmetic, 1997), with the size that statistical error analysis gives (Higham and
Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). Nothing is fitted.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from parity.support.tolerances import products

# Operations whose bodies are traced anew. Others with a body, as `jit`, are replaced by it.
_LOOPS = ("scan", "while", "cond")


def _terms(equation: core.JaxprEqn) -> int:
    """How many terms each result is a sum of; 0 for an operation that does not sum."""
    match equation.primitive.name:
        case "dot_general":
            axes = equation.params["dimension_numbers"][0][0]
        case "reduce_sum":
            axes = equation.params["axes"]
        case _:
            return 0
    return math.prod(equation.invars[0].aval.shape[axis] for axis in axes)


def _off(x: jax.Array, unit: float, number: int) -> jax.Array:
    """Each element larger or smaller by `unit` of it, as good as at random and in each call of another number."""
    places = jnp.arange(x.size, dtype=jnp.float32) * 2.4 + (number + 1.0)
    return x * (1 + unit * jnp.sign(jnp.sin(places * places))).reshape(x.shape).astype(x.dtype)


def _results(jaxpr: core.Jaxpr, consts: Any, given: Any, numbers: Iterator[int]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    def body(x: Any) -> Any:
        """A parameter, if it is a program, with sums that are off."""
        if isinstance(x, tuple):
            return tuple(map(body, x))
        if not isinstance(x, core.ClosedJaxpr):
            return x
        return jax.make_jaxpr(lambda *given: _results(x.jaxpr, x.consts, given, numbers))(*x.in_avals)

    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        operands = [read(x) for x in equation.invars]
        inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        if inner is not None and name not in _LOOPS:
            closed = isinstance(inner, core.ClosedJaxpr)
            of = (inner.jaxpr, inner.consts) if closed else (inner, ())
            values |= zip(equation.outvars, _results(*of, operands, numbers), strict=True)
            continue
        if name in _LOOPS:
            parameters = {key: body(x) for key, x in parameters.items()}
        if (count := _terms(equation)) and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
            operands = [_off(x, products(count), next(numbers)) for x in operands]
        out = equation.primitive.bind(*operands, **parameters)
        values |= zip(equation.outvars, out if equation.primitive.multiple_results else [out], strict=True)
    return [read(x) for x in jaxpr.outvars]


def shaken(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of pytrees of float32 arrays with every term of its sums and products off, by their roundings."""

    def off(*arrays: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arrays)
        out = _results(traced.jaxpr, traced.consts, jax.tree.leaves(arrays), itertools.count())
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return off
