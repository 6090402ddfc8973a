"""GPT-2: a decoder of pre-norm transformer blocks, with learned positions.

The model of [Language Models are Unsupervised Multitask Learners](https://github.com/openai/gpt-2), in its four
published sizes.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_models import _parameter_sharding, ops, training
from pallas_models._gpt2_flat import FLAT_SIZE as FLAT_SIZE
from pallas_models._gpt2_flat import unpack
from pallas_models._modules import (
    Embedding,
    LayerNorm,
    Linear,
    Params,
    Projection,
    bind,
    call_layers,
    init_params,
    last_tokens,
    look_up,
    next_token_logits,
    next_token_loss,
)
from pallas_models._parameter_sharding import over_groups
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.activations import Activation
from pallas_models.ops.embedding import first_rows

HEAD_DIM = 64  # of every published size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """Sizes of the model; the defaults are the sizes of GPT-2 small.

    Attributes:
      activation: of the MLPs, as in `ops.mlp`.
      tie_embeddings: whether the head is the table of word embeddings.
      scale_attn_weights: whether a checkpoint scales the scores of attention by 1 over the root of the head
        size.
      scale_attn_by_inverse_layer_idx: whether it scales them by 1 over the layer's number. Here they are always
        scaled by the root alone: `weights` multiplies the queries of a checkpoint by the rest, and
        `weights.export` divides them again.
    """

    head_groups = 1  # no field, as no file describes it: see `group_heads`

    vocab_size: int = 50257
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 1024
    epsilon: float = 1e-5
    activation: Activation = "gelu_tanh"
    tie_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        if self.head_groups < 1 or self.num_heads % self.head_groups:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of head_groups={self.head_groups}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedGPT2Config(GPT2Config):
    """Sizes of a model with parameters that `group_heads` gave.

    Attributes:
      head_groups: the number of groups of heads in the QKV projections, one after another.
    """

    head_groups: int = 1


def _size(hidden_size: int, num_layers: int) -> GPT2Config:
    return GPT2Config(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // HEAD_DIM,
        intermediate_size=4 * hidden_size,
    )


# By the names of the Hugging Face hub.
CONFIGS = {
    "gpt2": _size(768, 12),
    "gpt2-medium": _size(1024, 24),
    "gpt2-large": _size(1280, 36),
    "gpt2-xl": _size(1600, 48),
}


class Embeddings(nnx.Module):
    """The tables of words and positions: (B, S) ids to (B, S, H)."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.word = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.position = Embedding(config.max_positions, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, ids: Array, mask: Array | None, positions: Array | None) -> jax.Array:
        words, table = look_up(self.word.embedding[...], ids), self.position.embedding[...]
        if mask is not None:
            _checks.check_mask("mask", mask, ids.shape, "the shape of ids")
        if positions is None:
            if _checks.is_over(ids.shape[1], len(table)):
                raise ValueError(f"ids has length {ids.shape[1]}; expected at most {len(table)} positions")
            if mask is None:
                return words + first_rows(table, ids.shape[1])[None]
            positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        else:
            _checks.check_integer("positions", positions)
            _checks.check_shape("positions", positions, ids.shape, "the shape of ids")
            _checks.check_ids("positions", positions, len(table), "positions")
        return words + jnp.take(table, positions, axis=0, mode="clip")


class Attention(nnx.Module):
    """Parameters of multi-head self-attention: queries, keys and values in one projection."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, dtype=dtype, rngs=rngs)
        self.out = Linear(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)


class MLP(nnx.Module):
    """Parameters of the feed-forward half: up, activation, down."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.up = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, rngs=rngs)


class Block(nnx.Module):
    """One pre-norm transformer block: (B, S, H) to (B, S, H)."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.num_heads, self.head_groups = config.num_heads, config.head_groups
        self.activation, self.epsilon = config.activation, config.epsilon
        self.attention_norm = LayerNorm(config.hidden_size)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = LayerNorm(config.hidden_size)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        causal: bool = True,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the block; arguments and errors are as in `block`."""

        def norm(x: Array, norm: LayerNorm) -> tuple[jax.Array, jax.Array]:
            # With x itself, whose gradient the norm's kernel then adds to its own.
            return ops.layer_norm(
                x,
                norm.scale[...],
                norm.bias[...],
                return_residual=True,
                epsilon=self.epsilon,
                implementation=implementation,
            )

        def linear(x: Array, linear: Linear, residual: Array | None = None) -> jax.Array:
            return ops.matmul(
                x,
                linear.kernel[...],
                bias=linear.bias[...],
                residual=residual,
                precision=precision,
                implementation=implementation,
            )

        y, x = norm(x, self.attention_norm)
        y = checkpoint_name(y, "attention_norm")
        attend = functools.partial(
            ops.attention_qkv,
            num_heads=self.num_heads // self.head_groups,
            causal=causal,
            mask=mask,
            precision=precision,
            implementation=implementation,
        )
        y = over_groups(attend, checkpoint_name(linear(y, self.attention.qkv), "qkv"), self.head_groups)
        x = checkpoint_name(linear(y, self.attention.out, residual=x), "residual")
        y, x = norm(x, self.mlp_norm)
        y = checkpoint_name(y, "mlp_norm")
        up, down = self.mlp.up, self.mlp.down
        return ops.mlp(
            y,
            up.kernel[...],
            down.kernel[...],
            bias_up=up.bias[...],
            bias_down=down.bias[...],
            activation=self.activation,
            residual=x,
            precision=precision,
            implementation=implementation,
        )


class GPT2(nnx.Module):
    """The language model without its head, which multiplies by the kernel of `head` or by the word embeddings."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = LayerNorm(config.hidden_size)
        if not config.tie_embeddings:
            self.head = Projection(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        ids: Array,
        mask: Array | None = None,
        *,
        positions: Array | None = None,
        last_only: bool = False,
        remat: training.Remat = "none",
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the input of the head, (B, S, H); arguments and errors are as in `logits` and `loss`."""
        x = self.embeddings(ids, mask, positions)
        x = call_layers(self.layers, x, mask, remat=remat, implementation=implementation)
        if last_only:
            x = last_tokens(x, mask)
        return ops.layer_norm(
            x,
            self.norm.scale[...],
            self.norm.bias[...],
            epsilon=self.config.epsilon,
            implementation=implementation,
        )

    def head_kernel(self) -> jax.Array:
        """The kernel of the head: (H, V), or (V, H) where it is tied to the embeddings."""
        return self.embeddings.word.embedding[...] if self.config.tie_embeddings else self.head.kernel[...]


def init(key: jax.Array, config: GPT2Config = GPT2Config(), *, dtype: DTypeLike = jnp.float32) -> Params:
    """Draws random parameters: a nested dict of arrays, as `logits` takes it; `["layers"]["0"]` is one of `block`.

    Args:
      key: of `jax.random.key`.
      config: the model's sizes.
      dtype: of the matrices, float16, bfloat16 or float32. They are (in, out); biases and norm scales are float32.
    """
    return init_params(GPT2, config, key, dtype)


def init_block(key: jax.Array, config: GPT2Config = GPT2Config(), *, dtype: DTypeLike = jnp.float32) -> Params:
    """Draws the random parameters of one block, as `block` takes them; arguments are as in `init`."""
    return init_params(Block, config, key, dtype)


def shardings(
    config: GPT2Config,
    mesh: jax.sharding.Mesh,
    *,
    tensor: str | None = "model",
    fsdp: str | None = None,
    stacked: bool = False,
) -> dict[str, Any]:
    """How the parameters are spread over a mesh, for `jax.device_put(params, shardings(config, mesh))`.

    Tensor parallelism: devices share heads, columns of the MLP and words of the vocabulary, so that a layer sums
    twice over them, after attention and after the MLP. An axis that does not divide, such as a vocabulary of
    50257, is whole on each device. Devices share attention where `group_heads` made as many groups of heads as
    there are devices; else each gathers all heads.

    Args:
      config: the model's sizes.
      mesh: with all axes that are named.
      tensor: the axis of the mesh for tensor parallelism, or None for none.
      fsdp: the axis over which matrices are split too, and gathered where they are used, or None for none; as a
        rule it is the axis of the batch.
      stacked: whether `training.stack_layers` stacked the layers.

    Returns:
      A `jax.sharding.NamedSharding` for each parameter, in a tree like the parameters.

    Raises:
      ValueError: the mesh has no such axis.
    """
    return _parameter_sharding.shardings(init, config, mesh, tensor=tensor, fsdp=fsdp, stacked=stacked)


def group_heads(params: Params, config: GPT2Config, groups: int) -> tuple[Params, GroupedGPT2Config]:
    """Reorders the QKV projections for tensor parallelism over `groups` devices.

    Each group has its queries, keys and values side by side, so that an equal part of the columns is whole heads.
    The model computes the same. To save or export parameters, take it back with a `groups` of 1.

    Args:
      params: as in `logits`.
      config: the sizes, of a model with groups too.
      groups: how many, 1 for none.

    Returns:
      The parameters, and their config.

    Raises:
      ValueError: `groups` does not divide the number of heads of keys and values.
    """
    grouped = GroupedGPT2Config(**dataclasses.asdict(config) | {"head_groups": groups})
    return _parameter_sharding.group_heads(
        params, config.head_groups, groups, (config.num_heads, config.num_heads)
    ), grouped


def block(
    params: Params,
    x: Array,
    *,
    causal: bool = True,
    mask: Array | None = None,
    num_heads: int | None = None,
    epsilon: float = 1e-5,
    activation: Activation = "gelu_tanh",
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes one transformer block.

    `y = x + attention(layer_norm(x))`, then `y + mlp(layer_norm(y))`: seven kernels, with biases, activation and
    the two residuals in the epilogues of the matrix products.

    Beside x and the parameters the gradient keeps for each token 7 H + 2 I numbers of the dtype of x, with I the
    width of the MLP, and 6 + `num_heads` in float32.

    Args:
      params: nested dict of arrays, from `init_block`, `unpack`, `weights.load_gpt2_block`, or
        `["layers"]["0"]` of a whole model's. They say the widths.
      x: (B, S, H) in the dtype of the matrices: float16, bfloat16 or float32. Sums and statistics are float32.
      causal: whether a token attends only to itself and those before it.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding, holes allowed, or None.
      num_heads: number of heads; H / 64 when None, as in every published size.
      epsilon: added to the variance in the layer norms.
      activation: of the MLP, as in `ops.mlp`.
      precision: of float32 products: None and HIGHEST are true float32, DEFAULT and HIGH allow TF32 on a GPU.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      The shape and dtype of `x`. Rows of padding positions hold values without meaning.

    Raises:
      TypeError: x is not floating point, or not of the dtype of the matrices.
      ValueError: shapes do not fit each other, or H is not a multiple of `num_heads`.
    """
    _checks.check_float("x", x)
    _checks.check_rank("x", x, 3, "(B, S, H)")
    if num_heads is None and x.shape[-1] % HEAD_DIM:
        raise ValueError(f"x has shape {x.shape}, its width no multiple of {HEAD_DIM}: num_heads must be given")
    config = GPT2Config(
        hidden_size=x.shape[-1],
        num_heads=x.shape[-1] // HEAD_DIM if num_heads is None else num_heads,
        intermediate_size=params["mlp"]["up"]["kernel"].shape[-1],
        epsilon=epsilon,
        activation=activation,
    )
    return bind(Block, config, params)(x, mask, causal=causal, precision=precision, implementation=implementation)


def logits(
    params: Params,
    ids: Array,
    mask: Array | None = None,
    *,
    positions: Array | None = None,
    last_only: bool = False,
    config: GPT2Config = GPT2Config(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the logits of the tokens that follow each token.

    The gradient keeps what each block does and its input, and the inputs of the last norm and of the head.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_gpt2`. The computation has the dtype of the
        matrices, float16, bfloat16 or float32; sums and statistics are float32.
      ids: (B, S), integers in [0, vocab_size); S at most `config.max_positions`.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding, or None where there is no padding. A
        token attends to the tokens up to itself.
      positions: (B, S), integers below max_positions. When None, the position of a token is the number of tokens
        before it, padding not counted: the same wherever padding is, as when Hugging Face generates.
      last_only: whether to compute the logits of the last token of each sequence only.
      config: the model's sizes.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (B, S, vocab_size) float32, or (B, vocab_size) with `last_only`. Rows of padding have no meaning.

    Raises:
      TypeError: ids, mask or positions are not integers.
      ValueError: shapes do not fit each other or `config`, ids or positions are (where concrete) outside their
        table, or a concrete mask holds anything but 0 and 1.
    """
    model = bind(GPT2, config, params)
    x = model(ids, mask, positions=positions, last_only=last_only, implementation=implementation)
    return next_token_logits(x, model.head_kernel(), tied=config.tie_embeddings, implementation=implementation)


def loss(
    params: Params,
    ids: Array,
    mask: Array | None = None,
    *,
    weights: Array | None = None,
    positions: Array | None = None,
    config: GPT2Config = GPT2Config(),
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    remat: training.Remat = "none",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the cross entropy of each token given those before it, without the logits of the whole batch.

    The gradient keeps what each block does and its input, with `remat="block"` the input alone, H numbers a token;
    and of the head what `ops.linear_cross_entropy` does.

    Args:
      params: as in `logits`, or with layers stacked by `training.stack_layers`, which are compiled once. For
        mixed precision give what `training.cast` returns.
      ids, mask, positions, config, implementation: as in `logits`. A token is predicted where it and the position
        before it are no padding.
      weights: (B, S), float or bool: how much each token counts where it is predicted, e.g. 0 in a prompt; 1 for
        all when None. The first token of a sequence is never predicted.
      label_smoothing: the share of a label that is spread over the vocabulary.
      reduction: "mean" divides the sum by the sum of the weights; the loss is 0 where all weights are.
      remat: what a layer keeps for the backward pass, as in `training.checkpointed`. The names of a block's
        values: "attention_norm", "qkv", "attention", "residual" (after attention), "mlp_norm", "mlp_up" (hidden).

    Returns:
      A float32 scalar, in nats.

    Raises:
      TypeError, ValueError: as `logits`; weights have another shape than ids; `remat` is unknown.
    """
    model = bind(GPT2, config, params)
    return next_token_loss(
        model(ids, mask, positions=positions, remat=remat, implementation=implementation),
        model.head_kernel(),
        ids,
        mask,
        weights,
        tied=config.tie_embeddings,
        label_smoothing=label_smoothing,
        reduction=reduction,
        implementation=implementation,
    )


def solve(
    x: jax.Array,
    flat_weights: jax.Array,
    *,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes a block of GPT-2 small, without causal mask, on weights in one flat buffer.

    To call it often, `unpack` once and call `block`: here the slices of the buffer are copied every time, and the
    gradient keeps them beside what the gradient of `block` does.

    Args:
      x: (S, 768), float32, or the half precision that flat_weights has too.
      flat_weights: (7087872,) in the layout of `unpack`.
      precision: of float32 products, as in `block`.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (S, 768) in the dtype of `x`.

    Raises:
      TypeError: x or flat_weights are not floating point, or differ in dtype.
      ValueError: shapes do not fit.
    """
    _checks.check_float("x", x)
    if x.ndim != 2 or x.shape[1] != 768:
        raise ValueError(f"x has shape {x.shape}; expected (S, 768)")
    params = unpack(flat_weights)
    return block(params, x[None], causal=False, precision=precision, implementation=implementation)[0]
