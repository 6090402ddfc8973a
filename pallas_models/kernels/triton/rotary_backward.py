"""Gradient of rotary positions and the per-head RMS norm before them: programs walk tokens of a block of heads."""

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
    """Each program walks the tokens of `block_h` heads, `block_s` a step: its share of them, one of `splits`."""

    block_s: int
    block_h: int
    num_warps: int
    splits: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_s", "block_h", "num_warps")
        if self.splits < 1:
            raise ValueError(f"{self}: splits must be positive")


def heuristic(tokens: int, num_rotated: int, head_dim: int, target: Target) -> Config:
    """Chooses blocks of about 1024 numbers, of 8 heads at most, and 8 programs for each multiprocessor."""
    block_h = block_size(num_rotated, 1, 8)
    block_s = block_size(tokens, 1, max(1024 // (block_h * pl.next_power_of_2(head_dim)), 1))
    return Config(
        block_s=block_s,
        block_h=block_h,
        num_warps=4,
        splits=_splits(8, tokens, num_rotated, block_s, block_h, target),
    )


def configs(tokens: int, num_rotated: int, head_dim: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: 4 to 32 numbers a thread."""
    for block_s, block_h, num_warps, waves in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), (4, 8, 16)
    ):
        numbers = block_s * block_h * pl.next_power_of_2(head_dim) // (32 * num_warps)
        if block_s < 2 * tokens and block_h < 2 * num_rotated and 4 <= numbers <= 32:
            splits = _splits(waves, tokens, num_rotated, block_s, block_h, target)
            yield Config(block_s=block_s, block_h=block_h, num_warps=num_warps, splits=splits)


def _splits(waves: int, tokens: int, num_rotated: int, block_s: int, block_h: int, target: Target) -> int:
    """Shares of the tokens, for `waves` programs a multiprocessor where there is work for them."""
    return max(min(waves * target.num_cores // pl.cdiv(num_rotated, block_h), pl.cdiv(tokens, block_s)), 1)


def _kernel(
    qkv_ref: Ref,  # (M, heads, head_dim)
    dout_ref: Ref,  # (M, heads, head_dim)
    cos_ref: Ref,  # (M or a divisor of M, head_dim / 2)
    sin_ref: Ref,  # the shape of cos_ref
    q_scale_ref: Ref,  # (head_dim,)
    k_scale_ref: Ref,  # (head_dim,)
    dqkv_ref: Ref,  # the memory of dout_ref
    dscale_ref: Ref,  # (splits, rotated heads, head_dim)
    *,
    config: Config,
    num_heads: int,
    epsilon: float,
) -> None:
    m, _, head_dim = qkv_ref.shape
    num_rotated, half = dscale_ref.shape[1], head_dim // 2
    block_s, block_h, splits = config.block_s, config.block_h, config.splits
    block_d = pl.next_power_of_2(half)
    split, head = pl.program_id(0), pl.program_id(1) * block_h
    heads, head_mask = span(head, block_h), in_bounds(head, block_h, num_rotated)
    depth, columns = in_bounds(0, block_d, half), [span(0, block_d), span(half, block_d)]
    is_query = (head + jnp.arange(block_h) < num_heads)[:, None]

    def scale(c: pl.Slice) -> jax.Array:
        q, k = (load(ref.at[c], depth).astype(jnp.float32)[None, :] for ref in (q_scale_ref, k_scale_ref))
        return jnp.where(is_query, q, k)[None, :, :]

    scales = [scale(c) for c in columns]

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        start = (split + i * splits) * block_s
        tokens, row_mask = (
            start + jnp.arange(block_s),
            None if m % (block_s * splits) == 0 else start + jnp.arange(block_s) < m,
        )
        table_mask = tile_mask(row_mask, depth)
        mask = None if table_mask is None else table_mask[:, None, :]
        if head_mask is not None:
            mask = head_mask[None, :, None] if mask is None else mask & head_mask[None, :, None]
        place = (tokens % cos_ref.shape[0])[:, None], jnp.arange(block_d)[None, :]
        cos, sin = (load(ref.at[place], table_mask).astype(jnp.float32)[:, None, :] for ref in (cos_ref, sin_ref))
        rows = span(start, block_s)
        h, d = (
            [load(ref.at[rows, heads, c], mask).astype(jnp.float32) for c in columns]
            for ref in (qkv_ref, dout_ref)
        )
        g = [d[0] * cos + d[1] * sin, d[1] * cos - d[0] * sin]  # rotated back
        squares = jnp.sum(h[0] * h[0] + h[1] * h[1], axis=2)
        factor = jax.lax.rsqrt(squares / head_dim + epsilon)[:, :, None]
        h = [x * factor for x in h]
        totals = [total + jnp.sum(a * b, axis=0) for total, a, b in zip(totals, g, h, strict=True)]
        g = [a * s for a, s in zip(g, scales, strict=True)]
        mean = jnp.sum(g[0] * h[0] + g[1] * h[1], axis=2)[:, :, None] / head_dim
        for c, a, b in zip(columns, g, h, strict=True):
            store(dqkv_ref.at[rows, heads, c], (a - b * mean) * factor, mask)
        return totals

    steps = pl.cdiv(pl.cdiv(m, block_s), splits)
    totals = jax.lax.fori_loop(0, steps, step, [jnp.zeros((block_h, block_d), jnp.float32)] * 2)
    for c, total in zip(columns, totals, strict=True):
        store(dscale_ref.at[split, heads, c], total, tile_mask(head_mask, depth))


def rotary_backward(
    form: Form[jax.Array],
    dout: jax.Array,
    *,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of qkv (B, S, W), q_scale and k_scale, which the call has.

    With `h` the normalised heads, `f` the factor that they were multiplied by and `g` the cotangent rotated back,
    times the scale, the cotangent of a head is `(g - h * mean(g * h)) * f`. The gradients of the scales are summed
    in two stages, by each program and head and over all of them, always in the same order.
    """
    qkv, q_scale, k_scale, rotated, head_dim = (
        form.qkv,
        form.q_scale,
        form.k_scale,
        form.num_rotated,
        form.head_dim,
    )
    assert q_scale is not None and k_scale is not None
    batch, seq, width = qkv.shape
    tokens = batch * seq
    config = choose(
        config,
        Problem(
            backend="triton",
            op="rotary_backward",
            shape={"tokens": tokens, "heads": rotated, "head_dim": head_dim},
            bucketed=("tokens",),
            dtype=qkv.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, tokens, rotated, head_dim, target),
            candidates=functools.partial(configs, tokens, rotated, head_dim, target),
        ),
        target,
    )
    by_head = (tokens, -1, head_dim)
    dqkv, dscales = launch(
        functools.partial(_kernel, config=config, num_heads=form.num_heads, epsilon=form.epsilon),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, width // head_dim, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct((config.splits, rotated, head_dim), jnp.float32),
        ),
        grid=(config.splits, pl.cdiv(rotated, config.block_h)),
        input_output_aliases={1: 0},  # the cotangents of values stay where they are
        num_warps=config.num_warps,
        interpret=interpret,
        name="rotary_backward",
    )(
        qkv.reshape(by_head),
        dout.reshape(by_head),
        *(t.reshape(-1, head_dim // 2) for t in (form.cos, form.sin)),
        q_scale,
        k_scale,
    )
    dq_scale, dk_scale = (jnp.sum(part, axis=(0, 1)) for part in jnp.split(dscales, (form.num_heads,), axis=1))
    return dqkv.reshape(qkv.shape), dq_scale.astype(q_scale.dtype), dk_scale.astype(k_scale.dtype)
