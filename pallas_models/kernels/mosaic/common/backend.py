"""The Mosaic GPU backend of Pallas."""

from pallas_models import _jax
from pallas_models.kernels.common.backend import Backend
from pallas_models.target import AMPERE_ON, Architectures

plgpu = Backend("jax.experimental.pallas.mosaic_gpu")

# The GPUs of kernels that need nothing of Hopper's, though they have been compiled for it only. JAX 0.10
# has Mosaic for no earlier ones.
PORTABLE = AMPERE_ON if _jax.since(0, 11) else Architectures("JAX 0.11 or an NVIDIA GPU from Hopper on", 9)
