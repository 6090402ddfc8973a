"""How many threads share a row of a kernel for rows, and how much of it they hold."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic.common.vectors import vector_length

WARP, WARPGROUP = 32, 128  # threads
_MOST_THREADS = 1024  # of a CTA
_KEPT = 128  # bytes of rows in a thread, beside what it computes from them
_HELD, _WHOLE = 32, 512  # elements of a row in a thread, in float32, and threads that have registers for as many
_BLOCK = 8192  # columns that threads have at a time of rows that they keep or walk
_FEWER = 128  # threads of a row: each of these may hold half as much
_MANY = 8192  # rows: so many are worth taking by twos
LONGEST_HELD = 32768  # columns, in any number and dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`threads` threads share a row, and hold `block_n` columns of it at a time; each has a part of `rows` rows.

    A CTA has `warpgroups` warpgroups of 128 threads, each with rows of its own unless rows take several each.
    Rows of more columns than `block_n` are read twice, unless threads `keep` what they have read, in its dtype.
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
        if self.threads > WARPGROUP and self.warpgroups * WARPGROUP % self.threads:
            raise ValueError(f"{self}: warpgroups of a CTA must be a multiple of those that share a row")


def threads_of_row(n: int, vector: int, most: int) -> int:
    """Threads with up to 32 elements of a row each; twice as many, up to `most`, where all of them get some."""
    threads = min(pl.next_power_of_2(pl.cdiv(n, _HELD)), pl.next_power_of_2(pl.cdiv(n, vector)))
    return 2 * threads if 2 * threads <= most and n % (2 * threads * vector) == 0 else threads


def heuristic(
    m: int, n: int, dtype: DTypeLike, arrays: int = 1, *, masked: bool = False, reductions: int = 2
) -> Config:
    """Chooses 16 or 32 elements a thread, up to 512 threads; longer rows are kept, or walked.

    On an H200, bf16 rows of 1024 and 4096 columns took 1% to 8% less time with 16 elements a thread than with 32
    where they are added up once or twice, and 2% to 31% more where three times, as for a layer norm; that gained
    1% to 6% where threads have two rows, so that one is added up while another waits. Rows of 384 and 768
    columns, of which 16 elements a thread leave a quarter of the places empty, mostly lost, up to 19%.

    Args:
      arrays: how many arrays of such rows a kernel reads.
      masked: whether it reads a mask, too.
      reductions: how many numbers of a row its threads exchange.
    """
    vector, itemsize = vector_length(n, dtype), jnp.dtype(dtype).itemsize
    if n <= _WHOLE * _HELD:
        threads = threads_of_row(n, vector, 0 if reductions > 2 else 2 * _FEWER)
        is_paired = reductions > 2 and m >= _MANY and threads <= _FEWER and arrays == 1 and itemsize == 2
        rows = 2 if is_paired else 1
        return Config(threads=threads, block_n=n, rows=rows, warpgroups=max(threads // WARPGROUP, 1))
    num_bytes = arrays * pl.cdiv(n, _MOST_THREADS) * (4 if vector == 1 else itemsize)
    has_room = num_bytes <= (_KEPT if arrays == 1 else _KEPT * 3 // 4)
    is_whole = n % _BLOCK == 0 and not masked  # what is cut off takes registers, too
    keep = has_room and (n <= LONGEST_HELD or is_whole)
    threads = _MOST_THREADS if keep or (arrays > 1 and itemsize == 2) else _WHOLE
    return Config(threads=threads, block_n=_BLOCK, warpgroups=threads // WARPGROUP, keep=keep)


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
