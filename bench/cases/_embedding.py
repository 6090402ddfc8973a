"""Blocks of `ops.embed_tokens`, which the benchmark of MiniLM measures."""

import jax.numpy as jnp
import numpy as np

from bench.measuring import tunable
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops


def tuned(dtype: str, b: int, s: int, n: int) -> Call:
    """Sentences of random words, with BERT's tables."""
    words = 30522
    tables = tunable.operands(dtype, (words, n), (512, n), (2, n), (n,), (n,))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, words, (b, s)), jnp.int32)
    return ops.embed_tokens, (ids, *tables), {}


TUNABLES = {
    "embed_tokens": Tunable(
        axes="BxSxN",
        shapes=((1, 16, 384), (64, 128, 384), (512, 128, 384)),
        call=tuned,
        dtypes=("fp16",),
        nearby=(1, 0.75),
    ),
}
