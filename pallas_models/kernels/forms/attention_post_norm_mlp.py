"""What a call of all of a post-norm layer after the projection to queries, keys and values is."""

import dataclasses
from typing import ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A, attention_matmul_layer_norm
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.forms.post_norm_mlp import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """Attention, its projection and an MLP; see `pallas_models.ops.attention_post_norm_mlp`.

    Attributes:
      qkv: (B, S, 3 K), queries, keys and values.
      mask: (B, S), integers, 0 for keys that take no part; or None. Results at these tokens have no meaning.
      bias: (B or 1, num_heads or 1, S, S), added to the scaled scores; or None.
      segment_ids: (B, S), integers: queries see keys with the same id; or None.
      x: (B, S, N), the input of the layer.
      weights: of projection, MLP and norms.
      num_heads: of attention.
      activation: of the hidden values.
      epsilon: added to the variances.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("qkv", "mask", "bias", "segment_ids", "x", "weights")

    qkv: A
    mask: A | None
    bias: A | None
    segment_ids: A | None
    x: A
    weights: Weights[A]
    num_heads: int
    activation: Activation | None
    epsilon: float
    precision: jax.lax.Precision

    @property
    def projected(self) -> attention_matmul_layer_norm.Form[A]:
        """The part of the call before the MLP, of a call without a bias of scores."""
        w = self.weights
        return attention_matmul_layer_norm.Form(
            qkv=self.qkv,
            mask=self.mask,
            segment_ids=self.segment_ids,
            residual=self.x,
            w=w.w_out,
            bias=w.bias_out,
            scale=w.scale_out,
            offset=w.offset_out,
            num_heads=self.num_heads,
            epsilon=self.epsilon,
            precision=self.precision,
        )
