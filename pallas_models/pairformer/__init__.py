"""AlphaFold's pair stack: the blocks of the Pairformer, of the Evoformer and of AlphaFold 3's MSA module.

The blocks of AlphaFold 2 and 3, and of Boltz, Protenix, OpenFold and OpenFold 3, which differ in biases, sizes and
order. Parameters are nested dicts of arrays, and tell sizes, biases and parts; functions take the rest by name.
Algorithms follow the supplements of [AlphaFold 2](https://doi.org/10.1038/s41586-021-03819-2) and
[AlphaFold 3](https://doi.org/10.1038/s41586-024-07487-w).

Every function computes an update, to which `residual=True` adds what it updates at no cost; blocks and stacks have
it added. There is no dropout. Masks are bool, integer or float: not 0 for what is there, 0 for padding, holes
allowed. What is masked has no part in the update of anything else, and its own is finite.

Norms, softmax and sums are float32. `**options` are the fields of `Options`: `compute_dtype`, `precision` and
`implementation`. Gradients keep what the gradients of the ops do that a function is made of, and three float32
numbers for each that is gated.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models import training
from pallas_models._modules import Params, bind, init_params
from pallas_models.ops._checks import Array, check_float
from pallas_models.ops.trimul import Residuals
from pallas_models.pairformer import _configs
from pallas_models.pairformer._numerics import Options
from pallas_models.pairformer._transition import Transition, TransitionConfig
from pallas_models.pairformer.attention import (
    AttentionConfig,
    AttentionPairBias,
    ColumnAttention,
    Direction,
    EndingBias,
    TriangleAttention,
    check_mask,
)
from pallas_models.pairformer.blocks import (
    MSA_MODULE,
    Block,
    Evoformer,
    EvoformerBlock,
    EvoformerConfig,
    PairConfig,
    Pairformer,
    PairformerConfig,
)
from pallas_models.pairformer.msa import Normalization, OuterProductConfig, OuterProductMean, PairAveraging

__all__ = [
    "MSA_MODULE",
    "AttentionConfig",
    "AttentionPairBias",
    "Block",
    "ColumnAttention",
    "Evoformer",
    "EvoformerBlock",
    "EvoformerConfig",
    "Options",
    "OuterProductConfig",
    "OuterProductMean",
    "PairAveraging",
    "PairConfig",
    "Pairformer",
    "PairformerConfig",
    "Transition",
    "TransitionConfig",
    "TriangleAttention",
    "attention_pair_bias",
    "block",
    "evoformer_block",
    "evoformer_stack",
    "init",
    "init_block",
    "msa_column_attention",
    "msa_row_attention",
    "outer_product_mean",
    "pair_averaging",
    "stack",
    "transition",
    "triangle_attention",
]


def init(
    key: jax.Array,
    config: PairformerConfig | EvoformerConfig = PairformerConfig(),
    *,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """Draws random parameters: a nested dict of arrays, as `stack` or `evoformer_stack` takes it.

    `["layers"]["0"]` is one of `block` or `evoformer_block`.

    Args:
      key: of `jax.random.key`.
      config: sizes and variant of the stack.
      dtype: of kernels, (in, out): float16, bfloat16 or float32. Biases and norm scales are float32.
    """
    return init_params(Pairformer if isinstance(config, PairformerConfig) else Evoformer, config, key, dtype)


def init_block(
    key: jax.Array,
    config: PairformerConfig | EvoformerConfig = PairformerConfig(),
    *,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """Draws the random parameters of one block and of its parts; arguments as in `init`."""
    return init_params(Block if isinstance(config, PairformerConfig) else EvoformerBlock, config, key, dtype)


def stack(
    params: Params,
    pair: Array,
    single: Array | None = None,
    *,
    pair_mask: Array | None = None,
    single_mask: Array | None = None,
    ending_bias: EndingBias = "transposed",
    residuals: Residuals = "save",
    epsilon: float = 1e-5,
    remat: training.Remat = "none",
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the blocks of a Pairformer one after another.

    Blocks are traced and lowered once. Where `training.stack_layers` stacked their parameters, they run in
    `jax.lax.scan` and are compiled once.

    Args:
      params: nested dict of arrays, from `init`.
      remat: as in `training.checkpointed`: with "block", the gradient keeps the pairs and the single
        representation between blocks, and computes each block again.

    All other arguments, and the errors, are as in `block`.

    Returns:
      The pairs and the single representation, None where there is none, in their dtypes.
    """
    params = _configs.as_dict(params)
    first, count = _configs.found("a Pairformer", lambda: _configs.layers(params))
    config = _configs.found(
        "a Pairformer", lambda: _configs.pairformer(first, ending_bias, residuals, epsilon, count)
    )
    return bind(Pairformer, config, params)(pair, single, pair_mask, single_mask, remat=remat, **options)


def block(
    params: Params,
    pair: Array,
    single: Array | None = None,
    *,
    pair_mask: Array | None = None,
    single_mask: Array | None = None,
    ending_bias: EndingBias = "transposed",
    residuals: Residuals = "save",
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array | None]:
    """Computes a block of the Pairformer, lines 2 to 8 of Algorithm 17 of AlphaFold 3.

    The triangle multiplicative updates, outgoing and incoming, the triangle attentions, of starting and ending
    nodes, and the transition of the pairs; the attention with pair bias and the transition of the single
    representation.

    With `residuals="save"` the gradient keeps at most 17 kB a pair in bfloat16 at the default sizes: of two
    triangle updates, two triangle attentions and a transition of 128 channels.

    Args:
      params: nested dict of arrays, one of the layers of `init`. Without `single_attention` it is a block of pairs
        alone.
      pair: (B, N, N, C), float16, bfloat16 or float32.
      single: (B, N, C), of any of these dtypes, or None for a block of pairs alone.
      pair_mask: (B, N, N); all are there when None.
      single_mask: (B, N), of the keys of the attention with pair bias; all are there when None.
      ending_bias: as in `triangle_attention`.
      residuals: of both triangle updates, `"save"` or `"recompute"`, as in `ops.triangle_update`.
      epsilon: added to the variances of layer norms.

    Returns:
      The pairs and the single representation, None where there is none, in their dtypes.

    Raises:
      TypeError: an array has another dtype.
      ValueError: shapes do not fit, an option is unknown, or `params` are not a block's or do not fit
        together (all that do not are listed).
    """
    params = _configs.as_dict(params)
    config = _configs.found(
        "a Pairformer's block", lambda: _configs.pairformer(params, ending_bias, residuals, epsilon)
    )
    return bind(Block, config, params)(pair, single, pair_mask, single_mask, **options)


def evoformer_stack(
    params: Params,
    msa: Array,
    pair: Array,
    *,
    msa_mask: Array | None = None,
    pair_mask: Array | None = None,
    outer_product_first: bool = False,
    normalization: Normalization = "shifted",
    ending_bias: EndingBias = "transposed",
    residuals: Residuals = "save",
    epsilon: float = 1e-5,
    remat: training.Remat = "none",
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """Computes the blocks of an Evoformer or of an MSA module one after another.

    All blocks have the same parts: a last one without an update of the alignment is called by itself. `params` and
    `remat` are as in `stack`, all other arguments, the results and the errors as in `evoformer_block`.
    """
    params = _configs.as_dict(params)
    first, count = _configs.found("an Evoformer", lambda: _configs.layers(params))
    config = _configs.found(
        "an Evoformer",
        lambda: _configs.evoformer(
            first, ending_bias, residuals, normalization, outer_product_first, epsilon, count
        ),
    )
    return bind(Evoformer, config, params)(msa, pair, msa_mask, pair_mask, remat=remat, **options)


def evoformer_block(
    params: Params,
    msa: Array,
    pair: Array,
    *,
    msa_mask: Array | None = None,
    pair_mask: Array | None = None,
    outer_product_first: bool = False,
    normalization: Normalization = "shifted",
    ending_bias: EndingBias = "transposed",
    residuals: Residuals = "save",
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """Computes a block of the Evoformer or of the MSA module.

    Algorithm 6 of AlphaFold 2 or 8 of AlphaFold 3. Of the alignment: the row attention with pair bias or the
    averaging by pairs, the column attention, the transition, each if `params` have it; the outer product mean,
    after or before them; then what a block of the Pairformer does to pairs, whose gradient keeps as much as there.

    Args:
      params: nested dict of arrays, one of the layers of `init`.
      msa: (B, S, N, C), float16, bfloat16 or float32: S sequences of an alignment.
      pair: (B, N, N, P), of any of these dtypes.
      msa_mask: (B, S, N); all are there when None.
      pair_mask: (B, N, N); all are there when None.
      outer_product_first: whether the outer product mean begins the block, as in AlphaFold-Multimer, AlphaFold 3,
        Protenix and OpenFold 3, and not as in AlphaFold 2 and Boltz.
      normalization: as in `outer_product_mean`.
      ending_bias, residuals, epsilon: as in `block`.

    Returns:
      The alignment and the pairs, in their dtypes.

    Raises:
      TypeError, ValueError: as `block`.
    """
    params = _configs.as_dict(params)
    config = _configs.found(
        "an Evoformer's block",
        lambda: _configs.evoformer(params, ending_bias, residuals, normalization, outer_product_first, epsilon),
    )
    return bind(EvoformerBlock, config, params)(msa, pair, msa_mask, pair_mask, **options)


def triangle_attention(
    params: Params,
    pair: Array,
    mask: Array | None = None,
    *,
    direction: Direction,
    ending_bias: EndingBias = "transposed",
    residual: bool = False,
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes the gated self-attention of pairs around starting or ending nodes.

    Algorithms 13 and 14 of AlphaFold 2. With y = layer_norm(pair), queries, keys, values and gates of y, and
    b = y @ pair_bias, for each head:

        starting:  a[i, j] = softmax over k of (q[i, j] . k[i, k] / sqrt(D) + b[j, k]), times v[i, k]
        ending:    a[i, j] = softmax over k of (q[i, j] . k[k, j] / sqrt(D) + b[k, i]), times v[k, j]
        out = (sigmoid(gate) * a) @ w_out + b_out

    The gradient keeps y, q, k, v, b, a, and gates as three float32 arrays of the shape of a.

    Args:
      params: nested dict of arrays, as `["tri_att_start"]` of a block.
      pair: (B, N, N, C), float16, bfloat16 or float32.
      mask: (B, N, N), of keys: not 0 for the pairs that take part; all when None.
      direction: `"starting"` or `"ending"`.
      ending_bias: `"transposed"`, the b[k, i] above, as the algorithm and most models have it, or `"in_place"`:
        b[i, k], as the code of AlphaFold 3 has it. It is nothing to the starting node.
      residual: whether to return pair + out.
      epsilon: added to the variance of the layer norm.

    Returns:
      The shape and dtype of `pair`.

    Raises:
      TypeError: `pair` or `mask` has another dtype.
      ValueError: shapes do not fit, an option is unknown, or `params` belong to another module.
    """
    module = _attention(TriangleAttention, params, epsilon)
    return module(pair, mask, direction=direction, ending_bias=ending_bias, residual=residual, **options)


def attention_pair_bias(
    params: Params,
    single: Array,
    pair: Array,
    mask: Array | None = None,
    *,
    residual: bool = False,
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes gated self-attention along a sequence, biased by its pairs.

    Algorithm 24 of AlphaFold 3, without conditioning. The gradient keeps as much as in `triangle_attention`.

    Args:
      params: nested dict of arrays, as `["single_attention"]` of a block.
      single: (B, N, C), float16, bfloat16 or float32.
      pair: (B, N, N, P), of any of these dtypes.
      mask: (B, N), of keys; all take part when None.
      residual, epsilon: as in `triangle_attention`.

    Returns:
      The shape and dtype of `single`.

    Raises:
      TypeError: an array has another dtype.
      ValueError: shapes do not fit, or `params` belong to another module.
    """
    check_float("single", single)
    if single.ndim != 3:
        raise ValueError(f"single has shape {single.shape}; expected (B, N, C)")
    check_mask("mask", mask, single.shape[:2], "(B, N)")
    module = _attention(AttentionPairBias, params, epsilon)
    row_mask = None if mask is None else mask[:, None]
    return module(single[:, None], pair, row_mask, residual=residual, **options)[:, 0]


def msa_row_attention(
    params: Params,
    msa: Array,
    pair: Array,
    mask: Array | None = None,
    *,
    residual: bool = False,
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes gated self-attention along each sequence of an alignment, biased by pairs.

    Algorithm 7 of AlphaFold 2. The gradient keeps as much as in `triangle_attention`.

    Args:
      params: nested dict of arrays, as `["row_attention"]` of a block.
      msa: (B, S, N, C), float16, bfloat16 or float32.
      pair: (B, N, N, P), of any of these dtypes; all S sequences share its biases.
      mask: (B, S, N), of keys; all take part when None.
      residual, epsilon: as in `triangle_attention`.

    Returns:
      The shape and dtype of `msa`; errors are as in `attention_pair_bias`.
    """
    return _attention(AttentionPairBias, params, epsilon)(msa, pair, mask, residual=residual, **options)


def msa_column_attention(
    params: Params,
    msa: Array,
    mask: Array | None = None,
    *,
    residual: bool = False,
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes gated self-attention of each position of an alignment over its sequences.

    Algorithm 8 of AlphaFold 2. `params` are as `["column_attention"]` of a block; all other arguments, errors and
    what the gradient keeps are as in `msa_row_attention`, without pairs.
    """
    return _attention(ColumnAttention, params, epsilon)(msa, mask, residual=residual, **options)


def pair_averaging(
    params: Params,
    msa: Array,
    pair: Array,
    mask: Array | None = None,
    *,
    residual: bool = False,
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes means of an alignment's values over its positions, weighted by pairs: Algorithm 10 of AlphaFold 3.

    Position i takes the values of positions j by softmax over j of layer_norm(pair[i, j]) @ pair_bias, the same in
    every sequence; they are gated and projected. The gradient keeps weights (B, H, N, N), values and gates.

    Args:
      params: nested dict of arrays, as `["pair_averaging"]` of a block.
      msa: (B, S, N, C), float16, bfloat16 or float32.
      pair: (B, N, N, P), of any of these dtypes.
      mask: (B, N, N), of pairs that have a weight; all when None.
      residual, epsilon: as in `triangle_attention`.

    Returns:
      The shape and dtype of `msa`; errors are as in `attention_pair_bias`.
    """
    return _attention(PairAveraging, params, epsilon)(msa, pair, mask, residual=residual, **options)


def transition(
    params: Params, x: Array, *, residual: bool = False, epsilon: float = 1e-5, **options: Unpack[Options]
) -> jax.Array:
    """Computes a layer norm and an MLP of each vector: Algorithm 11 of AlphaFold 3, or 9 and 15 of AlphaFold 2.

    With y = layer_norm(x): `(silu(y @ gate) * (y @ up)) @ down`, or `relu(y @ up + b_up) @ down + b_down` where
    `params` have `up` in place of `gate_up`. Masks are nothing to it: padding changes only itself. The gradient
    keeps y, both products or the argument of relu, and the hidden values; or, in a kernel of Hopper's, x alone.

    Args:
      params: nested dict of arrays, as `["pair_transition"]` of a block.
      x: (..., C), float16, bfloat16 or float32.
      residual, epsilon: as in `triangle_attention`.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` has another dtype.
      ValueError: shapes do not fit, or `params` belong to another module.
    """
    params = _configs.as_dict(params)
    config = _configs.found("a transition", lambda: _configs.transition(params, epsilon))
    return bind(Transition, config, params)(x, residual=residual, **options)


def outer_product_mean(
    params: Params,
    msa: Array,
    mask: Array | None = None,
    *,
    pair: Array | None = None,
    normalization: Normalization = "shifted",
    epsilon: float = 1e-5,
    **options: Unpack[Options],
) -> jax.Array:
    """Computes pairs from an alignment: Algorithm 10 of AlphaFold 2, 9 of AlphaFold 3.

    With left and right, projections of layer_norm(msa) that are 0 where the mask is:

        outer[i, j, c, d] = sum over s of left[s, i, c] * right[s, j, d]
        count[i, j] = number of sequences that have both i and j
        shifted:  out = (outer @ w_out + b_out) / (count + 1e-3)
        clamped:  out = outer @ w_out / max(count, 1) + b_out

    Outer products are of `compute_dtype`, and exist for a block of i at a time, forward and, computed again,
    backward: at most 2**27 elements. Where that is all of them, the gradient keeps them.

    Args:
      params: nested dict of arrays, as `["outer_product_mean"]` of a block.
      msa: (B, S, N, C), float16, bfloat16 or float32.
      mask: (B, S, N); all are there when None.
      pair: (B, N, N, P), to which the result is added, or None.
      normalization: `"shifted"`, as in most models, or `"clamped"`, as in Boltz.
      epsilon: added to the variance of the layer norm.

    Returns:
      (B, N, N, P) in the dtype of `pair`, or of `msa` without it.

    Raises:
      TypeError: an array has another dtype.
      ValueError: shapes do not fit, an option is unknown, or `params` belong to another module.
    """
    params = _configs.as_dict(params)
    if normalization not in ("shifted", "clamped"):
        raise ValueError(f"{normalization=} is unknown; expected 'shifted' or 'clamped'")
    config = _configs.found(
        "an outer product mean", lambda: _configs.outer_product(params, normalization, epsilon)
    )
    return bind(OuterProductMean, config, params)(msa, mask, pair=pair, **options)


def _attention(kind: Any, params: Params, epsilon: float) -> Any:
    params = _configs.as_dict(params)
    config = _configs.found("an attention", lambda: _configs.attention(params, epsilon))
    return bind(kind, config, params)
