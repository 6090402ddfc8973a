"""Pairs that devices share by rows and columns, and for a while by channels: whole matrices of a few channels."""

import dataclasses
import math
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp

AxisNames = tuple[str, ...]  # of a mesh; empty where there is nothing to share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ByChannels:
    """How the devices share pairs: each has some rows and columns of all channels.

    For its rows of a product of matrices, one of n devices needs all rows of the other matrix, and (n - 1) / n of
    them come from other devices. To share by channels, a device sends (n - 1) / n^2 of both matrices and of the
    product: less from 4 devices on, in both directions of the update alike, and a device never has more than 1 / n
    of anything.

    Attributes:
      names: the axes of the mesh over which rows and then columns are split.
      grid: how many devices share the rows, and how many the columns.
    """

    names: AxisNames
    grid: tuple[int, int]

    @classmethod
    def over(cls, rows: AxisNames, columns: AxisNames) -> Self:
        """The sharing inside a shard_map that has split rows and columns over these axes."""
        sizes = [math.prod(jax.lax.axis_size(name) for name in names) for names in (rows, columns)]
        return cls(names=(*rows, *columns), grid=(sizes[0], sizes[1]))

    @property
    def devices(self) -> int:
        """How many devices share the pairs."""
        return math.prod(self.grid)

    def swap(self, x: jax.Array, axis: int) -> jax.Array:
        """Sends each device its part of an axis. What the others had of this device's part takes their place.

        Twice it is x again.
        """
        return jax.lax.all_to_all(x, self.names, axis, axis, tiled=True) if self.names else x

    def joined(self, x: jax.Array) -> jax.Array:
        """The matrices (B, H, N, N) of pieces (B * devices, H, N / rows, N / columns)."""
        x = x.reshape(-1, *self.grid, *x.shape[1:]).transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], -1)

    def pieces(self, y: jax.Array) -> jax.Array:
        """The pieces of matrices, as `joined` takes them."""
        (b, h, n, _), (rows, columns) = y.shape, self.grid
        y = y.reshape(b, h, rows, n // rows, columns, n // columns).transpose(0, 2, 4, 1, 3, 5)
        return y.reshape(-1, *y.shape[3:])

    def apply(
        self, product: Callable[[jax.Array, jax.Array], jax.Array], left: jax.Array, right: jax.Array
    ) -> jax.Array:
        """`product(left, right)` of matrices (H, B, N, N), of all of which devices have rows and columns."""
        if self.devices == 1:
            return product(left, right)
        h, b, *part = left.shape

        def whole(x: jax.Array) -> jax.Array:
            x = self.swap(jnp.pad(x, ((0, -h % self.devices), (0, 0), (0, 0), (0, 0))), 0)
            x = self.joined(x.reshape(self.devices, -1, *part))
            return x.reshape(-1, b, *x.shape[2:])

        y = product(whole(left), whole(right))
        y = self.pieces(y.reshape(1, -1, *y.shape[2:]))
        return self.swap(y.reshape(-1, b, *part), 0)[:h]

    def grouped(self, w: jax.Array, groups: int) -> list[jax.Array]:
        """Projections of left and right and their gates, (..., 4, H), in parts (..., 4, H' / groups), H' >= H.

        A group gives the left and then the right channels of the first device, then the left and right channels of
        the next one. Channels are shared out by groups and then by devices, and are 0 from H on.
        """
        *lead, _, h = w.shape
        padded = h + -h % (groups * self.devices)
        w = jnp.pad(w, [(0, 0)] * len(lead) + [(0, 0), (0, padded - h)])
        w = w.reshape(*lead, 2, 2, groups, self.devices, -1)  # sides, projection or gate
        side, gated, group, device, channel = range(len(lead), w.ndim)
        w = w.transpose(group, *range(len(lead)), gated, device, side, channel)
        w = w.reshape(groups, *lead, 2, 2, padded // groups).swapaxes(-3, -2)
        return list(w.reshape(groups, *lead, 4, padded // groups))

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest value that a device has, element by element."""
        return jax.lax.pmax(x, self.names) if self.names else x
