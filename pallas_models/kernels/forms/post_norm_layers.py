"""What a call of all layers of a post-norm encoder is."""

import dataclasses
from typing import ClassVar, Generic, NamedTuple

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.forms.post_norm_mlp import Weights


class Layer(NamedTuple, Generic[A]):
    """The weights of a layer.

    Attributes:
      w_qkv: (N, 3 N), the projection to queries, keys and values.
      bias_qkv: (3 N,).
      weights: of the rest of the layer.
    """

    w_qkv: A
    bias_qkv: A
    weights: Weights[A]

    def by_name(self) -> dict[str, A]:
        """All arrays, in the order of their names."""
        arrays = dict(w_qkv=self.w_qkv, bias_qkv=self.bias_qkv, **self.weights._asdict())
        return dict(sorted(arrays.items()))


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
