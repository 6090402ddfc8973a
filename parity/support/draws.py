"""Random calls of ops: the arrays and options that a case file draws, and the generator that it draws with."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_models.kernels.mosaic.common.row_config import Config as RowConfig
from parity.support.common import ON_GPU

DTYPES = ("float32", "float16", "bfloat16")
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72)
LARGE = (*SIZES, 80, 96, 127, 128, 129, 160, 192, 200, 255, 256, 257, 320)


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An array of a random call.

    Attributes:
      kind: what the array is: `"normal"`, drawn in every way; `"weight"`, not too large; `"bias"` of scores;
        `"cos"`; for integers a `"mask"`, `"ids"` of segments, or `"rows"` of a table; a traced `"scale"`.
      scale: the standard deviation of normal numbers, and `shift` their mean; for rows, how many there are.
      limit: the largest value, so that squares and products of float32 are finite.
      masked: the name of a mask and the shape in which it covers this array. Where the mask is 0, the array can
        hold anything: NaN and infinities too.
      infinite: whether some elements may be minus infinity.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    limit: float = 1e15
    masked: tuple[str, tuple[int, ...]] | None = None
    infinite: bool = False


def first(program: Callable[[int], Any], wanted: Callable[[Any], bool]) -> int:
    """The number of the first program that is wanted; of some calls there is one in 20,000 programs.

    Raises:
      LookupError: there is none among a million.
    """
    for i in range(1_000_000):
        if wanted(program(i)):
            return i
    raise LookupError("none of a million programs is wanted")


class Pick:
    """Draws by a seeded generator.

    Attributes:
      sizes: the sizes of long axes; None for the sizes of this machine.
      times: a factor that numbers of batches and heads have most of the time.
    """

    def __init__(self, rng: np.random.Generator, *, sizes: Sequence[int] | None = None, times: int = 1) -> None:
        self.rng, self.times = rng, times
        self.sizes = (LARGE if ON_GPU else SIZES) if sizes is None else sizes

    def of(self, values: Sequence[Any]) -> Any:
        return values[self.rng.integers(len(values))]

    def by(self, shares: dict[Any, float]) -> Any:
        total, point = sum(shares.values()), self.rng.random()
        for value, share in shares.items():
            point -= share / total
            if point < 0:
                return value
        return value

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def size(self, *, multiple: int = 1, most: int = 10**9) -> int:
        return int(self.of([n for n in self.sizes if n % multiple == 0 and n <= most]))

    def few(self, *sizes: int) -> int:
        """A number of batches or heads."""
        number = int(self.of(sizes))
        return number if self.times == 1 else number * self.of((1, self.times, self.times))

    def rows(self) -> int:
        """A long axis now and then, a short one most of the time."""
        return int(self.of((1000, 1024, 2049, 4100))) if ON_GPU and self.chance(0.15) else self.size()

    def row_config(self) -> RowConfig:
        """A config of Mosaic's kernels of rows: a row in a thread, a warp or more, held, kept or walked."""
        threads = int(self.of((1, 4, 16, 32, 64, 128, 256, 512)))
        warpgroups = max(threads // 128, 1) if threads > 128 else int(self.of((1, 2)))
        block_n = threads * int(self.of((1, 8, 24)))
        rows, keep = int(self.of((1, 2))), self.chance(0.3)
        return RowConfig(threads=threads, block_n=block_n, rows=rows, warpgroups=warpgroups, keep=keep)

    def product(self, mosaic: bool) -> tuple[int, int, int]:
        """Rows, depth and columns of a product, of sizes that kernels for Hopper take if `mosaic`."""
        if mosaic and ON_GPU and self.chance(0.2):  # the gradient of many rows has a kernel of its own
            return self.of((2048, 2056, 4096)), 64 * self.size(most=8), 64 * self.size(most=8)
        if mosaic:
            return 8 * self.size(most=64), 64 * self.size(most=8), 64 * self.size(most=8)
        return self.rows(), self.size(), self.size()

    def other(self, dtype: str) -> str:
        """The dtype of an operand that may differ from the dtype of the other operands."""
        return dtype if self.chance(0.7) else self.of(DTYPES)

    def epsilon(self) -> float:
        """A number that a norm adds to the variance."""
        return float(self.of((1e-12, 1e-6, 1e-5, 0.1)))

    def stream(self, rows: int, columns: int, dtype: str) -> Input:
        """A residual that is added before a norm: as far from 0 as the sum of all layers before may be."""
        shift = 0.0 if dtype == "float32" else self.of((0.0, 1000.0))
        return Input((rows, columns), self.other(dtype), shift=shift)

    def precision(self, dtype: str) -> dict[str, Any]:
        return {"precision": "default"} if dtype == "float32" and self.chance(0.3) else {}

    def out_dtype(self, dtype: str) -> dict[str, Any]:
        return {"out_dtype": self.of(DTYPES)} if self.chance(0.2) else {}


# The arrays of a call by the names of the op's arguments, and its options.
Drawn = tuple[dict[str, Input], dict[str, Any]]
Draw = Callable[[Pick, str, bool], Drawn]
