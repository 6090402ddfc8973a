"""How an op is differentiated: by kernels where it has some, else as its reference."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_models.dispatch.settings import plain_settings
from pallas_models.dispatch.tangents import jvp_by
from pallas_models.dispatch.transposable import linear
from pallas_models.dispatch.whole import whole

# `pull(arrays, kept, cotangents, wanted)`: cotangents of the leaves of arrays, from the cotangents of results.
Pull = Callable[[tuple[Any, ...], list[Any], list[Any], tuple[bool, ...]], list[Any]]


def differentiated_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; where it is differentiated, `other`, which computes the same, in its place."""

    @jax.custom_jvp
    def call(*arrays: Any) -> Any:
        return function(*arrays)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(primals)
        changes = jax.tree.leaves(tangents)
        moving = [i for i, t in enumerate(changes) if not isinstance(t, SymbolicZero)]

        def of_leaves(*leaves: jax.Array) -> Any:
            return other(*jax.tree.unflatten(tree, leaves))

        return jvp_by(of_leaves, leaves, moving, [changes[i] for i in moving])

    call.defjvp(jvp, symbolic_zeros=True)
    return call


def with_derivative(
    forward: Callable[..., Any],
    derivative: Callable[..., Any],
    keep: Callable[..., tuple[Any, list[Any], int]] | None = None,
    pull: Pull | None = None,
) -> Callable[..., Any]:
    """`forward` with the derivative of another function, in forward and reverse mode and of any order.

    By itself the gradient keeps the operands, and computes again all else that it needs of the forward pass.

    Args:
      keep: with `pull`: `keep(*arrays)` gives the result, the arrays that the gradient keeps of the forward pass,
        and how many results have a cotangent.
      pull: `pull(arrays, kept, cotangents, wanted)` gives the cotangents of the leaves of those arrays that are
        wanted.
    """

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        with plain_settings(arrays):  # this is traced again where it is differentiated
            return forward(*arrays)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        with plain_settings(primals):
            out, kept, results = (whole(function, *primals), [], 0) if keep is None else keep(*primals)
        leaves, tree = jax.tree.flatten(primals)
        changes = jax.tree.leaves(tangents)
        moving = [i for i, t in enumerate(changes) if not isinstance(t, SymbolicZero)]
        if not moving:
            return out, jax.tree.map(jnp.zeros_like, out)

        def tangent(residuals: list[jax.Array], moved: list[jax.Array]) -> list[jax.Array]:
            def of_leaves(*leaves: jax.Array) -> Any:
                return derivative(*jax.tree.unflatten(tree, leaves))

            with plain_settings(residuals):
                return jax.tree.leaves(jvp_by(of_leaves, residuals[: len(leaves)], moving, moved)[1])

        # The transpose comes later, and must keep no array of this trace.
        first = jax.typeof(jax.tree.leaves(out)[0])
        transpose = None if pull is None else functools.partial(_transpose, pull, tree, moving, first, results)
        residuals = leaves + [jax.lax.stop_gradient(x) for x in kept]
        moved = linear(tangent, transpose, residuals, [changes[i] for i in moving])
        return out, jax.tree.unflatten(jax.tree.structure(out), moved)

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def _transpose(
    pull: Pull,
    tree: Any,
    moving: list[int],
    first: Any,
    results: int,
    residuals: list[Any],
    cotangents: list[Any],
    wanted: tuple[bool, ...],
) -> list[Any]:
    """The cotangents of the leaves of arrays that are moving, where they are wanted.

    Args:
      pull: as in `with_derivative`.
      tree: of the arrays.
      moving: the leaves of the arrays that have a tangent.
      first: the type of the first result.
      results: how many results have a cotangent for `pull`.
      residuals: the leaves of the arrays, and the arrays that are kept.
      cotangents: of the results.
      wanted: for each leaf that is moving.
    """
    count = tree.num_leaves
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
    leaves = (i for own, w in zip(owned, asked, strict=True) if w for i in own)
    found = dict(zip(leaves, given, strict=True))
    return [found.get(i) for i in moving]
