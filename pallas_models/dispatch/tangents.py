"""Derivatives in forward mode by some of the arrays of a function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def jvp_by(
    function: Callable[..., Any], arrays: Sequence[Any], moving: Sequence[int], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """`jax.jvp` of `function(*arrays)`: the result and its tangent.

    Args:
      moving: which arrays have a tangent; the others are constants.
      tangents: of those.
    """

    def at(*some: Any) -> Any:
        every = list(arrays)
        for i, x in zip(moving, some, strict=True):
            every[i] = x
        return function(*every)

    result: tuple[Any, Any] = jax.jvp(at, [arrays[i] for i in moving], list(tangents))
    return result
