"""The body of the kernel of `post_norm_mlp`: a warpgroup that copies, and two that compute.

A CTA keeps 64 rows from first to last and streams all weights past them. Each of its two warpgroups that compute
has half of the columns of the results. Hidden values come in rounds: each warpgroup computes half of the hidden
values of a round, and then adds the products of all of them with its columns of the weights. The activation of one
warpgroup is computed under the products of the other. Where attention is in the kernel too, each warpgroup begins
with half of the heads, which come through the same ring.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.elementwise import elementwise, load_vector
from pallas_models.kernels.mosaic.common.heads_of_32 import HEAD_DIM, Heads
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import tiled
from pallas_models.kernels.mosaic.common.products import added_up
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize

ROWS = 64  # of a tile
BLOCK = 64  # columns of a tile of shared memory, and steps of a contraction
STAGES = 4  # of the ring
CONSUMERS = 2
VECTORS = ("bias_out", "scale_out", "offset_out", "bias_down", "scale", "offset")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The order in which heads and weights come through the ring, for each tile of rows.

    1. Where attention is in the kernel: queries and keys of two heads of one warpgroup, and of two of the other,
       then the values of these heads, and so on for the next heads.
    2. The output projection, a step for each warpgroup by turns.
    3. The weights of the hidden values of the first round, for one warpgroup and for the other.
    4. In each round, for each half of its hidden values, the weights that multiply them, for one warpgroup and for
       the other. The weights of the next round's hidden values come in between: for warpgroup 0 after the first of
       these four parts, while the second half of the hidden values is activated; for warpgroup 1 after all four,
       while the first half of the next hidden values is activated.

    Attributes:
      n: columns of x and of the results.
      f: hidden values.
      heads: whether attention is in the kernel.
    """

    n: int
    f: int
    heads: bool

    @property
    def half(self) -> int:
        """Columns of a warpgroup: of the results, and of the hidden values of a round."""
        return self.n // 2

    @property
    def blocks(self) -> int:
        """Blocks of the columns of a warpgroup, and steps of the products of half of a round's hidden values."""
        return self.half // BLOCK

    @property
    def rounds(self) -> int:
        return self.f // self.n

    @property
    def attention(self) -> int:
        """Steps of both warpgroups by turns."""
        return self.n // HEAD_DIM if self.heads else 0

    @property
    def out(self) -> int:
        """Steps of the output projection, of each warpgroup."""
        return 2 * self.blocks

    @property
    def up(self) -> int:
        """Steps of the hidden values of a round, of each warpgroup."""
        return 2 * self.blocks

    @property
    def round(self) -> int:
        """Steps of a round, of both warpgroups."""
        return CONSUMERS * (self.up + 2 * self.blocks)

    @property
    def tile(self) -> int:
        """All steps of a tile."""
        return self.attention + CONSUMERS * self.out + self.rounds * self.round

    def first_up(self, start: jax.Array, j: jax.Array, warpgroup: jax.Array) -> jax.Array:
        """The first step of a warpgroup's hidden values of round j, where the first round begins at `start`."""
        first = start + j * self.round + warpgroup * self.up
        return first - jnp.where((warpgroup == 0) & (j > 0), (CONSUMERS**2 - 1) * self.blocks, 0)

    def first_down(self, start: jax.Array, j: jax.Array, part: jax.Array | int, warpgroup: jax.Array) -> jax.Array:
        """The first step of a warpgroup's products with a half of the hidden values of round j."""
        index = part * CONSUMERS + warpgroup
        after_up = (index > 0) & (j < self.rounds - 1)
        first = start + CONSUMERS * self.up + j * self.round
        return first + index * self.blocks + jnp.where(after_up, self.up, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernel:
    """The body of the kernel: CTAs walk over tiles of 64 rows.

    Attributes:
      dtype: of rows and matrices.
      heads: attention, where it is in the kernel.
    """

    steps: Steps
    tiles: int
    num_ctas: int
    dtype: jnp.dtype
    activation: Activation | None
    epsilon: float
    heads: Heads | None

    @property
    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        steps, heads = self.steps, self.heads
        slots = tiled((STAGES, BLOCK, steps.half), self.dtype)  # each as large as n rows of a head
        return dict(
            x_tiles=tiled((CONSUMERS, ROWS, steps.half), self.dtype),
            h_tiles=tiled((CONSUMERS, ROWS, steps.half), self.dtype),  # y, and then hidden values
            slots=slots if heads is None else plgpu.RefUnion(slots, heads.slots(STAGES, steps.n, self.dtype)),
            **({} if heads is None else heads.scratch_types(CONSUMERS * STAGES)),
            vector_tiles=plgpu.SMEM((len(VECTORS), steps.n), jnp.float32),
            bias_tile=plgpu.SMEM((steps.f,), jnp.float32),
            moments=plgpu.SMEM((CONSUMERS, 2, ROWS), jnp.float32),
            known=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            full=plgpu.Barrier(num_barriers=CONSUMERS * STAGES),
            consumed=plgpu.Barrier(num_barriers=STAGES),
            vectors_full=plgpu.Barrier(num_arrivals=2 * len(VECTORS) + steps.f // steps.half),
            rows_full=plgpu.Barrier(num_arrivals=(2 if heads is None else 1) * CONSUMERS),
            rows_free=plgpu.Barrier(num_arrivals=CONSUMERS),
            h_full=plgpu.Barrier(num_barriers=CONSUMERS),
            h_free=plgpu.Barrier(num_barriers=CONSUMERS),
        )

    def __call__(self, refs: Refs) -> None:
        cta = _Cta(self, refs)
        consumer = _Consumer(cta)
        specialize(
            Role(range(CONSUMERS, CONSUMERS + 1), 40, lambda _: _Producer(cta).run()),
            Role(range(CONSUMERS), 232, lambda _: consumer.run()),
            warpgroup=cta.warpgroup,
        )


class _Cta:
    """The memory of a CTA, and the tiles that it walks over."""

    def __init__(self, kernel: Kernel, refs: Refs) -> None:
        self.kernel, self.steps, self.heads, self.refs = kernel, kernel.steps, kernel.heads, refs
        self.warpgroup, self.first = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        self.other = 1 - self.warpgroup  # of the two that compute
        self.count = jax.lax.div(kernel.tiles - self.first + kernel.num_ctas - 1, kernel.num_ctas)
        # The slots of the ring, for blocks of weights and for heads.
        self.slots: Ref
        self.head_slots: Ref
        self.slots, self.head_slots = (refs.slots, None) if self.heads is None else refs.slots

    def tile(self, i: jax.Array) -> jax.Array:
        """The number of the i-th tile of this CTA."""
        return self.first + i * self.kernel.num_ctas

    def rows(self, i: jax.Array) -> pl.Slice:
        """The rows of the i-th tile."""
        return pl.Slice(self.tile(i) * ROWS, ROWS)

    def ring(self, consumer: jax.Array | int) -> Ring:
        """The ring as the warpgroup `consumer` sees it, for weights."""
        return Ring(self.refs.full, self.refs.consumed, STAGES, consumer * STAGES)

    def heads_ring(self, consumer: jax.Array) -> Ring:
        """The ring as the warpgroup `consumer` sees it, for heads."""
        return Ring(self.refs.heads_full, self.refs.consumed, STAGES, consumer * STAGES)


class _Producer:
    """The warpgroup that copies rows, heads and weights ahead of the other two."""

    def __init__(self, cta: _Cta) -> None:
        self.cta, self.refs, self.steps = cta, cta.refs, cta.steps

    def run(self) -> None:
        steps = jax.lax.fori_loop(0, self.cta.count, self.copy_tile, jnp.int32(0))
        self.cta.ring(0).drain(steps)
        plgpu.barrier_wait(self.refs.rows_free)

    def copy_tile(self, i: jax.Array, step: jax.Array) -> jax.Array:
        """Copies all that a tile needs from step `step` of the ring on; returns the step after the last."""
        if self.cta.heads is not None:
            step = self.copy_heads(self.cta.heads, i, step)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(self.refs.rows_free))
        self.copy_rows(i)
        pl.when(i == 0)(self.copy_vectors)
        return self.copy_weights(step)

    def copy_heads(self, heads: Heads, i: jax.Array, step: jax.Array) -> jax.Array:
        """Copies queries and keys, then values, of two heads of each warpgroup, and so on."""
        cta = self.cta
        heads.copy_ids(self.refs, cta.tile(i))

        def copy(j: jax.Array, step: jax.Array) -> jax.Array:
            def part(values: bool, consumer: jax.Array, step: jax.Array) -> jax.Array:
                ring, pair = cta.heads_ring(consumer), consumer * self.steps.blocks + j
                slot = ring.acquire(step)
                heads.copy(
                    self.refs, cta.tile(i), pair, cta.head_slots.at[slot], ring.full_of(slot), values=values
                )
                return step + 1

            for values in (False, True):
                step = jax.lax.fori_loop(0, CONSUMERS, functools.partial(part, values), step)
            return step

        return jax.lax.fori_loop(0, self.steps.blocks, copy, step)

    def copy_rows(self, i: jax.Array) -> None:
        """Copies y, unless attention computes it, and x."""
        refs, rows, half = self.refs, self.cta.rows, self.steps.half
        for part in range(CONSUMERS):
            columns = pl.ds(part * half, half)
            if self.cta.heads is None:
                plgpu.copy_gmem_to_smem(refs.y.at[rows(i), columns], refs.h_tiles.at[part], refs.rows_full)
            plgpu.copy_gmem_to_smem(refs.x.at[rows(i), columns], refs.x_tiles.at[part], refs.rows_full)

    def copy_vectors(self) -> None:
        refs, half = self.refs, self.steps.half

        @pl.loop(0, CONSUMERS)
        def _(part: jax.Array) -> None:
            columns = pl.ds(part * half, half)
            for i, name in enumerate(VECTORS):
                there = refs.vector_tiles.at[i, columns]
                plgpu.copy_gmem_to_smem(getattr(refs, name).at[columns], there, refs.vectors_full)

        @pl.loop(0, self.steps.f // half)
        def _(part: jax.Array) -> None:
            columns = pl.ds(part * half, half)
            plgpu.copy_gmem_to_smem(refs.bias_up.at[columns], refs.bias_tile.at[columns], refs.vectors_full)

    def copy_weights(self, step: jax.Array) -> jax.Array:
        step, none = jax.lax.fori_loop(0, CONSUMERS * self.steps.out, self.copy_out, step), jnp.int32(0)
        for consumer in range(CONSUMERS):
            step = self.copy_up(none, consumer, step)
        return jax.lax.fori_loop(0, self.steps.rounds, self.copy_round, step)

    def copy_out(self, i: jax.Array, step: jax.Array) -> jax.Array:
        """Copies a block of the output projection."""
        k, consumer = jax.lax.div(i, CONSUMERS), jax.lax.rem(i, CONSUMERS)
        return self.copy_block(self.refs.w_out, k * BLOCK, jnp.int32(0), consumer, step)

    def copy_up(self, j: jax.Array, consumer: int, step: jax.Array) -> jax.Array:
        """Copies the weights of a warpgroup's hidden values of round j, if there is such a round."""
        n = self.steps.n

        def steps(k: jax.Array, step: jax.Array) -> jax.Array:
            return self.copy_block(self.refs.w_up, k * BLOCK, j * n, jnp.int32(consumer), step)

        return jax.lax.fori_loop(0, jnp.where(j < self.steps.rounds, self.steps.up, 0), steps, step)

    def copy_round(self, j: jax.Array, step: jax.Array) -> jax.Array:
        """Copies the weights that multiply the hidden values of round j, and the weights of the next ones."""
        n, half, blocks = self.steps.n, self.steps.half, self.steps.blocks

        def down(i: jax.Array, step: jax.Array) -> jax.Array:
            part, i = jax.lax.div(i, CONSUMERS * blocks), jax.lax.rem(i, CONSUMERS * blocks)
            consumer, k = jax.lax.div(i, blocks), jax.lax.rem(i, blocks)
            return self.copy_block(self.refs.w_down, j * n + part * half + k * BLOCK, jnp.int32(0), consumer, step)

        step = self.copy_up(j + 1, 0, jax.lax.fori_loop(0, blocks, down, step))
        return self.copy_up(j + 1, 1, jax.lax.fori_loop(blocks, CONSUMERS**2 * blocks, down, step))

    def copy_block(
        self, w: Ref, row: jax.Array, column: jax.Array, consumer: jax.Array, step: jax.Array
    ) -> jax.Array:
        """Copies a block of weights for a warpgroup, which has its half of n columns from `column` on."""
        ring, half = self.cta.ring(consumer), self.steps.half
        slot = ring.acquire(step)
        source = w.at[pl.Slice(row, BLOCK), pl.Slice(column + consumer * half, half)]
        plgpu.copy_gmem_to_smem(source, self.cta.slots.at[slot], ring.full_of(slot))
        return step + 1


class _Consumer:
    """One of the two warpgroups that compute, each its half of the columns."""

    def __init__(self, cta: _Cta) -> None:
        self.cta, self.refs, self.steps = cta, cta.refs, cta.steps
        self.warpgroup, self.other = cta.warpgroup, cta.other
        self.columns = pl.Slice(self.warpgroup * self.steps.half, self.steps.half)

    def run(self) -> None:
        pl.loop(0, self.cta.count)(self.compute_tile)
        plgpu.barrier_wait(self.refs.h_free.at[self.warpgroup])

    def compute_tile(self, i: jax.Array) -> None:
        """The i-th tile: attention, then the projection and the MLP, each with residual and norm."""
        refs = self.refs
        start = i * self.steps.tile
        if self.cta.heads is not None:
            self.attend(self.cta.heads, i, start)
            start += self.steps.attention
        plgpu.barrier_wait(refs.rows_full)
        pl.when(i == 0)(lambda: plgpu.barrier_wait(refs.vectors_full))

        def phase(number: jax.Array, residual: jax.Array) -> jax.Array:
            def products(sums: Ref) -> None:
                pl.when(number == 0)(functools.partial(self.project_out, start, sums))
                pl.when(number == 1)(functools.partial(self.add_hidden, i, start, sums))

            return self.normalise(number, residual, products)

        # The residual of the second phase is in registers from the first one on.
        jax.lax.fori_loop(0, 2, phase, refs.x_tiles[self.warpgroup])

        plgpu.copy_smem_to_gmem(refs.x_tiles.at[self.warpgroup], refs.o.at[self.cta.rows(i), self.columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.rows_free)

    def attend(self, heads: Heads, i: jax.Array, start: jax.Array) -> None:
        """Computes the heads of this warpgroup, its columns of y."""
        refs, ring = self.refs, self.cta.heads_ring(self.warpgroup)
        heads.wait_ids(refs)

        @pl.loop(0, self.steps.blocks)
        def _(j: jax.Array) -> None:
            first = start + CONSUMERS * 2 * j + self.warpgroup
            block = refs.h_tiles.at[self.warpgroup, :, pl.ds(j * BLOCK, BLOCK)]
            tile, slots = self.cta.tile(i), self.cta.head_slots
            block[...] = heads.attend(refs, tile, slots, ring, (first, first + CONSUMERS))

        plgpu.commit_smem()
        _meet(refs.known.at[1])

    def project_out(self, start: jax.Array, sums: Ref) -> None:
        """Adds the products of y with the output projection."""
        left = functools.partial(self.block, self.refs.h_tiles)
        self.multiply(sums, left, self.steps.out, start + self.warpgroup, stride=CONSUMERS)

    def add_hidden(self, i: jax.Array, start: jax.Array, sums: Ref) -> None:
        """Computes hidden values round by round, and adds their products."""
        refs, steps, warpgroup = self.refs, self.steps, self.warpgroup
        start += CONSUMERS * steps.out
        apply = functools.partial(_activate, self.cta.kernel.activation, self.cta.kernel.dtype)

        def add_part(j: jax.Array, part: jax.Array | int) -> None:
            """Adds the products of a half of the hidden values of round j."""
            # A warpgroup need not wait for its own half.
            pl.when(warpgroup != part)(lambda: plgpu.barrier_wait(refs.h_full.at[part]))

            def left(k: jax.Array) -> Ref:
                return self.block(refs.h_tiles, part * steps.blocks + k)

            self.multiply(sums, left, steps.blocks, steps.first_down(start, j, part, warpgroup))
            pl.when(warpgroup != part)(lambda: plgpu.barrier_arrive(refs.h_free.at[part]))

        def bias(j: jax.Array) -> jax.Array:
            return load_vector(refs.bias_tile.at[pl.ds(j * steps.n + warpgroup * steps.half, steps.half)], 1)

        def compute_round(j: jax.Array, own_bias: jax.Array) -> jax.Array:
            first = steps.first_up(start, j, warpgroup)

            def up(sums: Ref) -> None:
                self.multiply(sums, functools.partial(self.block, refs.x_tiles), steps.up, first)

            z = added_up(jax.lax.broadcast_in_dim(own_bias, (ROWS, steps.half), [1]), up)
            pl.when((warpgroup == 0) & (j > 0))(lambda: add_part(j - 1, 1))
            # The other warpgroup may still multiply this one's hidden values of the last round.
            pl.when(i * steps.rounds + j > 0)(lambda: plgpu.barrier_wait(refs.h_free.at[warpgroup]))
            refs.h_tiles.at[warpgroup][...] = elementwise(apply, z)
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.h_full.at[warpgroup])
            next_bias = bias(jnp.minimum(j + 1, steps.rounds - 1))  # on its way under the products
            last = (warpgroup == 1) | (j == steps.rounds - 1)
            pl.loop(0, jnp.where(last, 2, 1))(functools.partial(add_part, j))
            return next_bias

        jax.lax.fori_loop(0, steps.rounds, compute_round, bias(jnp.int32(0)))

    def normalise(self, phase: jax.Array, residual: jax.Array, products: Callable[[Ref], None]) -> jax.Array:
        """Replaces x by layer_norm(products + bias + residual), and returns this warpgroup's columns of it."""
        x, first = self.refs.x_tiles.at[self.warpgroup], 3 * phase
        # The terms that are added before the products are computed while operands are on their way.
        y = added_up(elementwise(_shifted, residual, columns=[self.vector(first)]), products)
        mean, variance = self.moments(y)
        factor = jax.lax.rsqrt(variance + self.cta.kernel.epsilon)
        normal = functools.partial(_normal, self.cta.kernel.dtype)
        y = elementwise(normal, y, rows=[mean, factor], columns=[self.vector(first + 1), self.vector(first + 2)])
        x[...] = y
        plgpu.commit_smem()
        _meet(self.refs.known.at[1])  # both have read the moments, and written their columns
        return y

    def moments(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of each row, as in `matmul_layer_norm`."""
        refs, n, half = self.refs, self.steps.n, self.steps.half
        mean = jnp.sum(y, axis=1) * (1.0 / half)
        square = jnp.sum(elementwise(lambda y, mean: jnp.square(y - mean), y, rows=[mean]), axis=1)
        for i, value in enumerate((mean, square)):
            refs.moments.at[self.warpgroup, i][...] = value
        _meet(refs.known.at[0])
        mean_there, square_there = (load_vector(refs.moments.at[self.other, i], 0) for i in range(2))
        square += square_there + jnp.square(mean - mean_there) * (half / 2)
        return (mean + mean_there) * 0.5, square * (1.0 / n)

    def multiply(
        self, sums: Ref, left: Callable[[jax.Array], Ref], steps: int, first: jax.Array, stride: int = 1
    ) -> None:
        """Adds the products of `left(k)` and the slots of the ring, each `stride` steps from `first` on."""
        ring = self.cta.ring(self.warpgroup)

        def slot(k: jax.Array | int) -> jax.Array:
            return jax.lax.rem(first + k * stride, STAGES)

        def step(k: jax.Array, _: None) -> None:
            ring.wait(slot(k))
            plgpu.wgmma(sums, left(k), self.cta.slots.at[slot(k)])
            plgpu.wgmma_wait(1)  # the tensor cores always have the next step before them
            pl.when(k > 0)(lambda: ring.release(slot(k - 1)))

        jax.lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        ring.release(slot(steps - 1))

    def block(self, tiles: Ref, k: jax.Array) -> Ref:
        """Block k of the columns of both warpgroups."""
        part, k = jax.lax.div(k, self.steps.blocks), jax.lax.rem(k, self.steps.blocks)
        return tiles.at[part, :, pl.ds(k * BLOCK, BLOCK)]

    def vector(self, i: jax.Array) -> jax.Array:
        """This warpgroup's columns of one of `VECTORS`."""
        return load_vector(self.refs.vector_tiles.at[i, self.columns], 1)


def _meet(barrier: Ref) -> None:
    """Both warpgroups that compute wait for one another."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _shifted(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) + bias


def _normal(
    dtype: jnp.dtype, y: jax.Array, mean: jax.Array, factor: jax.Array, scale: jax.Array, offset: jax.Array
) -> jax.Array:
    return ((y - mean) * factor * scale + offset).astype(dtype)


def _activate(activation: Activation | None, dtype: jnp.dtype, z: jax.Array) -> jax.Array:
    return activate(activation, z, dtype).astype(dtype)
