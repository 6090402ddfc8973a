"""Shared memory of kernels for Hopper GPUs: how much there is, and arrays that are counted and asked for alike."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.target import HOPPER, Target

_HOPPER = 227 * 1024  # bytes of a CTA


def available(target: Target) -> int:
    """Bytes that a CTA may use: as on a Hopper GPU where the target is not known or kernels are interpreted."""
    return target.shared_memory if target.runs(HOPPER) else _HOPPER


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """An array in shared memory.

    Attributes:
      row_bytes: of a row of a tile, where the array lies as the tensor cores read it, as `tiled` has it; None
        where its rows lie one after another.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    row_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def scratch_type(self) -> Any:
        """What a kernel asks for."""
        if self.row_bytes is None:
            return plgpu.SMEM(self.shape, self.dtype)
        return tiled(self.shape, self.dtype, self.row_bytes)


def num_bytes(buffers: Iterable[Buffer]) -> int:
    """Bytes that all of them take."""
    return sum(buffer.num_bytes for buffer in buffers)
