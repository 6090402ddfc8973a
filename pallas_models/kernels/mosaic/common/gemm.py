"""Matrix products on Hopper's tensor cores: CTAs that stay on their multiprocessor and walk tiles of the output.

One warpgroup of a CTA only copies operands into a ring of slots in shared memory, ahead of those that multiply.
It does not stop at the end of a tile, so the tensor cores find the operands of the next one waiting.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.tiles import tile_order
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, tiled
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.target import Target

_REGISTERS = {2: (40, 232), 3: (32, 160)}  # of a thread of the producer, and of so many consumers
_ROWS = 64  # that a warpgroup multiplies at a time
SLOT_BYTES = _ROWS * ROW_BYTES  # of a slot through which an output leaves


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
            ("block_n", self.block_n, 64 * self.num_consumers if self.split_n else 64),
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


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the output, or the part of it that a warpgroup has: which product of the batch, rows and columns.

    Rows and columns may reach past the end: copies to shared memory read zeros there, those from it write nothing.
    """

    batch: jax.Array
    row: jax.Array
    column: jax.Array
    num_rows: int
    num_columns: int

    @property
    def rows(self) -> pl.Slice:
        return pl.Slice(self.row, self.num_rows)

    @property
    def columns(self) -> pl.Slice:
        return pl.Slice(self.column, self.num_columns)


Operand = Callable[[Refs, Tile, pl.Slice], Ref]


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """A sum that warpgroups compute while the tensor cores multiply: for each tile from `zero` on.

    `add(refs, tile, slot, warpgroup, total)` adds what `a_ring` and `b_ring` hold in that slot.
    """

    zero: Callable[[], Any]
    add: Callable[[Refs, Tile, jax.Array, jax.Array, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of a tile, of the size in which an output leaves: `of` selects it from the sums, `at` from memory."""

    row: int
    column: int
    width: int

    def of(self, sums: jax.Array) -> jax.Array:
        """The block of (tile.num_rows, tile.num_columns) in registers."""
        return sums[self.row : self.row + _ROWS, self.columns]

    @property
    def columns(self) -> slice:
        """Where it lies in the columns of the tile."""
        return slice(self.column, self.column + self.width)

    def at(self, ref: Ref, tile: Tile) -> Ref:
        """The block of (m, n) in device memory."""
        return ref.at[pl.ds(tile.row + self.row, _ROWS), pl.ds(tile.column + self.column, self.width)]


def blocks(
    config: Config, num_columns: int, dtype: DTypeLike, num_slots: int, *, joined: bool = True
) -> list[Block]:
    """All blocks of the part of a tile that a warpgroup has, `num_slots` of which its shared memory holds.

    Where it holds them all, those beside one another are one block: fewer copies, and much less code; unless they
    are not to be `joined`, as where there is so much to compute of each element that registers are short.
    """
    width = ROW_BYTES // jnp.dtype(dtype).itemsize
    if joined and num_slots * width * _ROWS == config.rows * num_columns:
        width = num_columns
    return [
        Block(row, column, width)
        for column in range(0, num_columns, width)
        for row in range(0, config.rows, _ROWS)
    ]


def staging(config: Config, blocks: Sequence[Block], dtype: DTypeLike, num_slots: int) -> Any:
    """Shared memory through which blocks of an output leave, for each warpgroup: `num_slots` at a time, or all."""
    return tiled((config.num_consumers, min(num_slots, len(blocks)), _ROWS, blocks[0].width), dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What `store` stores: `value(block, slot)` in `ref`, (m, n) in device memory, by way of `slots`.

    Attributes:
      slots: `staging`.
      copy: `copy(slot, ref, at)` copies a slot to `at(ref)`; on this GPU when None.
    """

    slots: Ref
    warpgroup: jax.Array
    ref: Ref
    value: Callable[[Block, Ref], jax.Array]
    copy: Callable[[Ref, Ref, Callable[[Ref], Ref]], None] | None = None

    def slot(self, i: int) -> Ref:
        """The slot of the i-th block."""
        return self.slots.at[self.warpgroup, i % self.slots.shape[1]]

    def leave(self, i: int, at: Callable[[Ref], Ref]) -> None:
        """Copies the slot of the i-th block to `at(ref)`."""
        if self.copy is None:
            plgpu.copy_smem_to_gmem(self.slot(i), at(self.ref))
        else:
            self.copy(self.slot(i), self.ref, at)


def store(tile: Tile, blocks: Sequence[Block], *outputs: Output, wait: bool) -> None:
    """Stores a tile of outputs block by block, the same of all together, and waits for none of them to arrive.

    Args:
      wait: whether slots may still be on their way from the last tile; not if that was waited for before.
    """
    num_slots = min(output.slots.shape[1] for output in outputs)
    for i, block in enumerate(blocks):
        if wait:
            plgpu.wait_smem_to_gmem(len(outputs) * (num_slots - 1), wait_read_only=True)
        for output in outputs:
            slot = output.slot(i)
            slot[...] = output.value(block, slot).astype(output.ref.dtype)
        plgpu.commit_smem()
        for output in outputs:
            output.leave(i, functools.partial(block.at, tile=tile))


def gemm(
    operands: Mapping[str, jax.Array | None],
    out_type: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    config: Config,
    batch: int = 1,
    m: int,
    n: int,
    k: int,
    dtype: DTypeLike,
    a: Operand,
    b: Sequence[Operand],
    transpose_a: bool = False,
    transpose_b: bool = False,
    split_n: bool = False,
    prefetch: Callable[[Refs, Tile, jax.Array], None] | None = None,
    beside: Beside | None = None,
    first_k: int | None = None,
    epilogue: Callable[[Refs, Tile, Sequence[jax.Array], jax.Array], None],
    scratch_types: Mapping[str, Any],
    peers: Peers | None = None,
    name: str,
    target: Target,
    interpret: bool,
) -> list[jax.Array]:
    """Runs `epilogue` on every tile of `batch` products (m, k) @ (k, n), summed in float32.

    Args:
      operands: arrays in device memory, those that are None being absent. The callables see these, the outputs and
        the scratch memory as attributes of one namespace.
      out_type: what the kernel writes, None for what a call does not ask for.
      n: columns of the products, of which a tile has `block_n`: where `b` has parts, those of one part.
      dtype: of what is multiplied, float16 or bfloat16.
      a: `a(refs, tile, ks)` is where (block_m, block_k) of the left operand lies in device memory.
      b: where (block_k, block_n) of the right operand lies: of several, side by side, (block_k, block_n / len(b))
        each, as for the gate and the values of a gated product. Tile columns are those of one of them.
      transpose_a: whether `a` gives (block_k, block_m).
      transpose_b: whether `b` gives (block_n, block_k).
      split_n: whether each warpgroup has a part of `b` for itself, and the epilogue the sums of that part alone.
      prefetch: `prefetch(refs, tile, warpgroup)` may start copies of what the epilogue reads, early in the sum.
      beside: what else each warpgroup sums up of the operands.
      first_k: the contraction of the first product of the batch where that is longer than `k`, that of the others:
        each of its tiles has a CTA for itself, and those that are left share the tiles of the others.
      epilogue: `epilogue(refs, tile, sums, warpgroup)` stores the sums, (tile.num_rows, tile.num_columns) in
        float32 for each part of `b`; after them comes the last total of `beside`, if there is one.
      scratch_types: shared memory and barriers for those two; each warpgroup, 0 or 1, must use its own.
      peers: the GPUs to which the epilogue stores, which wait for one another in the end.

    Returns:
      The outputs.
    """
    if config.block_n % (64 * len(b)):
        raise ValueError(f"block_n={config.block_n} must be a multiple of {64 * len(b)}: it has {len(b)} parts")
    if config.split_n != split_n:
        raise ValueError(f"{config} has {config.split_n=}; {name} needs {split_n}")
    if config.resident and (batch > 1 or len(b) > 1 or first_k is not None):
        raise ValueError(f"{config} keeps one right operand of one length; {name} has several")
    if interpret:
        tile_columns = config.block_n // len(b)
        check_interpreted_sizes(m=(m, config.block_m), n=(n, tile_columns), k=(k, config.block_k))
    body = _Body(
        config, batch, m, n, k, first_k, a, b, transpose_a, transpose_b, prefetch, beside, epilogue, peers
    )
    return launch(
        body,
        operands,
        out_type,
        {
            **scratch_types,
            **_ring_types(config, dtype, k, len(b), transpose_a, transpose_b),
            **({} if peers is None else peers.scratch_types),
        },
        name=name,
        num_ctas=_num_ctas(config, batch * body.tiles[0], body.tiles[1], 2 if interpret else target.num_cores),
        num_warpgroups=config.num_consumers + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,  # `store` and the ring have those that are needed
    )


def _ring_types(
    config: Config, dtype: DTypeLike, k: int, b_parts: int, transpose_a: bool, transpose_b: bool
) -> dict[str, Any]:
    """Shared memory of the operands, and who may touch which slot of it."""
    steps = pl.cdiv(k, config.block_k)

    def slots(count: int, shape: tuple[int, int], transpose: bool, parts: int) -> Any:
        return tiled((count, parts, *(shape[::-1] if transpose else shape)), dtype)

    b_slots = steps if config.resident else config.num_stages
    return dict(
        a_ring=slots(config.num_stages, (config.block_m, config.block_k), transpose_a, 1),
        b_ring=slots(b_slots, (config.block_k, config.block_n // b_parts), transpose_b, b_parts),
        **(dict(b_full=plgpu.Barrier(num_barriers=steps)) if config.resident else {}),
        full=plgpu.Barrier(
            num_arrivals=1 if config.resident else 1 + b_parts,
            num_barriers=config.num_stages * (config.num_consumers if config.ping_pong else 1),
        ),
        consumed=plgpu.Barrier(
            num_arrivals=1 if config.ping_pong else config.num_consumers, num_barriers=config.num_stages
        ),
        turn=plgpu.Barrier(num_barriers=config.num_consumers),
    )


def shared_memory(config: Config, num_slots: int, k: int = 0) -> int:
    """Bytes of shared memory that the ring and `num_slots` of `staging` take, and some for barriers and a bias.

    A right operand that is resident has `k` rows.
    """
    b_stages = pl.cdiv(k, config.block_k) if config.resident else config.num_stages
    ring = (config.num_stages * config.block_m + b_stages * config.block_n) * config.block_k * 2
    return ring + config.num_consumers * (num_slots * SLOT_BYTES + config.block_n * 4) + 512


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
            rounds = pl.cdiv(math.prod(tiles), _num_ctas(config, *tiles, target.num_cores))
            if rounds > 1 or not choice.resident:  # of one round nothing is read again
                fitting.append((rounds * (choice.tile_us + k * choice.k_us), config))
    return min(fitting, key=lambda entry: entry[0])[1]


def _num_ctas(config: Config, tiles_m: int, tiles_n: int, cores: int) -> int:
    """How many CTAs share the tiles: where those are resident, each column has as many."""
    per_column = min(max(cores // tiles_n, 1), tiles_m)
    return tiles_n * per_column if config.resident else min(cores, tiles_m * tiles_n)


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
                if num_tiles(config, m, n) >= 8 * target.num_cores and not stays:
                    yield dataclasses.replace(deepest, group_m=16)


def num_tiles(config: Config, m: int, n: int) -> int:
    """The number of tiles of an output (m, n), n columns of all operands together."""
    return pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n)


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    config: Config
    batch: int
    m: int
    n: int
    k: int
    first_k: int | None
    a: Operand
    b: Sequence[Operand]
    transpose_a: bool
    transpose_b: bool
    prefetch: Callable[[Refs, Tile, jax.Array], None] | None
    beside: Beside | None
    epilogue: Callable[[Refs, Tile, Sequence[jax.Array], jax.Array], None]
    peers: Peers | None

    @property
    def num_steps(self) -> Any:
        """Steps of the contraction of each tile of this CTA."""
        steps = pl.cdiv(self.k, self.config.block_k)
        if self.first_k is None:
            return steps
        is_first = jax.lax.axis_index("cta") < self.num_tiles // self.batch
        return jnp.where(is_first, pl.cdiv(self.first_k, self.config.block_k), steps)

    @property
    def stride(self) -> Any:
        """From a tile of a CTA to its next one."""
        ctas = jax.lax.axis_size("cta")
        return ctas if self.first_k is None else ctas - self.num_tiles // self.batch

    @property
    def count(self) -> jax.Array:
        """How many tiles this CTA has."""
        cta = jax.lax.axis_index("cta")
        count = jax.lax.div(self.num_tiles + self.stride - 1 - cta, self.stride)
        return count if self.first_k is None else jnp.where(cta < self.num_tiles // self.batch, 1, count)

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.m, self.config.block_m), pl.cdiv(self.n, self.tile_columns)

    @property
    def tile_columns(self) -> int:
        return self.config.block_n // len(self.b)

    @property
    def num_tiles(self) -> int:
        tiles_m, tiles_n = self.tiles
        return self.batch * tiles_m * tiles_n

    def tile(self, i: jax.Array) -> Tile:
        """The i-th tile of this CTA."""
        i = jax.lax.axis_index("cta") + i * self.stride
        tiles_m, tiles_n = self.tiles
        batch, i = jax.lax.div(i, tiles_m * tiles_n), jax.lax.rem(i, tiles_m * tiles_n)
        # With `resident` there are as many CTAs as columns, or a multiple of them: row by row each stays in one.
        row, column = tile_order(i, tiles_m, tiles_n, 1 if self.config.resident else self.config.group_m)
        return Tile(
            batch, row * self.config.block_m, column * self.tile_columns, self.config.block_m, self.tile_columns
        )

    def ring(self, refs: Refs, warpgroup: jax.Array) -> Ring:
        """The ring as this consumer sees it: with barriers of its own if it has tiles of its own."""
        num_stages = self.config.num_stages
        first_full = warpgroup * num_stages if self.config.ping_pong else 0
        return Ring(refs.full, refs.consumed, num_stages, first_full)

    def __call__(self, refs: Refs) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")
        count = self.count
        producer_registers, consumer_registers = _REGISTERS[self.config.num_consumers]

        @pl.when(warpgroup == self.config.num_consumers)
        def _() -> None:
            plgpu.set_max_registers(producer_registers, action="decrease")
            self.produce(refs, count)

        @pl.when(warpgroup < self.config.num_consumers)
        def _() -> None:
            plgpu.set_max_registers(consumer_registers, action="increase")
            self.consume(refs, count, warpgroup)
            if self.peers is None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                self.peers.finish(refs, storing=self.config.num_consumers, waits=warpgroup == 0)

    def produce(self, refs: Refs, count: jax.Array) -> None:
        """Copies the operands of all tiles to the ring, as slots become free."""
        config = self.config

        def copy_tile(i: jax.Array, first: jax.Array) -> jax.Array:
            tile = self.tile(i)
            ring = self.ring(refs, jax.lax.rem(i, config.num_consumers))

            def copy_step(j: jax.Array, step: jax.Array) -> jax.Array:
                ks = pl.Slice(j * config.block_k, config.block_k)
                slot = ring.acquire(step)
                full = ring.full_of(slot)
                plgpu.copy_gmem_to_smem(self.a(refs, tile, ks), refs.a_ring.at[slot, 0], full)
                if config.resident:

                    @pl.when(i == 0)
                    def _() -> None:
                        plgpu.copy_gmem_to_smem(self.b[0](refs, tile, ks), refs.b_ring.at[j, 0], refs.b_full.at[j])

                else:
                    for part, b in enumerate(self.b):
                        plgpu.copy_gmem_to_smem(b(refs, tile, ks), refs.b_ring.at[slot, part], full)
                return step + 1

            return jax.lax.fori_loop(0, self.num_steps, copy_step, first)

        steps = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
        self.ring(refs, jnp.int32(0)).drain(steps)

    def consume(self, refs: Refs, count: jax.Array, warpgroup: jax.Array) -> None:
        """Multiplies what the ring holds, for the tiles of this warpgroup."""
        config = self.config
        if not config.ping_pong:

            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                self.multiply(refs, i, count, warpgroup)

            return

        @pl.when(warpgroup == config.num_consumers - 1)
        def _() -> None:
            plgpu.barrier_arrive(refs.turn.at[0])

        @pl.loop(0, jax.lax.div(count - warpgroup + config.num_consumers - 1, config.num_consumers))
        def _(i: jax.Array) -> None:
            self.multiply(refs, config.num_consumers * i + warpgroup, count, warpgroup)

    def multiply(self, refs: Refs, i: jax.Array, count: jax.Array, warpgroup: jax.Array) -> None:
        """Sums up the i-th of `count` tiles of this CTA and finishes it."""
        config, prefetch, beside = self.config, self.prefetch, self.beside
        tile = self.tile(i)
        ring = self.ring(refs, warpgroup)
        rows: Any = slice(None)
        parts: list[Any] = list(range(len(self.b)))
        if config.split_n:
            parts = [warpgroup]
            tile = dataclasses.replace(tile, column=tile.column + warpgroup * self.tile_columns)
        elif not config.ping_pong:
            rows = pl.ds(warpgroup * config.rows, config.rows)
            tile = dataclasses.replace(tile, row=tile.row + warpgroup * config.rows, num_rows=config.rows)

        def multiply_slot(sums: Sequence[Ref], slot: jax.Array, j: jax.Array) -> None:
            ring.wait(slot)
            if config.resident:
                first = warpgroup if config.ping_pong else 0
                pl.when(i == first)(lambda: plgpu.barrier_wait(refs.b_full.at[j]))
            a = refs.a_ring.at[(slot, 0, *((slice(None), rows) if self.transpose_a else (rows,)))]
            for part, total in zip(parts, sums, strict=True):
                b = refs.b_ring.at[j if config.resident else slot, part]
                plgpu.wgmma(
                    total,
                    a.transpose((1, 0)) if self.transpose_a else a,
                    b.transpose((1, 0)) if self.transpose_b else b,
                )

        def product(*sums: Ref) -> list[jax.Array]:
            if config.ping_pong:
                if prefetch is not None:
                    prefetch(refs, tile, warpgroup)
                plgpu.barrier_wait(refs.turn.at[warpgroup])

            def step(j: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
                before, totals = carry
                slot = ring.after(before)
                multiply_slot(sums, slot, j)
                if beside is not None:
                    totals = [beside.add(refs, tile, slot, warpgroup, *totals)]
                plgpu.wgmma_wait(len(sums))  # the tensor cores always have the next step before them

                pl.when(j > 0)(lambda: ring.release(before))
                if not config.ping_pong and prefetch is not None:
                    pl.when(j == 0)(functools.partial(prefetch, refs, tile, warpgroup))
                return slot, totals

            before = jax.lax.rem(i * self.num_steps + config.num_stages - 1, config.num_stages)
            zeros = [] if beside is None else [beside.zero()]
            last, totals = jax.lax.fori_loop(0, self.num_steps, step, (before, zeros))
            if config.ping_pong:

                @pl.when(i + 1 < count)
                def _() -> None:
                    plgpu.barrier_arrive(refs.turn.at[jax.lax.rem(warpgroup + 1, config.num_consumers)])

            plgpu.wgmma_wait(0)
            ring.release(last)
            return [total[...] for total in sums] + totals

        accumulator = plgpu.ACC((config.rows, self.tile_columns), jnp.float32)
        sums = pl.run_scoped(product, *[accumulator] * len(parts))
        self.epilogue(refs, tile, sums, warpgroup)
