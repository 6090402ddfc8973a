"""What a call of the cross entropy of a linear layer is."""

import dataclasses
from typing import ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a row of logits, as in `pallas_models.ops.linear_cross_entropy`."""

    label_smoothing: float
    logit_softcap: float | None
    z_loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The losses of all tokens; see `pallas_models.ops.linear_cross_entropy`.

    Attributes:
      x: (T, D).
      w: (D, V), or (V, D) if `transpose_w`.
      bias: (V,), or None.
      labels: (T,) int32, -1 for one outside of the vocabulary.
      weights: (T,) float32. A token of weight 0 has a loss of 0.
      loss: of a row of logits.
      chunk: how many tokens are computed at a time at most.
      precision: of float32 products.
      gradient: whether the gradient of `sum(weights * losses)` by x, w and the bias is computed too.
    """

    OPERANDS: ClassVar = ("x", "w", "bias", "labels", "weights")

    x: A
    w: A
    bias: A | None
    labels: A
    weights: A
    transpose_w: bool
    loss: Loss
    chunk: int
    precision: jax.lax.Precision
    gradient: bool

    @property
    def vocab(self) -> int:
        """V."""
        return self.w.shape[0 if self.transpose_w else 1]
