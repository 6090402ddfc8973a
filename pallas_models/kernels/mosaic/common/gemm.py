"""Matrix products on Hopper's tensor cores: CTAs that stay on their multiprocessor and walk tiles of the output.

One warpgroup of a CTA only copies operands into a ring of slots in shared memory, ahead of the warpgroups that
multiply. It does not stop at the end of a tile, so the tensor cores find the operands of the next tile waiting.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.staging import Staging
from pallas_models.kernels.mosaic.common.tile_walk import Tile, TileWalk
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

Operand = Callable[[Refs, Tile, pl.Slice], Ref]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """What is multiplied: `batch` products (m, k) @ (k, n), summed in float32.

    Attributes:
      n: columns of the products, of which a tile has `block_n`: where `b` has parts, the columns of one part.
      dtype: of the operands, float16 or bfloat16.
      a: `a(refs, tile, ks)` is where (block_m, block_k) of the left operand lies in device memory.
      b: where (block_k, block_n) of the right operand lies: of several, side by side, (block_k, block_n / len(b))
        each, as for the gate and the values of a gated product. Tiles have the columns of one of them.
      transpose_a: whether `a` gives (block_k, block_m).
      transpose_b: whether `b` gives (block_n, block_k).
      first_k: the contraction of the first product of the batch where that is longer than `k`; see `TileWalk`.
      columns: of which the columns of a tile are a multiple, for each part; fewer than 64 need `transpose_b`.
    """

    m: int
    n: int
    k: int
    dtype: DTypeLike
    a: Operand
    b: Sequence[Operand]
    batch: int = 1
    transpose_a: bool = False
    transpose_b: bool = False
    first_k: int | None = None
    columns: int = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """A sum that warpgroups compute while the tensor cores multiply: for each tile from `zero` on.

    `add(refs, tile, slot, warpgroup, total)` adds what `a_ring` and `b_ring` hold in that slot.
    """

    zero: Callable[[], Any]
    add: Callable[[Refs, Tile, jax.Array, jax.Array, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Epilogue:
    """What becomes of the sums of a tile.

    Attributes:
      store: `store(refs, tile, sums, warpgroup)` stores the sums, (tile.num_rows, tile.num_columns) in float32 for
        each part of the right operand; after them comes the last total of `beside`, if there is one.
      scratch_types: shared memory and barriers for `store` and `prefetch`; each warpgroup must use its own.
      prefetch: `prefetch(refs, tile, warpgroup)` may start copies of what `store` reads, early in the sum.
      beside: what else each warpgroup sums up of the operands.
      split_n: whether each warpgroup has a part of the right operand for itself, and `store` is given the sums of
        that part alone.
      peers: the GPUs to which `store` stores, which wait for one another in the end.
    """

    store: Callable[[Refs, Tile, Sequence[Any], jax.Array], None]
    scratch_types: Mapping[str, Any]
    prefetch: Callable[[Refs, Tile, jax.Array], None] | None = None
    beside: Beside | None = None
    split_n: bool = False
    peers: Peers | None = None


def gemm(
    operands: Mapping[str, jax.Array | None],
    out_type: Mapping[str, jax.ShapeDtypeStruct | None],
    product: Product,
    epilogue: Epilogue,
    *,
    config: Config,
    name: str,
    target: Target,
    interpret: bool,
) -> list[jax.Array]:
    """Runs the epilogue on every tile of a product.

    Args:
      operands: arrays in device memory, absent ones being None. The functions of product and epilogue see them,
        the outputs and the scratch memory as attributes of one namespace.
      out_type: what the kernel writes, None for what a call does not ask for.

    Returns:
      The outputs.
    """
    b_parts = len(product.b)
    if config.block_n % (product.columns * b_parts):
        raise ValueError(
            f"block_n={config.block_n} must be a multiple of {product.columns * b_parts}: it has {b_parts} parts"
        )
    if config.split_n != epilogue.split_n:
        raise ValueError(f"{config} has {config.split_n=}; {name} needs {epilogue.split_n}")
    if config.resident and (product.batch > 1 or b_parts > 1 or product.first_k is not None):
        raise ValueError(f"{config} keeps one right operand of one length; {name} has several")
    walk = TileWalk(
        batch=product.batch,
        m=product.m,
        n=product.n,
        k=product.k,
        first_k=product.first_k,
        block_m=config.block_m,
        block_n=config.block_n // b_parts,
        block_k=config.block_k,
        # With `resident` there are as many CTAs as columns, or a multiple of them: row by row each stays in one.
        group_m=1 if config.resident else config.group_m,
    )
    if interpret:
        check_interpreted_sizes(m=(walk.m, walk.block_m), n=(walk.n, walk.block_n), k=(walk.k, walk.block_k))
    tiles_m, tiles_n = walk.tiles
    return launch(
        _Kernel(config, product, epilogue, walk),
        operands,
        out_type,
        {
            **epilogue.scratch_types,
            **_ring_types(config, product),
            **({} if epilogue.peers is None else epilogue.peers.scratch_types),
        },
        name=name,
        num_ctas=config.num_ctas(walk.batch * tiles_m, tiles_n, num_cores(target, interpret)),
        num_warpgroups=config.num_consumers + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,  # stores and the ring have the barriers that are needed
    )


def shared_memory(config: Config, *stagings: Staging, k: int = 0) -> int:
    """Bytes of shared memory of a CTA: a ring for a contraction of `k`, outputs, some for barriers and a bias."""
    outputs = sum(staging.num_bytes for staging in stagings)
    return config.ring_bytes(k) + outputs + config.num_consumers * config.block_n * 4 + 512


def _ring_types(config: Config, product: Product) -> dict[str, Any]:
    """Shared memory of the operands, and who may touch which slot of it."""
    b_parts, b_stages = len(product.b), config.b_stages(product.k)

    def slots(count: int, shape: tuple[int, int], transpose: bool, parts: int) -> Any:
        return tiled((count, parts, *(shape[::-1] if transpose else shape)), product.dtype)

    return dict(
        a_ring=slots(config.num_stages, (config.block_m, config.block_k), product.transpose_a, 1),
        b_ring=slots(b_stages, (config.block_k, config.block_n // b_parts), product.transpose_b, b_parts),
        **(dict(b_full=plgpu.Barrier(num_barriers=b_stages)) if config.resident else {}),
        full=plgpu.Barrier(
            num_arrivals=1 if config.resident else 1 + b_parts,
            num_barriers=config.num_stages * (config.num_consumers if config.ping_pong else 1),
        ),
        consumed=plgpu.Barrier(
            num_arrivals=1 if config.ping_pong else config.num_consumers, num_barriers=config.num_stages
        ),
        turn=plgpu.Barrier(num_barriers=config.num_consumers),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel: a producer that fills the ring, and consumers that multiply what it holds."""

    config: Config
    product: Product
    epilogue: Epilogue
    walk: TileWalk

    def __call__(self, refs: Refs) -> None:
        warpgroup, count = jax.lax.axis_index("warpgroup"), self.walk.count
        consumers = self.config.num_consumers
        producer_registers, consumer_registers = self.config.registers
        specialize(
            Role(range(consumers, consumers + 1), producer_registers, lambda _: self.produce(refs, count)),
            Role(range(consumers), consumer_registers, functools.partial(self.consume, refs, count)),
            warpgroup=warpgroup,
        )

    def ring(self, refs: Refs, warpgroup: jax.Array) -> Ring:
        """The ring as this consumer sees it: with barriers of its own if it has tiles of its own."""
        num_stages = self.config.num_stages
        first_full = warpgroup * num_stages if self.config.ping_pong else 0
        return Ring(refs.full, refs.consumed, num_stages, first_full)

    def produce(self, refs: Refs, count: jax.Array) -> None:
        """Copies the operands of all tiles to the ring, as slots become free."""
        copy_tile = functools.partial(self.copy_tile, refs)
        steps = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
        self.ring(refs, jnp.int32(0)).drain(steps)

    def copy_tile(self, refs: Refs, i: jax.Array, first: jax.Array) -> jax.Array:
        """Copies the operands of the i-th tile to the slots from step `first` on. Returns the step after them."""
        config = self.config
        tile = self.walk.tile(i)
        ring = self.ring(refs, jax.lax.rem(i, config.num_consumers))

        def copy_step(j: jax.Array, step: jax.Array) -> jax.Array:
            ks = pl.Slice(j * config.block_k, config.block_k)
            slot = ring.acquire(step)
            full = ring.full_of(slot)
            plgpu.copy_gmem_to_smem(self.product.a(refs, tile, ks), refs.a_ring.at[slot, 0], full)
            if config.resident:

                @pl.when(i == 0)
                def _() -> None:
                    b = self.product.b[0](refs, tile, ks)
                    plgpu.copy_gmem_to_smem(b, refs.b_ring.at[j, 0], refs.b_full.at[j])

            else:
                for part, b in enumerate(self.product.b):
                    plgpu.copy_gmem_to_smem(b(refs, tile, ks), refs.b_ring.at[slot, part], full)
            return step + 1

        return jax.lax.fori_loop(0, self.walk.num_steps, copy_step, first)

    def consume(self, refs: Refs, count: jax.Array, warpgroup: jax.Array) -> None:
        """Sums up and finishes the tiles of this warpgroup, and waits until they are stored."""
        consumers, peers = self.config.num_consumers, self.epilogue.peers
        if self.config.ping_pong:

            @pl.when(warpgroup == consumers - 1)
            def _() -> None:
                plgpu.barrier_arrive(refs.turn.at[0])

            @pl.loop(0, jax.lax.div(count - warpgroup + consumers - 1, consumers))
            def _(i: jax.Array) -> None:
                self.finish(refs, consumers * i + warpgroup, count, warpgroup)

        else:

            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                self.finish(refs, i, count, warpgroup)

        if peers is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        else:
            peers.finish(refs, storing=consumers, waits=warpgroup == 0)

    def finish(self, refs: Refs, i: jax.Array, count: jax.Array, warpgroup: jax.Array) -> None:
        """Sums up the i-th of `count` tiles of this CTA, or this warpgroup's part of it, and stores it."""
        config = self.config
        tile = self.walk.tile(i)
        ring = self.ring(refs, warpgroup)
        rows: Any = slice(None)
        parts: list[Any] = list(range(len(self.product.b)))
        if config.split_n:
            parts = [warpgroup]
            tile = dataclasses.replace(tile, column=tile.column + warpgroup * self.walk.block_n)
        elif not config.ping_pong:
            rows = pl.ds(warpgroup * config.rows, config.rows)
            tile = dataclasses.replace(tile, row=tile.row + warpgroup * config.rows, num_rows=config.rows)
        accumulator = plgpu.ACC((config.rows, self.walk.block_n), jnp.float32)
        multiply = _TileSum(self, refs, ring, i, count, warpgroup, tile, rows, parts)
        sums = pl.run_scoped(multiply, *[accumulator] * len(parts))
        self.epilogue.store(refs, tile, sums, warpgroup)


@dataclasses.dataclass(frozen=True, slots=True)
class _TileSum:
    """The sum of a tile, or of a warpgroup's part of it.

    Attributes:
      i: which of the `count` tiles of this CTA it is.
      tile: the warpgroup's part of it.
      rows: the rows of the left operand in a slot that are multiplied.
      parts: the parts of the right operand that are multiplied.
    """

    kernel: _Kernel
    refs: Refs
    ring: Ring
    i: jax.Array
    count: jax.Array
    warpgroup: jax.Array
    tile: Tile
    rows: Any
    parts: Sequence[Any]

    def __call__(self, *sums: Ref) -> list[Any]:
        """The sums of all parts, and the total of what is summed beside them."""
        kernel, config, refs = self.kernel, self.kernel.config, self.refs
        beside = kernel.epilogue.beside
        if config.ping_pong:
            self.prefetch()
            plgpu.barrier_wait(refs.turn.at[self.warpgroup])
        before = jax.lax.rem(self.i * kernel.walk.num_steps + config.num_stages - 1, config.num_stages)
        zeros = [] if beside is None else [beside.zero()]
        step = functools.partial(self.step, sums)
        last, totals = jax.lax.fori_loop(0, kernel.walk.num_steps, step, (before, zeros))
        if config.ping_pong:

            @pl.when(self.i + 1 < self.count)
            def _() -> None:
                plgpu.barrier_arrive(refs.turn.at[jax.lax.rem(self.warpgroup + 1, config.num_consumers)])

        plgpu.wgmma_wait(0)
        self.ring.release(last)
        return [total[...] for total in sums] + totals

    def prefetch(self) -> None:
        """Starts copies of what the epilogue reads."""
        if self.kernel.epilogue.prefetch is not None:
            self.kernel.epilogue.prefetch(self.refs, self.tile, self.warpgroup)

    def step(
        self, sums: Sequence[Ref], j: jax.Array, carry: tuple[jax.Array, list[Any]]
    ) -> tuple[jax.Array, list[Any]]:
        """Adds step j of the contraction, given the slot of the step before; releases that."""
        before, totals = carry
        epilogue, slot = self.kernel.epilogue, self.ring.after(before)
        self.multiply(sums, slot, j)
        if epilogue.beside is not None:
            totals = [epilogue.beside.add(self.refs, self.tile, slot, self.warpgroup, *totals)]
        plgpu.wgmma_wait(len(sums))  # the tensor cores always have the next step before them

        pl.when(j > 0)(lambda: self.ring.release(before))
        if not self.kernel.config.ping_pong and epilogue.prefetch is not None:
            pl.when(j == 0)(self.prefetch)
        return slot, totals

    def multiply(self, sums: Sequence[Ref], slot: jax.Array, j: jax.Array) -> None:
        """Has the tensor cores add the product of a slot to each sum."""
        refs, config, product = self.refs, self.kernel.config, self.kernel.product
        self.ring.wait(slot)
        if config.resident:
            first = self.warpgroup if config.ping_pong else 0
            pl.when(self.i == first)(lambda: plgpu.barrier_wait(refs.b_full.at[j]))
        a = refs.a_ring.at[(slot, 0, *((slice(None), self.rows) if product.transpose_a else (self.rows,)))]
        for part, total in zip(self.parts, sums, strict=True):
            b = refs.b_ring.at[j if config.resident else slot, part]
            plgpu.wgmma(
                total,
                a.transpose((1, 0)) if product.transpose_a else a,
                b.transpose((1, 0)) if product.transpose_b else b,
            )
