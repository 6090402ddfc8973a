"""The tiles of a matrix product on Hopper's tensor cores, and how CTAs and their warpgroups share them."""

import dataclasses

from jax.experimental import pallas as pl

_REGISTERS = {2: (40, 232), 3: (32, 160)}  # of a thread of the producer, and of so many consumers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of `block_m` x `block_n` outputs, `block_k` of the contraction a step, `num_stages` steps in the ring.

    `num_consumers` warpgroups multiply: 2, or 3 with fewer registers each. With `ping_pong` each has a tile of its
    own, and finishes it while another one has the tensor cores: for short contractions, after which there is most
    to finish. Without, they share the rows of a tile, which can be twice as large: for long contractions, which
    read operands most often; or, with `split_n`, its columns, a part of the right operand each. `group_m` row
    blocks are walked together before the next column block, so that CTAs running at the same time share operands
    in L2. With `resident` a CTA stays in one column block instead, whose right operand it reads once and keeps:
    for short contractions, which fit. `num_slots` parts of outputs, of 64 rows and 128 bytes, may be on their way
    from shared memory, for each warpgroup.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    num_stages: int
    ping_pong: bool
    group_m: int = 8
    num_slots: int = 2
    num_consumers: int = 2
    split_n: bool = False
    resident: bool = False

    def __post_init__(self) -> None:
        if self.num_consumers not in _REGISTERS:
            raise ValueError(f"{__name__}: num_consumers={self.num_consumers} must be 2 or 3")
        for name, value, multiple in (
            ("block_m", self.block_m, 64 if self.ping_pong or self.split_n else 64 * self.num_consumers),
            ("block_n", self.block_n, 64 * self.num_consumers if self.split_n else 16),
            ("block_k", self.block_k, 64),
        ):
            if value < multiple or value % multiple:
                raise ValueError(f"{__name__}: {name}={value} must be a positive multiple of {multiple}")
        widest = 256 * (self.num_consumers if self.split_n else 1)
        if self.block_n > widest:
            raise ValueError(f"{__name__}: block_n={self.block_n} must be at most {widest}")
        if self.ping_pong and self.split_n:
            raise ValueError(f"{__name__}: ping_pong and split_n: a warpgroup has tiles of its own or shares them")
        if self.num_stages < 2 or self.num_stages > 10:  # 32 barriers go together
            raise ValueError(f"{__name__}: num_stages={self.num_stages} must be from 2 to 10")
        columns = self.block_n // self.num_consumers if self.split_n else self.block_n
        sums, most = self.rows * columns // 128, {2: 192, 3: 128}[self.num_consumers]
        if sums > most:
            raise ValueError(f"{__name__}: {self} has {sums} sums a thread; expected {most} at most")

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup has."""
        return self.block_m if self.ping_pong or self.split_n else self.block_m // self.num_consumers

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of each thread of the producer, and of each thread of a consumer."""
        return _REGISTERS[self.num_consumers]

    def b_stages(self, k: int) -> int:
        """Slots for the right operand, which has `k` rows: for all of them if it is resident."""
        return pl.cdiv(k, self.block_k) if self.resident else self.num_stages

    def ring_bytes(self, k: int) -> int:
        """Bytes of shared memory that the operands take, in 16 bits, for a contraction of `k`."""
        return (self.num_stages * self.block_m + self.b_stages(k) * self.block_n) * self.block_k * 2

    def num_tiles(self, m: int, n: int) -> int:
        """The number of tiles of an output (m, n), n columns of all operands together."""
        return pl.cdiv(m, self.block_m) * pl.cdiv(n, self.block_n)

    def num_ctas(self, tiles_m: int, tiles_n: int, cores: int) -> int:
        """How many CTAs share the tiles; with `resident` as many in each column."""
        per_column = min(max(cores // tiles_n, 1), tiles_m)
        return tiles_n * per_column if self.resident else min(cores, tiles_m * tiles_n)
