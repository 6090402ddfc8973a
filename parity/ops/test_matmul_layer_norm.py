"""`ops.matmul_layer_norm` against torch: fused and unfused, operands absent and present, gradients."""

import dataclasses
import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.forms.matmul_layer_norm import Form
from pallas_models.kernels.mosaic import matmul_layer_norm as mosaic
from pallas_models.kernels.mosaic import matmul_layer_norm_cluster as cluster
from pallas_models.kernels.triton import matmul
from pallas_models.kernels.triton.matmul_layer_norm import Config
from pallas_models.target import ANY
from parity.ops.test_lowering import HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    assert_close,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    gpu,
    normal,
    traces,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import GRADIENT, LONG, OP, TF32

SHAPES = by_device(
    cpu=[
        (5, 40, 33),  # odd rows and width
        (70, 96, 384),  # a width that is no power of two
        (5, 1700, 24),  # K in parts, the last of them ragged and with steps past the end
    ],
    gpu=[
        (16, 384, 384),  # MiniLM's two, at few rows and at many
        (16, 1536, 384),
        (128, 1536, 384),
        (5, 1700, 24),  # K in parts, the last of them ragged and with steps past the end
        (8192, 384, 384),
        (8192, 1536, 384),
        (2049, 385, 383),  # odd everywhere
        (300, 768, 768),
    ],
)


def fused(width: int, block_m: int = 16, block_k: int = 32) -> Config:
    """Tiles of the kernel that holds whole rows; without a config small shapes may run as two kernels."""
    return Config(block_m=block_m, block_n=-(-width // 16) * 16, block_k=block_k, num_warps=4, num_stages=2)


kernel = functools.partial(compiled.matmul_layer_norm, implementation=KERNEL)


def operands(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, w, scale, offset, bias, residual."""
    m, k, n = shape
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=1.0, scale=0.3),
        normal(rng, n, dtype=dtype),
        normal(rng, n, dtype=dtype, shift=0.5),
        normal(rng, m, n, dtype=dtype),
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape):
    x, w, scale, offset, bias, residual = operands(shape, dtype)

    @jax.jit
    def f(x, w, scale, offset, bias, residual):
        return ops.matmul_layer_norm(
            x, w, scale, offset, bias=bias, residual=residual, implementation=implementation
        )

    out = f(x, w, scale, offset, bias, residual)
    assert out.dtype == dtype
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual)
    assert_close(out, expected, tolerance)


@pytest.mark.parametrize(
    "m, k, n, parts",
    [
        (5, 1700, 24, 8),  # as in SHAPES: 14 blocks of K, 2 a part; the seventh is ragged, the eighth empty
        (16, 1536, 384, 6),
        (8192, 1536, 384, 1),  # enough tiles for every core
    ],
)
def test_few_rows_split_the_contraction(m, k, n, parts):
    target = gpu()
    assert matmul.heuristic(m, n, k, np.float16, target, summed=True).splits == parts


@pytest.mark.parametrize("shape", by_device(cpu=[(37, 50, 41)], gpu=[(4096, 1536, 384), (300, 129, 41)]), ids=str)
def test_fused_kernel_in_every_dtype(reference, dtype, tolerance, shape):
    x, w, scale, offset, bias, residual = operands(shape, dtype, seed=1)
    out = kernel(x, w, scale, offset, bias=bias, residual=residual, config=fused(shape[2]))
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual)
    assert_close(out, expected, tolerance)


@pytest.mark.parametrize("config", [None, fused(38)], ids=["chosen", "fused"])
@pytest.mark.parametrize("has_bias, has_residual", [(False, False), (True, False), (False, True)])
def test_absent_operands_and_epsilon(reference, config, has_bias, has_residual):
    x, w, scale, offset, bias, residual = operands((9, 24, 38), seed=2)
    bias, residual = bias if has_bias else None, residual if has_residual else None
    out = kernel(x, w, scale, offset, bias=bias, residual=residual, epsilon=0.1, config=config)
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual, epsilon=0.1)
    assert_close(out, expected, LONG)


@pytest.mark.parametrize("batch", [(), (2, 1, 3)], ids=str)
def test_leading_dimensions(reference, implementation, batch):
    rng = np.random.default_rng(3)
    _, w, scale, offset, bias, _ = operands((1, 24, 18))
    x, residual = normal(rng, *batch, 24), normal(rng, *batch, 18)
    out = compiled.matmul_layer_norm(
        x, w, scale, offset, bias=bias, residual=residual, implementation=implementation
    )
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias, residual)
    assert_close(out, expected, LONG)


@pytest.mark.parametrize("block_m, block_k", [(16, 16), (32, 64), (64, 32)])
@pytest.mark.parametrize("width", [16, 41, 64, 100])  # one block, ragged, whole, several blocks
def test_every_tile_config(width, block_m, block_k):
    x, w, scale, offset, bias, residual = operands((37, 50, width), seed=4)
    out = kernel(x, w, scale, offset, bias=bias, residual=residual, config=fused(width, block_m, block_k))
    expected = compiled.matmul_layer_norm(x, w, scale, offset, bias=bias, residual=residual, implementation="xla")
    assert_close(out, expected, LONG)


@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 70), st.integers(0, 9))
def test_any_shape(m, k, n, seed):
    x, w, scale, offset, bias, residual = operands((m, k, n), seed=seed)
    # A large epsilon keeps two nearly equal columns from amplifying rounding.
    options = dict(bias=bias, residual=residual, epsilon=0.1)
    out = kernel(x, w, scale, offset, config=fused(n, block_k=16), **options)
    assert_close(
        out, compiled.matmul_layer_norm(x, w, scale, offset, implementation="xla", **options), OP["float32"]
    )


def test_precision_of_float32(reference):
    x, w, scale, offset, bias, _ = operands((33, 200, 50), seed=5)
    expected = reference.compute(reference.matmul_layer_norm, x, w, scale, offset, bias)
    for config in (None, fused(50)):
        assert_close(kernel(x, w, scale, offset, bias=bias, config=config), expected, LONG)
        assert_close(kernel(x, w, scale, offset, bias=bias, config=config, precision="default"), expected, TF32)


def test_gradients(reference):
    arrays = operands((9, 31, 22), seed=6)
    cotangent = normal(np.random.default_rng(7), 9, 22)
    expected = reference.gradients(reference.matmul_layer_norm, arrays, cotangent)

    def f(x, w, scale, offset, bias, residual):
        return kernel(x, w, scale, offset, bias=bias, residual=residual)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


@pytest.mark.parametrize("of_residual", ["float32", None])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_value_and_gradients_far_from_zero(reference, dtype, of_residual):
    residual = normal(np.random.default_rng(13), 11, 16, dtype=of_residual or dtype, shift=1000.0)
    arrays = (*operands((11, 100, 16), dtype, seed=12)[:5], residual)
    cotangent = normal(np.random.default_rng(14), 11, 16, dtype=dtype)

    @jax.jit
    def pull_back(cotangent, *arrays):
        out, pullback = jax.vjp(
            lambda *a: ops.matmul_layer_norm(*a[:4], bias=a[4], residual=a[5], implementation=KERNEL), *arrays
        )
        return out, *pullback(cotangent)

    expected = reference.gradients(reference.matmul_layer_norm, arrays, cotangent)
    expected = [reference.compute(reference.matmul_layer_norm, *arrays), *expected]
    for out, wanted in zip(pull_back(cotangent, *arrays), expected, strict=True):
        assert_close(out, wanted, OP[dtype])


def hopper(width: int, **sizes: int) -> mosaic.Config:
    return mosaic.Config(block_m=64, block_n=width, num_stages=2, ping_pong=False, split_n=True, **sizes)


def few_rows(width: int) -> cluster.Config:
    """A cluster of two CTAs or more; of one in the interpreter."""
    return cluster.Config(block_n=64, block_k=64, num_stages=2)


both = pytest.mark.parametrize("tiles", [hopper, few_rows])
# The interpreter runs two CTAs.
edges = pytest.mark.skipif(MOSAIC != "mosaic" and jax.__version_info__ < (0, 11), reason="JAX 0.10 has no edges")


@both
@pytest.mark.parametrize(
    "shape, has_bias, has_residual",
    [
        ((192, 64, 128), True, True),  # several tiles for a CTA
        ((64, 320, 384), False, True),  # the ring goes round
        pytest.param((72, 192, 256), True, False, marks=edges),  # ragged
    ],
)
def test_hopper_kernel(tiles, shape, has_bias, has_residual):
    x, w, scale, offset, bias, residual = operands(shape, "bfloat16", seed=8)
    options = dict(bias=bias.astype("float32") if has_bias else None, residual=residual if has_residual else None)
    exact = (a.astype("float32") for a in (x, w, scale, offset))
    expected = compiled.matmul_layer_norm(*exact, implementation="xla", **options)
    out = compiled.matmul_layer_norm(x, w, scale, offset, config=tiles(shape[2]), implementation=MOSAIC, **options)
    assert out.dtype == "bfloat16"
    assert_close(out, expected, OP["bfloat16"])


@both
def test_hopper_kernel_sums_up_halves_of_rows_that_lie_far_apart(tiles):
    """The variance of rows of which one half is 100 and the other -100, but for a little."""
    x, w, scale, offset, _, residual = operands((64, 64, 128), "float16", seed=11)
    halves = jnp.repeat(jnp.asarray([100.0, -100.0], "float16"), 64)
    options = dict(residual=residual + halves, implementation=MOSAIC, config=tiles(128))
    expected = compiled.matmul_layer_norm(x, w, scale, offset, residual=residual + halves, implementation="xla")
    assert_close(compiled.matmul_layer_norm(x, w, scale, offset, **options), expected, OP["float16"])


@both
@finds_races
def test_hopper_kernel_has_no_races(tiles):
    x, w, scale, offset, bias, residual = operands((256, 256, 128), "bfloat16", seed=9)
    options = dict(bias=bias, residual=residual)
    with no_races():
        out = ops.matmul_layer_norm(x, w, scale, offset, config=tiles(128), implementation=MOSAIC, **options)
    expected = compiled.matmul_layer_norm(x, w, scale, offset, implementation="xla", **options)
    assert_close(out, expected, OP["bfloat16"])


@without_gpu
@pytest.mark.parametrize("tiles", [lambda _: None, few_rows])
def test_hopper_kernel_lowers(tiles):
    shapes = [jax.ShapeDtypeStruct(a.shape, "float16") for a in operands((264, 128, 384))]

    def f(x, w, scale, offset, bias, residual):
        options = dict(bias=bias, residual=residual, config=tiles(384), implementation="mosaic")
        return ops.matmul_layer_norm(x, w, scale, offset, **options)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(f, *shapes)
    assert text.count(f"@{MOSAIC_CALL}") == 1
    assert "stablehlo.dot" not in text


@pytest.mark.parametrize("n", [128, 256, 384, 512])
def test_hopper_heuristic(n):
    config = mosaic.heuristic(n, gpu())
    assert config in list(mosaic.candidates(n, gpu()))
    assert mosaic.shared_memory(config) <= 227 * 1024


@pytest.mark.parametrize("m, ctas", [(1024, 6), (1032, 3), (2112, 3), (2120, 2)])
def test_ctas_of_a_cluster(m, ctas):
    configs = [cluster.heuristic(m, 384, k, gpu()) for k in (384, 1536)]
    assert [384 // config.block_n for config in configs] == [ctas, ctas]
    assert all(cluster.shared_memory(config) <= 227 * 1024 for config in configs)


@pytest.mark.parametrize(
    "shape, change, options, message",
    [
        ((64, 64, 128), {"x": "float32", "w": "float32"}, {}, "takes float16 and bfloat16, not float32"),
        ((64, 64, 320), {}, {}, "takes rows of up to 512 columns in multiples of 128, not of 320"),
        ((64, 64, 768), {}, {}, "takes rows of up to 512 columns in multiples of 128, not of 768"),
        ((12, 64, 128), {}, {}, "in multiples of 64, not x of shape (12, 64)"),
        ((64, 64, 128), {"residual": "float32"}, {}, "takes a residual of the dtype of x, bfloat16, not float32"),
        ((64, 64, 128), {}, {"config": fused(128)}, "takes a Config of pallas_models.kernels.mosaic"),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(shape, change, options, message):
    names = "x", "w", "scale", "offset", "bias", "residual"
    arrays = {name: a.astype(change.get(name, "bfloat16")) for name, a in zip(names, operands(shape), strict=True)}
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        ops.matmul_layer_norm(**arrays, implementation=MOSAIC, **options)


@pytest.mark.parametrize(
    "change", [dict(block_n=256), dict(block_m=128), dict(block_m=128, split_n=False)], ids=str
)
def test_hopper_tiles_are_whole_rows(change):
    x, w, scale, offset, _, _ = operands((64, 64, 128), "bfloat16")
    sizes = dict(block_m=64, block_n=128, num_stages=2, ping_pong=False, split_n=True) | change
    with pytest.raises(ValueError, match=r"expected block_m=64, block_n=128|needs True"):
        ops.matmul_layer_norm(x, w, scale, offset, config=mosaic.Config(**sizes), implementation=MOSAIC)


def test_gradients_of_the_hopper_kernel():
    arrays = operands((64, 128, 128), "bfloat16", seed=10)

    def loss(implementation, *arrays):
        x, w, scale, offset, bias, residual = arrays
        options = dict(bias=bias, residual=residual, implementation=implementation)
        return jnp.sum(jnp.square(ops.matmul_layer_norm(x, w, scale, offset, **options).astype("float32")))

    def gradients(implementation):
        return jax.grad(functools.partial(loss, implementation), range(6))(*arrays)

    for mine, expected in zip(gradients(MOSAIC), gradients("xla"), strict=True):
        assert_close(mine, expected, OP["bfloat16"])


def form(rows: int, k: int = 384) -> Form:
    """A call with so many rows, of 384 columns."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((rows, k), (k, 384)))
    vector, precision = jax.ShapeDtypeStruct((384,), jnp.float16), jax.lax.Precision.HIGHEST
    return Form(x=x, w=w, scale=vector, offset=vector, bias=None, residual=None, epsilon=0.1, precision=precision)


@pytest.mark.parametrize(
    "rows, expected",
    [(4096, False), (4232, True), (8192, True), (8448, True), (8449, False), (12416, True), (65536, True)],
)
def test_hopper_takes_over_where_rows_fill_its_multiprocessors(rows, expected):
    assert mosaic.prefer(form(rows), gpu()) is expected


@pytest.mark.parametrize(
    "rows, k, expected",
    [
        (248, 384, False),
        (256, 384, True),
        (504, 1536, False),
        (512, 1536, True),
        (4224, 384, True),
        (4232, 384, False),
    ],
)
def test_clusters_take_over_from_triton_and_leave_to_whole_rows(rows, k, expected):
    assert cluster.prefer(form(rows, k), gpu()) is expected
    assert rows < 4224 or mosaic.prefer(form(rows, k), gpu())


def test_clusters_are_for_gpus_that_run_all_of_them_at_once():
    assert cluster.prefer(form(2112), gpu(78)) and not cluster.prefer(form(4224), gpu(78))
    assert cluster.heuristic(2112, 384, 384, gpu(132)).block_n == 128
    assert cluster.heuristic(2112, 384, 384, gpu(78)).block_n == 192


def test_a_named_backend_computes_in_its_fastest_kernel():
    x, w, vector = jnp.ones((512, 384), "float16"), jnp.ones((384, 384), "float16"), jnp.ones(384)
    with cuda_device(*HOPPER):
        for rows, kernel in ((512, "matmul_layer_norm_cluster"), (64, "matmul_layer_norm")):
            call = functools.partial(ops.matmul_layer_norm, implementation="mosaic")
            assert traces(kernel, call, x[:rows], w, vector, vector)


@pytest.mark.parametrize("n", [128, 512])
def test_the_interpreter_needs_no_gpu_whose_shared_memory_suffices(n):
    x, w, vector = jnp.ones((64, 128), "float16"), jnp.ones((128, n), "float16"), jnp.ones(n)
    call = functools.partial(ops.matmul_layer_norm, implementation="mosaic_interpret")
    assert jax.eval_shape(call, x, w, vector, vector).shape == (64, n)
    for k in (384, 1536):
        assert all(c.num_stages > 1 for c in cluster.candidates(n, k, ANY))


@pytest.mark.parametrize("change", [dict(block_n=256), dict(block_k=96), dict(num_stages=1)], ids=str)
def test_clusters_of_impossible_tiles(change):
    x, w, scale, offset, _, _ = operands((64, 256, 128), "bfloat16")
    config = dataclasses.replace(few_rows(128), **change)
    with pytest.raises(ValueError, match="does not fit k=256 and n=128"):
        ops.matmul_layer_norm(x, w, scale, offset, config=config, implementation=MOSAIC)
