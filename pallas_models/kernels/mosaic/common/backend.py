"""The Mosaic GPU backend of Pallas."""

from pallas_models.kernels.common.backend import Backend

plgpu = Backend("jax.experimental.pallas.mosaic_gpu")
