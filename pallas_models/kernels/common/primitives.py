"""Primitives of kernels: what only a GPU runs, each with the meaning that an interpreter runs in its place."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# By name, such as "triton.common.fma": what a GPU runs, and its meaning.
PRIMITIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_KERNELS = __name__.removesuffix("common.primitives")

_interprets = contextvars.ContextVar("the kernel that is traced is for an interpreter", default=False)


@contextlib.contextmanager
def tracing(interpret: bool) -> Iterator[None]:
    """Says whether the kernel that is traced inside is for an interpreter; each backend's `launch` does."""
    token = _interprets.set(interpret)
    try:
        yield
    finally:
        _interprets.reset(token)


def meaning(interpreted: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a primitive of a function that only a GPU runs. An interpreter runs its meaning, `interpreted`.

    This is the one fork between kernels that are compiled and kernels that are interpreted: a kernel's body has
    none. A test on the GPU holds each primitive against its meaning.

        @meaning(lambda x, layout: x)
        def layout_cast(x: jax.Array, layout: Any) -> jax.Array:
            return plgpu.layout_cast(x, layout)
    """

    def primitive(compiled: Callable[P, R]) -> Callable[P, R]:
        name = f"{compiled.__module__.removeprefix(_KERNELS)}.{compiled.__qualname__}"
        PRIMITIVES[name] = compiled, interpreted

        @functools.wraps(compiled)
        def call(*args: P.args, **options: P.kwargs) -> R:
            result: R = PRIMITIVES[name][_interprets.get()](*args, **options)
            return result

        return call

    return primitive
