"""Token embeddings: gather of three tables, sum and layer norm, a program per block of tokens."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` tokens per program."""

    block_m: int
    num_warps: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "num_warps")


def heuristic(m: int, n: int) -> Config:
    """Chooses blocks for m tokens of width n: about 1024 elements a program, every core busy."""
    block_n = pl.next_power_of_2(n)
    block_m = block_size(min(1024 // block_n, pl.cdiv(m, 528)), 1, 16)
    return Config(block_m=block_m, num_warps=block_size(block_m * block_n // 1024, 1, 16))


def configs(m: int, n: int) -> Iterator[Config]:
    """The blocks worth measuring: 4 to 32 elements a thread."""
    for block_m, num_warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if block_m < 2 * m and 4 <= block_m * pl.next_power_of_2(n) // (32 * num_warps) <= 32:
            yield Config(block_m=block_m, num_warps=num_warps)


def _embed_tokens_kernel(
    ids_ref: Ref,  # (M,)
    types_ref: Ref | None,  # (M,)
    positions_ref: Ref | None,  # (M,)
    word_ref: Ref,  # (V, N)
    position_ref: Ref,  # (P, N)
    type_ref: Ref,  # (T, N)
    scale_ref: Ref,  # (N,)
    bias_ref: Ref,  # (N,)
    o_ref: Ref,  # (M, N)
    *,
    config: Config,
    seq: int,
    epsilon: float,
) -> None:
    m, n = o_ref.shape
    block_m, block_n = config.block_m, pl.next_power_of_2(n)
    start = pl.program_id(0) * block_m
    tokens, row_mask = span(start, block_m), in_bounds(start, block_m, m)
    columns, column_mask = span(0, block_n), in_bounds(0, block_n, n)
    mask = tile_mask(row_mask, column_mask)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (block_m, block_n))

    def look_up(table_ref: Ref, index: jax.Array) -> jax.Array:
        index = jnp.clip(index, 0, table_ref.shape[0] - 1)
        view = table_ref.at[index[:, None], jnp.arange(block_n)[None, :]]
        return load(view, mask).astype(jnp.float32)

    def load_ids(ref: Ref) -> jax.Array:
        return load(ref.at[tokens], row_mask)

    def load_vector(ref: Ref) -> jax.Array:
        return load(ref, column_mask).astype(jnp.float32)[None, :]

    # The vectors that all tokens share are on their way before those that wait for ids.
    scale, bias = load_vector(scale_ref.at[columns]), load_vector(bias_ref.at[columns])
    if types_ref is None:
        y = load_vector(type_ref.at[jnp.int32(0), columns])
    else:
        y = look_up(type_ref, load_ids(types_ref))
    rows = (start + jnp.arange(block_m)) % seq if positions_ref is None else load_ids(positions_ref)
    y += look_up(word_ref, load_ids(ids_ref)) + look_up(position_ref, rows)
    for _ in range(2):  # twice: the error of the rounded mean counts in rows that vary less
        y -= jnp.sum(y, axis=1, keepdims=True) / n
        if mask is not None:
            y = jnp.where(mask, y, 0.0)
    y *= jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) / n + epsilon)
    store(o_ref.at[tokens, columns], y * scale + bias, mask)


def embed_tokens(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Embeds ids (B, S) to (B, S, N)."""
    batch, seq = form.ids.shape
    ids, dtype = (form.ids, form.token_type_ids, form.position_ids), form.word.dtype
    m, n = batch * seq, form.word.shape[1]
    config = choose(
        config,
        Problem(
            backend="triton",
            op="embed_tokens",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n),
            candidates=functools.partial(configs, m, n),
        ),
        target,
    )
    out = launch(
        functools.partial(_embed_tokens_kernel, config=config, seq=seq, epsilon=form.epsilon),
        out_shape=jax.ShapeDtypeStruct((m, n), dtype),
        grid=(pl.cdiv(m, config.block_m),),
        num_warps=config.num_warps,
        interpret=interpret,
        name="embed_tokens",
    )(
        *(None if x is None else x.reshape(m).astype(jnp.int32) for x in ids),
        form.word,
        form.position,
        form.token_type,
        form.scale,
        form.bias,
    )
    return out.reshape(batch, seq, n)
