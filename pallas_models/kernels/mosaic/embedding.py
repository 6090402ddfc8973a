"""Token embeddings: gather of three tables, sum and layer norm, in the registers of threads that walk the tokens.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.mosaic.common.backend import prefer_on_hopper
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import WARP
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.mosaic.common.tiles import too_wide
from pallas_models.kernels.mosaic.embedding_walk import (
    Config,
    Tokens,
    blocks_of,
    config_of,
    configs,
    operands,
)
from pallas_models.kernels.mosaic.embedding_walk import heuristic as heuristic_of
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_WIDEST = 512  # columns


def heuristic(m: int, seq: int, n: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses a config for m tokens of width n: see `embedding_walk.heuristic`.

    Where a warp has its tokens alone, CTAs are of one warpgroup: on an H200 64x128x384 takes 4.37 us so and
    256x128x384 14.5, in CTAs of eight 6.50 and 20.1.
    """
    # The sum and what all tokens share in float32; a scale, a bias, a word and the next one.
    config = heuristic_of(m, seq, n, dtype, 16, 2 + 3 * jnp.dtype(dtype).itemsize / 4, target)
    if config.threads > WARP:
        return config
    at_once = pl.cdiv(config.num_ctas, target.num_cores) * config.warpgroups
    return config_of(m, seq, config.threads, 1, at_once, config.ahead, target)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `embed_tokens` does not serve a call; None if it does."""
    del target
    return too_wide(form.word.shape[1])


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether `embed_tokens` is the fastest kernel for a call: not of wider rows, which several warps share."""
    return form.word.shape[1] <= _WIDEST and prefer_on_hopper(form, target)


class _Embeddings(Tokens):
    """The tokens of a warpgroup, of which it stores the norms."""

    def __init__(self, refs: Refs, blocks: Blocks, config: Config, form: Form[Any]) -> None:
        super().__init__(refs, blocks, config, form)
        self.bias = self.vector(refs.bias)

    def compute(self, step: jax.Array | int, rows: list[jax.Array], totals: list[jax.Array]) -> list[jax.Array]:
        h, _ = self.normalise(rows)
        scale, bias = (self.blocks.again(x).astype(jnp.float32) for x in (self.scale, self.bias))
        out = (h * scale + bias).astype(self.refs.out.dtype)
        self.blocks.store(self.refs.out, self.place(step), self.column, out)
        return totals


def _embed(refs: Refs, blocks: Blocks, config: Config, form: Form[Any]) -> None:
    _Embeddings(refs, blocks, config, form).walk([])


def embed_tokens(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Embeds ids (B, S) to (B, S, N)."""
    batch, seq = form.ids.shape
    m, n, dtype = batch * seq, form.word.shape[1], form.word.dtype
    chosen = choose(
        config,
        Problem(
            backend="mosaic",
            op="embed_tokens",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, seq, n, dtype, target),
            candidates=functools.partial(configs, m, seq, n, target),
        ),
        target,
    )
    rows = jax.ShapeDtypeStruct((m, n), dtype)
    blocks = blocks_of(chosen, rows)
    (out,) = launch(
        lambda refs: _embed(refs, blocks, chosen, form),
        dict(**operands(form), bias=form.bias),
        dict(out=rows),
        blocks.scratch_types(2, interpret, arrays=2),
        name="embed_tokens",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return out.reshape(batch, seq, n)
