"""What a call of a layer norm with a gated MLP is."""

import dataclasses
from typing import ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A
from pallas_models.kernels.forms.matmul import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """A gated MLP of a layer norm, plus what is normalised; see `pallas_models.ops.layer_norm_gated_mlp`.

    Attributes:
      x: (M, C).
      scale: (C,), of the layer norm.
      offset: (C,), of the layer norm.
      w_gate_up: (C, 2, H), gate then up, in the compute dtype.
      w_down: (H, C), in the compute dtype.
      activation: of the gate.
      residual: whether x is added to the result.
      epsilon: added to the variance.
      precision: of products of float32 operands.
    """

    OPERANDS: ClassVar = ("x", "scale", "offset", "w_gate_up", "w_down")

    x: A
    scale: A
    offset: A
    w_gate_up: A
    w_down: A
    activation: Activation | None
    residual: bool
    epsilon: float
    precision: jax.lax.Precision

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, C and H."""
        return *self.x.shape, self.w_down.shape[0]
