"""Products by `mma`, which multiplies registers: for every GPU from Ampere on.

Sums lie as Hopper's tensor cores leave theirs, 16 rows a warp, so that what works on such sums works on these.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.common.backend import Backend
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import layout_cast

ROWS = 64  # of sums, in multiples: 16 for each warp of a warpgroup

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")


def zeros(rows: int, columns: int) -> jax.Array:
    """Sums (rows, columns) to begin with, in float32."""
    return layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


@meaning(lambda sums, a, b: sums + jnp.dot(a, b, preferred_element_type=jnp.float32))
def multiply(sums: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`sums + a @ b` by the tensor cores, all in registers; float32, a and b of 16 bits."""
    added: jax.Array = plgpu.mma(sums, a, b)
    return added


def left_layout(dtype: Any) -> Any:
    """How threads hold the left operand of a product."""
    return plgpu.Layout.MMA_LHS(dtype, m_warps=4)


@meaning(lambda x, dtype: x.astype(dtype))
def as_left(x: jax.Array, dtype: Any) -> jax.Array:
    """Sums, rounded to 16 bits, as the left operand of a product: each number is where it is needed."""
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=left_layout(dtype))
    rounded = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    left: jax.Array = rounded(functools.partial(_round, dtype))(x)
    return left


def _round(dtype: Any, _: Any, x: Any) -> Any:
    """The registers of two neighbouring tiles of 8 columns are those of a tile of 16, in this order."""
    layout, x = left_layout(dtype).to_mgpu(), x.astype(inline.utils.dtype_to_ir_type(dtype))
    registers = x.registers.reshape(layout.registers_shape(x.shape))
    return _arrays.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
