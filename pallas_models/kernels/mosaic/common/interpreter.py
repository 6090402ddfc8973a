"""What the interpreter of Mosaic GPU needs, what it cannot do, and primitives that have a meaning for it."""

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

from pallas_models import _jax
from pallas_models._processes import cores
from pallas_models.target import Target

P = ParamSpec("P")
R = TypeVar("R")

# The primitives by name: what a GPU runs, and the meaning of it.
PRIMITIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_INTERPRETER_THREADS = 16  # of XLA on the CPU that suffice: each warpgroup that waits keeps one
_MOST_WARPGROUPS = 31  # XLA runs 32 computations at once on a CPU, one of which is the program around the kernel


def interpreter_params() -> Any:
    """The parameters with which Pallas runs a kernel in the interpreter.

    Raises:
      RuntimeError: there are so few cores that the interpreter may wait for ever, and nobody has set `PJRT_NPROC`.
    """
    if cores() < _INTERPRETER_THREADS and "PJRT_NPROC" not in os.environ:
        raise RuntimeError(
            f"with {cores()} cores the interpreter of Mosaic GPU may wait for ever: set the environment variable "
            f"PJRT_NPROC to {_INTERPRETER_THREADS} or more before JAX starts"
        )
    return _jax.mosaic_interpreter_params()


def check_interpreted_cluster(num_warpgroups: int) -> None:
    """Refuses a cluster of so many warpgroups that the interpreter, which runs all at once, would wait for ever.

    Raises:
      NotImplementedError: XLA does not run as many computations at once on this CPU.
    """
    most = min(_MOST_WARPGROUPS, int(os.environ.get("PJRT_NPROC", cores())))
    if num_warpgroups > most:
        raise NotImplementedError(
            f"the interpreter of Mosaic GPU runs all warpgroups of a cluster at once, here up to {most} of them "
            f"(the environment variable PJRT_NPROC says how many, up to {_MOST_WARPGROUPS}), not {num_warpgroups}"
        )


def check_interpreted_sizes(**sizes: tuple[int, int]) -> None:
    """Refuses what the interpreter of JAX 0.10 cannot run: copies that reach past the end of an array.

    Args:
      sizes: by the name of an axis, its size and the size of the tiles that cover it.

    Raises:
      NotImplementedError: this is JAX 0.10 and a tile reaches past the end.
    """
    if _jax.since(0, 11):
        return
    for name, (size, tile) in sizes.items():
        if size % tile:
            raise NotImplementedError(
                f"the interpreter of Mosaic GPU in JAX {jax.__version__} reads nothing past the end of an array: "
                f"{name}={size} must be a multiple of the tile of {tile}; JAX 0.11 and newer take every size"
            )


def interprets_transposed() -> bool:
    """Whether the interpreter multiplies operands that lie transposed in memory, as from JAX 0.11 on."""
    return _jax.since(0, 11)


_interprets = contextvars.ContextVar("the kernel that is traced is for the interpreter", default=False)


@contextlib.contextmanager
def tracing(interpret: bool) -> Iterator[None]:
    """Says whether the kernel that is traced inside is for the interpreter; `launch` does."""
    token = _interprets.set(interpret)
    try:
        yield
    finally:
        _interprets.reset(token)


def meaning(interpreted: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a primitive of a function that only a GPU runs. The interpreter runs its meaning, `interpreted`.

    This is the one fork between kernels that are compiled and kernels that are interpreted: a kernel's body has
    none. A test on the GPU holds each primitive against its meaning.

        @meaning(lambda x, layout: x)
        def layout_cast(x: jax.Array, layout: Any) -> jax.Array:
            return plgpu.layout_cast(x, layout)
    """

    def primitive(compiled: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(compiled)
        def call(*args: P.args, **options: P.kwargs) -> R:
            return (interpreted if _interprets.get() else compiled)(*args, **options)

        PRIMITIVES[f"{compiled.__module__.rpartition('.')[2]}.{compiled.__qualname__}"] = compiled, interpreted
        return call

    return primitive


def num_cores(target: Target, interpret: bool) -> int:
    """How many CTAs run at once: one on each multiprocessor, or two in the interpreter, as threads of the CPU."""
    return 2 if interpret else target.num_cores


def cluster_size(ctas: int, interpret: bool) -> int:
    """How many CTAs share the work of a cluster of so many: one in the interpreter, which has no clusters."""
    return 1 if interpret else ctas
