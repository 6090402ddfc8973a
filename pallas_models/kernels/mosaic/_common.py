"""What the kernels share: shared memory as the tensor cores read it, activations in registers."""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models._host import cores
from pallas_models.kernels._common import (
    GELU_POLYNOMIAL,
    GELU_POLYNOMIAL_FLOAT16,
    GELU_TANH,
    MINUS_LOG2_E,
    Backend,
    Ref,
    exponents,
    slope,
)

plgpu = Backend("jax.experimental.pallas.mosaic_gpu")

ROW_BYTES = 128  # of a row of a tile of shared memory


def tiled(shape: tuple[int, ...], dtype: DTypeLike, row_bytes: int = ROW_BYTES) -> Any:
    """Shared memory of arrays (..., rows, columns), laid out as the tensor cores read them.

    In tiles of 8 rows of `row_bytes` each: 128, or 64 or 32 where columns are few or taken a few at a time.
    """
    transforms = (
        plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(row_bytes),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def untiled(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Why an array (..., rows, columns) cannot be copied to or from `tiled` memory in parts; None if it can."""
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    if shape[-1] % columns or shape[-2] % 8:
        return f"takes rows in multiples of 8 and columns in multiples of {columns}, not {name} of shape {shape}"
    return None


_INDEX = ((),) if jax.__version_info__ < (0, 11) else ()  # JAX 0.10 wants one


def load(ref: Ref, layout: Any, *, interpret: bool) -> jax.Array:
    """Loads what `ref` points at in device or shared memory, each thread the elements that it has in `layout`."""
    return ref[...] if interpret else plgpu.load(ref, *_INDEX, layout=layout, optimized=False)


def row(ref: Ref, shape: tuple[int, ...]) -> jax.Array:
    """The vector in shared memory that `ref` points at, in float32, as every row of a matrix of `shape`."""
    return jax.lax.broadcast_in_dim(ref[...].astype(jnp.float32), shape, [1])


def softmax_weights(scores: jax.Array, peak: jax.Array, scale: float) -> jax.Array:
    """The exponentials of scaled scores (rows, keys), less those of what each row has at most."""
    factors, shifts = (
        x if isinstance(x, float) else jax.lax.broadcast_in_dim(x, scores.shape, [0])
        for x in exponents(peak, scale)
    )
    return jnp.exp2(scores * factors - shifts)


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


def activate(activation: str | None, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Applies the activation named as in `pallas_models.ops.activations`; `x` is float32.

    What is to be rounded to bfloat16 gets by with a tanh of 11 bits, one instruction of the GPU, what is to be
    rounded to float16 with a shorter polynomial: tensor cores wait for registers that others read, so that every
    operation here takes time of theirs.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        half = 0.5 * x
        match activation:
            case "gelu":  # fitted to minimise the error: 3e-4
                return half + half * jnp.tanh(x * (0.800157 + 0.034701 * (x * x)))
            case "gelu_tanh":
                factor = math.sqrt(2.0 / math.pi)
                return half + half * jnp.tanh(x * (factor + (0.044715 * factor) * (x * x)))
            case "sigmoid":
                return 0.5 + 0.5 * jnp.tanh(half)
            case "silu":
                return half + half * jnp.tanh(half)
    match activation:
        case "gelu":  # relu(x) - a erfc(a / sqrt(2)) / 2 with a = |x|
            a = jnp.minimum(jnp.abs(x), 16.0)
            first, *others = GELU_POLYNOMIAL_FLOAT16 if jnp.dtype(dtype) == jnp.float16 else GELU_POLYNOMIAL
            p: Any = first
            for coefficient in others:
                p = p * a + coefficient
            return jnp.maximum(x, 0.0) - a * jnp.exp2(p)
        case "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
            return x * _sigmoid(x * (GELU_TANH + (0.044715 * GELU_TANH) * (x * x)))
        case "relu":
            return jnp.maximum(x, 0.0)
        case "sigmoid":
            return _sigmoid(x * MINUS_LOG2_E)
        case "silu":
            return x * _sigmoid(x * MINUS_LOG2_E)
        case _:
            return x


def derivative(activation: str, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The slope at `x`, float16 or bfloat16, of the activation, in float32, as coarse as `activate` has it.

    For what is to be rounded to bfloat16 that of "gelu_tanh" is computed in float16, two numbers at a time.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and activation == "gelu_tanh":
        factor = math.sqrt(2.0 / math.pi)
        limit, a, b, c, half = (
            jnp.asarray(number, jnp.float16)
            for number in (8.0, factor, 0.044715 * factor, 3 * 0.044715 * factor, 0.5)
        )  # past the limit the slope is 0 or 1
        x = jnp.clip(x.astype(jnp.float32).astype(jnp.float16), -limit, limit)
        square = x * x
        t = _tanh(x * (a + b * square))
        value = half + half * t
        return (value + value * ((x - x * t) * (a + c * square))).astype(jnp.float32)
    return slope(activation, x.astype(jnp.float32), jnp.exp2)


def _tanh(x: jax.Array) -> jax.Array:
    """tanh of float16, which the kernels of JAX 0.10 have not."""
    if jax.__version_info__ >= (0, 11):
        return jnp.tanh(x)
    return jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)


def _sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + 2**x): a quotient costs ten instructions, and there is no other way to ask for a reciprocal."""
    root = jax.lax.rsqrt(1.0 + jnp.exp2(x))
    return root * root
