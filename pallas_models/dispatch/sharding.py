"""The axes of an op that devices can share, as the op states them, and helpers for the part of one device."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from pallas_models import target as targets
from pallas_models.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sharding:
    """Which axes of the operands and results of an op can be split over devices: one rule for every kind of mesh.

    Attributes:
      equation: `"m k, k n, N -> m n"`: the axes of each of the arrays, absent ones too, and of each result that
        there can be. An axis in lower case can be split; of one in capitals every device needs all. `(g D)` is an
        axis of g parts that can be split between them. Axes of one name are split alike. A result without an axis
        that another result has is a sum over the devices that the axis is split over. Over an axis that no result
        has the op is summed as its `contracted` says.
      sizes: of each g as above.
      divides: for each g the options of a call that count it.
      over: for each axis of which a device's part of the result needs the parts of other devices: the option of a
        call that names the axes of the mesh that it is split over. The op asks the other devices itself.
    """

    equation: str
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    divides: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    over: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Total:
    """Adds up the results of devices, for an op that is `contracted`.

    Attributes:
      over: the axes of the mesh.
      target: the GPU of a device's part.
    """

    over: tuple[str, ...]
    target: Target = targets.ANY

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum of an array over the devices."""
        return jax.lax.psum(x, self.over)


def varying_alike(arrays: Any) -> Any:
    """The arrays, all varying over the axes of a shard_map that one varies over, as a kernel's results will."""
    leaves, tree = jax.tree.flatten(arrays)
    over = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in leaves]
    every = frozenset().union(*over)
    leaves = [
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if own < every else x
        for x, own in zip(leaves, over, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)
