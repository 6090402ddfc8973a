"""What a call of a layer norm with projections is."""

import dataclasses
from typing import ClassVar, Generic

import jax
import jax.numpy as jnp

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """Products of one layer norm; see `pallas_models.ops.layer_norm_projections`.

    Attributes:
      x: (M, C).
      scale: (C,), of the layer norm.
      offset: (C,), of the layer norm.
      w: (C, G, N), in the compute dtype, or None where there is `w_first`.
      bias: (G, N), or None.
      w_first: (C, F), in the compute dtype, of the projection whose columns come first, or None.
      epsilon: added to the variance.
      precision: of products of float32 operands.
    """

    OPERANDS: ClassVar = ("x", "scale", "offset", "w", "bias", "w_first")

    x: A
    scale: A
    offset: A
    w: A | None
    bias: A | None
    w_first: A | None
    epsilon: float
    precision: jax.lax.Precision

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, C, G and N; the last two are 0 where there is no `w`."""
        _, count, n = (0, 0, 0) if self.w is None else self.w.shape
        return *self.x.shape, count, n

    @property
    def first(self) -> int:
        """F."""
        return 0 if self.w_first is None else self.w_first.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the operands of products, and of their results."""
        w = self.w_first if self.w is None else self.w
        assert w is not None  # checked by the op
        return w.dtype
