"""What a call of all layers of a post-norm encoder is."""

import dataclasses
from typing import ClassVar, Generic, NamedTuple

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A
from pallas_models.kernels.forms.matmul import Activation


class Layer(NamedTuple, Generic[A]):
    """The weights of a layer, in the order of their names, as a dict has them under `jax.jit`.

    Attributes:
      bias_down: (N,).
      bias_out: (N,).
      bias_qkv: (3 N,).
      bias_up: (F,).
      offset: (N,), of the norm after the MLP.
      offset_out: (N,), of the norm after the output projection.
      scale: (N,), of the norm after the MLP.
      scale_out: (N,), of the norm after the output projection.
      w_down: (F, N).
      w_out: (N, N), the output projection of attention.
      w_qkv: (N, 3 N), the projection to queries, keys and values.
      w_up: (N, F).
    """

    bias_down: A
    bias_out: A
    bias_qkv: A
    bias_up: A
    offset: A
    offset_out: A
    scale: A
    scale_out: A
    w_down: A
    w_out: A
    w_qkv: A
    w_up: A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """All layers of an encoder; see `pallas_models.ops.post_norm_layers`.

    Attributes:
      x: (B, S, N).
      mask: (B, S), int32, 0 for keys that take no part; or None. Results at these tokens have no meaning.
      bias: (B or 1, num_heads or 1, S, S), added to the scaled scores of each layer; or None.
      segment_ids: (B, S), integers: queries see keys with the same id; or None.
      layers: one or more.
      num_heads: of attention.
      activation: of the hidden values.
      epsilon: added to the variances.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("x", "mask", "bias", "segment_ids", "layers")

    x: A
    mask: A | None
    bias: A | None
    segment_ids: A | None
    layers: tuple[Layer[A], ...]
    num_heads: int
    activation: Activation | None
    epsilon: float
    precision: jax.lax.Precision
