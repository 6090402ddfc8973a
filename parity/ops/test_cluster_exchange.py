"""The primitives of a cluster that exchanges activations, in a kernel that adds one product to a norm.

On a Hopper GPU they run there, elsewhere their meanings run in the interpreter; both are held to the same values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_exchange import (
    BLOCK,
    COLUMNS,
    CONSUMERS,
    SUMS,
    Cluster,
    Piece,
    Sizes,
)
from pallas_models.kernels.mosaic.common.cluster_exchange_ptx import FEATURES
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import layout_cast
from parity.ops.test_lowering import HOPPER
from parity.support.common import MOSAIC, ON_HOPPER, array, assert_close, cuda_device, float64, normal
from parity.support.primitives import all_called
from parity.support.tolerances import OP

CTAS, LAYERS, EPSILON = 4, 2, 0.1
N = CTAS * FEATURES
LAYER = 1  # the last one

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the primitives need JAX 0.11")


def copy(cluster: Cluster) -> None:
    """Fetches the vectors of a layer for both rounds, and this CTA's columns of w in two slots."""
    sizes, layer = cluster.sizes, jnp.int32(LAYER)
    begins = 0, cluster.rank * FEATURES, 0, 0
    names = "bias_up", "bias", "scale", "offset"
    for half in range(2):
        cluster.fetch_vectors(half, layer, [*map(Piece, names, begins, sizes.places, sizes.vectors)])
    for i in range(sizes.steps):
        slot, row, column = jnp.int32(i), jnp.int32(i * BLOCK), cluster.rank * COLUMNS
        cluster.fetch_tiles("w", layer, slot, row, column, height=BLOCK, parts=4, apart=32)


def compute(cluster: Cluster) -> None:
    """Adds the products of all CTAs with x to x, normalises the sums, and adds and normalises once more.

    Rounds count from 0: their barriers wait for the round of the half that is given.
    """
    refs, rank = cluster.refs, cluster.rank
    cluster.fetch_tokens()
    cluster.meet()
    zeros = layout_cast(jnp.zeros(SUMS, jnp.float32), plgpu.Layout.WGMMA)
    sums = cluster.multiply(zeros, jnp.int32(0), cluster.sizes.steps, refs.x_t, BLOCK)
    cluster.store("h_t", sums)
    cluster.meet()

    @pl.when(cluster.warpgroup == 0)
    def _() -> None:
        plgpu.copy_smem_to_gmem(refs.h_t, refs.hidden.at[rank])
        plgpu.copy_smem_to_gmem(refs.taken, refs.seen.at[rank])
        plgpu.wait_smem_to_gmem(0)

    for half in range(2):
        cluster.wait_vectors(jnp.int32(half), jnp.int32(0))
        cluster.send_share(sums, 2 * cluster.warpgroup, rank)
        cluster.exchange(jnp.int32(half), EPSILON)
    cluster.give(rank)


def body(sizes: Sizes, refs: Refs) -> None:
    cluster = Cluster(sizes, refs)
    pl.when(cluster.warpgroup == CONSUMERS)(lambda: copy(cluster))
    pl.when(cluster.warpgroup < CONSUMERS)(lambda: compute(cluster))
    cluster.end()


def call(arrays: dict[str, jax.Array], *, interpret: bool) -> list[jax.Array]:
    tokens, dtype = arrays["x"].shape[0], arrays["x"].dtype
    sizes = Sizes(ctas=CTAS, tokens=tokens, layers=LAYERS, dtype=dtype)
    results = dict(o=(tokens, N), hidden=(CTAS, COLUMNS, 32)), dict(seen=(CTAS, 32))
    out_types = {
        name: jax.ShapeDtypeStruct(shape, kind)
        for shapes, kind in zip(results, (dtype, jnp.int32), strict=True)
        for name, shape in shapes.items()
    }
    return launch(
        functools.partial(body, sizes),
        arrays,
        out_types | sizes.mail_types(interpret),
        sizes.scratch_types(interpret),
        name="cluster_exchange",
        num_ctas=1,
        cluster=CTAS,
        num_warpgroups=CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
    )[: len(out_types)]


def operands(tokens: int, dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(71)
    mask = array(rng.integers(0, 2, tokens), "int32")
    arrays = {"x": normal(rng, tokens, N, dtype=dtype), "mask": mask}
    for i in range(LAYERS):
        arrays[f"w_{i}"] = normal(rng, N, CTAS * COLUMNS, dtype=dtype, scale=N**-0.5)
        arrays |= {f"{name}_{i}": normal(rng, N) for name in ("bias_up", "bias", "scale", "offset")}
    return arrays


@pytest.mark.parametrize("tokens", [16, 11])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_ctas_send_is_added_up_and_normalised(tokens, dtype):
    arrays = operands(tokens, dtype)
    with all_called("mosaic.common.cluster_exchange"):
        out, hidden, seen = jax.jit(functools.partial(call, interpret=MOSAIC != "mosaic"))(arrays)

    x, mask, w, _, bias, scale, offset = (float64(v) for k, v in arrays.items() if not k.endswith("_0"))
    columns = np.split(x @ w, CTAS, 1)
    assert_close(hidden[:, :, :tokens], np.stack([part.T for part in columns]), OP[dtype])
    assert not np.any(float64(hidden[:, :, tokens:]))
    np.testing.assert_array_equal(seen, np.tile(np.pad(mask, (0, 32 - tokens)), (CTAS, 1)))
    expected = x
    for _ in range(2):
        total = expected + sum(columns) + bias
        total -= total.mean(1, keepdims=True)
        expected = total / np.sqrt(np.mean(total**2, 1, keepdims=True) + EPSILON) * scale + offset
    assert_close(out, expected, 2 * OP[dtype])  # parts and sums are rounded, too


@pytest.mark.skipif(ON_HOPPER, reason="runs there")
def test_the_exchange_lowers():
    arrays = jax.eval_shape(lambda: operands(16, "float16"))
    with cuda_device(*HOPPER):
        traced = jax.jit(functools.partial(call, interpret=False)).trace(arrays)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
