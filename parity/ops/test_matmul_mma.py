"""The product by `mma` on whichever GPU is there: values, overlapping tiles, padding, configs, where it serves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops, target
from pallas_models.dispatch import choice
from pallas_models.dispatch.records import Call
from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.mosaic import matmul as hopper
from pallas_models.kernels.mosaic import matmul_mma as mma
from pallas_models.kernels.triton import matmul as triton
from pallas_models.ops.matmul import _OP, reference
from parity.support.common import MOSAIC, assert_close, by_device, normal, without_triton
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no mma")
SHAPES = by_device(
    cpu=[(96, 64, 64), (40, 96, 32), (7, 32, 96), (1, 160, 64), (70, 192, 160)],
    gpu=[(8192, 1536, 384), (1000, 4096, 4096), (7, 1152, 384), (1, 50272, 768), (300, 96, 32), (4096, 160, 1056)],
)
A_CONFIG = dict(block_m=32, block_n=32, block_k=32, num_stages=2)


def a_form(m, n, k, *, dtype="bfloat16", residual=None, **options):
    rng = np.random.default_rng(m + n + k)
    shape = (n, k) if options.get("transpose_w") else (k, n)
    return Form(
        x=normal(rng, m, k).astype(dtype),
        w=(normal(rng, *shape) * k**-0.5).astype(dtype),
        bias=normal(rng, n),
        residual=None if residual is None else normal(rng, m, n).astype(residual),
        precision=jax.lax.Precision.DEFAULT,
        out_dtype=jnp.dtype(dtype),
        **options,
    )


def check(form, config=None):
    run = functools.partial(mma.matmul, config=config, target=target.current(), interpret=INTERPRET)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), form.operands)
    options = dict(precision=jax.lax.Precision.HIGHEST, out_dtype=jnp.dtype(jnp.float32))
    exact = form.of(wide).replace(**options)
    found, expected = jax.tree.leaves(jax.jit(run)(form)), jax.tree.leaves(jax.jit(reference)(exact))
    assert [x.dtype for x in found] == [form.dtype] * len(expected)
    for y, z in zip(found, expected, strict=True):
        assert_close(y, z, OP[str(form.dtype)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu", "residual": "float32"},
        {"activation": "silu", "residual": "bfloat16", "return_preactivation": True},
    ],
    ids=["bias", "residual", "kept"],
)
def test_values(m, n, k, dtype, transpose_w, options):
    check(a_form(m, n, k, dtype=dtype, transpose_w=transpose_w, **options))


@pytest.mark.parametrize("block_m, block_n, block_k", [(32, 64, 32), (64, 32, 64), (128, 64, 64), (64, 128, 32)])
def test_tiles(block_m, block_n, block_k):
    """Several tiles each way, of which the last overlap those before them."""
    config = mma.Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=3)
    check(a_form(block_m + 40, block_n + 64, 3 * 64, residual="bfloat16"), config)


@pytest.mark.parametrize(
    "m, n, k",
    [(1 << shift, n, k) for shift in (0, 7, 15) for n, k in ((32, 32), (96, 4096), (50272, 768), (4096, 4096))],
)
@pytest.mark.parametrize("name", ["A100", "A10", "L4", "H200", "RTX PRO 6000"])
def test_a_config_fits_every_gpu(name, m, n, k):
    gpu = target.GPUS[name]
    config = mma.heuristic(max(m, 32), n, k, gpu)
    assert mma.shared_memory(config) <= gpu.shared_memory
    assert k % config.block_k == 0 and n % min(config.block_n, 64) == 0 and config.block_n <= n


def test_many_rows_have_large_tiles_and_few_have_many():
    large, small = (mma.heuristic(m, 4096, 4096, target.GPUS["A100"]) for m in (8192, 32))
    assert (large.block_m, large.block_n) == (128, 128)
    assert (small.block_m, small.block_n) == (32, 32)


@pytest.mark.parametrize("field, value", [("block_m", 16), ("block_n", 256), ("block_k", 16), ("num_stages", 1)])
def test_configs_that_do_not_exist(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        mma.Config(**A_CONFIG | {field: value})


def chosen(form, gpu, *names):
    kernel, _ = choice.choose(Call(op=_OP, form=form.abstract(), config=None, names=names, target=gpu))
    return kernel.call


@pytest.mark.parametrize(
    "m, n, k, by_name, by_default, without",
    [
        (64, 64, 64, hopper.matmul, triton.matmul, hopper.matmul),  # too few rows to be faster than Triton
        (4096, 64, 64, hopper.matmul, hopper.matmul, hopper.matmul),
        (4096, 96, 96, mma.matmul, triton.matmul, mma.matmul),
        (4095, 64, 64, mma.matmul, triton.matmul, mma.matmul),
    ],
)
def test_on_hopper_it_serves_what_the_kernel_for_hopper_does_not(m, n, k, by_name, by_default, without):
    form, gpu = a_form(m, n, k), target.GPUS["H200"]
    assert chosen(form, gpu, "mosaic") is by_name
    assert chosen(form, gpu) is by_default
    with without_triton():
        assert chosen(form, gpu) is without


@pytest.mark.parametrize("name", ["A100", "A10", "L4", "B200", "RTX PRO 6000"])
def test_elsewhere_it_takes_the_place_of_triton(name):
    form, gpu = a_form(4096, 64, 64), target.GPUS[name]
    assert chosen(form, gpu, "mosaic") is mma.matmul
    assert chosen(form, gpu) is triton.matmul
    with without_triton():
        assert chosen(form, gpu) is mma.matmul


@pytest.mark.parametrize("n, k", [(64, 48), (40, 64)])
def test_what_it_does_not_serve(n, k):
    with pytest.raises(NotImplementedError, match=f"takes K and N in multiples of 32, not {k} and {n}"):
        ops.matmul(jnp.ones((64, k), "bfloat16"), jnp.ones((k, n), "bfloat16"), implementation=MOSAIC)


def test_products_of_float32_are_left_to_others():
    assert mma.unsupported(a_form(64, 64, 64, dtype="float32"), target.GPUS["A100"]) == (
        "takes float16 and bfloat16, not float32"
    )
