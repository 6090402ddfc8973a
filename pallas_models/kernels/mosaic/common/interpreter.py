"""What the interpreter of Mosaic GPU needs, and what it cannot do."""

import os
from typing import Any

import jax

from pallas_models import _jax
from pallas_models._processes import cores
from pallas_models.target import Target

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


def num_cores(target: Target, interpret: bool) -> int:
    """How many CTAs run at once: one on each multiprocessor, or two in the interpreter, as threads of the CPU."""
    return 2 if interpret else target.num_cores


def cluster_size(ctas: int, interpret: bool) -> int:
    """How many CTAs share the work of a cluster of so many: one in the interpreter, which has no clusters."""
    return 1 if interpret else ctas
