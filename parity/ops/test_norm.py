"""`ops.layer_norm` and `ops.rms_norm` against torch: widths, residual, tiles, hard inputs, gradients."""

import functools
import re

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.mosaic.norm_backward import unsupported
from pallas_models.kernels.triton.norm import Config
from pallas_models.kernels.triton.norm_backward import Config as BackwardConfig
from pallas_models.kernels.triton.norm_backward import norm_backward
from pallas_models.ops.norm import reference as xla
from parity.ops.test_lowering import DEVICES, HOPPER, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    float64,
    gpu,
    normal,
    traces,
)
from parity.support.tolerances import CHAIN, GRADIENT, LONG, OP, SHORT

SHAPES = by_device(
    cpu=[
        (5, 33),  # odd
        (2, 7, 384),  # MiniLM's width, leading dimensions
        (3, 768),  # three chunks, which registers hold
        (3, 17000),  # wider than one block: two passes over the row
    ],
    gpu=[
        (1, 384),
        (64, 128, 384),
        (8192, 768),
        (1001, 333),
        (3, 5, 7),
        (5, 20000),
    ],
)
kernel = functools.partial(compiled.layer_norm, implementation=KERNEL)


rms_kernel = functools.partial(compiled.rms_norm, implementation=KERNEL)


def operands(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, scale, bias, residual."""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, *shape, dtype=dtype, scale=2.0, shift=0.7),
        normal(rng, shape[-1], dtype=dtype, shift=1.0, scale=0.3),
        normal(rng, shape[-1], dtype=dtype),
        normal(rng, *shape, dtype=dtype),
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape):
    x, scale, bias, residual = operands(shape, dtype)

    @jax.jit
    def f(x, scale, bias, residual):
        return ops.layer_norm(x, scale, bias, residual=residual, implementation=implementation)

    out = f(x, scale, bias, residual)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.layer_norm, x, scale, bias, residual), tolerance)


def test_without_residual_and_with_epsilon(reference, implementation):
    x, scale, bias, _ = operands((6, 50), seed=1)
    out = compiled.layer_norm(x, scale, bias, epsilon=0.5, implementation=implementation)
    assert_close(out, reference.compute(reference.layer_norm, x, scale, bias, epsilon=0.5), SHORT)


def test_operands_of_mixed_dtype(reference, implementation):
    x, _, _, _ = operands((6, 50), "float16", seed=2)
    _, scale, bias, residual = operands((6, 50), seed=2)
    out = compiled.layer_norm(x, scale, bias, residual=residual, implementation=implementation)
    assert out.dtype == "float16"
    expected = reference.compute(reference.layer_norm, x, scale, bias, residual)
    assert_close(out, expected, OP["float16"])


@pytest.mark.parametrize(
    "dtype, shift, scale, tolerance",
    [
        ("float32", 300.0, 1.0, 2e-4),  # a mean far from zero: one pass would cancel to nothing (1e-2)
        ("float32", 0.0, 1e15, 3e-6),  # squares near the end of float32
        ("float32", 0.0, 1e-4, 3e-6),
        ("float16", 0.0, 1e4, 8e-4),  # squares beyond float16
    ],
)
def test_hard_inputs(reference, implementation, dtype, shift, scale, tolerance):
    rng = np.random.default_rng(3)
    x = normal(rng, 5, 384, dtype=dtype, shift=shift, scale=scale)
    _, weight, bias, _ = operands((1, 384), dtype)
    out = compiled.layer_norm(x, weight, bias, epsilon=1e-12, implementation=implementation)
    assert_close(out, reference.compute(reference.layer_norm, x, weight, bias, epsilon=1e-12), tolerance)


def test_a_single_column_gives_the_bias(implementation):
    x, scale, bias, _ = operands((4, 1), seed=4)
    out = compiled.layer_norm(x, scale, bias, implementation=implementation)
    assert_close(out, np.broadcast_to(float64(bias), (4, 1)), SHORT)


@pytest.mark.parametrize("block_m, block_n", [(1, 16), (4, 64), (16, 32), (8, 256)])
@pytest.mark.parametrize("shape", [(33, 50), (16, 64), (5, 200)], ids=str)
def test_every_tile_config(shape, block_m, block_n):
    x, scale, bias, residual = operands(shape, seed=5)
    config = Config(block_m=block_m, block_n=block_n, num_warps=2)
    out = kernel(x, scale, bias, residual=residual, config=config)
    assert_close(out, compiled.layer_norm(x, scale, bias, residual=residual, implementation="xla"), SHORT)


@pytest.mark.parametrize("value", [0, -2, 48])
@pytest.mark.parametrize("field", ["block_m", "block_n", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        Config(**{**dict(block_m=4, block_n=64, num_warps=2), field: value})


@hypothesis.given(st.integers(1, 40), st.integers(2, 300), st.sampled_from([16, 128]), st.integers(0, 9))
def test_any_shape(m, n, block_n, seed):
    x, scale, bias, residual = operands((m, n), seed=seed)
    config = Config(block_m=4, block_n=block_n, num_warps=1)
    # A large epsilon keeps two nearly equal columns from amplifying rounding.
    options = dict(residual=residual, epsilon=0.1)
    out = kernel(x, scale, bias, config=config, **options)
    assert_close(out, compiled.layer_norm(x, scale, bias, implementation="xla", **options), LONG)


def test_rows_have_no_mean_and_unit_variance_and_ignore_shift_and_scale():
    x, scale, bias, _ = operands((7, 300), seed=6)
    out = kernel(x, scale, bias, epsilon=0.0)
    rows = (float64(out) - float64(bias)) / float64(scale)
    np.testing.assert_allclose(rows.mean(-1), 0.0, atol=1e-6)
    np.testing.assert_allclose(rows.var(-1), 1.0, atol=1e-5)
    assert_close(kernel(4 * x + 8, scale, bias, epsilon=0.0), out, CHAIN)


def test_gradients(reference):
    arrays = operands((9, 31), seed=7)
    cotangent = normal(np.random.default_rng(8), 9, 31)
    expected = reference.gradients(reference.layer_norm, arrays, cotangent)

    def f(x, scale, bias, residual):
        return kernel(x, scale, bias, residual=residual)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_against_torch(reference, implementation, dtype, tolerance, shape):
    x, scale, _, residual = operands(shape, dtype)

    @jax.jit
    def f(x, scale, residual):
        return ops.rms_norm(x, scale, residual=residual, implementation=implementation)

    out = f(x, scale, residual)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.rms_norm, x, scale, residual), tolerance)


def test_rms_norm_without_residual_and_with_epsilon(reference, implementation):
    x, scale, _, _ = operands((6, 50), seed=1)
    for epsilon in (0.0, 0.5):
        out = compiled.rms_norm(x, scale, epsilon=epsilon, implementation=implementation)
        assert_close(out, reference.compute(reference.rms_norm, x, scale, epsilon=epsilon), SHORT)
    zeros = compiled.rms_norm(0 * x, scale, implementation=implementation)
    assert np.all(float64(zeros) == 0.0)


@pytest.mark.parametrize("dtype, scale", [("float32", 1e15), ("float32", 1e-4), ("float16", 1e4)])
def test_rms_norm_of_hard_inputs(reference, implementation, dtype, scale):
    x = normal(np.random.default_rng(3), 5, 384, dtype=dtype, scale=scale)
    _, weight, _, _ = operands((1, 384), dtype)
    out = compiled.rms_norm(x, weight, epsilon=1e-12, implementation=implementation)
    assert_close(out, reference.compute(reference.rms_norm, x, weight, epsilon=1e-12), OP[dtype])


@pytest.mark.parametrize("block_m, block_n", [(1, 16), (4, 64), (8, 256)])
@pytest.mark.parametrize("shape", [(33, 50), (5, 200)], ids=str)
def test_every_tile_config_of_rms_norm(shape, block_m, block_n):
    x, scale, _, residual = operands(shape, seed=5)
    config = Config(block_m=block_m, block_n=block_n, num_warps=2)
    options = dict(residual=residual, return_residual=True)
    out, total = rms_kernel(x, scale, config=config, **options)
    expected, expected_total = compiled.rms_norm(x, scale, implementation="xla", **options)
    assert_close(out, expected, SHORT)
    assert_equal(total, expected_total)


@pytest.mark.parametrize("offset", [300.0, -3000.0])
def test_a_wide_row_far_from_zero(reference, offset):
    # Walked in blocks, the statistics take one pass: sums of squares about 0 would be wrong by 1e-2 and 1.
    x, scale, bias, _ = operands((3, 1000), seed=9)
    x = x + offset
    out = kernel(x, scale, bias, config=Config(block_m=2, block_n=64, num_warps=1))
    assert_close(out, reference.compute(reference.layer_norm, x, scale, bias), 3e-7 * abs(offset))


@pytest.mark.covering(2)
@pytest.mark.parametrize("width", [33, 70], ids=["held", "walked"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_updated_residual(reference, implementation, dtype, tolerance, name, width):
    x, scale, bias, residual = operands((2, 9, width), dtype, seed=10)
    vectors = (scale, bias) if name == "layer_norm" else (scale,)
    function = functools.partial(getattr(ops, name), implementation=implementation)
    config = Config(block_m=4, block_n=64, num_warps=1)
    out, total = function(x, *vectors, residual=residual, return_residual=True, config=config)
    assert out.dtype == total.dtype == dtype
    assert_equal(total, (x.astype("float32") + residual.astype("float32")).astype(dtype))
    assert_close(out, reference.compute(getattr(reference, name), x, *vectors, residual), tolerance)
    # Without a residual there is nothing to add.
    out, total = function(x, *vectors, return_residual=True)
    assert_close(out, reference.compute(getattr(reference, name), x, *vectors), tolerance)
    assert_equal(total, x)


def test_gradients_of_rms_norm(reference):
    x, scale, _, residual = operands((9, 31), seed=7)
    cotangent = normal(np.random.default_rng(8), 9, 31)
    expected = reference.gradients(reference.rms_norm, (x, scale, residual), cotangent)

    def f(x, scale, residual):
        return rms_kernel(x, scale, residual=residual)

    assert_gradients_close(f, (x, scale, residual), cotangent, expected, GRADIENT)


def test_gradients_through_both_results(reference):
    x, scale, _, residual = operands((9, 31), seed=7)
    cotangents = [normal(np.random.default_rng(seed), 9, 31) for seed in (8, 9)]
    first, second = map(reference.tensor, cotangents)

    def torch_loss(x, scale, residual):
        return (reference.rms_norm(x, scale, residual) * first + (x + residual) * second).sum()

    def f(x, scale, residual):
        out, total = rms_kernel(x, scale, residual=residual, return_residual=True)
        return jax.numpy.sum(out * cotangents[0] + total * cotangents[1])

    one = np.ones(())
    expected = reference.gradients(torch_loss, (x, scale, residual), one)
    assert_gradients_close(f, (x, scale, residual), jax.numpy.asarray(one), expected, GRADIENT)


@pytest.mark.parametrize("block_n", [512, 128], ids=["held", "walked"])
def test_rows_that_vary_less_than_their_mean_is_rounded(implementation, block_n):
    """Rounding the mean must not look like deviation: constant rows give the bias, 1000 +- 0.01 unit variance."""
    rng = np.random.default_rng(11)
    scale, bias = normal(rng, 300, shift=1.0, scale=0.3), normal(rng, 300)
    config = Config(block_m=2, block_n=block_n, num_warps=1)
    f = functools.partial(compiled.layer_norm, config=config, epsilon=1e-12, implementation=implementation)
    constant = jax.numpy.full((2, 300), 1.2345678, "float32")
    # Rows of 300 equal numbers: what is left of their deviation after two means is below a rounding of a rounding.
    np.testing.assert_allclose(float64(f(constant, scale, bias)), np.broadcast_to(bias, (2, 300)), atol=1e-6)
    x = normal(rng, 4, 300, shift=1000.0, scale=0.01)
    d = float64(x) - float64(x).mean(-1, keepdims=True)
    expected = d / np.sqrt(np.square(d).mean(-1, keepdims=True) + 1e-12) * float64(scale) + float64(bias)
    assert_close(f(x, scale, bias), expected, LONG if block_n > 300 else WELFORD)


# Walked in blocks, each position of a block keeps a running mean, rounded to an ulp of 1000 a step: three steps
# leave sqrt(3 / 12) ulp = 3e-5 on deviations of 0.01, of which averaging over 128 positions leaves a part in 11.
WELFORD = 3e-4


def pulled_back(arrays, cotangents, name, implementation, config=None, **options):
    """The gradients of a norm of x, scale(, bias) and residual for cotangents of the norm and of the sum."""
    *vectors, residual = arrays[1:]

    def f(x, *rest):
        norm = getattr(ops, name)
        return norm(
            x, *rest[:-1], residual=rest[-1], return_residual=True, implementation=implementation, **options
        )

    return jax.vjp(f, arrays[0], *vectors, residual)[1](cotangents)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", [(37, 33), (1, 384), (9, 1000)], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_in_every_dtype(reference, dtype, tolerance, name, shape):
    x, scale, bias, residual = operands(shape, dtype, seed=12)
    arrays = (x, scale, bias, residual) if name == "layer_norm" else (x, scale, residual)
    cotangents = [normal(np.random.default_rng(seed), *shape, dtype=dtype) for seed in (13, 14)]
    first, second = map(reference.tensor, cotangents)

    def torch_loss(x, *rest):
        out = getattr(reference, name)(x, *rest)
        return (out * first + (x + rest[-1]) * second).sum()

    f = jax.jit(lambda *arrays: pulled_back(arrays, tuple(cotangents), name, KERNEL))
    assert traces("layer_norm_backward" if name == "layer_norm" else "rms_norm_backward", f, *arrays)
    for out, wanted, array in zip(
        f(*arrays), reference.gradients(torch_loss, arrays, np.ones(())), arrays, strict=True
    ):
        assert out.dtype == array.dtype
        assert_close(out, wanted, max(tolerance, GRADIENT))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config",
    [(1, 64, 1, 3, 1), (1, 16, 1, 2, 1), (4, 64, 1, 3, 2), (8, 32, 2, 7, 1), (2, 16, 4, 64, 2)],
    ids=str,
)
@pytest.mark.parametrize("subtract_mean", [True, False], ids=["layer", "rms"])
def test_every_config_of_the_gradient(config, subtract_mean):
    x, scale, bias, residual = operands((33, 50), seed=15)
    cotangents = [normal(np.random.default_rng(seed), 33, 50) for seed in (16, 17)]
    names = ("block_m", "block_n", "num_warps", "num_programs", "num_stages")
    arrays = (x, scale, bias if subtract_mean else None, residual)
    options = dict(subtract_mean=subtract_mean, epsilon=0.0, return_residual=True)

    def form(*arrays, **more):
        return Form(**dict(zip(Form.OPERANDS, arrays, strict=True)), **options, **more)

    @jax.jit
    def pull(arrays, kept, cotangents):
        return norm_backward(
            form(*arrays),
            kept,
            cotangents,
            wanted=(True,) * 4,
            config=BackwardConfig(**dict(zip(names, config, strict=True))),
            target=gpu(),
            interpret=not ON_GPU,
        )

    _, expected = jax.vjp(lambda *arrays: xla(form(*arrays)), *arrays)
    _, statistics = xla(form(*arrays, return_statistics=True))
    given = pull(arrays, [statistics], [*cotangents, None])
    for out, wanted in zip(given, expected(tuple(cotangents)), strict=True):
        assert (out is None) == (wanted is None)
        if out is not None:
            assert_close(out, wanted, GRADIENT)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_gradient_of_what_is_returned_beside_its_norm(reference, name):
    x, scale, bias, _ = operands((9, 40), seed=21)
    vectors = (scale, bias) if name == "layer_norm" else (scale,)
    first, second = (normal(np.random.default_rng(seed), 9, 40) for seed in (22, 23))

    def torch_loss(x, *vectors):
        normalised = getattr(reference, name)(x, *vectors)
        return (normalised * reference.tensor(first) + x * reference.tensor(second)).sum()

    def pull(implementation):
        function = functools.partial(getattr(ops, name), return_residual=True, implementation=implementation)
        return jax.jit(lambda *arrays: jax.vjp(function, *arrays)[1]((first, second)))

    arrays = (x, *vectors)
    for out, wanted in zip(
        pull(KERNEL)(*arrays), reference.gradients(torch_loss, arrays, np.ones(())), strict=True
    ):
        assert_close(out, wanted, GRADIENT)
    with cuda_device(*HOPPER):
        text = pull("triton").trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert not re.search(r"= stablehlo.add .*<9x40x", text)  # the kernel adds


@pytest.mark.parametrize("shift", [0.0, 1000.0])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_of_a_residual_of_another_dtype(name, shift):
    x, scale, bias, _ = operands((9, 40), "bfloat16", seed=18)
    residual = operands((9, 40), seed=19)[3] + shift
    cotangents = (normal(np.random.default_rng(20), 9, 40, dtype="bfloat16"),) * 2
    arrays = (x, scale, bias, residual) if name == "layer_norm" else (x, scale, residual)
    out = pulled_back(arrays, cotangents, name, KERNEL)
    expected = pulled_back(arrays, cotangents, name, "xla")
    assert [a.dtype for a in out] == [a.dtype for a in arrays]
    assert_close(out[-1], expected[-1], GRADIENT)  # float32, and not the bfloat16 of x
    for a, b in zip(out[:-1], expected[:-1], strict=True):
        assert_close(a, b, 2 * OP["bfloat16"])


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradients_of_rows_that_no_registers_hold(name):
    x, scale, bias, residual = operands((2, 16385), seed=21)
    arrays = (x, scale, bias, residual) if name == "layer_norm" else (x, scale, residual)
    cotangents = tuple(normal(np.random.default_rng(seed), *x.shape) for seed in (22, 23))

    def pull(implementation):
        return jax.jit(lambda *arrays: pulled_back(arrays, cotangents, name, implementation))

    assert not traces(f"{name}_backward", pull(KERNEL), *arrays)
    for out, wanted in zip(pull(KERNEL)(*arrays), pull("xla")(*arrays), strict=True):
        assert_close(out, wanted, LONG)


# What a cluster of CTAs shares on Hopper. The interpreter has two CTAs instead, and two warpgroups in each.
LONG_ROWS = by_device(cpu=[(9, 9216)], gpu=[(130, 12288), (67, 18432), (35, 20480), (300, 65536)])


@pytest.mark.parametrize("shape", LONG_ROWS, ids=str)
@pytest.mark.parametrize("name, dtype", [("layer_norm", "float32"), ("rms_norm", "bfloat16")])
def test_gradients_of_rows_that_a_cluster_shares(reference, name, dtype, shape):
    x, scale, bias, residual = operands(shape, dtype, seed=25)
    fits = shape[1] < 65536 or dtype == "bfloat16"  # the residual and its cotangent on chip, too
    rest = ((scale, bias) if name == "layer_norm" else (scale,)) + ((residual,) if fits else ())
    cotangents = tuple(normal(np.random.default_rng(seed), *shape, dtype=dtype) for seed in (26, 27))

    def function(x, *rest):
        *vectors, last = rest if fits else (*rest, None)
        out = getattr(ops, name)(x, *vectors, residual=last, return_residual=fits, implementation=(MOSAIC, KERNEL))
        return out if fits else (out, x)

    first, second = map(reference.tensor, cotangents)

    def torch_loss(x, *rest):
        out = getattr(reference, name)(x, *rest)
        return (out * first + (x + rest[-1] if fits else x) * second).sum()

    def pull(cotangents, x, *rest):
        return jax.vjp(function, x, *rest)[1](cotangents)

    assert "warpgroup" in str(jax.make_jaxpr(pull)(cotangents, x, *rest))
    wanted = reference.gradients(torch_loss, (x, *rest), np.ones(()))
    for gradient, expected, array in zip(jax.jit(pull)(cotangents, x, *rest), wanted, (x, *rest), strict=True):
        assert gradient.dtype == array.dtype
        assert_close(gradient, expected, OP[dtype])


@pytest.mark.parametrize("n, own", [(65536, True), (18432, True), (10000, False), (4096, False)])
def test_gradients_of_long_rows_have_a_kernel_of_their_own_on_hopper(n, own):
    """Kernels of clusters; JAX 0.11 adds kernels of rows that a CTA holds, up to 8192 columns, and the norm's."""
    x, scale = jax.ShapeDtypeStruct((40, n), "bfloat16"), jax.ShapeDtypeStruct((n,), "float32")

    def gradient(x, scale):
        return jax.vjp(ops.rms_norm, x, scale)[1](x)

    for device in DEVICES:
        with cuda_device(*device):
            text = lowered_for_cuda(gradient, x, scale)
            since = jax.__version_info__ >= (0, 11)
            assert text.count(f"@{MOSAIC_CALL}") == (device == HOPPER) * (since + (own or (since and n <= 8192)))


@pytest.mark.parametrize(
    "n, dtype, residual, message",
    [
        (8192, "float32", None, "not 2 arrays of 8192 columns in float32"),
        (10000, "float32", None, "not 2 arrays of 10000 columns in float32"),
        (66560, "bfloat16", None, "not 2 arrays of 66560 columns in bfloat16"),
        (65536, "float32", "float32", "not 4 arrays of 65536 columns in float32"),
        (9216, "float32", "bfloat16", "takes a residual of the dtype of x, float32, not bfloat16"),
    ],
)
def test_rows_that_no_cluster_shares(n, dtype, residual, message):
    x, other = (kind and jax.ShapeDtypeStruct((8, n), kind) for kind in (dtype, residual))
    vector = jax.ShapeDtypeStruct((n,), dtype)
    form = Form(
        x=x,
        scale=vector,
        bias=vector,
        residual=other,
        subtract_mean=True,
        return_residual=residual is not None,
        epsilon=0.0,
    )
    assert message in unsupported(form, gpu())


@pytest.mark.parametrize("changes", [dict(num_programs=0), dict(num_stages=3), dict(block_m=3)], ids=str)
def test_a_config_of_the_gradient_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="|".join(changes)):
        BackwardConfig(**{**dict(block_m=1, block_n=16, num_warps=1, num_programs=4), **changes})


def test_gradients_of_rows_that_vary_less_than_their_mean_is_rounded(reference):
    x = normal(np.random.default_rng(22), 4, 300, shift=1000.0, scale=0.01)
    _, scale, bias, _ = operands((1, 300), seed=23)
    cotangent = normal(np.random.default_rng(24), 4, 300)

    def in_torch(x, scale, bias):
        return reference.layer_norm(x, scale, bias, epsilon=1e-12)

    def f(x, scale, bias):
        return kernel(x, scale, bias, epsilon=1e-12)

    expected = reference.gradients(in_torch, (x, scale, bias), cotangent)
    assert_gradients_close(f, (x, scale, bias), cotangent, expected, LONG)
