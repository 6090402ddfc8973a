"""A call of layer or RMS norm."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The norm of the rows of `x + residual`; see `pallas_models.ops.layer_norm` and `rms_norm`.

    Attributes:
      x: (M, N).
      scale: (N,).
      bias: (N,), or None.
      residual: (M, N), or None.
      subtract_mean: whether it is layer norm; RMS norm subtracts no mean.
      return_residual: whether the sum `x + residual` is a result too.
      return_statistics: whether the last result is the statistics that the gradient wants, (3, M) or (1, M) in
        float32: the mean in two parts, where it is subtracted, and the factor that gives unit variance.
      epsilon: added to the variance.
    """

    OPERANDS: ClassVar = ("x", "scale", "bias", "residual")

    x: A
    scale: A
    bias: A | None
    residual: A | None
    subtract_mean: bool
    return_residual: bool
    return_statistics: bool = False
    epsilon: float

    @property
    def name(self) -> str:
        """The norm, which names of kernels begin with."""
        return "layer_norm" if self.subtract_mean else "rms_norm"

    def cotangents(self, given: Sequence[C | None]) -> tuple[C, C | None]:
        """The cotangents of the norm and of the sum, out of the cotangents of all results.

        Statistics have a cotangent too where a gradient is differentiated; it is zero.
        """
        out, total = given[0], given[1] if self.return_residual else None
        assert out is not None
        return out, total

    def variant(self, dsum: object | None) -> dict[str, int]:
        """What the gradient reads beside x and the cotangent of the norm, as tuning tables name it."""
        return {name: 1 for name, given in (("residual", self.residual), ("sum", dsum)) if given is not None}

    def gradients(
        self: "Form[jax.Array]", dx: jax.Array, dvectors: Sequence[jax.Array], dresidual: jax.Array | None = None
    ) -> tuple[jax.Array | None, ...]:
        """The cotangents of the operands, out of the cotangents of the rows, of the scale and of the bias.

        The cotangent of the residual is dx, where it has none of its own for its dtype.
        """
        dscale, *dbias = dvectors
        return (
            dx,
            dscale.astype(self.scale.dtype),
            None if self.bias is None else dbias[0].astype(self.bias.dtype),
            None if self.residual is None else dx if dresidual is None else dresidual,
        )
