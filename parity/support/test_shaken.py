"""Functions with sums that are off: by what roundings come to, wherever a sum is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_models.ops
from parity.support.bounded import UNIT, apart
from parity.support.common import KERNEL
from parity.support.shaken import shaken
from parity.support.tolerances import OP


def norm(x) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


@pytest.mark.parametrize("size", [2, 16, 200, 3000])
def test_sums_are_off_by_about_what_float32_rounds(size):
    """Of terms that cancel, one after another in float32, which is the worst of all orders."""
    x = np.random.default_rng(size).normal(size=(500, size)).astype(np.float32)
    x[:, size // 2 :] = -x[:, : size // 2]
    rounded = norm(np.cumsum(x, -1, dtype=np.float32)[:, -1])
    off = norm(jax.jit(shaken(lambda x: jnp.sum(x, -1)))(x))
    assert rounded <= 3 * off < 30 * max(rounded, norm(x) * UNIT / 4)


def custom_vjp(f):
    function = jax.custom_vjp(f)
    function.defvjp(lambda x: (f(x), None), lambda _, cotangent: (cotangent,))
    return function


def custom_jvp(f):
    function = jax.custom_jvp(f)
    function.defjvps(None)
    return function


NOTHING, TWICE = jnp.zeros(64), jnp.zeros(2)
WAYS = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda total, _: (total + f(x), None), NOTHING, TWICE)[0],
    "while": lambda f: (
        lambda x: jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(x)), (0, NOTHING))[1]
    ),
    "cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda x: -f(x), x),
}


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_off_wherever_they_are(way):
    w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x = np.linspace(1, 2, 64, dtype=np.float32)
    function = WAYS[way](lambda x: jnp.dot(w, x))
    out, exact = jax.jit(shaken(function))(x), jax.jit(function)(x)
    assert out.shape == exact.shape and out.dtype == exact.dtype
    assert 1e-7 < norm(out - exact) / norm(exact) < 1e-6


def test_what_does_not_sum_is_left_alone():
    x = np.linspace(1, 2, 64, dtype=np.float32)
    counts = {"x": x, "n": np.arange(4)}
    out = shaken(lambda x: {"x": jnp.exp(x["x"]) * 3 - x["x"], "n": jnp.sum(x["n"])})(counts)
    np.testing.assert_array_equal(out["x"], jnp.exp(x) * 3 - x)
    assert out["n"] == 6 and out["n"].dtype == jnp.int32


def test_a_gradient_that_is_0_is_off_by_roundings_of_its_terms():
    """Attention to one key, whose weight is 1: dk is q (dp - delta), both sums of the same 16 products."""
    rng = np.random.default_rng(0)
    q, k, v, c = (rng.normal(size=(1, 15, heads, 16)).astype(np.float32) for heads in (6, 2, 2, 6))
    mask = np.arange(15)[None] < 1

    def gradient(implementation):
        def loss(q, k, v):
            out = pallas_models.ops.attention(q, k, v, mask=mask, implementation=implementation)
            return jnp.sum(out * c)

        return jax.grad(loss, (0, 1, 2))

    expected = jax.jit(gradient("xla"))(q, k, v)
    out, moved = (jax.jit(f)(q, k, v) for f in (gradient(KERNEL), shaken(gradient("xla"))))
    assert norm(expected[0]) == norm(expected[1]) == 0.0 < norm(moved[0])
    # What two sums of 16 products may be apart in any order (Higham, section 3.1), times q or k.
    terms = np.sum(np.abs(c.astype(np.float64) * np.repeat(v[:, :1], 3, 2)), -1, keepdims=True) / np.sqrt(16)
    differences = 2 * 17 * UNIT * terms
    assert np.all(np.abs(out[0]) <= differences * np.repeat(np.abs(k[:, :1]), 3, 2))
    bound = (differences * np.abs(q)).sum(1).reshape(2, 3, 16).sum(1)
    assert np.all(np.abs(out[1][0, 0]) <= bound)
    # The bound of a campaign lets pass no more than that, and a kernel that is wrong in the last digits does not.
    tolerances = (2 * OP["float32"], 0.1 * OP["float32"])
    assert apart(out, expected, *tolerances, moved)[0] is None
    assert 3 * norm(moved[1]) < norm(bound)
    wrong = out[1].at[0, 0].add(bound / 2)
    assert "result 1" in (apart((out[0], wrong, out[2]), expected, *tolerances, moved)[0] or "")
