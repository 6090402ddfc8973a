"""Where segments lie in packed rows, and constants of pooling."""

import jax
import jax.numpy as jnp

from pallas_models.kernels.forms.pooling import SegmentForm

SEGMENT = 32  # tokens of a packed sentence that blocks are chosen for; how many there are is not known then
TINY = float(jnp.finfo(jnp.float32).tiny)  # the least normal number: smaller ones count for 0 on a GPU


def starts_and_lengths(form: SegmentForm[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The first token of each segment and how many there are up to its last one, int32, of all rows as one."""
    ids, num_segments = form.segment_ids.ravel(), form.num_segments
    index = jnp.arange(ids.size, dtype=jnp.int32)
    starts = jnp.full(num_segments, ids.size, jnp.int32).at[ids].min(index, mode="drop")
    ends = jnp.zeros(num_segments, jnp.int32).at[ids].max(index + 1, mode="drop")
    return starts, ends - starts
