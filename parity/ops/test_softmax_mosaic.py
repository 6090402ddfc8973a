"""`ops.softmax` in Mosaic against torch: widths, masks, extreme values, configs, gradients, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.forms.softmax import Form
from pallas_models.kernels.mosaic.softmax import Config
from pallas_models.kernels.mosaic.softmax_backward import softmax_backward
from parity.ops.test_rows import ROWS, every_way
from parity.ops.test_softmax import EXTREMES, MASK_SHAPES, draw, holes
from parity.support.common import (
    ON_GPU,
    assert_close,
    assert_equal,
    assert_gradients_close,
    by_device,
    compiled,
    float64,
    gpu,
    normal,
    traces,
)
from parity.support.tolerances import GRADIENT, SHORT

SHAPES = by_device(
    cpu=[(1, 1), (5, 33), (2, 3, 64), (2, 33000)],  # the last one longer than threads hold
    gpu=[(2048, 4096), (8192, 1024), (64, 128, 384), (3, 5, 7), (1001, 333), (5, 32768), (64, 65536), (3, 100003)],
)
HELD_AND_WALKED = pytest.mark.parametrize(
    "config",
    [None, Config(threads=4, block_n=16, keep=True), Config(threads=4, block_n=16)],
    ids=["held", "kept", "walked"],
)
softmax = functools.partial(compiled.softmax, implementation=ROWS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_torch(reference, dtype, tolerance, shape):
    x = draw(*shape, dtype=dtype)
    out = softmax(x)
    assert out.dtype == dtype
    assert_close(out, reference.compute(reference.softmax, x), tolerance)


@pytest.mark.covering(1)
@every_way
@pytest.mark.parametrize("shape", [(33, 50), (5, 200)], ids=str)
def test_every_way(reference, shape, config):
    x, where = draw(*shape), holes(*shape)
    for kept in (None, where):
        expected = reference.compute(reference.softmax, x, where=kept, scale=-0.5)
        assert_close(softmax(x, where=kept, scale=-0.5, config=config), expected, SHORT)


@pytest.mark.parametrize("algorithm", ["online", "fused"])
def test_algorithms_that_it_has(reference, algorithm):
    x = draw(5, 300)
    assert_close(softmax(x, algorithm=algorithm), reference.compute(reference.softmax, x), SHORT)


@pytest.mark.covering(1)
@HELD_AND_WALKED
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_are_broadcast(reference, shape, config):
    x, where = draw(3, 2, 5, 37), holes(*shape, seed=1)
    expected = reference.compute(reference.softmax, x, where=where)
    out = softmax(x, where=where.astype(bool) if config is None else where, config=config)
    if np.any(expected):  # a mask of one entry keeps nothing
        assert_close(out, expected, SHORT)
    assert np.all(float64(out)[expected == 0.0] == 0.0)


@pytest.mark.covering(1)
@HELD_AND_WALKED
@pytest.mark.parametrize("garbage", [1e4, np.inf, -np.inf, np.nan])
def test_masked_entries_never_reach_the_result(config, garbage):
    x, where = draw(5, 33), holes(5, 33)
    f = functools.partial(softmax, where=where, config=config)
    assert_equal(f(jnp.where(where == 0, garbage, x)), f(x))


@HELD_AND_WALKED
def test_extreme_values(reference, config):
    x = jnp.asarray(EXTREMES, jnp.float32)
    x = jnp.concatenate([jnp.tile(x, 5), jnp.full((len(x), 30), -jnp.inf)], axis=1)
    expected = reference.compute(reference.softmax, x)
    np.testing.assert_allclose(float64(softmax(x, config=config)), expected, rtol=2e-6, atol=1e-30)


@HELD_AND_WALKED
def test_kept_entries_that_are_all_minus_infinity(config):
    x = jnp.full((2, 20), -jnp.inf).at[:, 3].set(1.0)
    where = jnp.ones((2, 20), jnp.int32).at[:, 3].set(0).at[1].set(0)
    out = float64(softmax(x, where=where, config=config))
    assert np.all(np.isnan(out[0, np.arange(20) != 3]))
    assert out[0, 3] == 0.0
    assert np.all(out[1] == 0.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(5, 33), (3, 9001), (2, 33000)], ids=str)
def test_gradients_in_every_dtype(reference, dtype, tolerance, shape):
    x, cotangent = draw(*shape, dtype=dtype, seed=20), draw(*shape, dtype=dtype, seed=21)
    expected = reference.gradients(lambda x: reference.softmax(x, scale=0.5), [x], cotangent)

    def f(x):
        return softmax(x, scale=0.5)

    assert traces("softmax_backward", jax.grad(lambda x: jnp.sum(f(x))), x)
    assert_gradients_close(f, [x], cotangent, expected, max(tolerance, GRADIENT))


@every_way
def test_every_way_of_the_gradient(config):
    out, cotangent = ops.softmax(draw(33, 200, seed=22), implementation="xla"), draw(33, 200, seed=23)
    form = Form(x=out, where=None, scale=0.3, repeat=1, algorithm=None)
    options = dict(wanted=(True, False), config=config, target=gpu(), interpret=not ON_GPU)
    dx, none = jax.jit(lambda out, dout: softmax_backward(form, [out], [dout], **options))(out, cotangent)
    assert none is None
    y, dy = float64(out), float64(cotangent)
    assert_close(dx, y * (dy - np.sum(y * dy, axis=-1, keepdims=True)) * 0.3, GRADIENT)


@pytest.mark.parametrize("garbage", [np.inf, np.nan])
def test_what_is_masked_has_no_gradient_whatever_its_cotangent(garbage):
    x, cotangent = draw(4, 33, seed=24), normal(np.random.default_rng(26), 4, 33)
    where = jnp.asarray(np.random.default_rng(25).integers(0, 2, (4, 33)), jnp.int32).at[1].set(0)
    _, pull = jax.vjp(lambda x: softmax(x, where=where), x)
    (expected,), (out,) = pull(cotangent), pull(jnp.where(where == 0, garbage, cotangent))
    assert_equal(out, expected)
    assert not np.any(float64(out)[np.asarray(where) == 0])


def test_what_it_does_not_take_is_refused():
    x = draw(2, 50)
    with pytest.raises(NotImplementedError, match="takes algorithm 'online', 'fused' or None, not 'naive'"):
        softmax(x, algorithm="naive")
    with pytest.raises(NotImplementedError, match="up to 32768 columns with algorithm='fused', not 40000"):
        softmax(jnp.zeros((1, 40000)), algorithm="fused")
    with pytest.raises(ValueError, match="'fused' needs block_n of at least 50"):
        softmax(x, algorithm="fused", config=Config(threads=4, block_n=32))
