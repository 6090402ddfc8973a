"""Blocks of `ops.mean_pool` and `ops.segment_mean_pool`, which the benchmark of MiniLM measures."""

import jax.numpy as jnp
import numpy as np

from bench.measuring import tunable
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops


def tuned(dtype: str, b: int, s: int, n: int) -> Call:
    """The means of padded sentences; packed ones have the same blocks."""
    lengths = np.random.default_rng(1).integers(s // 2, s + 1, b)
    mask = jnp.asarray(np.arange(s) < lengths[:, None], jnp.int32)
    return ops.mean_pool, (*tunable.operands(dtype, (b, s, n)), mask), {}


TUNABLES = {
    "mean_pool": Tunable(
        axes="BxSxN",
        shapes=((1, 16, 384), (64, 128, 384), (512, 128, 384)),
        call=tuned,
        dtypes=("fp16",),
        nearby=(1, 0.75),
    ),
}
