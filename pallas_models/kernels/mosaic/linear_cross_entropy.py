"""Losses of rows of logits, and the gradient of their weighted sum: one warpgroup or several for each row.

Rows are read twice, block by block: for maximum and sums, and to write the gradient. It needs nothing that only
Hopper has, and has never run: JAX 0.11 lowers it, and its interpreter computes it.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.linear_cross_entropy import Loss
from pallas_models.kernels.mosaic.common import memory, row_config
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import WARPGROUP
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)
_ELEMENTS, _LONG = 16, 8192  # of a row in a thread at a time; columns from which on four warpgroups share a row


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`warpgroups` warpgroups share a row, and hold `block_n` columns of it at a time."""

    block_n: int
    warpgroups: int

    def __post_init__(self) -> None:
        self.rows()

    def rows(self) -> row_config.Config:
        """How the threads share a row."""
        threads = WARPGROUP * self.warpgroups
        return row_config.Config(threads=threads, block_n=self.block_n, warpgroups=self.warpgroups)


def heuristic(width: int) -> Config:
    """Chooses 16 elements a thread, in one warpgroup or four."""
    warpgroups = 4 if width > _LONG else 1
    return Config(block_n=min(width, _ELEMENTS * WARPGROUP * warpgroups), warpgroups=warpgroups)


def configs(width: int) -> Iterator[Config]:
    """The configs worth measuring for rows of `width` logits: 8 to 32 elements a thread."""
    for warpgroups in (1, 2, 4, 8):
        for elements in (8, 16, 32):
            block_n = elements * WARPGROUP * warpgroups
            if block_n < 2 * max(width, 1024):
                yield Config(block_n=min(block_n, width), warpgroups=warpgroups)


class _Row:
    """A row of logits, in the warpgroups that share it."""

    def __init__(self, refs: Refs, blocks: Blocks, vocab: int, loss: Loss, gradient: Ref | None) -> None:
        self.refs, self.blocks, self.vocab, self.loss, self.gradient = refs, blocks, vocab, loss, gradient
        self.row = blocks.place()
        self.label, self.weight = refs.labels[self.row], refs.weights[self.row]

    def exp(self, y: jax.Array) -> jax.Array:
        return jnp.exp2(y * _LOG2_E)

    def read(self, step: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The logits of a step in float32, which of them are of the vocabulary, and which is the label's."""
        blocks, j = self.blocks, self.blocks.column(step)
        y = blocks.load(self.refs.logits, self.row, j).astype(jnp.float32)
        if self.refs.bias is not None:
            y += blocks.load(self.refs.bias, self.row, j).astype(jnp.float32)
        cap = self.loss.logit_softcap
        if cap is not None:  # tanh(z) = 1 - 2 / (1 + exp(2 z))
            y = cap * (1.0 - 2.0 / (1.0 + self.exp(y * (2.0 / cap))))
        column = memory.iota(blocks.shape, 1, blocks.layout) + j * blocks.shape[1]
        return y, column < self.vocab, column == self.label

    def sums(self) -> tuple[jax.Array, ...]:
        """The maximum, the sum of exponentials of distances from it, the label's logit, and the sum of logits.

        Each place of a block keeps a maximum and a sum of its own. The new maximum is either the old one or the
        new value: one exponential of their distance rescales the sum or is added to it.
        """
        blocks = self.blocks

        def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, chosen, *plain = carry
            logits, valid, is_label = self.read(step)
            y = jnp.where(valid, logits, -jnp.inf)
            e = self.exp(-jnp.abs(y - peak))
            above = y > peak
            plain = [x + jnp.where(valid, logits, 0.0) for x in plain]
            chosen = jnp.where(is_label, logits, chosen)
            return jnp.where(above, y, peak), jnp.where(above, total * e + 1.0, total + e), chosen, *plain

        zeros = [blocks.full(0.0) for _ in range(3 if self.loss.label_smoothing else 2)]
        peaks, totals, *others = jax.lax.fori_loop(0, blocks.steps, add, (blocks.full(_LOWEST), *zeros))
        peak = blocks.reduce(self.refs, 0, "max", peaks)
        totals *= self.exp(peaks - blocks.spread(peak))
        return peak, *(blocks.reduce(self.refs, 1 + i, "add", x) for i, x in enumerate([totals, *others]))

    def compute(self) -> None:
        """Stores the loss and, if it is asked for, the gradient."""
        loss, blocks = self.loss, self.blocks
        smoothing = loss.label_smoothing
        peak, total, chosen, *plain = self.sums()
        in_vocabulary = (self.label >= 0) & (self.label < self.vocab)
        total = jnp.where(in_vocabulary, total, jnp.nan)  # and with it the loss and the gradient
        lse = peak + jnp.log(total)
        value = lse - (1.0 - smoothing) * chosen
        if smoothing:
            value -= smoothing / self.vocab * plain[0]
        if loss.z_loss:
            value += loss.z_loss * lse * lse
        counts = self.weight != 0.0
        blocks.store_numbers(self.refs.losses, 0, self.row, jnp.where(counts, value, 0.0))
        gradient = self.gradient
        if gradient is None:
            return
        factor = jnp.where(counts, self.weight * (1.0 + 2.0 * loss.z_loss * lse) / total, 0.0)
        at_label, anywhere = self.weight * (1.0 - smoothing), self.weight * (smoothing / self.vocab)

        def write(i: jax.Array, carry: None) -> None:
            step = blocks.steps - 1 - i  # the last block read is the likeliest to be in cache still
            y, valid, is_label = self.read(step)
            g = self.exp(y - blocks.spread(peak)) * blocks.spread(factor)
            g -= jnp.where(is_label, blocks.spread(at_label), 0.0)
            if smoothing:
                g -= blocks.spread(anywhere)
            if loss.logit_softcap is not None:
                g *= 1.0 - jnp.square(y * (1.0 / loss.logit_softcap))
            g = jnp.where(valid, g, 0.0).astype(gradient.dtype)
            blocks.store(gradient, self.row, blocks.column(step), g)

        jax.lax.fori_loop(0, blocks.steps, write, None)


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
    """The loss of each row of logits (M, W); if asked, the gradient of `sum(weights * losses)` by them, too.

    It takes their memory, but not in JAX 0.10, which cannot trace a kernel that changes an array.

    Columns from `vocab` on are padding: they do not count, and their gradient is 0.
    """
    m, width = logits.shape
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="linear_cross_entropy",
            shape={"width": width} | ({"gradient": 1} if gradient else {}),
            bucketed=("width",),
            dtype=logits.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, width),
            candidates=functools.partial(configs, width),
        ),
        target,
    )
    blocks = Blocks.of(config.rows(), logits)
    if bias is not None:  # rows of it are read as those of the logits are
        bias = jnp.pad(bias, (0, width - vocab))
    rows, in_place = dict(logits=logits), gradient and _jax.since(0, 11)
    apart = jax.ShapeDtypeStruct(logits.shape, logits.dtype) if gradient and not in_place else None
    *gradients, losses = launch(
        lambda refs: _Row(refs, blocks, vocab, loss, refs.logits if in_place else refs.gradient).compute(),
        dict(bias=bias, labels=labels, weights=weights) | ({} if in_place else rows),
        dict(gradient=apart, losses=jax.ShapeDtypeStruct((1, m), jnp.float32)),
        blocks.scratch_types(4, interpret),
        name="linear_cross_entropy",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        in_place=rows if in_place else None,
        unsafe_no_auto_barriers=True,
    )
    return losses[0], *gradients
