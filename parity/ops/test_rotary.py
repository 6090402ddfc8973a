"""`ops.rotary` and its table against torch: shapes, tables, blocks, what a rotation keeps, gradients."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.forms.rotary import Form
from pallas_models.kernels.mosaic import rotary as mosaic
from pallas_models.kernels.mosaic import rotary_backward as mosaic_backward
from pallas_models.kernels.triton.rotary import Config
from pallas_models.kernels.triton.rotary_backward import Config as BackwardConfig
from pallas_models.kernels.triton.rotary_backward import rotary_backward
from pallas_models.ops.rotary import reference as xla
from parity.ops.test_lowering import lowered_for_cuda
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
    interprets_mosaic,
    normal,
    traces,
    without_gpu,
)
from parity.support.tolerances import DEEP, GRADIENT, SHORT

# batch, length, heads, key heads, width of a head
SHAPES = by_device(
    cpu=[
        (2, 9, 3, 1, 48),  # halves that are no power of two, four heads of three
        (1, 33, 16, 8, 128),  # Qwen3's
        (3, 1, 1, 1, 2),
    ],
    gpu=[
        (1, 1024, 32, 8, 128),
        (8, 2048, 16, 8, 128),
        (3, 77, 5, 5, 80),
        (512, 1, 32, 8, 128),
        (2, 300, 7, 1, 48),
    ],
)
kernel = functools.partial(compiled.rotary, implementation=KERNEL)


def operands(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """qkv and the scales of queries and keys."""
    batch, seq, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    scales = (normal(rng, head_dim, dtype=dtype, shift=1.0, scale=0.3) for _ in range(2))
    return normal(rng, batch, seq, (heads + 2 * kv_heads) * head_dim, dtype=dtype), *scales


def heads_of(out: jax.Array, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Queries, keys and values, (B, S, heads, head_dim) each."""
    batch, seq, heads, kv_heads, head_dim = shape
    return np.split(float64(out).reshape(batch, seq, -1, head_dim), (heads, heads + kv_heads), axis=2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("norm, by_row", [(False, True), (True, False)], ids=["positions-by-row", "norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape, norm, by_row):
    batch, seq, heads, kv_heads, head_dim = shape
    qkv, *scales = operands(shape, dtype)
    positions = jnp.arange(seq)
    if by_row:
        positions = positions + 5 * jnp.arange(batch)[:, None]
    table = ops.rotary_table(positions, head_dim, theta=1e4)
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads)

    @jax.jit
    def f(qkv, cos, sin, q_scale, k_scale):
        options = dict(q_scale=q_scale, k_scale=k_scale) if norm else {}
        return ops.rotary(qkv, cos, sin, **sizes, **options, implementation=implementation)

    out = f(qkv, *table, *scales)
    assert out.dtype == dtype
    expected = reference.compute(
        functools.partial(reference.rotary, **sizes), qkv, *table, *(scales if norm else ())
    )
    assert_close(out, expected, tolerance)
    assert_equal(heads_of(out, shape)[2], heads_of(qkv, shape)[2])  # values are untouched


def test_table(reference):
    torch = pytest.importorskip("torch")
    positions = np.array([[0, 1, 2, 1000], [7, 8191, 40959, 3]])
    cos, sin = ops.rotary_table(jnp.asarray(positions), 128, theta=1e6)
    assert cos.shape == sin.shape == (2, 4, 64)
    assert cos.dtype == sin.dtype == "float32"
    frequencies = (1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)).float()
    angles = (torch.tensor(positions)[..., None].float() * frequencies).double()  # float32 as everywhere
    np.testing.assert_allclose(cos, angles.cos(), atol=2e-7)
    np.testing.assert_allclose(sin, angles.sin(), atol=2e-7)


@hypothesis.given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from([(1, 1), (4, 2), (2, 8)]),
    st.booleans(),
)
def test_any_shape_and_blocks(batch, seq, heads, kv_heads, half, blocks, norm):
    shape = batch, seq, heads, kv_heads, 2 * half
    qkv, q_scale, k_scale = operands(shape, seed=seq)
    table = ops.rotary_table(jnp.arange(seq) + 3, 2 * half)
    options = dict(num_heads=heads, num_kv_heads=kv_heads, epsilon=0.1)
    if norm:
        options |= dict(q_scale=q_scale, k_scale=k_scale)
    config = Config(block_s=blocks[0], block_h=blocks[1], num_warps=1)
    out = kernel(qkv, *table, config=config, **options)
    assert_close(out, compiled.rotary(qkv, *table, implementation="xla", **options), SHORT)


SHAPE = (2, 11, 3, 2, 32)
SIZES = dict(num_heads=3, num_kv_heads=2)


def test_a_rotation_keeps_lengths_and_position_0():
    qkv, _, _ = operands(SHAPE, seed=1)
    out = kernel(qkv, *ops.rotary_table(jnp.arange(11), 32), **SIZES)
    assert_equal(out[:, 0], qkv[:, 0])
    for before, after in zip(heads_of(qkv, SHAPE), heads_of(out, SHAPE), strict=True):
        np.testing.assert_allclose(np.linalg.norm(after, axis=-1), np.linalg.norm(before, axis=-1), rtol=1e-6)


def test_scores_depend_on_the_distance_of_positions_only():
    qkv, q_scale, k_scale = operands(SHAPE, seed=2)
    scores = []
    for start in (0, 100):
        table = ops.rotary_table(start + jnp.arange(11), 32)
        q, k, _ = heads_of(kernel(qkv, *table, **SIZES, q_scale=q_scale, k_scale=k_scale), SHAPE)
        scores.append(np.einsum("bqd,bkd->bqk", q[:, :, 0], k[:, :, 0]))
    assert_close(scores[0], scores[1], DEEP)


def test_heads_are_normalised_and_then_scaled():
    qkv, q_scale, k_scale = operands(SHAPE, seed=3)
    table = ops.rotary_table(jnp.zeros(11, int), 32)
    out = kernel(1000 * qkv, *table, **SIZES, q_scale=q_scale, k_scale=k_scale)
    for part, scale in zip(heads_of(out, SHAPE)[:2], (q_scale, k_scale), strict=True):
        np.testing.assert_allclose(np.mean((part / float64(scale)) ** 2, axis=-1), 1.0, rtol=1e-5)


def test_the_input_is_not_changed():
    # The kernel works in place, but not on an array that somebody still holds.
    qkv, q_scale, k_scale = operands(SHAPE, seed=4)
    table, before = ops.rotary_table(jnp.arange(11), 32), np.array(qkv)
    f = functools.partial(kernel, **SIZES, q_scale=q_scale, k_scale=k_scale)
    out = f(qkv, *table)
    assert_equal(qkv, before)
    both = jax.jit(lambda x: (f(x, *table), x + 1))(qkv)
    assert_close(both[0], out, SHORT)
    assert_equal(both[1], before + 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("norm, by_row", [(False, True), (True, True), (True, False)], ids=str)
def test_gradients(reference, dtype, tolerance, norm, by_row):
    qkv, *scales = operands(SHAPE, dtype, seed=5)
    positions = np.random.default_rng(8).integers(0, 500, SHAPE[:2] if by_row else SHAPE[1:2])
    table = ops.rotary_table(jnp.asarray(positions), SHAPE[-1])
    arrays = (qkv, *table, *(scales if norm else ()))
    cotangent = normal(np.random.default_rng(6), *qkv.shape, dtype=dtype)

    def expected_of(qkv, cos, sin, *scales):
        return reference.rotary(qkv, cos, sin, *(scales or (None, None)), **SIZES)

    def f(qkv, cos, sin, q_scale=None, k_scale=None):
        return kernel(qkv, cos, sin, q_scale=q_scale, k_scale=k_scale, **SIZES)

    expected = reference.gradients(expected_of, arrays, cotangent)
    assert traces("rotary_backward", jax.grad(lambda qkv: jnp.sum(f(qkv, *arrays[1:]))), qkv) == norm
    assert_gradients_close(f, arrays, cotangent, expected, max(tolerance, GRADIENT))


@pytest.mark.parametrize("config", [(1, 1, 1, 1), (4, 2, 1, 3), (16, 8, 2, 1), (2, 4, 1, 64)], ids=str)
def test_every_config_of_the_gradient(config):
    qkv, q_scale, k_scale = operands(SHAPE, seed=9)
    arrays = (qkv, *(t[None] for t in ops.rotary_table(jnp.arange(11), 32)), q_scale, k_scale)
    cotangent = normal(np.random.default_rng(10), *qkv.shape)
    config = BackwardConfig(**dict(zip(("block_s", "block_h", "num_warps", "splits"), config, strict=True)))

    def form(*arrays):
        return Form(**dict(zip(Form.OPERANDS, arrays, strict=True)), **SIZES, epsilon=0.1)

    @jax.jit
    def pull(arrays, cotangent):
        return rotary_backward(form(*arrays), cotangent, config=config, target=gpu(), interpret=not ON_GPU)

    expected = jax.vjp(lambda *arrays: xla(form(*arrays)), *arrays)[1](cotangent)
    for out, wanted in zip(pull(arrays, cotangent), (expected[0], *expected[3:]), strict=True):
        assert_close(out, wanted, GRADIENT)


# Half of the last block of heads, several blocks of them, all in one; tokens past the end in the last step.
MOSAIC_SHAPES = [(2, 5, 3, 2, 32), (1, 3, 16, 8, 128), (3, 3, 1, 1, 6), (2, 2, 5, 5, 80)]


@interprets_mosaic
@pytest.mark.parametrize("norm, by_row", [(False, True), (True, False)], ids=["positions-by-row", "norm"])
@pytest.mark.parametrize("shape", MOSAIC_SHAPES, ids=str)
def test_mosaic(dtype, tolerance, shape, norm, by_row):
    batch, seq, heads, kv_heads, head_dim = shape
    qkv, *scales = operands(shape, dtype, seed=11)
    positions = jnp.arange(seq) + (5 * jnp.arange(batch)[:, None] if by_row else 3)
    arrays = (qkv, *ops.rotary_table(positions, head_dim), *(scales if norm else ()))
    cotangent = normal(np.random.default_rng(12), *qkv.shape, dtype=dtype)

    def f(implementation, qkv, cos, sin, q_scale=None, k_scale=None):
        options = dict(num_heads=heads, num_kv_heads=kv_heads, q_scale=q_scale, k_scale=k_scale)
        return ops.rotary(qkv, cos, sin, **options, implementation=implementation)

    wide = [x.astype("float32") for x in arrays]
    out = jax.jit(functools.partial(f, MOSAIC))(*arrays)
    assert_close(out, f("xla", *wide), tolerance)
    assert_equal(heads_of(out, shape)[2], heads_of(qkv, shape)[2])  # values are untouched
    expected = jax.vjp(functools.partial(f, "xla"), *wide)[1](cotangent.astype("float32"))
    assert_gradients_close(functools.partial(f, MOSAIC), arrays, cotangent, expected, max(tolerance, GRADIENT))


# Slices of 128 bytes XLA makes one operation of with the call in a loop.
@interprets_mosaic
@pytest.mark.parametrize("tokens, half", [(3, 4), (16, 32)])
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, 0, 0), (0, 0, 0)], ids=str)
def test_mosaic_is_mapped_over(axes, tokens, half):
    rng = np.random.default_rng(13)
    arrays = normal(rng, 2, 1, tokens, 8 * half), normal(rng, 2, tokens, half), normal(rng, 2, tokens, half)
    given = [x[0] if axis is None else x for x, axis in zip(arrays, axes, strict=True)]

    def f(implementation):
        one = functools.partial(ops.rotary, num_heads=2, num_kv_heads=1, implementation=implementation)
        return jax.vmap(one, axes)(*given)

    assert_close(f(MOSAIC), f("xla"), SHORT)


@without_gpu
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic changes no array in place")
def test_mosaic_stands_between_barriers_in_a_loop():
    def f(qkv, cos, sin):
        one = functools.partial(ops.rotary, qkv, num_heads=2, num_kv_heads=1, implementation="mosaic")
        return jax.lax.map(lambda tables: one(*tables), (cos, sin))

    qkv, tables = jax.ShapeDtypeStruct((1, 16, 256), "float16"), jax.ShapeDtypeStruct((2, 16, 32), "float32")
    with cuda_device("NVIDIA H200", 132):
        text = lowered_for_cuda(f, qkv, tables, tables)
    before, after = text.split(f"@{MOSAIC_CALL}")
    assert before.count("optimization_barrier") == after.count("optimization_barrier") == 1


@interprets_mosaic
@pytest.mark.parametrize("config", [(1, 1, 1), (3, 4, 2), (2, 2, 64)], ids=str)
def test_every_config_of_mosaic(config):
    qkv, q_scale, k_scale = operands(SHAPE, seed=9)
    arrays = (qkv, *(t[None] for t in ops.rotary_table(jnp.arange(11), 32)), q_scale, k_scale)
    cotangent = normal(np.random.default_rng(10), *qkv.shape)
    block_s, vector, splits = config
    options = dict(target=gpu(), interpret=not ON_GPU)

    def form(*arrays):
        return Form(**dict(zip(Form.OPERANDS, arrays, strict=True)), **SIZES, epsilon=0.1)

    forward = mosaic.Config(block_s=block_s, vector=vector)
    assert_close(mosaic.rotary(form(*arrays), config=forward, **options), xla(form(*arrays)), SHORT)
    backward = mosaic_backward.Config(block_s=block_s, vector=vector, splits=splits)
    found = mosaic_backward.rotary_backward(form(*arrays), cotangent, config=backward, **options)
    expected = jax.vjp(lambda *arrays: xla(form(*arrays)), *arrays)[1](cotangent)
    for out, wanted in zip(found, (expected[0], *expected[3:]), strict=True):
        assert_close(out, wanted, GRADIENT)


@pytest.mark.parametrize("changes", [dict(block_s=0), dict(vector=3), dict(splits=0)], ids=str)
def test_a_config_of_mosaic_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="|".join(changes)):
        mosaic_backward.Config(**{**dict(block_s=1, vector=1, splits=1), **changes})


@pytest.mark.parametrize("changes", [dict(block_s=3), dict(block_h=0), dict(num_warps=3), dict(splits=0)], ids=str)
def test_a_config_of_the_gradient_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="|".join(changes)):
        BackwardConfig(**{**dict(block_s=1, block_h=1, num_warps=1, splits=1), **changes})


@pytest.mark.parametrize("field", ["block_s", "block_h", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field):
    with pytest.raises(ValueError, match=rf"{field}=3 must be a power of two"):
        Config(**{**dict(block_s=4, block_h=8, num_warps=2), field: 3})
