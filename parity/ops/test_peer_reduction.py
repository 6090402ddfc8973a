"""Kernels that store to other GPUs, and the sums of what they store: interpreted, where all GPUs are one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.forms.trimul import Product, Projection
from pallas_models.kernels.mosaic import matmul, trimul_product, trimul_project
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.peer_reduction import sum_of_parts
from parity.support.common import ON_GPU, assert_equal, gpu, normal

pytestmark = pytest.mark.skipif(ON_GPU, reason="compiled kernels need the other GPUs")
COUNT = 2
RUNS: dict[str, Any] = dict(target=gpu(), interpret=True)
TILES = Config(block_m=128, block_n=64, num_stages=2, ping_pong=False)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OneMemory(Peers):
    """What is for GPU i goes where GPU i itself would store it, here."""

    me: int
    stored_by: list[jax.Array] = dataclasses.field(default_factory=list)

    @property
    def index(self):
        return self.stored_by[-1] if self.stored_by else jnp.int32(self.me)

    @property
    def scratch_types(self):
        return {}

    def on(self, target, index):
        return target

    def store(self, slot, target, index, at):
        self.stored_by.append(index)
        plgpu.copy_smem_to_gmem(slot, at(target))
        self.stored_by.pop()

    def finish(self, refs, *, storing, waits):
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)


each_gpu = pytest.mark.parametrize("peers", [OneMemory(axis="d", count=COUNT, me=me) for me in range(COUNT)])


@each_gpu
def test_rows_of_a_product_go_to_whose_they_are(peers):
    rng = np.random.default_rng(0)
    x, w = normal(rng, 4 * TILES.block_m, 64, dtype="bfloat16"), normal(rng, 64, 64, dtype="bfloat16")

    def product(x, w, peers=None):
        form = Form(x=x, w=w, precision=jax.lax.Precision.HIGHEST, out_dtype=x.dtype)
        return matmul.matmul(form, config=TILES, peers=peers, **RUNS)

    parts = jax.jit(functools.partial(product, peers=peers))(x, w)
    assert parts.shape == (COUNT, len(x) // COUNT, 64)
    assert_equal(parts.reshape(-1, 64), jax.jit(product)(x, w))


@each_gpu
@pytest.mark.parametrize("has_residual", [False, True])
def test_sum_of_parts(peers, has_residual):
    rng = np.random.default_rng(0)
    parts = normal(rng, COUNT, 128, 192, dtype="bfloat16")
    residual = normal(rng, COUNT * 128, 192, dtype="bfloat16") if has_residual else None
    own = slice(peers.me * 128, (peers.me + 1) * 128)
    out = jax.jit(functools.partial(sum_of_parts, peers=peers, **RUNS))(parts, residual)
    expected = parts[0].astype(jnp.float32) + parts[1].astype(jnp.float32)
    if residual is not None:
        expected += residual[own].astype(jnp.float32)
    assert_equal(out[own], expected.astype(parts.dtype))


@each_gpu
def test_channels_of_projections_go_to_whose_they_are(peers):
    rng = np.random.default_rng(0)
    x, scale, shift = normal(rng, 1, 64, 64, dtype="float16"), normal(rng, 64), normal(rng, 64)
    w, w_gate = normal(rng, 64, 4, 64, dtype="float16", scale=0.1), normal(rng, 64, 64, dtype="float16", scale=0.1)

    def project(*operands, **options):
        form = Projection(
            **dict(zip(Projection.OPERANDS, operands, strict=True)),
            epsilon=1e-5,
            precision=jax.lax.Precision.DEFAULT,
        )
        return trimul_project.project(form, **options, **RUNS)

    operands = x, None, scale, shift, w, None, w_gate, None
    found = jax.jit(functools.partial(project, peers=peers))(*operands)
    for out, expected in zip(found, jax.jit(project)(*operands), strict=True):
        assert_equal(out, expected)


@each_gpu
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 interprets no transposed operands")
def test_sums_over_third_positions_go_to_whose_they_are(peers):
    sides = normal(np.random.default_rng(0), COUNT, 4, 128 // COUNT, 128, dtype="bfloat16")
    tiles = dataclasses.replace(TILES, block_m=64, ping_pong=True)
    options: dict[str, Any] = dict(
        channels=2, pieces=(COUNT, 1), transpose_left=False, transpose_right=True, factor=1.0
    )

    def product(sides, **peers):
        form = Product(sides=sides, precision=jax.lax.Precision.DEFAULT, **options)
        return trimul_product.product(form, config=tiles, **peers, **RUNS)

    assert_equal(jax.jit(functools.partial(product, peers=peers))(sides), jax.jit(product)(sides))
