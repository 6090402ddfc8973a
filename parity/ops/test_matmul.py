"""`ops.matmul` against torch: shapes, epilogues, algorithms, transposed and batched weights, tiles, gradients."""

import functools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.common.tiles import tile_order
from pallas_models.kernels.forms.matmul import ALGORITHMS, Form
from pallas_models.kernels.mosaic import activation_backward as mosaic_epilogue
from pallas_models.kernels.mosaic import matmul as mosaic
from pallas_models.kernels.mosaic.common.staging import Staging
from pallas_models.kernels.triton import matmul
from pallas_models.kernels.triton.activation_backward import Config as EpilogueConfig
from pallas_models.kernels.triton.activation_backward import activation_backward
from pallas_models.kernels.triton.matmul import Config
from pallas_models.ops.matmul import reference as plain
from parity.ops.test_lowering import HOPPER, every_device, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    assert_close,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    float64,
    gpu,
    interprets_mosaic,
    normal,
    relative_error,
    traces,
    without_gpu,
)
from parity.support.races import finds_races, no_races
from parity.support.tolerances import FLOAT16_SUM, GRADIENT, LONG, OP, ROUNDED, SHORT, TF32

SHAPES = by_device(
    cpu=[
        (1, 1, 1),  # less than any tile
        (5, 33, 7),  # odd everywhere
        (64, 128, 64),  # whole tiles: no masks
        (70, 150, 129),  # several tiles each way, all ragged
    ],
    gpu=[
        (1, 1, 1),
        (16, 384, 1152),  # MiniLM's projections at its smallest and largest batches
        (8192, 384, 1152),
        (8192, 384, 1536),
        (8192, 1536, 384),
        (2048, 768, 3072),
        (77, 385, 1151),  # odd everywhere: rows that are not aligned
        (1000, 130, 131),
    ],
)
CONFIGS = [
    Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1, group_m=1),
    Config(block_m=16, block_n=64, block_k=32, num_warps=2, num_stages=2, group_m=2),  # ragged last group
    Config(block_m=64, block_n=16, block_k=128, num_warps=4, num_stages=2, group_m=3),
    Config(block_m=32, block_n=48, block_k=16, num_warps=2, num_stages=2),  # held as 32 and 16 columns
    Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
    Config(block_m=16, block_n=32, block_k=32, num_warps=2, num_stages=2, splits=3),
]
kernel = functools.partial(compiled.matmul, implementation=KERNEL)


def operands(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, w, bias and residual, such that x @ w is of order one: where activations bend."""
    m, k, n = shape
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=0.3),
        normal(rng, m, n, dtype=dtype),
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_full_epilogue(reference, implementation, dtype, tolerance, shape):
    x, w, bias, residual = operands(shape, dtype)

    @jax.jit
    def f(x, w, bias, residual):
        return ops.matmul(x, w, bias=bias, residual=residual, activation="gelu", implementation=implementation)

    out = f(x, w, bias, residual)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation="gelu"), tolerance)


@pytest.mark.parametrize(
    "activation, has_bias, has_residual",
    [
        (None, False, False),
        (None, True, False),
        (None, False, True),
        ("gelu", False, False),
        ("gelu_tanh", True, False),
        ("silu", False, True),
        ("relu", True, True),
    ],
)
def test_every_part_of_the_epilogue_alone(reference, implementation, activation, has_bias, has_residual):
    x, w, bias, residual = operands((19, 40, 37), seed=1)
    bias, residual = bias if has_bias else None, residual if has_residual else None
    out = compiled.matmul(x, w, bias=bias, residual=residual, activation=activation, implementation=implementation)
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation=activation), SHORT)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)], ids=str)
def test_leading_dimensions(reference, implementation, batch):
    rng = np.random.default_rng(2)
    x, residual = normal(rng, *batch, 24), normal(rng, *batch, 18)
    _, w, bias, _ = operands((1, 24, 18))
    out = compiled.matmul(x, w, bias=bias, residual=residual, activation="silu", implementation=implementation)
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation="silu"), SHORT)


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_activations_are_exact_and_survive_extremes(reference, implementation, activation):
    # K = 1 and weights that are powers of two: what reaches the activation is exact.
    x = np.concatenate(
        [
            np.linspace(-9, 9, 1999),
            np.geomspace(1e-30, 30, 200),
            -np.geomspace(1e-30, 30, 200),
            [1e4, -1e4, 1e30, -1e30, 65504, -65504, np.inf, -np.inf, np.nan],
        ]
    )
    x = jnp.asarray(x, jnp.float32)[:, None]
    w = jnp.asarray([[1.0, -1.0, 0.5, -2.0]])
    with np.errstate(invalid="ignore"):
        out = float64(compiled.matmul(x, w, activation=activation, implementation=implementation))
        expected = reference.compute(reference.matmul, x, w, activation=activation)
    finite = np.broadcast_to(np.isfinite(x), out.shape)
    assert np.all(np.isfinite(out[finite]))
    error = np.abs(out[finite] - expected[finite]) / np.maximum(1.0, np.abs(expected[finite]))
    assert np.max(error) < 1e-6
    y = float64(x) * float64(w)
    np.testing.assert_array_equal(out[y == np.inf], expected[y == np.inf])
    assert np.all(np.isnan(out[np.isnan(y)]))
    # torch computes -inf * 0 = NaN in all but relu; the limit, 0 to within the bound above, is as good.
    below = out[y == -np.inf]
    assert np.all((np.abs(below) < 1e-6) | (np.isnan(below) & np.isnan(expected[y == -np.inf])))


# Ragged tiles, and five by three of them where rows go in groups of two; whole tiles; a long contraction.
@pytest.mark.parametrize("shape", [(70, 53, 131), (128, 128, 128), (90, 200, 70)], ids=str)
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.block_k}g{c.group_m}s{c.splits}"
)
def test_every_tile_config(shape, config):
    x, w, bias, residual = operands(shape, seed=3)
    options = dict(bias=bias, residual=residual, activation="gelu")
    out = kernel(x, w, config=config, **options)
    assert_close(out, compiled.matmul(x, w, implementation="xla", **options), LONG)


@pytest.mark.parametrize("value", [0, -16, 40])
@pytest.mark.parametrize("field", ["block_m", "block_n", "block_k", "num_warps"])
def test_a_block_of_no_possible_size_is_refused(field, value):
    sizes = dict(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1)
    with pytest.raises(ValueError, match=rf"{field}={value} must be a"):  # power of two, or multiple of 16
        Config(**{**sizes, field: value})


def test_float16_accumulation_is_an_option_with_its_price(reference):
    x, w, bias, _ = operands((40, 512, 48), "float16", seed=4)
    expected = reference.compute(reference.matmul, x, w, bias)
    in_half, in_full = (
        relative_error(kernel(x, w, bias=bias, acc_dtype=acc, out_dtype="float32"), expected)
        for acc in ("float16", "float32")
    )
    assert in_full < LONG
    assert in_half < FLOAT16_SUM  # several in a row happen in one step of a tensor core
    assert in_half > 2 * in_full, "acc_dtype made no difference"


@pytest.mark.parametrize("precision", [None, "highest", "high", "default", jax.lax.Precision.DEFAULT])
def test_precision_of_float32(reference, precision):
    x, w, bias, _ = operands((33, 200, 50), seed=5)
    out = kernel(x, w, bias=bias, precision=precision)
    exact = precision in (None, "highest")  # no TF32 unless asked for
    assert_close(out, reference.compute(reference.matmul, x, w, bias), SHORT if exact else TF32)


@pytest.mark.parametrize(
    "dtype, out_dtype", [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_out_dtype(reference, implementation, dtype, out_dtype):
    x, w, bias, residual = operands((21, 64, 30), dtype, seed=6)
    out = compiled.matmul(x, w, bias=bias, residual=residual, out_dtype=out_dtype, implementation=implementation)
    assert out.dtype == out_dtype
    # A float32 result of half operands shows that nothing is rounded on the way.
    expected = reference.compute(reference.matmul, x, w, bias, residual)
    assert_close(out, expected, SHORT if out_dtype == "float32" else ROUNDED["float16"])


def test_operands_of_mixed_dtype(reference, implementation):
    x, w, _, _ = operands((21, 64, 30), "float16", seed=7)
    _, _, bias, residual = operands((21, 64, 30), "float32", seed=8)
    out = compiled.matmul(
        x, w, bias=bias, residual=residual.astype("bfloat16"), out_dtype="float32", implementation=implementation
    )
    expected = reference.compute(reference.matmul, x, w, bias, residual.astype("bfloat16"))
    assert_close(out, expected, SHORT)


def test_overflow_of_float16_is_infinite_not_nan(reference, implementation):
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.uniform(5e3, 1e4, (18, 40)), "float16")
    w = jnp.asarray(rng.uniform(0.5, 1, (40, 20)) * rng.choice([-1, 1], 20), "float16")
    out = float64(compiled.matmul(x, w, implementation=implementation))
    np.testing.assert_array_equal(out, np.sign(reference.compute(reference.matmul, x, w)) * np.inf)


@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_any_shape(m, k, n, seed):
    x, w, bias, residual = operands((m, k, n), seed=seed)
    options = dict(bias=bias, residual=residual, activation="gelu_tanh")
    out = kernel(x, w, config=CONFIGS[0], **options)  # the smallest tiles: most shapes need several
    assert_close(out, compiled.matmul(x, w, implementation="xla", **options), LONG)


@pytest.mark.parametrize("activation", [None, *sorted(ops.ACTIVATIONS)])
def test_gradients(reference, activation):
    arrays = operands((9, 31, 22), seed=10)
    cotangent = normal(np.random.default_rng(11), 9, 22)
    expected = reference.gradients(functools.partial(reference.matmul, activation=activation), arrays, cotangent)

    def f(x, w, bias, residual):
        return kernel(x, w, bias=bias, residual=residual, activation=activation)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("implementation", [KERNEL, MOSAIC])
def test_gradients_of_half_precision(reference, implementation, activation, dtype):
    arrays = operands((64, 128, 64), dtype, seed=30)
    cotangent = normal(np.random.default_rng(31), 64, 64, dtype=dtype)
    expected = reference.gradients(functools.partial(reference.matmul, activation=activation), arrays, cotangent)

    def f(x, w, bias, residual):
        return ops.matmul(x, w, bias=bias, residual=residual, activation=activation, implementation=implementation)

    has_kernel = traces("activation_backward", jax.grad(lambda x: jnp.sum(f(x, *arrays[1:]))), arrays[0])
    assert has_kernel == (activation is not None)
    assert_gradients_close(f, arrays, cotangent, expected, OP[dtype])


def kept(backend, x, w, bias, residual, *, config, out_dtype):
    """What a kernel gives with what its activation is applied to, and both in float32 in plain XLA."""

    def form(*arrays, out_dtype):
        operands = dict(zip(Form.OPERANDS, arrays, strict=True))
        options = dict(activation="gelu_tanh", precision=jax.lax.Precision.HIGHEST, return_preactivation=True)
        return Form(**operands, **options, out_dtype=jnp.dtype(out_dtype))

    def call(*arrays):
        given = form(*arrays, out_dtype=out_dtype)
        return backend.matmul(given, config=config, target=gpu(), interpret=not ON_GPU)

    arrays = x, w, bias, residual
    wide = (a if a is None else a.astype("float32") for a in arrays)
    return jax.jit(call)(*arrays), plain(form(*wide, out_dtype="float32"))


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_what_the_activation_is_applied_to(has_residual, splits):
    x, w, bias, residual = operands((37, 90, 41), seed=33)
    config = Config(block_m=16, block_n=32, block_k=32, num_warps=2, num_stages=2, splits=splits)
    residual = residual if has_residual else None
    (out, y), (expected, wanted) = kept(matmul, x, w, bias, residual, config=config, out_dtype="float32")
    assert_close(out, expected, SHORT)
    assert_close(y, wanted, SHORT)


@pytest.mark.parametrize("config", [(1, 16, 1, 1), (1, 64, 1, 4), (8, 64, 2, 3), (4, 128, 1, 40)], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "sigmoid", "silu"])
def test_the_gradient_of_an_epilogue(reference, activation, config):
    rng = np.random.default_rng(32)
    y, dout = normal(rng, 37, 90, scale=2.0), normal(rng, 37, 90)
    y = y.at[0, :7].set(jnp.asarray([-1e4, -30.0, -8.0, 1e-3, 8.0, 30.0, 1e4]))
    (expected,) = reference.gradients(reference.ACTIVATIONS[activation], [y], dout)
    names = ("block_m", "block_n", "num_warps", "splits")
    config = EpilogueConfig(**dict(zip(names, config, strict=True)))
    options = dict(activation=activation, config=config, target=gpu(), interpret=KERNEL == "interpret")
    dy, dbias = jax.jit(functools.partial(activation_backward, **options))(y, dout)
    assert_close(dy, expected, SHORT)
    assert_close(dbias, expected.sum(0), SHORT)


@interprets_mosaic
@pytest.mark.parametrize("config", [(1, 2, 3), (16, 1, 40), (128, 3, 1), None], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "sigmoid", "silu"])
def test_the_gradient_of_an_epilogue_in_mosaic(activation, config):
    rng = np.random.default_rng(32)
    y, dout = normal(rng, 37, 90, scale=2.0), normal(rng, 37, 90)
    y = y.at[0, :7].set(jnp.asarray([-1e4, -30.0, -8.0, 1e-3, 8.0, 30.0, 1e4]))
    exact = functools.partial(jax.nn.gelu, approximate=False)
    with jax.enable_x64(True):
        f = exact if activation == "gelu" else getattr(jax.nn, activation.removesuffix("_tanh"))
        (expected,) = jax.vjp(f, y.astype("float64"))[1](dout.astype("float64"))
        expected = np.asarray(expected)
    if config is not None:
        config = mosaic_epilogue.Config(**dict(zip(("threads", "block_m", "splits"), config, strict=True)))
    options = dict(activation=activation, config=config, target=gpu(), interpret=not ON_GPU)
    dy, dbias = jax.jit(functools.partial(mosaic_epilogue.activation_backward, **options))(y, dout)
    assert_close(dy, expected, SHORT)
    assert_close(dbias, expected.sum(0), SHORT)


@pytest.mark.parametrize("changes", [dict(splits=0), dict(block_m=0), dict(threads=3)], ids=str)
def test_a_config_of_mosaics_epilogue_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="|".join(changes)):
        mosaic_epilogue.Config(**{**dict(threads=8, block_m=1, splits=4), **changes})


@pytest.mark.parametrize("changes", [dict(splits=0), dict(block_m=3), dict(num_warps=0)], ids=str)
def test_a_config_of_an_epilogue_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="|".join(changes)):
        EpilogueConfig(**{**dict(block_m=8, block_n=64, num_warps=1, splits=4), **changes})


LADDER_SHAPES = by_device(
    cpu=[(37, 90, 41)], gpu=[(37, 90, 41), (1024, 1024, 1024), (16, 3072, 768), (1000, 770, 333)]
)


@pytest.mark.covering(2)
@pytest.mark.parametrize("transpose_w", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", LADDER_SHAPES, ids=str)
def test_every_algorithm(reference, dtype, tolerance, shape, algorithm, transpose_w):
    x, w, bias, residual = operands(shape, dtype, seed=12)
    options = dict(bias=bias, residual=residual, activation="gelu", algorithm=algorithm, transpose_w=transpose_w)
    out = kernel(x, w.T if transpose_w else w, **options)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation="gelu"), tolerance)


@hypothesis.given(
    st.sampled_from(ALGORITHMS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.booleans()
)
def test_every_algorithm_takes_any_shape(algorithm, m, k, n, transpose_w):
    x, w, bias, _ = operands((m, k, n), seed=m)
    out = kernel(x, w.T if transpose_w else w, bias=bias, transpose_w=transpose_w, algorithm=algorithm)
    assert_close(out, compiled.matmul(x, w, bias=bias, implementation="xla"), LONG)


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("k", [75, 80])
def test_parts_of_the_contraction(reference, k, splits):
    # 5 blocks of K, the last ragged or whole: parts of several, and with 8 parts some with nothing at all.
    x, w, bias, residual = operands((21, k, 37), seed=13)
    config = Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=2, splits=splits)
    for algorithm in (None, "split_k"):
        out = kernel(x, w, bias=bias, residual=residual, activation="silu", algorithm=algorithm, config=config)
        assert_close(out, reference.compute(reference.matmul, x, w, bias, residual, activation="silu"), SHORT)


@pytest.mark.parametrize("algorithm", [None, "split_k"])
def test_float16_accumulation_of_parts(reference, algorithm):
    x, w, _, _ = operands((20, 512, 48), "float16", seed=14)
    out = kernel(x, w, acc_dtype="float16", out_dtype="float32", algorithm=algorithm)
    assert_close(out, reference.compute(reference.matmul, x, w), FLOAT16_SUM)


def test_transposed_weights_are_not_copied():
    x, w, _, _ = operands((128, 64, 256), "bfloat16")
    with cuda_device(*HOPPER):
        for name, call in (("triton", TRITON_CALL), ("mosaic", MOSAIC_CALL)):
            f = functools.partial(ops.matmul, transpose_w=True, implementation=name)
            text = lowered_for_cuda(f, x, w.T)
            assert text.count(f"@{call}") == 1
            assert "stablehlo.transpose" not in text


def test_gradients_of_transposed_weights(reference):
    x, w, bias, residual = operands((9, 31, 22), seed=15)
    arrays = x, w.T, bias, residual
    cotangent = normal(np.random.default_rng(16), 9, 22)

    def in_torch(x, w, bias, residual):
        return reference.F.silu(reference.F.linear(x, w, bias)) + residual  # torch's own layout

    def f(x, w, bias, residual):
        return kernel(x, w, transpose_w=True, bias=bias, residual=residual, activation="silu")

    expected = reference.gradients(in_torch, arrays, cotangent)
    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


BATCHES = [  # axes before the last two of x and of w
    ((3,), (3,)),
    ((2, 3), (2, 3)),
    ((), (3,)),
    ((2, 1), (3,)),
    ((2, 1), (1, 3)),
    ((2, 3), (1, 1)),  # one matrix for all
    ((1,), (1,)),
]


def batched_operands(x_batch, w_batch, dtype: str = "float32", sizes=(17, 24, 19)) -> tuple[jax.Array, ...]:
    """x, w, bias and residual."""
    m, k, n = sizes
    rng = np.random.default_rng(17)
    batch = np.broadcast_shapes(x_batch, w_batch)
    return (
        normal(rng, *x_batch, m, k, dtype=dtype),
        normal(rng, *w_batch, k, n, dtype=dtype, scale=k**-0.5),
        normal(rng, n, dtype=dtype, shift=0.3),
        normal(rng, *batch, m, n, dtype=dtype),
    )


def batched_in_torch(reference, x, w, bias, residual):
    return reference.F.gelu(x @ w + bias) + residual


@pytest.mark.parametrize("x_batch, w_batch", BATCHES, ids=str)
def test_batches(reference, implementation, x_batch, w_batch):
    x, w, bias, residual = batched_operands(x_batch, w_batch)
    options = dict(bias=bias, residual=residual, activation="gelu", implementation=implementation)
    expected = reference.compute(functools.partial(batched_in_torch, reference), x, w, bias, residual)
    assert_close(compiled.matmul(x, w, **options), expected, SHORT)
    assert_close(compiled.matmul(x, jnp.swapaxes(w, -1, -2), transpose_w=True, **options), expected, SHORT)


@pytest.mark.parametrize("sizes", by_device(cpu=[(17, 24, 19)], gpu=[(512, 512, 512), (77, 385, 151)]), ids=str)
def test_batches_in_every_dtype(reference, dtype, tolerance, sizes):
    x, w, bias, residual = batched_operands((4,), (4,), dtype, sizes)
    for algorithm in (None, "split_k"):
        out = kernel(x, w, bias=bias, residual=residual, activation="gelu", algorithm=algorithm)
        assert out.dtype == dtype
        expected = reference.compute(functools.partial(batched_in_torch, reference), x, w, bias, residual)
        assert_close(out, expected, tolerance)


@pytest.mark.parametrize("x_batch, w_batch", [((3,), (3,)), ((2, 1), (3,))], ids=str)
def test_gradients_of_batches(reference, x_batch, w_batch):
    arrays = batched_operands(x_batch, w_batch)
    cotangent = normal(np.random.default_rng(18), *arrays[-1].shape)

    def f(x, w, bias, residual):
        return kernel(x, w, bias=bias, residual=residual, activation="gelu")

    expected = reference.gradients(functools.partial(batched_in_torch, reference), arrays, cotangent)
    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


def test_batches_are_one_kernel_and_broadcast_without_copies():
    x, w, _, _ = batched_operands((2, 1), (3,), "bfloat16", (64, 64, 64))
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(lambda x, w: ops.matmul(x, w), x, w)
    assert text.count(f"@{TRITON_CALL}") == 1
    assert "stablehlo.broadcast_in_dim" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize("shape", [(0, 5, 7), (4, 0, 7), (4, 5, 0)], ids=str)
def test_nothing_to_multiply(shape):
    m, k, n = shape
    for batch in ((), (2,), (0,)):
        x, w, bias = jnp.ones((*batch, m, k)), jnp.ones((*batch, k, n)), jnp.full(n, 0.5)
        out = kernel(x, w, bias=bias)
        assert out.shape == (*batch, m, n)
        assert np.all(float64(out) == 0.5)  # an empty sum is 0


@pytest.mark.parametrize("group_m", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("tiles_m, tiles_n", [(1, 1), (7, 3), (8, 5), (16, 4), (17, 3), (43, 2)])
def test_tiles_are_walked_once_each_and_in_groups(tiles_m, tiles_n, group_m):
    count = tiles_m * tiles_n
    pids = jnp.arange(count, dtype=jnp.int32)
    rows, columns = map(np.asarray, jax.vmap(lambda pid: tile_order(pid, tiles_m, tiles_n, group_m))(pids))
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == count
    assert rows.max() == tiles_m - 1 and columns.max() == tiles_n - 1
    group = min(group_m, tiles_m)
    np.testing.assert_array_equal(rows // group, np.sort(rows // group))
    assert np.all(np.abs(np.diff(columns))[np.diff(rows // group) == 0] <= 1)


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("m", [1, 16, 100, 1024, 8192, 65536])
@pytest.mark.parametrize("n, k", [(1, 1), (384, 1536), (1152, 384), (4096, 12288), (24576, 4096)])
def test_heuristic(m, n, k, kib):
    target = gpu(shared_memory=kib * 1024)
    for dtype in (jnp.bfloat16, jnp.float32):
        config = matmul.heuristic(m, n, k, dtype, target)
        assert matmul.shared_memory(config, jnp.dtype(dtype).itemsize) <= target.shared_memory
        assert config.splits == 1 or matmul.num_tiles(config, m, n) < 2 * target.num_cores
        assert config.block_m <= max(2 * m, 128)
        assert matmul.heuristic(m, n, k, dtype, target, splits=(1,)).splits == 1
        # A batch that fills the GPU needs no parts.
        assert matmul.heuristic(m, n, k, dtype, target, batch=4096).splits == 1


def test_heuristic_splits_long_contractions_of_few_outputs():
    target = gpu()
    assert matmul.heuristic(128, 768, 3072, jnp.bfloat16, target).splits > 1
    sums = [
        matmul.heuristic(8192, 768, 3072, jnp.bfloat16, target, residual=residual) for residual in (False, True)
    ]
    assert [c.block_m * c.block_n // (32 * c.num_warps) for c in sums] == [128, 64]  # a thread's, of its registers
    large = matmul.heuristic(8192, 8192, 8192, jnp.bfloat16, target)
    assert (large.block_m, large.block_n, large.splits) == (128, 256, 1)


@without_gpu
@every_device
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_lowers_to_triton(device, algorithm):
    x, w, bias, residual = (jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in operands((256, 512, 130)))
    with cuda_device(*device):
        for transpose_w in (False, True):
            text = lowered_for_cuda(
                lambda x, w, bias, residual, t=transpose_w: ops.matmul(
                    x, w, transpose_w=t, bias=bias, residual=residual, activation="gelu", algorithm=algorithm
                ),
                x,
                jax.ShapeDtypeStruct(w.shape[::-1], w.dtype) if transpose_w else w,
                bias,
                residual,
            )
            assert text.count(f"@{TRITON_CALL}") == (2 if algorithm == "split_k" else 1)


X, W = operands((5, 6, 8))[:2]
ONE_ROW = Config(block_m=1, block_n=16, block_k=16, num_warps=1, num_stages=1)
IN_PARTS = Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1, splits=2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kernel(X, W, algorithm="fast"), "algorithm='fast' is unknown; expected None or one of ('naive'"),
        (lambda: kernel(X, W, algorithm="naive", config=IN_PARTS), "algorithm='naive' takes strips of one row"),
        (lambda: kernel(X, W, config=ONE_ROW), "block_m=1 is too small; expected at least 16"),
        (lambda: kernel(X, W, algorithm="tiled", config=IN_PARTS), "algorithm='tiled' does not split"),
        (lambda: kernel(X, W, algorithm="pipelined", config=IN_PARTS), "as splits=2 asks"),
        (lambda: kernel(X, W.T), "x has shape (5, 6) and w has shape (8, 6); expected (..., K) and (K, N)"),
        (lambda: kernel(X, W, transpose_w=True), "expected (..., K) and (N, K)"),
        (lambda: kernel(X, jnp.stack([W.T] * 2)), "w has shape (2, 8, 6); expected (..., M, K) and (K, N)"),
        (lambda: kernel(X[0], jnp.stack([W] * 2)), "x has shape (6,); expected (..., M, K)"),
        (
            lambda: kernel(jnp.stack([X] * 3), jnp.stack([W] * 2)),
            "x has shape (3, 5, 6) and w has shape (2, 6, 8); expected batch axes that can be broadcast",
        ),
        (
            lambda: kernel(X, jnp.stack([W] * 2), residual=jnp.ones((5, 8))),
            "residual has shape (5, 8); expected (2, 5, 8), the shape of the result",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("splits", [0, -1])
def test_an_impossible_number_of_parts_is_refused(splits):
    with pytest.raises(ValueError, match=f"splits={splits} must be positive"):
        Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1, splits=splits)


def hopper(block_m: int, block_n: int, *, ping_pong: bool, **options: int) -> mosaic.Config:
    return mosaic.Config(block_m=block_m, block_n=block_n, num_stages=2, ping_pong=ping_pong, **options)


# The interpreter runs two blocks.
NO_EDGES = "JAX 0.10 interprets neither what lies past the end of an array nor transposed operands"
edges = pytest.mark.skipif(MOSAIC != "mosaic" and jax.__version_info__ < (0, 11), reason=NO_EDGES)
HOPPER_CASES = [  # M, K, N
    ((128, 128, 128), hopper(128, 64, ping_pong=False), "gelu", False),
    ((128, 128, 192), hopper(64, 64, ping_pong=True), "gelu_tanh", False),  # several tiles for each warpgroup
    pytest.param((72, 320, 192), hopper(128, 128, ping_pong=False), "silu", True, marks=edges),  # ragged
    pytest.param((328, 64, 64), hopper(64, 64, ping_pong=True, group_m=2), "relu", False, marks=edges),
    pytest.param((136, 192, 320), hopper(128, 128, ping_pong=True, block_k=128), "sigmoid", True, marks=edges),
    # A right operand that stays: two CTAs for one column, one for each of two, and more columns than CTAs.
    ((384, 128, 128), hopper(64, 128, ping_pong=True, resident=True), "gelu", False),
    ((256, 128, 128), hopper(128, 64, ping_pong=False, resident=True), None, False),
    pytest.param(
        (136, 192, 192), hopper(64, 64, ping_pong=True, block_k=128, resident=True), "relu", True, marks=edges
    ),
]


@pytest.mark.parametrize("shape, config, activation, transpose_w", HOPPER_CASES)
def test_hopper_kernel(shape, config, activation, transpose_w):
    x, w, bias, residual = operands(shape, "bfloat16", seed=19)
    options = dict(transpose_w=transpose_w, bias=bias.astype("float32"), residual=residual, activation=activation)
    w = w.T if transpose_w else w
    expected = compiled.matmul(x, w, out_dtype="float32", implementation="xla", **options)
    out = compiled.matmul(x, w, config=config, implementation=MOSAIC, **options)
    assert out.dtype == "bfloat16"
    assert_close(out, expected, OP["bfloat16"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_of_the_hopper_kernel(reference, activation, dtype):
    # K of one element that counts: what reaches the activation is exact.
    x = jnp.zeros((128, 64), dtype).at[:, 0].set(jnp.linspace(-12, 12, 128).astype(dtype))
    w = jnp.zeros((64, 64), dtype).at[0].set(jnp.asarray([1.0, -1.0, 0.25, 64.0] * 16, dtype))
    out = compiled.matmul(
        x, w, activation=activation, config=hopper(128, 64, ping_pong=False), implementation=MOSAIC
    )
    assert_close(out, reference.compute(reference.matmul, x, w, activation=activation), OP[dtype])


@finds_races
@pytest.mark.parametrize(
    "config",
    [
        hopper(128, 64, ping_pong=False),
        hopper(64, 64, ping_pong=True),
        hopper(64, 64, ping_pong=True, resident=True),
    ],
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_hopper_kernel_has_no_races(config, has_residual):
    x, w, bias, residual = operands((256, 192, 128), "bfloat16", seed=23)
    residual = residual if has_residual else None
    with no_races():
        outs, expected = kept(mosaic, x, w, bias, residual, config=config, out_dtype="bfloat16")
    for out, wanted in zip(outs, expected, strict=True):
        assert_close(out, wanted, OP["bfloat16"])


@pytest.mark.parametrize("has_bias, has_residual", [(False, False), (True, True)])
@pytest.mark.parametrize("ping_pong, out_dtype", [(False, "float32"), (True, "bfloat16")])
def test_what_the_activation_of_the_hopper_kernel_is_applied_to(has_bias, has_residual, ping_pong, out_dtype):
    x, w, bias, residual = operands((256, 128, 128), "bfloat16", seed=34)
    bias, residual = bias if has_bias else None, residual.astype(out_dtype) if has_residual else None
    # More parts of a tile than there are slots for what is kept.
    config = hopper(128, 128, ping_pong=ping_pong)
    (out, y), (expected, wanted) = kept(mosaic, x, w, bias, residual, config=config, out_dtype=out_dtype)
    assert out.dtype == out_dtype and y.dtype == "bfloat16"
    assert_close(out, expected, OP["bfloat16"])
    assert_close(y, wanted, ROUNDED["bfloat16"])


@pytest.mark.parametrize("has_bias, has_residual", [(False, False), (True, False), (False, True)])
def test_hopper_kernel_rounds_once(has_bias, has_residual):
    x, w, bias, residual = operands((128, 128, 64), "float16", seed=20)
    bias, residual = bias if has_bias else None, residual.astype("float32") if has_residual else None
    options = dict(bias=bias, residual=residual, out_dtype="float32")
    out = compiled.matmul(x, w, config=hopper(128, 64, ping_pong=False), implementation=MOSAIC, **options)
    assert_close(out, compiled.matmul(x, w, implementation="xla", **options), SHORT)


@pytest.mark.parametrize(
    "shape",
    by_device(
        cpu=[],
        gpu=[
            (8192, 384, 1536),
            (8192, 1536, 384),
            (1024, 3072, 768),
            (1000, 768, 2304),
            (8, 64, 64),
            (4096, 4096, 4096),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_hopper_kernel_with_tiles_of_its_choice(shape, has_residual):
    x, w, bias, residual = operands(shape, "bfloat16", seed=21)
    options = dict(bias=bias, residual=residual if has_residual else None, activation="gelu")
    expected = compiled.matmul(x, w, out_dtype="float32", implementation="xla", **options)
    assert_close(compiled.matmul(x, w, implementation=MOSAIC, **options), expected, OP["bfloat16"])


def test_hopper_kernel_under_vmap_and_its_gradients():
    x, w, bias, _ = operands((2 * 64, 64, 64), "bfloat16", seed=22)
    x = x.reshape(2, 64, 64)

    def loss(x, w, bias, implementation, config=None):
        one = functools.partial(
            compiled.matmul, w=w, bias=bias, out_dtype="float32", implementation=implementation, config=config
        )
        return jnp.sum(jax.vmap(one)(x) ** 2)

    out, gradients = jax.value_and_grad(loss, (0, 1, 2))(x, w, bias, MOSAIC, hopper(64, 64, ping_pong=True))
    wide = [a.astype("float32") for a in (x, w, bias)]  # XLA on a CPU may add up bfloat16 in bfloat16
    expected, wanted = jax.value_and_grad(loss, (0, 1, 2))(*wide, "xla")
    assert_close(out, expected, SHORT)
    for gradient, one in zip(gradients, wanted, strict=True):
        assert_close(gradient, one, OP["bfloat16"])


@without_gpu
@pytest.mark.parametrize(
    "config",
    [
        hopper(128, 128, ping_pong=False),
        hopper(128, 128, ping_pong=True),
        hopper(64, 64, ping_pong=True, resident=True),
    ],
)
@pytest.mark.parametrize("dtype, out_dtype", [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_hopper_kernel_lowers(dtype, out_dtype, config):
    x, w, bias, residual = (jax.ShapeDtypeStruct(a.shape, dtype) for a in operands((264, 512, 192)))
    options = dict(activation="gelu", out_dtype=out_dtype, config=config, implementation="mosaic")

    def f(x, w, bias, residual):
        return ops.matmul(x, w, bias=bias, residual=residual, **options)

    residual = jax.ShapeDtypeStruct(residual.shape, out_dtype)
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(f, x, w, bias, residual)
    assert text.count(f"@{MOSAIC_CALL}") == 1
    assert "stablehlo.dot" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    "m, n, k, call",
    [
        (120, 3072, 1024, TRITON_CALL),
        (128, 1536, 384, TRITON_CALL),  # as short as the kernels beside it
        (128, 3072, 768, MOSAIC_CALL),
        (256, 1536, 384, MOSAIC_CALL),
    ],
)
def test_the_kernel_of_short_products(m, n, k, call):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    with cuda_device(*HOPPER):
        assert lowered_for_cuda(ops.matmul, x, w).count(f"@{call}") == 1


@pytest.mark.parametrize("m", [8, 1024, 8192, 65536])
@pytest.mark.parametrize("n, k", [(64, 64), (384, 1536), (1152, 384), (4096, 12288), (24576, 4096)])
def test_hopper_heuristic(m, n, k):
    for out_dtype in ("bfloat16", "float32"):
        for residual in (False, True):
            for kept in (None, "bfloat16"):
                options = dict(out_dtype=out_dtype, residual=residual, preactivation=kept)
                config = mosaic.heuristic(m, n, k, gpu(), **options)
                assert mosaic.shared_memory(config, k, **options) <= 227 * 1024


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        hopper(128, 256, ping_pong=False),
        hopper(64, 64, ping_pong=True, num_slots=4),
        hopper(192, 128, ping_pong=False, num_consumers=3),
    ],
    ids=str,
)
def test_outputs_leave_once_through_memory_that_is_counted(config, joined, whole, dtype):
    staging = Staging.of(config, config.block_n, dtype, whole=whole, joined=joined)
    slots = staging.scratch_type
    assert staging.num_bytes == math.prod(slots.shape) * jnp.dtype(dtype).itemsize
    assert slots.shape[0] == config.num_consumers and slots.shape[1] <= len(staging.blocks)
    left = np.zeros((config.rows, config.block_n), int)
    for block in staging.blocks:
        block.of(left)[...] += 1
    assert np.all(left == 1)


@pytest.mark.parametrize(
    "m, n, k, activation, block_k",
    [
        (8192, 1152, 384, False, 128),
        (32768, 1152, 384, False, 64),  # which do not stay in the L2 cache
        (32768, 1536, 384, True, 128),
        (1024, 1152, 384, False, None),  # a tile for each CTA: nothing is read again
        (8192, 2304, 768, False, None),  # no room
    ],
)
def test_short_contractions_keep_the_right_operand(m, n, k, activation, block_k):
    config = mosaic.heuristic(m, n, k, gpu(), out_dtype="float16", activation=activation)
    assert (config.resident, config.resident and config.block_k) == (block_k is not None, block_k or False)


def test_several_right_operands_do_not_stay():
    x, w = jnp.ones((64, 64), "bfloat16"), jnp.ones((64, 2, 64), "bfloat16")
    config = mosaic.Config(block_m=64, block_n=128, num_stages=2, ping_pong=True, resident=True)
    with pytest.raises(ValueError, match="keeps one right operand of one length; gated_matmul has several"):
        ops.gated_matmul(x, w, config=config, implementation=MOSAIC)


HALF = functools.partial(jnp.ones, dtype="bfloat16")


@pytest.mark.parametrize(
    "arrays, options, message",
    [
        ((jnp.ones((64, 64)), jnp.ones((64, 64))), {}, "takes float16 and bfloat16, not float32"),
        ((HALF((64, 64)),) * 2, {"algorithm": "tiled"}, "has none of the algorithms of the Triton kernel"),
        ((HALF((64, 64)),) * 2, {"config": CONFIGS[0]}, "takes a Config of pallas_models.kernels.mosaic"),
        ((HALF((2, 64, 64)),) * 2, {}, "takes no batch of weights"),
        ((HALF((64, 64), dtype="float16"),) * 2, {"acc_dtype": "float16"}, "accumulates in float32, not float16"),
    ],
)
def test_what_no_kernel_of_mosaic_serves(arrays, options, message):
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        ops.matmul(*arrays, implementation=MOSAIC, **options)


@pytest.mark.parametrize(
    "m, n, k, options, message",
    [
        (12, 64, 64, {}, "in multiples of 64, not x of shape (12, 64)"),
        (64, 64, 72, {}, "in multiples of 64, not x of shape (64, 72)"),
        (64, 72, 64, {}, "in multiples of 64, not w of shape (64, 72)"),
        (64, 72, 64, {"transpose_w": True}, "not the result of shape (64, 72)"),
        (64, 64, 64, {"residual": jnp.ones((64, 64))}, "a residual of the dtype of the result, bfloat16"),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(m, n, k, options, message):
    w = HALF((n, k) if options.get("transpose_w") else (k, n))
    form = Form(x=HALF((m, k)), w=w, precision=jax.lax.Precision.DEFAULT, out_dtype=HALF((1,)).dtype, **options)
    assert message in mosaic.unsupported(form, gpu())


@pytest.mark.parametrize(
    "field, value",
    [
        ("block_m", 96),
        ("block_n", 100),
        ("block_n", 320),
        ("block_k", 32),
        ("num_stages", 1),
        ("num_consumers", 4),
    ],
)
def test_hopper_tiles_of_no_possible_size_are_refused(field, value):
    sizes = dict(block_m=128, block_n=128, block_k=64, num_stages=2, ping_pong=False)
    with pytest.raises(ValueError, match=rf"{field}={value} must be"):
        mosaic.Config(**{**sizes, field: value})


def test_hopper_tiles_fit_in_registers():
    with pytest.raises(ValueError, match="has 256 sums a thread; expected 192 at most"):
        hopper(512, 128, ping_pong=False)
