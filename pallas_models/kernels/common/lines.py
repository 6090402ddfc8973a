"""Where the rows of an item of attention lie: together, or in a line of a square of pairs."""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.attention import Form


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """A reference to an array of pairs, (B, N, N, ...), indexed like an array of its lines, (B * N, N, ...).

    Attributes:
      ref: the reference.
      axis: the axis that lines are on: 1 where they are rows, 2 where they are columns.
    """

    ref: Ref
    axis: int

    @property
    def at(self) -> "Lines":
        return self

    @property
    def dtype(self) -> Any:
        return self.ref.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        line, position, *rest = index
        several = isinstance(line, pl.Slice)  # of one item of the batch
        first = line.start if several else line
        count = self.ref.shape[self.axis]
        # Unlike // and %, these spend nothing on negative numbers.
        batch, first = jax.lax.div(first, count), jax.lax.rem(first, count)
        line = pl.Slice(first, line.size) if several else first
        pair = (line, position) if self.axis == 1 else (position, line)
        return self.ref.at[batch, *pair, *rest]


def of_pairs(form: Form[Any], ref: Ref | None) -> Any:
    """A reference to queries, keys, values, results or a mask, to be indexed as [item, position, ...]."""
    return ref if ref is None or form.item_axis is None else Lines(ref, form.item_axis)


def of_rows(form: Form[Any], ref: Ref | None) -> Any:
    """A reference to a number for each row of scores, such as its log-sum-exp: [item, head, position]."""
    return ref if ref is None or form.item_axis is None else Lines(ref, 1)
