"""`ops.embed_tokens` against torch: widths, token types, tiles, ids at the edges, gradients."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_models import ops
from pallas_models.kernels.triton.embedding import Config
from parity.support.common import (
    KERNEL,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    normal,
    traces,
)
from parity.support.tolerances import GRADIENT, LONG, SHORT

SHAPES = by_device(  # batch, seq, width, vocabulary
    cpu=[
        (1, 1, 16, 5),  # one token
        (3, 7, 33, 50),  # odd everywhere
        (2, 20, 384, 101),  # MiniLM's width
    ],
    gpu=[
        (1, 1, 16, 5),
        (1, 16, 384, 30522),
        (64, 128, 384, 30522),
        (8, 512, 384, 30522),
        (3, 77, 385, 1001),
        (5, 100, 1024, 30522),
    ],
)
kernel = functools.partial(compiled.embed_tokens, implementation=KERNEL)


def operands(
    shape: tuple[int, int, int, int], dtype: str = "float32", seed: int = 0
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(ids, word, position, token_type, scale, bias) and token_type_ids."""
    batch, seq, width, vocabulary = shape
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (batch, seq))
    ids.flat[0], ids.flat[-1] = 0, vocabulary - 1  # both ends of the table
    arrays = (
        jnp.asarray(ids, jnp.int32),
        normal(rng, vocabulary, width, dtype=dtype),
        normal(rng, seq + 3, width, dtype=dtype, scale=0.5),
        normal(rng, 3, width, dtype=dtype),
        normal(rng, width, dtype=dtype, shift=1.0, scale=0.3),
        normal(rng, width, dtype=dtype),
    )
    return arrays, jnp.asarray(rng.integers(0, 3, (batch, seq)), jnp.int32)


@pytest.mark.covering(2)
@pytest.mark.parametrize("typed", [True, False], ids=["types", "no_types"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, implementation, dtype, tolerance, shape, typed):
    arrays, types = operands(shape, dtype)
    types = types if typed else None

    @jax.jit
    def f(arrays, types):
        return ops.embed_tokens(*arrays, token_type_ids=types, implementation=implementation)

    out = f(arrays, types)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.embed_tokens, *arrays, token_type_ids=types), tolerance)


def random_positions(shape: tuple[int, ...], rows: int, seed: int = 11) -> jax.Array:
    positions = np.random.default_rng(seed).integers(0, rows, shape)
    positions.flat[0], positions.flat[-1] = rows - 1, 0
    return jnp.asarray(positions, jnp.int32)


@pytest.mark.parametrize("shape", [(1, 1, 16, 5), (3, 40, 33, 50)], ids=str)
def test_positions_against_torch(reference, implementation, dtype, tolerance, shape):
    """Fewer positions than tokens, as in rows of several sentences."""
    (ids, word, position, *rest), types = operands(shape, dtype)
    position = position[:3]
    options = dict(token_type_ids=types, position_ids=random_positions(ids.shape, len(position)))
    out = compiled.embed_tokens(ids, word, position, *rest, **options, implementation=implementation)
    expected = reference.compute(reference.embed_tokens, ids, word, position, *rest, **options)
    assert_close(out, expected, tolerance)


@pytest.mark.parametrize("integers", ["uint8", "int16", "uint32"])
def test_any_integer_dtype_and_epsilon(reference, implementation, integers):
    arrays, types = operands((2, 9, 24, 200), seed=1)
    options = dict(token_type_ids=types, epsilon=0.2)
    out = compiled.embed_tokens(
        arrays[0].astype(integers),
        *arrays[1:],
        token_type_ids=types.astype(integers),
        epsilon=0.2,
        implementation=implementation,
    )
    assert_close(out, reference.compute(reference.embed_tokens, *arrays, **options), SHORT)


@pytest.mark.parametrize("block_m, num_warps", [(1, 1), (4, 2), (16, 4), (64, 8)])
@pytest.mark.parametrize("shape", [(3, 7, 33, 50), (4, 16, 64, 50)], ids=str)
def test_every_tile_config(shape, block_m, num_warps):
    arrays, types = operands(shape, seed=2)
    out = kernel(*arrays, token_type_ids=types, config=Config(block_m=block_m, num_warps=num_warps))
    assert_close(out, compiled.embed_tokens(*arrays, token_type_ids=types, implementation="xla"), SHORT)


@pytest.mark.parametrize("value", [0, -2, 3])
@pytest.mark.parametrize("field", ["block_m", "num_warps"])
def test_a_block_that_is_no_power_of_two_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}={value} must be a power of two"):
        Config(**{**dict(block_m=4, num_warps=1), field: value})


@hypothesis.given(st.integers(1, 5), st.integers(1, 20), st.integers(2, 70), st.integers(0, 9))
def test_any_shape(batch, seq, width, seed):
    arrays, types = operands((batch, seq, width, 30), seed=seed)
    # A large epsilon keeps two nearly equal columns from amplifying rounding.
    options = dict(token_type_ids=types, epsilon=0.1)
    out = kernel(*arrays, config=Config(block_m=4, num_warps=1), **options)
    assert_close(out, compiled.embed_tokens(*arrays, implementation="xla", **options), LONG)


def test_ids_outside_the_tables_read_the_nearest_row(implementation):
    # Under jit values cannot be checked; they must not read foreign memory.
    arrays, types = operands((2, 9, 24, 40), seed=3)
    f = jax.jit(
        lambda ids, types: ops.embed_tokens(ids, *arrays[1:], token_type_ids=types, implementation=implementation)
    )
    ids = arrays[0].at[0, 3].set(2**30).at[1, 4].set(-7)
    out = f(ids, types.at[0, 0].set(99).at[1, 1].set(-2))
    near = f(arrays[0].at[0, 3].set(39).at[1, 4].set(0), types.at[0, 0].set(2).at[1, 1].set(0))
    assert_equal(out, near)


def test_rows_depend_on_their_own_ids_only(implementation):
    arrays, types = operands((4, 9, 40, 50), seed=4)
    f = functools.partial(compiled.embed_tokens, implementation=implementation)
    order = np.asarray([2, 0, 3, 1])
    out = f(*arrays, token_type_ids=types)
    assert_equal(f(arrays[0][order], *arrays[1:], token_type_ids=types[order]), out[order])


def test_gradients(reference):
    (ids, *tables), types = operands((3, 8, 22, 6), seed=5)  # few ids: the same rows are read many times
    cotangent = normal(np.random.default_rng(6), 3, 8, 22)
    arguments = reference.tensor(ids), reference.tensor(types)

    def expected_of(*tables):
        return reference.embed_tokens(arguments[0], *tables, token_type_ids=arguments[1])

    expected = reference.gradients(expected_of, tables, cotangent)

    def f(*tables):
        return kernel(ids, *tables, token_type_ids=types)

    assert_gradients_close(f, tables, cotangent, expected, GRADIENT)


def test_gradients_with_positions(reference):
    (ids, *tables), _ = operands((3, 8, 22, 6), seed=5)
    positions, cotangent = random_positions(ids.shape, 4), normal(np.random.default_rng(6), 3, 8, 22)
    given = reference.tensor(ids), reference.tensor(positions)
    expected = reference.gradients(
        lambda *tables: reference.embed_tokens(given[0], *tables, position_ids=given[1]), tables, cotangent
    )
    assert_gradients_close(
        lambda *tables: kernel(ids, *tables, position_ids=positions), tables, cotangent, expected, GRADIENT
    )


def test_positions_outside_the_table_read_the_nearest_row(implementation):
    arrays, _ = operands((2, 9, 24, 40), seed=3)
    f = jax.jit(lambda p: ops.embed_tokens(*arrays, position_ids=p, implementation=implementation))
    positions, last = random_positions((2, 9), 5), len(arrays[2]) - 1
    out = f(positions.at[0, 3].set(2**30).at[1, 4].set(-7))
    assert_equal(out, f(positions.at[0, 3].set(last).at[1, 4].set(0)))


@pytest.mark.parametrize("far", [2**31, 2**32 - 1])
def test_unsigned_ids_outside_the_tables_read_the_last_row(implementation, far):
    arrays, types = operands((2, 9, 24, 40), seed=7)
    f = jax.jit(
        lambda ids, types: ops.embed_tokens(ids, *arrays[1:], token_type_ids=types, implementation=implementation)
    )
    ids, types = (np.asarray(x).astype("uint32") for x in (arrays[0], types))
    beyond, types_beyond = ids.copy(), types.copy()
    beyond[0, 3] = types_beyond[1, 1] = far
    ids[0, 3], types[1, 1] = len(arrays[1]) - 1, len(arrays[3]) - 1
    assert_equal(f(beyond, types_beyond), f(ids, types))


def test_gradients_of_half_precision_are_summed_in_float32(reference, dtype, tolerance):
    """A word that occurs 400 times: sums in bfloat16 would stop growing."""
    (_, *tables), _ = operands((4, 100, 32, 6), dtype, seed=8)
    ids = jnp.zeros((4, 100), jnp.int32)
    cotangent = normal(np.random.default_rng(9), 4, 100, 32, dtype=dtype, shift=1.0)
    expected = reference.gradients(
        lambda *tables: reference.embed_tokens(reference.tensor(ids), *tables), tables, cotangent
    )
    f = functools.partial(kernel, ids)
    assert traces("layer_norm_backward", jax.grad(lambda *tables: jnp.sum(f(*tables))), *tables)
    gradients = jax.vjp(f, *tables)[1](cotangent)
    for i in (0, 1, 3, 4):  # rows of the table of types cancel
        assert gradients[i].dtype == dtype
        assert_close(gradients[i], expected[i], max(tolerance, GRADIENT))


def test_rows_that_vary_less_than_their_mean_is_rounded(implementation):
    """Rounding the mean must not look like deviation: rows of one number give the bias."""
    arrays, _ = operands((1, 3, 300, 4), seed=10)
    ids, *_, scale, bias = arrays
    tables = (jnp.full((4, 300), 1.2345678), jnp.zeros((3, 300)), jnp.zeros((1, 300)))
    out = compiled.embed_tokens(ids, *tables, scale, bias, epsilon=1e-12, implementation=implementation)
    np.testing.assert_allclose(np.asarray(out), np.broadcast_to(bias, (1, 3, 300)), atol=1e-6)
