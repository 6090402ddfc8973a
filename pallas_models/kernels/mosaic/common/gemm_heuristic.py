"""Which tiles of a matrix product are fastest on Hopper GPUs, by what they took, and which are worth measuring."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Tiles, and what each takes where every multiprocessor has one: us a tile, and us per unit of K."""

    block_m: int
    block_n: int
    ping_pong: bool
    tile_us: float
    k_us: float
    block_k: int = 64
    num_consumers: int = 2
    resident: bool = False

    def config(self) -> Config:
        """The tiles, with the least ring."""
        return Config(
            block_m=self.block_m,
            block_n=self.block_n,
            block_k=self.block_k,
            num_stages=2,
            ping_pong=self.ping_pong,
            num_consumers=self.num_consumers,
            resident=self.resident,
        )


def fastest(
    choices: Sequence[Measured],
    m: int,
    n: int,
    k: int,
    shared_memory: Callable[[Config], int],
    target: Target,
) -> Config:
    """The tiles for (m, k) @ (k, n), with as many slots in the ring as fit."""
    fitting: list[tuple[float, Config]] = []
    for choice in choices:
        config = _deepest(choice.config(), shared_memory, target)
        if config is not None:
            tiles = pl.cdiv(m, choice.block_m), pl.cdiv(n, choice.block_n)
            rounds = pl.cdiv(math.prod(tiles), config.num_ctas(*tiles, target.num_cores))
            if rounds > 1 or not choice.resident:  # of one round nothing is read again
                fitting.append((rounds * (choice.tile_us + k * choice.k_us), config))
    return min(fitting, key=lambda entry: entry[0])[1]


def _deepest(config: Config, shared_memory: Callable[[Config], int], target: Target) -> Config | None:
    """The config with as many slots in the ring as fit; None if two do not."""
    rings = (dataclasses.replace(config, num_stages=count) for count in range(512 // config.block_k, 1, -1))
    return next((ring for ring in rings if shared_memory(ring) <= target.shared_memory), None)


def candidates(
    m: int,
    n: int,
    shared_memory: Callable[[Config], int],
    target: Target,
    *,
    parts: int = 1,
    resident: bool = False,
) -> Iterator[Config]:
    """The tiles worth measuring for an output (m, n), n of `parts` operands together, with as many stages as fit.

    Three consumers share tiles that two cannot; small tiles take longer steps, and are for few outputs, unless
    they are `resident` and may be so.
    """
    many = pl.cdiv(m, 128) * pl.cdiv(n, 128) >= 4 * target.num_cores
    sizes = itertools.product((64, 128, 192, 256), (64, 128, 192, 256), (False, True), (False, True))
    for block_m, block_n, ping_pong, stays in sizes:
        outputs = block_m * block_n
        if block_m >= 2 * max(m, 64) or block_n >= 2 * max(n, 64) or block_n % (64 * parts):
            continue
        if stays and not (resident and ping_pong and block_m == 64):
            continue
        if many and outputs < 128 * 128 and not stays:
            continue
        for block_k in (64, 128) if outputs <= 64 * 128 or stays else (64,):
            try:
                config = Config(
                    block_m=block_m,
                    block_n=block_n,
                    block_k=block_k,
                    num_stages=2,
                    ping_pong=ping_pong,
                    num_consumers=3 if block_m == 192 and not ping_pong else 2,
                    resident=stays,
                )
            except ValueError:  # more sums than a thread has registers for
                break
            deepest = _deepest(config, shared_memory, target)
            if deepest is not None:
                yield deepest
                if config.num_tiles(m, n) >= 8 * target.num_cores and not stays:
                    yield dataclasses.replace(deepest, group_m=16)
