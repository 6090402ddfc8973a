"""The gradients of a product by its weights and its bias, for Hopper GPUs: the cotangent is read once for both."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.mosaic.common import gemm, gemm_config
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm import Beside, Epilogue, Product
from pallas_models.kernels.mosaic.common.interpreter import interprets_transposed, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import untiled
from pallas_models.kernels.mosaic.common.staging import Block, Output, Staging, store
from pallas_models.kernels.mosaic.common.tile_walk import Tile
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_COLUMNS = 64  # whose sums a warpgroup holds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config(gemm_config.Config):
    """Tiles of a product whose contraction is long: `splits` parts of it are summed apart, and then together.

    The first part is longer than the others if `uneven`: CTAs that have a tile each compute it, while the CTAs
    that are left compute the others. So all are busy, with fewer parts to add up than if all were equally long.
    """

    ping_pong: bool = False
    splits: int
    uneven: bool = False

    def __post_init__(self) -> None:
        gemm_config.Config.__post_init__(self)
        if self.splits < 1 + self.uneven or self.ping_pong or self.block_k != 64:
            raise ValueError(f"{self}: splits must be positive, 2 if uneven, ping_pong False and block_k 64")

    def rows_of_parts(self, m: int, n: int, k: int, num_ctas: int) -> tuple[int, int]:
        """How many of m rows the first part has, and each of the others: multiples of 64."""
        if not self.uneven:
            return (64 * pl.cdiv(m, 64 * self.splits),) * 2
        tiles, others = pl.cdiv(k, self.block_m) * pl.cdiv(n, self.block_n), self.splits - 1
        rounds = pl.cdiv(tiles * others, num_ctas - tiles)
        rows = 64 * max(1, (m - (rounds - 1) * _ROWS_A_TILE) // (64 * (rounds + others)))
        return max(rows, 64 * pl.cdiv(m, 64) - others * rows), rows


# Rows, columns, slots and, where every multiprocessor has one: us a tile, and us per unit of M. Fitted to the
# products of a GPT-2 block with 8192 and 32768 rows in bfloat16 on an H200, the last two lines extrapolated.
_TILES = (
    (128, 256, 1, 5.4, 0.0099),
    (128, 192, 2, 2.9, 0.0079),
    (128, 128, 2, 2.0, 0.0065),
    (128, 64, 2, 1.5, 0.0045),
)
_ROWS_A_TILE = 400  # that take as long as to finish a tile
_US_PER_PART = 1.1e-6  # of each output and split: it is written, read and added
_US_TO_ADD = 1.2  # for the launch that adds up the bias


def heuristic(m: int, n: int, k: int, target: Target) -> Config:
    """Chooses tiles and splits for x (m, k) and dy (m, n): the soonest of what `configs` has, by a model."""
    us = {(block_m, block_n): times for block_m, block_n, _, *times in _TILES}

    def time(config: Config) -> float:
        tiles = pl.cdiv(k, config.block_m) * pl.cdiv(n, config.block_n)
        tile_us, m_us = us[config.block_m, config.block_n]
        first, others = config.rows_of_parts(m, n, k, target.num_cores)
        if config.uneven:
            rounds = pl.cdiv(tiles * (config.splits - 1), target.num_cores - tiles)
            sums = max(tile_us + first * m_us, rounds * (tile_us + others * m_us))
        else:
            sums = pl.cdiv(config.splits * tiles, target.num_cores) * (tile_us + m / config.splits * m_us)
        return sums + (config.splits > 1) * (_US_TO_ADD + config.splits * k * n * _US_PER_PART)

    return min(configs(m, n, k, target), key=time)


def configs(m: int, n: int, k: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: up to 12 splits of 512 rows or more."""
    for (block_m, block_n, num_slots, *_), splits in itertools.product(_TILES, range(1, 13)):
        if (splits > 1 and m < 512 * splits) or block_n >= 2 * max(n, 64):
            continue
        fewest = pl.cdiv(k, block_m) * pl.cdiv(n, block_n)
        for num_stages in range(8, 1, -1):
            config = Config(
                block_m=block_m, block_n=block_n, num_stages=num_stages, num_slots=num_slots, splits=splits
            )
            if shared_memory(config) <= target.shared_memory:
                yield config
                if splits > 1 and fewest < target.num_cores < splits * fewest:
                    yield dataclasses.replace(config, uneven=True)
                break


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a CTA takes, with parts of sums in float32."""
    product = gemm.shared_memory(config, Staging.of(config, config.block_n, jnp.float32))
    return product + 2048 + 4 * _COLUMNS  # where warps add up columns


def unsupported(form: Form[jax.ShapeDtypeStruct]) -> str | None:
    """Why `weight_gradient` does not serve the gradient of a product; None if it does."""
    x, w = form.x, form.w
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if form.transpose_w:
        return "takes no transposed w"
    return untiled("x", x.shape, x.dtype) or untiled("w", w.shape, w.dtype)


def weight_gradient(
    x: jax.Array, dy: jax.Array, *, config: Config | Chooser | None, target: Target, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """x^T dy, (K, N), in their dtype, and the column sums of dy, (N,) float32, for x (M, K) and dy (M, N).

    The sums over M are taken in two stages, of each split and then of all splits, always in the same order.
    """
    (m, k), n = x.shape, dy.shape[1]
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="matmul_backward",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, target),
            candidates=functools.partial(configs, m, n, k, target),
            shared_memory=shared_memory,
        ),
        target,
    )
    # What is past the end of x and dy is read as 0.
    first_rows, rows = config.rows_of_parts(m, n, k, num_cores(target, interpret))
    part_dtype = jnp.dtype(jnp.float32) if config.splits > 1 else x.dtype
    transpose_a = not interpret or interprets_transposed()

    def of_split(tile: Tile, ks: pl.Slice) -> pl.Slice:
        start = tile.batch * rows + jnp.minimum(tile.batch, 1) * (first_rows - rows)
        return pl.Slice(start + ks.start, ks.size)

    def left(refs: Refs, tile: Tile, ks: pl.Slice) -> Ref:
        index = of_split(tile, ks), tile.rows
        return refs.x.at[index if transpose_a else index[::-1]]

    columns = _ColumnSums(config, groups=pl.cdiv(config.block_n // _COLUMNS, pl.cdiv(k, config.block_m)))
    staging = Staging.of(config, config.block_n, part_dtype)

    def store_sums(refs: Refs, tile: Tile, sums: Sequence[Any], warpgroup: jax.Array) -> None:
        product, totals = sums

        def value(block: Block, _: Ref) -> jax.Array:
            return block.of(product)

        store(tile, staging, Output(refs.slots, warpgroup, refs.dw.at[tile.batch], value), wait=True)
        columns.store(refs, tile, totals, warpgroup)

    dw, dbias = gemm.gemm(
        dict(x=x if transpose_a else x.T, dy=dy),
        dict(
            dw=jax.ShapeDtypeStruct((config.splits, k, n), part_dtype),
            # Of whole tiles: a copy past the end of a row would write the beginning of the next split's row.
            dbias=jax.ShapeDtypeStruct((config.splits, pl.cdiv(n, config.block_n) * config.block_n), jnp.float32),
        ),
        Product(
            batch=config.splits,
            m=k,
            n=n,
            k=rows,
            first_k=first_rows if config.uneven else None,
            dtype=x.dtype,
            a=left,
            b=[lambda refs, tile, ks: refs.dy.at[of_split(tile, ks), tile.columns]],
            transpose_a=transpose_a,
        ),
        Epilogue(
            store=store_sums,
            scratch_types=dict(slots=staging.scratch_type, sums=plgpu.SMEM((_COLUMNS,), jnp.float32)),
            beside=Beside(columns.zero, columns.add),
        ),
        config=config,
        name="matmul_backward",
        target=target,
        interpret=interpret,
    )
    return jnp.sum(dw, axis=0).astype(x.dtype), jnp.sum(dbias[:, :n], axis=0)


@dataclasses.dataclass(frozen=True, slots=True)
class _ColumnSums:
    """The sums of the columns of dy, by the first warpgroup, beside the product that the tensor cores compute.

    The tiles of one column block share its sums: each has `groups` of 64 columns, or fewer.
    """

    config: Config
    groups: int

    def group(self, tile: Tile, i: int) -> jax.Array:
        """The i-th group of columns that a tile sums up."""
        return jax.lax.div(tile.row, self.config.block_m) * self.groups + i

    def is_summed(self, tile: Tile, i: int, warpgroup: jax.Array) -> jax.Array:
        """Whether this warpgroup sums up the i-th group, which may lie past the end of the tile."""
        return (warpgroup == 0) & (self.group(tile, i) < self.config.block_n // _COLUMNS)

    def zero(self) -> list[jax.Array]:
        """The sums of each group, by row of a slot, before the first step."""
        return [jnp.zeros((64, _COLUMNS), jnp.float32)] * self.groups

    def add(
        self, refs: Refs, tile: Tile, slot: jax.Array, warpgroup: jax.Array, total: list[jax.Array]
    ) -> list[jax.Array]:
        """Adds the rows of dy that a slot holds."""

        def added(i: int, total: jax.Array) -> jax.Array:
            columns = pl.ds(self.group(tile, i) * _COLUMNS, _COLUMNS)
            return total + refs.b_ring.at[slot, 0, :, columns][...].astype(jnp.float32)

        return [
            jax.lax.cond(
                self.is_summed(tile, i, warpgroup), functools.partial(added, i), lambda total: total, group
            )
            for i, group in enumerate(total)
        ]

    def store(self, refs: Refs, tile: Tile, totals: list[jax.Array], warpgroup: jax.Array) -> None:
        """Adds up the rows of each group and stores the sums."""
        for i, total in enumerate(totals):

            @pl.when(self.is_summed(tile, i, warpgroup))
            def _(i: int = i, total: jax.Array = total) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                refs.sums[...] = jnp.sum(total, axis=0)
                plgpu.commit_smem()
                columns = pl.ds(tile.column + self.group(tile, i) * _COLUMNS, _COLUMNS)
                plgpu.copy_smem_to_gmem(refs.sums, refs.dbias.at[tile.batch, columns])
