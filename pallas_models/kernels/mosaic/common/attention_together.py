"""Short sequences that lie one after another as one: a tile of attention has room for several.

Their ids as segments keep them apart. Nothing is copied, and positions differ by as much as before.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models.kernels.forms.attention import Form


def together(form: Form[Any], rows: int) -> int:
    """How many sequences of a call go together in so many rows; 1 where each stays alone."""
    is_alone = form.item_axis is not None or form.segment_ids is not None or form.bias is not None
    if is_alone or form.seq != form.kv_seq or form.seq > rows:
        return 1
    return math.gcd(form.batch, rows // form.seq)


def joined(form: Form[jax.Array], count: int) -> Form[jax.Array]:
    """The call with so many sequences in each row."""
    rows = jnp.arange(count * form.seq, dtype=jnp.int32) // form.seq
    ids = jnp.broadcast_to(rows, (form.batch // count, rows.size))
    mask = None if form.mask is None else join(form.mask, count)
    qkv = tuple(join(x, count) for x in form.qkv)
    return form.replace(qkv=qkv, mask=mask, segment_ids=ids, kv_segment_ids=ids)


def join(x: jax.Array, count: int) -> jax.Array:
    """(B, S, ...) as (B / count, count S, ...)."""
    return x.reshape(x.shape[0] // count, count * x.shape[1], *x.shape[2:])


def part(x: jax.Array, count: int) -> jax.Array:
    """(B / count, count S, ...) as (B, S, ...)."""
    return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])


def join_rows(x: jax.Array, count: int) -> jax.Array:
    """(B, heads, S) as (B / count, heads, count S)."""
    return join(x.swapaxes(1, 2), count).swapaxes(1, 2)


def part_rows(x: jax.Array, count: int) -> jax.Array:
    """(B / count, heads, count S) as (B, heads, S)."""
    return part(x.swapaxes(1, 2), count).swapaxes(1, 2)
