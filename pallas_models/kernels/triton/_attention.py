"""What attention and its backward share: which pairs of query and key are valid, and which blocks have any."""

import functools
import operator
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels._band import Index, Runs
from pallas_models.kernels._common import Ref
from pallas_models.kernels.triton._common import plgpu

_APART = 4  # blocks: from here on, those that need no mask have a loop of their own
_REACH = 16  # blocks: from here on, masks are searched beforehand for blocks that they rule out

_Carry = TypeVar("_Carry")


def every(terms: list[jax.Array]) -> jax.Array | None:
    """Where all of these masks hold; None where there are none."""
    return functools.reduce(operator.and_, terms) if terms else None


def searched(
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    *,
    seq: int,
    kv_seq: int,
    block_q: int,
    block_kv: int,
    keys_first: bool = False,
) -> jax.Array | None:
    """The `Runs` of blocks that masks leave, as far as the least and the largest segment id of a block tell.

    Returns:
      (B or 1, blocks of queries, 4): the blocks of keys that each block of queries needs; with `keys_first`
      (B or 1, blocks of keys, 4): the blocks of queries that need each. None where there are few, or no masks.
    """
    q_blocks, kv_blocks = pl.cdiv(seq, block_q), pl.cdiv(kv_seq, block_kv)
    if (q_blocks if keys_first else kv_blocks) < _REACH or (mask is None and segment_ids is None):
        return None

    def split(x: jax.Array, count: int, size: int, mode: str) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, count * size - x.shape[1])), mode=mode).reshape(-1, count, size)

    valid = jnp.ones((1, kv_seq), bool) if mask is None else mask != 0
    valid = split(valid, kv_blocks, block_kv, "constant")[:, None]
    some, full = jnp.any(valid, -1), jnp.all(valid, -1)
    if segment_ids is not None and kv_segment_ids is not None:
        q = split(segment_ids, q_blocks, block_q, "edge")[:, :, None]
        kv = split(kv_segment_ids, kv_blocks, block_kv, "edge")[:, None]
        q_low, q_high, kv_low, kv_high = jnp.min(q, -1), jnp.max(q, -1), jnp.min(kv, -1), jnp.max(kv, -1)
        some &= (q_low <= kv_high) & (kv_low <= q_high)
        full &= (q_low == kv_high) & (kv_low == q_high)
    some, full = (jnp.broadcast_to(x, (x.shape[0], q_blocks, kv_blocks)) for x in (some, full))
    if keys_first:
        some, full = some.swapaxes(1, 2), full.swapaxes(1, 2)
    count = some.shape[-1]
    first, first_full = jnp.argmax(some, -1), jnp.argmax(full, -1)
    end = jnp.where(jnp.any(some, -1), count - jnp.argmax(some[..., ::-1], -1), 0)
    after = ~full & (jnp.arange(count) >= first_full[..., None])
    full_end = jnp.where(jnp.any(after, -1), jnp.argmax(after, -1), count)
    return jnp.stack([first, end, first_full, full_end], axis=-1).astype(jnp.int32)


def narrowed(runs: Runs, count: int, found: Ref | None, batch: Index, block: Index, *, masked: bool) -> Runs:
    """The `Runs` of a block, of `count` blocks of the other axis, made consistent.

    Args:
      found: what `searched` gave.
      masked: whether there are masks besides the positions.
    """
    first, end, full, full_end = runs
    if found is not None:
        row = batch if found.shape[0] > 1 else jnp.int32(0)
        some, some_end, all_, all_end = (plgpu.load(found.at[row, block, jnp.int32(i)]) for i in range(4))
        first, end = jnp.maximum(first, some), jnp.minimum(end, some_end)
        full, full_end = jnp.maximum(full, all_), jnp.minimum(full_end, all_end)
    if count < _APART or (masked and found is None):
        return first, end, first, first  # one loop, in which all are masked
    if isinstance(full, int) and isinstance(full_end, int):
        return first, end, full, full_end
    if not isinstance(full, int):
        full = jnp.clip(full, first, end)
    return first, end, full, jnp.clip(full_end, full, end)


def _loop(start: Index, end: Index, step: Callable[[Index, _Carry], _Carry], carry: _Carry) -> _Carry:
    if isinstance(start, int) and isinstance(end, int) and end - start <= 1:
        return step(start, carry) if end > start else carry
    return jax.lax.fori_loop(start, end, step, carry)


def walk(runs: Runs, step: Callable[..., _Carry], carry: _Carry) -> _Carry:
    """Takes `step(block, carry, full=...)` over the full blocks, then over those before and after them."""
    first, end, full, full_end = runs
    carry = _loop(full, full_end, functools.partial(step, full=True), carry)
    before = full - first

    def step_masked(i: Index, carry: _Carry) -> _Carry:
        after = full_end - before + i
        return step(
            after if isinstance(before, int) else jnp.where(i < before, first + i, after), carry, full=False
        )

    return _loop(0, before + end - full_end, step_masked, carry)


def exp2_of(x: jax.Array, scale: float, shift: jax.Array, *, interpret: bool) -> jax.Array:
    """`2 ** (x * scale + shift)`: XLA would leave product and sum apart, which one instruction computes."""
    if interpret:
        return jnp.exp2(x * scale + shift)
    factor = f"0f{np.float32(scale).view(np.uint32):08X}"
    (y,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 y; fma.rn.ftz.f32 y, $1, {factor}, $2; ex2.approx.ftz.f32 $0, y; }}",
        args=[x, jnp.broadcast_to(shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y
