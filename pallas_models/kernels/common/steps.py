"""Steps of an op that several kernels compute one after another."""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def shared_step(function: Callable[P, R]) -> Callable[P, R]:
    """Has JAX trace and lower a step once for all ops of a program in which it is the same.

    Ops that are alike are traced once anyway. Others can share steps: seven kernels of the triangle update do
    not depend on its direction, and a block of a pair stack has both.

    Args:
      function: its keyword-only arguments are hashable, the others are forms and pytrees of arrays.
    """
    parameters = inspect.signature(function).parameters.values()
    static = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    call: Callable[P, R] = jax.jit(function, static_argnames=static)
    return call
