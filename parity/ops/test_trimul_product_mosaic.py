"""The product over third positions of the triangle update for Hopper GPUs, against XLA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import target
from pallas_models.kernels.common.channel_exchange import ByChannels
from pallas_models.kernels.forms.trimul import Product
from pallas_models.kernels.mosaic import trimul_product
from pallas_models.kernels.mosaic.common.gemm_config import Config
from parity.support.common import (
    HOPPER,
    MOSAIC,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    lowered_calls,
    normal,
    without_gpu,
)
from parity.support.tolerances import OP

INTERPRET = MOSAIC != "mosaic"
both_directions = pytest.mark.parametrize("incoming", [False, True])
needs_jax_011 = pytest.mark.skipif(
    INTERPRET and jax.__version_info__ < (0, 11),
    reason="JAX 0.10 interprets neither what lies past the end of an array nor transposed operands",
)


def product(sides, channels, incoming, factor=1.0, config=None, by_rows=True, pieces=(1, 1), interpret=INTERPRET):
    def f(sides):
        form = Product(
            sides=sides,
            channels=channels,
            transpose_left=incoming,
            transpose_right=not incoming,
            factor=factor,
            precision=jax.lax.Precision.DEFAULT,
            pieces=pieces,
            by_rows=by_rows,
        )
        return trimul_product.product(form, config=config, target=target.current(), interpret=interpret)

    return jax.jit(f)(sides)


def tiles(block_m: int, block_n: int, *, ping_pong: bool) -> Config:
    return Config(block_m=block_m, block_n=block_n, num_stages=2, ping_pong=ping_pong)


@needs_jax_011
@both_directions
@pytest.mark.parametrize(
    "n, channels, config, dtype",
    by_device(
        cpu=[
            (64, 3, None, "float16"),
            (192, 2, tiles(128, 128, ping_pong=False), "bfloat16"),  # ragged in every direction
            (192, 2, tiles(128, 128, ping_pong=True), "bfloat16"),
            (192, 1, tiles(64, 128, ping_pong=True), "float16"),
        ],
        gpu=[
            (n, 24, None, "bfloat16" if n % 128 else "float16") for n in (64, 128, 192, 320, 512, 768, 1024, 1088)
        ],
    ),
)
def test_product(n, channels, config, dtype, incoming):
    padded = channels + 1  # a channel of each side is not used
    sides = normal(np.random.default_rng(n), 2, n, 2 * padded, n, dtype=dtype)
    out = product(sides, channels, incoming, 0.25, config)
    assert out.dtype == dtype
    left, right = (sides[:, :, i : i + channels].astype(jnp.float32) for i in (0, padded))
    equation = "bkhi,bkhj->bihj" if incoming else "bihk,bjhk->bihj"
    expected = 0.25 * jnp.einsum(equation, left, right, precision="highest")
    assert_close(out, expected, OP[dtype])


@needs_jax_011
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize(
    "n, block_n",
    by_device(cpu=[(200, 208), (192, 80), (264, 208)], gpu=[(200, 208), (1032, 208), (1088, 208), (1088, 176)]),
)
def test_product_in_tiles_between_multiples_of_64(n, block_n, by_rows):
    columns = n + -n % 64
    size = n if by_rows else columns
    sides = normal(np.random.default_rng(n), 2, n, 4, n, dtype="float16")
    given = jnp.pad(sides, ((0, 0), (0, size - n), (0, 0), (0, columns - n)))
    given = given if by_rows else given.swapaxes(1, 2)
    run = functools.partial(product, channels=2, config=tiles(128, block_n, ping_pong=False), by_rows=by_rows)
    out = run(given, incoming=False)
    out = (out if by_rows else out.swapaxes(1, 2))[:, :n, :, :n]
    left, right = (sides[:, :, i : i + 2].astype(jnp.float32) for i in (0, 2))
    assert_close(out, jnp.einsum("bihk,bjhk->bihj", left, right, precision="highest"), OP["float16"])
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        run(given, incoming=True)


@pytest.mark.parametrize(
    "n, outgoing, incoming",
    [
        (64, 64, 64),
        (256, 128, 128),
        (512, 256, 256),
        (640, 128, 128),
        (768, 256, 256),
        (832, 208, 128),
        (1024, 256, 256),
        (1032, 208, 192),
        (1152, 192, 192),
        (1200, 256, 256),
    ],
)
def test_product_leaves_few_columns_empty(n, outgoing, incoming):
    """And no tile is cut by the end of a piece."""
    assert trimul_product.heuristic(n, 16).block_n == outgoing
    assert trimul_product.heuristic(n, 64).block_n == incoming
    assert n <= 128 or trimul_product.heuristic(n).block_n in (128, 256)


@needs_jax_011
@both_directions
def test_product_channel_by_channel(incoming):
    """With matrices in pieces, as they come from other devices."""
    n, config = by_device(cpu=[128, tiles(64, 64, ping_pong=True)], gpu=[1024, None])
    sides = normal(np.random.default_rng(0), 2, n, 4, n, dtype="bfloat16")
    in_pieces = ByChannels(names=(), grid=(2, 1)).pieces
    out = product(in_pieces(sides.swapaxes(1, 2)), 1, incoming, config=config, by_rows=False, pieces=(2, 1))
    assert_equal(out, in_pieces(product(sides, 1, incoming, config=config).swapaxes(1, 2)))


@needs_jax_011
def test_product_has_no_bounds_of_its_own():
    sides = jnp.full((1, 64, 2, 64), 100.0, "float16").at[0, 1, 0].set(-100.0)
    out = np.asarray(product(sides, 1, incoming=False))
    assert np.all(out[0, 0] == np.inf) and np.all(out[0, 1] == -np.inf)
    out = np.asarray(product(sides, 1, incoming=False, factor=2.0**-6))
    assert np.all(out[0, 0] == 1e4) and np.all(out[0, 1] == -1e4)


@without_gpu
@both_directions
@pytest.mark.parametrize("n", [64, 128, 192, 256, 384, 512, 1024, 1088])
def test_product_lowers(n, incoming):
    options = dict(channels=3, incoming=incoming, factor=0.5, by_rows=n < 1088, interpret=False)
    shape = (2, n, 8, n) if n < 1088 else (2, 8, n, n)
    assert lowered_calls(functools.partial(product, **options), jax.ShapeDtypeStruct(shape, "bfloat16")) == 1


def test_product_refuses():
    assert trimul_product.unsupported("float32") == "takes float16 and bfloat16, not float32"
    assert trimul_product.unsupported("bfloat16") is None


def test_equal_kernels_are_equal_code():
    """XLA compiles equal code once, and the persistent compilation cache finds it, whatever was lowered before.

    And no descriptors are handed over byte by byte, which takes LLVM long.
    """
    sides = jax.ShapeDtypeStruct((1, 128, 4, 128), "bfloat16")

    def modules(count):
        def f(sides):
            return [product(sides * i, channels=2, incoming=False, interpret=False) for i in range(count)]

        with cuda_device(*HOPPER):
            text = jax.jit(f).trace(sides).lower(lowering_platforms=("cuda",)).as_text()
        arrays = re.findall(r"llvm\.array<([1-9]\d*) x (\w+(?:<\w+>)?)>", text)  # one has no elements
        assert arrays and all(int(size) % 2 == 0 and of == "vector<8xi64>" for size, of in arrays)
        return re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)

    first, others = modules(1), modules(2)
    assert len(first) == 1 and others == 2 * first
