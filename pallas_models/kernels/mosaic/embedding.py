"""Token embeddings: gather of three tables, sum and layer norm, a warp or less for a token.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import THREADS, Tile, too_wide
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_MOST_NUMBERS = 32  # of a row that a thread is worth giving


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Up to `threads` threads of a token, each with `vector` neighbours, or several times as many."""

    threads: int
    vector: int

    def __post_init__(self) -> None:
        if self.threads not in (1 << i for i in range(THREADS.bit_length())):
            raise ValueError(f"{self}: threads must be a power of two up to {THREADS}")
        if self.vector not in (1, 2, 4, 8):
            raise ValueError(f"{self}: vector must be 1, 2, 4 or 8")


def heuristic(n: int, dtype: DTypeLike) -> Config:
    """Chooses a warp a token, if registers hold it, and the widest loads of which no thread goes without one."""
    most = vector_length(n, dtype)
    threads = 32 if n <= 32 * most * 4 else THREADS
    whole = (v for v in (8, 4, 2) if v <= most and n % (threads * v) == 0)
    return Config(threads=threads, vector=next(whole, most))


def configs(n: int, dtype: DTypeLike) -> Iterator[Config]:
    """The configs worth measuring."""
    most = vector_length(n, dtype)
    for threads in (16, 32, 64, 128):
        for vector in {most, max(most // 2, 1)}:
            if Tile.of_rows(n, vector, threads).pieces * vector <= _MOST_NUMBERS:
                yield Config(threads=threads, vector=vector)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `embed_tokens` does not serve a call; None if it does."""
    del target
    return too_wide(form.word.shape[1])


def _kernel(refs: Refs, *, tile: Tile, seq: int, epsilon: float) -> None:
    n = refs.out.shape[1]
    tokens = jax.lax.axis_index("cta") * tile.rows + tile.index()

    def look_up(table: Ref, index: jax.Array) -> jax.Array:
        return tile.load(table, jnp.clip(index, 0, table.shape[0] - 1)).astype(jnp.float32)

    def vector(ref: Ref) -> jax.Array:
        return tile.along(tile.load_row(ref).astype(jnp.float32))

    scale, bias = vector(refs.scale), vector(refs.bias)
    if refs.types is None:
        y = vector(refs.token_type.at[0])
    else:
        y = look_up(refs.token_type, tile.gather(refs.types, tokens))
    rows = jax.lax.rem(tokens, seq) if refs.positions is None else tile.gather(refs.positions, tokens)
    y += look_up(refs.word, tile.gather(refs.ids, tokens)) + look_up(refs.position, rows)
    for _ in range(2):  # twice: the error of the rounded mean counts in rows that vary less
        y -= tile.across(jnp.sum(y, axis=1) * (1.0 / n))
        if n % tile.columns:
            y = jnp.where(tile.columns_before(n), y, 0.0)
    y *= tile.across(jax.lax.rsqrt(jnp.sum(y * y, axis=1) * (1.0 / n) + epsilon))
    tile.store(refs.out, tokens, y * scale + bias)


def embed_tokens(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Embeds ids (B, S) to (B, S, N)."""
    batch, seq = form.ids.shape
    m, n, dtype = batch * seq, form.word.shape[1], form.word.dtype
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="embed_tokens",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, n, dtype),
            candidates=functools.partial(configs, n, dtype),
        ),
        target,
    )
    tile = Tile.of_rows(n, config.vector, config.threads)
    ids = dict(ids=form.ids, types=form.token_type_ids, positions=form.position_ids)
    (out,) = launch(
        functools.partial(_kernel, tile=tile, seq=seq, epsilon=form.epsilon),
        {name: None if x is None else x.reshape(m).astype(jnp.int32) for name, x in ids.items()}
        | dict(
            word=form.word, position=form.position, token_type=form.token_type, scale=form.scale, bias=form.bias
        ),
        dict(out=jax.ShapeDtypeStruct((m, n), dtype)),
        {},
        name="embed_tokens",
        num_ctas=pl.cdiv(m, tile.rows),
        num_warpgroups=1,
        interpret=interpret,
    )
    return out.reshape(batch, seq, n)
