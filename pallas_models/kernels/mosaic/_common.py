"""What the kernels share: shared memory as the tensor cores read it, activations in registers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

Ref = Any  # inside a kernel: a reference to an array in device or shared memory, for which JAX has no public type


def tiled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory of arrays (..., rows, columns) laid out as the tensor cores read them, without bank conflicts."""
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if row_bytes % size == 0)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )


def interpreter_params() -> Any:
    """What runs a kernel in the interpreter; JAX 0.10 keeps it private."""
    try:
        return plgpu.InterpretGPUParams()
    except AttributeError:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()
