"""The gated product by `mma` on whichever GPU is there: values, overlapping tiles, padding, where it serves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops, target
from pallas_models.dispatch import choice
from pallas_models.dispatch.records import Call
from pallas_models.kernels.forms.gated_mlp import Form
from pallas_models.kernels.mosaic import gated_mlp as hopper
from pallas_models.kernels.mosaic import gated_mlp_mma as mma
from pallas_models.kernels.triton import gated_mlp as triton
from pallas_models.ops.gated_mlp import _OP, reference
from parity.support.common import MOSAIC, assert_close, by_device, normal, without_triton
from parity.support.tolerances import OP

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no mma")
SHAPES = by_device(
    cpu=[(96, 64, 64), (40, 96, 32), (7, 32, 96), (1, 160, 64), (70, 192, 160)],
    gpu=[(8192, 3072, 1024), (1000, 12288, 4096), (7, 1152, 384), (1, 4864, 896), (300, 96, 32)],
)


def a_form(m, n, k, *, dtype="bfloat16", bias=False, **options):
    rng = np.random.default_rng(m + n + k)
    return Form(
        x=normal(rng, m, k).astype(dtype),
        w_gate_up=(normal(rng, k, 2, n) * k**-0.5).astype(dtype),
        bias=normal(rng, 2, n) if bias else None,
        precision=jax.lax.Precision.DEFAULT,
        out_dtype=jnp.dtype(dtype),
        **dict(activation="silu") | options,
    )


def check(form, config=None):
    run = functools.partial(mma.gated_matmul, config=config, target=target.current(), interpret=MOSAIC != "mosaic")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), form.operands)
    options = dict(precision=jax.lax.Precision.HIGHEST, out_dtype=jnp.dtype(jnp.float32))
    exact = form.of(wide).replace(**options)
    found, expected = jax.tree.leaves(jax.jit(run)(form)), jax.tree.leaves(jax.jit(reference)(exact))
    assert [x.dtype for x in found] == [form.x.dtype] * len(expected)
    for y, z in zip(found, expected, strict=True):
        assert_close(y, z, OP[str(form.x.dtype)])


@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, dict(bias=True, activation="gelu", dtype="float16"), dict(bias=True, return_products=True)],
    ids=["silu", "bias", "kept"],
)
def test_values(m, n, k, options):
    check(a_form(m, n, k, **options))


@pytest.mark.parametrize("block_m, block_n, block_k", [(32, 64, 32), (64, 32, 64), (128, 64, 64), (64, 128, 32)])
def test_tiles(block_m, block_n, block_k):
    """Several tiles each way, of which the last overlap those before them."""
    config = mma.Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=3)
    check(a_form(block_m + 40, block_n + 64, 3 * 64, bias=True), config)


@pytest.mark.parametrize("m, n, k", [(1, 32, 32), (128, 12288, 4096), (2**15, 96, 4096), (4096, 4864, 896)])
@pytest.mark.parametrize("name", ["A100", "A10", "L4", "H200", "RTX PRO 6000"])
def test_a_config_fits_every_gpu(name, m, n, k):
    gpu = target.GPUS[name]
    found = list(mma.configs(max(m, 32), n, k, gpu, 2))
    assert mma.heuristic(max(m, 32), n, k, gpu, 2) in found
    assert all(mma.shared_memory(config, 2) <= gpu.shared_memory for config in found)
    assert all(2 * config.block_m * config.block_n <= 128 * 128 for config in found)  # in registers


def chosen(form, gpu, *names):
    kernel, _ = choice.choose(Call(op=_OP, form=form.abstract(), config=None, names=names, target=gpu))
    return kernel.call


def test_on_hopper_it_serves_what_the_kernel_for_hopper_does_not():
    gpu, large, odd = target.GPUS["H200"], a_form(4096, 64, 64), a_form(4095, 96, 64)
    assert chosen(large, gpu) is chosen(large, gpu, "mosaic") is hopper.gated_matmul
    assert chosen(odd, gpu) is triton.gated_matmul and chosen(odd, gpu, "mosaic") is mma.gated_matmul
    with without_triton():
        assert chosen(large, gpu) is hopper.gated_matmul and chosen(odd, gpu) is mma.gated_matmul


@pytest.mark.parametrize("name", ["A100", "L4", "B200", "RTX PRO 6000"])
def test_elsewhere_it_takes_the_place_of_triton(name):
    form, gpu = a_form(4096, 64, 64), target.GPUS[name]
    assert chosen(form, gpu) is triton.gated_matmul and chosen(form, gpu, "mosaic") is mma.gated_matmul
    with without_triton():
        assert chosen(form, gpu) is mma.gated_matmul


def test_what_it_does_not_serve():
    reason = mma.unsupported(a_form(64, 64, 64, dtype="float32"), target.GPUS["A100"])
    assert reason == "takes float16 and bfloat16, not float32"
    with pytest.raises(NotImplementedError, match="takes K and N in multiples of 32, not 48 and 40"):
        ops.gated_matmul(jnp.ones((64, 48), "bfloat16"), jnp.ones((48, 2, 40), "bfloat16"), implementation=MOSAIC)
