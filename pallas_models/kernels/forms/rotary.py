"""A call of rotary positions."""

import dataclasses
from typing import ClassVar, Generic

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The norm and rotation of queries and keys in a fused buffer; see `pallas_models.ops.rotary`.

    Attributes:
      qkv: (B, S, (num_heads + 2 num_kv_heads) * head_dim).
      cos: (B or 1, S, head_dim / 2).
      sin: the shape of cos.
      q_scale: (head_dim,), or None for no norm.
      k_scale: (head_dim,), or None where q_scale is.
      num_heads: number of query heads.
      num_kv_heads: number of key heads, and of value heads.
      epsilon: added to the mean of squares.
    """

    OPERANDS: ClassVar = ("qkv", "cos", "sin", "q_scale", "k_scale")

    qkv: A
    cos: A
    sin: A
    q_scale: A | None
    k_scale: A | None
    num_heads: int
    num_kv_heads: int
    epsilon: float

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return 2 * self.cos.shape[-1]

    @property
    def num_rotated(self) -> int:
        """How many heads are rotated: queries and keys."""
        return self.num_heads + self.num_kv_heads
