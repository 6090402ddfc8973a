"""ModernBERT: an encoder of pre-norm layers with rotary positions, gated MLPs and alternating attention.

The model of [ModernBERT](https://arxiv.org/abs/2412.13663). Every third layer attends to all tokens, the other
layers to a window around each token; neither projections nor norms have biases.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_models import ops, training
from pallas_models._modules import (
    Embedding,
    GatedMLP,
    Params,
    Projection,
    bind,
    call_layers,
    init_params,
    look_up,
    position_ids,
)
from pallas_models.ops import Implementation, _checks
from pallas_models.ops._checks import Array
from pallas_models.ops.activations import Activation

Table = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModernBertConfig:
    """Sizes of the encoder; the defaults are the sizes of ModernBERT-base.

    Attributes:
      local_attention: the tokens that a token in a window sees beside itself, half of them on either side.
      global_every: of so many layers the first attends to all tokens.
      global_theta: base of the rotary frequencies of the layers that attend to all tokens.
      local_theta: base of the rotary frequencies of the other layers.
      activation: of the gates of the MLPs, as in `ops.gated_mlp`.
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    num_layers: int = 22
    num_heads: int = 12
    intermediate_size: int = 1152
    max_positions: int = 8192
    local_attention: int = 128
    global_every: int = 3
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    epsilon: float = 1e-5
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of 2 * num_heads={2 * self.num_heads}, "
                "as rotated heads need it"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Norm(nnx.Module):
    """A layer norm without an offset."""

    def __init__(self, config: ModernBertConfig):
        self.epsilon = config.epsilon
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), jnp.float32))

    def __call__(self, x: jax.Array, *, implementation: Implementation | None) -> jax.Array:
        scale = self.scale[...]
        return ops.layer_norm(x, scale, jnp.zeros_like(scale), epsilon=self.epsilon, implementation=implementation)


class Attention(nnx.Module):
    """Parameters of multi-head self-attention: queries, keys and values in one projection."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.qkv = Projection(config.hidden_size, 3 * config.hidden_size, dtype=dtype, rngs=rngs)
        self.out = Projection(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)


class Layer(nnx.Module):
    """One pre-norm layer: (B, S, H) to (B, S, H). The first of a model has no norm before its attention."""

    def __init__(self, config: ModernBertConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.num_heads, self.activation = config.num_heads, config.activation
        self.is_global = index % config.global_every == 0
        self.window = None if self.is_global else config.local_attention // 2 + 1
        if index > 0:
            self.attention_norm = Norm(config)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = Norm(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        global_table: Table,
        local_table: Table,
        mask: Array | None,
        segment_ids: Array | None,
        *,
        implementation: Implementation | None,
    ) -> jax.Array:
        y = self.attention_norm(x, implementation=implementation) if hasattr(self, "attention_norm") else x
        qkv = ops.rotary(
            ops.matmul(y, self.attention.qkv.kernel[...], implementation=implementation),
            *(global_table if self.is_global else local_table),
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            implementation=implementation,
        )
        y = ops.attention_qkv(
            qkv,
            num_heads=self.num_heads,
            window=self.window,
            mask=mask,
            segment_ids=segment_ids,
            implementation=implementation,
        )
        x = ops.matmul(y, self.attention.out.kernel[...], residual=x, implementation=implementation)
        return ops.gated_mlp(
            self.mlp_norm(x, implementation=implementation),
            self.mlp.gate_up.kernel[...],
            self.mlp.down.kernel[...],
            activation=self.activation,
            residual=x,
            implementation=implementation,
        )


class ModernBert(nnx.Module):
    """The encoder: token ids to the hidden states after the last norm."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.word = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.word_norm = Norm(config)
        self.layers = nnx.List([Layer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = Norm(config)

    def __call__(
        self,
        ids: Array,
        mask: Array | None,
        segment_ids: Array | None,
        *,
        remat: training.Remat = "none",
        implementation: Implementation | None = None,
    ) -> jax.Array:
        """Computes the hidden states, (B, S, H); arguments and errors are as in `encode`."""
        config, length = self.config, ids.shape[1]
        x = look_up(self.word.embedding[...], ids)
        if mask is not None:
            _checks.check_mask("mask", mask, ids.shape, "the shape of ids")
        if segment_ids is None and _checks.is_over(length, config.max_positions):
            raise ValueError(f"length {length} is too long; expected at most {config.max_positions} positions")
        positions = jnp.arange(length) if segment_ids is None else position_ids(segment_ids)
        tables = (
            ops.rotary_table(positions, config.head_dim, theta=theta)
            for theta in (config.global_theta, config.local_theta)
        )
        x = self.word_norm(x, implementation=implementation)
        x = call_layers(self.layers, x, *tables, mask, segment_ids, remat=remat, implementation=implementation)
        return self.norm(x, implementation=implementation)


def init(
    key: jax.Array, config: ModernBertConfig = ModernBertConfig(), *, dtype: DTypeLike = jnp.float32
) -> Params:
    """Draws random parameters: a nested dict of arrays, as `encode` takes it.

    Args:
      key: of `jax.random.key`.
      config: the model's sizes.
      dtype: of the matrices, float16, bfloat16 or float32. They are (in, out), of gate and up
        (in, 2, out); norm scales are float32.
    """
    return init_params(ModernBert, config, key, dtype)


def encode(
    params: Params,
    ids: Array,
    mask: Array | None,
    *,
    segment_ids: Array | None = None,
    config: ModernBertConfig = ModernBertConfig(),
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the hidden states after the last norm.

    The gradient keeps what the gradients of the ops of each layer do: `ops.layer_norm`, `ops.matmul`,
    `ops.rotary`, `ops.attention_qkv` and `ops.gated_mlp`.

    Args:
      params: nested dict of arrays, from `init` or `weights.load_encoder`. The computation has the dtype of the
        matrices, float16, bfloat16 or float32; sums and statistics are float32.
      ids: (B, S), integers in [0, vocab_size); S at most `config.max_positions` without `segment_ids`.
      mask: (B, S), bool or integer, 1 for a token and 0 for padding. None where all are tokens.
      segment_ids: (B, S), integers, of packed sentences, as in `bert.encode`.
      config: the model's sizes.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (B, S, hidden_size) in the dtype of the matrices. Rows of padding positions hold values without meaning.

    Raises:
      TypeError: ids, mask or segment ids are not integers.
      ValueError: shapes do not fit each other or `config`, ids are (where concrete) outside the vocabulary, or
        a concrete mask holds anything but 0 and 1.
    """
    return bind(ModernBert, config, params)(ids, mask, segment_ids, implementation=implementation)
