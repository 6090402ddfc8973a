"""The calls that `python -m bench tune` tunes: `TUNABLES` of the modules of `bench.cases`, by name."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bench.measuring.harness import DTYPES, shape_text

Sizes = tuple[int, ...]
Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]  # op, operands, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunable:
    """An op that can be tuned.

    Attributes:
      axes: names of the sizes of a shape.
      shapes: the shapes that are tuned if none are given.
      call: `call(dtype, *shape)` gives the call to tune.
      dtypes: the dtypes that are tuned if none are given.
      nearby: which size is made smaller, and how much, to see whether a config holds in its bucket.
      kernel: the name of the kernel that is tuned, if the call has several.
    """

    axes: str
    shapes: Sequence[Sizes]
    call: Callable[..., Call]
    dtypes: Sequence[str] = ("bf16",)
    nearby: tuple[int, float] = (0, 0.75)
    kernel: str | None = None

    def parse(self, text: str) -> Sizes:
        """Parses `8192x1152x384`.

        Raises:
          ValueError: it is no shape of this op.
        """
        sizes = text.strip().split("x")
        if len(sizes) != len(self.axes.split("x")) or not all(s.isdecimal() and int(s) for s in sizes):
            raise ValueError(f"{text!r} is no shape; expected {self.axes}, such as {shape_text(self.shapes[0])}")
        return tuple(map(int, sizes))

    def smaller(self, shape: Sizes) -> Sizes:
        """A shape nearby, which would take the config of `shape`."""
        axis, factor = self.nearby
        return tuple(max(round(factor * size), 1) if i == axis else size for i, size in enumerate(shape))


@functools.cache
def _numbers(dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(4_194_301, np.float32).astype(DTYPES[dtype])


def operands(dtype: str, *shapes: Sizes) -> list[jax.Array]:
    """Arrays of normal random numbers, repeated to fill large ones, as new ones for each shape take seconds."""
    return [jax.device_put(np.resize(np.roll(_numbers(dtype), i << 16), s)) for i, s in enumerate(shapes)]
