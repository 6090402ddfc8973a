"""What a call of attention with its output projection and a layer norm is."""

import dataclasses
from typing import ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A, attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """`layer_norm(attention(qkv) @ w + bias + residual) * scale + offset`.

    Attributes:
      qkv: (B, S, 3 K), queries, keys and values.
      mask: (B, S), integers, 0 for keys that take no part; or None.
      segment_ids: (B, S), integers: queries see keys with the same id; or None.
      residual: (B, S, N).
      w: (K, N).
      bias: (N,), of the product, or None.
      scale: (N,), of the layer norm.
      offset: (N,), of the layer norm.
      num_heads: of attention.
      epsilon: added to the variance.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("qkv", "mask", "segment_ids", "residual", "w", "bias", "scale", "offset")

    qkv: A
    mask: A | None
    segment_ids: A | None
    residual: A
    w: A
    bias: A | None
    scale: A
    offset: A
    num_heads: int
    epsilon: float
    precision: jax.lax.Precision

    @property
    def attention(self) -> attention.Form[A]:
        """The attention."""
        head_dim = self.w.shape[0] // self.num_heads
        return attention.Form(
            qkv=(self.qkv,),
            mask=self.mask,
            segment_ids=self.segment_ids,
            kv_segment_ids=self.segment_ids,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            sm_scale=head_dim**-0.5,
            precision=self.precision,
        )
