"""Sums in device memory that grow by arrays in shared memory."""

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common.backend import plgpu


def _add_to_device(tile: Ref, target: Ref) -> None:
    target[...] = target[...] + tile[...]


@meaning(_add_to_device)
def add_to_device(tile: Ref, target: Ref) -> None:
    """Begins to add an array in shared memory to one in device memory, both float32.

    Of two additions to the same place the first must be over (`plgpu.wait_smem_to_gmem(0)`) before the second
    begins, or the order of the sum is not known.
    """
    plgpu.copy_smem_to_gmem(tile, target, reduction_op="add")
