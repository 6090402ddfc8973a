"""How rows leave registers without shared memory on their way, and how columns are added up there.

Arrays are (64, N) and lie as the tensor cores leave sums: a thread has the rows `lane / 4` of the first and of the
last eight of its warp, and in each eight columns two beside one another.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")

_ROWS, _WARPS = 64, 4
SUMMED = 64  # columns that `column_sums` takes


def _store_rows(ref: Ref, item: jax.Array, rows: pl.Slice, columns: pl.Slice, x: jax.Array) -> None:
    if ref.shape[1] % _ROWS == 0:
        ref.at[item, rows, columns][...] = x
        return

    @pl.loop(0, jnp.clip(ref.shape[1] - rows.start, 0, _ROWS))
    def _(i: jax.Array) -> None:
        ref.at[item, rows.start + i, columns][...] = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


@meaning(_store_rows)
def store_rows(ref: Ref, item: jax.Array, rows: pl.Slice, columns: pl.Slice, x: jax.Array) -> None:
    """Stores x (64, N), N in multiples of 16, in an item of `ref`, (items, rows, columns) in device memory.

    Rows past the end of an item are not stored: it may have any number of them. Neighbours exchange columns of 16
    bits, so that four threads write 32 bytes of a row that lie one after another, a sector of device memory.
    """
    splat = plgpu.Layout.WG_SPLAT
    kinds = plgpu.RefType(), plgpu.Layout.WGMMA, splat, splat
    store = plgpu.inline_mgpu(arg_types=kinds)(functools.partial(_emit_stores, ref.shape[1:], int(columns.start)))
    store(ref, x, jnp.asarray(item, jnp.int32), jnp.asarray(rows.start, jnp.int32))


def _emit_stores(shape: tuple[int, int], column: int, _: Any, ref: Any, x: Any, item: Any, row: Any) -> None:
    (rows, width), halves = shape, x.mlir_dtype.width == 16
    words = list(x.registers.flat)  # of two columns of the first rows, of the last rows, of the next columns
    itemsize, size = x.mlir_dtype.width // 8, len(words)
    llvm, integer = inline.utils.llvm, inline.utils.ir.IntegerType.get_signless(16 * itemsize)
    words = [llvm.bitcast(integer, word) for word in words]
    base, first, at, lane, warp = (f"${size + i}" for i in range(5))
    lines = []
    for half in range(2):
        there = 0
        if halves:
            for i in range(half, size, 4):
                lines.append(
                    f"""
                    selp.b32 a, ${i}, ${i + 2}, odd;
                    shfl.sync.bfly.b32 a, a, 1, 0x1f, 0xffffffff;
                    selp.b32 b, a, ${i}, odd;
                    selp.b32 a, ${i + 2}, a, odd;
                    @in{half} st.global.v2.b32 [to{half} + {there}], {{b, a}};"""
                )
                there += 2 * 8 * itemsize
        else:
            for i in range(half, size, 2):
                lines.append(f"@in{half} st.global.b64 [to{half} + {there}], ${i};")
                there += 8 * itemsize
    # Of 16 bits a thread stores two columns of its own and two of its neighbour: an odd one of the next eight.
    place = f"and.b32 b, {lane}, {2 if halves else 3}; mul.lo.u32 b, b, {2 * itemsize};"
    if halves:
        place += f"selp.b32 a, {8 * itemsize}, 0, odd; add.u32 b, a, b;"
    inline.asm(
        f"""
        {{
            .reg .pred odd, in0, in1; .reg .b32 a, b; .reg .b64 to0, to1, more;
            and.b32 a, {lane}, 1;
            setp.eq.u32 odd, a, 1;
            {place}
            cvt.u64.u32 more, b;
            shr.u32 b, {lane}, 2;
            mad.lo.u32 b, {warp}, 16, b;
            add.u32 b, b, {at};
            setp.lt.u32 in0, b, {rows};
            add.u32 a, b, 8;
            setp.lt.u32 in1, a, {rows};
            mad.lo.u32 b, {first}, {rows}, b;
            mad.wide.u32 to0, b, {width * itemsize}, {base};
            add.u64 to0, to0, more;
            add.u64 to0, to0, {column * itemsize};
            add.u64 to1, to0, {8 * width * itemsize};
            {"".join(lines)}
        }}""",
        ",".join([{16: "r", 32: "l"}[8 * itemsize]] * size + ["l", "r", "r", "r", "r"]),
        *words,
        inline.utils.memref_ptr(ref),
        item.registers.item(),
        row.registers.item(),
        *inline.lane_and_warp(),
    )


def _column_sums(x: jax.Array) -> jax.Array:
    sums = jnp.sum(x.reshape(_WARPS, -1, SUMMED), axis=1)
    return sums.reshape(-1)


@meaning(_column_sums)
def column_sums(x: jax.Array) -> jax.Array:
    """The sums of the columns of x (64, 64), float32, over the 16 rows of each warp: (4, 64) as a vector.

    Threads hand over half of their sums at a time, until a thread has the sums of its own two columns.
    """
    layout = plgpu.Layout.WG_STRIDED((_WARPS * SUMMED,), vec_size=2)
    result = plgpu.ShapeDtypeStruct((_WARPS * SUMMED,), jnp.float32, layout=layout)
    sums: jax.Array = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)(_emit_sums)(x)
    return sums


def _emit_sums(_: Any, x: Any) -> Any:
    arith, registers = inline.utils.arith, list(x.registers.flat)
    sums = [arith.addf(a, b) for a, b in zip(registers[::2], registers[1::2], strict=True)]
    lane, _ = inline.lane_and_warp()
    for distance in (16, 8, 4):
        is_upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, inline.i32(distance)), inline.i32(0))
        half = len(sums) // 2
        lower, upper = sums[:half], sums[half:]
        kept = [arith.select(is_upper, b, a) for a, b in zip(lower, upper, strict=True)]
        given = [arith.select(is_upper, a, b) for a, b in zip(lower, upper, strict=True)]
        sums = [arith.addf(a, inline.utils.shfl_bfly(b, distance)) for a, b in zip(kept, given, strict=True)]
    # The thread has the columns 2 * lane and 2 * lane + 1.
    layout = plgpu.Layout.WG_STRIDED((_WARPS * SUMMED,), vec_size=2).to_mgpu()
    return _arrays.FragmentedArray(_registers=np.array(sums, dtype=object), _layout=layout, _is_signed=None)
