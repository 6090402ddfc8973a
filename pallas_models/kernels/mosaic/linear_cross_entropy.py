"""Losses of rows of logits, and the gradient of their weighted sum, in the registers of threads.

Rows that are too long for these are read once for maximum and sums, and once more to write the gradient. It needs
nothing that only Hopper has: JAX 0.11 lowers it, and its interpreter computes it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.linear_cross_entropy import Loss
from pallas_models.kernels.mosaic.common import memory
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import WARPGROUP, Config, configs
from pallas_models.kernels.mosaic.common.row_config import heuristic as of_rows
from pallas_models.kernels.mosaic.common.row_reader import Reader
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)
_HELD, _SHORT = 16384, 65536  # columns of a row that threads hold; of one that they may read again from the cache

_Visit = Callable[[Blocks, Any, Any], Any]  # (blocks, the step, what steps hand on)


class _Rows:
    """The rows of logits of a warpgroup, or the row of several."""

    def __init__(self, refs: Refs, blocks: Blocks, vocab: int, loss: Loss, gradient: Ref | None) -> None:
        self.refs, self.blocks, self.vocab, self.loss, self.gradient = refs, blocks, vocab, loss, gradient
        self.i = blocks.place()
        self.labels, self.weights = (blocks.load_numbers(ref, self.i) for ref in (refs.labels, refs.weights))
        self.labels = jnp.where(self.labels < vocab, self.labels, -1)
        # Before the sums, after which other threads write where this is read.
        bias = None if refs.bias is None else blocks.load_numbers(refs.bias, self.i, self.labels)
        self.chosen = self.adjust(blocks.load_numbers(refs.logits, self.i, self.labels), bias)
        self.reader = Reader(blocks, self.i, refs.logits)
        width = blocks.shape[1] * blocks.row_warpgroups
        steps = vocab // width
        self.whole = dataclasses.replace(blocks, n=steps * width)
        # What is left takes smaller steps, and masks.
        rest = blocks if blocks.are_held else dataclasses.replace(blocks, columns=1)
        begin = steps * blocks.shape[1] // rest.shape[1]
        self.parts = (rest, range(begin, rest.steps)), (self.whole, range(steps))

    def exp(self, y: jax.Array) -> jax.Array:
        return jnp.exp2(y * _LOG2_E)

    def adjust(self, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Logits in float32, with the bias, and capped."""
        y = y.astype(jnp.float32)
        if bias is not None:
            y += bias.astype(jnp.float32)
        cap = self.loss.logit_softcap
        if cap is not None:  # tanh(z) = 1 - 2 / (1 + exp(2 z))
            y = cap * (1.0 - 2.0 / (1.0 + self.exp(y * (2.0 / cap))))
        return y

    def read(self, part: Blocks, step: Any) -> jax.Array:
        """The logits of a step."""
        j = part.column(step)
        if self.blocks.are_held:
            (y,) = self.reader.read(step)
        else:
            y = part.load(self.refs.logits, self.i, j)
        return self.adjust(y, None if self.refs.bias is None else part.load(self.refs.bias, self.i, j))

    def kept(self, part: Blocks, step: Any, y: jax.Array, other: float) -> jax.Array:
        """y in columns of the vocabulary, `other` in those past its end."""
        if part is self.whole:
            return y
        left = self.vocab - part.column(step) * part.shape[1]
        return jnp.where(memory.iota(part.shape, 1, part.layout) < left, y, other)

    def walk(self, visit: _Visit, carry: Any, *, backwards: bool = False) -> Any:
        """Visits all steps, first those that need masks."""
        for part, steps in self.parts[:: -1 if backwards else 1]:

            def one(k: Any, carry: Any, part: Blocks = part, steps: range = steps) -> Any:
                return visit(part, steps.start + steps.stop - 1 - k if backwards else k, carry)

            if self.blocks.are_held:
                for k in steps:
                    carry = one(k, carry)
            elif steps:
                carry = jax.lax.fori_loop(steps.start, steps.stop, one, carry)
        return carry

    def sums(self) -> tuple[jax.Array, ...]:
        """The maximum, the sum of exponentials of distances from it and, for label smoothing, the sum of logits.

        Each thread keeps a maximum and sums of its own.
        """
        threads = self.blocks.of_threads

        def add(part: Blocks, step: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            before, total, *plain = carry
            logits = self.read(part, step)
            y = self.kept(part, step, logits, -jnp.inf)
            peak = jnp.maximum(before, part.fold("max", y))
            e = self.exp(y - part.unfold(peak))
            total = total * self.exp(before - peak) + part.fold("add", e)
            return peak, total, *(x + part.fold("add", self.kept(part, step, logits, 0.0)) for x in plain)

        zeros = [threads.full(0.0) for _ in range(2 if self.loss.label_smoothing else 1)]
        peaks, totals, *plain = self.walk(add, (threads.full(_LOWEST), *zeros))
        peak = threads.reduce(self.refs, 0, "max", peaks)
        totals *= self.exp(peaks - threads.spread(peak))
        return peak, *(threads.reduce(self.refs, 1 + k, "add", x) for k, x in enumerate((totals, *plain)))

    def compute(self) -> None:
        """Stores the losses and, if it is asked for, the gradient."""
        loss, blocks = self.loss, self.blocks
        smoothing = loss.label_smoothing
        peak, total, *plain = self.sums()
        total = jnp.where(self.labels >= 0, total, jnp.nan)  # and with it the loss and the gradient
        lse = peak + jnp.log(total)
        value = lse - (1.0 - smoothing) * self.chosen
        if smoothing:
            value -= smoothing / self.vocab * plain[0]
        if loss.z_loss:
            value += loss.z_loss * lse * lse
        counts = self.weights != 0.0
        blocks.store_numbers(self.refs.losses, 0, self.i, jnp.where(counts, value, 0.0))
        gradient = self.gradient
        if gradient is None:
            return
        factor = jnp.where(counts, self.weights * (1.0 + 2.0 * loss.z_loss * lse) / total, 0.0)

        def slope(y: jax.Array, peak: jax.Array, factor: jax.Array, *without: jax.Array) -> jax.Array:
            """The gradient by logits y, without what these take from it."""
            g = self.exp(y - peak) * factor
            for x in without:
                g -= x
            if loss.logit_softcap is not None:
                g *= 1.0 - jnp.square(y * (1.0 / loss.logit_softcap))
            return g.astype(gradient.dtype)

        anywhere = [self.weights * (smoothing / self.vocab)] if smoothing else []

        def write(part: Blocks, step: Any, carry: None) -> None:
            g = slope(self.read(part, step), *(part.spread(x) for x in (peak, factor, *anywhere)))
            part.store(gradient, self.i, part.column(step), self.kept(part, step, g, 0.0))

        self.walk(write, None, backwards=True)  # the last block read is the likeliest to be in cache still
        g = slope(self.chosen, peak, factor, self.weights * (1.0 - smoothing), *anywhere)
        memory.meet(self.refs)  # as another thread has stored there
        blocks.store_at(gradient, self.i, self.labels, g)


def heuristic(m: int, width: int, dtype: DTypeLike, *, gradient: bool) -> Config:
    """Chooses up to 512 threads with up to 32 elements of a row each; longer rows are walked.

    For the gradient a row is walked twice: the more threads work at it, the fewer rows are in flight, and the more
    of them the L2 cache keeps until then. On an H200, bf16, 256 threads took 0.85 and 0.89 of Triton's time for
    the losses of 2048x50257 and 1024x151936; with the gradient 512 threads took 0.88 and 0.97, 1024 took 1.06 and
    0.90.

    Args:
      gradient: whether it is asked for.
    """
    if width <= _HELD:
        return of_rows(m, width, dtype)
    threads = 256 if not gradient else 512 if width <= _SHORT else 1024
    return Config(threads=threads, block_n=16384 if threads == 1024 else 8192, warpgroups=threads // WARPGROUP)


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
            heuristic=functools.partial(heuristic, m, width, logits.dtype, gradient=gradient),
            candidates=functools.partial(configs, m, width, logits.dtype),
        ),
        target,
    )
    blocks = Blocks.of(config, logits)
    if bias is not None:  # rows of it are read as rows of the logits are
        bias = jnp.pad(bias, (0, width - vocab))
    rows, in_place = dict(logits=logits), gradient and _jax.since(0, 11)
    apart = jax.ShapeDtypeStruct(logits.shape, logits.dtype) if gradient and not in_place else None
    *gradients, losses = launch(
        lambda refs: _Rows(refs, blocks, vocab, loss, refs.logits if in_place else refs.gradient).compute(),
        dict(bias=bias, labels=labels, weights=weights) | ({} if in_place else rows),
        dict(gradient=apart, losses=jax.ShapeDtypeStruct((1, m), jnp.float32)),
        blocks.scratch_types(3, interpret) | memory.meeting(blocks.warpgroups, interpret),
        name="linear_cross_entropy",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        in_place=rows if in_place else None,
        unsafe_no_auto_barriers=True,
    )
    return losses[0], *gradients
