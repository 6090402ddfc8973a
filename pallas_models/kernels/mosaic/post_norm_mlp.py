"""What follows attention in a post-norm transformer layer, for Hopper GPUs.

A CTA has 64 rows from first to last and streams all weights past them. Each of its two warpgroups has half of the
columns of the results. Hidden values come in rounds: each warpgroup computes half of those of a round, and then
adds what all of them give to its columns. The activation of one is taken under the products of the other.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels._common import Ref
from pallas_models.kernels.mosaic._common import (
    activate,
    check_interpreted_sizes,
    load,
    plgpu,
    row,
    tiled,
    untiled,
)
from pallas_models.kernels.mosaic._launch import Refs, launch
from pallas_models.kernels.mosaic._ring import Ring
from pallas_models.target import Target

_ROWS = 64
_BLOCK = 64  # columns of a tile of shared memory, and steps of a contraction
_STAGES = 4  # of the ring
_CONSUMERS = 2
_WIDEST = 384  # of which a warpgroup has sums of hidden values and of results in registers
_SHARED_MEMORY = 227 * 1024  # bytes that a CTA can have
_VECTORS = ("bias_out", "scale_out", "offset_out", "bias_down", "scale", "offset")


def unsupported(
    y: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    bias_out: jax.Array | None,
    scale_out: jax.Array,
    offset_out: jax.Array,
    w_up: jax.Array,
    bias_up: jax.Array | None,
    w_down: jax.Array,
    bias_down: jax.Array | None,
    *_: jax.Array,
    **__: Any,
) -> str | None:
    """Why `post_norm_mlp` does not serve a call; None if it does."""
    (k, n), f = w_out.shape, w_up.shape[1]
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if bias_out is None or bias_up is None or bias_down is None:
        return "takes all biases"
    if k != n or n % (2 * _BLOCK) or n > _WIDEST or f % n or not f:
        return (
            f"takes as many columns of y as of x, in multiples of {2 * _BLOCK} up to {_WIDEST}, and of those a "
            f"multiple of hidden values, not {k}, {n} and {f}"
        )
    if _shared_memory(n, f) > _SHARED_MEMORY:
        return f"does not fit {f} hidden values beside {n} columns into shared memory"
    return untiled("x", x.shape, x.dtype)


def _shared_memory(n: int, f: int) -> int:
    """Bytes of shared memory that a CTA takes: rows and hidden values, ring, vectors, moments, barriers."""
    return 2 * (2 * _ROWS * n + _STAGES * _BLOCK * n // 2) + 4 * (len(_VECTORS) * n + f) + 4 * 4 * _ROWS + 1024


def post_norm_mlp(
    y: jax.Array,
    x: jax.Array,
    w_out: jax.Array,
    bias_out: jax.Array,
    scale_out: jax.Array,
    offset_out: jax.Array,
    w_up: jax.Array,
    bias_up: jax.Array,
    w_down: jax.Array,
    bias_down: jax.Array,
    scale: jax.Array,
    offset: jax.Array,
    *,
    activation: str | None,
    epsilon: float,
    precision: jax.lax.Precision,
    config: None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """The layer's end for y and x (M, N); see `pallas_models.ops.post_norm_mlp`."""
    del precision, config  # see `unsupported`; there are no other tiles
    (m, n), f, dtype = x.shape, w_up.shape[1], x.dtype
    if interpret:
        check_interpreted_sizes(m=(m, _ROWS))
    half = n // 2  # columns of a warpgroup, of results and of the hidden values of a round
    blocks = half // _BLOCK
    # The order of the ring: the output projection, of both warpgroups by turns; then in each round hidden values
    # of one and of the other, and for each half of these what it adds to the results of one and of the other.
    rounds, out_steps, up_steps, down_steps = f // n, 2 * blocks, 2 * blocks, blocks
    round_steps = _CONSUMERS * (up_steps + 2 * down_steps)
    tile_steps = _CONSUMERS * out_steps + rounds * round_steps
    tiles = pl.cdiv(m, _ROWS)
    num_ctas = min(2 if interpret else target.num_cores, tiles)
    vectors = dict(zip(_VECTORS, (bias_out, scale_out, offset_out, bias_down, scale, offset), strict=True))

    def body(refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        other = 1 - warpgroup
        count = jax.lax.div(tiles - cta + num_ctas - 1, num_ctas)

        def rows_of(i: jax.Array) -> pl.Slice:
            return pl.Slice((cta + i * num_ctas) * _ROWS, _ROWS)

        def ring_of(consumer: jax.Array | int) -> Ring:
            return Ring(refs.full, refs.consumed, _STAGES, consumer * _STAGES)

        def copy_vectors() -> None:
            for start in range(0, n, half):
                part = pl.ds(start, half)
                for i, name in enumerate(_VECTORS):
                    there = refs.vector_tiles.at[i, part]
                    plgpu.copy_gmem_to_smem(getattr(refs, name).at[part], there, refs.vectors_full)
            for start in range(0, f, half):
                part = pl.ds(start, half)
                plgpu.copy_gmem_to_smem(refs.bias_up.at[part], refs.bias_tile.at[part], refs.vectors_full)

        def copy_rows(i: jax.Array) -> None:
            for block in range(_CONSUMERS * blocks):
                columns = pl.ds(block * _BLOCK, _BLOCK)
                there = refs.h_tiles.at[block // blocks, block % blocks]
                plgpu.copy_gmem_to_smem(refs.y.at[rows_of(i), columns], there, refs.rows_full)
                plgpu.copy_gmem_to_smem(refs.x.at[rows_of(i), columns], refs.x_tiles.at[block], refs.rows_full)

        def copy_weights(step: jax.Array) -> jax.Array:
            """Copies all weights, in the order of the ring from `step` on; returns the step after the last."""

            def copy(consumer: int, w: Ref, row: jax.Array, column: jax.Array | int, step: jax.Array) -> jax.Array:
                ring = ring_of(consumer)
                slot = ring.acquire(step)
                source = w.at[pl.Slice(row, _BLOCK), pl.Slice(column, half)]
                plgpu.copy_gmem_to_smem(source, refs.slots.at[slot], ring.full_of(slot))
                return step + 1

            def out(k: jax.Array, step: jax.Array) -> jax.Array:
                for consumer in range(_CONSUMERS):
                    step = copy(consumer, refs.w_out, k * _BLOCK, consumer * half, step)
                return step

            def of_round(j: jax.Array, step: jax.Array) -> jax.Array:
                def up(consumer: int, k: jax.Array, step: jax.Array) -> jax.Array:
                    return copy(consumer, refs.w_up, k * _BLOCK, j * n + consumer * half, step)

                def down(part: int, consumer: int, k: jax.Array, step: jax.Array) -> jax.Array:
                    row = j * n + part * half + k * _BLOCK
                    return copy(consumer, refs.w_down, row, consumer * half, step)

                for consumer in range(_CONSUMERS):
                    step = jax.lax.fori_loop(0, up_steps, functools.partial(up, consumer), step)
                for part, consumer in itertools.product(range(_CONSUMERS), repeat=2):
                    step = jax.lax.fori_loop(0, down_steps, functools.partial(down, part, consumer), step)
                return step

            return jax.lax.fori_loop(0, rounds, of_round, jax.lax.fori_loop(0, out_steps, out, step))

        def produce() -> None:
            def copy_tile(i: jax.Array, step: jax.Array) -> jax.Array:
                pl.when(i > 0)(lambda: plgpu.barrier_wait(refs.rows_free))
                copy_rows(i)
                pl.when(i == 0)(copy_vectors)
                return copy_weights(step)

            steps = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
            ring_of(0).drain(steps)
            plgpu.barrier_wait(refs.rows_free)

        def sum_up(body: Callable[[Ref], None]) -> jax.Array:
            """What `body` has added to sums of this warpgroup, (64, half)."""

            def take(sums: Ref) -> jax.Array:
                body(sums)
                return sums[...]

            return pl.run_scoped(take, plgpu.ACC((_ROWS, half), jnp.float32))

        def multiply(
            sums: Ref, left: Callable[[jax.Array], Ref], steps: int, first: jax.Array, stride: int = 1
        ) -> None:
            """Adds products of what `left` gives and slots of the ring, each `stride` steps from `first` on."""
            ring = ring_of(warpgroup)

            def slot_of(k: jax.Array | int) -> jax.Array:
                return jax.lax.rem(first + k * stride, _STAGES)

            def step(k: jax.Array, _: None) -> None:
                ring.wait(slot_of(k))
                plgpu.wgmma(sums, left(k), refs.slots.at[slot_of(k)])
                plgpu.wgmma_wait(1)  # the tensor cores always have the next step before them
                pl.when(k > 0)(lambda: ring.release(slot_of(k - 1)))

            jax.lax.fori_loop(0, steps, step, None)
            plgpu.wgmma_wait(0)
            ring.release(slot_of(steps - 1))

        def columns_of(block: int) -> pl.Slice:
            return pl.Slice(warpgroup * half + block * _BLOCK, _BLOCK)

        def along_rows(v: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(v, (_ROWS, _BLOCK), [0])

        def total(values: Iterable[jax.Array]) -> jax.Array:
            """The sum of each row of blocks side by side."""
            return functools.reduce(operator.add, (jnp.sum(v, axis=1) for v in values))

        def meet(barrier: Ref) -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        def moments(ys: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Mean and variance of each row, as in `matmul_layer_norm`."""
            mean = total(ys) * (1.0 / half)
            square = total(jnp.square(y - along_rows(mean)) for y in ys)
            for i, value in enumerate((mean, square)):
                refs.moments.at[warpgroup, i][...] = value
            meet(refs.known.at[0])
            rows = plgpu.Layout.WGMMA.reduce(1)
            mean_there, square_there = (
                load(refs.moments.at[other, i], rows, interpret=interpret) for i in range(2)
            )
            square += square_there + jnp.square(mean - mean_there) * (half / 2)
            return (mean + mean_there) * 0.5, square * (1.0 / n)

        def normalise(sums: jax.Array, bias: int, scale: int, offset: int) -> None:
            """Replaces the rows of x by layer_norm(sums + bias + x), of which this warpgroup has its columns."""

            def vector(i: int, block: int) -> jax.Array:
                return row(refs.vector_tiles.at[i, columns_of(block)], (_ROWS, _BLOCK))

            own = [warpgroup * blocks + block for block in range(blocks)]
            ys = [
                sums[:, block * _BLOCK : (block + 1) * _BLOCK]
                + vector(bias, block)
                + refs.x_tiles[own[block]].astype(jnp.float32)
                for block in range(blocks)
            ]
            mean, variance = moments(ys)
            rstd = jax.lax.rsqrt(variance + epsilon)
            for block, y in enumerate(ys):
                y = (y - along_rows(mean)) * along_rows(rstd) * vector(scale, block) + vector(offset, block)
                refs.x_tiles[own[block]] = y.astype(dtype)
            plgpu.commit_smem()
            meet(refs.known.at[1])  # both have read the moments, and written their columns

        def project_out(start: jax.Array, sums: Ref) -> None:
            def left(k: jax.Array) -> Ref:
                return refs.h_tiles.at[jax.lax.div(k, blocks), jax.lax.rem(k, blocks)]

            multiply(sums, left, out_steps, start + warpgroup, stride=_CONSUMERS)

        def add_hidden(i: jax.Array, start: jax.Array, sums: Ref) -> None:
            def of_round(j: jax.Array, _: None) -> None:
                first = start + _CONSUMERS * out_steps + j * round_steps

                def up(sums: Ref) -> None:
                    multiply(sums, lambda k: refs.x_tiles.at[k], up_steps, first + warpgroup * up_steps)

                values = sum_up(up)
                # The other warpgroup still multiplies those of the last round.
                pl.when(i * rounds + j > 0)(lambda: plgpu.barrier_wait(refs.h_free.at[warpgroup]))
                for block in range(blocks):
                    z = values[:, block * _BLOCK : (block + 1) * _BLOCK]
                    columns = pl.ds(j * n + warpgroup * half + block * _BLOCK, _BLOCK)
                    z = activate(activation, z + row(refs.bias_tile.at[columns], z.shape), dtype)
                    refs.h_tiles[warpgroup, block] = z.astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs.h_full.at[warpgroup])
                first += _CONSUMERS * up_steps + warpgroup * down_steps
                for part in range(_CONSUMERS):
                    # What it has written itself it need not wait for.
                    pl.when(warpgroup != part)(functools.partial(plgpu.barrier_wait, refs.h_full.at[part]))
                    left = functools.partial(lambda part, k: refs.h_tiles.at[part, k], part)
                    multiply(sums, left, down_steps, first + part * _CONSUMERS * down_steps)
                plgpu.barrier_arrive(refs.h_free.at[other])

            jax.lax.fori_loop(0, rounds, of_round, None)

        def consume() -> None:
            plgpu.barrier_wait(refs.vectors_full)

            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                start = i * tile_steps
                plgpu.barrier_wait(refs.rows_full)
                normalise(sum_up(functools.partial(project_out, start)), 0, 1, 2)
                normalise(sum_up(functools.partial(add_hidden, i, start)), 3, 4, 5)
                for block in range(blocks):
                    there = refs.o.at[rows_of(i), columns_of(block)]
                    plgpu.copy_smem_to_gmem(refs.x_tiles.at[warpgroup * blocks + block], there)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(refs.rows_free)

            plgpu.barrier_wait(refs.h_free.at[warpgroup])

        @pl.when(warpgroup == _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            produce()

        @pl.when(warpgroup < _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            consume()

    (out,) = launch(
        body,
        dict(y=y, x=x, w_out=w_out, w_up=w_up, w_down=w_down, bias_up=bias_up.astype(jnp.float32))
        | {name: v.astype(jnp.float32) for name, v in vectors.items()},
        dict(o=jax.ShapeDtypeStruct((m, n), dtype)),
        dict(
            x_tiles=tiled((_CONSUMERS * blocks, _ROWS, _BLOCK), dtype),
            h_tiles=tiled((_CONSUMERS, blocks, _ROWS, _BLOCK), dtype),  # hidden values; before those, y
            slots=tiled((_STAGES, _BLOCK, half), dtype),
            vector_tiles=plgpu.SMEM((len(vectors), n), jnp.float32),
            bias_tile=plgpu.SMEM((f,), jnp.float32),
            moments=plgpu.SMEM((_CONSUMERS, 2, _ROWS), jnp.float32),
            full=plgpu.Barrier(num_barriers=_CONSUMERS * _STAGES),
            consumed=plgpu.Barrier(num_barriers=_STAGES),
            vectors_full=plgpu.Barrier(num_arrivals=2 * len(vectors) + f // half),
            rows_full=plgpu.Barrier(num_arrivals=2 * _CONSUMERS * blocks),
            rows_free=plgpu.Barrier(num_arrivals=_CONSUMERS),
            h_full=plgpu.Barrier(num_barriers=_CONSUMERS),
            h_free=plgpu.Barrier(num_barriers=_CONSUMERS),
            known=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
        ),
        name="post_norm_mlp",
        num_ctas=num_ctas,
        num_warpgroups=_CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
    )
    return out
