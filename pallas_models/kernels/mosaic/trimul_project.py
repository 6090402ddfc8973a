"""Projections of the triangle multiplicative update with their gates, for Hopper GPUs and up to 128 channels.

Blocks stay on their multiprocessor with all of the weights in shared memory. Each of their warpgroups takes 64
positions at a time, normalises them in registers, where the tensor cores take them from, and writes projections
channel by channel, which is how the product over third positions reads them.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic import _plgpu as plgpu
from pallas_models.kernels.mosaic._common import Ref, interpreter_params, load, tiled
from pallas_models.kernels.triton._common import local_gpu

_WARPGROUPS = 2
ROWS = 64  # positions of a warpgroup
COLUMNS = 64  # of projections, and as many of their gates, in one product
PIECE = 32  # channels of x in one copy
_SHARED_MEMORY = 226 * 1024  # bytes of a block, less what barriers take


def unsupported(x: jax.Array | jax.ShapeDtypeStruct, w: jax.Array, w_gate: jax.Array) -> str | None:
    """Why `project` does not serve a call; None if it does."""
    _, size, c = x.shape
    h, gates = w.shape[2], w_gate.shape[1]
    if jax.__version_info__ < (0, 11):
        return f"needs JAX 0.11 or newer to store what it transposes, not {jax.__version__}"
    if w.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes weights in float16 and bfloat16, not {w.dtype}"
    if size % ROWS:
        return f"takes positions in multiples of {ROWS}, not {size}"
    if c not in (64, 96, 128) or h % (COLUMNS // 2):
        return f"takes 64, 96 or 128 channels and hidden channels in multiples of {COLUMNS // 2}, not {c} and {h}"
    weights = products_of(h, gates) * c * 2 * COLUMNS * w.dtype.itemsize
    others = _WARPGROUPS * ROWS * ((c - PIECE) * x.dtype.itemsize + COLUMNS * w.dtype.itemsize)
    if weights + others > _SHARED_MEMORY:
        return f"does not fit {weights} bytes of weights into shared memory"
    return None


def products_of(h: int, gates: int) -> int:
    """Products of `2 * COLUMNS` columns that the projections, their gates and the out gate take."""
    return 2 * h // COLUMNS + pl.cdiv(gates, 2 * COLUMNS)


def arranged(sides: jax.Array, gate: jax.Array) -> jax.Array:
    """Halves of sides (..., 4, H) and gate (..., G) in blocks of one product's columns: (..., products, 128)."""
    lead = sides.shape[:-2]
    sides = sides.reshape(*lead, 2, 2, -1).swapaxes(-3, -2)  # projections of left and right, then their gates
    sides = sides.reshape(*lead, 2, -1, COLUMNS).swapaxes(-3, -2)
    gate = jnp.pad(gate, [(0, 0)] * len(lead) + [(0, -gate.shape[-1] % (2 * COLUMNS))])
    blocks = [part.reshape(*lead, -1, 2 * COLUMNS) for part in (sides, gate)]
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
    batch: int, size: int, h: int, gates: int, dtype: DTypeLike, *, gate_after: bool
) -> list[jax.ShapeDtypeStruct]:
    """What `project` returns: left and right, and the gate."""
    return [
        jax.ShapeDtypeStruct((batch, 2 * h, size), dtype),
        jax.ShapeDtypeStruct((batch, size, gates) if gate_after else (batch, gates, size), dtype),
    ]


def along_rows(v: jax.Array, columns: int) -> jax.Array:
    """A value for each of `ROWS` positions as that many equal columns."""
    return jax.lax.broadcast_in_dim(v, (ROWS, columns), [0])


def store(y: jax.Array, slot: Ref, target: Ref, *, transposed: bool, interpret: bool) -> None:
    """Stores y, or its transpose, by way of a slot in shared memory, which the one before has to leave first."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    y = y.astype(slot.dtype)
    if not transposed:
        slot[...] = y
    elif interpret:  # JAX 0.10's interpreter has no transposed references
        slot[...] = y.T
    else:
        slot.T[...] = y
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slot, target)


def project(
    x: jax.Array,
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    *,
    gate_after: bool,
    epsilon: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Left and right, and the gate, for x (B, M, C), mask (B, M), w (C, 4, H), bias (4, H) and w_gate (C, G).

    Returns:
      (B, 2 H, M), left and right, masked; and the gate, (B, G', M) or, where `gate_after`, (B, M, G'), G' >= G.
      Both in the dtype of w.
    """
    batch, size, c = x.shape
    h, dtype = w.shape[2], w.dtype
    num_products, side_products, pieces = products_of(h, w_gate.shape[1]), 2 * h // COLUMNS, c // PIECE
    gates = 2 * COLUMNS * (num_products - side_products)
    weights = jnp.moveaxis(arranged(w, w_gate), -2, 0)
    vectors = jnp.concatenate([norm_scale, norm_bias])
    biases = arranged_biases(bias, b_gate, h, w_gate.shape[1])
    if biases is not None:
        vectors = jnp.concatenate([vectors, biases.reshape(-1)])
    # Two copies, read by turns: what stayed the same the compiler would keep in registers that it lacks.
    operands = dict(x=x, mask=mask, vectors=jnp.stack([vectors, vectors]), w=weights)
    operands = {name: operand for name, operand in operands.items() if operand is not None}
    row_blocks = size // ROWS
    tiles = batch * row_blocks
    programs = min(2 if interpret else local_gpu().num_cores, pl.cdiv(tiles, _WARPGROUPS))
    stride = programs * _WARPGROUPS
    ring = pieces - 1  # one more piece waits in registers
    registers = plgpu.Layout.WGMMA

    def trimul_project(*refs: Ref) -> None:
        inputs = dict(zip(operands, refs[: len(operands)], strict=True))
        sides_ref, gate_ref, w_smem, x_smem, out_smem, x_barriers, w_barrier = refs[len(operands) :]
        warpgroup = jax.lax.axis_index("warpgroup")
        first = jax.lax.axis_index("block") * _WARPGROUPS + warpgroup
        steps = jax.lax.div(tiles - first + stride - 1, stride)
        put = functools.partial(store, slot=out_smem.at[warpgroup], interpret=interpret)

        def rows_of(step: jax.Array) -> tuple[jax.Array, pl.Slice]:
            tile = jnp.minimum(first + step * stride, tiles - 1)  # what is copied ahead at the end is not used
            start = pl.multiple_of(jax.lax.rem(tile, row_blocks) * ROWS, ROWS)
            return jax.lax.div(tile, row_blocks), pl.Slice(start, ROWS)

        def copy(piece: jax.Array) -> None:
            slot = jax.lax.rem(piece, ring)
            item, rows = rows_of(jax.lax.div(piece, pieces))
            channels = pl.ds(jax.lax.rem(piece, pieces) * PIECE, PIECE)
            plgpu.copy_gmem_to_smem(
                inputs["x"].at[item, rows, channels],
                x_smem.at[warpgroup, slot],
                x_barriers.at[warpgroup * ring + slot],
            )

        def read(piece: jax.Array) -> jax.Array:
            slot = jax.lax.rem(piece, ring)
            plgpu.barrier_wait(x_barriers.at[warpgroup * ring + slot])
            return load(x_smem.at[warpgroup, slot], registers, interpret=interpret).astype(jnp.float32)

        def total(parts: list[jax.Array]) -> jax.Array:
            return functools.reduce(operator.add, parts)

        def vector(step: jax.Array, start: int, columns: int) -> jax.Array:
            ref = inputs["vectors"].at[jax.lax.rem(step, 2), pl.ds(start, columns)]
            return jax.lax.broadcast_in_dim(
                load(ref, registers.reduce(0), interpret=interpret), (ROWS, columns), [1]
            )

        def fetch_mask(step: jax.Array) -> jax.Array | None:
            if mask is None:
                return None
            item, rows = rows_of(step)
            factor = load(inputs["mask"].at[item, rows], registers.reduce(1), interpret=interpret)
            return factor.astype(jnp.float32)

        def normalised(step: jax.Array, xs: list[jax.Array], factor: jax.Array | None) -> list[jax.Array]:
            mean = total([jnp.sum(x, axis=1) for x in xs]) * (1.0 / c)
            ds = [x - along_rows(mean, PIECE) for x in xs]
            inverse = jax.lax.rsqrt(total([jnp.sum(d * d, axis=1) for d in ds]) * (1.0 / c) + epsilon)
            zs = []
            for i, d in enumerate(ds):
                scale, shift = (vector(step, j * c + i * PIECE, PIECE) for j in range(2))
                z = d * along_rows(inverse, PIECE) * scale + shift
                if factor is not None:  # 0 times what is not finite would be NaN
                    z = jnp.where(along_rows((factor != 0.0) | (inverse > 0.0), PIECE), z, 0.0)
                zs.append(z.astype(dtype))
            return zs

        def product(step: jax.Array, zs: list[jax.Array], j: int) -> list[jax.Array]:
            ws = [w_smem.at[j, pl.ds(i * PIECE, PIECE)] for i in range(pieces)]

            def multiply(sums: Ref) -> jax.Array:
                for z, w in zip(zs, ws, strict=True):
                    plgpu.wgmma(sums, z, w)
                return sums[...]

            if interpret:  # it has no products of what is in registers
                y = total(
                    [jnp.dot(z, w[...], preferred_element_type=jnp.float32) for z, w in zip(zs, ws, strict=True)]
                )
            else:
                y = pl.run_scoped(multiply, plgpu.ACC((ROWS, 2 * COLUMNS), jnp.float32))
            if biases is not None:
                y += vector(step, 2 * c + j * 2 * COLUMNS, 2 * COLUMNS)
            return [y[:, :COLUMNS], y[:, COLUMNS:]]

        def tile(step: jax.Array, carry: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
            held, factor = carry
            piece = step * pieces
            item, rows = rows_of(step)
            xs = [held, *(read(piece + i) for i in range(1, pieces))]
            plgpu.commit_smem()  # all have read
            for i in range(ring):
                copy(piece + pieces + i)
            following_factor = fetch_mask(step + 1)
            zs = normalised(step, xs, factor)
            for j in range(num_products):
                projection, g = product(step, zs, j)
                if j < side_products:
                    y = projection * (jnp.tanh(g) + 1.0)
                    if factor is not None:
                        y *= along_rows(factor, COLUMNS)
                    put(y, target=sides_ref.at[item, pl.ds(j * COLUMNS, COLUMNS), rows], transposed=True)
                else:
                    start = (j - side_products) * 2 * COLUMNS
                    for i, y in enumerate((projection, g)):
                        channels = pl.ds(start + i * COLUMNS, COLUMNS)
                        at = (item, rows, channels) if gate_after else (item, channels, rows)
                        put(0.5 * jnp.tanh(y) + 0.5, target=gate_ref.at[at], transposed=not gate_after)
                if j == 0:
                    held = read(piece + pieces)
                if j == 1:  # after a store, before which all have read
                    copy(piece + pieces + ring)
            return held, following_factor

        @pl.when((warpgroup == 0) & (steps > 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(inputs["w"], w_smem, w_barrier)

        @pl.when(steps > 0)
        def _() -> None:
            for i in range(ring):
                copy(jnp.int32(i))
            held = read(jnp.int32(0))
            plgpu.commit_smem()
            copy(jnp.int32(ring))
            plgpu.barrier_wait(w_barrier)
            jax.lax.fori_loop(0, steps, tile, (held, fetch_mask(jnp.int32(0))))
            for i in range(1, pieces):  # no copy may arrive after the end
                plgpu.barrier_wait(x_barriers.at[warpgroup * ring + jax.lax.rem(steps * pieces + i, ring)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    sides, gate = plgpu.kernel(
        trimul_project,
        out_type=out_types(batch, size, h, gates, dtype, gate_after=gate_after),
        grid=(programs,),
        grid_names=("block",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            tiled((num_products, c, 2 * COLUMNS), dtype, PIECE * dtype.itemsize),
            tiled((_WARPGROUPS, ring, ROWS, PIECE), x.dtype, PIECE * x.dtype.itemsize),
            tiled((_WARPGROUPS, COLUMNS, ROWS), dtype),
            plgpu.Barrier(num_barriers=_WARPGROUPS * ring),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpreter_params() if interpret else None,
    )(*operands.values())
    return sides, gate
