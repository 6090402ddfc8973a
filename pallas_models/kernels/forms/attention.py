"""What a call of attention is."""

import dataclasses
from typing import Any, ClassVar, Generic

import jax

from pallas_models.kernels import forms
from pallas_models.kernels.forms import A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(forms.Form, Generic[A]):
    """Attention of queries to keys and values; see `pallas_models.ops.attention`.

    Attributes:
      qkv: queries (B, Sq, num_heads * head_dim), keys and values (B, Skv, num_kv_heads * head_dim); or one buffer
        (B, S, (num_heads + 2 * num_kv_heads) * head_dim) that has the columns of all three, in this order.
      mask: (B, Skv), integers, 0 for keys that take no part; or None.
      bias: (B or 1, num_heads or 1, Sq, Skv), added to the scaled scores; or None.
      segment_ids: (B, Sq), int32: queries see keys with the same id; or None.
      kv_segment_ids: (B, Skv), int32, where there are `segment_ids`.
      num_heads: number of heads of queries, a multiple of `num_kv_heads`.
      num_kv_heads: number of heads of keys and of values.
      head_dim: columns of a head.
      causal: whether a query sees no key after its position.
      window: a query sees keys that are fewer positions than this away; None for all.
      sm_scale: factor on the scores.
      return_lse: whether the log-sum-exp of the scores, (B, num_heads, Sq) in float32, is a result too.
      precision: of float32 products.
    """

    OPERANDS: ClassVar = ("qkv", "mask", "bias", "segment_ids", "kv_segment_ids")

    qkv: tuple[A, ...]
    mask: A | None = None
    bias: A | None = None
    segment_ids: A | None = None
    kv_segment_ids: A | None = None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    sm_scale: float
    return_lse: bool = False
    precision: jax.lax.Precision

    @property
    def is_fused(self) -> bool:
        """Whether one buffer has queries, keys and values."""
        return len(self.qkv) == 1

    @property
    def arrays(self) -> tuple[A, A, A]:
        """The arrays that hold the queries, the keys and the values: one of them thrice where it has all."""
        q, k, v = self.qkv * 3 if self.is_fused else self.qkv
        return q, k, v

    @property
    def first_heads(self) -> tuple[int, int, int]:
        """Which head of its array the queries, the keys and the values begin with."""
        return (0, self.num_heads, self.num_heads + self.num_kv_heads) if self.is_fused else (0, 0, 0)

    @property
    def batch(self) -> int:
        """Number of items."""
        return self.qkv[0].shape[0]

    @property
    def seq(self) -> int:
        """Number of queries."""
        return self.qkv[0].shape[1]

    @property
    def kv_seq(self) -> int:
        """Number of keys."""
        return self.qkv[-1].shape[1]

    @property
    def item_axis(self) -> int | None:
        """The axis of arrays of pairs, (B, N, N, ...), that items are on; None where the first axis is of items.

        An item is what attends to itself alone: an element of the batch, or a line of pairs.
        """
        return None

    @property
    def items(self) -> int:
        """How many items in a row share an element of a bias."""
        return 1

    @property
    def mask_by_item(self) -> Any:
        """The mask, (batch, Skv)."""
        return self.mask

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.batch, self.seq, self.num_heads * self.head_dim

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the log-sum-exp."""
        return self.batch, self.num_heads, self.seq

    @property
    def dtype(self) -> Any:
        return self.qkv[0].dtype

    @property
    def group(self) -> int:
        """Number of heads of queries that share a head of keys and values."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_masks(self) -> bool:
        """Whether operands, and not positions alone, rule pairs of query and key out."""
        return self.mask is not None or self.segment_ids is not None

    @property
    def sizes(self) -> dict[str, int]:
        """What tables of configs know a call by."""
        return {
            "batch": self.batch,
            "q": self.seq,
            "kv": self.kv_seq,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "causal": int(self.causal),
        }
