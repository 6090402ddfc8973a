"""Projections of the triangle multiplicative update with their gates, for Hopper GPUs and more than 128 channels.

The weights do not fit into shared memory. Two warpgroups of each CTA take 64 positions at a time and normalise
them in registers, from where the tensor cores take them; one more copies the weights piece by piece to a ring,
past the two. These may be apart by as much as the ring holds, so that one multiplies while the other one gates,
stores or normalises.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.steps import shared_step
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import ROWS, along_rows, mean, same_rows
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, tiled
from pallas_models.kernels.mosaic.common.products import multiply, with_sums
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.kernels.mosaic.trimul_project_parts import (
    COLUMNS,
    Gating,
    Products,
    Tiles,
    arranged,
    arranged_biases,
    staging,
    unsupported_by_both,
    whole_mask,
)
from pallas_models.target import Target

_CONSUMERS = 2  # warpgroups that multiply
_PIECE = 32  # channels of x in one copy
_STEP = 64  # channels of the weights in a slot of the ring
_STAGES = 8  # slots of the ring: by which the warpgroups may be apart, and a power of two, which divides best
_X_BYTES = 40 * 1024  # of x that a warpgroup has copied ahead
_WIDEST = 384  # channels of x that fit into registers


def unsupported(form: Projection[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `project` does not serve a call; None if it does."""
    c, h = form.x.shape[2], form.hidden
    if reason := unsupported_by_both(form):
        return reason
    if c % _STEP or c > _WIDEST or h % (COLUMNS // 2):
        return (
            f"takes up to {_WIDEST} channels in multiples of {_STEP} and hidden channels in multiples of "
            f"{COLUMNS // 2}, not {c} and {h}"
        )
    return None


@shared_step
def project(
    form: Projection[jax.Array], *, target: Target, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Left and right, and the gate, in the dtype of the weights.

    Returns:
      (B', 2 H, M'), left and right, masked, or None for H = 0; and the gate, (B', G', M'), G' >= G, or None for
      G = 0. M' is M in whole `ROWS`, and left and right are 0 beyond M.
    """
    (size, c), x, dtype = form.x.shape[1:], form.x, form.w.dtype
    if interpret:
        check_interpreted_sizes(positions=(size, ROWS))
    products, tiles = Products.of(form), Tiles.of(form)
    mask, (weights, biases) = whole_mask(form), _folded(form)
    x_stages = min(_X_BYTES // (ROWS * _PIECE * x.dtype.itemsize), c // _PIECE)
    rounds = pl.cdiv(tiles.count, _CONSUMERS)  # in which each warpgroup takes a tile
    num_ctas = min(num_cores(target, interpret), rounds)
    results = launch(
        _Kernel(products, tiles, rounds, num_ctas, form.epsilon),
        dict(x=x, w=jnp.moveaxis(weights, -2, 0), b=biases, mask=mask),
        products.out_types(form),
        dict(
            x_smem=tiled((_CONSUMERS, x_stages, ROWS, _PIECE), x.dtype, _PIECE * x.dtype.itemsize),
            w_smem=tiled((_STAGES, _STEP, 2 * COLUMNS), dtype, _PIECE * dtype.itemsize),
            out_smem=staging(_CONSUMERS, COLUMNS, dtype).scratch_type,
            x_full=plgpu.Barrier(num_barriers=_CONSUMERS * x_stages),
            w_full=plgpu.Barrier(num_barriers=_STAGES),
            w_consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
        ),
        name="trimul_project",
        num_ctas=num_ctas,
        num_warpgroups=_CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return products.split(results)


def _folded(form: Projection[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Weights and biases, `arranged`, with the scale and the bias of the norm in them.

    As vectors of their own these would take registers that positions need.
    """
    weights = arranged(form.w, form.w_gate).astype(jnp.float32)
    b = jnp.sum(form.norm_bias[:, None, None] * weights, axis=0)
    biases = arranged_biases(form)
    if biases is not None:
        b += biases
    return (form.norm_scale[:, None, None] * weights).astype(form.w.dtype), b


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    products: Products
    tiles: Tiles
    rounds: int
    num_ctas: int
    epsilon: float

    def __call__(self, refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(self.rounds - cta + self.num_ctas - 1, self.num_ctas)
        ring = Ring(refs.w_full, refs.w_consumed, _STAGES)
        specialize(
            Role(range(_CONSUMERS, _CONSUMERS + 1), 40, lambda _: self.produce(refs, ring, steps)),
            Role(range(_CONSUMERS), 232, lambda own: _Consumer(self, refs, ring, cta, own, steps).run()),
            warpgroup=warpgroup,
        )

    def produce(self, refs: Refs, ring: Ring, steps: jax.Array) -> None:
        """Copies the weights to the ring, once for every step."""
        num_products, w_steps = self.products.count, refs.w.shape[1] // _STEP

        @pl.loop(0, steps * num_products)
        def _(i: jax.Array) -> None:
            @pl.loop(0, w_steps)
            def _(k: jax.Array) -> None:
                slot = ring.acquire(i * w_steps + k)
                piece = refs.w.at[jax.lax.rem(i, num_products), pl.ds(k * _STEP, _STEP)]
                plgpu.copy_gmem_to_smem(piece, refs.w_smem.at[slot], ring.full_of(slot))

        ring.drain(steps * num_products * w_steps)


@dataclasses.dataclass(frozen=True, slots=True)
class _Consumer:
    """A warpgroup that normalises the positions of a tile a step, and multiplies them by all weights.

    Its tiles are every `num_ctas * _CONSUMERS`-th one; in the last step both warpgroups may have the same.
    """

    kernel: _Kernel
    refs: Refs
    ring: Ring
    cta: jax.Array
    warpgroup: jax.Array
    steps: jax.Array

    @property
    def pieces(self) -> int:
        """Pieces of the channels of x."""
        return int(self.refs.x.shape[2]) // _PIECE

    @property
    def x_stages(self) -> int:
        """Pieces of x that are copied ahead."""
        return int(self.refs.x_smem.shape[1])

    @property
    def w_steps(self) -> int:
        """Slots of the ring that the weights of a product take."""
        return int(self.refs.w.shape[1]) // _STEP

    def place(self, step: jax.Array) -> tuple[jax.Array, pl.Slice]:
        """Where the tile of a step is."""
        return self.kernel.tiles.place((self.cta + step * self.kernel.num_ctas) * _CONSUMERS + self.warpgroup)

    def run(self) -> None:
        """Computes all products of the positions of all steps, and waits until they are stored."""
        self.copy(range(self.x_stages), jnp.int32(0))
        pl.loop(0, self.steps)(self.step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(self, step: jax.Array) -> None:
        """Computes all products of the positions of a step."""
        refs, products, place = self.refs, self.kernel.products, self.place(step)
        gating = Gating(refs, refs.out_smem.at[self.warpgroup], products)
        factor = None
        if refs.mask is not None:
            factor = load(refs.mask.at[place], plgpu.Layout.WGMMA.reduce(1))
            factor = factor.astype(jnp.float32)

        def masked(side: jax.Array) -> jax.Array:
            if factor is None:
                return side
            f = along_rows(factor, COLUMNS)
            return jnp.where(f == 0.0, 0.0, f * side)  # 0 times what is not finite would be NaN

        zs = self.normalized(step)

        @pl.loop(0, products.count)
        def _(j: jax.Array) -> None:
            y = self.product(zs, (step * products.count + j) * self.w_steps)
            y += same_rows(refs.b.at[j])
            gating.finish(y, j, place, masked)

    def copy(self, which: Sequence[int], step: jax.Array) -> None:
        """Starts copies of these pieces of x to their slots. Pieces past the end of a step are of the next one."""
        for i in which:
            ahead, piece = divmod(i, self.pieces)
            item, rows = self.place(step + ahead)
            slot = jax.lax.rem(step * self.pieces + i, self.x_stages)
            copy_rows(
                self.refs.x,
                self.kernel.tiles.source(item),
                rows,
                pl.Slice(piece * _PIECE, _PIECE),
                self.refs.x_smem.at[self.warpgroup, slot],
                self.refs.x_full,
                self.warpgroup * self.x_stages + slot,
                row_bytes=_PIECE * self.refs.x.dtype.itemsize,
            )

    def read(self, step: jax.Array, i: int) -> jax.Array:
        """Piece i of x."""
        slot = jax.lax.rem(step * self.pieces + i, self.x_stages)
        plgpu.barrier_wait(self.refs.x_full.at[self.warpgroup * self.x_stages + slot])
        return load(self.refs.x_smem.at[self.warpgroup, slot], plgpu.Layout.WGMMA).astype(jnp.float32)

    def normalized(self, step: jax.Array) -> list[jax.Array]:
        """The layer norm of the positions of a step, without scale and bias, piece by piece."""
        xs: list[jax.Array] = []
        pieces, x_stages, group = self.pieces, self.x_stages, max(self.x_stages // 2, 1)
        for first in range(0, pieces, group):
            now = range(first, min(first + group, pieces))
            xs += [self.read(step, i) for i in now]
            plgpu.commit_smem()  # all have read
            self.copy([i + x_stages for i in now if i + x_stages < pieces], step)
            following = [i + x_stages for i in now if i + x_stages >= pieces]
            pl.when(step + 1 < self.steps)(functools.partial(self.copy, following, step))
        c, dtype = pieces * _PIECE, self.refs.w_smem.dtype
        center = along_rows(mean(xs, c), _PIECE)
        ds = [x - center for x in xs]
        inverse = along_rows(jax.lax.rsqrt(mean([d * d for d in ds], c) + self.kernel.epsilon), _PIECE)
        return [(d * inverse).astype(dtype) for d in ds]

    def product(self, zs: list[jax.Array], first: jax.Array) -> jax.Array:
        """The product of positions and the weights that the ring has from its step `first` on."""

        def slot_of(k: int) -> jax.Array:
            return jax.lax.rem(first + k, _STAGES)

        def parts(k: int) -> list[tuple[jax.Array, Ref]]:
            ws = [self.refs.w_smem.at[slot_of(k), pl.ds(i, _PIECE)] for i in range(0, _STEP, _PIECE)]
            return list(zip(zs[k * len(ws) : (k + 1) * len(ws)], ws, strict=True))

        def compute(sums: Ref) -> jax.Array:
            for k in range(self.w_steps):
                self.ring.wait(slot_of(k))
                for z, part in parts(k):
                    multiply(sums, z, part)
                if k:
                    plgpu.wgmma_wait(_STEP // _PIECE)  # the tensor cores always have the next step before them
                    self.ring.release(slot_of(k - 1))
            plgpu.wgmma_wait(0)
            self.ring.release(slot_of(self.w_steps - 1))
            return sums[...]

        return with_sums(compute, (ROWS, 2 * COLUMNS))
