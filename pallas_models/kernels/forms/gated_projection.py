"""What a call of a gated projection is."""

import dataclasses
from typing import ClassVar, Generic

import jax
import jax.numpy as jnp

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """`(x * sigmoid(gate)) @ w + bias + residual`; see `pallas_models.ops.gated_projection`.

    Attributes:
      x: (M, K).
      gate: (M, K).
      w: (K, N).
      bias: (N,), or None.
      residual: (M, N), or None.
      out_dtype: of the result.
      precision: of products of float32 operands.
    """

    OPERANDS: ClassVar = ("x", "gate", "w", "bias", "residual")

    x: A
    gate: A
    w: A
    bias: A | None
    residual: A | None
    out_dtype: jnp.dtype
    precision: jax.lax.Precision

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.x.shape[0], self.w.shape[1], self.x.shape[1]
