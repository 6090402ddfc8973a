"""What the interpreter of Mosaic GPU needs and cannot do."""

import os
from typing import Any

import jax

from pallas_models._processes import cores
from pallas_models.kernels.mosaic.common.backend import plgpu

_INTERPRETER_THREADS = 16  # of XLA on the CPU that suffice: each warpgroup that waits keeps one


def interpreter_params() -> Any:
    """What runs a kernel in the interpreter; JAX 0.10 keeps it private.

    Raises:
      RuntimeError: there are so few cores that the interpreter may wait for ever, and nobody has set `PJRT_NPROC`.
    """
    if cores() < _INTERPRETER_THREADS and "PJRT_NPROC" not in os.environ:
        raise RuntimeError(
            f"with {cores()} cores the interpreter of Mosaic GPU may wait for ever: set the environment variable "
            f"PJRT_NPROC to {_INTERPRETER_THREADS} or more before JAX starts"
        )
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def check_interpreted_sizes(**sizes: tuple[int, int]) -> None:
    """Refuses what the interpreter of JAX 0.10 cannot run: copies that reach past the end of an array.

    Args:
      sizes: by the name of an axis, its size and the size of the tiles that cover it.

    Raises:
      NotImplementedError: this is JAX 0.10 and a tile reaches past the end.
    """
    if jax.__version_info__ >= (0, 11):
        return
    for name, (size, tile) in sizes.items():
        if size % tile:
            raise NotImplementedError(
                f"the interpreter of Mosaic GPU in JAX {jax.__version__} reads nothing past the end of an array: "
                f"{name}={size} must be a multiple of the tile of {tile}; JAX 0.11 and newer take every size"
            )


def interprets_transposed() -> bool:
    """Whether the interpreter multiplies operands that lie transposed in memory; that of JAX 0.10 does not."""
    return jax.__version_info__ >= (0, 11)
