"""What a call of a matrix product with layer norm is."""

import dataclasses
from typing import ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A, matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """`layer_norm(x @ w + bias + residual) * scale + offset`; see `pallas_models.ops.matmul_layer_norm`.

    Attributes:
      x: (M, K).
      w: (K, N).
      scale: (N,), of the layer norm.
      offset: (N,), of the layer norm.
      bias: (N,), of the product, or None.
      residual: (M, N), or None.
      epsilon: added to the variance.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("x", "w", "scale", "offset", "bias", "residual")

    x: A
    w: A
    scale: A
    offset: A
    bias: A | None
    residual: A | None
    epsilon: float
    precision: jax.lax.Precision

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.x.shape[0], self.w.shape[1], self.x.shape[1]

    @property
    def product(self) -> matmul.Form[A]:
        """The product with its bias, not rounded."""
        return matmul.Form(x=self.x, w=self.w, bias=self.bias, precision=self.precision, out_dtype=matmul.FLOAT32)
