"""The interpreter of Mosaic GPU finds races where there are some, and with our change nowhere else."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.kernels.mosaic.common.products import product
from parity.support import pallas_patches
from parity.support.common import normal
from parity.support.races import finds_races, no_races

pytestmark = finds_races

M = 64
found = pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE DETECTED")


def square(refs: Refs) -> None:
    """The product of a matrix with itself, once in each CTA."""
    plgpu.copy_gmem_to_smem(refs.a, refs.a_tile, refs.full)
    plgpu.barrier_wait(refs.full)
    refs.o_tile[...] = product(refs.a_tile, refs.a_tile)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.o_tile, refs.o.at[lax.axis_index("cta")])
    plgpu.wait_smem_to_gmem(0)


def both_store(refs: Refs) -> None:
    """Both warpgroups of a CTA write the same tile."""
    refs.o_tile[...] = jnp.full((M, M), lax.axis_index("warpgroup"), jnp.float32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.o_tile, refs.o.at[0])
    plgpu.wait_smem_to_gmem(0)


def run(body: Callable[[Refs], None], *, num_ctas: int = 1, num_warpgroups: int = 1) -> jax.Array:
    (out,) = launch(
        body,
        dict(a=normal(np.random.default_rng(0), M, M, dtype="float16")),
        dict(o=jax.ShapeDtypeStruct((num_ctas, M, M), jnp.float32)),
        dict(a_tile=tiled((M, M), "float16"), o_tile=plgpu.SMEM((M, M), jnp.float32), full=plgpu.Barrier()),
        name=body.__name__,
        num_ctas=num_ctas,
        num_warpgroups=num_warpgroups,
        interpret=True,
    )
    return out


def test_a_race_is_found():
    with found, no_races():
        run(both_store, num_warpgroups=2)


def test_sums_of_two_ctas_have_none(monkeypatch):
    with no_races():
        run(square, num_ctas=2)
    monkeypatch.setattr(pallas_patches, "sums_of_their_own", contextlib.nullcontext)
    with found, no_races():  # else JAX tells the sums apart, and the change may go
        run(square, num_ctas=2)


def test_a_kernel_is_looked_at():
    with pytest.raises(AssertionError, match="no kernel was traced"), no_races():
        pass
