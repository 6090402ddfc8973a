"""The triangle multiplicative update in bounded memory: hidden channels, and then rows, a few at a time.

The layer norm over the hidden channels needs the sums of all of them, so that these are there as a whole, in the
dtype of the products. Left and right are there for a group of channels at a time. So is the rest of the update,
gate and result among it, for some rows of pairs.
"""

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

_CHANNELS = 32  # hidden channels: groups are of a multiple, as projections write so many at a time
_GATES = 128  # channels of the gate: kernels write a multiple
_NORMED = 64  # hidden channels of which Triton's projections write a multiple where their x is normalised before


@dataclasses.dataclass(frozen=True, slots=True)
class Slices:
    """How many hidden channels and how many rows of each matrix of pairs are taken at a time."""

    channels: int
    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the memory that an update takes depends on.

    Attributes:
      batch: matrices of pairs.
      n: rows and columns of a matrix, and `padded` as left, right, the gate and the sums have them.
      channels: C.
      hidden: H.
      gates: G.
      itemsizes: bytes of an element of x, of the products' operands, of the result, and of the mask that kernels
        read, which is 0 where there is none.
      normed: whether the layer norm of x is a tensor.
    """

    batch: int
    n: int
    padded: tuple[int, int]
    channels: int
    hidden: int
    gates: int
    itemsizes: tuple[int, int, int, int]
    normed: bool

    def row(self, channels: int) -> int:
        """Bytes of so many channels of a row of all matrices, in the dtype of the products."""
        return self.batch * self.padded[1] * channels * self.itemsizes[1]

    @property
    def always(self) -> int:
        """Bytes of the mask as kernels read it."""
        return self.batch * self.padded[0] * self.padded[1] * self.itemsizes[3]

    def projected(self, hidden: int, gates: int) -> int:
        """Bytes that projections to so many hidden channels and gates, and the sums, take for a row."""
        multiple = _NORMED if self.normed else _CHANNELS
        sides, gates = 2 * _up(hidden, multiple if hidden else 1), _up(gates, _GATES)
        return self.row(sides + hidden + gates + (self.channels if self.normed else 0))

    @property
    def whole(self) -> int:
        """Bytes that the update takes at once."""
        return self.always + self.padded[0] * self.projected(self.hidden, self.gates)

    def sliced(self, slices: Slices) -> int:
        """Bytes that it takes in slices."""
        x, _, out, _ = self.itemsizes
        sums = self.padded[0] * self.row(self.hidden)
        first = self.padded[0] * self.projected(slices.channels, 0)
        # Each slice of x, of the sums and of the result is there as a copy.
        copies = self.row(self.hidden) + self.batch * self.n * self.channels * (x + out)
        end = slices.rows * (self.projected(0, self.gates) + copies)
        if slices.channels == self.hidden:  # the sums are not put together
            first -= sums
        return self.always + sums + max(first, end)

    def slices(self, most: int) -> Slices | None:
        """The largest slices that take `most` bytes at most; None if the update takes no more at once.

        Raises:
          ValueError: the smallest take more.
        """
        if self.whole <= most:
            return None
        groups = [h for h in range(_CHANNELS, self.hidden, _CHANNELS) if self.hidden % h == 0] + [self.hidden]
        smallest = self.sliced(Slices(groups[0], 1))
        if smallest > most:
            raise ValueError(
                f"max_temporary_bytes={most} is less than {smallest}: what kernels for {self.batch} x {self.n} x "
                f"{self.n} pairs take with {groups[0]} of {self.hidden} hidden channels, and with a row, at a time"
            )
        channels = max(h for h in groups if self.sliced(Slices(h, 1)) <= most)
        # Up to half of the rows: XLA may compute the gate of all before left and right are gone, but no loop.
        fitting = range(1, (self.n + 1) // 2 + 1)
        rows = bisect.bisect_right(fitting, most, key=lambda rows: self.sliced(Slices(groups[0], rows)))
        return Slices(channels, rows)


class Take(Protocol):
    """Takes a slice of an array along an axis, of which each channel, or each row, has `each` elements."""

    def __call__(self, a: jax.Array, axis: int, each: int = 1) -> jax.Array: ...


def _up(count: int, multiple: int) -> int:
    return count + -count % multiple


def in_parts(count: int, at_a_time: int, axis: int, compute: Callable[[Take], jax.Array]) -> jax.Array:
    """An array with `count` elements along an axis, some of which are computed at a time, in place.

    Args:
      compute: `compute(take)` computes the elements for which it takes slices of other arrays.
    """
    if at_a_time == count:
        return compute(lambda a, axis, each=1: a)

    def taking(first: Any) -> Take:
        return lambda a, axis, each=1: jax.lax.dynamic_slice_in_dim(a, first * each, at_a_time * each, axis)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        # The last slice begins earlier in all arrays, some of which go on: some elements are computed twice.
        first = jnp.minimum(i * at_a_time, count - at_a_time)
        return jax.lax.dynamic_update_slice_in_dim(y, compute(taking(first)), first, axis)

    like = jax.eval_shape(lambda: compute(taking(0)))
    shape = tuple(count if i == axis else size for i, size in enumerate(like.shape))
    return jax.lax.fori_loop(0, -(-count // at_a_time), step, jnp.zeros(shape, like.dtype))
