"""The gradients of attention on Hopper's tensor cores.

CTAs stay on their multiprocessor and walk over tiles: of queries for their gradients, of keys for those of keys
and values. Warpgroups have 64 rows of a tile each, and their sums in registers; one more copies what a tile is
paired with to them, block by block. Tiles of keys compute scores transposed, (keys, queries): so weights and
gradients of scores are operands of the next products as they are. Scores are computed twice, but each result is
written once: nobody waits for others, and results are the same every time.
"""

import dataclasses
import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Runs, searched
from pallas_models.kernels.common.scores import rows_of_backward
from pallas_models.kernels.mosaic import attention
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, row, tiled
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.target import Target
from pallas_models.tuning import Chooser

_ROWS = 64  # of a warpgroup: the rows of one instruction of the tensor cores
_CONSUMERS = 2  # warpgroups that compute
_TILE = _ROWS * _CONSUMERS
_REGISTERS = (240, 24)  # of a thread that computes and of one that copies
# By head size, rows of a block and blocks in the ring: the fastest on an H200, for a side alone and for both. Of
# queries with masks, which want room too, those for both.
_OF_QUERIES = {64: (128, 4), 128: (128, 2)}
_OF_KEYS = {64: (128, 3), 128: (64, 3)}
_OF_BOTH = {64: (128, 4), 128: (64, 3)}
_IDS = ("segments",), ("mask", "kv_segments")  # masks of queries, and of keys


def unsupported(
    qkv: tuple[jax.Array, ...], mask: jax.Array | None, bias: jax.Array | None, *ids: Any, **static: Any
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if bias is not None:
        return "takes no bias"
    return attention.unsupported(qkv, mask, bias, *ids, **static)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of one head from `start` on, and the `count` blocks of the other side from `first` on.

    Of these the `full_count` from `full` on have nothing but valid pairs.
    """

    batch: jax.Array
    head: jax.Array
    start: jax.Array
    first: jax.Array
    count: jax.Array
    full: jax.Array
    full_count: jax.Array

    def block(self, j: jax.Array) -> jax.Array:
        """The j-th block: the full ones come first, then those before and after them."""
        masked = self.first + j - self.full_count
        masked = jnp.where(masked < self.full, masked, masked + self.full_count)
        return jnp.where(j < self.full_count, self.full + j, masked)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """Tiles of keys or of queries, and how CTAs walk over those of all heads: of `group` heads together."""

    shape: attention.Shape
    read_heads: tuple[int, int, int]  # like `shape.first_heads`, which are those of results
    ids: frozenset[str]  # the masks that there are, of `_IDS`
    of_keys: bool
    batch: int
    block: int  # rows of the other side, of a step
    num_stages: int  # blocks in the ring
    num_ctas: int = 1
    group: int = 1
    last_cta: int | None = None  # which CTA walks as the first one would, the others counted back from it

    @property
    def name(self) -> str:
        return "keys" if self.of_keys else "queries"

    @property
    def operands(self) -> tuple[str, str]:
        """What a tile holds: factors of the scores, and of the gradients of weights."""
        return ("k", "v") if self.of_keys else ("q", "dout")

    @property
    def others(self) -> tuple[str, str]:
        """The same of the blocks."""
        return ("q", "dout") if self.of_keys else ("k", "v")

    @property
    def tile_ids(self) -> list[str]:
        """Masks that a tile has rows of."""
        return [name for name in _IDS[self.of_keys] if name in self.ids]

    @property
    def block_ids(self) -> list[str]:
        """The same of the blocks."""
        return [name for name in _IDS[not self.of_keys] if name in self.ids]

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients, in the order of their sums."""
        return ("dk", "dv") if self.of_keys else ("dq",)

    @property
    def heads(self) -> int:
        return self.shape.num_kv_heads if self.of_keys else self.shape.num_heads

    @property
    def tiles(self) -> int:
        """Number of tiles of a head."""
        return pl.cdiv(self.shape.kv_seq if self.of_keys else self.shape.seq, _TILE)

    @property
    def num_tiles(self) -> int:
        return self.batch * self.heads * self.tiles

    @property
    def heads_of_queries(self) -> int:
        """Number of heads of queries that a head of keys serves."""
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def masks(self) -> bool:
        """Whether any pairs of tiles and blocks are not valid."""
        return (
            len(self.ids) > 0
            or self.shape.band.high is not None
            or (not self.of_keys and self.shape.kv_seq % self.block > 0)
        )

    def runs(self, start: Any) -> Runs:
        """The blocks that the tile from `start` on is paired with."""
        band = self.shape.band
        return (band.queries_of if self.of_keys else band.keys_of)(start, _TILE, self.block)

    def start(self, place: Any) -> Any:
        """The first row of a tile: those that take longest have the first places."""
        return (place if self.of_keys else self.tiles - 1 - place) * _TILE

    def tile(self, i: jax.Array, found: Ref | None) -> _Tile:
        """The i-th tile of this CTA, given what `searched` found."""
        div, rem = jax.lax.div, jax.lax.rem
        section, index = (f(self.index(i, self.cta), self.group * self.tiles) for f in (div, rem))
        head, start = section * self.group + rem(index, self.group), self.start(div(index, self.group))
        batch, masked = div(head, self.heads), len(self.ids) > 0
        runs = attention.narrowed(self.runs(start), found, batch, div(start, _TILE), masked=masked)
        first, end, full, full_end = runs
        end = jnp.maximum(end, first)
        full = jnp.clip(full, first, end)
        full_count = jnp.clip(full_end, full, end) - full
        return _Tile(batch, rem(head, self.heads), start, first, end - first, full, full_count)

    @property
    def cta(self) -> jax.Array:
        """The place of this CTA among those that take turns."""
        cta = jax.lax.axis_index("cta")
        return cta if self.last_cta is None else jax.lax.rem(self.last_cta + self.num_ctas - cta, self.num_ctas)

    def index(self, i: Any, cta: Any) -> Any:
        """CTAs take turns there and back, which evens out what they get."""
        return i * self.num_ctas + cta + (i & 1) * (self.num_ctas - 1 - 2 * cta)

    @property
    def count(self) -> jax.Array:
        """How many tiles this CTA has."""
        rounds = self.num_tiles // self.num_ctas
        return rounds + (self.index(jnp.int32(rounds), self.cta) < self.num_tiles).astype(jnp.int32)

    def products(self) -> np.ndarray:
        """How many products of a tile and a block CTAs compute, where nothing but positions rules blocks out."""
        index = self.index(*np.ogrid[: pl.cdiv(self.num_tiles, self.num_ctas), : self.num_ctas])
        first, end, *_ = self.runs(self.start(index % (self.group * self.tiles) // self.group))
        blocks = np.where(index < self.num_tiles, np.maximum(np.subtract(end, first), 0), 0)
        return np.sum(blocks, axis=0) * (2 + len(self.results))

    def after(self, other: "_Side") -> "_Side":
        """The same where CTAs turn to this side after the other: who had most to do there has least here."""
        mine, before = self.products()[::-1], other.products()
        longest = [np.max(before + np.roll(mine, last + 1)) for last in range(self.num_ctas)]
        return dataclasses.replace(self, last_cta=int(np.argmin(longest)))

    def columns(self, operand: str, head: jax.Array) -> pl.Slice:
        """Those of a head of an operand, or of its gradient."""
        first = dict(zip("qkv", self.read_heads, strict=True))
        first |= dict(zip(("dq", "dk", "dv"), self.shape.first_heads, strict=True))
        return pl.Slice((first.get(operand, 0) + head) * self.shape.head_dim, self.shape.head_dim)

    def spread(self, num_ctas: int, itemsize: int) -> "_Side":
        """The same for so many CTAs, and as many heads together as give them all about as much to do."""
        if not self.shape.causal:
            return dataclasses.replace(self, num_ctas=num_ctas)
        rows = self.shape.seq * self.heads_of_queries if self.of_keys else self.shape.kv_seq
        in_cache = attention.CACHE // (2 * rows * self.shape.head_dim * itemsize)
        in_cache *= 1 if self.of_keys else self.heads_of_queries
        runs = self.runs(self.start(np.arange(self.tiles)))
        group = attention.group_of_heads(runs, self.batch * self.heads, self.tiles, in_cache, num_ctas)
        return dataclasses.replace(self, num_ctas=num_ctas, group=group)


def _produce(refs: Refs, side: _Side) -> None:
    """Copies tiles and blocks to shared memory, ahead of those who compute."""
    div, rem = jax.lax.div, jax.lax.rem
    num_stages = side.num_stages
    ring = Ring(refs.ready, refs.read, num_stages)
    heads = side.heads_of_queries if side.of_keys else 1  # of the blocks of a tile

    def copy_tile(tile: _Tile, is_first: jax.Array) -> None:
        pl.when(~is_first)(lambda: plgpu.barrier_wait(refs.tile_read))
        for part in range(_CONSUMERS):
            rows = pl.Slice(tile.start + part * _ROWS, _ROWS)
            for name, tiles in zip(side.operands, refs.tiles, strict=True):
                source = getattr(refs, name).at[tile.batch, rows, side.columns(name, tile.head)]
                plgpu.copy_gmem_to_smem(source, tiles.at[part], refs.tile_ready)
            for source, target in () if side.of_keys else zip((refs.shift, refs.delta), refs.numbers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[tile.batch, tile.head, rows], target.at[part], refs.tile_ready)
            for name in side.tile_ids:
                source, target = getattr(refs, name).at[tile.batch, rows], getattr(refs, f"{name}_ids").at[part]
                plgpu.copy_gmem_to_smem(source, target, refs.tile_ready)

    def copy_all(i: jax.Array, steps: jax.Array) -> jax.Array:
        tile = side.tile(i, refs.found)
        count = tile.count * heads

        def copy_block(j: jax.Array, steps: jax.Array) -> jax.Array:
            slot = ring.acquire(steps)
            if heads > 1:
                head, j_block = tile.head * heads + div(j, tile.count), rem(j, tile.count)
            else:
                head, j_block = div(tile.head, 1 if side.of_keys else side.heads_of_queries), j
            rows = pl.Slice(tile.block(j_block) * side.block, side.block)
            readies = (refs.ready, refs.second_ready)
            for name, blocks, ready in zip(side.others, refs.blocks, readies, strict=True):
                source = getattr(refs, name).at[tile.batch, rows, side.columns(name, head)]
                plgpu.copy_gmem_to_smem(source, blocks.at[slot], ready.at[slot])
            if side.of_keys:
                for source, target in zip((refs.shift, refs.delta), refs.numbers, strict=True):
                    row_numbers = source.at[tile.batch, head, rows]
                    plgpu.copy_gmem_to_smem(row_numbers, target.at[slot], refs.ready.at[slot])
            for name in side.block_ids:
                source, target = getattr(refs, name).at[tile.batch, rows], getattr(refs, f"{name}_ids").at[slot]
                plgpu.copy_gmem_to_smem(source, target, refs.ready.at[slot])
            # The ring is filled while the tile before is still needed.
            pl.when(j == jnp.minimum(count, num_stages) - 1)(lambda: copy_tile(tile, i == 0))
            return steps + 1

        pl.when(count == 0)(lambda: copy_tile(tile, i == 0))
        return jax.lax.fori_loop(0, count, copy_block, steps)

    count = side.count
    ring.drain(jax.lax.fori_loop(0, count, copy_all, jnp.int32(0)))
    pl.when(count > 0)(lambda: plgpu.barrier_wait(refs.tile_read))


def _consume(refs: Refs, side: _Side, *, sm_scale: float, interpret: bool) -> None:
    """Computes the gradients of 64 rows of each tile."""
    shape, of_keys = side.shape, side.of_keys
    warpgroup = jax.lax.axis_index("warpgroup")
    num_stages = side.num_stages
    ring = Ring(refs.ready, refs.read, num_stages)
    scale = sm_scale * math.log2(math.e)
    dtype = refs.k.dtype
    band = shape.band
    key_axis = 0 if of_keys else 1

    def multiply(total: Ref, a: Any, b: Ref, *, turn_b: bool = False) -> None:
        """Adds a product of a and b, or its transpose, to `total`; it is done when this is read."""
        if interpret:  # without products of what is in registers, and sums that can be set
            total[...] += jnp.dot(a[...], b[...].T if turn_b else b[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
        else:
            plgpu.wgmma(total, a, b.transpose((1, 0)) if turn_b else b)

    def in_registers(x: jax.Array) -> jax.Array:
        """As products have it: where that is not said, to infer all layouts takes long or fails."""
        return x if interpret else plgpu.layout_cast(x, plgpu.Layout.WGMMA)

    def read(total: Ref, pending: int = 0) -> jax.Array:
        """A sum, once all but the last products, `pending` of them, are done."""
        return total[...] if interpret else in_registers(plgpu.wgmma_accumulator_load(total, wait_n=pending))

    def with_sums(function: Callable[..., Any], **columns: int) -> Any:
        """Calls a function with sums of products, 0, of 64 rows and so many columns."""
        if not interpret:
            return pl.run_scoped(function, **{n: plgpu.ACC((_ROWS, c), jnp.float32) for n, c in columns.items()})
        sums = {name: getattr(refs, name).at[warpgroup, :, pl.ds(0, c)] for name, c in columns.items()}
        for total in sums.values():
            total[...] = jnp.zeros(total.shape, jnp.float32)
        plgpu.commit_smem()
        return function(**sums)

    def masked(
        scores: jax.Array, row: jax.Array, other: jax.Array, slot: jax.Array, columns: pl.Slice
    ) -> jax.Array:
        """Without pairs that are not valid, of 64 rows from `row` on and columns of a slot, from `other` on."""

        def spread(x: jax.Array, *, of_keys: bool) -> jax.Array:
            return in_registers(jax.lax.broadcast_in_dim(x, scores.shape, [key_axis if of_keys else 1 - key_axis]))

        key, query = (row, other) if side.of_keys else (other, row)
        ragged, terms = not of_keys and shape.kv_seq % side.block > 0, []
        if ragged or band.high is not None:
            keys = spread(jax.lax.iota(jnp.int32, scores.shape[key_axis]) + key, of_keys=True)
        if ragged:
            terms.append(keys < shape.kv_seq)
        if band.high is not None:
            own = jax.lax.iota(jnp.int32, scores.shape[1 - key_axis]) + query
            terms.append(keys <= spread(own + band.high, of_keys=False))
        if band.low is not None:
            terms.append(keys >= spread(own + band.low, of_keys=False))
        ids = {}
        for index, axis, names in ((warpgroup, 0, side.tile_ids), ((slot, columns), 1, side.block_ids)):
            for name in names:
                ref = getattr(refs, f"{name}_ids").at[index]
                x = load(ref, plgpu.Layout.WGMMA.reduce(1 - axis))
                ids[name] = in_registers(jax.lax.broadcast_in_dim(x, scores.shape, [axis]))
        if "mask" in ids:
            terms.append(ids["mask"] != 0)
        if "segments" in ids:
            terms.append(ids["segments"] == ids["kv_segments"])
        return jnp.where(functools.reduce(operator.and_, terms), scores, -jnp.inf)

    def add_tile(sums: tuple[Ref, ...], i: jax.Array, steps: jax.Array) -> jax.Array:
        tile = side.tile(i, refs.found)
        start = tile.start + warpgroup * _ROWS
        first, second = (x.at[warpgroup] for x in refs.tiles)
        plgpu.barrier_wait(refs.tile_ready)
        of_rows = [] if of_keys else [ref[warpgroup] for ref in refs.numbers]
        for total in sums:
            total[...] = jnp.zeros(total.shape, jnp.float32)

        def number(i: int, slot: jax.Array, columns: pl.Slice, to: tuple[int, ...]) -> jax.Array:
            """The i-th number of each query, for all pairs."""
            if of_keys:
                return row(refs.numbers[i].at[slot, columns], to)
            return jax.lax.broadcast_in_dim(of_rows[i], to, [0])

        def add_full(j: jax.Array, steps: jax.Array) -> jax.Array:
            slot = jax.lax.rem(steps, num_stages)
            ring.wait(slot)  # here, that sums are known to be 0 where products begin
            add_pairs(slot, 0, side.block, tile.block(j) * side.block, full=True)
            ring.release(slot)
            return steps + 1

        def add_masked(j: jax.Array, steps: jax.Array) -> jax.Array:
            """Adds the parts of a block, of 64 rows, in which positions leave any valid pair."""
            slot = jax.lax.rem(steps, num_stages)
            ring.wait(slot)
            plgpu.barrier_wait(refs.second_ready.at[slot])
            other, parts = tile.block(j) * side.block, side.block // _ROWS
            low, high = (band.high, band.low) if of_keys else (band.low, band.high)
            sign = -1 if of_keys else 1

            def part(row: jax.Array) -> jax.Array:
                return jnp.clip(jax.lax.div(row - other, _ROWS), 0, parts)

            begin = 0 if low is None else part(start + sign * low)
            end = parts if high is None else part(start + sign * high + 2 * _ROWS - 1)

            @pl.loop(begin, end)
            def _(i: jax.Array) -> None:
                add_pairs(slot, i * _ROWS, _ROWS, other + i * _ROWS, full=False)

            ring.release(slot)
            return steps + 1

        def add_pairs(slot: jax.Array, first_column: Any, size: int, other: jax.Array, *, full: bool) -> None:
            """Adds what the rows of this warpgroup and columns of a slot, from `other` on, give together."""
            columns = pl.Slice(first_column, size)
            other_first, other_second = (x.at[slot, columns] for x in refs.blocks)
            # The tensor cores have the first part of a product while the operand of the second is computed.
            parts = [slice(i, i + _ROWS) for i in range(0, size, _ROWS)]

            def products(scores_sum: Ref, weights_sum: Ref) -> None:
                # What is subtracted from a sum is where it begins, which saves an operation for each pair.
                deltas = number(1, slot, columns, weights_sum.shape)
                weights_sum[...] = deltas if interpret else in_registers(deltas)
                multiply(scores_sum, first, other_first, turn_b=True)
                if full:
                    plgpu.barrier_wait(refs.second_ready.at[slot])
                multiply(weights_sum, second, other_second, turn_b=True)
                exponents = read(scores_sum, 1) * scale + number(0, slot, columns, scores_sum.shape)
                if not full:
                    exponents = masked(exponents, start, other, slot, columns)
                weights = [jnp.exp2(exponents[:, part]) for part in parts]
                if of_keys:
                    for part, w in zip(parts, weights, strict=True):
                        multiply(sums[1], w.astype(dtype), other_second.at[part])
                dweights = read(weights_sum, len(parts) if of_keys else 0)
                for part, w in zip(parts, weights, strict=True):
                    multiply(sums[0], (w * dweights[:, part]).astype(dtype), other_first.at[part])
                if not interpret:
                    plgpu.wgmma_wait(0)

            with_sums(products, scores_sum=size, weights_sum=size)

        def add_head(_: jax.Array, steps: jax.Array) -> jax.Array:
            steps = jax.lax.fori_loop(0, tile.full_count, add_full, steps)
            return jax.lax.fori_loop(tile.full_count, tile.count, add_masked, steps) if side.masks else steps

        if of_keys and side.heads_of_queries > 1:
            steps = jax.lax.fori_loop(0, side.heads_of_queries, add_head, steps)
        else:
            steps = add_head(jnp.int32(0), steps)
        plgpu.barrier_arrive(refs.tile_read)
        o_tile = refs.o_tiles.at[warpgroup]
        for total, result in zip(sums, side.results, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_tile[...] = (read(total) * (1.0 if result == "dv" else sm_scale)).astype(dtype)
            plgpu.commit_smem()
            target = getattr(refs, result)
            rows, columns = pl.Slice(start, _ROWS), side.columns(result, tile.head)
            plgpu.copy_smem_to_gmem(o_tile, target.at[tile.batch, rows, columns])
        return steps

    def add_tiles(**sums: Ref) -> None:
        add = functools.partial(add_tile, tuple(sums.values()))
        jax.lax.fori_loop(0, side.count, add, jnp.int32(0))

    with_sums(add_tiles, **dict.fromkeys(("first_sum", "second_sum")[: len(side.results)], shape.head_dim))


def _backward_kernel(refs: Refs, *, sides: Sequence[_Side], sm_scale: float, interpret: bool) -> None:
    """Computes gradients in this warpgroup.

    Args:
      refs: q, k and v (B, S, heads * head_dim), or buffers that have these columns among others; dout like q;
        shift and delta (B, heads, Sq); mask and kv_segments (B, Skv), segments (B, Sq), and for either side found
        (B or 1, tiles, 4), None if absent; dq, dk and dv as far as they are these sides', or one dqkv; scratch
        memory.
    """
    if refs.dqkv is not None:
        refs.dq = refs.dk = refs.dv = refs.dqkv

    def of(side: _Side) -> Refs:
        """With what belongs to a side under names without the side's."""
        own = types.SimpleNamespace(**{n.removesuffix(f"_of_{side.name}"): ref for n, ref in vars(refs).items()})
        own.tiles, own.blocks = (refs.first_tiles, refs.second_tiles), (refs.first_blocks, refs.second_blocks)
        own.numbers = (own.shifts, own.deltas)
        return own

    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        for side in sides:
            _produce(of(side), side)

    @pl.when(warpgroup < _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        for side in sides:
            _consume(of(side), side, sm_scale=sm_scale, interpret=interpret)
        plgpu.wait_smem_to_gmem(0)


def attention_backward(
    qkv: tuple[jax.Array, ...],
    mask: jax.Array | None,
    bias: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    wanted: tuple[bool, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    window: int | None,
    sm_scale: float,
    return_lse: bool,
    precision: jax.lax.Precision,
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[Any, ...]:
    """The gradients of `attention`'s operands, as the Triton kernel of this name gives them."""
    del bias, precision, wanted, return_lse, config  # see `unsupported`
    fused = len(qkv) == 1
    (batch, seq, _), dtype = qkv[0].shape, qkv[0].dtype
    shape = attention.Shape.of(qkv, num_heads, num_kv_heads, head_dim=head_dim, causal=causal, window=window)
    padded_dout, *padded = (attention.pad_rows(x, _TILE) for x in (dout, *qkv))
    q, k, v = padded * 3 if fused else padded
    masks = mask, segment_ids, kv_segment_ids
    ids = {
        name: jnp.pad(x, ((0, 0), (0, like.shape[1] - x.shape[1])))
        for name, x, like in zip(("mask", "segments", "kv_segments"), masks, (k, q, k), strict=True)
        if x is not None
    }
    read_heads = shape.first_heads
    if "mask" in ids:  # what a masked key holds, NaN for one, would reach the gradients of queries
        width = num_kv_heads * head_dim
        k = jnp.where(ids["mask"][..., None] != 0, k[..., read_heads[1] * head_dim :][..., :width], 0)
        read_heads = (read_heads[0], 0, read_heads[2])
    shift, delta = rows_of_backward(out, lse, dout, dlse, head_dim)
    shift, delta = (jnp.pad(x, ((0, 0), (0, 0), (0, q.shape[1] - seq))) for x in (shift, -delta))
    if interpret:
        check_interpreted_sizes(queries=(q.shape[1], _TILE), keys=(k.shape[1], _TILE))

    def like(x: jax.Array, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:2], heads * head_dim), dtype)

    def call(
        blocks: tuple[int, int], *, of_keys: Sequence[bool], **results: jax.ShapeDtypeStruct
    ) -> list[jax.Array]:
        block, num_stages = blocks
        sides = [
            _Side(
                shape=shape,
                read_heads=read_heads,
                ids=frozenset(ids),
                of_keys=keys,
                batch=batch,
                block=block,
                num_stages=num_stages,
            )
            for keys in of_keys
        ]
        found = {
            f"found_of_{side.name}": searched(
                *masks,
                seq=seq,
                kv_seq=shape.kv_seq,
                block_q=block if side.of_keys else _TILE,
                block_kv=_TILE if side.of_keys else block,
                least=attention.SEARCHED,
                keys_first=side.of_keys,
            )
            for side in sides
        }
        num_ctas = 1 if interpret else min(max(side.num_tiles for side in sides), target.num_cores)
        sides = [side.spread(num_ctas, dtype.itemsize) for side in sides]
        sides[1:] = [side.after(sides[0]) for side in sides[1:]]
        return launch(
            functools.partial(_backward_kernel, sides=sides, sm_scale=sm_scale, interpret=interpret),
            dict(
                q=q,
                k=k,
                v=v,
                dout=padded_dout,
                shift=shift,
                delta=delta,
                **dict.fromkeys(_IDS[0] + _IDS[1]) | ids | found,
            ),
            dict.fromkeys(("dq", "dk", "dv", "dqkv")) | results,
            _scratch_types(sides, dtype, interpret=interpret),
            name="attention_backward",
            num_ctas=num_ctas,
            num_warpgroups=_CONSUMERS + 1,
            interpret=interpret,
            reduction_scratch_bytes=0,
        )

    if fused:
        dqkv = like(q, num_heads + 2 * num_kv_heads)
        gradients = call(_OF_BOTH[head_dim], of_keys=(False, True), dqkv=dqkv)
    else:
        gradients = call((_OF_BOTH if ids else _OF_QUERIES)[head_dim], of_keys=(False,), dq=like(q, num_heads))
        of_keys = {"dk": like(k, num_kv_heads), "dv": like(v, num_kv_heads)}
        gradients += call(_OF_KEYS[head_dim], of_keys=(True,), **of_keys)
    return tuple(dx[:, : x.shape[1]] for dx, x in zip(gradients, qkv, strict=True)), None, None, None, None


def _scratch_types(sides: Sequence[_Side], dtype: DTypeLike, *, interpret: bool) -> Mapping[str, Any]:
    """The shared memory and the barriers of a CTA. The sides take turns in the largest of it."""
    barrier = plgpu.Barrier
    head_dim, block, num_stages = sides[0].shape.head_dim, sides[0].block, sides[0].num_stages
    scratch_types: dict[str, Any] = {
        "first_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
        "second_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
        "first_blocks": tiled((num_stages, block, head_dim), dtype),
        "second_blocks": tiled((num_stages, block, head_dim), dtype),
        "o_tiles": tiled((_CONSUMERS, _ROWS, head_dim), dtype),
    }
    for side in sides:
        rows = (num_stages, block) if side.of_keys else (_CONSUMERS, _ROWS)
        own = {
            "shifts": plgpu.SMEM(rows, jnp.float32),
            "deltas": plgpu.SMEM(rows, jnp.float32),
            "tile_ready": barrier(num_arrivals=((2 if side.of_keys else 4) + len(side.tile_ids)) * _CONSUMERS),
            "tile_read": barrier(num_arrivals=_CONSUMERS),
            "ready": barrier(num_arrivals=1 + 2 * side.of_keys + len(side.block_ids), num_barriers=num_stages),
            "second_ready": barrier(num_barriers=num_stages),
            "read": barrier(num_arrivals=_CONSUMERS, num_barriers=num_stages),
        }
        for names, count in ((side.tile_ids, (_CONSUMERS, _ROWS)), (side.block_ids, (num_stages, block))):
            own |= {f"{name}_ids": plgpu.SMEM(count, jnp.int32) for name in names}
        scratch_types |= {f"{name}_of_{side.name}": scratch for name, scratch in own.items()}
    if interpret:
        sums = dict(scores_sum=block, weights_sum=block, first_sum=head_dim, second_sum=head_dim)
        scratch_types |= {
            name: plgpu.SMEM((_CONSUMERS, _ROWS, columns), jnp.float32) for name, columns in sums.items()
        }
    return scratch_types
