"""Qwen3: a decoder of pre-norm layers with grouped-query attention, rotary positions and a gated MLP.

The dense models of the [Qwen3 Technical Report](https://arxiv.org/abs/2505.09388), 0.6B to 32B. This is the
prefill: the forward pass over whole prompts, without a cache.

Rounding differs from Hugging Face: here norms and rotations compute in float32 and round their result once.
Hugging Face's Qwen3 rounds a normalised vector to the model's dtype before it multiplies the scale and after it,
and does the same with cos, sin and the products of the rotation. In float32 both are the same.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_models import _parameter_sharding, ops, training
from pallas_models._modules import (
    Embedding,
    GatedMLP,
    Params,
    Projection,
    RMSNorm,
    bind,
    call_layers,
    init_params,
    last_tokens,
    look_up,
    next_token_logits,
    next_token_loss,
    position_ids,
)
from pallas_models._parameter_sharding import over_groups
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array

Table = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Config:
    """Sizes of the model; the defaults are the sizes of Qwen3-8B."""

    head_groups = 1  # no field, as no file describes it: see `group_heads`

    vocab_size: int = 151936
    hidden_size: int = 4096
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    max_positions: int = 40960
    rope_theta: float = 1e6
    epsilon: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} cannot be rotated; expected an even number")
        if self.head_groups < 1 or self.num_kv_heads % self.head_groups:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} is not a multiple of head_groups={self.head_groups}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQwen3Config(Qwen3Config):
    """Sizes of a model with parameters that `group_heads` gave.

    Attributes:
      head_groups: the number of groups of heads in the QKV projections, one after another.
    """

    head_groups: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3EncoderConfig(Qwen3Config):
    """Sizes of a model without a head, for `encode`; the defaults are the sizes of Qwen3-Embedding-0.6B."""

    vocab_size: int = 151669
    hidden_size: int = 1024
    num_layers: int = 28
    num_heads: int = 16
    intermediate_size: int = 3072
    max_positions: int = 32768
    tie_embeddings: bool = True


# By the names of the Hugging Face hub, which put "Qwen/" before them.
CONFIGS = {
    "Qwen3-0.6B": Qwen3Config(
        hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tie_embeddings=True
    ),
    "Qwen3-1.7B": Qwen3Config(
        hidden_size=2048, num_layers=28, num_heads=16, intermediate_size=6144, tie_embeddings=True
    ),
    "Qwen3-4B": Qwen3Config(hidden_size=2560, intermediate_size=9728, tie_embeddings=True),
    "Qwen3-8B": Qwen3Config(),
    "Qwen3-14B": Qwen3Config(hidden_size=5120, num_layers=40, num_heads=40, intermediate_size=17408),
    "Qwen3-32B": Qwen3Config(hidden_size=5120, num_layers=64, num_heads=64, intermediate_size=25600),
}


class Attention(nnx.Module):
    """Parameters of grouped-query self-attention: queries, keys and values in one projection."""

    def __init__(self, config: Qwen3Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Projection(config.hidden_size, (heads + 2 * kv_heads) * head_dim, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.out = Projection(heads * head_dim, config.hidden_size, dtype=dtype, rngs=rngs)


class Layer(nnx.Module):
    """One pre-norm decoder layer: (B, S, H) to (B, S, H)."""

    def __init__(self, config: Qwen3Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        table: Table,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the layer, with cos and sin of the positions as `table`."""
        (cos, sin), config, attention, mlp = table, self.config, self.attention, self.mlp
        groups = config.head_groups
        num_heads, num_kv_heads = config.num_heads // groups, config.num_kv_heads // groups

        def norm(x: Array, norm: RMSNorm) -> tuple[jax.Array, jax.Array]:
            # With x itself, whose gradient the norm's kernel then adds to its own.
            return ops.rms_norm(
                x,
                norm.scale[...],
                return_residual=True,
                epsilon=config.epsilon,
                implementation=implementation,
            )

        def linear(x: Array, projection: Projection, residual: Array | None = None) -> jax.Array:
            return ops.matmul(
                x,
                projection.kernel[...],
                residual=residual,
                precision=precision,
                implementation=implementation,
            )

        def attend(qkv: jax.Array) -> jax.Array:
            rotated = ops.rotary(
                qkv,
                cos,
                sin,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                q_scale=attention.q_norm.scale[...],
                k_scale=attention.k_norm.scale[...],
                epsilon=config.epsilon,
                implementation=implementation,
            )
            return ops.attention_qkv(
                checkpoint_name(rotated, "rotated"),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                causal=True,
                mask=mask,
                segment_ids=segment_ids,
                precision=precision,
                implementation=implementation,
            )

        y, x = norm(x, self.attention_norm)
        y = checkpoint_name(y, "attention_norm")
        y = over_groups(attend, checkpoint_name(linear(y, attention.qkv), "qkv"), groups)
        x = checkpoint_name(linear(y, attention.out, residual=x), "residual")
        y, x = norm(x, self.mlp_norm)
        y = checkpoint_name(y, "mlp_norm")
        return ops.gated_mlp(
            y,
            mlp.gate_up.kernel[...],
            mlp.down.kernel[...],
            residual=x,
            precision=precision,
            implementation=implementation,
        )


class Qwen3(nnx.Module):
    """The language model without its head, which multiplies by the kernel of `head` or by the word embeddings."""

    def __init__(self, config: Qwen3Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.word = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size)
        if not config.tie_embeddings:
            self.head = Projection(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        ids: Array,
        mask: Array | None = None,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        last_only: bool = False,
        remat: training.Remat = "none",
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the input of the head, (B, S, H); arguments and errors are as in `logits` and `loss`."""
        config = self.config
        x = look_up(self.word.embedding[...], ids)
        if mask is not None:
            _checks.check_mask("mask", mask, ids.shape, "the shape of ids")
        table = _table(positions, ids.shape, config)
        x = call_layers(self.layers, x, table, mask, segment_ids, remat=remat, implementation=implementation)
        if last_only:
            x = last_tokens(x, mask)
        return ops.rms_norm(x, self.norm.scale[...], epsilon=config.epsilon, implementation=implementation)

    def head_kernel(self) -> jax.Array:
        """The kernel of the head: (H, V), or (V, H) where it is tied to the embeddings."""
        return self.word.embedding[...] if self.config.tie_embeddings else self.head.kernel[...]


def _table(positions: Array | None, shape: tuple[int, ...], config: Qwen3Config) -> Table:
    """cos and sin for tokens of this shape, (B, S)."""
    if positions is None and _checks.is_over(shape[1], config.max_positions):
        raise ValueError(f"length {shape[1]} is too long; expected at most {config.max_positions} positions")
    if positions is None:
        positions = jnp.arange(shape[1])
    elif positions.ndim == 2:
        _checks.check_shape("positions", positions, shape, "(B, S)")
    return ops.rotary_table(positions, config.head_dim, theta=config.rope_theta)


def init(key: jax.Array, config: Qwen3Config = Qwen3Config(), *, dtype: DTypeLike = jnp.float32) -> Params:
    """Draws random parameters: a nested dict of arrays, as `logits` takes it; `["layers"]["0"]` is one of `layer`.

    Args:
      key: of `jax.random.key`.
      config: the model's sizes.
      dtype: of the matrices, float16, bfloat16 or float32. They are (in, out), of gate and up
        (in, 2, out); norm scales are float32.
    """
    return init_params(Qwen3, config, key, dtype)


def init_layer(key: jax.Array, config: Qwen3Config = Qwen3Config(), *, dtype: DTypeLike = jnp.float32) -> Params:
    """Draws the random parameters of one layer, as `layer` takes them; arguments are as in `init`."""
    return init_params(Layer, config, key, dtype)


def shardings(
    config: Qwen3Config,
    mesh: jax.sharding.Mesh,
    *,
    tensor: str | None = "model",
    fsdp: str | None = None,
    stacked: bool = False,
) -> dict[str, Any]:
    """How the parameters are spread over a mesh; arguments, result and errors are as in `gpt2.shardings`."""
    return _parameter_sharding.shardings(init, config, mesh, tensor=tensor, fsdp=fsdp, stacked=stacked)


def group_heads(params: Params, config: Qwen3Config, groups: int) -> tuple[Params, GroupedQwen3Config]:
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
    grouped = GroupedQwen3Config(**dataclasses.asdict(config) | {"head_groups": groups})
    return _parameter_sharding.group_heads(
        params, config.head_groups, groups, (config.num_heads, config.num_kv_heads)
    ), grouped


def layer(
    params: Params,
    x: Array,
    *,
    mask: Array | None = None,
    positions: Array | None = None,
    config: Qwen3Config = Qwen3Config(),
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes one decoder layer over whole prompts.

    `y = x + attention(rms_norm(x))`, then `y + mlp(rms_norm(y))`, in eight kernels: the norms, queries, keys
    and values in one product, per-head norm and rotation in place, causal grouped-query attention, its
    projection with the residual, gate and up in one product with `silu(gate) * up` as its epilogue, and down
    with the residual.

    Beside x and the parameters the gradient keeps for each token 3 H + 2 Q + A + 3 I numbers of the dtype of x,
    with Q the width of queries, keys and values, A of all queries and I of the MLP, and 2 + `num_heads` in
    float32.

    Args:
      params: nested dict of arrays, from `init_layer`, or `["layers"]["0"]` of a whole model's.
      x: (B, S, H) in the dtype of the matrices: float16, bfloat16 or float32. Sums and statistics are float32.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding, holes allowed, or None.
      positions: (S,) or (B, S), integers; 0 to S - 1 when None.
      config: the model's sizes; a layer ignores the size of the vocabulary and the number of layers.
      precision: of float32 products: None and HIGHEST are true float32, DEFAULT and HIGH allow TF32 on a GPU.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      The shape and dtype of `x`. Rows of padding positions hold values without meaning.

    Raises:
      TypeError: x is not floating point, or not of the dtype of the matrices, or positions are not integers.
      ValueError: shapes do not fit each other or `config`.
    """
    _checks.check_float("x", x)
    _checks.check_rank("x", x, 3, "(B, S, H)")
    table = _table(positions, x.shape[:2], config)
    return bind(Layer, config, params)(x, table, mask, precision=precision, implementation=implementation)


def encode(
    params: Params,
    ids: Array,
    mask: Array | None,
    *,
    segment_ids: Array | None = None,
    config: Qwen3Config = Qwen3EncoderConfig(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the hidden states after the last norm; an encoder of sentences pools the last token's.

    The gradient keeps what each layer does, and its input.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_encoder`.
      ids: (B, S), integers in [0, vocab_size); S at most `config.max_positions`.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding (on either side). None where all are tokens.
      segment_ids: (B, S), integers, of packed sentences, as in `bert.encode`.
      config: the model's sizes.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (B, S, hidden_size) in the dtype of the matrices. Rows of padding positions hold values without meaning.

    Raises:
      TypeError, ValueError: as `logits`.
    """
    positions = None if segment_ids is None else position_ids(segment_ids)
    return bind(Qwen3, config, params)(
        ids, mask, positions=positions, segment_ids=segment_ids, implementation=implementation
    )


def logits(
    params: Params,
    ids: Array,
    mask: Array | None = None,
    *,
    positions: Array | None = None,
    last_only: bool = False,
    config: Qwen3Config = Qwen3Config(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the logits of the tokens that follow each token of whole prompts.

    The gradient keeps what each layer does and its input, and the inputs of the last norm and of the head.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_qwen3`. The computation has the dtype of the
        matrices, float16, bfloat16 or float32; sums and statistics are float32.
      ids: (B, S), integers in [0, vocab_size); S at most `config.max_positions`.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding (on either side), or None where there is
        none. A token attends to the tokens up to itself.
      positions: (S,) or (B, S), integers; 0 to S - 1 when None. Only their differences count.
      last_only: whether to compute the logits of the last token of each sequence only: generation starts from
        them, and most of the head's product is spared.
      config: the model's sizes, e.g. `CONFIGS["Qwen3-0.6B"]`.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (B, S, vocab_size) float32, or (B, vocab_size) with `last_only`. Rows of padding have no meaning.

    Raises:
      TypeError: ids, mask or positions are not integers.
      ValueError: shapes do not fit each other or `config`, ids are (where concrete) outside the vocabulary, or
        a concrete mask holds anything but 0 and 1.
    """
    model = bind(Qwen3, config, params)
    x = model(ids, mask, positions=positions, last_only=last_only, implementation=implementation)
    return next_token_logits(x, model.head_kernel(), tied=config.tie_embeddings, implementation=implementation)


def loss(
    params: Params,
    ids: Array,
    mask: Array | None = None,
    *,
    weights: Array | None = None,
    positions: Array | None = None,
    config: Qwen3Config = Qwen3Config(),
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    remat: training.Remat = "none",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the cross entropy of each token given those before it, without the logits of the whole batch.

    The gradient keeps what each layer does and its input, with `remat="block"` the input alone, H numbers a token;
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
      remat: what a layer keeps for the backward pass, as in `training.checkpointed`. The names of a layer's
        values: "attention_norm", "qkv" (before the rotation), "rotated", "attention", "residual" (after
          attention),
        "mlp_norm".

    Returns:
      A float32 scalar, in nats.

    Raises:
      TypeError, ValueError: as `logits`; weights have another shape than ids; `remat` is unknown.
    """
    model = bind(Qwen3, config, params)
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
