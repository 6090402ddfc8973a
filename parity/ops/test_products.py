"""Products of the tensor cores and the sums that they add to, in a kernel of one warpgroup."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import commit_reads, iota, load, tiled
from pallas_models.kernels.mosaic.common.products import (
    added_up,
    multiply,
    product,
    products,
    put,
    sums_but_for,
    with_sums,
)
from parity.ops.test_lowering import HOPPER
from parity.support.common import MOSAIC, ON_HOPPER, assert_close, cuda_device, float64, normal
from parity.support.primitives import all_called
from parity.support.tolerances import SHORT

M, K, N = 64, 64, 128
SHAPES = dict(a=(M, K), w=(M, K), b=(K, N), c=(N, K))


def body(refs: Refs) -> None:
    for name in SHAPES:
        plgpu.copy_gmem_to_smem(getattr(refs, name), getattr(refs, f"{name}_tile"), refs.full)
    plgpu.barrier_wait(refs.full)
    a, b, c = refs.a_tile, refs.b_tile, refs.c_tile
    w = load(refs.w_tile, plgpu.Layout.WGMMA)
    commit_reads()

    def add(first: jax.Array, sums: jax.Array) -> None:
        put(sums, first)
        multiply(sums, w, b)
        refs.o_tile[0] = product(a, c, transpose_b=True, then=functools.partial(multiply, sums, w, b))
        refs.o_tile[1] = sums_but_for(sums, 0)

    with_sums(functools.partial(add, product(a, b)), (M, N))
    for i, value in enumerate(products((a, c, True), (w, b, False))):
        refs.o_tile[2 + i] = value
    index = iota((M, N), 1, plgpu.Layout.WGMMA).astype(jnp.float32)
    refs.o_tile[4] = added_up(index, functools.partial(multiply, a=a, b=b))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.o_tile, refs.o)
    plgpu.wait_smem_to_gmem(0)


def call(arrays: dict[str, jax.Array], *, interpret: bool) -> jax.Array:
    (out,) = launch(
        body,
        arrays,
        dict(o=jax.ShapeDtypeStruct((5, M, N), jnp.float32)),
        {f"{name}_tile": tiled(x.shape, x.dtype) for name, x in arrays.items()}
        | dict(o_tile=plgpu.SMEM((5, M, N), jnp.float32), full=plgpu.Barrier(num_arrivals=len(arrays))),
        name="products",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )
    return out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_shared_memory_and_of_registers(dtype):
    rng = np.random.default_rng(70)
    arrays = {name: normal(rng, *shape, dtype=dtype) for name, shape in SHAPES.items()}
    with all_called("mosaic.common.products"):
        out = jax.jit(functools.partial(call, interpret=MOSAIC != "mosaic"))(arrays)
    a, w, b, c = (float64(x) for x in arrays.values())
    results = a @ c.T, a @ b + 2 * w @ b, a @ c.T, w @ b, a @ b + np.arange(N)
    for value, expected in zip(out, results, strict=True):
        assert_close(value, expected, SHORT)


@pytest.mark.skipif(ON_HOPPER, reason="runs there")
def test_products_lower():
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float16) for name, shape in SHAPES.items()}
    with cuda_device(*HOPPER):
        traced = jax.jit(functools.partial(call, interpret=False)).trace(arrays)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
