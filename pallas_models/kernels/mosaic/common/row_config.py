"""How many threads share a row of a kernel for rows, and how much of it they hold."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

WARP, WARPGROUP = 32, 128  # threads
_MOST_THREADS = 1024  # of a CTA
_VECTOR_BYTES = 16  # that a thread loads at once
_KEPT = 128  # bytes of rows in a thread, beside what it computes from them
_HELD = 32  # elements of a row in a thread: a CTA of 1024 threads has 64 registers for each
LONGEST_HELD = _MOST_THREADS * _HELD  # columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`threads` threads share a row, and hold `block_n` columns of it at a time; each has a part of `rows` rows.

    A CTA has `warpgroups` warpgroups of 128 threads, each with rows of its own unless a row takes several. Rows of
    more columns than `block_n` are read twice, unless threads `keep` what they have read, in its dtype.
    """

    threads: int
    block_n: int
    rows: int = 1
    warpgroups: int = 1
    keep: bool = False

    def __post_init__(self) -> None:
        if self.threads not in (1 << i for i in range(_MOST_THREADS.bit_length())):
            raise ValueError(f"{__name__}: threads={self.threads} must be a power of two up to {_MOST_THREADS}")
        for name in ("block_n", "rows", "warpgroups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{__name__}: {name}={getattr(self, name)} must be positive")
        if self.warpgroups > _MOST_THREADS // WARPGROUP:
            raise ValueError(f"{__name__}: warpgroups={self.warpgroups} must be 8 or fewer")
        if self.threads > WARPGROUP and self.threads != self.warpgroups * WARPGROUP:
            raise ValueError(f"{self}: rows of over {WARPGROUP} threads take all warpgroups of a CTA")


def vector_length(n: int, dtype: DTypeLike) -> int:
    """Elements of rows of `n` that a thread loads at once: 16 bytes; fewer where rows begin at odd addresses."""
    return math.gcd(n, _VECTOR_BYTES // jnp.dtype(dtype).itemsize)


def heuristic(n: int, dtype: DTypeLike) -> Config:
    """Chooses 32 elements a thread for rows of up to 32768 columns, which are held; longer ones are walked."""
    if n > LONGEST_HELD:
        return Config(threads=512, block_n=8192, warpgroups=4)
    vectors = pl.cdiv(n, vector_length(n, dtype))
    threads = min(pl.next_power_of_2(pl.cdiv(n, _HELD)), pl.next_power_of_2(vectors))
    return Config(threads=threads, block_n=n, warpgroups=max(threads // WARPGROUP, 1))


def configs(m: int, n: int, dtype: DTypeLike) -> Iterator[Config]:
    """The configs worth measuring for rows (m, n): 8 to 64 elements a thread, rows held or walked."""
    powers = [1 << i for i in range(_MOST_THREADS.bit_length())]
    for threads, elements, rows, warpgroups in itertools.product(powers, (8, 16, 32, 64), (1, 2), (1, 2, 4, 8)):
        block_n, is_alone = threads * elements, threads <= WARPGROUP
        if warpgroups not in ((1, 2) if is_alone else (threads // WARPGROUP,)) or rows * elements > 64:
            continue
        least = max(n, threads * vector_length(n, dtype), 8)  # of which a half is too few
        few = rows * warpgroups == 1 or rows * WARPGROUP * warpgroups <= m * threads
        if block_n < 2 * least and (block_n >= n or not is_alone) and few:
            config = Config(threads=threads, block_n=min(block_n, n), rows=rows, warpgroups=warpgroups)
            yield config
            if block_n < n and rows * pl.cdiv(n, threads) * jnp.dtype(dtype).itemsize <= _KEPT:
                yield dataclasses.replace(config, keep=True)
