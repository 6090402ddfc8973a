"""The kernel of the gradient of the end of the triangle multiplicative update.

CTAs stay on their multiprocessor with the weights in shared memory. One warpgroup of each copies 64 positions at a
time; two take turns with them: they compute the norm again, pull the cotangent back through the projection, the
gate and the norm, and write where they read. The fourth adds up what all positions have in common.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.activations import times
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import ROWS, along_rows, same_rows
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import (
    ROW_BYTES,
    layout_cast,
    load,
    load_transposed,
    store_transposed,
)
from pallas_models.kernels.mosaic.common.products import product, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.kernels.mosaic.trimul_project_parts import Place, Tiles

PULLERS = 2  # warpgroups that take turns with tiles
PAIRS = 3  # tiles of y and of the gate in shared memory
_PART = 64  # columns that are computed at a time, as registers are few


class Numbers(NamedTuple):
    """Factors of a call, float32.

    Attributes:
      epsilon: of the norm of y.
      of_product: what cotangents of the product are multiplied by before they are rounded.
      of_y: what the kernel's cotangents of y are multiplied by in the end.
      of_gate: likewise, of what the gate is the sigmoid of.
      of_norm: what cotangents of the norm are multiplied by before they are rounded to be added up.
    """

    epsilon: jax.Array
    of_product: jax.Array
    of_y: jax.Array
    of_gate: jax.Array
    of_norm: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """The body of the kernel."""

    tiles: Tiles
    num_ctas: int
    gate_after: bool
    dout_slots: int

    def __call__(self, refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(self.tiles.count - cta + self.num_ctas - 1, self.num_ctas)
        walk, puller = _Walk(self, refs, cta, steps), _After if self.gate_after else _Before
        pullers, summer = (160, 168) if self.gate_after else (152, 176)  # registers
        specialize(
            Role(range(PULLERS), pullers, lambda own: puller(walk, own).run()),
            Role(range(PULLERS, PULLERS + 1), 24, lambda _: _Producer(walk).run()),
            Role(range(PULLERS + 1, PULLERS + 2), summer, lambda _: _Summer(walk).run()),
            warpgroup=warpgroup,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """The tiles of a CTA, one a step: every `num_ctas`-th. The pullers take turns with them."""

    kernel: Kernel
    refs: Refs
    cta: jax.Array
    steps: jax.Array

    def place(self, step: jax.Array) -> Place:
        """Where the tile of a step is."""
        return self.kernel.tiles.place(self.cta + step * self.kernel.num_ctas)

    def source(self, place: Place) -> Place:
        """Where the cotangents of a tile are: past the end, where there are zeros, for rows that no result has."""
        (item, rows), tiles = place, self.kernel.tiles
        if tiles.rows == tiles.padded_rows:
            return place
        is_kept = jax.lax.rem(item, tiles.padded_rows) < tiles.rows
        start = pl.multiple_of(jnp.where(is_kept, rows.start, tiles.per_item * ROWS), ROWS)
        return tiles.source(item), pl.Slice(start, ROWS)

    def product(self, puller: jax.Array, columns: int) -> Ref:
        """Where a puller stages cotangents of the product, or of the norm."""
        ref = self.refs.product_smem.at[puller]
        return ref if ref.shape[1] == columns else ref.at[:, pl.Slice(0, columns)]

    def pairs(self, puller: jax.Array) -> Ring:
        """The ring of tiles of y and of the gate, as a puller sees it."""
        return Ring(self.refs.pair_full, self.refs.pair_free, PAIRS, puller * PAIRS)

    def douts(self, puller: jax.Array) -> Ring:
        """The ring of tiles of the cotangent."""
        slots = self.kernel.dout_slots
        return Ring(self.refs.dout_full, self.refs.dout_free, slots, puller * slots)


@dataclasses.dataclass(frozen=True, slots=True)
class _Producer:
    """The warpgroup that copies tiles ahead."""

    walk: _Walk

    def run(self) -> None:
        """Copies the weights and all tiles, and waits until they have been read."""
        walk, refs = self.walk, self.walk.refs
        for name in ("w", "ones"):
            plgpu.copy_gmem_to_smem(getattr(refs, name), getattr(refs, f"{name}_smem"), refs.weights_full)
        pl.loop(0, walk.steps)(self.copy)
        walk.pairs(jnp.int32(0)).drain(walk.steps)
        walk.douts(jnp.int32(0)).drain(walk.steps)

    def copy(self, step: jax.Array) -> None:
        """Copies the tile of a step."""
        walk, refs, puller = self.walk, self.walk.refs, jax.lax.rem(step, PULLERS)
        pairs, douts, (item, rows) = walk.pairs(puller), walk.douts(puller), walk.place(step)
        slot = pairs.acquire(step)
        gates = pl.Slice(0, refs.gate_smem.shape[1])
        for source, tiles in (
            (refs.gate.at[item, gates, rows], refs.gate_smem),
            (refs.y.at[item, :, rows], refs.y_smem),
        ):
            plgpu.copy_gmem_to_smem(source, tiles.at[slot], pairs.full_of(slot))
        slot = douts.acquire(step)
        item, rows = walk.source((item, rows))
        channels = pl.Slice(0, refs.dout.shape[2])
        copy_rows(
            refs.dout,
            item,
            rows,
            channels,
            refs.dout_smem.at[slot],
            refs.dout_full,
            douts.first_full + slot,
            row_bytes=ROW_BYTES,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Summer:
    """The warpgroup that adds up products over positions."""

    walk: _Walk

    def run(self) -> None:
        """Adds up the products of all steps, and stores the sums."""
        refs = self.walk.refs
        outputs = [getattr(refs, f"sum{i}") for i in range(2 if self.walk.kernel.gate_after else 3)]
        plgpu.barrier_wait(refs.weights_full)

        def compute(*sums: Ref) -> list[jax.Array]:
            pl.loop(0, self.walk.steps)(lambda step: self.add(sums, step))
            return [total[...] for total in sums]

        for output, total in zip(outputs, with_sums(compute, *(ref.shape[1:] for ref in outputs)), strict=True):
            output.at[self.walk.cta][...] = total

    def add(self, sums: tuple[Ref, ...], step: jax.Array) -> None:
        """Adds the products of a step, as soon as each is there."""
        walk, refs, own = self.walk, self.walk.refs, jax.lax.rem(step, PULLERS)
        operand = refs.operand_smem.at[own]
        first, second = (refs.ones_smem.at[i].transpose((1, 0)) for i in range(2))
        product = walk.product(own, sums[1].shape[0])
        turns = [((sums[0], operand, product), (sums[1], product, first))]
        if not walk.kernel.gate_after:
            turns.append(((sums[2], walk.product(own, sums[2].shape[0]), first), (sums[2], operand, second)))
        for turn in turns:
            plgpu.barrier_wait(refs.staged.at[own])
            for total, a, b in turn:
                plgpu.wgmma(total, a.transpose((1, 0)), b)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.added.at[own])


@dataclasses.dataclass(frozen=True, slots=True)
class _Puller:
    """A warpgroup that pulls the cotangents of every other tile back."""

    walk: _Walk
    own: jax.Array

    @property
    def refs(self) -> Refs:
        return self.walk.refs

    def number(self, name: str) -> jax.Array:
        """One of the `Numbers`."""
        number: jax.Array = self.refs.numbers[Numbers._fields.index(name)]
        return number

    def run(self) -> None:
        """Pulls all tiles back, and waits until they are stored and added up."""
        plgpu.barrier_wait(self.refs.weights_full)
        count = jax.lax.div(self.walk.steps - self.own + PULLERS - 1, PULLERS)
        pl.loop(0, count)(self.step)
        pl.when(count > 0)(self.wait_added)
        plgpu.wait_smem_to_gmem(0)

    def step(self, i: jax.Array) -> None:
        """Pulls the i-th tile of this warpgroup back."""
        walk, step = self.walk, i * PULLERS + self.own
        pairs, douts = walk.pairs(self.own), walk.douts(self.own)
        slot, dout_slot = jax.lax.rem(step, pairs.num_stages), jax.lax.rem(step, douts.num_stages)
        pairs.wait(slot)
        douts.wait(dout_slot)
        dout = load(self.refs.dout_smem.at[dout_slot], plgpu.Layout.WGMMA).astype(jnp.float32)
        pl.when(i > 0)(self.wait_added)
        # Released no sooner than all have used what they read: loads may be under way when a warp goes on.
        self.pull(dout, slot, walk.place(step), lambda: douts.release(dout_slot))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pairs.release(slot)

    def pull(self, dout: jax.Array, slot: jax.Array, place: Place, release: Callable[[], None]) -> None:
        """Pulls the cotangents of a tile back to y and the gate, which lie in a slot.

        Args:
          release: says that `dout` has been read.
        """
        raise NotImplementedError

    def wait_added(self) -> None:
        """Waits until what was staged has been added up."""
        plgpu.barrier_wait(self.refs.added.at[self.own])

    def load(self, tiles: Ref, slot: jax.Array, channels: pl.Slice | None = None) -> jax.Array:
        """Channels of a tile, all if None, as (positions, channels), float32."""
        tile = tiles.at[slot] if channels is None else tiles.at[slot, channels]
        return load_transposed(tile, plgpu.Layout.WGMMA).astype(jnp.float32)

    def stage_product(self, cotangent: jax.Array) -> jax.Array:
        """Scales, rounds and stages the cotangents of the product; returns which positions have any."""
        by_product = cotangent * self.number("of_product")
        staged = self.walk.product(self.own, cotangent.shape[1])
        staged[...] = by_product.astype(staged.dtype)
        return jnp.sum(jnp.abs(by_product), axis=1) != 0.0

    def normed(self, slot: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normalised y without scale and shift, and the factor of its deviations; 0 if not `kept`."""
        y = self.load(self.refs.y_smem, slot)
        h = y.shape[1]
        d = y - along_rows(jnp.sum(y, axis=1) * (1.0 / h), h)
        inverse = jax.lax.rsqrt(jnp.sum(d * d, axis=1) * (1.0 / h) + self.number("epsilon"))
        # What is not finite adds nothing where its result has a cotangent of 0, as a position that is masked has.
        inverse = jnp.where(kept, inverse, 0.0)
        return jnp.where(along_rows(kept, h), d, 0.0) * along_rows(inverse, h), inverse

    def pulled_product(self) -> jax.Array:
        """The cotangents of the operand, scaled like the cotangents of the product."""
        w = self.refs.w_smem
        return self.multiplied(self.walk.product(self.own, w.shape[1]), transpose=True)

    def multiplied(self, a: Ref, *, transpose: bool) -> jax.Array:
        """The product of an array in shared memory and the weights."""
        return layout_cast(product(a, self.refs.w_smem, transpose_b=transpose), plgpu.Layout.WGMMA)

    def vector(self, i: int, columns: pl.Slice) -> jax.Array:
        """Some columns of the i-th of the vectors, equal for all positions."""
        return same_rows(self.refs.vectors.at[i, columns])

    def pull_norm(
        self,
        dunits: list[jax.Array],
        unit: Callable[[pl.Slice], jax.Array],
        inverse: jax.Array,
        slot: jax.Array,
        place: Place,
    ) -> None:
        """Stores the cotangents of y, given parts of the cotangents of `unit`, what y was normalised to."""
        parts = list(zip(dunits, _parts(sum(d.shape[1] for d in dunits)), strict=True))
        along, mean = (
            jnp.sum(functools.reduce(operator.add, terms), axis=1) * (1.0 / self.refs.y.shape[1])
            for terms in ([d * unit(columns) for d, columns in parts], dunits)
        )
        factor = inverse * self.number("of_y")
        along, mean, factor = (along_rows(v, _PART) for v in (along * factor, mean * factor, factor))
        dys = [d * factor - (unit(columns) * along + mean) for d, columns in parts]
        self.leave(dys, self.refs.y_smem.at[slot], self.refs.dy, place)

    def leave(self, parts: list[jax.Array], slot: Ref, ref: Ref, place: Place) -> None:
        """Stores cotangents of a tile, some columns after the others, where all have read what was there."""
        parts = [part.astype(slot.dtype) for part in parts]
        plgpu.commit_smem()
        for part, columns in zip(parts, _parts(slot.shape[0]), strict=True):
            store_transposed(slot.at[columns], part)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, ref.at[place[0], :, place[1]])


class _After(_Puller):
    """Pulls back where the gate is applied to the result."""

    __slots__ = ()

    def pull(self, dout: jax.Array, slot: jax.Array, place: Place, release: Callable[[], None]) -> None:
        refs = self.refs
        kept = self.stage_product(times(dout, self.load(refs.gate_smem, slot)))
        unit, inverse = self.normed(slot, kept)
        operand = refs.operand_smem.at[self.own]
        operand[...] = unit.astype(operand.dtype)
        plgpu.commit_smem()
        release()
        plgpu.barrier_arrive(refs.staged.at[self.own])
        dunits = _split(self.pulled_product())

        def staged(columns: pl.Slice) -> jax.Array:
            return load(operand.at[:, columns], plgpu.Layout.WGMMA).astype(jnp.float32)

        self.pull_norm(dunits, staged, inverse, slot, place)
        outs = _split(self.multiplied(operand, transpose=False))
        dgates = [
            self.pull_gate(out, slot, columns)
            for out, columns in zip(outs, _parts(refs.gate_smem.shape[1]), strict=True)
        ]
        self.leave(dgates, refs.gate_smem.at[slot], refs.dgate, place)

    def pull_gate(self, out: jax.Array, slot: jax.Array, columns: pl.Slice) -> jax.Array:
        """The cotangents of some columns of the gate, from these columns of the result."""
        by_gate = load(self.refs.product_smem.at[self.own, :, columns], plgpu.Layout.WGMMA).astype(jnp.float32)
        gate = self.load(self.refs.gate_smem, slot, columns)
        out = out * self.number("of_gate") + self.vector(0, columns)
        return times(by_gate, (1.0 - gate) * out)


class _Before(_Puller):
    """Pulls back where the gate is applied to hidden channels."""

    __slots__ = ()

    def pull(self, dout: jax.Array, slot: jax.Array, place: Place, release: Callable[[], None]) -> None:
        refs, dtype = self.refs, self.refs.operand_smem.dtype
        kept = self.stage_product(dout)
        unit, inverse = self.normed(slot, kept)
        all_parts = _parts(unit.shape[1])
        plgpu.commit_smem()  # all have read y
        for u, columns in zip(_split(unit), all_parts, strict=True):
            store_transposed(refs.y_smem.at[slot, columns], u.astype(dtype))
            operand = self.normed_part(u, columns) * self.gate(slot, columns, kept)
            refs.operand_smem[self.own, :, columns] = operand.astype(dtype)
        plgpu.commit_smem()
        release()
        plgpu.barrier_arrive(refs.staged.at[self.own])
        unit_of = functools.partial(self.load, refs.y_smem, slot)
        dgates, dnormed = [], []
        for cotangent, columns in zip(_split(self.pulled_product()), all_parts, strict=True):
            gate = self.gate(slot, columns, kept)
            slope = self.normed_part(unit_of(columns), columns) * (gate - gate * gate)
            dgates.append((times(cotangent, slope) * self.number("of_gate")).astype(dtype))
            dnormed.append(times(cotangent, gate))
        self.leave(dgates, refs.gate_smem.at[slot], refs.dgate, place)
        self.wait_added()
        staged = self.walk.product(self.own, unit.shape[1])
        for d, columns in zip(dnormed, all_parts, strict=True):
            of_norm = d * self.number("of_norm")
            staged[:, columns] = (of_norm * unit_of(columns)).astype(dtype)
            refs.operand_smem[self.own, :, columns] = of_norm.astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.staged.at[self.own])
        dunits = [d * self.vector(0, columns) for d, columns in zip(dnormed, all_parts, strict=True)]
        self.pull_norm(dunits, unit_of, inverse, slot, place)

    def normed_part(self, unit: jax.Array, columns: pl.Slice) -> jax.Array:
        """Some columns of the result of the norm."""
        return unit * self.vector(0, columns) + self.vector(1, columns)

    def gate(self, slot: jax.Array, columns: pl.Slice, kept: jax.Array) -> jax.Array:
        """Some columns of the gate, 0 for positions that are not `kept`."""
        gate = self.load(self.refs.gate_smem, slot, columns)
        return jnp.where(along_rows(kept, gate.shape[1]), gate, 0.0)


def _parts(columns: int) -> list[pl.Slice]:
    """Columns in parts."""
    return [pl.Slice(i, _PART) for i in range(0, columns, _PART)]


def _split(x: jax.Array) -> list[jax.Array]:
    """The columns of x in parts."""
    return [x[:, i : i + _PART] for i in range(0, x.shape[1], _PART)]
