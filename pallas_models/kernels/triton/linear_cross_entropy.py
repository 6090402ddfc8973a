"""Losses of rows of logits, and the gradient of their weighted sum in place of the logits, a program per row."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.linear_cross_entropy import Loss
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    exp2,
    launch,
    load,
    plgpu,
    span,
    store,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_v` logits of a row per step."""

    block_v: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_v", "num_warps")


def heuristic(width: int, gradient: bool) -> Config:
    """Chooses blocks for rows of `width` logits: 8 a thread for short ones, 4 for long ones.

    For the gradient a row is read twice. The more warps work at one, the fewer rows are in flight, and the more of
    them the L2 cache keeps until then.
    """
    if width <= 8192:
        block_v = block_size(width, 16, 1024)
        return Config(block_v=block_v, num_warps=block_size(block_v // 256, 1, 4))
    block_v = 4096 if gradient else 2048
    return Config(block_v=block_v, num_warps=block_v // 128)


def configs(width: int) -> Iterator[Config]:
    """The blocks worth measuring for rows of `width` logits: 4 to 32 elements a thread."""
    for block_v, num_warps in itertools.product((1024, 2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32)):
        if block_v < 2 * max(width, 1024) and 4 <= block_v // (32 * num_warps) <= 32:
            yield Config(block_v=block_v, num_warps=num_warps)


def _loss_kernel(
    logits_ref: Ref,  # (M, W)
    bias_ref: Ref | None,  # (V,)
    labels_ref: Ref,  # (M,)
    weights_ref: Ref,  # (M,)
    loss_ref: Ref,  # (M,)
    gradient_ref: Ref | None = None,  # (M, W), the memory of logits_ref
    *,
    vocab: int,
    loss: Loss,
    config: Config,
) -> None:
    label_smoothing, logit_softcap, z_loss = loss.label_smoothing, loss.logit_softcap, loss.z_loss
    width, block_v = logits_ref.shape[1], config.block_v
    row = pl.program_id(0)
    within = jnp.arange(block_v)
    whole = vocab // block_v  # blocks; one more has the rest of the vocabulary and the padding

    def exp(y: jax.Array) -> jax.Array:
        return exp2(y * _LOG2_E)

    def adjust(y: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = y.astype(jnp.float32)
        if bias is not None:
            y += bias.astype(jnp.float32)
        if logit_softcap is not None:  # tanh(z) = 1 - 2 / (1 + exp(2 z))
            y = logit_softcap * (1.0 - 2.0 / (1.0 + exp(y * (2.0 / logit_softcap))))
        return y

    def read(start: jax.Array | int, valid: jax.Array | None, eviction_policy: str) -> jax.Array:
        """The block of logits at `start`, -inf where it is not `valid`."""
        columns = span(start, block_v)
        # The mask of the padded row allows loads of whole vectors, which the mask of the vocabulary does not.
        padded = None if valid is None else within < width - start
        y = load(logits_ref.at[row, columns], padded, eviction_policy=eviction_policy)
        y = adjust(y, None if bias_ref is None else load(bias_ref.at[columns], valid))
        return y if valid is None else jnp.where(valid, y, -jnp.inf)

    Sums = tuple[jax.Array, ...]

    def add(start: jax.Array | int, valid: jax.Array | None, carry: Sums) -> Sums:
        # Each position in the block keeps a maximum and a sum of its own. The new maximum is the old one or the
        # new value: one exponential of their distance serves to rescale the sum or to add to it.
        peak, total, *plain = carry
        y = read(start, valid, "evict_last")
        e = exp(-jnp.abs(y - peak))
        above = y > peak
        if plain:
            plain = [plain[0] + (y if valid is None else jnp.where(valid, y, 0.0))]
        return jnp.where(above, y, peak), jnp.where(above, total * e + 1.0, total + e), *plain

    label, weight = plgpu.load(labels_ref.at[row]), plgpu.load(weights_ref.at[row])
    in_vocabulary = (label >= 0) & (label < vocab)
    # Before the sums, after which other threads write where this is read. A span of one, as exp takes no scalars.
    place = span(jnp.where(in_vocabulary, label, 0), 1)
    chosen = jnp.sum(
        adjust(load(logits_ref.at[row, place]), None if bias_ref is None else load(bias_ref.at[place]))
    )
    rest = whole * block_v
    valid = within < vocab - rest
    zeros = jnp.zeros((block_v,), jnp.float32)
    carry: Sums = (zeros + _LOWEST, zeros, *((zeros,) if label_smoothing else ()))
    carry = jax.lax.fori_loop(0, whole, lambda i, carry: add(i * block_v, None, carry), carry)
    if rest < vocab:
        carry = add(rest, valid, carry)
    peaks, totals, *plain = carry
    peak = jnp.max(peaks)
    total = jnp.sum(totals * exp(peaks - peak))
    total = jnp.where(in_vocabulary, total, jnp.nan)  # and with it the loss and the gradient
    lse = peak + jnp.log(total)
    value = lse - (1.0 - label_smoothing) * chosen
    if label_smoothing:
        value -= label_smoothing / vocab * jnp.sum(plain[0])
    if z_loss:
        value += z_loss * lse * lse
    plgpu.store(loss_ref.at[row], jnp.where(weight == 0.0, 0.0, value))
    if gradient_ref is None:
        return
    factor = jnp.where(weight == 0.0, 0.0, weight * (1.0 + 2.0 * z_loss * lse) / total)
    at_label, anywhere = weight * (1.0 - label_smoothing), weight * (label_smoothing / vocab)

    def write(start: jax.Array | int, valid: jax.Array | None) -> None:
        y = read(start, valid, "evict_first")
        g = exp(y - peak) * factor - jnp.where(within == label - start, at_label, 0.0)
        if label_smoothing:
            g -= anywhere
        if logit_softcap is not None:
            g *= 1.0 - jnp.square(y * (1.0 / logit_softcap))
        padded = None
        if valid is not None:
            padded, g = within < width - start, jnp.where(valid, g, 0.0)
        store(gradient_ref.at[row, span(start, block_v)], g, padded)

    # The latest first, as it is likeliest in cache.
    if rest < width:
        write(rest, valid)
    jax.lax.fori_loop(0, whole, lambda i, _: write((whole - 1 - i) * block_v, None), None)


def cross_entropy(
    logits: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    *,
    vocab: int,
    loss: Loss,
    gradient: bool,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The loss of each row of logits (M, W); if asked, the gradient of `sum(weights * losses)` in their memory.

    Columns from `vocab` on are padding: they do not count, and their gradient is 0.
    """
    m, width = logits.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="linear_cross_entropy",
            shape={"width": width} | ({"gradient": 1} if gradient else {}),
            bucketed=("width",),
            dtype=logits.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, width, gradient),
            candidates=functools.partial(configs, width),
        ),
        target,
    )
    losses = jax.ShapeDtypeStruct((m,), jnp.float32)
    out: tuple[jax.Array, ...] = launch(
        functools.partial(
            _loss_kernel,
            vocab=vocab,
            loss=loss,
            config=config,
        ),
        out_shape=(losses, jax.ShapeDtypeStruct(logits.shape, logits.dtype)) if gradient else (losses,),
        grid=(m,),
        input_output_aliases={0: 1} if gradient else {},
        num_warps=config.num_warps,
        interpret=interpret,
        name="linear_cross_entropy",
    )(logits, bias, labels, weights)
    return out
