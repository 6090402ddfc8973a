"""What the kernels share: their launch, tile arithmetic, masked access, primitives, activations in registers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.activations import GELU_POLYNOMIAL, GELU_TANH, MINUS_LOG2_E
from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning, tracing
from pallas_models.target import Target

plgpu = Backend("jax.experimental.pallas.triton")

_Config = TypeVar("_Config", bound=Any)


def launch(
    kernel: Callable[..., None],
    *,
    out_shape: Any,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    interpret: bool,
    name: str,
) -> Callable[..., Any]:
    """A kernel as a function of its operands: `pallas_call`, which an interpreter runs with `interpret`.

    Args:
      kernel: takes references to the operands and to the results, None for those that are None.
    """

    @functools.wraps(kernel)
    def traced(*refs: Any) -> None:
        with tracing(interpret):
            kernel(*refs)

    _jax.find_triton_dialect()
    call: Callable[..., Any] = pl.pallas_call(
        traced,
        out_shape=out_shape,
        grid=grid,
        input_output_aliases=input_output_aliases or {},
        compiler_params=_jax.quiet(plgpu.CompilerParams)(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )
    return call


def check_powers_of_two(config: object, *names: str) -> None:
    """Raises ValueError unless the named fields of a tile config are powers of two."""
    for name in names:
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{type(config).__module__}: {name}={value} must be a power of two")


def fitted(config: _Config, size: Callable[[_Config], int], target: Target) -> _Config:
    """The config, or one with fewer stages or a smaller `block_m` whose `size`, in bytes, shared memory holds.

    `block_m` stays 16 at the least.
    """
    while size(config) > target.shared_memory and config.num_stages > 1:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    while size(config) > target.shared_memory and config.block_m > 16:
        config = dataclasses.replace(config, block_m=config.block_m // 2)
    return config


def block_size(size: int, low: int, high: int) -> int:
    """The least power of two that covers `size`, within [low, high]."""
    return min(max(pl.next_power_of_2(max(size, 1)), low), high)


def span(start: jax.Array | int, block: int) -> pl.Slice:
    """`start + [0, block)`, which may reach past the end of an axis: access is to be masked there."""
    return pl.Slice(jnp.asarray(start, jnp.int32), block)  # Pallas rejects static slices past the end


def power_of_two_blocks(width: int, largest: int = 256) -> list[tuple[int, int]]:
    """Splits [0, width) into (start, block) with powers of two, widest first: 192 is 128 and 64.

    Triton's arrays have power-of-two sizes; a tile of any other width is held as several.
    """
    blocks, start = [], 0
    while start < width:
        block = min(largest, 1 << (width - start).bit_length() - 1)
        blocks.append((start, block))
        start += block
    return blocks


def in_bounds(start: jax.Array | int, block: int, size: int) -> jax.Array | None:
    """Which of `start + [0, block)` lie below `size`; None where `block` divides `size`: all do."""
    return None if size % block == 0 else start + jnp.arange(block) < size


def tile_mask(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a tile from the masks of its rows and columns, each None where all are in bounds."""
    if rows is None:
        return None if columns is None else columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def load(view: Ref, mask: jax.Array | None = None, *, eviction_policy: str | None = None) -> jax.Array:
    """Loads what `view`, a `ref.at[...]`, points at; 0 where `mask`, broadcast to its shape, is False."""
    if mask is None:
        return plgpu.load(view, eviction_policy=eviction_policy)
    zero = np.zeros((), view.dtype)  # Triton does not cast an integer to every dtype
    return plgpu.load(view, mask=jnp.broadcast_to(mask, view.shape), other=zero, eviction_policy=eviction_policy)


def store(
    view: Ref, value: jax.Array, mask: jax.Array | None = None, *, eviction_policy: str | None = None
) -> None:
    """Stores `value` to `view` in its dtype, where `mask`, broadcast to its shape, is True."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, view.shape)
    plgpu.store(view, value.astype(view.dtype), mask=mask, eviction_policy=eviction_policy)


@meaning(lambda a, b, c: a * b + c)
def fma(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """a * b + c in float32, rounded once, in the shape that they broadcast to.

    One instruction of the GPU, which XLA's Triton does not make of a product and a sum.
    """
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    (y,) = plgpu.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[jnp.broadcast_to(x, shape) for x in (a, b, c)],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return y


@meaning(lambda x: jnp.exp2(x))
def exp2(x: jax.Array) -> jax.Array:
    """2**x in float32, from one instruction of the GPU that rounds subnormal results to 0.

    XLA's own exp2 spends three more on subnormals, of which no kernel here has use.
    """
    (y,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y


def _relu(x: jax.Array) -> jax.Array:
    return jnp.where(x < 0.0, 0.0, x)  # a NaN stays one, which Triton's maximum would drop


def _gelu(x: jax.Array) -> jax.Array:
    # Triton has no erf. gelu(x) = relu(x) - a erfc(a / sqrt(2)) / 2 with a = |x|.
    a = jnp.minimum(jnp.abs(x), 16.0)
    p = jnp.full_like(a, GELU_POLYNOMIAL[0])
    for coefficient in GELU_POLYNOMIAL[1:]:
        p = p * a + coefficient
    return _relu(x) - a * exp2(p)


def _one_and_exp(x: jax.Array) -> jax.Array:
    return 1.0 + exp2(x)  # the inverse of a sigmoid


def activate(activation: str | None, x: jax.Array) -> jax.Array:
    """Applies the activation named as in `pallas_models.ops.activations`; `x` is float32."""
    match activation:
        case "gelu":
            return _gelu(x)
        case "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
            return x / _one_and_exp(x * (GELU_TANH + (0.044715 * GELU_TANH) * (x * x)))
        case "relu":
            return _relu(x)
        case "sigmoid":
            return 1.0 / _one_and_exp(x * MINUS_LOG2_E)
        case "silu":
            return x / _one_and_exp(x * MINUS_LOG2_E)
        case _:
            return x
