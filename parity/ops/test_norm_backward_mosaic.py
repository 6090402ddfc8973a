"""The gradients of `ops.layer_norm` and `ops.rms_norm` in Mosaic, of rows that CTAs walk, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.mosaic.norm_backward_rows import (
    Column,
    Config,
    configs,
    heuristic,
    norm_backward,
    unsupported,
)
from pallas_models.target import GPUS
from parity.ops.test_lowering import every_device, lowered_for_cuda
from parity.ops.test_norm import operands, pulled_back
from parity.ops.test_rows import ROWS, older
from parity.support.common import (
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    assert_close,
    by_device,
    cuda_device,
    float64,
    gpu,
    normal,
    traces,
    without_gpu,
    without_triton,
)
from parity.support.tolerances import GRADIENT, LONG, OP

NAMES = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
SHAPES = by_device(
    cpu=[(37, 24), (5, 384), (3, 1000)],
    gpu=[(1, 8), (1001, 384), (8192, 768), (1003, 4096), (300, 5120), (137, 8192), (40, 7000)],
)


def gradients(x, scale, residual, dout, dsum, name, epsilon):
    """The gradients of x + residual, scale and bias in float64."""
    y, dout = float64(x) + (0.0 if residual is None else float64(residual)), float64(dout)
    d = y - y.mean(-1, keepdims=True) if name == "layer_norm" else y
    factor = 1.0 / np.sqrt(np.square(d).mean(-1, keepdims=True) + epsilon)
    h, dh = d * factor, dout * float64(scale)
    dx = dh - h * (dh * h).mean(-1, keepdims=True)
    if name == "layer_norm":
        dx -= dh.mean(-1, keepdims=True)
    return dx * factor + (0.0 if dsum is None else float64(dsum)), (dout * h).sum(0), dout.sum(0)


def drawn(shape, dtype, seed=40, **other):
    """x, scale, bias, residual, and cotangents of the norm and of the sum."""
    x, scale, bias, residual = operands(shape, dtype, seed=seed)
    cotangents = tuple(normal(np.random.default_rng(seed + k), *shape, dtype=dtype) for k in (1, 2))
    return x, scale, bias, residual.astype(other.get("residual", dtype)), cotangents


def assert_all_close(found, x, scale, residual, cotangents, name, tolerance, epsilon=1e-5):
    """Asserts that gradients of x, scale(, bias) and residual are near those in float64, and of their dtypes."""
    dx, dscale, dbias = gradients(x, scale, residual, *cotangents, name, epsilon)
    expected = [dx, dscale, *([dbias] if name == "layer_norm" else []), *([] if residual is None else [dx])]
    assert len(found) == len(expected)
    for gradient, wanted in zip(found, expected, strict=True):
        assert_close(gradient, wanted, tolerance)


@pytest.mark.covering(1)
@NAMES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(dtype, tolerance, name, shape):
    x, scale, bias, residual, cotangents = drawn(shape, dtype)
    arrays = (x, scale, bias, residual) if name == "layer_norm" else (x, scale, residual)
    f = jax.jit(lambda *arrays: pulled_back(arrays, cotangents, name, ROWS, epsilon=1e-5))
    assert traces(f"{name}_backward", f, *arrays)
    found = f(*arrays)
    assert {gradient.dtype for gradient in found} == {jnp.dtype(dtype)}
    assert_all_close(found, x, scale, residual, cotangents, name, max(tolerance, GRADIENT))


@NAMES
def test_without_residual(name):
    x, scale, bias, _, (dout, _) = drawn((19, 200), "float32")
    vectors = (scale, bias) if name == "layer_norm" else (scale,)
    function = functools.partial(getattr(ops, name), epsilon=1e-5, implementation=ROWS)
    found = jax.jit(lambda *arrays: jax.vjp(function, *arrays)[1](dout))(x, *vectors)
    assert_all_close(found, x, scale, None, (dout, None), name, GRADIENT)


@NAMES
def test_a_residual_and_a_scale_of_other_dtypes(name):
    x, scale, bias, residual, cotangents = drawn((9, 120), "bfloat16", residual="float32")
    arrays = (x, scale.astype("float32"), *((bias,) if name == "layer_norm" else ()), residual)
    found = jax.jit(lambda *arrays: pulled_back(arrays, cotangents, name, ROWS, epsilon=1e-5))(*arrays)
    assert [gradient.dtype for gradient in found] == [array.dtype for array in arrays]
    dx, dscale, _ = gradients(x, scale, residual, *cotangents, name, 1e-5)
    assert_close(found[0], dx, OP["bfloat16"])
    assert_close(found[1], dscale, GRADIENT)  # float32, and not the bfloat16 of x
    assert_close(found[-1], dx, GRADIENT)


# A row in a thread, a part of a warp, a warp, some warps, some warpgroups, and sets of them beside one another.
WAYS = [
    ((33, 56), 1, 1, 1, True),
    ((33, 56), 4, 1, 2, False),
    ((33, 56), 8, 2, 1, True),
    ((33, 56), 32, 1, 3, True),
    ((12, 520), 64, 2, 2, True),
    ((12, 520), 128, 3, 1, False),
    ((12, 520), 256, 2, 4, True),
    ((12, 520), 256, 4, 2, True),
    ((12, 520), 512, 4, 14, False),
]


@pytest.mark.covering(1)
@NAMES
@pytest.mark.parametrize("shape, way", [(shape, way) for shape, *way in WAYS], ids=str)
def test_every_config(name, shape, way):
    config = Config(**dict(zip(("threads", "warpgroups", "num_ctas", "ahead"), way, strict=True)))
    x, scale, bias, residual, cotangents = drawn(shape, "float32")
    bias = bias if name == "layer_norm" else None
    options = dict(subtract_mean=name == "layer_norm", return_residual=True, epsilon=1e-5)

    @jax.jit
    def pull(x, scale, bias, residual, statistics, cotangents):
        form = Form(x=x, scale=scale, bias=bias, residual=residual, **options)
        return norm_backward(
            form,
            [statistics],
            cotangents,
            wanted=(True,) * 4,
            config=config,
            target=gpu(),
            interpret=not ON_GPU,
        )

    y = float64(x) + float64(residual)
    mean = y.mean(1, keepdims=True) * (name == "layer_norm")
    factor = 1.0 / np.sqrt(np.square(y - mean).mean(1, keepdims=True) + 1e-5)
    coarse = mean.astype("float32")
    statistics = [coarse, mean - coarse, factor] if name == "layer_norm" else [factor]
    statistics = jnp.asarray(np.stack(statistics)[:, :, 0], "float32")
    found = pull(x, scale, bias, residual, statistics, list(cotangents))
    found = [gradient for gradient in found if gradient is not None]
    assert_all_close(found, x, scale, residual, cotangents, name, GRADIENT)


def test_rows_that_vary_less_than_their_mean_is_rounded():
    x = normal(np.random.default_rng(22), 4, 304, shift=1000.0, scale=0.01)
    _, scale, bias, _ = operands((1, 304), seed=23)
    dout = normal(np.random.default_rng(24), 4, 304)
    function = functools.partial(ops.layer_norm, epsilon=1e-12, implementation=ROWS)
    found = jax.jit(lambda *arrays: jax.vjp(function, *arrays)[1](dout))(x, scale, bias)
    assert_all_close(found, x, scale, None, (dout, None), "layer_norm", LONG, epsilon=1e-12)


@pytest.mark.parametrize("n, served", [(8, True), (8192, True), (12, False), (8200, False), (33, False)])
def test_rows_that_it_serves(n, served):
    x, vector = jax.ShapeDtypeStruct((40, n), "bfloat16"), jax.ShapeDtypeStruct((n,), "float32")
    form = Form(
        x=x, scale=vector, bias=vector, residual=None, subtract_mean=True, return_residual=False, epsilon=0.0
    )
    expected = None if served else f"takes rows of up to 8192 columns, in multiples of 8, not {n}"
    assert unsupported(form, gpu()) == expected


@pytest.mark.parametrize(
    "m, n, dtype, arrays, expected",
    [
        (8192, 4096, "bfloat16", 2, (256, 4, 132, True)),
        (8192, 4096, "bfloat16", 4, (256, 2, 132, True)),  # registers of four inputs, and of the next four
        (8192, 4096, "float32", 2, (256, 2, 132, True)),
        (8192, 8192, "bfloat16", 2, (512, 4, 132, True)),
        (8192, 8192, "float32", 2, (512, 4, 132, False)),
        (8192, 768, "bfloat16", 2, (32, 3, 132, True)),
        (65536, 384, "bfloat16", 2, (16, 3, 132, True)),
        (2048, 5120, "bfloat16", 2, (256, 2, 132, True)),
        (40, 768, "bfloat16", 2, (32, 1, 10, True)),  # few rows: of many CTAs
    ],
)
def test_threads_have_what_registers_have_room_for(m, n, dtype, arrays, expected):
    size = jnp.dtype(dtype).itemsize
    config = heuristic(m, n, Column(inputs=arrays * size, scale=4, sums=2), dtype, GPUS["H200"])
    assert (config.threads, config.warpgroups, config.num_ctas, config.ahead) == expected


@pytest.mark.parametrize("n", [8, 384, 1000, 4096, 8192])
def test_configs_worth_measuring(n):
    found = list(configs(8192, n, GPUS["H200"]))
    assert found and len(found) == len(set(found))
    for config in found:
        blocks = Blocks.of(config.rows(n), jax.ShapeDtypeStruct((8192, n), "bfloat16"), config.num_ctas)
        assert blocks.steps == 1 and blocks.columns * blocks.vector <= 32


@pytest.mark.parametrize("changes", [dict(num_ctas=0), dict(warpgroups=0), dict(threads=3)], ids=str)
def test_a_config_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="|".join(changes)):
        Config(**dict(threads=32, warpgroups=1, num_ctas=2) | changes)


@older
@without_gpu
@every_device
@NAMES
def test_it_is_for_every_gpu_where_it_is_named_or_triton_is_missing(device, name):
    x, vector = jax.ShapeDtypeStruct((40, 768), "float32"), jax.ShapeDtypeStruct((768,), "float32")
    arrays = (x, vector, vector) if name == "layer_norm" else (x, vector)

    def gradient(implementation):
        call = functools.partial(getattr(ops, name), implementation=implementation)
        return lambda *arrays: jax.vjp(call, *arrays)[1](arrays[0])

    with cuda_device(*device):
        assert lowered_for_cuda(gradient("mosaic"), *arrays).count(f"@{MOSAIC_CALL}") == 2
        assert MOSAIC_CALL not in lowered_for_cuda(gradient(None), *arrays)
    with without_triton(), cuda_device(*device):
        text = lowered_for_cuda(gradient(None), *arrays)
    assert text.count(f"@{MOSAIC_CALL}") == 2 and TRITON_CALL not in text
