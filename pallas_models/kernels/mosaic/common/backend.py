"""The Mosaic GPU backend of Pallas."""

from typing import Any

import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.common.backend import Backend
from pallas_models.target import AMPERE_ON, Architectures, Target

plgpu = Backend("jax.experimental.pallas.mosaic_gpu")

# The GPUs of kernels that need nothing of Hopper's, though they have been compiled for it only. JAX 0.10
# has Mosaic for no earlier ones.
PORTABLE = AMPERE_ON if _jax.since(0, 11) else Architectures("JAX 0.11 or an NVIDIA GPU from Hopper on", 9)


def prefer_on_hopper(form: Any, target: Target) -> bool:
    """Whether a portable kernel is as fast as Triton's: on Hopper GPUs, of 16-bit rows in pieces of 16 bytes.

    That is what was measured; kernels of Triton compute all else, as with a JAX that has Mosaic for Hopper alone.
    """
    rows = next(x for x in form.operands if x is not None and jnp.issubdtype(x.dtype, jnp.floating))
    is_measured = rows.dtype.itemsize == 2 and rows.shape[-1] % 8 == 0
    return target.capability == (9, 0) and _jax.since(0, 11) and is_measured
