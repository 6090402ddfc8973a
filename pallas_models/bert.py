"""BERT: an encoder of post-norm layers, with learned positions.

The architecture is [BERT](https://arxiv.org/abs/1810.04805). A config says which of its relatives a model is:
[RoBERTa](https://arxiv.org/abs/1907.11692) and XLM-RoBERTa, [DistilBERT](https://arxiv.org/abs/1910.01108), or
[MPNet](https://arxiv.org/abs/2004.09297). The defaults are the sizes of
[all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2), whose embedding of a sentence is
the masked mean of [Sentence-BERT](https://arxiv.org/abs/1908.10084), scaled to unit length.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops, training
from pallas_models._modules import (
    Embedding,
    LayerNorm,
    Linear,
    Params,
    bind,
    call_layers,
    init_params,
    position_ids,
)
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.activations import Activation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """Sizes of an encoder like BERT. Each family has the defaults of its best known model.

    Attributes:
      num_token_types: rows of the table of token types; 0 for a family without token types.
      relative_buckets: how many buckets the distances between tokens fall into, each with a bias of attention for
        each head; 0 for a family without such biases.
      activation: of the MLPs, as in `ops.mlp`.
    """

    vocab_size: int
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512
    epsilon: float = 1e-12
    num_token_types: int = 0
    relative_buckets: int = 0
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MiniLMConfig(EncoderConfig):
    """Sizes of a BERT; the defaults are the sizes of all-MiniLM-L6-v2."""

    vocab_size: int = 30522
    hidden_size: int = 384
    num_layers: int = 6
    intermediate_size: int = 1536
    num_token_types: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RobertaConfig(EncoderConfig):
    """Sizes of a RoBERTa or XLM-RoBERTa; the defaults are the sizes of multilingual-e5-base.

    Positions are counted from 0.

    Attributes:
      first_position: the row of a checkpoint's table that is position 0, one more than `pad_token_id`. Parameters
        do not have the rows before it.
    """

    vocab_size: int = 250002
    epsilon: float = 1e-5
    num_token_types: int = 1
    first_position: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistilBertConfig(EncoderConfig):
    """Sizes of a DistilBERT; the defaults are the sizes of distilbert-base-uncased."""

    vocab_size: int = 30522
    num_layers: int = 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MPNetConfig(EncoderConfig):
    """Sizes of an MPNet; the defaults are the sizes of all-mpnet-base-v2. Positions are counted from 0."""

    vocab_size: int = 30527
    epsilon: float = 1e-5
    relative_buckets: int = 32


class Embeddings(nnx.Module):
    """Word, position and token-type look-up, and layer norm: (B, S) ids to (B, S, H)."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.epsilon = config.epsilon
        self.word = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.position = Embedding(config.max_positions, config.hidden_size, dtype=dtype, rngs=rngs)
        if config.num_token_types:
            self.token_type = Embedding(config.num_token_types, config.hidden_size, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(config.hidden_size)

    def __call__(
        self,
        ids: Array,
        token_type_ids: Array | None,
        position_ids: Array | None,
        *,
        implementation: Implementation | None,
    ) -> jax.Array:
        word = self.word.embedding[...]
        none = jnp.zeros((1, word.shape[1]), word.dtype)
        return ops.embed_tokens(
            ids,
            word,
            self.position.embedding[...],
            self.token_type.embedding[...] if hasattr(self, "token_type") else none,
            self.norm.scale[...],
            self.norm.bias[...],
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            epsilon=self.epsilon,
            implementation=implementation,
        )


class Attention(nnx.Module):
    """Parameters of multi-head self-attention: queries, keys and values in one projection."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, dtype=dtype, rngs=rngs)
        self.out = Linear(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)


class MLP(nnx.Module):
    """Parameters of the feed-forward half: up, activation, down."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.up = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, rngs=rngs)


class Layer(nnx.Module):
    """One post-norm transformer layer: (B, S, H) to (B, S, H)."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.num_heads, self.activation, self.epsilon = config.num_heads, config.activation, config.epsilon
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_norm = LayerNorm(config.hidden_size)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = LayerNorm(config.hidden_size)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        segment_ids: jax.Array | None,
        bias: jax.Array | None,
        *,
        implementation: Implementation | None,
    ) -> jax.Array:
        return _run_layers([self], x, mask, segment_ids, bias, implementation=implementation)

    def arrays(self) -> dict[str, jax.Array]:
        """The parameters, as `ops.post_norm_layers` takes them."""
        attention, mlp = self.attention, self.mlp
        return dict(
            w_qkv=attention.qkv.kernel[...],
            bias_qkv=attention.qkv.bias[...],
            w_out=attention.out.kernel[...],
            bias_out=attention.out.bias[...],
            scale_out=self.attention_norm.scale[...],
            offset_out=self.attention_norm.bias[...],
            w_up=mlp.up.kernel[...],
            bias_up=mlp.up.bias[...],
            w_down=mlp.down.kernel[...],
            bias_down=mlp.down.bias[...],
            scale=self.mlp_norm.scale[...],
            offset=self.mlp_norm.bias[...],
        )


def _run_layers(
    layers: Sequence[Layer],
    x: jax.Array,
    mask: Array | None,
    segment_ids: Array | None,
    bias: jax.Array | None,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """Computes all layers in one call, in the dtype of their matrices."""
    first, arrays = layers[0], [layer.arrays() for layer in layers]
    return ops.post_norm_layers(
        x.astype(arrays[0]["w_qkv"].dtype),
        arrays,
        mask=mask,
        segment_ids=segment_ids,
        bias=bias,
        num_heads=first.num_heads,
        activation=first.activation,
        epsilon=first.epsilon,
        implementation=implementation,
    )


class MiniLM(nnx.Module):
    """The encoder: token ids to the hidden states of the last layer."""

    def __init__(self, config: EncoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        if config.relative_buckets:
            self.relative_bias = Embedding(config.relative_buckets, config.num_heads, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(
        self,
        ids: Array,
        mask: Array | None,
        token_type_ids: Array | None = None,
        segment_ids: Array | None = None,
        *,
        remat: training.Remat = "none",
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the hidden states, (B, S, hidden_size), of ids (B, S) with mask or segments (B, S)."""
        if mask is not None:
            _checks.check_mask("mask", mask, ids.shape, "the shape of ids")
        positions = None if segment_ids is None else position_ids(segment_ids)
        x = self.embeddings(ids, token_type_ids, positions, implementation=implementation)
        # Two tokens of a segment are as far apart as their places in the row.
        bias = (
            _relative_bias(self.relative_bias.embedding[...], ids.shape[1])
            if self.config.relative_buckets
            else None
        )
        if remat == "none" and isinstance(self.layers, nnx.List):
            return _run_layers(self.layers, x, mask, segment_ids, bias, implementation=implementation)
        return call_layers(self.layers, x, mask, segment_ids, bias, remat=remat, implementation=implementation)


def _relative_bias(table: jax.Array, length: int) -> jax.Array:
    """The bias of attention between all pairs of tokens, (1, num_heads, S, S), by the distance of the two.

    Distances fall into buckets as in [T5](https://arxiv.org/abs/1910.10683). Keys on either side have half of the
    buckets. Of each half, the first half has one distance a bucket; in the second half ranges grow up to a
    distance of 128.
    """
    side, furthest = len(table) // 2, 128
    alone = side // 2
    distance = np.arange(-furthest, furthest + 1)  # of the key from the query; beyond it, all keys are alike
    away = np.abs(distance)
    growth = np.log(np.maximum(away, alone).astype(np.float32) / alone) / math.log(furthest / alone)
    ranged = np.minimum(alone + (growth * (side - alone)).astype(np.int32), side - 1)
    buckets = np.where(away < alone, away, ranged) + np.where(distance > 0, side, 0)
    index = jnp.arange(length)
    pairs = jnp.clip(index[None, :] - index[:, None], -furthest, furthest) + furthest
    return table[buckets].T[:, pairs][None]


def init(key: jax.Array, config: EncoderConfig = MiniLMConfig(), *, dtype: DTypeLike = jnp.float32) -> Params:
    """Draws random parameters: a nested dict of arrays, as `encode` and `embed` take it.

    Args:
      key: of `jax.random.key`.
      config: the model's sizes.
      dtype: of the matrices, float16, bfloat16 or float32. Biases and norm scales are float32,
        which costs nothing and halves the error of a bfloat16 model.
    """
    return init_params(MiniLM, config, key, dtype)


def encode(
    params: Params,
    ids: Array,
    mask: Array | None,
    *,
    token_type_ids: Array | None = None,
    segment_ids: Array | None = None,
    config: EncoderConfig = MiniLMConfig(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the hidden states of the last layer.

    The forward pass runs at the length given: pad a batch to its longest sentence, not to a fixed size.

    The gradient keeps what the gradients of `ops.embed_tokens` and `ops.post_norm_layers` do.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_minilm`. The computation has the dtype of the
        matrices, float16, bfloat16 or float32; sums and statistics are float32.
      ids: (B, S), integers in [0, vocab_size); S at most `config.max_positions` without `segment_ids`.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding, holes allowed. None where all are tokens.
      token_type_ids: (B, S), integers in [0, num_token_types); all 0 when None.
      segment_ids: (B, S), integers, as in `embed_packed`: a token sees the tokens of its own segment, and
        positions are counted from the first of them. None for one segment a row.
      config: the model's sizes.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (B, S, hidden_size) in the dtype of the matrices. Rows of padding positions hold values without
      meaning.

    Raises:
      TypeError: ids or mask are not integers.
      ValueError: shapes do not fit each other or `config`, ids are too long or (where concrete) outside
        the vocabulary, or a concrete mask holds anything but 0 and 1.
    """
    _check_ids(ids)
    if segment_ids is not None:
        _checks.check_integer("segment_ids", segment_ids)
        _checks.check_shape("segment_ids", segment_ids, ids.shape, "the shape of ids")
    return bind(MiniLM, config, params)(ids, mask, token_type_ids, segment_ids, implementation=implementation)


def _check_ids(ids: Array) -> None:
    _checks.check_integer("ids", ids)
    _checks.check_rank("ids", ids, 2, "(B, S)")


def embed(
    params: Params,
    ids: Array,
    mask: Array,
    *,
    token_type_ids: Array | None = None,
    config: EncoderConfig = MiniLMConfig(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes sentence embeddings: `encode`, the mean over the tokens of a sentence, unit L2 norm.

    Arguments and errors are as in `encode`. The gradient keeps the means too, 4 hidden_size bytes a sentence.

    Returns:
      (B, hidden_size) float32 with unit norm; zeros for a row whose mask is all zero. The cosine of two
      sentences is the dot product of their embeddings.
    """
    _check_ids(ids)
    _checks.check_mask("mask", mask, ids.shape, "the shape of ids")
    hidden = encode(params, ids, mask, token_type_ids=token_type_ids, config=config, implementation=implementation)
    return ops.mean_pool(hidden, mask, implementation=implementation)


def embed_packed(
    params: Params,
    ids: Array,
    segment_ids: Array,
    *,
    num_segments: int,
    token_type_ids: Array | None = None,
    config: EncoderConfig = MiniLMConfig(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the embeddings of sentences of any lengths that are joined in rows, without padding each.

    The values are the same as with `embed`. Rows of a length that is known beforehand, filled by
    `sentence.packing.pack`, need one program for whatever sentences. The gradient keeps what the
    gradient of `embed` does.

    Args:
      params, token_type_ids, config, implementation: as in `encode`.
      ids: (B, S), integers in [0, vocab_size), the tokens of whole sentences one after another.
      segment_ids: (B, S), integers: i for the tokens of sentence i, which are next to each other in one row.
        Tokens with ids outside of [0, num_segments) are padding, and have no result.
      num_segments: the number of results.

    Returns:
      (num_segments, hidden_size) float32 with unit norm; zeros for a segment without tokens.

    Raises:
      TypeError: ids or segment ids are not integers.
      ValueError: shapes do not fit each other, ids are (where concrete) outside the vocabulary, or `num_segments`
        is negative.
    """
    hidden = encode(
        params,
        ids,
        None,
        token_type_ids=token_type_ids,
        segment_ids=segment_ids,
        config=config,
        implementation=implementation,
    )
    return ops.segment_mean_pool(hidden, segment_ids, num_segments=num_segments, implementation=implementation)


Tokens = tuple[Array, Array]


def contrastive_loss(
    params: Params,
    anchors: Tokens,
    positives: Tokens,
    negatives: Tokens | None = None,
    *,
    scale: float | Array = 20.0,
    symmetric: bool = False,
    config: EncoderConfig = MiniLMConfig(),
    remat: training.Remat = "none",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes how badly each anchor tells its positive from the other sentences of the batch.

    The loss is from [Efficient Natural Language Response Suggestion](https://arxiv.org/abs/1705.00652), section
    4.4, on cosines, as sentence-transformers has it (MultipleNegativesRankingLoss): the mean over the anchors of
    the cross entropy of `softmax(scale * cosines)`, over the cosines of an anchor with all positives and
    negatives, of which its own positive is the right one.

    The gradient keeps what the gradient of `embed` does, with `remat="block"` the input of each layer alone in
    place of what the layer keeps; and the gradients of the embeddings, in float32.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_minilm`, with layers stacked or not, and cast by
        `training.cast` for mixed precision. Embeddings of sentences are float32 in any case.
      anchors: ids and mask, (B, S) each, as in `encode`.
      positives: ids and mask of the sentence that belongs to each anchor, (B, T).
      negatives: ids and mask of further sentences that belong to no anchor, (N, U), or None.
      scale: what cosines are multiplied by, the inverse of the temperature.
      symmetric: whether to average this loss with the loss of finding the anchor of each positive.
      config: the model's sizes.
      remat: what a layer keeps for the backward pass, as in `training.checkpointed`.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      A float32 scalar, in nats.

    Raises:
      TypeError: ids or masks are not integers.
      ValueError: there are not as many anchors as positives, or sizes or masks are wrong, as in `encode`.
    """
    if anchors[0].shape[0] != positives[0].shape[0]:
        raise ValueError(
            f"positives has {positives[0].shape[0]} sentences; expected {anchors[0].shape[0]}, a pair each"
        )
    factor = _checks.as_scalar("scale", scale)
    model = bind(MiniLM, config, params)

    def embed(tokens: Tokens) -> jax.Array:
        ids, mask = tokens
        _check_ids(ids)
        hidden = model(ids, mask, remat=remat, implementation=implementation)
        return ops.mean_pool(hidden, mask, implementation=implementation)

    def rank(queries: jax.Array, candidates: jax.Array) -> jax.Array:
        labels = jnp.arange(queries.shape[0])
        return ops.linear_cross_entropy(
            queries * factor, candidates, labels, transpose_w=True, implementation=implementation
        )

    if anchors[0].shape == positives[0].shape:  # one pass is faster than two
        both = embed((jnp.concatenate([anchors[0], positives[0]]), jnp.concatenate([anchors[1], positives[1]])))
        first, second = jnp.split(both, 2)
    else:
        first, second = embed(anchors), embed(positives)
    others = [] if negatives is None else [embed(negatives)]
    loss = rank(first, jnp.concatenate([second, *others]))
    return (loss + rank(second, first)) / 2 if symmetric else loss
