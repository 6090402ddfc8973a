"""`ops.gated_matmul` and `ops.gated_mlp` against torch: shapes, activations, tiles, extremes, gradients."""

import dataclasses
import functools
import itertools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.forms.gated_mlp import Form
from pallas_models.kernels.mosaic import gated_mlp as mosaic
from pallas_models.kernels.mosaic import gated_mlp_backward as mosaic_backward
from pallas_models.kernels.triton import gated_mlp
from pallas_models.kernels.triton import gated_mlp_backward as triton_backward
from pallas_models.kernels.triton.matmul import Config
from pallas_models.ops.gated_mlp import reference as reference_of
from parity.ops.test_lowering import HOPPER, every_device, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    array,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    cuda_device,
    float64,
    gpu,
    interprets_mosaic,
    kernel_calls,
    normal,
    without_gpu,
)
from parity.support.tolerances import GRADIENT, LONG, OP, ROUNDED, SHORT, TF32

SHAPES = by_device(  # M, K, N
    cpu=[
        (1, 1, 1),
        (5, 33, 7),  # odd everywhere
        (64, 64, 64),  # whole tiles: no masks
        (70, 40, 129),  # several tiles each way, ragged: up starts where no tile does
    ],
    gpu=[
        (1, 1, 1),
        (16, 4096, 1536),
        (2048, 4096, 3072),
        (8192, 1024, 3072),
        (1000, 768, 2730),  # rows of w that are not aligned
        (77, 385, 1151),
    ],
)
kernel = functools.partial(compiled.gated_matmul, implementation=KERNEL)


def operands(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x, w_gate_up and bias, such that gates are of order one: where activations bend."""
    m, k, n = shape
    rng = np.random.default_rng(seed)
    return (
        normal(rng, m, k, dtype=dtype),
        normal(rng, k, 2, n, dtype=dtype, scale=k**-0.5),
        normal(rng, 2, n, dtype=dtype, shift=0.3),
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape):
    x, w, bias = operands(shape, dtype)
    out = jax.jit(functools.partial(ops.gated_matmul, implementation=implementation))(x, w, bias=bias)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.gated_matmul, x, w, bias), tolerance)


@pytest.mark.parametrize("activation", [None, *sorted(ops.ACTIVATIONS)])
def test_every_activation_with_and_without_bias(reference, implementation, activation):
    x, w, bias = operands((19, 24, 37), seed=1)
    for b in (None, bias):
        out = compiled.gated_matmul(x, w, activation=activation, bias=b, implementation=implementation)
        expected = reference.compute(reference.gated_matmul, x, w, b, activation=activation)
        assert_close(out, expected, LONG)


def test_gate_and_up_are_not_mixed_up():
    # Where up is 0 so is the result; where gate is 0 it is not, for a sigmoid.
    x, w, _ = operands((17, 20, 33), seed=2)
    assert_equal(kernel(x, w.at[:, 1].set(0.0)), jnp.zeros((17, 33)))
    half = kernel(x, w.at[:, 0].set(0.0), activation="sigmoid")
    assert_close(half, float64(x) @ float64(w)[:, 1] / 2, SHORT)


@pytest.mark.parametrize("block_m, block_n, block_k", [(16, 16, 16), (32, 48, 32), (64, 128, 64), (16, 256, 16)])
@pytest.mark.parametrize("shape", [(70, 53, 131), (64, 64, 256)], ids=str)
def test_every_tile_config(shape, block_m, block_n, block_k):
    x, w, bias = operands(shape, seed=3)
    config = Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4, num_stages=2, group_m=2)
    out = kernel(x, w, bias=bias, config=config)
    assert_close(out, compiled.gated_matmul(x, w, bias=bias, implementation="xla"), LONG)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3)], ids=str)
def test_leading_dimensions(reference, implementation, batch):
    x = normal(np.random.default_rng(4), *batch, 24)
    _, w, bias = operands((1, 24, 18), seed=4)
    out = compiled.gated_matmul(x, w, bias=bias, implementation=implementation)
    assert out.shape == (*batch, 18)
    assert_close(out, reference.compute(reference.gated_matmul, x, w, bias), SHORT)


def test_nothing_is_rounded_on_the_way(reference, implementation):
    x, w, _ = operands((21, 64, 30), "bfloat16", seed=5)
    bias = normal(np.random.default_rng(6), 2, 30)  # float32 beside bfloat16
    out = compiled.gated_matmul(x, w, bias=bias, out_dtype="float32", implementation=implementation)
    assert out.dtype == jnp.float32
    assert_close(out, reference.compute(reference.gated_matmul, x, w, bias), SHORT)


@pytest.mark.parametrize("precision", [None, "highest", "default"])
def test_precision_of_float32(reference, precision):
    x, w, bias = operands((33, 200, 50), seed=7)
    out = kernel(x, w, bias=bias, precision=precision)
    tolerance = TF32 if precision == "default" else LONG  # no TF32 unless asked for
    assert_close(out, reference.compute(reference.gated_matmul, x, w, bias), tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid"])
def test_extreme_gates(reference, implementation, activation):
    # One input is the gate, the other is 1 and the up of every column: what is multiplied is exact.
    gates = jnp.asarray([1e4, -1e4, 3e38, -3e38, 88.0, -88.0, -110.0, 1e-30, 0.0])
    x = jnp.stack([gates, jnp.ones_like(gates)], axis=1)
    w = jnp.asarray([[[1.0] * 3, [0.0] * 3], [[0.0] * 3, [1.0, -0.5, 0.25]]])
    out = compiled.gated_matmul(x, w, activation=activation, implementation=implementation)
    expected = reference.compute(reference.gated_matmul, x, w, activation=activation)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_overflow_is_infinite_and_stays_in_its_place(reference, implementation):
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.uniform(0.5, 1, (18, 40)), "float16").at[3].set(3e3).at[5, 0].set(np.nan)
    w = jnp.asarray(rng.uniform(0.5, 1, (40, 2, 20)) * rng.choice([-1, 1], (1, 1, 20)), "float16")
    out = float64(compiled.gated_matmul(x, w, activation="relu", implementation=implementation))
    expected = reference.compute(reference.gated_matmul, x, w, activation="relu")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[3], expected[3].astype(np.float16))
    assert np.any(np.isinf(out[3])) and np.all(np.isnan(out[5]))
    rest = np.setdiff1d(np.arange(18), [3, 5])
    assert_close(out[rest], expected[rest], 8e-4)


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("shape", [(33, 1, 1), (7, 24, 16)], ids=str)
def test_values_and_tangents_are_rounded_once(implementation, shape, scale):
    """Gates beyond float16, and tangents of them, where the result and its tangent are not."""
    m, k, n = shape
    rng = np.random.default_rng(17)

    def draw():
        sizes = np.asarray([scale, scale**-2])[:, None] * k**-0.5  # of gate and up
        w = array(rng.normal(size=(k, 2, n)) * sizes, "float16")
        return normal(rng, m, k, dtype="float16", scale=scale), w

    primals, tangents = draw(), draw()
    f = functools.partial(compiled.gated_matmul, activation=None, implementation=implementation)
    out, moved = jax.jvp(f, primals, tangents)
    (x, w), (dx, dw) = (tuple(map(float64, pair)) for pair in (primals, tangents))

    def product(x, w):
        return np.einsum("mk,kgn->gmn", x, w)

    (gate, up), (dgate, dup) = product(x, w), product(dx, w) + product(x, dw)
    x, w, dx, dw = map(np.abs, (x, w, dx, dw))
    sizes, changes = product(x, w), product(dx, w) + product(x, dw)
    assert (np.max(np.abs(gate)) > 65504) == (scale > 1.0)
    for result, exact, size in (
        (out, gate * up, sizes[0] * sizes[1]),
        (moved, dgate * up + gate * dup, changes[0] * sizes[1] + sizes[0] * changes[1]),
    ):
        # Rounded to float16, which has an end, after float32 sums of k products each, two of which are multiplied.
        bound = ROUNDED["float16"] * np.abs(exact) + 2.0**-25 + (2 * k + 4) * ROUNDED["float32"] * size
        excess = np.abs(float64(result) - exact) - bound
        assert np.all(excess <= 0.0), f"{np.sum(~(excess <= 0.0))} of {excess.size} are off"


@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_any_shape(m, k, n, seed):
    x, w, bias = operands((m, k, n), seed=seed)
    config = Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=2, group_m=2)
    out = kernel(x, w, bias=bias, activation="gelu_tanh", config=config)
    expected = compiled.gated_matmul(x, w, bias=bias, activation="gelu_tanh", implementation="xla")
    assert_close(out, expected, LONG)


@pytest.mark.parametrize("activation", [None, *sorted(ops.ACTIVATIONS)])
def test_gradients(reference, activation):
    arrays = operands((9, 31, 22), seed=10)
    cotangent = normal(np.random.default_rng(11), 9, 22)
    torch_function = functools.partial(reference.gated_matmul, activation=activation)
    expected = reference.gradients(torch_function, arrays, cotangent)

    def f(x, w, bias):
        return kernel(x, w, bias=bias, activation=activation)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


def mlp_operands(dtype: str = "float32", batch: tuple[int, ...] = (2, 9)) -> tuple[jax.Array, ...]:
    """x, w_gate_up, w_down and residual."""
    rng = np.random.default_rng(12)
    return (
        normal(rng, *batch, 33, dtype=dtype),
        normal(rng, 33, 2, 50, dtype=dtype, scale=33**-0.5),
        normal(rng, 50, 33, dtype=dtype, scale=50**-0.5),
        normal(rng, *batch, 33, dtype=dtype),
    )


def test_mlp(reference, implementation, dtype, tolerance):
    x, w_gate_up, w_down, residual = mlp_operands(dtype)
    for r, activation in ((None, "silu"), (residual, "gelu_tanh")):
        options = dict(residual=r, activation=activation)
        out = compiled.gated_mlp(x, w_gate_up, w_down, implementation=implementation, **options)
        assert out.dtype == dtype
        assert_close(out, reference.compute(reference.gated_mlp, x, w_gate_up, w_down, **options), tolerance)


def test_hidden_values_beyond_float16_are_infinite(reference, implementation):
    x, w_gate_up, w_down, _ = mlp_operands("float16", batch=(9,))
    x, w_down = x.at[3].mul(2.0**12), jnp.abs(w_down).at[:, 5].set(0.0)
    w_gate_up = jnp.abs(w_gate_up)  # so that they are of one sign in a row
    x = x.at[3].set(jnp.abs(x[3]))
    out = float64(compiled.gated_mlp(x, w_gate_up, w_down, implementation=implementation))
    assert np.isnan(out[3, 5]) and np.all(np.isposinf(np.delete(out[3], 5)))
    expected = reference.compute(reference.gated_mlp, x, w_gate_up, w_down)
    assert_close(np.delete(out, 3, 0), np.delete(expected, 3, 0), OP["float16"])


def test_gradients_of_mlp(reference):
    arrays = mlp_operands(batch=(11,))
    cotangent = normal(np.random.default_rng(13), 11, 33)
    expected = reference.gradients(reference.gated_mlp, arrays, cotangent)

    def f(x, w_gate_up, w_down, residual):
        return compiled.gated_mlp(x, w_gate_up, w_down, residual=residual, implementation=KERNEL)

    assert_gradients_close(f, arrays, cotangent, expected, GRADIENT)


def test_mlp_runs_as_two_kernels():
    arrays = mlp_operands("bfloat16")
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(lambda x, g, d, r: ops.gated_mlp(x, g, d, residual=r), *arrays)
    assert kernel_calls(text) == 2


def test_stacked_weights(reference):
    rng = np.random.default_rng(14)
    x, gate, up = normal(rng, 5, 8), normal(rng, 8, 6), normal(rng, 8, 6)
    stacked = ops.stack_gate_up(gate, up)
    expected = reference.compute(
        lambda x, gate, up: reference.F.silu(x @ gate) * (x @ up),
        x,
        gate,
        up,
    )
    assert_close(kernel(x, stacked), expected, SHORT)
    on_host = ops.stack_gate_up(np.asarray(gate), np.asarray(up))
    assert isinstance(on_host, np.ndarray) and isinstance(stacked, jax.Array)
    assert_equal(on_host, stacked)


@every_device
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowering(device, dtype):
    shapes = [(256, 128), (128, 2, 512), (2, 512)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with cuda_device(*device):
        text = lowered_for_cuda(lambda x, w, b: ops.gated_matmul(x, w, bias=b, implementation="triton"), *arrays)
    assert text.count(f"@{TRITON_CALL}") == 1
    assert "stablehlo.transpose" not in text and "stablehlo.dot" not in text


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("m, n, k", [(1, 64, 64), (16, 12288, 4096), (2048, 12288, 4096), (8192, 3072, 1024)])
def test_tiles_fit_in_shared_memory(m, n, k, kib):
    target = gpu(shared_memory=kib * 1024)
    for dtype in (jnp.bfloat16, jnp.float32):
        config = gated_mlp.heuristic(m, n, k, dtype, target)
        assert gated_mlp.shared_memory(config, jnp.dtype(dtype).itemsize) <= target.shared_memory
        assert config.splits == 1


edges = pytest.mark.skipif(MOSAIC != "mosaic" and jax.__version_info__ < (0, 11), reason="JAX 0.10 has no edges")


@pytest.mark.parametrize(
    "shape, config, has_bias",
    [
        ((128, 64, 128), dict(block_m=64, block_n=128, ping_pong=True), True),
        pytest.param((136, 192, 192), dict(block_m=128, block_n=256, ping_pong=False), False, marks=edges),
    ],
)
def test_hopper_kernel(shape, config, has_bias):
    x, w, bias = operands(shape, "bfloat16", seed=15)
    options = dict(bias=bias if has_bias else None, activation="silu")
    expected = compiled.gated_matmul(x, w, out_dtype="float32", implementation="xla", **options)
    out = compiled.gated_matmul(
        x, w, config=mosaic.Config(num_stages=2, **config), implementation=MOSAIC, **options
    )
    assert out.dtype == "bfloat16"
    assert_close(out, expected, OP["bfloat16"])


@pytest.mark.parametrize("shape", by_device(cpu=[], gpu=[(2048, 4096, 3072), (8192, 1024, 3072), (8, 64, 64)]))
def test_hopper_kernel_with_tiles_of_its_choice(shape):
    x, w, bias = operands(shape, "bfloat16", seed=16)
    expected = compiled.gated_matmul(x, w, bias=bias, out_dtype="float32", implementation="xla")
    assert_close(compiled.gated_matmul(x, w, bias=bias, implementation=MOSAIC), expected, OP["bfloat16"])


@without_gpu
def test_hopper_kernel_lowers():
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in [(256, 128), (128, 2, 512), (2, 512)]]
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(lambda x, w, b: ops.gated_matmul(x, w, bias=b, implementation="mosaic"), *arrays)
    assert text.count(f"@{MOSAIC_CALL}") == 1
    assert "stablehlo.transpose" not in text and "stablehlo.dot" not in text


@pytest.mark.parametrize("m, n, k", [(8, 64, 64), (2048, 12288, 4096), (8192, 3072, 1024)])
def test_hopper_tiles_fit_in_shared_memory(m, n, k):
    for out_dtype in ("bfloat16", "float32"):
        config = mosaic.heuristic(m, n, k, gpu(), out_dtype=out_dtype)
        assert mosaic.shared_memory(config, out_dtype) <= 227 * 1024


TILES = Config(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1)


@pytest.mark.parametrize(
    "m, k, n, dtype, message",
    [
        (8, 64, 64, "float32", "takes float16 and bfloat16, not float32"),
        (9, 64, 64, "bfloat16", "in multiples of 64, not x of shape (9, 64)"),
        (8, 64, 80, "bfloat16", "in multiples of 64, not gate and up of shape (64, 80)"),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(m, k, n, dtype, message):
    x, w, _ = operands((m, k, n), dtype)
    options = dict(activation=None, precision=jax.lax.Precision.DEFAULT, out_dtype=x.dtype)
    assert message in mosaic.unsupported(Form(x=x, w_gate_up=w, bias=None, **options), gpu())


def test_configs_of_another_backend_are_refused():
    x, w, _ = operands((8, 64, 64), "bfloat16")
    with pytest.raises(NotImplementedError, match=r"takes a Config of pallas_models\.kernels\.mosaic"):
        ops.gated_matmul(x, w, implementation=MOSAIC, config=TILES)


X, W, B = operands((5, 6, 8))
SPLIT = dataclasses.replace(TILES, splits=2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: kernel([1.0], W), TypeError, "x must be an array, got list"),
        (lambda: kernel(X, W > 0), TypeError, "w_gate_up has dtype bool; expected float16"),
        (lambda: kernel(X, W.astype("float16")), TypeError, "x has dtype float32 and w_gate_up has dtype float16"),
        (lambda: kernel(X[0, 0], W), ValueError, "x has shape (); expected (..., K)"),
        (lambda: kernel(X, W[:, 0]), ValueError, "w_gate_up has shape (6, 8); expected 3 axes, (K, 2, N)"),
        (lambda: kernel(X, W[:, :1]), ValueError, "w_gate_up has shape (6, 1, 8); expected (6, 2, 8), (K, 2, N)"),
        (lambda: kernel(X, W[1:]), ValueError, "w_gate_up has shape (5, 2, 8); expected (6, 2, 8), (K, 2, N)"),
        (lambda: kernel(X, W, activation="elu"), ValueError, "activation='elu' is unknown; expected None or"),
        (lambda: kernel(X, W, bias=B[0]), ValueError, "bias has shape (8,); expected (2, 8), (2, N)"),
        (lambda: kernel(X, W, bias=B > 0), TypeError, "bias has dtype bool; expected float16"),
        (lambda: kernel(X, W, precision="some"), ValueError, "some"),
        (lambda: kernel(X, W, config=3), TypeError, "config is a int; expected pallas_models.kernels"),
        (lambda: kernel(X, W, config=SPLIT), ValueError, "splits=2: a gated product does not split its"),
        (lambda: ops.gated_mlp(X, W, X), ValueError, "x has shape (5, 8) and w has shape (5, 6); expected"),
        (lambda: ops.gated_mlp(X, W, W[:, 0].T, residual=B), ValueError, "residual has shape (2, 8); expected"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("implementation", [KERNEL, MOSAIC])
def test_gradients_of_half_precision(reference, implementation, dtype):
    arrays = operands((64, 128, 64), dtype, seed=30)
    cotangent = normal(np.random.default_rng(31), 64, 64, dtype=dtype)
    expected = reference.gradients(reference.gated_matmul, arrays, cotangent)

    def f(x, w, bias):
        return ops.gated_matmul(x, w, bias=bias, implementation=implementation)

    assert_gradients_close(f, arrays, cotangent, expected, OP[dtype])


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_the_gradient_computes_no_product_again(backend):
    arrays = operands((64, 128, 64), "bfloat16")

    def pull(dout, *arrays):
        function = functools.partial(ops.gated_matmul, implementation=backend)
        return jax.vjp(lambda x, w, bias: function(x, w, bias=bias), *arrays)[1](dout)

    with cuda_device(*HOPPER):
        text = lowered_for_cuda(pull, arrays[0][:, :64], *arrays)
    assert kernel_calls(text) == 2 and text.count("stablehlo.dot_general") == 2
    assert text.count("gated_mlp_backward") >= 1 and "stablehlo.exponential" not in text


ACTIVATIONS = [None, *sorted(ops.ACTIVATIONS)]


def epilogue_gradient(activation):
    """Gate, up and the cotangent, and in float64 the cotangents of gate and up, (M, 2, N)."""
    rng = np.random.default_rng(33)
    gate, up, dout = normal(rng, 37, 90, scale=2.0), normal(rng, 37, 90), normal(rng, 37, 90)
    gate = gate.at[0, :7].set(jnp.asarray([-1e4, -30.0, -8.0, 1e-3, 8.0, 30.0, 1e4]))
    apply = {
        None: lambda x: x,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": jax.nn.gelu,
    }
    f = apply.get(activation) or getattr(jax.nn, activation)
    with jax.enable_x64(True):
        given = [x.astype("float64") for x in (gate, up, dout)]
        expected = jnp.stack(jax.vjp(lambda gate, up: f(gate) * up, *given[:2])[1](given[2]), axis=1)
        return (gate, up, dout), np.asarray(expected)


def check_epilogue(backward, arrays, expected):
    """The cotangents and their sums, and the cotangents alone; the row of extreme gates by itself."""
    dy, dbias = jax.jit(functools.partial(backward, has_bias=True))(*arrays)
    alone, absent = jax.jit(functools.partial(backward, has_bias=False))(*arrays)
    assert absent is None
    for found in (dy, alone):
        for part, rows in itertools.product((0, 1), (slice(1), slice(1, None))):
            assert_close(found[rows, part], expected[rows, part], SHORT)
    for part in (0, 1):
        assert_close(dbias[part], expected[:, part].sum(0), SHORT)


def epilogues(*configs):
    """Each activation with the config that is chosen for it, and one with each of those given."""
    cases = [(activation, None) for activation in ACTIVATIONS] + [("silu", config) for config in configs]
    return pytest.mark.parametrize("activation, config", cases, ids=str)


@epilogues((1, 16, 1, 1), (8, 64, 2, 3), (4, 128, 1, 40))
def test_the_gradient_of_the_epilogue(activation, config):
    arrays, expected = epilogue_gradient(activation)
    if config is not None:
        names = ("block_m", "block_n", "num_warps", "splits")
        config = triton_backward.Config(**dict(zip(names, config, strict=True)))
    options = dict(activation=activation, config=config, target=gpu(), interpret=KERNEL == "interpret")
    check_epilogue(functools.partial(triton_backward.gated_mlp_backward, **options), arrays, expected)


@interprets_mosaic
@epilogues((1, 2, 3), (16, 1, 40), (128, 3, 1))
def test_the_gradient_of_the_epilogue_in_mosaic(activation, config):
    arrays, expected = epilogue_gradient(activation)
    if config is not None:
        config = mosaic_backward.Config(**dict(zip(("threads", "block_m", "splits"), config, strict=True)))
    options = dict(activation=activation, config=config, target=gpu(), interpret=not ON_GPU)
    check_epilogue(functools.partial(mosaic_backward.gated_mlp_backward, **options), arrays, expected)


def test_products_that_are_kept_leave_the_ring_as_many_steps():
    for shape in [(8192, 12288, 4096), (2048, 12288, 4096), (8192, 3072, 1024)]:
        config = mosaic.heuristic(*shape, gpu(), out_dtype="bfloat16")
        assert mosaic.heuristic(*shape, gpu(), out_dtype="bfloat16", products="bfloat16") == config
        assert config.num_stages >= 3


@edges
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_m, block_n, ping_pong", [(64, 128, True), (192, 128, True), (128, 256, False)])
def test_both_products_of_the_hopper_kernel(block_m, block_n, ping_pong, out_dtype):
    arrays = operands((192, 128, 256), "bfloat16", seed=17)
    config = mosaic.Config(block_m=block_m, block_n=block_n, num_stages=2, ping_pong=ping_pong)

    def form(arrays, out_dtype):
        return Form(
            **dict(zip(Form.OPERANDS, arrays, strict=True)),
            activation="silu",
            precision=jax.lax.Precision.HIGHEST,
            out_dtype=jnp.dtype(out_dtype),
            return_products=True,
        )

    def call(*arrays):
        return mosaic.gated_matmul(form(arrays, out_dtype), config=config, target=gpu(), interpret=not ON_GPU)

    expected = reference_of(form([x.astype("float32") for x in arrays], "float32"))
    for found, right in zip(jax.jit(call)(*arrays), expected, strict=True):
        assert_close(found, right, OP["bfloat16"])
