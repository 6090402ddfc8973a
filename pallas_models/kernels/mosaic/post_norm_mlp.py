"""What follows attention in a post-norm transformer layer, for Hopper GPUs.

A CTA has 64 rows from first to last and streams all weights past them. Each of its two warpgroups has half of the
columns of the results. Hidden values come in rounds: each warpgroup computes half of those of a round, and then
adds what all of them give to its columns. The activation of one is taken under the products of the other. Where
attention is in the kernel too, each warpgroup begins with half of the heads, which come through the same ring.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.attention_post_norm_mlp import Form as AttentionForm
from pallas_models.kernels.forms.post_norm_mlp import Form, Weights
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.elementwise import elementwise, load_vector
from pallas_models.kernels.mosaic.common.heads_of_32 import HEAD_DIM, Heads, slot_rows
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import tiled, untiled
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.target import HOPPER, Target

_ROWS = 64
_BLOCK = 64  # columns of a tile of shared memory, and steps of a contraction
_STAGES = 4  # of the ring
_CONSUMERS = 2
_WIDEST = 384  # of which a warpgroup has sums of hidden values and of results in registers
_KEYS = (64, 128)  # of a sequence, where attention is in the kernel
_VECTORS = ("bias_out", "scale_out", "offset_out", "bias_down", "scale", "offset")


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `post_norm_mlp` does not serve a call; None if it does."""
    return _unsupported(form.x, form.weights, target)


def _unsupported(x: jax.ShapeDtypeStruct, weights: Weights[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why the kernel does not serve rows x (M, N); None if it does."""
    (k, n), f = weights.w_out.shape, weights.w_up.shape[1]
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if weights.bias_out is None or weights.bias_up is None or weights.bias_down is None:
        return "takes all biases"
    if k != n or n % (2 * _BLOCK) or n > _WIDEST or f % n or not f:
        return (
            f"takes as many columns of y as of x, in multiples of {2 * _BLOCK} up to {_WIDEST}, and of those a "
            f"multiple of hidden values, not {k}, {n} and {f}"
        )
    if target.runs(HOPPER) and _shared_memory(n, f) > target.shared_memory:
        return f"does not fit {f} hidden values beside {n} columns into shared memory"
    return untiled("x", x.shape, x.dtype)


def unsupported_attention(form: AttentionForm[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `attention_post_norm_mlp` does not serve a call; None if it does."""
    (batch, seq, n), k, num_heads = form.x.shape, form.qkv.shape[2] // 3, form.num_heads
    if jax.__version_info__ < (0, 11):
        return "needs JAX 0.11, which has arrays side by side in registers"
    if form.bias is not None or (form.mask is not None and form.segment_ids is not None):
        return "takes a mask or segment ids at most"
    if form.segment_ids is not None and form.segment_ids.dtype.itemsize > 4:
        return f"takes ids of 32 bits, not {form.segment_ids.dtype}"
    if k != n or n != num_heads * HEAD_DIM or seq not in _KEYS or slot_rows(seq) > n:
        return (
            f"takes heads of {HEAD_DIM} within 64 tokens from 256 columns on, within 128 from 384 on, "
            f"not {num_heads} heads of {k} columns within {seq} tokens"
        )
    return _unsupported(jax.ShapeDtypeStruct((batch * seq, n), form.x.dtype), form.weights, target)


def _shared_memory(n: int, f: int) -> int:
    """Bytes of shared memory that a CTA takes: rows and hidden values, ring, vectors, moments, barriers, ids."""
    return 2 * (2 * _ROWS * n + _STAGES * _BLOCK * n // 2) + 4 * (len(_VECTORS) * n + f) + 4 * 4 * _ROWS + 2048


def post_norm_mlp(form: Form[jax.Array], *, config: None, target: Target, interpret: bool) -> jax.Array:
    """The projection and the MLP of rows; see `pallas_models.ops.post_norm_mlp`."""
    del config  # there are no other tiles
    return _post_norm_mlp(form, target=target, interpret=interpret)


def attention_post_norm_mlp(
    form: AttentionForm[jax.Array], *, config: None, target: Target, interpret: bool
) -> jax.Array:
    """Attention, projection and MLP: tokens attend to those with their id, or with their value of the mask."""
    del config  # there are no other tiles
    batch, seq, _ = form.x.shape
    ids = form.segment_ids if form.mask is None else form.mask
    ids = None if ids is None else ids.astype(jnp.int32)
    heads = Heads(num_heads=form.num_heads, keys=seq, ids=ids)
    qkv, x = (a.reshape(batch * seq, a.shape[2]) for a in (form.qkv, form.x))
    options: dict[str, Any] = dict(activation=form.activation, epsilon=form.epsilon, precision=form.precision)
    rows = Form(y=qkv, x=x, weights=form.weights, **options)
    return _post_norm_mlp(rows, heads=heads, target=target, interpret=interpret).reshape(form.x.shape)


def _post_norm_mlp(
    form: Form[jax.Array], *, target: Target, interpret: bool, heads: Heads | None = None
) -> jax.Array:
    """The kernel. With `heads` the form's y has queries, keys and values, (M, 3 N)."""
    y, x, weights, activation, epsilon = form.y, form.x, form.weights, form.activation, form.epsilon
    w_out, w_up, w_down, bias_up = weights.w_out, weights.w_up, weights.w_down, weights.bias_up
    (m, n), f, dtype = x.shape, w_up.shape[1], x.dtype
    if interpret:
        check_interpreted_sizes(m=(m, _ROWS))
    half = n // 2  # columns of a warpgroup, of results and of the hidden values of a round
    blocks = half // _BLOCK
    # The order of the ring: the output projection, of both warpgroups by turns; hidden values of the first round,
    # of one and of the other; then in each round, for each half of these, what it adds to the results of one and
    # of the other. Hidden values of the next round come in between: of warpgroup 0 after the first of these four
    # parts, while the other one's half is activated, of warpgroup 1 after all, while that of warpgroup 0 is.
    rounds, out_steps, up_steps, down_steps = f // n, 2 * blocks, 2 * blocks, blocks
    round_steps = _CONSUMERS * (up_steps + 2 * down_steps)
    head_steps = 0 if heads is None else n // HEAD_DIM  # before all of those, of each by turns
    tile_steps = head_steps + _CONSUMERS * out_steps + rounds * round_steps
    tiles = pl.cdiv(m, _ROWS)
    num_ctas = min(2 if interpret else target.num_cores, tiles)
    vectors = {name: getattr(weights, name) for name in _VECTORS}

    def body(refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        other = 1 - warpgroup
        count = jax.lax.div(tiles - cta + num_ctas - 1, num_ctas)
        slots, *head_slots = (refs.slots,) if heads is None else refs.slots

        def tile_of(i: jax.Array) -> jax.Array:
            return cta + i * num_ctas

        def rows_of(i: jax.Array) -> pl.Slice:
            return pl.Slice(tile_of(i) * _ROWS, _ROWS)

        def ring_of(consumer: jax.Array | int) -> Ring:
            return Ring(refs.full, refs.consumed, _STAGES, consumer * _STAGES)

        def heads_ring(consumer: jax.Array) -> Ring:
            return Ring(refs.heads_full, refs.consumed, _STAGES, consumer * _STAGES)

        def copy_vectors() -> None:
            @pl.loop(0, _CONSUMERS)
            def _(part: jax.Array) -> None:
                columns = pl.ds(part * half, half)
                for i, name in enumerate(_VECTORS):
                    there = refs.vector_tiles.at[i, columns]
                    plgpu.copy_gmem_to_smem(getattr(refs, name).at[columns], there, refs.vectors_full)

            @pl.loop(0, f // half)
            def _(part: jax.Array) -> None:
                columns = pl.ds(part * half, half)
                plgpu.copy_gmem_to_smem(refs.bias_up.at[columns], refs.bias_tile.at[columns], refs.vectors_full)

        def copy_rows(i: jax.Array) -> None:
            for part in range(_CONSUMERS):
                columns = pl.ds(part * half, half)
                if heads is None:
                    plgpu.copy_gmem_to_smem(refs.y.at[rows_of(i), columns], refs.h_tiles.at[part], refs.rows_full)
                plgpu.copy_gmem_to_smem(refs.x.at[rows_of(i), columns], refs.x_tiles.at[part], refs.rows_full)

        def copy_heads(heads: Heads, i: jax.Array, step: jax.Array) -> jax.Array:
            heads.copy_ids(refs, tile_of(i))

            def copy(j: jax.Array, step: jax.Array) -> jax.Array:
                def part(values: bool, consumer: jax.Array, step: jax.Array) -> jax.Array:
                    ring, pair = heads_ring(consumer), consumer * blocks + j
                    slot = ring.acquire(step)
                    heads.copy(refs, tile_of(i), pair, head_slots[0].at[slot], ring.full_of(slot), values=values)
                    return step + 1

                for values in (False, True):
                    step = jax.lax.fori_loop(0, _CONSUMERS, functools.partial(part, values), step)
                return step

            return jax.lax.fori_loop(0, blocks, copy, step)

        def copy_weights(step: jax.Array) -> jax.Array:
            """Copies all weights, in the order of the ring from `step` on; returns the step after the last."""

            def copy(w: Ref, row: jax.Array, column: jax.Array, consumer: jax.Array, step: jax.Array) -> jax.Array:
                ring = ring_of(consumer)
                slot = ring.acquire(step)
                source = w.at[pl.Slice(row, _BLOCK), pl.Slice(column + consumer * half, half)]
                plgpu.copy_gmem_to_smem(source, slots.at[slot], ring.full_of(slot))
                return step + 1

            def out(i: jax.Array, step: jax.Array) -> jax.Array:
                k, consumer = jax.lax.div(i, _CONSUMERS), jax.lax.rem(i, _CONSUMERS)
                return copy(refs.w_out, k * _BLOCK, jnp.int32(0), consumer, step)

            def up(j: jax.Array, consumer: int, step: jax.Array) -> jax.Array:
                def steps(k: jax.Array, step: jax.Array) -> jax.Array:
                    return copy(refs.w_up, k * _BLOCK, j * n, jnp.int32(consumer), step)

                return jax.lax.fori_loop(0, jnp.where(j < rounds, up_steps, 0), steps, step)

            def of_round(j: jax.Array, step: jax.Array) -> jax.Array:
                def down(i: jax.Array, step: jax.Array) -> jax.Array:
                    part, i = jax.lax.div(i, _CONSUMERS * down_steps), jax.lax.rem(i, _CONSUMERS * down_steps)
                    consumer, k = jax.lax.div(i, down_steps), jax.lax.rem(i, down_steps)
                    return copy(refs.w_down, j * n + part * half + k * _BLOCK, jnp.int32(0), consumer, step)

                step = up(j + 1, 0, jax.lax.fori_loop(0, down_steps, down, step))
                return up(j + 1, 1, jax.lax.fori_loop(down_steps, _CONSUMERS**2 * down_steps, down, step))

            step, none = jax.lax.fori_loop(0, _CONSUMERS * out_steps, out, step), jnp.int32(0)
            return jax.lax.fori_loop(0, rounds, of_round, up(none, 1, up(none, 0, step)))

        def produce() -> None:
            def copy_tile(i: jax.Array, step: jax.Array) -> jax.Array:
                if heads is not None:
                    step = copy_heads(heads, i, step)
                pl.when(i > 0)(lambda: plgpu.barrier_wait(refs.rows_free))
                copy_rows(i)
                pl.when(i == 0)(copy_vectors)
                return copy_weights(step)

            steps = jax.lax.fori_loop(0, count, copy_tile, jnp.int32(0))
            ring_of(0).drain(steps)
            plgpu.barrier_wait(refs.rows_free)

        def sum_up(first: jax.Array, body: Callable[[Ref], None]) -> jax.Array:
            """What `body` has added to sums of this warpgroup, (64, half), that begin with `first`."""

            def take(sums: Ref) -> jax.Array:
                if interpret:  # without sums that can be set
                    body(sums)
                    return sums[...] + first
                sums[...] = first
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
                plgpu.wgmma(sums, left(k), slots.at[slot_of(k)])
                plgpu.wgmma_wait(1)  # the tensor cores always have the next step before them
                pl.when(k > 0)(lambda: ring.release(slot_of(k - 1)))

            jax.lax.fori_loop(0, steps, step, None)
            plgpu.wgmma_wait(0)
            ring.release(slot_of(steps - 1))

        apply = elementwise
        own_columns = pl.Slice(warpgroup * half, half)

        def block_of(tiles: Ref, k: jax.Array) -> Ref:
            """Block k of the columns of both halves."""
            part, k = jax.lax.div(k, blocks), jax.lax.rem(k, blocks)
            return tiles.at[part, :, pl.ds(k * _BLOCK, _BLOCK)]

        def meet(barrier: Ref) -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        def moments(y: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Mean and variance of each row, as in `matmul_layer_norm`."""
            mean = jnp.sum(y, axis=1) * (1.0 / half)
            square = jnp.sum(apply(lambda y, mean: jnp.square(y - mean), y, rows=[mean]), axis=1)
            for i, value in enumerate((mean, square)):
                refs.moments.at[warpgroup, i][...] = value
            meet(refs.known.at[0])
            mean_there, square_there = (load_vector(refs.moments.at[other, i], 0) for i in range(2))
            square += square_there + jnp.square(mean - mean_there) * (half / 2)
            return (mean + mean_there) * 0.5, square * (1.0 / n)

        def vector(i: jax.Array) -> jax.Array:
            return load_vector(refs.vector_tiles.at[i, own_columns], 1)

        def shifted(x: jax.Array, bias: jax.Array) -> jax.Array:
            return x.astype(jnp.float32) + bias

        def normal(
            y: jax.Array, mean: jax.Array, factor: jax.Array, scale: jax.Array, offset: jax.Array
        ) -> jax.Array:
            return ((y - mean) * factor * scale + offset).astype(dtype)

        def normalise(phase: jax.Array, residual: jax.Array, products: Callable[[Ref], None]) -> jax.Array:
            """Replaces x by layer_norm(products + bias + residual); returns it, the columns of this warpgroup."""
            x, first = refs.x_tiles.at[warpgroup], 3 * phase
            # What comes before products and not after them is computed while operands are on their way.
            y = sum_up(apply(shifted, residual, columns=[vector(first)]), products)
            mean, variance = moments(y)
            factor = jax.lax.rsqrt(variance + epsilon)
            y = apply(normal, y, rows=[mean, factor], columns=[vector(first + 1), vector(first + 2)])
            x[...] = y
            plgpu.commit_smem()
            meet(refs.known.at[1])  # both have read the moments, and written their columns
            return y

        def attend(heads: Heads, i: jax.Array, start: jax.Array) -> None:
            """Computes y, each warpgroup its columns."""
            ring = heads_ring(warpgroup)
            heads.wait_ids(refs)

            @pl.loop(0, blocks)
            def _(j: jax.Array) -> None:
                first = start + _CONSUMERS * 2 * j + warpgroup
                block = refs.h_tiles.at[warpgroup, :, pl.ds(j * _BLOCK, _BLOCK)]
                block[...] = heads.attend(refs, tile_of(i), head_slots[0], ring, (first, first + _CONSUMERS))

            plgpu.commit_smem()
            meet(refs.known.at[1])

        def project_out(start: jax.Array, sums: Ref) -> None:
            left = functools.partial(block_of, refs.h_tiles)
            multiply(sums, left, out_steps, start + warpgroup, stride=_CONSUMERS)

        def add_hidden(i: jax.Array, start: jax.Array, sums: Ref) -> None:
            start += _CONSUMERS * out_steps

            def first_down(j: jax.Array, part: jax.Array | int) -> jax.Array:
                """The step of the ring from which on a half of round j is added."""
                index = part * _CONSUMERS + warpgroup
                after_up = (index > 0) & (j < rounds - 1)
                first = start + _CONSUMERS * up_steps + j * round_steps
                return first + index * down_steps + jnp.where(after_up, up_steps, 0)

            def add_part(j: jax.Array, part: jax.Array | int) -> None:
                # What it has written itself it need not wait for.
                pl.when(warpgroup != part)(lambda: plgpu.barrier_wait(refs.h_full.at[part]))

                def left(k: jax.Array) -> Ref:
                    return block_of(refs.h_tiles, part * blocks + k)

                multiply(sums, left, down_steps, first_down(j, part))
                pl.when(warpgroup != part)(lambda: plgpu.barrier_arrive(refs.h_free.at[part]))

            def bias_of(j: jax.Array) -> jax.Array:
                there = refs.bias_tile.at[pl.ds(j * n + warpgroup * half, half)]
                return load_vector(there, 1)

            def of_round(j: jax.Array, bias: jax.Array) -> jax.Array:
                first = start + j * round_steps + warpgroup * up_steps
                first -= jnp.where((warpgroup == 0) & (j > 0), (_CONSUMERS**2 - 1) * down_steps, 0)

                def up(sums: Ref) -> None:
                    multiply(sums, functools.partial(block_of, refs.x_tiles), up_steps, first)

                z = sum_up(jax.lax.broadcast_in_dim(bias, (_ROWS, half), [1]), up)
                pl.when((warpgroup == 0) & (j > 0))(lambda: add_part(j - 1, 1))
                # The other warpgroup still multiplies those of the last round.
                pl.when(i * rounds + j > 0)(lambda: plgpu.barrier_wait(refs.h_free.at[warpgroup]))
                refs.h_tiles.at[warpgroup][...] = apply(lambda z: activate(activation, z, dtype).astype(dtype), z)
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs.h_full.at[warpgroup])
                bias = bias_of(jnp.minimum(j + 1, rounds - 1))  # on its way while the tensor cores are busy
                last = (warpgroup == 1) | (j == rounds - 1)
                pl.loop(0, jnp.where(last, 2, 1))(functools.partial(add_part, j))
                return bias

            jax.lax.fori_loop(0, rounds, of_round, bias_of(jnp.int32(0)))

        def consume() -> None:
            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                start = i * tile_steps
                if heads is not None:
                    attend(heads, i, start)
                    start += head_steps
                plgpu.barrier_wait(refs.rows_full)
                pl.when(i == 0)(lambda: plgpu.barrier_wait(refs.vectors_full))

                def of_phase(phase: jax.Array, residual: jax.Array) -> jax.Array:
                    def products(sums: Ref) -> None:
                        pl.when(phase == 0)(functools.partial(project_out, start, sums))
                        pl.when(phase == 1)(functools.partial(add_hidden, i, start, sums))

                    return normalise(phase, residual, products)

                # What the second phase adds to its products is in registers from the first on.
                jax.lax.fori_loop(0, 2, of_phase, refs.x_tiles[warpgroup])

                plgpu.copy_smem_to_gmem(refs.x_tiles.at[warpgroup], refs.o.at[rows_of(i), own_columns])
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

    slots = tiled((_STAGES, _BLOCK, half), dtype)  # each as large as n rows of a head
    (out,) = launch(
        body,
        ({} if heads is None else heads.operands)
        | dict(y=y, x=x, w_out=w_out, w_up=w_up, w_down=w_down, bias_up=bias_up.astype(jnp.float32))
        | {name: v.astype(jnp.float32) for name, v in vectors.items()},
        dict(o=jax.ShapeDtypeStruct((m, n), dtype)),
        dict(
            x_tiles=tiled((_CONSUMERS, _ROWS, half), dtype),
            h_tiles=tiled((_CONSUMERS, _ROWS, half), dtype),  # hidden values; before those, y
            slots=slots if heads is None else plgpu.RefUnion(slots, heads.slots(_STAGES, n, dtype)),
            **({} if heads is None else heads.scratch_types(_CONSUMERS * _STAGES)),
            vector_tiles=plgpu.SMEM((len(vectors), n), jnp.float32),
            bias_tile=plgpu.SMEM((f,), jnp.float32),
            moments=plgpu.SMEM((_CONSUMERS, 2, _ROWS), jnp.float32),
            known=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
            full=plgpu.Barrier(num_barriers=_CONSUMERS * _STAGES),
            consumed=plgpu.Barrier(num_barriers=_STAGES),
            vectors_full=plgpu.Barrier(num_arrivals=2 * len(vectors) + f // half),
            rows_full=plgpu.Barrier(num_arrivals=(2 if heads is None else 1) * _CONSUMERS),
            rows_free=plgpu.Barrier(num_arrivals=_CONSUMERS),
            h_full=plgpu.Barrier(num_barriers=_CONSUMERS),
            h_free=plgpu.Barrier(num_barriers=_CONSUMERS),
        ),
        name="post_norm_mlp",
        num_ctas=num_ctas,
        num_warpgroups=_CONSUMERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
    )
    return out
