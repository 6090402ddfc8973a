"""Masked mean over the sequence and L2 normalisation, a CTA per sentence.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.pooling import SEGMENT, TINY, starts_and_lengths
from pallas_models.kernels.forms.pooling import Form, SegmentForm
from pallas_models.kernels.mosaic.common import memory
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile, too_wide
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_MOST_WARPGROUPS = 4  # of a CTA: registers have room for 16 vectors in each of their threads
_SUMS = 32 * 1024  # bytes of shared memory for sums of warps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A thread has parts of `block_s` tokens a step; other threads, in all `warpgroups`, have other tokens."""

    block_s: int
    warpgroups: int = 1

    def __post_init__(self) -> None:
        if self.block_s < 1:
            raise ValueError(f"{self}: block_s must be positive")
        if not 0 < self.warpgroups <= 2 * _MOST_WARPGROUPS:
            raise ValueError(f"{self}: warpgroups must be 1 to {2 * _MOST_WARPGROUPS}")


def _tile(n: int, dtype: DTypeLike) -> Tile:
    return Tile.of_rows(n, vector_length(n, dtype))


def heuristic(sentences: int, seq: int, n: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses up to 16 vectors a thread, and so many warpgroups that few sentences fill the GPU, too."""
    tile = _tile(n, dtype)
    block_s = max(min(16 // tile.pieces, tile.most_bits, pl.cdiv(seq, tile.rows)), 1)
    warpgroups = min(
        _MOST_WARPGROUPS * target.num_cores // sentences,
        pl.cdiv(seq, block_s * tile.rows),
        _SUMS // (4 * tile.row_warps * tile.columns),
        _MOST_WARPGROUPS,
    )
    return Config(block_s=block_s, warpgroups=max(warpgroups, 1))


def configs(seq: int, n: int, dtype: DTypeLike) -> Iterator[Config]:
    """The configs worth measuring: up to 32 vectors a thread."""
    tile = _tile(n, dtype)
    for block_s, warpgroups in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4)):
        fits = block_s * tile.pieces <= 32 and 4 * tile.row_warps * tile.columns * warpgroups <= _SUMS
        is_short = warpgroups == 1 or warpgroups * block_s < 2 * pl.cdiv(seq, tile.rows)
        if (fits or block_s * warpgroups == 1) and is_short and block_s < 2 * pl.cdiv(seq, tile.rows):
            yield Config(block_s=block_s, warpgroups=warpgroups)


def unsupported(
    form: Form[jax.ShapeDtypeStruct] | SegmentForm[jax.ShapeDtypeStruct], target: Target
) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    del target
    return too_wide(form.x.shape[2])


def _kernel(refs: Refs, *, tile: Tile, config: Config, sentences: int, normalize: bool, epsilon: float) -> None:
    block_s, warpgroup = min(config.block_s, tile.most_bits), jax.lax.axis_index("warpgroup")
    sentence = jax.lax.axis_index("cta")
    if refs.starts is None:  # as many rows of x for each
        length = refs.x.shape[0] // sentences
        start, segment = sentence * length, None
    else:
        start, length, segment = refs.starts[sentence], refs.lengths[sentence], sentence

    def step(s: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, tokens = carry
        first = start + (s * config.warpgroups + warpgroup) * (block_s * tile.rows)
        bits = tile.bits(refs.mask, first, start + length, segment, block_s)
        # Padding is not read at all.
        return total + tile.sum_marked(refs.x, first, bits, block_s), tokens + tile.count_bits(bits)

    none = tile.index().astype(jnp.float32) * 0.0
    tokens_of_step = block_s * tile.rows * config.warpgroups
    steps = jax.lax.div(length + (tokens_of_step - 1), tokens_of_step)
    total, tokens = jax.lax.fori_loop(0, steps, step, (tile.full(0.0), none))
    tile.leave_sums(refs.sums, total)
    tile.leave_sums(refs.counts, tokens)
    memory.meet(refs)

    @pl.when(warpgroup == 0)
    def _() -> None:
        n, parts = refs.out.shape[1], range(refs.sums.shape[0])
        whole = Tile.of_rows(n, vector_length(n, jnp.float32))
        sums = [memory.load(refs.sums.at[part, pl.ds(0, whole.columns)], whole.layout.reduce(0)) for part in parts]
        tokens = functools.reduce(jnp.add, (refs.counts[part, 0] for part in parts))
        mean = whole.along(functools.reduce(jnp.add, sums)) / jnp.maximum(tokens, 1.0)
        if normalize:  # by its largest part or epsilon first, so that no square leaves float32
            peak = jnp.maximum(jnp.max(jnp.abs(mean), axis=1), epsilon)
            peak = jnp.where(peak == 0.0, 1.0, peak)
            floor = jnp.maximum((epsilon / peak) * (epsilon / peak), TINY)
            mean /= whole.across(peak)
            mean *= whole.across(jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean, axis=1), floor)))
        whole.store(refs.out, jnp.where(whole.index() == 0, sentence, -1), mean)


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
        heuristic=functools.partial(heuristic, sentences, seq, n, dtype, target),
        candidates=functools.partial(configs, seq, n, dtype),
    )
    tile, config = _tile(n, dtype), choose(config, problem, target)
    parts = config.warpgroups * tile.row_warps
    (out,) = launch(
        functools.partial(
            _kernel, tile=tile, config=config, sentences=sentences, normalize=form.normalize, epsilon=form.epsilon
        ),
        dict(x=form.x.reshape(-1, n), **operands),
        dict(out=jax.ShapeDtypeStruct((sentences, n), jnp.float32)),
        dict(
            sums=plgpu.SMEM((parts, tile.columns), jnp.float32),
            counts=plgpu.SMEM((parts, 1), jnp.float32),
            **memory.meeting(config.warpgroups, interpret),
        ),
        name="mean_pool",
        num_ctas=sentences,
        num_warpgroups=config.warpgroups,
        interpret=interpret,
    )
    return out
