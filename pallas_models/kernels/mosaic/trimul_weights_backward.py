"""The gradient of the weights of the triangle multiplicative update's projections, for Hopper GPUs.

The sums of all weights do not fit into a multiprocessor's registers. So a CTA has some columns of the weights,
walks its share of the positions, and computes again what it needs of the projections there. Here rows are channels
and columns are positions, as left, right and the gate lie in memory. The cotangents of a tile are then the left
operand of the product that adds up the weights, straight from registers, and tensor cores read nothing but the
positions and the weights from shared memory.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.steps import shared_step
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.forms.trimul_backward import GATED, Given, OfWeights
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, load
from pallas_models.kernels.mosaic.common.products import in_layout, multiply, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.target import Target

_SIZES = (64, 128)  # of channels, hidden channels and channels of the gate
_UNITS = 2  # warpgroups that multiply, each of them for `_ROWS` channels of the cotangents
_ROWS = 64
_TILE = 64  # positions
_GATE_TIME = 0.28  # that a tile of the gate takes: one product where a tile of left or of right takes four
_MOST_STAGES = 6
_OTHERS = 3072  # bytes of shared memory that barriers, sums over positions and alignment take

_Totals = list[jax.Array]  # sums of cotangents over positions, (64,): of biases


def unsupported(form: Projection[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `weights_backward` does not serve a call; None if it does."""
    del target
    c, h, gates = form.x.shape[2], form.hidden, form.gates
    if not _jax.since(0, 11):
        return f"needs JAX 0.11 or newer, not {jax.__version__}"
    if form.w.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {form.w.dtype}"
    if not {c, h, gates} <= {*_SIZES}:
        return f"takes 64 or 128 channels, hidden channels and channels of the gate, not {c}, {h} and {gates}"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of the columns, and the CTAs that have them.

    Attributes:
      sources: for each unit, the array of its cotangents, and its first channel there.
    """

    sources: tuple[tuple[str, int], ...]
    first_cta: int
    num_ctas: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """How CTAs share columns and positions.

    Attributes:
      sides: chunks of left, then of right; or one of both.
      gate: the chunk of the gate, whose two units are the same where it has 64 channels.
      items: how many items x has.
      size: how many positions an item has.
      rows: as many items of x are followed by others, up to `padded_rows`, where matrices are filled up.
    """

    sides: tuple[_Chunk, ...]
    gate: _Chunk
    items: int
    size: int
    rows: int
    padded_rows: int

    @classmethod
    def of(cls, form: Projection[jax.Array], ctas: int) -> "_Plan":
        """The plan of a call, for about so many CTAs."""
        items, size, _ = form.x.shape
        units = list(itertools.product(("left", "right"), range(0, form.hidden, _ROWS)))
        pairs = [tuple(units[i : i + _UNITS]) for i in range(0, len(units), _UNITS)]
        most = items * pl.cdiv(size, _TILE)
        each = min(most, max(1, int(ctas / (len(pairs) + _GATE_TIME))))
        sides = tuple(_Chunk(pair, i * each, each) for i, pair in enumerate(pairs))
        of_sides = each * len(pairs)
        of_gate = tuple(("gate", i * _ROWS % form.gates) for i in range(_UNITS))
        gate = _Chunk(of_gate, of_sides, min(most, max(1, ctas - of_sides)))
        return cls(sides, gate, items, size, form.rows, form.padded_rows)

    @property
    def chunks(self) -> tuple[_Chunk, ...]:
        return (*self.sides, self.gate)

    @property
    def num_ctas(self) -> int:
        return self.gate.first_cta + self.gate.num_ctas

    @property
    def tiles_of_item(self) -> int:
        return pl.cdiv(self.size, _TILE)

    def place(self, tile: jax.Array) -> tuple[jax.Array, jax.Array, pl.Slice]:
        """The item of a tile in x, the item where rows are filled up, and positions, which may be past the end."""
        item, i = jax.lax.div(tile, self.tiles_of_item), jax.lax.rem(tile, self.tiles_of_item)
        filled = item
        if self.rows < self.padded_rows:
            filled = jax.lax.div(item, self.rows) * self.padded_rows + jax.lax.rem(item, self.rows)
        return item, filled, pl.Slice(pl.multiple_of(i * _TILE, _TILE), _TILE)


def _buffers(form: Projection[jax.Array], target: Target) -> dict[str, Buffer]:
    """The shared memory of a CTA, with as many slots of tiles as there is room for."""
    c, dtype = form.x.shape[2], form.w.dtype
    w_smem = Buffer((_UNITS, 2 * _ROWS, c), dtype, ROW_BYTES)
    slot = dict(
        z_ring=Buffer((_TILE, c), dtype, ROW_BYTES),
        d_ring=Buffer((_UNITS, _ROWS, _TILE), dtype, ROW_BYTES),
        mask_ring=Buffer((_TILE,), jnp.dtype(jnp.float32)),
    )
    stages = (available(target) - _OTHERS - w_smem.num_bytes) // num_bytes(slot.values())
    ring = {
        name: dataclasses.replace(buffer, shape=(min(stages, _MOST_STAGES), *buffer.shape))
        for name, buffer in slot.items()
        if name != "mask_ring" or form.mask is not None
    }
    return ring | dict(w_smem=w_smem)


@shared_step
def weights_backward(
    form: Projection[jax.Array], z: jax.Array, given: Given, *, target: Target, interpret: bool
) -> OfWeights:
    """The gradient of the projections for the weights, from the normalised positions z (B, M, C).

    Each is still to be multiplied by the scale of its cotangent among the first three `scales`. Cotangents past
    the end of items, which are filled up, have to be 0. The sums are taken in two stages, of each CTA and of all,
    always in the same order.
    """
    c, h = z.shape[2], form.hidden
    plan, buffers = _Plan.of(form, num_cores(target, interpret)), _buffers(form, target)
    stages, has_bias = buffers["z_ring"].shape[0], form.bias is not None or form.b_gate is not None
    mask = form.mask
    if mask is not None:
        mask = jnp.pad(mask.astype(jnp.float32), ((0, 0), (0, -mask.shape[1] % _TILE)))
    sums = plan.num_ctas, _UNITS, 2, _ROWS
    dw, *db = launch(
        functools.partial(_kernel, plan=plan),
        dict(
            z=z,
            left=given.left,
            right=given.right,
            gate=given.gate,
            mask=mask,
            w=_in_units(form.w),
            b=None if form.bias is None else _in_units(form.bias[None])[..., 0],
            scales=given.scales,
        ),
        dict(
            dw=jax.ShapeDtypeStruct((*sums, c), jnp.float32),
            db=jax.ShapeDtypeStruct(sums, jnp.float32) if has_bias else None,
        ),
        dict(
            **{name: buffer.scratch_type for name, buffer in buffers.items()},
            full=plgpu.Barrier(num_arrivals=1 + _UNITS + (mask is not None), num_barriers=stages),
            consumed=plgpu.Barrier(num_arrivals=_UNITS, num_barriers=stages),
            w_full=plgpu.Barrier(num_barriers=_UNITS),
        ),
        name="trimul_weights_backward",
        num_ctas=plan.num_ctas,
        num_warpgroups=_UNITS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )

    def total(parts: jax.Array, chunk: _Chunk) -> jax.Array:
        sums = jnp.sum(parts[chunk.first_cta : chunk.first_cta + chunk.num_ctas], axis=0)
        # XLA would sum as it transposes what follows, which reads the parts one number at a time: 25 us for 5.
        return jax.lax.optimization_barrier(sums)

    def side_columns(parts: jax.Array) -> jax.Array:
        """(C, 4, H), or (4, H), from units of left and then of right."""
        y = jnp.concatenate([total(parts, chunk) for chunk in plan.sides])
        y = y.reshape(2, -1, *y.shape[1:]).swapaxes(1, 2)  # side, projection or gate, unit, channel, C
        return jnp.moveaxis(y.reshape(4, h, *y.shape[4:]), (0, 1), (-2, -1))

    def gate_columns(parts: jax.Array) -> jax.Array:
        """(C, G), or (G,), from the units of the gate."""
        y = total(parts, plan.gate)[:, 0]
        return y.reshape(-1, *y.shape[2:])[: form.gates].T

    bias, b_gate = (side_columns(db[0]), gate_columns(db[0])) if has_bias else (None, None)
    return OfWeights(w=side_columns(dw), bias=bias, w_gate=gate_columns(dw), b_gate=b_gate)


def _in_units(w: jax.Array) -> jax.Array:
    """Weights (C, 4, H) as (units, 128, C), projections and then halves of their gates."""
    c, _, h = w.shape
    w = w * jnp.asarray([1.0, 0.5, 1.0, 0.5], w.dtype)[:, None]
    return jnp.moveaxis(w.reshape(c, 2, 2, h // _ROWS, _ROWS), (1, 3, 2, 4, 0), range(5)).reshape(-1, 2 * _ROWS, c)


def _kernel(refs: Refs, *, plan: _Plan) -> None:
    """Adds up some columns of the weights in this CTA."""
    cta, warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
    # The chunk's number among all, the CTA's number in it, and how many CTAs it has.
    chunk, own, num_ctas = jnp.int32(0), cta, jnp.int32(plan.chunks[0].num_ctas)
    for i, at in enumerate(plan.chunks[1:], start=1):
        chunk, own, num_ctas = (
            jnp.where(cta >= at.first_cta, new, old)
            for new, old in ((i, chunk), (cta - at.first_cta, own), (at.num_ctas, num_ctas))
        )
    tiles = plan.items * plan.tiles_of_item
    walk = _Walk(refs, plan, cta, chunk, own, num_ctas, jax.lax.div(tiles - own + num_ctas - 1, num_ctas))
    specialize(
        Role(range(_UNITS, _UNITS + 1), 24, lambda _: _Producer(walk).run()),
        Role(range(_UNITS), 240, lambda unit: _Consumer(walk, unit).run()),
        warpgroup=warpgroup,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """The tiles of a CTA, one a step: every `num_ctas`-th from tile `own` on, for a chunk of the columns."""

    refs: Refs
    plan: _Plan
    cta: jax.Array
    chunk: jax.Array
    own: jax.Array
    num_ctas: jax.Array
    steps: jax.Array

    @property
    def ring(self) -> Ring:
        return Ring(self.refs.full, self.refs.consumed, self.refs.z_ring.shape[0])


@dataclasses.dataclass(frozen=True, slots=True)
class _Producer:
    """The warpgroup that copies tiles ahead: positions, their cotangents and their factors of the mask."""

    walk: _Walk

    def run(self) -> None:
        """Copies all tiles, and waits until they have been read."""
        for i, chunk in enumerate(self.walk.plan.chunks):

            @pl.when(self.walk.chunk == i)
            def _(chunk: _Chunk = chunk) -> None:
                pl.loop(0, self.walk.steps)(functools.partial(self.copy, chunk))

        self.walk.ring.drain(self.walk.steps)

    def copy(self, chunk: _Chunk, step: jax.Array) -> None:
        """Starts the copies of a step."""
        refs, walk, ring = self.walk.refs, self.walk, self.walk.ring
        item, filled, positions = walk.plan.place(walk.own + step * walk.num_ctas)
        slot = ring.acquire(step)
        full = ring.full_of(slot)
        channels = pl.Slice(0, refs.z.shape[2])
        to = refs.z_ring.at[slot], refs.full, slot
        copy_rows(refs.z, item, positions, channels, *to, row_bytes=ROW_BYTES)
        for unit, (name, first) in enumerate(chunk.sources):
            source = getattr(refs, name).at[filled, pl.ds(first, _ROWS), positions]
            plgpu.copy_gmem_to_smem(source, refs.d_ring.at[slot, unit], full)
        if refs.mask is not None:
            plgpu.copy_gmem_to_smem(refs.mask.at[item, positions], refs.mask_ring.at[slot], full)


@dataclasses.dataclass(frozen=True, slots=True)
class _Consumer:
    """A warpgroup that adds up the weights of 64 channels: of projections and of their gates, or of the gate."""

    walk: _Walk
    unit: jax.Array

    def run(self) -> None:
        """Adds up all tiles, and stores the sums."""
        is_gate = self.walk.chunk == len(self.walk.plan.sides)
        shape = _ROWS, self.walk.refs.z.shape[2]
        pl.when(is_gate)(lambda: with_sums(self.of_gate, shape))
        pl.when(~is_gate)(lambda: with_sums(self.of_side, shape, shape))

    def of_gate(self, sums: Ref) -> None:
        """The weights of the gate, whose cotangents are given."""

        def add(slot: jax.Array, totals: _Totals) -> _Totals:
            d = self.cotangent(slot)
            multiply(sums, d, self.walk.refs.z_ring.at[slot])
            totals = self.added(totals, d.astype(jnp.float32), 0)
            plgpu.wgmma_wait(0)
            return totals

        self.store([sums], self.of_all_tiles(add, 1))

    def of_side(self, *sums: Ref) -> None:
        """The weights of projections and of their gates, whose cotangents left or right gives."""
        refs = self.walk.refs
        unit = self.walk.chunk * _UNITS + self.unit
        full = refs.w_full.at[self.unit]
        plgpu.copy_gmem_to_smem(refs.w.at[unit], refs.w_smem.at[self.unit], full)
        bias = None if refs.b is None else [self.bias(unit, k) for k in range(2)]
        half = 0.5 * refs.scales[3]
        plgpu.barrier_wait(full)

        def add(slot: jax.Array, totals: _Totals) -> _Totals:
            of_tile = functools.partial(self.add_side, sums, slot, bias, half, totals)
            return with_sums(of_tile, *[(_ROWS, _TILE)] * 2)

        self.store(sums, self.of_all_tiles(add, 2))

    def add_side(
        self,
        sums: tuple[Ref, ...],
        slot: jax.Array,
        bias: list[jax.Array] | None,
        half: jax.Array,
        totals: _Totals,
        gate_sum: Ref,
        projection_sum: Ref,
    ) -> _Totals:
        """Adds a tile to sums and returns the sums of biases; the last two begin as 0.

        With p and g as in the forward pass and t = tanh(g / 2), the sigmoid of g is (1 + t) / 2, and its slope is
        the sigmoid times (1 - t) / 2.

        Args:
          half: half of what the cotangents of projections are scaled by.
        """
        refs, z, shape = self.walk.refs, self.walk.refs.z_ring.at[slot], (_ROWS, _TILE)
        for k, result in ((1, gate_sum), (0, projection_sum)):
            multiply(result, refs.w_smem.at[self.unit, pl.ds(k * _ROWS, _ROWS)], z, transpose_b=True)
        g = in_layout(gate_sum, 1)
        given = self.cotangent(slot).astype(jnp.float32)
        if refs.mask is not None:  # 0 times what is not finite would be NaN
            factor = load(refs.mask_ring.at[slot], plgpu.Layout.WGMMA.reduce(0))
            factor = jax.lax.broadcast_in_dim(factor, shape, [1])
            given = jnp.where(factor == 0.0, 0.0, given * factor)
        t = jnp.tanh(g if bias is None else g + _along_columns(bias[1]))
        dp = given * (half * t + half)
        slope = 0.25 * GATED / half  # here and not with p, that fewer numbers are in registers
        dg = dp * (slope - slope * t)
        totals = self.added(totals, dp, 0)
        multiply(sums[0], dp.astype(z.dtype), z)
        p = in_layout(projection_sum, 1)
        dg *= p if bias is None else p + _along_columns(bias[0])
        totals = self.added(totals, dg, 1)
        multiply(sums[1], dg.astype(z.dtype), z)
        plgpu.wgmma_wait(0)
        return totals

    def bias(self, unit: jax.Array, k: int) -> jax.Array:
        """The biases of a unit's projections (0) or of their gates (1), from device memory."""
        return load(self.walk.refs.b.at[unit, pl.ds(k * _ROWS, _ROWS)], plgpu.Layout.WGMMA.reduce(1))

    def cotangent(self, slot: jax.Array) -> jax.Array:
        """The cotangents of this unit's channels, (channels, positions)."""
        return load(self.walk.refs.d_ring.at[slot, self.unit], plgpu.Layout.WGMMA)

    def added(self, totals: _Totals, d: jax.Array, k: int) -> _Totals:
        """The totals of biases, if any, the k-th with the sums of a tile's cotangents over positions."""
        return [total + jnp.sum(d, axis=1) if i == k else total for i, total in enumerate(totals)]

    def of_all_tiles(self, add: Callable[[jax.Array, _Totals], _Totals], count: int) -> _Totals:
        """Calls `add(slot, totals)` for each tile; returns the totals of biases, `count` of them or none."""
        ring = self.walk.ring

        def step(_: jax.Array, carry: tuple[jax.Array, _Totals]) -> tuple[jax.Array, _Totals]:
            slot, totals = carry
            ring.wait(slot)
            totals = add(slot, totals)
            ring.release(slot)
            return ring.after(slot), totals

        zeros = [jnp.zeros((_ROWS,), jnp.float32)] * (0 if self.walk.refs.db is None else count)
        return jax.lax.fori_loop(0, self.walk.steps, step, (jnp.int32(0), zeros))[1]

    def store(self, sums: Sequence[Ref], totals: _Totals) -> None:
        """Stores the sums of this CTA."""
        refs, place = self.walk.refs, (self.walk.cta, self.unit)
        for k, product in enumerate(sums):
            refs.dw[*place, k] = in_layout(product)
        for k, total in enumerate(totals):
            refs.db[*place, k] = total


def _along_columns(v: jax.Array) -> jax.Array:
    """A number for each channel as equal columns."""
    return jax.lax.broadcast_in_dim(v, (_ROWS, _TILE), [0])
