"""Masked mean over the sequence and L2 normalisation, a CTA per sentence.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.pooling import SEGMENT, TINY, starts_and_lengths
from pallas_models.kernels.forms.pooling import Form, SegmentForm
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile, too_wide
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A thread has parts of `block_s` tokens a step; other threads have other tokens at the same time."""

    block_s: int

    def __post_init__(self) -> None:
        if self.block_s < 1:
            raise ValueError(f"{self}: block_s must be positive")


def _tile(n: int, dtype: DTypeLike) -> Tile:
    return Tile.of_rows(n, vector_length(n, dtype))


def heuristic(seq: int, n: int, dtype: DTypeLike) -> Config:
    """Chooses up to 16 vectors a thread, short sentences in one step."""
    tile = _tile(n, dtype)
    return Config(block_s=max(min(16 // tile.pieces, pl.cdiv(seq, tile.rows)), 1))


def configs(seq: int, n: int, dtype: DTypeLike) -> Iterator[Config]:
    """The configs worth measuring: up to 32 vectors a thread."""
    tile = _tile(n, dtype)
    for block_s in (1, 2, 4, 8, 16, 32):
        if block_s * tile.pieces <= 32 and block_s < 2 * pl.cdiv(seq, tile.rows):
            yield Config(block_s=block_s)


def unsupported(
    form: Form[jax.ShapeDtypeStruct] | SegmentForm[jax.ShapeDtypeStruct], target: Target
) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    del target
    return too_wide(form.x.shape[2])


def _kernel(refs: Refs, *, tile: Tile, config: Config, sentences: int, normalize: bool, epsilon: float) -> None:
    block_s = config.block_s
    sentence = jax.lax.axis_index("cta")
    if refs.starts is None:  # as many rows of x for each
        length = refs.x.shape[0] // sentences
        start = sentence * length
    else:
        start, length = refs.starts[sentence], refs.lengths[sentence]

    def step(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, tokens = carry
        index = [(s * block_s + j) * tile.rows + tile.index() for j in range(block_s)]
        masks = [tile.gather(refs.mask, start + i) for i in index]
        valid = [
            (i < length) & (mask != 0 if refs.starts is None else mask == sentence)
            for i, mask in zip(index, masks, strict=True)
        ]
        # Padding is not read at all: there is no row below 0.
        places = [jnp.where(is_one, start + i, -1) for i, is_one in zip(index, valid, strict=True)]
        loaded = [tile.load(refs.x, rows).astype(jnp.float32) for rows in places]
        return functools.reduce(jnp.add, loaded, total), tokens + sum(v.astype(jnp.float32) for v in valid)

    steps = jax.lax.div(length + (block_s * tile.rows - 1), block_s * tile.rows)
    none = tile.index().astype(jnp.float32) * 0.0
    total, tokens = jax.lax.fori_loop(0, steps, step, (tile.full(0.0), none))
    total, tokens = (tile.along(tile.sum_rows(x, refs.scratch)) for x in (total, tile.across(tokens)))
    mean = total / jnp.maximum(tokens, 1.0)
    if normalize:  # by its largest part or epsilon first, so that no square leaves float32
        peak = jnp.maximum(jnp.max(jnp.abs(mean), axis=1), epsilon)
        peak = jnp.where(peak == 0.0, 1.0, peak)
        floor = jnp.maximum((epsilon / peak) * (epsilon / peak), TINY)
        mean /= tile.across(peak)
        mean *= tile.across(jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean, axis=1), floor)))
    tile.store(refs.out, jnp.where(tile.index() == 0, sentence, -1), mean)


def mean_pool(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Masked mean of x (B, S, N) over S."""
    batch, seq, _ = form.x.shape
    operands = dict(mask=form.mask.reshape(batch * seq), starts=None, lengths=None)
    return _pool(form, operands, batch, seq, config=config, target=target, interpret=interpret)


def segment_mean_pool(
    form: SegmentForm[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Mean of each segment of x (B, S, N)."""
    starts, lengths = starts_and_lengths(form)
    operands = dict(mask=form.segment_ids.ravel(), starts=starts, lengths=lengths)
    seq = min(form.x.shape[1], SEGMENT)
    return _pool(form, operands, form.num_segments, seq, config=config, target=target, interpret=interpret)


def _pool(
    form: Form[jax.Array] | SegmentForm[jax.Array],
    operands: Mapping[str, jax.Array | None],
    sentences: int,
    seq: int,
    *,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    n, dtype = form.x.shape[2], form.x.dtype
    problem = Problem(
        backend="mosaic",
        op="mean_pool",
        shape={"batch": sentences, "seq": seq, "n": n},
        bucketed=("batch", "seq"),
        dtype=dtype,
        config=Config,
        heuristic=functools.partial(heuristic, seq, n, dtype),
        candidates=functools.partial(configs, seq, n, dtype),
    )
    tile = _tile(n, dtype)
    kernel = functools.partial(
        _kernel,
        tile=tile,
        config=choose(config, problem, target),
        sentences=sentences,
        normalize=form.normalize,
        epsilon=form.epsilon,
    )
    (out,) = launch(
        kernel,
        dict(x=form.x.reshape(-1, n), **operands),
        dict(out=jax.ShapeDtypeStruct((sentences, n), jnp.float32)),
        dict(scratch=tile.scratch),
        name="mean_pool",
        num_ctas=sentences,
        num_warpgroups=1,
        interpret=interpret,
    )
    return out
