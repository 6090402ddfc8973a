"""Rotary positions, and the per-head RMS norm before them, in place: a CTA has some heads of some tokens.

It needs nothing that only Hopper has, but has been compiled for Hopper only. The rows of a tile are the halves of
heads, of one token.
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

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.rotary import Form
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_MOST_ROWS = 2**31 - 2**16  # halves of heads: rows of tiles are counted in signed 32-bit integers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_s` tokens per CTA, of which a thread has `vector` neighbours in both halves of a head or several."""

    block_s: int
    vector: int

    def __post_init__(self) -> None:
        check(self, self.vector, block_s=self.block_s)


def check(config: object, vector: int, **positive: int) -> None:
    """Raises ValueError unless `vector` is one that threads can load, and other fields are positive."""
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{config}: {name} must be positive")
    if vector not in (1, 2, 4, 8):
        raise ValueError(f"{config}: vector must be 1, 2, 4 or 8")


def vector_of_heads(num_rotated: int, head_dim: int, dtype: DTypeLike) -> int:
    """The most neighbours in a thread of which no half of the threads goes without a head."""
    vector = vector_length(head_dim // 2, dtype)
    while vector > 1 and Tile.of_rows(head_dim // 2, vector).rows >= 2 * num_rotated:
        vector //= 2
    return vector


def heuristic(tokens: int, num_rotated: int, head_dim: int, dtype: DTypeLike) -> Config:
    """Chooses up to 4 neighbours a thread, and 2 tokens a CTA where there are many."""
    vector = min(vector_of_heads(num_rotated, head_dim, dtype), 4)
    return Config(block_s=2 if tokens >= 4096 else 1, vector=vector)


def configs(tokens: int, num_rotated: int, head_dim: int, dtype: DTypeLike) -> Iterator[Config]:
    """The configs worth measuring."""
    most = vector_of_heads(num_rotated, head_dim, dtype)
    for block_s, vector in itertools.product((1, 2, 4, 8), (most, most // 2)):
        if block_s <= tokens and vector:
            yield Config(block_s=block_s, vector=vector)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `rotary` does not serve a call; None if it does."""
    del target
    if not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer to change arrays in place, not {jax.__version__}"
    halves = 2 * form.qkv.size // form.head_dim
    return f"takes up to {_MOST_ROWS} halves of heads, not {halves}" if halves > _MOST_ROWS else None


class Heads:
    """The heads of a block, whose halves are the rows of tiles."""

    def __init__(self, refs: Refs, tile: Tile, block: jax.Array, form: Form[Any]) -> None:
        self.refs, self.tile, self.form = refs, tile, form
        self.tokens = form.qkv.shape[0] * form.qkv.shape[1]
        self.head = block * tile.rows + tile.index()

    def rows(self, token: jax.Array, half: int) -> jax.Array:
        """Where the heads of a token lie in an array (tokens * heads * 2, head_dim / 2); past its end none do."""
        heads = self.form.qkv.shape[-1] // self.form.head_dim
        found = token * (2 * heads) + 2 * self.head + half
        return jnp.where(self.head < self.form.num_rotated, found, -1)

    def load(self, ref: Ref, token: jax.Array) -> list[jax.Array]:
        """Both halves, in the dtype of the array."""
        return [self.tile.load(ref, self.rows(token, half)) for half in range(2)]

    def store(self, ref: Ref, token: jax.Array, halves: list[jax.Array]) -> None:
        for half, x in enumerate(halves):
            self.tile.store(ref, self.rows(token, half), x)

    def turns(self, token: jax.Array) -> list[jax.Array]:
        """cos and sin of a token."""
        row = jax.lax.rem(jnp.minimum(token, self.tokens - 1), self.refs.cos.shape[0])
        return [self.tile.load_row(ref.at[row]) for ref in (self.refs.cos, self.refs.sin)]

    def scales(self) -> list[jax.Array]:
        """The scales of both halves, of queries and keys."""
        is_query = self.tile.across((self.head < self.form.num_heads).astype(jnp.float32)) > 0.0
        refs = self.refs.q_scale, self.refs.k_scale
        q, k = ([self.along(self.tile.load_row(ref.at[half])) for half in range(2)] for ref in refs)
        return [jnp.where(is_query, *both) for both in zip(q, k, strict=True)]

    def along(self, x: jax.Array) -> jax.Array:
        return self.tile.along(x.astype(jnp.float32))

    def factor(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """What heads are multiplied by in RMS norm, from both halves in float32."""
        squares = jnp.sum(a * a + b * b, axis=1)
        return self.tile.across(jax.lax.rsqrt(squares * (1.0 / self.form.head_dim) + self.form.epsilon))


def _kernel(refs: Refs, *, tile: Tile, block_s: int, form: Form[Any]) -> None:
    blocks = pl.cdiv(form.num_rotated, tile.rows)
    cta = jax.lax.axis_index("cta")
    heads = Heads(refs, tile, jax.lax.rem(cta, blocks), form)
    tokens = [jax.lax.div(cta, blocks) * block_s + i for i in range(block_s)]
    loaded = [(*heads.load(refs.qkv, token), *heads.turns(token)) for token in tokens]
    scales = None if form.q_scale is None else heads.scales()
    for token, (first, second, *turns) in zip(tokens, loaded, strict=True):
        a, b = (x.astype(jnp.float32) for x in (first, second))
        cos, sin = (heads.along(x) for x in turns)
        if scales is not None:
            factor = heads.factor(a, b)
            a, b = a * factor * scales[0], b * factor * scales[1]
        heads.store(refs.qkv, token, [a * cos - b * sin, b * cos + a * sin])


def rotary(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Norm and rotation of the queries and keys in qkv (B, S, W), in place."""
    qkv, rotated, head_dim = form.qkv, form.num_rotated, form.head_dim
    tokens = qkv.shape[0] * qkv.shape[1]
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="rotary",
            shape={"tokens": tokens, "heads": rotated, "head_dim": head_dim},
            bucketed=("tokens",),
            dtype=qkv.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, tokens, rotated, head_dim, qkv.dtype),
            candidates=functools.partial(configs, tokens, rotated, head_dim, qkv.dtype),
        ),
        target,
    )
    tile = Tile.of_rows(head_dim // 2, config.vector)
    (out,) = launch(
        functools.partial(_kernel, tile=tile, block_s=config.block_s, form=form.abstract()),
        tables_and_scales(form),
        {},
        {},
        in_place=dict(qkv=qkv.reshape(-1, head_dim // 2)),  # the values stay where they are
        name="rotary",
        num_ctas=pl.cdiv(tokens, config.block_s) * pl.cdiv(rotated, tile.rows),
        num_warpgroups=1,
        interpret=interpret,
    )
    return out.reshape(qkv.shape)


def tables_and_scales(form: Form[jax.Array]) -> dict[str, jax.Array | None]:
    """The other operands in halves of heads: cos and sin (T, head_dim / 2), scales (2, head_dim / 2)."""
    operands = dict(cos=form.cos, sin=form.sin, q_scale=form.q_scale, k_scale=form.k_scale)
    return {name: None if x is None else x.reshape(-1, form.head_dim // 2) for name, x in operands.items()}
