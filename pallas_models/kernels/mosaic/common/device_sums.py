"""Sums in device memory: those that grow by arrays in shared memory, and sums over the parts that CTAs stored."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

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


def sums_of_parts(arrays: Iterable[jax.Array], axis: int) -> list[jax.Array]:
    """The sum over an axis of each array, all alike, in one kernel of XLA's.

    Where they are slices of one array, a sum over all of it would be copied once more for each of them.
    """
    given = tuple(arrays)
    zeros = (jnp.zeros((), given[0].dtype),) * len(given)
    sums: list[jax.Array] = jax.lax.reduce(
        given, zeros, lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True)), (axis,)
    )
    return list(sums)
