"""The head of a sentence encoder, after the transformer: pooling, dense layers and normalisation.

These are the modules that sentence-transformers lists in modules.json, with its values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_models import ops
from pallas_models.ops import Implementation

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """The layer `activation(x @ kernel + bias)`; with `residual` its input is added.

    The parameters are `kernel` (in_features, out_features), `bias` (out_features,) and, for a residual of another
    width, `residual` (in_features, out_features).
    """

    in_features: int
    out_features: int
    activation: str = "tanh"
    use_bias: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is unknown; expected one of {tuple(ACTIVATIONS)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Normalize:
    """Scales embeddings to unit L2 norm."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm:
    """A layer norm with parameters `scale` and, with `use_bias`, `bias`, (features,)."""

    epsilon: float = 1e-5
    use_bias: bool = True


Layer = Dense | Normalize | LayerNorm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """How the hidden states of a sentence become its embedding; the default is the head of all-MiniLM-L6-v2.

    Attributes:
      pooling: the ways of pooling, whose results are joined in this order:
        "cls", "lasttoken": the hidden state of the first, or of the last token;
        "mean", "max": over the tokens, of each dimension;
        "mean_sqrt_len_tokens": the sum over the tokens, divided by the square root of their number;
        "weightedmean": the mean with weights 1, 2, 3, ... in the order of the tokens.
      layers: are applied to the pooled vector, in this order.
    """

    pooling: tuple[Pooling, ...] = ("mean",)
    layers: tuple[Layer, ...] = (Normalize(),)

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.pooling if mode not in get_args(Pooling)]
        if unknown or not self.pooling:
            raise ValueError(f"pooling={self.pooling}; expected some of {get_args(Pooling)}")

    def features(self, hidden_size: int) -> int:
        """The number of dimensions of an embedding."""
        dense = [layer.out_features for layer in self.layers if isinstance(layer, Dense)]
        return dense[-1] if dense else hidden_size * len(self.pooling)

    def normalized(self) -> "Head":
        """This head, with a normalisation at its end if there is none."""
        if self.layers and isinstance(self.layers[-1], Normalize):
            return self
        return dataclasses.replace(self, layers=(*self.layers, Normalize()))


HEAD = Head()


def apply(
    head: Head,
    params: Mapping[str, Any],
    hidden: jax.Array,
    mask: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes embeddings from hidden states.

    The gradient keeps what the gradients of the poolings do, `ops.mean_pool` or `ops.segment_mean_pool` for means,
    and the input of each layer, (B, D) float32.

    Args:
      head: the pooling and the layers.
      params: the parameters of each layer that has any, by its index in `head.layers` as a string.
      hidden: (B, S, H), the hidden states of padded or of packed sentences.
      mask: (B, S), 1 for a token and 0 for padding, of padded sentences.
      segment_ids: (B, S), of packed sentences: i for the tokens of sentence i, as in `bert.embed_packed`.
      num_segments: the number of packed sentences.
      implementation: as in `pallas_models.ops`; None for the best available.

    Returns:
      (B, D) or (num_segments, D) float32, with D = `head.features(H)`.

    Raises:
      ValueError: neither or both of `mask` and `segment_ids` are given, or shapes do not fit.
    """
    if (mask is None) == (segment_ids is None):
        raise ValueError("expected either mask or segment_ids")
    # The usual case, the mean and then unit norm, is one kernel.
    fused = head.pooling == ("mean",) and head.layers[:1] == (Normalize(),)
    layers = list(enumerate(head.layers))[1 if fused else 0 :]

    def mean(x: jax.Array, normalize: bool = False) -> jax.Array:
        if mask is not None:
            return ops.mean_pool(x, mask, normalize=normalize, implementation=implementation)
        assert segment_ids is not None and num_segments is not None
        return ops.segment_mean_pool(
            x, segment_ids, num_segments=num_segments, normalize=normalize, implementation=implementation
        )

    if head.pooling == ("mean",):
        x = mean(hidden, fused)
    else:
        if mask is not None:
            num_segments = len(mask)
            segment_ids = jnp.where(
                mask.astype(bool), jnp.arange(num_segments, dtype=jnp.int32)[:, None], num_segments
            )
        assert segment_ids is not None and num_segments is not None
        x = _pool(head.pooling, hidden, segment_ids, num_segments, mean)
    for index, layer in layers:
        x = _CALLS[type(layer)](layer, params.get(str(index), {}), x, implementation)
    return x


def _pool(
    pooling: tuple[Pooling, ...],
    hidden: jax.Array,
    segment_ids: jax.Array,
    num_segments: int,
    mean: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    ids = segment_ids.ravel().astype(jnp.int32)
    ids = jnp.where(ids < 0, num_segments, ids)  # beyond the last, where nothing is written
    rows = hidden.reshape(-1, hidden.shape[-1])
    places = jnp.arange(len(ids), dtype=jnp.int32)
    count = jnp.zeros(num_segments, jnp.int32).at[ids].add(1, mode="drop")
    first = jnp.full(num_segments, len(ids), jnp.int32).at[ids].min(places, mode="drop")
    last = first + count - 1

    def weighted() -> jax.Array:
        at = (places - first.at[ids].get(mode="clip") + 1).astype(jnp.float32)
        return mean(hidden.astype(jnp.float32) * at.reshape(*hidden.shape[:2], 1)) * (2 / (count + 1))[:, None]

    def largest() -> jax.Array:
        return jnp.full((num_segments, rows.shape[-1]), -jnp.inf, rows.dtype).at[ids].max(rows, mode="drop")

    modes: dict[str, Callable[[], jax.Array]] = {
        "cls": lambda: rows.at[first].get(mode="clip"),
        "lasttoken": lambda: rows.at[last].get(mode="clip"),
        "max": largest,
        "mean": lambda: mean(hidden),
        "mean_sqrt_len_tokens": lambda: mean(hidden) * jnp.sqrt(count.astype(jnp.float32))[:, None],
        "weightedmean": weighted,
    }
    pooled = jnp.concatenate([modes[mode]().astype(jnp.float32) for mode in pooling], axis=-1)
    return jnp.where(count[:, None] > 0, pooled, 0.0)


def _normalize(
    _: Normalize, __: Mapping[str, jax.Array], x: jax.Array, implementation: Implementation | None
) -> jax.Array:
    return ops.mean_pool(x[:, None, :], jnp.ones((len(x), 1), jnp.int32), implementation=implementation)


def _layer_norm(
    layer: LayerNorm, params: Mapping[str, jax.Array], x: jax.Array, implementation: Implementation | None
) -> jax.Array:
    scale = params["scale"]
    bias = params["bias"] if layer.use_bias else jnp.zeros_like(scale)
    return ops.layer_norm(x, scale, bias, epsilon=layer.epsilon, implementation=implementation)


def _dense(
    layer: Dense, params: Mapping[str, jax.Array], x: jax.Array, implementation: Implementation | None
) -> jax.Array:
    kernel = params["kernel"]

    def product(kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return ops.matmul(
            x.astype(kernel.dtype), kernel, bias=bias, out_dtype=jnp.float32, implementation=implementation
        )

    out = ACTIVATIONS[layer.activation](product(kernel, params.get("bias")))
    if layer.residual:
        out += product(params["residual"]) if "residual" in params else x
    return out


_CALLS: dict[type, Callable[..., jax.Array]] = {Dense: _dense, Normalize: _normalize, LayerNorm: _layer_norm}
