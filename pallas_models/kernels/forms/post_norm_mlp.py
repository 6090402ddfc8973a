"""What a call of the projection and the MLP of a post-norm layer is."""

import dataclasses
from typing import ClassVar, Generic, NamedTuple

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A
from pallas_models.kernels.forms.matmul import Activation


class Weights(NamedTuple, Generic[A]):
    """The weights of a post-norm layer after attention.

    Attributes:
      w_out: (K, N), the output projection of attention.
      bias_out: (N,), or None.
      scale_out: (N,), of the norm after the projection.
      offset_out: (N,), of the norm after the projection.
      w_up: (N, F).
      bias_up: (F,), or None.
      w_down: (F, N).
      bias_down: (N,), or None.
      scale: (N,), of the norm after the MLP.
      offset: (N,), of the norm after the MLP.
    """

    w_out: A
    bias_out: A | None
    scale_out: A
    offset_out: A
    w_up: A
    bias_up: A | None
    w_down: A
    bias_down: A | None
    scale: A
    offset: A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The projection of attention's result and an MLP, each with residual and norm; see `ops.post_norm_mlp`.

    Attributes:
      y: (M, K), the result of attention.
      x: (M, N), the input of the layer.
      weights: of projection, MLP and norms.
      activation: of the hidden values.
      epsilon: added to the variances.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("y", "x", "weights")

    y: A
    x: A
    weights: Weights[A]
    activation: Activation | None
    epsilon: float
    precision: jax.lax.Precision
