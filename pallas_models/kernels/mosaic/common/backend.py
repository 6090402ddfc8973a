"""The Mosaic GPU backend of Pallas."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.common.backend import Backend
from pallas_models.target import AMPERE_ON, Architectures, Target

plgpu = Backend("jax.experimental.pallas.mosaic_gpu")

# The GPUs of kernels that need nothing of Hopper's, though they have been compiled for it only. JAX 0.10
# has Mosaic for no earlier ones.
PORTABLE = AMPERE_ON if _jax.since(0, 11) else Architectures("JAX 0.11 or an NVIDIA GPU from Hopper on", 9)


def prefer_nowhere(form: Any, target: Target) -> bool:
    """Whether a kernel is the fastest: no, as far as is known. It takes the place of missing ones."""
    del form, target
    return False


def prefer_on_hopper(form: Any, target: Target, itemsizes: Sequence[int] = (2,)) -> bool:
    """Whether a portable kernel is as fast as Triton's: on Hopper GPUs, of rows in multiples of 8 elements.

    That is what was measured; kernels of Triton compute all else, as with a JAX that has Mosaic for Hopper alone.

    Args:
      itemsizes: bytes of an element of rows that were measured to be as fast.
    """
    rows = next(x for x in form.operands if x is not None and jnp.issubdtype(x.dtype, jnp.floating))
    is_measured = rows.dtype.itemsize in itemsizes and rows.shape[-1] % 8 == 0
    return target.capability == (9, 0) and _jax.since(0, 11) and is_measured
