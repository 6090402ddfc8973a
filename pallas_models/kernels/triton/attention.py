"""Attention over a fused QKV buffer: a program per head and block of queries, softmax online."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.triton._common import (
    Gpu,
    Ref,
    block_size,
    check_powers_of_two,
    exp2,
    in_bounds,
    load,
    local_gpu,
    span,
    store,
    tile_mask,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_q` queries of one head per program, against `block_kv` keys per step."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_q", "block_kv", "num_warps")


def heuristic(batch: int, seq: int, num_heads: int, head_dim: int, dtype: DTypeLike, gpu: Gpu) -> Config:
    """Chooses blocks: a short sentence in one step; few queries per program where there are few sentences."""
    if jnp.dtype(dtype).itemsize == 4 and head_dim > 64:
        # Exact float32 products are unrolled to single FMAs: larger blocks take minutes to compile.
        return Config(block_q=block_size(seq, 16, 32), block_kv=32, num_warps=4, num_stages=1)
    few = batch * num_heads * seq < 64 * gpu.num_cores
    block_q = block_size(seq, 16, 32 if few else 64)
    block_kv = block_size(seq, 16, 128 if few and head_dim <= 64 else 64)
    depth = pl.next_power_of_2(head_dim) * jnp.dtype(dtype).itemsize
    stages = (gpu.shared_memory - block_q * depth) // (2 * block_kv * depth)
    return Config(
        block_q=block_q,
        block_kv=block_kv,
        num_warps=block_size(block_q // 16, 1, 4) if block_kv >= 64 else 1,
        num_stages=max(min(stages, 3), 1),
    )


# The score of keys that take no part: finite, so that no difference of scores is NaN, and so low
# that beside any other score exp2 gives exactly 0.
MASKED = -1e30


def attended(m_i: jax.Array, l_i: jax.Array) -> jax.Array:
    """1 / sum of weights from a row's maximum and sum; 0 for a row that no key takes part in."""
    return jnp.where(m_i <= 0.5 * MASKED, 0.0, 1.0 / l_i)


def _dot(a: jax.Array, b: jax.Array, precision: jax.lax.Precision, *, trans_b: bool = False) -> jax.Array:
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


def _attention_kernel(
    qkv_ref: Ref,  # (B, S, 3 * heads * head_dim)
    mask_ref: Ref | None,  # (B, S)
    o_ref: Ref,  # (B, S, heads * head_dim)
    *,
    config: Config,
    num_heads: int,
    sm_scale: float,
    precision: jax.lax.Precision,
    interpret: bool,
) -> None:
    _, seq, width = o_ref.shape
    head_dim = width // num_heads
    block_q, block_kv, block_d = config.block_q, config.block_kv, pl.next_power_of_2(head_dim)
    start, head, batch = (pl.program_id(axis) for axis in range(3))
    start *= block_q
    depth = in_bounds(0, block_d, head_dim)
    rows, row_mask = span(start, block_q), in_bounds(start, block_q, seq)
    q_columns, k_columns, v_columns = (span(part * width + head * head_dim, block_d) for part in range(3))
    q = load(qkv_ref.at[batch, rows, q_columns], tile_mask(row_mask, depth))

    def step(s: jax.Array | int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, m_i, l_i = carry
        keys, valid = span(s * block_kv, block_kv), in_bounds(s * block_kv, block_kv, seq)
        kv_mask = tile_mask(valid, depth)
        k = load(qkv_ref.at[batch, keys, k_columns], kv_mask)
        # Base-2 exponentials are the GPU's own, so log2(e) goes into the scale.
        scores = _dot(q, k, precision, trans_b=True) * (sm_scale * math.log2(math.e))
        if mask_ref is not None:
            valid = load(mask_ref.at[batch, keys], valid) != 0
        if valid is not None:
            scores = jnp.where(valid[None, :], scores, MASKED)
        m_new = jnp.maximum(m_i, jnp.max(scores, axis=1))
        p = exp2(scores - m_new[:, None], interpret=interpret)
        correction = exp2(m_i - m_new, interpret=interpret)
        l_i = l_i * correction + jnp.sum(p, axis=1)
        v = load(qkv_ref.at[batch, keys, v_columns], kv_mask)
        acc = acc * correction[:, None] + _dot(p.astype(v.dtype), v, precision)
        return acc, m_new, l_i

    carry = (
        jnp.zeros((block_q, block_d), jnp.float32),
        jnp.full((block_q,), MASKED, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    steps = pl.cdiv(seq, block_kv)
    acc, m_i, l_i = step(0, carry) if steps == 1 else jax.lax.fori_loop(0, steps, step, carry)
    out = acc * attended(m_i, l_i)[:, None]
    store(o_ref.at[batch, rows, span(head * head_dim, block_d)], out, tile_mask(row_mask, depth))


def attention(
    qkv: jax.Array,
    mask: jax.Array | None,
    *,
    num_heads: int,
    sm_scale: float,
    precision: jax.lax.Precision,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """Attention from qkv (B, S, 3 * heads * head_dim); see `pallas_models.ops.attention`."""
    batch, seq, width = qkv.shape
    config = config or heuristic(batch, seq, num_heads, width // (3 * num_heads), qkv.dtype, local_gpu())
    kernel = functools.partial(
        _attention_kernel,
        config=config,
        num_heads=num_heads,
        sm_scale=sm_scale,
        precision=precision,
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, seq, width // 3), qkv.dtype),
        grid=(pl.cdiv(seq, config.block_q), num_heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="attention",
    )(qkv, mask)
