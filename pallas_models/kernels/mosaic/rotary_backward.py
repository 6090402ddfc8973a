"""Gradient of rotary positions and the per-head RMS norm before them: a CTA walks tokens of some heads.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.forms.rotary import Form
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile
from pallas_models.kernels.mosaic.rotary import Heads, check, tables_and_scales, vector_of_heads
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A CTA walks its share of the tokens, one of `splits`, `block_s` a step.

    A thread has `vector` neighbours in both halves of a head, or several.
    """

    block_s: int
    vector: int
    splits: int

    def __post_init__(self) -> None:
        check(self, self.vector, block_s=self.block_s, splits=self.splits)


def heuristic(tokens: int, num_rotated: int, head_dim: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses a token a step, up to 4 neighbours a thread, and 7 CTAs a multiprocessor, which run at once.

    On an H200 4 neighbours and about as many CTAs took 6% less time than 8 neighbours and 4 CTAs.
    """
    vector = min(vector_of_heads(num_rotated, head_dim, dtype), 4)
    return Config(block_s=1, vector=vector, splits=_splits(7, tokens, num_rotated, head_dim, 1, vector, target))


def configs(tokens: int, num_rotated: int, head_dim: int, dtype: DTypeLike, target: Target) -> Iterator[Config]:
    """The configs worth measuring."""
    most = vector_of_heads(num_rotated, head_dim, dtype)
    for block_s, vector, waves in itertools.product((1, 2, 4), (most, most // 2), (2, 4, 7, 8, 16)):
        if block_s <= tokens and vector:
            splits = _splits(waves, tokens, num_rotated, head_dim, block_s, vector, target)
            yield Config(block_s=block_s, vector=vector, splits=splits)


def _splits(
    waves: int, tokens: int, num_rotated: int, head_dim: int, block_s: int, vector: int, target: Target
) -> int:
    """Shares of the tokens, for `waves` CTAs a multiprocessor where there is work for them."""
    blocks = pl.cdiv(num_rotated, Tile.of_rows(head_dim // 2, vector).rows)
    return max(min(waves * target.num_cores // blocks, pl.cdiv(tokens, block_s)), 1)


def _kernel(refs: Refs, *, tile: Tile, config: Config, form: Form[Any]) -> None:
    block_s, splits = config.block_s, config.splits
    blocks = pl.cdiv(form.num_rotated, tile.rows)
    cta = jax.lax.axis_index("cta")
    heads = Heads(refs, tile, jax.lax.rem(cta, blocks), form)
    split = jax.lax.div(cta, blocks)
    scales = heads.scales()

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        tokens = [(split + i * splits) * block_s + j for j in range(block_s)]
        loaded = [
            (heads.load(refs.qkv, token), heads.load(refs.dqkv, token), heads.turns(token)) for token in tokens
        ]
        for token, (x, dout, turns) in zip(tokens, loaded, strict=True):
            h, d = ([a.astype(jnp.float32) for a in halves] for halves in (x, dout))
            cos, sin = (heads.along(a) for a in turns)
            g = [d[0] * cos + d[1] * sin, d[1] * cos - d[0] * sin]  # rotated back
            factor = heads.factor(*h)
            h = [a * factor for a in h]
            totals = [total + a * b for total, a, b in zip(totals, g, h, strict=True)]
            g = [a * scale for a, scale in zip(g, scales, strict=True)]
            mean = tile.across(jnp.sum(g[0] * h[0] + g[1] * h[1], axis=1) * (1.0 / form.head_dim))
            heads.store(refs.dqkv, token, [(a - b * mean) * factor for a, b in zip(g, h, strict=True)])
        return totals

    steps = pl.cdiv(pl.cdiv(heads.tokens, block_s), splits)
    totals = jax.lax.fori_loop(0, steps, step, [tile.full(0.0)] * 2)
    for half, total in enumerate(totals):
        rows = split * (2 * form.num_rotated) + 2 * heads.head + half
        tile.store(refs.dscales, jnp.where(heads.head < form.num_rotated, rows, -1), total)


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
    in two stages, by each CTA and head and over all of them, always in the same order.
    """
    qkv, q_scale, k_scale, rotated, head_dim = (
        form.qkv,
        form.q_scale,
        form.k_scale,
        form.num_rotated,
        form.head_dim,
    )
    assert q_scale is not None and k_scale is not None
    tokens = qkv.shape[0] * qkv.shape[1]
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="rotary_backward",
            shape={"tokens": tokens, "heads": rotated, "head_dim": head_dim},
            bucketed=("tokens",),
            dtype=qkv.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, tokens, rotated, head_dim, qkv.dtype, target),
            candidates=functools.partial(configs, tokens, rotated, head_dim, qkv.dtype, target),
        ),
        target,
    )
    tile, halves = Tile.of_rows(head_dim // 2, config.vector), (-1, head_dim // 2)
    dqkv, dscales = launch(
        functools.partial(_kernel, tile=tile, config=config, form=form.abstract()),
        dict(qkv=qkv.reshape(halves), **tables_and_scales(form)),
        dict(dscales=jax.ShapeDtypeStruct((config.splits * 2 * rotated, head_dim // 2), jnp.float32)),
        {},
        in_place=dict(dqkv=dout.reshape(halves)),  # the cotangents of values stay where they are
        name="rotary_backward",
        num_ctas=config.splits * pl.cdiv(rotated, tile.rows),
        num_warpgroups=1,
        interpret=interpret,
    )
    by_head = dscales.reshape(config.splits, rotated, head_dim)
    dq_scale, dk_scale = (jnp.sum(part, axis=(0, 1)) for part in jnp.split(by_head, (form.num_heads,), axis=1))
    return dqkv.reshape(qkv.shape), dq_scale.astype(q_scale.dtype), dk_scale.astype(k_scale.dtype)
