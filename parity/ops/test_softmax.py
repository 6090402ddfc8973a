"""`ops.softmax` against torch: algorithms, axes, masks, extreme values, tiles, splits, gradients."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.forms.softmax import ALGORITHMS, Form
from pallas_models.kernels.triton import softmax
from pallas_models.kernels.triton.softmax import Config
from pallas_models.kernels.triton.softmax_backward import Config as BackwardConfig
from pallas_models.kernels.triton.softmax_backward import softmax_backward
from parity.support.common import (
    KERNEL,
    ON_GPU,
    TRITON_CALL,
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
    without_gpu,
)
from parity.support.tolerances import GRADIENT, LONG, OP, SHORT

SHAPES = by_device(
    cpu=[
        (1, 1),
        (5, 33),  # odd
        (2, 3, 64),  # a power of two, leading axes
        (3, 9001),  # more than one block of columns where rows are walked, split between programs
    ],
    gpu=[
        (2048, 4096),
        (8192, 1024),
        (4096, 768),
        (64, 128, 384),
        (3, 5, 7),
        (1001, 333),
        (5, 32768),
    ],
)
LONGEST = by_device(cpu=[(1_000_003,)], gpu=[(1_000_003,), (3, 2**21), (64, 65536), (300, 65536)])
WALKED = [name for name in ALGORITHMS if name != "fused"]
FORMS = [dict(implementation="xla"), *(dict(implementation=KERNEL, algorithm=name) for name in ALGORITHMS)]
every_form = pytest.mark.parametrize("options", FORMS, ids=lambda options: "-".join(options.values()))
kernel = functools.partial(compiled.softmax, implementation=KERNEL)


@functools.cache
def jitted(**options):
    return jax.jit(lambda x, where=None: ops.softmax(x, where=where, **options))


def draw(*shape: int, dtype: str = "float32", seed: int = 0, scale: float = 3.0) -> jax.Array:
    return normal(np.random.default_rng(seed), *shape, dtype=dtype, scale=scale)


def holes(*shape: int, seed: int = 0) -> jax.Array:
    """A mask with holes; of the rows along the last axis the first keeps nothing, the last only its end."""
    mask = np.random.default_rng(seed).integers(0, 2, shape)
    rows = mask.reshape(-1, shape[-1])
    rows[0] = 0
    if len(rows) > 1:
        rows[-1] = 0
        rows[-1, -1] = 1
    return jnp.asarray(mask, jnp.int32)


@pytest.mark.covering(2)
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, dtype, tolerance, shape, algorithm):
    x = draw(*shape, dtype=dtype)
    out = jitted(algorithm=algorithm, implementation=KERNEL)(x)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.softmax, x), tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_xla_against_torch(reference, dtype, tolerance, shape):
    x = draw(*shape, dtype=dtype)
    out = jitted(implementation="xla")(x)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.softmax, x), tolerance)


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [None, "naive"])
@pytest.mark.parametrize("shape", LONGEST, ids=str)
def test_a_million_columns(reference, shape, algorithm):
    x = draw(*shape, dtype="float16")
    out = jitted(algorithm=algorithm, implementation=KERNEL)(x)
    wide = reference.compute(reference.softmax, x)
    expected = wide.astype(np.float16)  # numbers as small as these are subnormal in float16
    np.testing.assert_allclose(float64(out), expected, rtol=2e-3, atol=1.3e-7)
    np.testing.assert_allclose(float64(out).sum(-1), expected.astype(np.float64).sum(-1), rtol=1e-3)
    exact = jitted(algorithm=algorithm, implementation=KERNEL)(x.astype("float32"))
    assert_close(exact, wide, OP["float32"])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_every_axis(reference, implementation, axis):
    x, where = draw(4, 5, 6), holes(4, 5, 6)
    out = compiled.softmax(x, axis=axis, where=where, implementation=implementation)
    assert_close(out, reference.compute(reference.softmax, x, axis, where=where), SHORT)


def test_one_and_many_axes(implementation):
    x = draw(2, 3, 2, 2, 21)
    out = compiled.softmax(x, implementation=implementation)
    assert_close(compiled.softmax(x[1, 2, 0, 1], implementation=implementation), out[1, 2, 0, 1], SHORT)
    assert_close(jnp.sum(out, -1), np.ones(x.shape[:-1]), SHORT)


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scale", [0.125, 3.0, -2.0, 0.0])
def test_scale(reference, algorithm, scale):
    x, where = draw(5, 33), holes(5, 33)
    for kept in (None, where):
        expected = reference.compute(reference.softmax, x, where=kept, scale=scale)
        assert_close(kernel(x, where=kept, scale=scale, algorithm=algorithm), expected, SHORT)
        assert_close(compiled.softmax(x, where=kept, scale=scale, implementation="xla"), expected, SHORT)


MASK_SHAPES = [
    (37,),
    (1,),
    (3, 1, 1, 37),
    (1, 2, 1, 37),
    (3, 2, 5, 37),
    (5, 37),
    (3, 1, 5, 37),
    (2, 1, 1),
    (2, 1, 37),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_are_broadcast(reference, shape, algorithm):
    x, where = draw(3, 2, 5, 37), holes(*shape, seed=1)
    expected = reference.compute(reference.softmax, x, where=where)
    config = Config(block_m=4, block_n=64 if algorithm == "fused" else 16, num_warps=1)
    masks = [where, where.astype(bool)] if algorithm == "fused" else [where]  # read alike by all
    for out in (
        *(kernel(x, where=mask, algorithm=algorithm, config=config) for mask in masks),
        compiled.softmax(x, where=where, implementation="xla"),
    ):
        if np.any(expected):  # a mask of one entry keeps nothing
            assert_close(out, expected, SHORT)
        assert np.all(float64(out)[expected == 0.0] == 0.0)


@every_form
@pytest.mark.parametrize("garbage", [1e4, np.inf, -np.inf, np.nan])
def test_masked_entries_never_reach_the_result(options, garbage):
    x, where = draw(5, 33), holes(5, 33)
    f = functools.partial(compiled.softmax, where=where, **options)
    assert_equal(f(jnp.where(where == 0, garbage, x)), f(x))


EXTREMES = [
    [1e4, -1e4, 0.0, 9999.0],
    [-1e4, -1e4, -1e4, -10001.0],
    [-np.inf, 2.0, -np.inf, 1.0],  # an additive mask
    [-np.inf, -np.inf, -np.inf, -7.0],  # one valid key
    [float(np.finfo(np.float32).min)] * 4,
    [1e30, 3e38, 3e38, -3e38],
    [-np.inf] * 4,  # NaN from here on
    [np.inf, 1.0, 2.0, 3.0],
    [np.inf, np.inf, -np.inf, 3.0],
    [np.nan, 1.0, 2.0, 3.0],
    [1.0, np.nan, -np.inf, 3.0],
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("algorithm", ["xla", *ALGORITHMS])
def test_extreme_values(reference, algorithm, splits):
    x = jnp.asarray(EXTREMES, jnp.float32)
    x = jnp.concatenate([jnp.tile(x, 5), jnp.full((len(x), 30), -jnp.inf)], axis=1)
    if algorithm == "xla":
        out = compiled.softmax(x, implementation="xla")
    else:
        block_n = 64 if algorithm == "fused" else 16
        splits = splits if algorithm == "online" else 1
        config = Config(block_m=2, block_n=block_n, num_warps=1, splits=splits)
        out = kernel(x, algorithm=algorithm, config=config)
    expected = reference.compute(reference.softmax, x)
    np.testing.assert_allclose(float64(out), expected, rtol=2e-6, atol=1e-30)
    assert np.all(np.isfinite(expected[:6])) and np.all(np.isnan(expected[6:]))


def test_parts_of_rows_far_below_zero():
    # Three parts are merged as four, of which the last must not count, nor its maximum.
    x = draw(5, 200) - 1000.0
    config = Config(block_m=2, block_n=16, num_warps=1, splits=3)
    out = kernel(x, algorithm="online", config=config)
    assert_close(out, compiled.softmax(x, implementation="xla"), SHORT)


@every_form
def test_kept_entries_that_are_all_minus_infinity(options):
    x = jnp.full((2, 20), -jnp.inf).at[:, 3].set(1.0)
    where = jnp.ones((2, 20), jnp.int32).at[:, 3].set(0).at[1].set(0)
    out = float64(compiled.softmax(x, where=where, **options))
    assert np.all(np.isnan(out[0, np.arange(20) != 3]))
    assert out[0, 3] == 0.0
    assert np.all(out[1] == 0.0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_m, block_n", [(1, 64), (4, 16), (8, 256)])
@pytest.mark.parametrize("shape", [(33, 50), (16, 64), (5, 200)], ids=str)
def test_every_tile_config(reference, shape, block_m, block_n, splits):
    x, where = draw(*shape), holes(*shape)
    config = Config(block_m=block_m, block_n=block_n, num_warps=2, splits=splits)
    for algorithm in ALGORITHMS:
        if (algorithm == "fused" and block_n < shape[1]) or (algorithm != "online" and splits > 1):
            continue
        out = kernel(x, where=where, algorithm=algorithm, config=config)
        assert_close(out, reference.compute(reference.softmax, x, where=where), SHORT)


@hypothesis.given(
    st.sampled_from([(1, 1), (39, 33), (6, 300)]),  # few, for each is compiled
    st.sampled_from([("naive", 1), ("online", 1), ("online", 4), ("fused", 1)]),
    st.floats(1e-3, 1e3),
    st.integers(0, 9),
)
def test_any_values(reference, shape, form, magnitude, seed):
    x, where = draw(*shape, seed=seed, scale=magnitude), holes(*shape, seed=seed)
    algorithm, splits = form
    config = Config(block_m=4, block_n=512 if algorithm == "fused" else 32, num_warps=1, splits=splits)
    out = kernel(x, algorithm=algorithm, config=config)
    assert_close(out, reference.compute(reference.softmax, x), LONG)
    masked = float64(kernel(x, where=where, algorithm=algorithm, config=config))
    assert np.all(masked[np.asarray(where) == 0] == 0.0)
    np.testing.assert_allclose(masked.sum(-1), np.any(where, axis=-1), atol=2e-6)
    if np.any(where):
        assert_close(masked, reference.compute(reference.softmax, x, where=where), LONG)


@pytest.mark.parametrize("value", [0, -2, 48])
@pytest.mark.parametrize("field", ["block_m", "block_n", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        Config(**{**dict(block_m=4, block_n=64, num_warps=2), field: value})


def test_configs_that_do_not_fit_the_algorithm_are_refused():
    with pytest.raises(ValueError, match="splits=0 must be positive"):
        Config(block_m=1, block_n=16, num_warps=1, splits=0)
    x = draw(2, 50)
    with pytest.raises(ValueError, match="'fused' needs block_n of at least 50"):
        kernel(x, algorithm="fused", config=Config(block_m=1, block_n=32, num_warps=1))
    for algorithm in ("fused", "naive"):
        with pytest.raises(ValueError, match="only algorithm='online' splits rows"):
            kernel(x, algorithm=algorithm, config=Config(block_m=1, block_n=64, num_warps=1, splits=2))
    with pytest.raises(NotImplementedError, match="40000 columns are not supported, expected at most 32768"):
        kernel(jnp.zeros((1, 40000)), algorithm="fused")


@pytest.mark.parametrize("m", [1, 3, 100, 2048, 65536])
@pytest.mark.parametrize("n", [1, 16, 384, 4096, 32768, 65536, 2**20])
def test_heuristic(m, n):
    target = gpu(shared_memory=0)
    assert softmax.fastest(n) == ("fused" if n <= 32768 else "online")
    for algorithm in ALGORITHMS if n <= 32768 else WALKED:
        config = softmax.heuristic(m, n, algorithm, target)
        assert config.splits <= max(-(-n // config.block_n), 1)
        assert config.splits == 1 or m * config.splits < 264 + m
        assert config.block_m == 1 or m >= 4 * 132 * (config.block_m // 2)
        assert config.block_m * config.block_n <= 1024 * max(config.num_warps, 4)


@pytest.mark.covering(2)
@without_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm, splits", [("naive", 1), ("online", 1), ("online", 3), ("fused", 1)])
@pytest.mark.parametrize("shape", [(7, 1000), (64, 1024)], ids=["odd", "even"])
def test_every_algorithm_lowers_to_triton(shape, algorithm, splits, dtype):
    block_n = 1024 if algorithm == "fused" else 256
    config = Config(block_m=4, block_n=block_n, num_warps=4, splits=splits)
    x = jax.ShapeDtypeStruct(shape, dtype)
    masks = [jax.ShapeDtypeStruct(s, jnp.bool_) for s in ((shape[1],), shape)]
    options = dict(scale=0.5, algorithm=algorithm, config=config, implementation="triton")
    with cuda_device("NVIDIA H200", 132):
        for where in (None, *masks):
            f = jax.jit(lambda x, where: ops.softmax(x, where=where, **options))
            text = f.trace(x, where).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count(f"@{TRITON_CALL}") == (1 if splits == 1 else 2)


@every_form
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(reference, options, masked):
    x, cotangent = draw(9, 31, seed=7), normal(np.random.default_rng(8), 9, 31)
    where = holes(9, 31, seed=7) if masked else None
    if masked:  # what is masked must not overflow in the gradient either
        x = jnp.where(where == 0, 1e4, x - 200)
    kept = reference.tensor(where)
    expected = reference.gradients(lambda x: reference.softmax(x, where=kept, scale=0.5), [x], cotangent)
    assert not masked or np.all(expected[0][0] == 0.0)

    def f(x):
        return compiled.softmax(x, where=where, scale=0.5, **options)

    assert_gradients_close(f, [x], cotangent, expected, GRADIENT)


def test_nothing_to_sum():
    for shape in ((0, 5), (5, 0), (0,)):
        assert kernel(jnp.zeros(shape)).shape == shape


@pytest.mark.parametrize("shape", [(5, 33), (3, 9001), (2, 16400)], ids=str)
def test_gradients_in_every_dtype(reference, dtype, tolerance, shape):
    x = draw(*shape, dtype=dtype, seed=20)
    cotangent = draw(*shape, dtype=dtype, seed=21)
    expected = reference.gradients(lambda x: reference.softmax(x, scale=0.5), [x], cotangent)

    def f(x):
        return kernel(x, scale=0.5)

    assert traces("softmax_backward", jax.grad(lambda x: jnp.sum(f(x))), x)
    assert_gradients_close(f, [x], cotangent, expected, max(tolerance, GRADIENT))


@pytest.mark.parametrize("config", [(1, 16, 1), (4, 64, 2), (16, 256, 4)], ids=str)
@pytest.mark.parametrize("shape", [(33, 200), (16, 64)], ids=str)
def test_every_config_of_the_gradient(shape, config):
    out = ops.softmax(draw(*shape, seed=22), implementation="xla")
    cotangent = draw(*shape, seed=23)
    block_m, block_n, num_warps = config
    config = BackwardConfig(block_m=block_m, block_n=block_n, num_warps=num_warps)
    options = dict(wanted=(True, False), config=config, target=gpu(), interpret=not ON_GPU)

    @jax.jit
    def backward(x, out, dout):
        form = Form(x=x, where=None, scale=0.3, repeat=1, algorithm=None)
        return softmax_backward(form, [out], [dout], **options)

    dx, none = backward(out, out, cotangent)
    assert none is None
    y, dy = float64(out), float64(cotangent)
    assert_close(dx, y * (dy - np.sum(y * dy, axis=-1, keepdims=True)) * 0.3, GRADIENT)


@pytest.mark.parametrize("garbage", [np.inf, np.nan])
def test_what_is_masked_has_no_gradient_whatever_its_cotangent(garbage):
    x = draw(4, 33, seed=24)
    where = jnp.asarray(np.random.default_rng(25).integers(0, 2, (4, 33)), jnp.int32).at[1].set(0)
    cotangent = draw(4, 33, seed=26)
    _, pull = jax.vjp(lambda x: kernel(x, where=where), x)
    (expected,), (out,) = pull(cotangent), pull(jnp.where(where == 0, garbage, cotangent))
    assert_equal(out, expected)
    assert not np.any(float64(out)[np.asarray(where) == 0])
