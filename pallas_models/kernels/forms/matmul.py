"""What a call of a matrix product with epilogue is."""

import dataclasses
from typing import ClassVar, Generic, Literal

import jax
import jax.numpy as jnp

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A

Activation = Literal["gelu", "gelu_tanh", "relu", "sigmoid", "silu"]
"""`"gelu"` is exact, with erf; `"gelu_tanh"` its approximation."""
Algorithm = Literal["naive", "tiled", "pipelined", "split_k"]
ALGORITHMS: tuple[Algorithm, ...] = ("naive", "tiled", "pipelined", "split_k")
FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """`activation(x @ w + bias) + residual`; see `pallas_models.ops.matmul`.

    Attributes:
      x: (M, K).
      w: (K, N), or (N, K) if `transpose_w`.
      bias: (N,), or None.
      residual: (M, N), or None.
      precision: of float32 products.
      out_dtype: dtype of the result.
      acc_dtype: in which the product is summed.
      algorithm: a rung of the Triton kernel's ladder; None for the fastest.
      batch: how many such products there are side by side, where this is one of a batch under `vmap`.
      return_preactivation: whether the result is a pair: the above, and `x @ w + bias` in the dtype of x.
    """

    OPERANDS: ClassVar = ("x", "w", "bias", "residual")

    x: A
    w: A
    bias: A | None = None
    residual: A | None = None
    precision: jax.lax.Precision
    out_dtype: jnp.dtype
    transpose_w: bool = False
    activation: Activation | None = None
    acc_dtype: jnp.dtype = FLOAT32
    algorithm: Algorithm | None = None
    batch: int = 1
    return_preactivation: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype in which operands are multiplied, and what the activation is applied to is kept."""
        return self.x.dtype

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        (m, k), n = self.x.shape, self.w.shape[0 if self.transpose_w else 1]
        return m, n, k
