"""Projections of the triangle multiplicative update with their gates, for Hopper GPUs and up to 128 channels.

CTAs stay on their multiprocessor with all of the weights in shared memory. One warpgroup of each normalises 64
positions at a time while the next are copied; the others share their products, gate them and write them channel by
channel, which is how the product over third positions reads them.
"""

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, load, tiled
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.target import Target

ROWS = 64  # positions that are normalised and multiplied at a time
COLUMNS = 64  # of projections, and as many of their gates, in one product
_MULTIPLIERS = 3  # warpgroups that multiply
_SHARED_MEMORY = 223 * 1024  # bytes of a CTA, less what barriers, sums over rows and alignment take


def unsupported(form: Projection[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `project` does not serve a call; None if it does."""
    x, c, h, gates = form.x, form.x.shape[2], form.hidden, form.gates
    if reason := unsupported_by_both(form):
        return reason
    if c not in (64, 96, 128) or h % (COLUMNS // 2):
        return f"takes 64, 96 or 128 channels and hidden channels in multiples of {COLUMNS // 2}, not {c} and {h}"
    if not _staged(c, products_of(h, gates), x.dtype):
        return f"does not fit weights of {c} channels for {2 * h} projections and {gates} gates into shared memory"
    return None


def unsupported_by_both(form: Projection[jax.ShapeDtypeStruct]) -> str | None:
    """Why neither this kernel nor `trimul_project_wide` serves a call; None if one of them may."""
    if jax.__version_info__ < (0, 11):
        return f"needs JAX 0.11 or newer to store what it transposes, not {jax.__version__}"
    if form.w.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {form.w.dtype}"
    return None


def _staged(c: int, num_products: int, dtype: DTypeLike) -> int:
    """Columns of a product that fit into shared memory on their way out, x being of `dtype`; 0 if none."""
    others = num_products * c * 2 * COLUMNS * 2 + ROWS * c * (2 + jnp.dtype(dtype).itemsize) + 2 * c * 4
    room = (_SHARED_MEMORY - others) // (_MULTIPLIERS * ROWS * 2)
    return next((columns for columns in (COLUMNS, COLUMNS // 2) if columns <= room), 0)


def products_of(h: int, gates: int) -> int:
    """Products of `2 * COLUMNS` columns that the projections, their gates and the out gate take."""
    return 2 * h // COLUMNS + pl.cdiv(gates, 2 * COLUMNS)


def arranged(sides: jax.Array, gate: jax.Array) -> jax.Array:
    """Halves of sides (..., 4, H) and gate (..., G) in blocks of one product's columns: (..., products, 128)."""
    lead = sides.shape[:-2]
    sides = sides.reshape(*lead, 2, 2, -1).swapaxes(-3, -2)  # projections of left and right, then their gates
    sides = sides.reshape(*lead, 2, -1, COLUMNS).swapaxes(-3, -2)
    gate = jnp.pad(gate, [(0, 0)] * len(lead) + [(0, -gate.shape[-1] % (2 * COLUMNS))])
    blocks = [
        part.reshape(*lead, part.size // math.prod(lead) // (2 * COLUMNS), 2 * COLUMNS) for part in (sides, gate)
    ]
    return 0.5 * jnp.concatenate(blocks, axis=-2)


def arranged_biases(bias: jax.Array | None, b_gate: jax.Array | None, h: int, gates: int) -> jax.Array | None:
    """`arranged` of bias (4, h) and b_gate (gates,), zeros for the one that is None; None if both are."""
    if bias is None and b_gate is None:
        return None
    return arranged(
        jnp.zeros((4, h)) if bias is None else bias,
        jnp.zeros(gates) if b_gate is None else b_gate,
    )


def out_types(
    batch: int, size: int, h: int, gates: int, dtype: DTypeLike
) -> dict[str, jax.ShapeDtypeStruct | None]:
    """What `project` returns: left and right, and the gate."""
    rows, width = {"sides": 2 * h, "gate": gates}, ROWS * pl.cdiv(size, ROWS)
    return {name: jax.ShapeDtypeStruct((batch, n, width), dtype) if n else None for name, n in rows.items()}


def whole_mask(mask: jax.Array | None, batch: int, size: int, dtype: DTypeLike) -> jax.Array | None:
    """The mask (B, M) in whole tiles of positions, 0 past the end; None where it would be 1 everywhere."""
    if mask is None:
        if size % ROWS == 0:
            return None
        mask = jnp.ones((batch, size), dtype)
    return jnp.pad(mask, ((0, 0), (0, -size % ROWS)))


def along_rows(v: jax.Array, columns: int) -> jax.Array:
    """A value for each of `ROWS` positions as that many equal columns."""
    return jax.lax.broadcast_in_dim(v, (ROWS, columns), [0])


def mean(parts: list[jax.Array], c: int) -> jax.Array:
    """Mean over the c columns that `parts` have side by side."""
    return jnp.sum(functools.reduce(operator.add, parts), axis=1) * (1.0 / c)


def store(
    y: jax.Array,
    slot: Ref,
    target: Ref,
    *,
    interpret: bool,
    copy: Callable[[Ref, Ref, Callable[[Ref], Ref]], None] | None = None,
) -> None:
    """Stores the transpose of y, as many columns at a time as a slot of shared memory holds rows.

    `copy(slot, target, at)` copies a slot to `at(target)`; on this GPU when None.
    """
    y = y.astype(slot.dtype)
    for start in range(0, y.shape[1], slot.shape[0]):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored before has to leave first
        part = y[:, start : start + slot.shape[0]]
        if interpret:  # JAX 0.10's interpreter has no transposed references
            slot[...] = part.T
        else:
            slot.T[...] = part
        plgpu.commit_smem()
        rows = pl.Slice(start, slot.shape[0])
        if copy is None:
            plgpu.copy_smem_to_gmem(slot, target.at[rows])
        else:
            copy(slot, target, functools.partial(_rows, rows=rows))


def _rows(ref: Ref, rows: pl.Slice) -> Ref:
    return ref.at[rows]


def positions(tile: jax.Array, batch: int, size: int) -> tuple[jax.Array, pl.Slice]:
    """Which item of the batch, and which `ROWS` of its `size` positions a tile has; past the end, the last has.

    The last positions of an item may lie past its end, where copies read zeros.
    """
    per_item = pl.cdiv(size, ROWS)
    tile = jnp.minimum(tile, batch * per_item - 1)
    start = pl.multiple_of(jax.lax.rem(tile, per_item) * ROWS, ROWS)
    return jax.lax.div(tile, per_item), pl.Slice(start, ROWS)


def gate_and_store(
    y: jax.Array,
    j: jax.Array,
    sides_ref: Ref,
    gate_ref: Ref | None,
    at: tuple[jax.Array, pl.Slice],
    *,
    masked: Callable[[jax.Array], jax.Array],
    slot: Ref,
    interpret: bool,
    peers: Peers | None = None,
) -> None:
    """Gates product j of some positions and stores it.

    Args:
      y: (ROWS, 2 * COLUMNS) in float32, halves: projections and then their gates, or columns of the out gate.
      sides_ref: (B, 2 H, M), which the first products have.
      gate_ref: (B, G, M), which the others have; None where there are none.
      at: item and positions.
      masked: what to make of gated projections, (ROWS, COLUMNS).
      slot: shared memory of this warpgroup, as `store` takes it.
      peers: GPUs that get an equal part of the sides each, and have as many of each other.
    """
    item, rows = at
    side_products = sides_ref.shape[1] // COLUMNS
    halves = y[:, :COLUMNS], y[:, COLUMNS:]

    @pl.when(j < side_products)
    def _() -> None:
        side = masked(halves[0] * (jnp.tanh(halves[1]) + 1.0))
        if peers is None:
            channels = pl.ds(j * COLUMNS, COLUMNS)
            store(side, slot, sides_ref.at[item, channels, rows], interpret=interpret)
            return
        each = side_products // peers.count

        def copy(slot: Ref, sides: Ref, at: Callable[[Ref], Ref]) -> None:
            def there(sides: Ref) -> Ref:
                channels = pl.ds((peers.index * each + jax.lax.rem(j, each)) * COLUMNS, COLUMNS)
                return at(sides.at[item, channels, rows])

            peers.store(slot, sides, jax.lax.div(j, each), there)

        store(side, slot, sides_ref, interpret=interpret, copy=copy)

    if gate_ref is None:
        return

    @pl.when(j >= side_products)
    def _() -> None:
        for i, half in enumerate(halves):
            channels = pl.ds(((j - side_products) * 2 + i) * COLUMNS, COLUMNS)
            store(0.5 * jnp.tanh(half) + 0.5, slot, gate_ref.at[item, channels, rows], interpret=interpret)


def project(
    form: Projection[jax.Array],
    *,
    peers: Peers | None = None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Left and right, and the gate, for x (B, M, C), mask (B, M), w (C, 4, H), bias (4, H) and w_gate (C, G).

    M is a multiple of 8. With `peers` left and right are split by channels into as many parts as there are GPUs,
    and part i is stored on GPU i. Those here are what all GPUs stored, one after another.

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
    operands = dict(
        x=x,
        mask=mask,
        norm_scale=norm_scale,
        norm_bias=norm_bias,
        w=jnp.moveaxis(arranged(w, w_gate), -2, 0),
        b=arranged_biases(bias, b_gate, h, w_gate.shape[1]),
    )
    tiles = batch * pl.cdiv(size, ROWS)
    num_ctas = min(2 if interpret else target.num_cores, tiles)
    registers = plgpu.Layout.WGMMA
    piece = 64 if c % 64 == 0 else 32  # channels of a row of a tile of shared memory
    pieces = [pl.Slice(i, piece) for i in range(0, c, piece)]

    def trimul_project(refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(tiles - cta + num_ctas - 1, num_ctas)

        def rows_of(step: jax.Array) -> tuple[jax.Array, pl.Slice]:
            return positions(cta + step * num_ctas, batch, size)

        def copy(step: jax.Array) -> None:
            item, rows = rows_of(step)
            for i, channels in enumerate(pieces):
                plgpu.copy_gmem_to_smem(refs.x.at[item, rows, channels], refs.x_smem.at[i], refs.x_full)

        def read() -> list[jax.Array]:
            plgpu.barrier_wait(refs.x_full)
            return [load(refs.x_smem.at[i], registers) for i in range(len(pieces))]

        def fetch_mask(step: jax.Array) -> jax.Array | None:
            if mask is None:
                return None
            item, rows = rows_of(step)
            return load(refs.mask.at[item, rows], registers.reduce(1))

        def vector(i: int, channels: pl.Slice) -> jax.Array:
            v = load(refs.norm_smem.at[i, channels], registers.reduce(0))
            return jax.lax.broadcast_in_dim(v, (ROWS, piece), [1])

        def normalised(xs: list[jax.Array], factor: jax.Array | None) -> list[jax.Array]:
            xs = [x.astype(jnp.float32) for x in xs]
            center = along_rows(mean(xs, c), piece)
            ds = [x - center for x in xs]
            inverse = jax.lax.rsqrt(mean([d * d for d in ds], c) + epsilon)
            if factor is not None:  # 0 times what is not finite would be NaN
                kept = (factor != 0.0) | (inverse > 0.0)
                inverse = jnp.where(kept, inverse, 0.0)
                ds = [jnp.where(along_rows(kept, piece), d, 0.0) for d in ds]
            inverse = along_rows(inverse, piece)
            return [
                (d * inverse * vector(0, channels) + vector(1, channels)).astype(dtype)
                for d, channels in zip(ds, pieces, strict=True)
            ]

        def normalise(
            step: jax.Array, carry: tuple[list[jax.Array], jax.Array | None]
        ) -> tuple[list[jax.Array], jax.Array | None]:
            xs, factor = carry
            following = fetch_mask(step + 1)
            if factor is not None:
                factor = factor.astype(jnp.float32)
            zs = normalised(xs, factor)
            xs = read()
            plgpu.commit_smem()  # all have read
            copy(step + 2)

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_wait(refs.z_free)

            for channels, z in zip(pieces, zs, strict=True):
                refs.z_smem[:, channels] = z
            if factor is not None:
                refs.factor_smem[...] = factor
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.z_full)
            return xs, following

        def multiply(step: jax.Array) -> None:
            at, slot = rows_of(step), refs.out_smem.at[warpgroup]
            # Products go round; where a step ends with one of them, the next one goes on.
            first = jax.lax.rem(warpgroup + step * (-num_products % _MULTIPLIERS), _MULTIPLIERS)
            count = jax.lax.div(num_products - first + _MULTIPLIERS - 1, _MULTIPLIERS)
            plgpu.barrier_wait(refs.z_full)
            factor = None
            if mask is not None:
                factor = load(refs.factor_smem, registers.reduce(1))

            def masked(side: jax.Array) -> jax.Array:
                return side if factor is None else side * along_rows(factor, COLUMNS)

            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                j = first + i * _MULTIPLIERS

                def product(sums: Ref) -> jax.Array:
                    plgpu.wgmma(sums, refs.z_smem, refs.w_smem.at[j])
                    plgpu.wgmma_wait(0)
                    return sums[...]

                y = pl.run_scoped(product, plgpu.ACC((ROWS, 2 * COLUMNS), jnp.float32))

                @pl.when(i == count - 1)
                def _() -> None:
                    plgpu.barrier_arrive(refs.z_free)

                if refs.b is not None:
                    shift = load(refs.b.at[j], registers.reduce(0))
                    y += jax.lax.broadcast_in_dim(shift, y.shape, [1])
                gate_and_store(
                    y, j, refs.sides, refs.gate, at, masked=masked, slot=slot, interpret=interpret, peers=peers
                )

            @pl.when(count == 0)
            def _() -> None:
                plgpu.barrier_arrive(refs.z_free)

        @pl.when(warpgroup == _MULTIPLIERS)
        def _() -> None:
            plgpu.set_max_registers(200, action="increase")
            plgpu.copy_gmem_to_smem(refs.norm_scale, refs.norm_smem.at[0], refs.weights_full)
            plgpu.copy_gmem_to_smem(refs.norm_bias, refs.norm_smem.at[1], refs.weights_full)
            plgpu.copy_gmem_to_smem(refs.w, refs.w_smem, refs.weights_full)
            copy(jnp.int32(0))
            xs = read()
            plgpu.commit_smem()  # all have read
            copy(jnp.int32(1))
            plgpu.barrier_wait(refs.weights_full)
            jax.lax.fori_loop(0, steps, normalise, (xs, fetch_mask(jnp.int32(0))))
            plgpu.barrier_wait(refs.x_full)  # no copy may arrive after the end, and no round be left
            plgpu.barrier_wait(refs.z_free)

        @pl.when(warpgroup < _MULTIPLIERS)
        def _() -> None:
            plgpu.set_max_registers(104, action="decrease")
            plgpu.barrier_wait(refs.weights_full)
            pl.loop(0, steps)(multiply)
            if peers is None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                peers.finish(refs, storing=_MULTIPLIERS, waits=warpgroup == 0)

    sides, *gate = launch(
        trimul_project,
        operands,
        out_types(batch, size, h, gates, dtype),
        dict(
            x_smem=tiled((len(pieces), ROWS, piece), x.dtype, min(ROW_BYTES, piece * x.dtype.itemsize)),
            z_smem=tiled((ROWS, c), dtype, piece * dtype.itemsize),
            factor_smem=plgpu.SMEM((ROWS,), jnp.float32),
            norm_smem=plgpu.SMEM((2, c), jnp.float32),
            w_smem=tiled((num_products, c, 2 * COLUMNS), dtype, piece * dtype.itemsize),
            out_smem=tiled((_MULTIPLIERS, _staged(c, num_products, x.dtype), ROWS), dtype),
            x_full=plgpu.Barrier(num_arrivals=len(pieces)),
            z_full=plgpu.Barrier(),
            z_free=plgpu.Barrier(num_arrivals=_MULTIPLIERS),
            weights_full=plgpu.Barrier(num_arrivals=3),
            **({} if peers is None else peers.scratch_types),
        ),
        name="trimul_project",
        num_ctas=num_ctas,
        num_warpgroups=_MULTIPLIERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return sides, gate[0] if gate else None
