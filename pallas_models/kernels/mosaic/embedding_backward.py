"""The gradient of token embeddings up to the sums over tokens: CTAs walk these, and add up on their way.

A thread looks its tokens up again, so that the forward pass leaves nothing behind. It has the same columns of all
tokens that it comes by, and adds up its terms of the gradients of scale and bias in registers. Where the tokens of
a thread have the same position, it adds up the gradient of that, too.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.mosaic.common.device_sums import sums_of_parts
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.mosaic.embedding_walk import (
    Config,
    Tokens,
    apart,
    blocks_of,
    configs,
    operands,
)
from pallas_models.kernels.mosaic.embedding_walk import heuristic as heuristic_of
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_COLUMNS, _LONGEST = 12, 6144  # columns of a row: in a thread, and in 512 of them


def heuristic(m: int, seq: int, n: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses a config for m tokens of width n: see `embedding_walk.heuristic`."""
    # What all tokens share, the normalised sum, its gradient and three totals in float32; a scale, and a word and
    # a cotangent, each with the next one.
    column = 6 + 5 * jnp.dtype(dtype).itemsize / 4
    if target.capability < (9, 0):  # where ptxas takes more
        column += 2
    return heuristic_of(m, seq, n, dtype, _COLUMNS, column, target)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `embed_tokens_backward` does not serve a call; None if it does."""
    del target
    n = form.word.shape[1]
    return f"takes rows of up to {_LONGEST} columns, not {n}" if n > _LONGEST else None


class _Gradients(Tokens):
    """The tokens of a warpgroup, of which it stores the gradients of the sums that were normalised."""

    def read(self, step: jax.Array | int, found: list[jax.Array]) -> list[jax.Array]:
        dout = self.blocks.load(self.refs.dout, self.place(step), self.column)
        return [dout, *super().read(step, found)]

    def compute(self, step: jax.Array | int, rows: list[jax.Array], totals: list[jax.Array]) -> list[jax.Array]:
        blocks, i, n = self.blocks, self.place(step), self.blocks.n
        dout, *looked_up = rows
        # Past the last token there is no cotangent, but the factor may be infinite.
        h, factor = self.normalise(looked_up, blocks.index(i) < blocks.m)
        dout = dout.astype(jnp.float32)
        dh = dout * blocks.again(self.scale).astype(jnp.float32)
        slope, shift = (
            blocks.spread(x * factor * (-1.0 / n)) for x in blocks.reduce_all(self.refs, 2, "add", dh * h, dh)
        )
        dtotal = h * slope + (dh * blocks.spread(factor) + shift)
        blocks.store(self.refs.dtotal, i, self.column, dtotal)
        terms = h * dout, dout, dtotal
        return [total + term for total, term in zip(totals, terms, strict=False)]

    def run(self) -> None:
        """Walks the tokens of the CTA, and stores their sums."""
        refs, blocks = self.refs, self.blocks
        totals = self.walk([blocks.full(0.0)] * (2 if refs.by_position is None else 3))
        if refs.by_position is not None:
            blocks.store(refs.by_position, self.first, self.column, totals.pop())
        for k, total in enumerate(totals):
            blocks.store_sums(refs, refs.dvectors.at[k], jax.lax.axis_index("cta"), total)


def _walk(refs: Refs, blocks: Blocks, config: Config, form: Form[Any]) -> None:
    _Gradients(refs, blocks, config, form).run()


def embed_tokens_backward(
    form: Form[jax.Array], dout: jax.Array, *, config: Config | Chooser | None, target: Target, interpret: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """The gradients that sums over tokens are made of.

    Returns:
      All float32: (B, S, N), of the sums that are normalised; (S, N), these added up over B, or None where that is
      left to do or positions are given; of scale (N,) and of bias (N,).
    """
    batch, seq = form.ids.shape
    m, n, dtype = batch * seq, form.word.shape[1], form.word.dtype
    chosen = choose(
        config,
        Problem(
            backend="mosaic",
            op="embed_tokens_backward",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, seq, n, dtype, target),
            candidates=functools.partial(configs, m, seq, n, target),
        ),
        target,
    )
    blocks = blocks_of(chosen, jax.ShapeDtypeStruct((m, n), dtype))
    walked = apart(blocks)
    is_added = form.position_ids is None and walked < m and walked % seq == 0
    dtotal, *sums, dvectors = launch(
        lambda refs: _walk(refs, blocks, chosen, form),
        dict(**operands(form), dout=dout.reshape(m, n)),
        dict(
            dtotal=jax.ShapeDtypeStruct((m, n), jnp.float32),
            by_position=jax.ShapeDtypeStruct((walked, n), jnp.float32) if is_added else None,
            dvectors=jax.ShapeDtypeStruct((2, chosen.num_ctas, n), jnp.float32),
        ),
        blocks.scratch_types(3, interpret, arrays=2) | blocks.sums_scratch_types(interpret),
        name="embed_tokens_backward",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    by_position = jnp.sum(sums[0].reshape(-1, seq, n), axis=0) if is_added else None
    dscale, dbias = sums_of_parts(dvectors, axis=0)
    return dtotal.reshape(batch, seq, n), by_position, dscale, dbias
