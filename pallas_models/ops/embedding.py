"""Token embeddings of BERT: three look-ups, their sum, and the layer norm after it."""

import jax
import jax.numpy as jnp

from pallas_models.kernels.triton import embedding as triton
from pallas_models.ops import _checks, norm
from pallas_models.ops._dispatch import Implementation, Kernel, Op, run
from pallas_models.tuning import Chooser


def embed_tokens(
    ids: jax.Array,
    word: jax.Array,
    position: jax.Array,
    token_type: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    token_type_ids: jax.Array | None = None,
    epsilon: float = 1e-12,
    config: triton.Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `layer_norm(word[ids] + position[0..S-1] + token_type[token_type_ids])`.

    Positions restart at every row of the batch ([BERT](https://arxiv.org/abs/1810.04805)).

    Args:
      ids: (B, S), integers in [0, V).
      word: (V, D), float16, bfloat16 or float32.
      position: (P, D) with P >= S, the dtype of `word`.
      token_type: (T, D), the dtype of `word`.
      scale: (D,), scale of the layer norm.
      bias: (D,), bias of the layer norm.
      token_type_ids: (B, S), integers in [0, T); all 0 when None.
      epsilon: added to the variance of the layer norm.
      config: block sizes of the Triton kernel; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      (B, S, D) in the dtype of `word`.

    Raises:
      TypeError: ids are not integers or tables not floating point.
      ValueError: shapes do not fit, S is over P, or concrete ids lie outside their table.
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
    if ids.shape[1] > position.shape[0]:
        raise ValueError(f"ids has length {ids.shape[1]}; expected at most {position.shape[0]} positions")
    for name, table in (("word", word), ("token_type", token_type)):
        if table.shape[0] == 0 and ids.size:
            raise ValueError(f"{name} has shape {table.shape}; expected at least one row to look up")
    _checks.check_ids("ids", ids, word.shape[0], "rows of the vocabulary")
    if token_type_ids is not None:
        _checks.check_integer("token_type_ids", token_type_ids)
        _checks.check_shape("token_type_ids", token_type_ids, ids.shape, "the shape of ids")
        _checks.check_ids("token_type_ids", token_type_ids, token_type.shape[0], "token types")
    return run(
        _OP,
        ids,
        token_type_ids,
        word,
        position,
        token_type,
        scale,
        bias,
        config=config,
        implementation=implementation,
        epsilon=epsilon,
    )


def rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of table (V, D) at ids, (*ids.shape, D), spread over an explicit mesh as the ids are."""
    spec = jax.typeof(ids).sharding.spec
    if all(axis is None for axis in spec):
        return jnp.take(table, ids, axis=0, mode="clip")
    return table.at[ids].get(mode="clip", out_sharding=jax.sharding.PartitionSpec(*spec, None))


def reference(
    ids: jax.Array,
    token_type_ids: jax.Array | None,
    word: jax.Array,
    position: jax.Array,
    token_type: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
) -> jax.Array:
    """The same in plain XLA. Ids outside their table are clamped to it."""
    if ids.size == 0:
        return jnp.zeros((*ids.shape, word.shape[1]), word.dtype)
    types = token_type[:1] if token_type_ids is None else rows_of(token_type, token_type_ids)
    total = rows_of(word, ids).astype(jnp.float32)
    total += position[: ids.shape[1]].astype(jnp.float32) + types.astype(jnp.float32)
    return norm.reference(total, scale, bias, None, epsilon=epsilon).astype(word.dtype)


_OP = Op(
    name="embed_tokens",
    reference=reference,
    kernels=(Kernel(backend="triton", call=triton.embed_tokens, config=triton.Config),),
)
