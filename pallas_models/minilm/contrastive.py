"""The loss of sentence encoders on pairs that belong together, with the rest of the batch as negatives.

It is that of [Efficient Natural Language Response Suggestion](https://arxiv.org/abs/1705.00652), section 4.4, on
cosines, as sentence-transformers has it (MultipleNegativesRankingLoss).
"""

import jax
import jax.numpy as jnp

from pallas_models import ops, training
from pallas_models._modules import Params, bind
from pallas_models.minilm.model import EncoderConfig, MiniLM, MiniLMConfig
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array

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

    The mean over the anchors of the cross entropy of `softmax(scale * cosines)`, where the cosines are those of an
    anchor with all positives and negatives, and its own positive is the right one.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_minilm`; with layers stacked or not, and cast by
        `training.cast` for mixed precision. Embeddings of sentences are float32 in any case.
      anchors: ids and mask, (B, S) each, as in `encode`.
      positives: ids and mask of the sentence that belongs to each anchor, (B, T).
      negatives: ids and mask of further sentences that belong to no anchor, (N, U), or None.
      scale: what cosines are multiplied by, the inverse of the temperature.
      symmetric: whether to average this loss with that of finding the anchor of each positive.
      config: the model's sizes.
      remat: what the backward pass finds kept of a layer, as in `training.checkpointed`.
      implementation: as `pallas_models.ops` has it; None for the best available.

    Returns:
      A float32 scalar, in nats.

    Raises:
      TypeError: ids or masks are not integers.
      ValueError: there are not as many anchors as positives; of sizes and masks, as in `encode`.
    """
    if anchors[0].shape[0] != positives[0].shape[0]:
        raise ValueError(
            f"positives has {positives[0].shape[0]} sentences; expected {anchors[0].shape[0]}, a pair each"
        )
    factor = _checks.as_scalar("scale", scale)
    model = bind(MiniLM, config, params)

    def embed(tokens: Tokens) -> jax.Array:
        ids, mask = tokens
        _checks.check_integer("ids", ids)
        _checks.check_rank("ids", ids, 2, "(B, S)")
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
