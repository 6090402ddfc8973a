"""The second stage of sums over rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models.kernels.triton.column_sums import column_sums
from parity.support.common import ON_GPU, assert_close, normal
from parity.support.tolerances import LONG


@pytest.mark.parametrize("shape", [(2, 700, 37), (1, 3, 16), (2, 256, 64)])
def test_column_sums(shape):
    parts = normal(np.random.default_rng(60), *shape)
    dtypes = ["float32", "float32"][: shape[0]]
    sums = jax.jit(lambda parts: column_sums(parts, dtypes, interpret=not ON_GPU))(parts)
    for part, found in zip(np.asarray(parts, np.float64), sums, strict=True):
        assert_close(found, part.sum(axis=0), LONG)


def test_each_sum_has_its_dtype():
    parts = jnp.ones((2, 5, 8))
    first, second = column_sums(parts, ["bfloat16", "float32"], interpret=not ON_GPU)
    assert (first.dtype, second.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(first.astype("float32"), 5.0)
