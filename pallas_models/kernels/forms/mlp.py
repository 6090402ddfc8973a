"""What a call of an MLP is: two products with an activation between them, as one call and as one for each."""

import dataclasses
from typing import ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A, matmul
from pallas_models.kernels.forms.matmul import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """`activation(x @ w_up + bias_up) @ w_down + bias_down + residual`; see `pallas_models.ops.mlp`.

    Attributes:
      x: (M, K).
      w_up: (K, N).
      bias_up: (N,), or None.
      w_down: (N, D).
      bias_down: (D,), or None.
      residual: (M, D), or None.
      activation: of the hidden values.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("x", "w_up", "bias_up", "w_down", "bias_down", "residual")

    x: A
    w_up: A
    bias_up: A | None
    w_down: A
    bias_down: A | None
    residual: A | None
    activation: Activation
    precision: jax.lax.Precision

    @property
    def up(self) -> "Up[A]":
        """The first product."""
        return Up(x=self.x, w=self.w_up, bias=self.bias_up, activation=self.activation, precision=self.precision)

    def down(self, y: A, hidden: A) -> "Down[A]":
        """The second product, of what the first one gives."""
        return Down(
            y=y,
            hidden=hidden,
            w=self.w_down,
            bias=self.bias_down,
            residual=self.residual,
            activation=self.activation,
            precision=self.precision,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Up(forms.Form, Generic[A]):
    """`y = x @ w + bias` and `activation(y)`, both (M, N) in the dtype of x.

    Attributes:
      x: (M, K).
      w: (K, N).
      bias: (N,), or None.
      activation: of y.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("x", "w", "bias")

    x: A
    w: A
    bias: A | None
    activation: Activation
    precision: jax.lax.Precision

    @property
    def product(self) -> matmul.Form[A]:
        """The product, with `(activation(y), y)` as its results."""
        return matmul.Form(
            x=self.x,
            w=self.w,
            bias=self.bias,
            activation=self.activation,
            precision=self.precision,
            out_dtype=self.x.dtype,
            return_preactivation=True,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Down(forms.Form, Generic[A]):
    """`hidden @ w + bias + residual` as a function of y, with `hidden = activation(y)` a constant in it.

    Attributes:
      y: (M, N).
      hidden: (M, N), the hidden values that were computed where y was.
      w: (N, D).
      bias: (D,), or None.
      residual: (M, D), or None.
      activation: by which the hidden values were computed.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("y", "hidden", "w", "bias", "residual")

    y: A
    hidden: A
    w: A
    bias: A | None
    residual: A | None
    activation: Activation
    precision: jax.lax.Precision

    @property
    def product(self) -> matmul.Form[A]:
        """The product of the hidden values."""
        return matmul.Form(
            x=self.hidden,
            w=self.w,
            bias=self.bias,
            residual=self.residual,
            precision=self.precision,
            out_dtype=self.hidden.dtype,
        )
