"""A call of the token embeddings of BERT."""

import dataclasses
from typing import ClassVar, Generic

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """The layer norm of the sum of three look-ups; see `pallas_models.ops.embed_tokens`.

    Attributes:
      ids: (B, S), integers.
      token_type_ids: (B, S), integers, or None for type 0.
      position_ids: (B, S), integers, or None for 0 to S - 1 in every row.
      word: (V, N).
      position: (P, N).
      token_type: (T, N).
      scale: (N,).
      bias: (N,).
      epsilon: added to the variance.
    """

    OPERANDS: ClassVar = (
        "ids",
        "token_type_ids",
        "position_ids",
        "word",
        "position",
        "token_type",
        "scale",
        "bias",
    )

    ids: A
    token_type_ids: A | None
    position_ids: A | None
    word: A
    position: A
    token_type: A
    scale: A
    bias: A
    epsilon: float
