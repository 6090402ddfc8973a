"""Calls of mean pooling: of rows, or of the segments of packed rows."""

import dataclasses
from typing import ClassVar, Generic

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The mean of the tokens of each row; see `pallas_models.ops.mean_pool`.

    Attributes:
      x: (B, S, N).
      mask: (B, S), int32, not 0 for a token.
      normalize: whether every mean is scaled to unit L2 norm.
      epsilon: lower bound of the norm that is divided by.
      return_mean: whether the mean before it is scaled is a second result, which the gradient wants.
    """

    OPERANDS: ClassVar = ("x", "mask")

    x: A
    mask: A
    normalize: bool
    epsilon: float
    return_mean: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentForm(forms.Form, Generic[A]):
    """The mean of the tokens of each segment; see `pallas_models.ops.segment_mean_pool`.

    Attributes:
      x: (B, S, N).
      segment_ids: (B, S), int32: the segment of each token, `num_segments` for a token of no segment.
      num_segments: how many segments there are.
      normalize: whether every mean is scaled to unit L2 norm.
      epsilon: lower bound of the norm that is divided by.
      return_mean: whether the mean before it is scaled is a second result, which the gradient wants.
    """

    OPERANDS: ClassVar = ("x", "segment_ids")

    x: A
    segment_ids: A
    num_segments: int
    normalize: bool
    epsilon: float
    return_mean: bool = False
