"""Rotary positions, and the per-head RMS norm before them, in place: a program per block of tokens and heads."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.rotary import Form
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_s` tokens times `block_h` heads per program, which share their loads of cos and sin."""

    block_s: int
    block_h: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_s", "block_h", "num_warps")


def heuristic(seq: int, num_rotated: int, head_dim: int) -> Config:
    """Chooses blocks of about 1024 numbers, of 8 heads at most: measured on an H200."""
    block_h = block_size(num_rotated, 1, 8)
    block_s = block_size(seq, 1, max(1024 // (block_h * pl.next_power_of_2(head_dim)), 1))
    return Config(block_s=block_s, block_h=block_h, num_warps=4)


def configs(seq: int, num_rotated: int, head_dim: int) -> Iterator[Config]:
    """The blocks worth measuring: 4 to 64 numbers a thread."""
    for block_s, block_h, num_warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)):
        numbers = block_s * block_h * pl.next_power_of_2(head_dim) // (32 * num_warps)
        if block_s < 2 * seq and block_h < 2 * num_rotated and 4 <= numbers <= 64:
            yield Config(block_s=block_s, block_h=block_h, num_warps=num_warps)


def _rotary_kernel(
    qkv_ref: Ref,  # (B, S, heads, head_dim)
    cos_ref: Ref,  # (B or 1, S, head_dim / 2)
    sin_ref: Ref,  # (B or 1, S, head_dim / 2)
    q_scale_ref: Ref | None,  # (head_dim,)
    k_scale_ref: Ref | None,  # (head_dim,)
    o_ref: Ref,  # the memory of qkv_ref
    *,
    config: Config,
    num_heads: int,
    num_rotated: int,
    epsilon: float,
) -> None:
    _, seq, _, head_dim = qkv_ref.shape
    half, block_s, block_h = head_dim // 2, config.block_s, config.block_h
    block_d = pl.next_power_of_2(half)
    start, head, batch = (pl.program_id(axis) for axis in range(3))
    start, head = start * block_s, head * block_h
    rows, heads = span(start, block_s), span(head, block_h)
    row_mask, head_mask = in_bounds(start, block_s, seq), in_bounds(head, block_h, num_rotated)
    depth = in_bounds(0, block_d, half)
    table_mask = tile_mask(row_mask, depth)
    mask = None if table_mask is None else table_mask[:, None, :]
    if head_mask is not None:
        mask = head_mask[None, :, None] if mask is None else mask & head_mask[None, :, None]

    table = (batch if cos_ref.shape[0] > 1 else jnp.int32(0), rows, span(0, block_d))
    cos, sin = (load(ref.at[table], table_mask).astype(jnp.float32)[:, None, :] for ref in (cos_ref, sin_ref))
    columns = [span(0, block_d), span(half, block_d)]
    a, b = (load(qkv_ref.at[batch, rows, heads, c], mask).astype(jnp.float32) for c in columns)
    if q_scale_ref is not None and k_scale_ref is not None:
        squares = jnp.sum(a * a + b * b, axis=2)
        factor = jax.lax.rsqrt(squares / head_dim + epsilon)[:, :, None]
        is_query = (head + jnp.arange(block_h) < num_heads)[:, None]

        def scale(c: pl.Slice) -> jax.Array:
            q, k = (load(ref.at[c], depth).astype(jnp.float32)[None, :] for ref in (q_scale_ref, k_scale_ref))
            return jnp.where(is_query, q, k)[None, :, :]

        a, b = a * factor * scale(columns[0]), b * factor * scale(columns[1])
    store(o_ref.at[batch, rows, heads, columns[0]], a * cos - b * sin, mask)
    store(o_ref.at[batch, rows, heads, columns[1]], b * cos + a * sin, mask)


def rotary(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Norm and rotation of the queries and keys in qkv (B, S, W), in place."""
    qkv, rotated, head_dim = form.qkv, form.num_rotated, form.head_dim
    batch, seq, _ = qkv.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="rotary",
            shape={"batch": batch, "seq": seq, "heads": rotated, "head_dim": head_dim},
            bucketed=("batch", "seq"),
            dtype=qkv.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, seq, rotated, head_dim),
            candidates=functools.partial(configs, seq, rotated, head_dim),
        ),
        target,
    )
    by_head = qkv.reshape(batch, seq, -1, head_dim)
    out = launch(
        functools.partial(
            _rotary_kernel, config=config, num_heads=form.num_heads, num_rotated=rotated, epsilon=form.epsilon
        ),
        out_shape=jax.ShapeDtypeStruct(by_head.shape, qkv.dtype),
        grid=(pl.cdiv(seq, config.block_s), pl.cdiv(rotated, config.block_h), batch),
        input_output_aliases={0: 0},  # the values stay where they are
        num_warps=config.num_warps,
        interpret=interpret,
        name="rotary",
    )(by_head, form.cos, form.sin, form.q_scale, form.k_scale)
    return out.reshape(qkv.shape)
