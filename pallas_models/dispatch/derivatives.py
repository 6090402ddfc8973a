"""How an op is differentiated: by kernels where it has some, else as its reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_models.dispatch.settings import plain_settings
from pallas_models.dispatch.transposable import linear


def differentiated_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; where it is differentiated, another that computes the same in its place."""

    @jax.custom_jvp
    def call(*arrays: Any) -> Any:
        return function(*arrays)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(primals)
        changes = jax.tree.leaves(tangents)
        moving = [i for i, t in enumerate(changes) if not isinstance(t, SymbolicZero)]

        def at(*some: jax.Array) -> Any:
            every = list(leaves)
            for i, x in zip(moving, some, strict=True):
                every[i] = x
            return other(*jax.tree.unflatten(tree, every))

        return jax.jvp(at, [leaves[i] for i in moving], [changes[i] for i in moving])

    call.defjvp(jvp, symbolic_zeros=True)
    return call


def with_derivative(
    forward: Callable[..., Any],
    derivative: Callable[..., Any],
    keep: Callable[..., tuple[Any, list[Any], int]] | None = None,
    pull: Callable[..., list[Any]] | None = None,
) -> Callable[..., Any]:
    """`forward` with the derivative of another function, in forward and reverse mode and of any order.

    The gradient keeps the operands, and computes what else it needs of the forward pass again; unless there is

      keep: `keep(*arrays)` gives the result, what is kept of it, and how many results have a cotangent, and
      pull: `pull(arrays, kept, cotangents, wanted)` the cotangents of the leaves of those arrays that are wanted.
    """

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        with plain_settings(arrays):  # this is traced again where it is differentiated
            return forward(*arrays)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        with plain_settings(primals):
            out, kept, results = (function(*primals), [], 0) if keep is None else keep(*primals)
        leaves, tree = jax.tree.flatten(primals)
        # What is transposed later keeps no array of this trace.
        count, first = len(leaves), jax.typeof(jax.tree.leaves(out)[0])
        changes = jax.tree.leaves(tangents)
        moving = [i for i, t in enumerate(changes) if not isinstance(t, SymbolicZero)]
        if not moving:
            return out, jax.tree.map(jnp.zeros_like, out)

        def tangent(residuals: list[jax.Array], moved: list[jax.Array]) -> list[jax.Array]:
            def at(*some: jax.Array) -> Any:
                every = residuals[:count]
                for i, x in zip(moving, some, strict=True):
                    every[i] = x
                return derivative(*jax.tree.unflatten(tree, every))

            with plain_settings(residuals):
                primals = tuple(residuals[i] for i in moving)
                return jax.tree.leaves(jax.jvp(at, primals, tuple(moved))[1])

        def transpose(residuals: list[Any], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
            assert pull is not None
            arrays = jax.tree.unflatten(tree, residuals[:count])
            used = {i for i, w in zip(moving, wanted, strict=True) if w}
            indices = iter(range(count))
            owned = [[next(indices) for _ in jax.tree.leaves(x)] for x in arrays]
            asked = tuple(not used.isdisjoint(own) for own in owned)
            if cotangents[0] is None:
                # Zeros that are mapped under vmap as the other cotangents are: JAX fails where a function with a
                # derivative of its own has results that are mapped in the derivative alone.
                other = next(c for c in cotangents if c is not None)
                zero = jnp.where(other.ravel()[0] == 0, 0.0, 0.0)
                cotangents = [jnp.broadcast_to(zero, first.shape).astype(first.dtype), *cotangents[1:]]
            cotangents = cotangents + [None] * (results - len(cotangents))
            given = pull(arrays, residuals[count:], cotangents, asked)
            found = dict(
                zip((i for own, w in zip(owned, asked, strict=True) if w for i in own), given, strict=True)
            )
            return [found.get(i) for i in moving]

        residuals = leaves + [jax.lax.stop_gradient(x) for x in kept]
        moved = linear(tangent, None if pull is None else transpose, residuals, [changes[i] for i in moving])
        return out, jax.tree.unflatten(jax.tree.structure(out), moved)

    function.defjvp(jvp, symbolic_zeros=True)
    return function
