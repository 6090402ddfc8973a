"""How CTAs walk rows: each has threads for some of them at a time, and takes others until all are done."""

import dataclasses

from pallas_models.kernels.mosaic.common import row_config
from pallas_models.kernels.mosaic.common.row_config import WARPGROUP

_REGISTERS, _MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """`num_ctas` CTAs of `warpgroups` warpgroups share the rows, `threads` threads have a part of each row.

    A warpgroup has as many rows at a time as it has threads for.
    """

    threads: int
    warpgroups: int
    num_ctas: int

    def __post_init__(self) -> None:
        self.rows(1)
        if self.num_ctas < 1:
            raise ValueError(f"{self}: num_ctas must be positive")

    def rows(self, n: int) -> row_config.Config:
        """How the threads share rows of n columns."""
        return row_config.Config(threads=self.threads, block_n=n, warpgroups=self.warpgroups)

    @property
    def rows_at_once(self) -> int:
        """Rows that a CTA has at a time."""
        return max(self.warpgroups * WARPGROUP // self.threads, 1)


def registers(warpgroups: int) -> int:
    """Registers of each thread where so many warpgroups have a multiprocessor; they come by eights."""
    return min(_REGISTERS // (warpgroups * WARPGROUP) // 8 * 8, _MOST_REGISTERS)
