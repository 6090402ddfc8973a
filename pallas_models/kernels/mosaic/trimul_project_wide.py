"""Projections of the triangle multiplicative update with their gates, for Hopper GPUs and more than 128 channels.

The weights do not fit into shared memory. Two warpgroups of each CTA take 64 positions at a time and normalise
them in registers, from where the tensor cores take them; one more copies the weights piece by piece to a ring,
past the two. These may be apart by as much as the ring holds, so that one multiplies while the other one gates,
stores or normalises.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, tiled
from pallas_models.kernels.mosaic.common.ring import Ring
from pallas_models.kernels.mosaic.trimul_project import (
    COLUMNS,
    ROWS,
    along_rows,
    arranged,
    arranged_biases,
    gate_and_store,
    mean,
    out_types,
    positions,
    products_of,
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


def project(
    form: Projection[jax.Array],
    *,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Left and right, and the gate, for x (B, M, C), mask (B, M), w (C, 4, H), bias (4, H) and w_gate (C, G).

    M is a multiple of 8.

    Returns:
      (B, 2 H, M'), left and right, masked; and the gate, (B, G', M'), G' >= G, or None for G = 0. Both in the
      dtype of w. M' is M in whole `ROWS`, and left and right are 0 beyond M.
    """
    x, mask, norm_scale, norm_bias, w, bias, w_gate, b_gate = form.operands
    epsilon = form.epsilon
    batch, size, c = x.shape
    h, dtype = w.shape[2], w.dtype
    if interpret:
        check_interpreted_sizes(positions=(size, ROWS))
    mask = whole_mask(mask, batch, size, dtype)
    num_products, side_products = products_of(h, w_gate.shape[1]), 2 * h // COLUMNS
    gates = 2 * COLUMNS * (num_products - side_products)
    pieces, w_steps = c // _PIECE, c // _STEP
    x_stages = min(_X_BYTES // (ROWS * _PIECE * x.dtype.itemsize), pieces)
    # As vectors, scale and bias of the norm would take registers that positions need: they become part of the
    # weights and of the biases.
    weights = arranged(w, w_gate).astype(jnp.float32)
    b = jnp.sum(norm_bias[:, None, None] * weights, axis=0)
    biases = arranged_biases(bias, b_gate, h, w_gate.shape[1])
    if biases is not None:
        b += biases
    weights = (norm_scale[:, None, None] * weights).astype(dtype)
    registers = plgpu.Layout.WGMMA
    rounds = pl.cdiv(batch * pl.cdiv(size, ROWS), _CONSUMERS)  # in which each warpgroup takes a tile
    num_ctas = min(2 if interpret else target.num_cores, rounds)

    def trimul_project(refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(rounds - cta + num_ctas - 1, num_ctas)
        ring = Ring(refs.w_full, refs.w_consumed, _STAGES)

        def produce() -> None:
            @pl.loop(0, steps * num_products)
            def _(i: jax.Array) -> None:
                @pl.loop(0, w_steps)
                def _(k: jax.Array) -> None:
                    slot = ring.acquire(i * w_steps + k)
                    piece = refs.w.at[jax.lax.rem(i, num_products), pl.ds(k * _STEP, _STEP)]
                    plgpu.copy_gmem_to_smem(piece, refs.w_smem.at[slot], ring.full_of(slot))

            ring.drain(steps * num_products * w_steps)

        def rows_of(step: jax.Array) -> tuple[jax.Array, pl.Slice]:
            tile = (cta + step * num_ctas) * _CONSUMERS + warpgroup
            return positions(tile, batch, size)  # at the end both warpgroups may have the same

        def copy(which: Sequence[int], step: jax.Array) -> None:
            """Starts copies of these pieces to their slots; those past the end of a step are of the next one."""
            for i in which:
                ahead, piece = divmod(i, pieces)
                item, rows = rows_of(step + ahead)
                slot = jax.lax.rem(step * pieces + i, x_stages)
                plgpu.copy_gmem_to_smem(
                    refs.x.at[item, rows, pl.ds(piece * _PIECE, _PIECE)],
                    refs.x_smem.at[warpgroup, slot],
                    refs.x_full.at[warpgroup * x_stages + slot],
                )

        def read(step: jax.Array, i: int) -> jax.Array:
            slot = jax.lax.rem(step * pieces + i, x_stages)
            plgpu.barrier_wait(refs.x_full.at[warpgroup * x_stages + slot])
            return load(refs.x_smem.at[warpgroup, slot], registers).astype(jnp.float32)

        def normalised(step: jax.Array) -> list[jax.Array]:
            xs = []
            group = max(x_stages // 2, 1)
            for first in range(0, pieces, group):
                now = range(first, min(first + group, pieces))
                xs += [read(step, i) for i in now]
                plgpu.commit_smem()  # all have read
                copy([i + x_stages for i in now if i + x_stages < pieces], step)
                following = [i + x_stages for i in now if i + x_stages >= pieces]
                pl.when(step + 1 < steps)(functools.partial(copy, following, step))
            center = along_rows(mean(xs, c), _PIECE)
            ds = [x - center for x in xs]
            inverse = along_rows(jax.lax.rsqrt(mean([d * d for d in ds], c) + epsilon), _PIECE)
            return [(d * inverse).astype(dtype) for d in ds]

        def product(zs: list[jax.Array], first: jax.Array) -> jax.Array:
            def slot_of(k: int) -> jax.Array:
                return jax.lax.rem(first + k, _STAGES)

            def parts(k: int) -> list[tuple[jax.Array, Ref]]:
                ws = [refs.w_smem.at[slot_of(k), pl.ds(i, _PIECE)] for i in range(0, _STEP, _PIECE)]
                return list(zip(zs[k * len(ws) : (k + 1) * len(ws)], ws, strict=True))

            if interpret:  # it has no products of what is in registers
                y = jnp.zeros((ROWS, 2 * COLUMNS), jnp.float32)
                for k in range(w_steps):
                    ring.wait(slot_of(k))
                    for z, part in parts(k):
                        y += jnp.dot(z, part[...], preferred_element_type=jnp.float32)
                    plgpu.commit_smem()  # orders these reads before copies, as products are
                    ring.release(slot_of(k))
                return y

            def multiply(sums: Ref) -> jax.Array:
                for k in range(w_steps):
                    ring.wait(slot_of(k))
                    for z, part in parts(k):
                        plgpu.wgmma(sums, z, part)
                    if k:
                        plgpu.wgmma_wait(_STEP // _PIECE)  # the tensor cores always have the next step before them
                        ring.release(slot_of(k - 1))
                plgpu.wgmma_wait(0)
                ring.release(slot_of(w_steps - 1))
                return sums[...]

            return pl.run_scoped(multiply, plgpu.ACC((ROWS, 2 * COLUMNS), jnp.float32))

        def consume() -> None:
            copy(range(x_stages), jnp.int32(0))

            @pl.loop(0, steps)
            def _(step: jax.Array) -> None:
                at, slot = rows_of(step), refs.out_smem.at[warpgroup]
                factor = None
                if mask is not None:
                    factor = load(refs.mask.at[at], registers.reduce(1))
                    factor = factor.astype(jnp.float32)

                def masked(side: jax.Array) -> jax.Array:
                    if factor is None:
                        return side
                    f = along_rows(factor, COLUMNS)
                    return jnp.where(f == 0.0, 0.0, f * side)  # 0 times what is not finite would be NaN

                zs = normalised(step)

                @pl.loop(0, num_products)
                def _(j: jax.Array) -> None:
                    y = product(zs, (step * num_products + j) * w_steps)
                    shift = load(refs.b.at[j], registers.reduce(0))
                    y += jax.lax.broadcast_in_dim(shift, y.shape, [1])
                    gate_and_store(y, j, refs.sides, refs.gate, at, masked=masked, slot=slot, interpret=interpret)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            produce()

        @pl.when(warpgroup < _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            consume()

    sides, *gate = launch(
        trimul_project,
        dict(x=x, w=jnp.moveaxis(weights, -2, 0), b=b, mask=mask),
        out_types(batch, size, h, gates, dtype),
        dict(
            x_smem=tiled((_CONSUMERS, x_stages, ROWS, _PIECE), x.dtype, _PIECE * x.dtype.itemsize),
            w_smem=tiled((_STAGES, _STEP, 2 * COLUMNS), dtype, _PIECE * dtype.itemsize),
            out_smem=tiled((_CONSUMERS, COLUMNS, ROWS), dtype),
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
    return sides, gate[0] if gate else None
