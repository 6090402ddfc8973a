"""What a call of a gated matrix product is."""

import dataclasses
from typing import ClassVar, Generic

import jax
import jax.numpy as jnp

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A
from pallas_models.kernels.forms.matmul import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """`activation(x @ gate + gate_bias) * (x @ up + up_bias)`; see `pallas_models.ops.gated_matmul`.

    Attributes:
      x: (M, K).
      w_gate_up: (K, 2, N), gate then up.
      bias: (2, N), or None.
      activation: of the gate.
      precision: of float32 products.
      out_dtype: dtype of the result.
      return_products: whether the result is a triple: the above, and both products with their biases in the dtype
        of x.
    """

    OPERANDS: ClassVar = ("x", "w_gate_up", "bias")

    x: A
    w_gate_up: A
    bias: A | None
    activation: Activation | None
    precision: jax.lax.Precision
    out_dtype: jnp.dtype
    return_products: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.x.shape[0], self.w_gate_up.shape[2], self.x.shape[1]
