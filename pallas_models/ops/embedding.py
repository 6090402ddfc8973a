"""Token embeddings of BERT: three look-ups, their sum, and the layer norm after it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_models._implementation import Implementation
from pallas_models.dispatch.records import Backward, Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.embedding import Form
from pallas_models.kernels.mosaic import embedding as mosaic
from pallas_models.kernels.mosaic import embedding_backward as mosaic_backward
from pallas_models.kernels.mosaic.common.backend import PORTABLE, prefer_on_hopper
from pallas_models.kernels.triton import embedding as triton
from pallas_models.ops import _checks, norm
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, Target
from pallas_models.tuning import Chooser


def embed_tokens(
    ids: Array,
    word: Array,
    position: Array,
    token_type: Array,
    scale: Array,
    bias: Array,
    *,
    token_type_ids: Array | None = None,
    position_ids: Array | None = None,
    epsilon: float = 1e-12,
    config: triton.Config | mosaic.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `layer_norm(word[ids] + position[position_ids] + token_type[token_type_ids])`.

    This is the input of [BERT](https://arxiv.org/abs/1810.04805).

    The gradient keeps the operands alone, and looks the tokens up again.

    ```
    word, position, token_type = jnp.ones((100, 64)), jnp.ones((16, 64)), jnp.ones((2, 64))
    y = ops.embed_tokens(jnp.ones((2, 16), int), word, position, token_type, jnp.ones(64), jnp.zeros(64))
    ```

    Args:
      ids: (B, S), integers in [0, V).
      word: (V, D), float16, bfloat16 or float32.
      position: (P, D), the dtype of `word`; P >= S without `position_ids`.
      token_type: (T, D), the dtype of `word`.
      scale: (D,), scale of the layer norm.
      bias: (D,), bias of the layer norm.
      token_type_ids: (B, S), integers in [0, T); all 0 when None.
      position_ids: (B, S), integers in [0, P); 0 to S - 1 in every row when None.
      epsilon: added to the variance of the layer norm.
      config: block sizes of the Triton or the Mosaic kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      (B, S, D) in the dtype of `word`.

    Raises:
      TypeError: ids are not integers or tables not floating point.
      ValueError: shapes do not fit, S is over P without `position_ids`, or concrete ids lie outside their table.
    """
    _checks.check_integer("ids", ids)
    _checks.check_rank("ids", ids, 2, "(B, S)")
    for name, table in (("word", word), ("position", position), ("token_type", token_type)):
        _checks.check_float(name, table)
        _checks.check_rank(name, table, 2, "(rows, D)")
        if table.shape[1] != word.shape[1] or table.dtype != word.dtype:
            raise ValueError(
                f"{name} is {table.dtype} {table.shape} and word is {word.dtype} {word.shape}; "
                "expected the same width and dtype"
            )
    for name, vector in (("scale", scale), ("bias", bias)):
        _checks.check_float(name, vector)
        _checks.check_shape(name, vector, word.shape[1:], "(D,)")
    if position_ids is None and _checks.is_over(ids.shape[1], position.shape[0]):
        raise ValueError(f"ids has length {ids.shape[1]}; expected at most {position.shape[0]} positions")
    looked_up = [("word", word), ("token_type", token_type)]
    looked_up += [] if position_ids is None else [("position", position)]
    for name, table in looked_up:
        if table.shape[0] == 0 and ids.size:
            raise ValueError(f"{name} has shape {table.shape}; expected at least one row to look up")
    _checks.check_ids("ids", ids, word.shape[0], "rows of the vocabulary")
    for name, given, table, what in (
        ("token_type_ids", token_type_ids, token_type, "token types"),
        ("position_ids", position_ids, position, "positions"),
    ):
        if given is not None:
            _checks.check_integer(name, given)
            _checks.check_shape(name, given, ids.shape, "the shape of ids")
            _checks.check_ids(name, given, table.shape[0], what)
    form = Form(
        ids=_signed(ids, word),
        token_type_ids=None if token_type_ids is None else _signed(token_type_ids, token_type),
        position_ids=None if position_ids is None else _signed(position_ids, position),
        word=word,
        position=position,
        token_type=token_type,
        scale=scale,
        bias=bias,
        epsilon=epsilon,
    )
    out: jax.Array = run(_OP, form, config=config, implementation=implementation)
    return out


def _signed(ids: Array, table: Array) -> Array:
    """Ids that int32 holds: under jit they may be any, and those beyond the last row look that up."""
    last = jnp.iinfo(ids.dtype).max
    return ids if last < 2**31 else jnp.clip(ids, 0, max(len(table) - 1, 0)).astype(jnp.int32)


def rows_of(table: jax.Array, ids: Array) -> jax.Array:
    """The rows of table (V, D) at ids, (*ids.shape, D), spread over an explicit mesh as the ids are."""
    spec = jax.typeof(ids).sharding.spec
    if all(axis is None for axis in spec):
        return jnp.take(table, ids, axis=0, mode="clip")
    return table.at[ids].get(mode="clip", out_sharding=jax.sharding.PartitionSpec(*spec, None))


def first_rows(table: jax.Array, count: int) -> jax.Array:
    """The first rows of table (V, D), (count, D); NaN past its end, where a symbolic count may turn out to be."""
    if isinstance(count, int):
        return table[:count]
    return jnp.take(table, jnp.arange(count), axis=0, mode="fill", fill_value=jnp.nan)


def reference(form: Form[jax.Array]) -> jax.Array:
    """The embeddings of tokens in plain XLA. Ids outside their table are clamped to it."""
    if form.ids.size == 0:
        return jnp.zeros((*form.ids.shape, form.word.shape[1]), form.word.dtype)
    out: jax.Array = norm.normalize(_sum(form), form.scale, form.bias, None, epsilon=form.epsilon)
    return out.astype(form.word.dtype)


def _sum(form: Form[jax.Array]) -> jax.Array:
    """The sum of the three look-ups, which is normalised, in float32."""
    ids, type_ids, position_ids = form.ids, form.token_type_ids, form.position_ids
    types = form.token_type[:1] if type_ids is None else rows_of(form.token_type, type_ids)
    if position_ids is None:
        positions = first_rows(form.position, ids.shape[1])
    else:
        positions = rows_of(form.position, position_ids)
    total = rows_of(form.word, ids).astype(jnp.float32)
    return total + (positions.astype(jnp.float32) + types.astype(jnp.float32))


def _backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradients of the norm in its kernels, then sums over tokens."""
    (dout,) = cotangents
    layer_norm = functools.partial(
        norm.layer_norm, epsilon=form.epsilon, implementation="interpret" if interpret else "triton"
    )
    pull = jax.vjp(layer_norm, _sum(form), form.scale, form.bias)[1]
    dtotal, dscale, dbias = pull(dout.astype(jnp.float32))
    return *_summed(form, dtotal, None), dscale, dbias


def _backward_in_mosaic(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradients of a token in a kernel, which adds some of them up, then the other sums over tokens."""
    (dout,) = cotangents
    dtotal, by_position, dscale, dbias = mosaic_backward.embed_tokens_backward(
        form, dout, config=config, target=target, interpret=interpret
    )
    vectors = dscale.astype(form.scale.dtype), dbias.astype(form.bias.dtype)
    return *_summed(form, dtotal, by_position), *vectors


def _summed(
    form: Form[jax.Array], dtotal: jax.Array, by_position: jax.Array | None
) -> tuple[jax.Array | None, ...]:
    """The cotangents of ids and tables: sums of dtotal (B, S, D) over tokens, in float32 whatever the dtype.

    Args:
      by_position: dtotal added up over B, if it is.
    """
    ids, token_type_ids, position_ids, word, position, token_type, _, _ = form.operands

    def scattered(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.zeros(table.shape, jnp.float32).at[jnp.clip(ids, 0, len(table) - 1)].add(dtotal)

    dword = scattered(word, ids)
    if position_ids is not None:
        dposition = scattered(position, position_ids)
    else:
        if by_position is None:
            by_position = jnp.sum(dtotal, axis=0)
        dposition = jnp.pad(by_position, ((0, len(position) - len(by_position)), (0, 0)))
    if token_type_ids is None:  # all tokens have a position, and the first type
        dtoken_type = jnp.pad(jnp.sum(dposition, axis=0, keepdims=True), ((0, len(token_type) - 1), (0, 0)))
    else:
        # Sums, and no scatter: there are few types, and all tokens would meet in their rows.
        types = jnp.clip(token_type_ids, 0, len(token_type) - 1)
        is_type = types[:, :, None, None] == jnp.arange(len(token_type))[:, None]
        dtoken_type = jnp.sum(jnp.where(is_type, dtotal[:, :, None, :], 0.0), axis=(0, 1))
    return None, None, None, *(x.astype(word.dtype) for x in (dword, dposition, dtoken_type))


_OP: Op[Form[Any]] = Op(
    name="embed_tokens",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=PORTABLE,
            call=mosaic.embed_tokens,
            config=mosaic.Config,
            refuses=mosaic.unsupported,
            preferred=mosaic.prefer,
        ),
        Kernel(backend="triton", architectures=AMPERE_ON, call=triton.embed_tokens, config=triton.Config),
    ),
    backward=(
        Backward(
            backend="mosaic",
            architectures=PORTABLE,
            call=_backward_in_mosaic,
            refuses=mosaic_backward.unsupported,
            preferred=functools.partial(prefer_on_hopper, itemsizes=(2, 4)),
        ),
        Backward(backend="triton", call=_backward),
    ),
    sharding=Sharding(equation="b S, b S, b S, V D, P D, T D, D, D -> b S D"),
)
