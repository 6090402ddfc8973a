"""A call of softmax."""

import dataclasses
from typing import ClassVar, Generic, Literal

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A

Algorithm = Literal["naive", "online", "fused"]
ALGORITHMS: tuple[Algorithm, ...] = ("naive", "online", "fused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """Softmax over the rows of x; see `pallas_models.ops.softmax`.

    Attributes:
      x: (M, N).
      where: (W, N), integers, not 0 for elements that take part, or None: row i of x has row `i // repeat % W`.
      scale: multiplies x first.
      algorithm: how a kernel walks over a row; None for the fastest.
    """

    OPERANDS: ClassVar = ("x", "where")

    x: A
    where: A | None
    scale: float
    repeat: int
    algorithm: Algorithm | None
