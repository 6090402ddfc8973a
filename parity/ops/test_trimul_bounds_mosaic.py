"""Mosaic's bounds of left and right of the triangle update, which a JAX without Triton has, against XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.mosaic import trimul_bounds
from pallas_models.ops import _trimul_reference
from parity.ops import test_trimul_backward as trimul
from parity.support.common import (
    ON_GPU,
    assert_close,
    interprets_mosaic,
    lowered_calls,
    normal,
    without_gpu,
    without_triton,
)
from parity.support.tolerances import SHORT


def drawn(c, h, dtype, *, mask=None, largest=0, biased=True):
    """A mask, its largest factor in that place, or None; and what is bounded."""
    rng = np.random.default_rng(c)
    factors = None if mask is None else normal(rng, *mask, dtype=dtype)
    if factors is not None:
        factors = factors.at[np.unravel_index(largest, mask)].set(-7.0)
    w, scale, shift = normal(rng, c, 4, h, dtype=dtype), normal(rng, c), normal(rng, c)
    return factors, scale, shift, w, normal(rng, 4, h) if biased else None


def found(*operands):
    parts = jax.jit(functools.partial(trimul_bounds.bounds, interpret=not ON_GPU))(*operands)
    return np.max(parts, axis=0)


# Channels in several steps, hidden channels in vectors and without; masks that CTAs walk, with parts past the end,
# and of which more CTAs have a part than there are columns.
@interprets_mosaic
@pytest.mark.parametrize(
    "c, h, dtype, mask, largest, ctas",
    [
        (16, 8, "float32", (9, 7), 62, 128),
        (128, 128, "bfloat16", (1, 64, 65), 4159, 128),
        (200, 70, "float16", (20001,), 20000, 2),
        (130, 32, "bfloat16", (2, 100, 104), 20799, 2),
        (7, 33, "bfloat16", (3, 400), 0, 128),
        (64, 64, "float16", (1, 150, 151), 22649, 128),
        (300, 64, "float32", None, 0, 128),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_bounds_are_those_of_the_reference(monkeypatch, c, h, dtype, mask, largest, ctas, biased):
    monkeypatch.setattr(trimul_bounds, "_MOST_CTAS", ctas)
    operands = drawn(c, h, dtype, mask=mask, largest=largest, biased=biased)
    assert_close(found(*operands) / _trimul_reference.bounds(*operands), np.ones(5), SHORT)


@interprets_mosaic
def test_columns_that_several_warpgroups_add_up(monkeypatch):
    monkeypatch.setattr(trimul_bounds, "_WARPGROUPS", 2)
    operands = drawn(150, 40, "float16", mask=(50, 41), largest=2049)
    assert_close(found(*operands) / _trimul_reference.bounds(*operands), np.ones(5), SHORT)


@interprets_mosaic
def test_what_is_not_a_number_spoils_its_own_side_alone():
    mask, scale, shift, w, bias = drawn(16, 8, "float32", mask=(5, 5), largest=3)
    mask = mask.at[0, 0].set(jnp.inf).at[1, 1].set(jnp.nan)
    left, right, *_, factor = found(mask, scale, shift, w.at[0, 2, 5].set(jnp.nan), bias)
    assert np.isfinite(left) and np.isposinf(right) and factor == 7.0


@without_gpu
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="has Triton")
@pytest.mark.parametrize("mask", ["factors", "holes", "none"])
def test_the_update_has_them_with_triton_and_without(mask):
    operands, _ = trimul.draw(64, 128, 128, gate_after=True, bias=True, mask=mask)

    def update(operands):
        return ops.triangle_update(**operands, direction="outgoing", gate_after=True, compute_dtype="bfloat16")

    with_it = lowered_calls(update, operands)
    with without_triton():
        assert lowered_calls(update, operands) == with_it
