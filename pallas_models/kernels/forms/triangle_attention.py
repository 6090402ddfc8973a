"""What a call of triangle attention is: attention whose items are the lines of a square of pairs."""

import dataclasses
from typing import Any, Generic, Literal

from pallas_models.kernels.forms import A, attention

Direction = Literal["starting", "ending"]
DIRECTIONS: tuple[Direction, ...] = ("starting", "ending")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(attention.Form[A], Generic[A]):
    """Attention along the rows or the columns of pairs, in place; see `pallas_models.ops.triangle_attention`.

    Kernels of attention take it by the properties that it has in common with a call of attention. There are no
    segments, and no masks by position.

    Attributes:
      qkv: queries, keys and values, each (B, N, N, num_heads * head_dim), or the lines of them that a device has.
      mask: (B, N, N), int32, 0 for pairs that take no part as keys; or None.
      bias: (B, num_heads, N, N), in the places of its pairs; or None.
      direction: whether rows attend, "starting", or columns.
      return_lse: whether the log-sum-exp of the scores, (B, lines, num_heads, N) in float32, is a result too.
    """

    direction: Direction

    @property
    def item_axis(self) -> int:
        return 1 if self.direction == "starting" else 2

    @property
    def items(self) -> int:
        """Lines of an element of the batch."""
        return self.qkv[0].shape[self.item_axis]

    @property
    def batch(self) -> int:
        """Lines of all elements of the batch."""
        return self.qkv[0].shape[0] * self.items

    @property
    def seq(self) -> int:
        return self.qkv[0].shape[3 - self.item_axis]

    @property
    def kv_seq(self) -> int:
        return self.seq

    @property
    def mask_by_item(self) -> Any:
        mask: Any = self.mask
        if mask is None:
            return None
        return (mask if self.item_axis == 1 else mask.swapaxes(1, 2)).reshape(self.batch, self.seq)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.qkv[0].shape

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.qkv[0].shape[0], self.items, self.num_heads, self.seq

    @property
    def sizes(self) -> dict[str, int]:
        """Tables know calls of this op by sizes that no other attention has."""
        return super().sizes | {"ending": int(self.direction == "ending")}
