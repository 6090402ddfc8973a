"""Masked mean over the sequence and L2 normalisation, a program per sentence."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.pooling import SEGMENT, TINY, starts_and_lengths
from pallas_models.kernels.forms.pooling import Form, SegmentForm
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    plgpu,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_s` tokens of one sentence per step."""

    block_s: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_s", "num_warps")


def heuristic(seq: int, width: int) -> Config:
    """Chooses blocks for sentences of `seq` tokens: up to 131072 elements a step, short ones in one."""
    block_n = pl.next_power_of_2(width)
    block_s = block_size(seq, 1, max(131072 // block_n, 1))
    return Config(block_s=block_s, num_warps=block_size(block_s * block_n // 8192, 2, 8))


def configs(seq: int, width: int) -> Iterator[Config]:
    """The blocks worth measuring: 8 to 512 elements a thread."""
    for block_s, num_warps in itertools.product((1, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16)):
        if block_s < 2 * seq and 8 <= block_s * pl.next_power_of_2(width) // (32 * num_warps) <= 512:
            yield Config(block_s=block_s, num_warps=num_warps)


def _mean_pool_kernel(
    x_ref: Ref,  # (M, N)
    mask_ref: Ref,  # (M,): not 0 for a token or, of segments, the one that a token belongs to
    start_ref: Ref | None,  # (B,)
    length_ref: Ref | None,  # (B,)
    o_ref: Ref,  # (B, N)
    *,
    config: Config,
    normalize: bool,
    epsilon: float,
) -> None:
    m, n = x_ref.shape
    block_s, block_n = config.block_s, pl.next_power_of_2(n)
    sentence = pl.program_id(0)
    if start_ref is None or length_ref is None:  # as many rows of x for each
        seq = m // o_ref.shape[0]
        start, length = sentence * seq, seq
    else:
        start, length = plgpu.load(start_ref.at[sentence]), plgpu.load(length_ref.at[sentence])
    columns, column_mask = span(0, block_n), in_bounds(0, block_n, n)

    def step(s: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, tokens = carry
        rows = span(start + s * block_s, block_s)
        valid = s * block_s + jnp.arange(block_s) < length
        mask = load(mask_ref.at[rows], valid)
        valid &= mask != 0 if start_ref is None else mask == sentence
        # Padding is not read at all: a masked load gives 0, whatever the padding holds.
        x = load(x_ref.at[rows, columns], tile_mask(valid, column_mask)).astype(jnp.float32)
        return total + jnp.sum(x, axis=0), tokens + jnp.sum(valid.astype(jnp.float32))

    carry = jnp.zeros((block_n,), jnp.float32), jnp.float32(0)
    total, tokens = jax.lax.fori_loop(0, pl.cdiv(length, block_s), step, carry)
    mean = total / jnp.maximum(tokens, 1.0)
    if normalize:  # by its largest part or epsilon first, so that no square leaves float32
        peak = jnp.maximum(jnp.max(jnp.abs(mean)), epsilon)
        peak = jnp.where(peak == 0.0, 1.0, peak)
        mean /= peak
        floor = jnp.maximum((epsilon / peak) * (epsilon / peak), TINY)
        mean *= jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean), floor))
    store(o_ref.at[sentence, columns], mean, column_mask)


def mean_pool(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Masked mean of x (B, S, N) over S."""
    batch, seq, n = form.x.shape
    config = _choose(config, batch, seq, n, form.x.dtype, target)
    rows, mask = form.x.reshape(batch * seq, n), form.mask.reshape(batch * seq)
    return _pool(form, batch, config, interpret)(rows, mask, None, None)


def segment_mean_pool(
    form: SegmentForm[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Mean of each segment of x (B, S, N)."""
    (batch, seq, n), num_segments = form.x.shape, form.num_segments
    config = _choose(config, num_segments, min(seq, SEGMENT), n, form.x.dtype, target)
    rows = form.x.reshape(batch * seq, n)
    return _pool(form, num_segments, config, interpret)(rows, form.segment_ids.ravel(), *starts_and_lengths(form))


def _choose(
    config: Config | Chooser | None, batch: int, seq: int, n: int, dtype: DTypeLike, target: Target
) -> Config:
    problem = Problem(
        backend="triton",
        op="mean_pool",
        shape={"batch": batch, "seq": seq, "n": n},
        bucketed=("batch", "seq"),
        dtype=dtype,
        config=Config,
        heuristic=functools.partial(heuristic, seq, n),
        candidates=functools.partial(configs, seq, n),
    )
    return choose(config, problem, target)


def _pool(
    form: Form[jax.Array] | SegmentForm[jax.Array], batch: int, config: Config, interpret: bool
) -> Callable[..., jax.Array]:
    kernel = functools.partial(_mean_pool_kernel, config=config, normalize=form.normalize, epsilon=form.epsilon)
    return lambda x, *where: launch(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, x.shape[1]), jnp.float32),
        grid=(batch,),
        num_warps=config.num_warps,
        interpret=interpret,
        name="mean_pool",
    )(x, *where)
