"""Primitives of kernels: a GPU runs them, elsewhere their meanings run, and both are held to the same values.

Three of Mosaic's modules have files of their own: products, functions of numbers, the exchange of a cluster.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_models import ops
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import PRIMITIVES
from pallas_models.kernels.mosaic.common import memory
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_sums import Exchange
from pallas_models.kernels.mosaic.common.device_sums import add_to_device
from pallas_models.kernels.mosaic.common.elementwise import elementwise, load_vector
from pallas_models.kernels.mosaic.common.interpreter import cluster_size
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_copies import copy_back, copy_rows
from pallas_models.kernels.mosaic.common.row_stores import SUMMED, column_sums, store_rows
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.kernels.triton import common as triton
from pallas_models.kernels.triton.attention_blocks import biased, exp2_of
from pallas_models.kernels.triton.softmax import _row_sums
from pallas_models.kernels.triton.trimul_project import tanh
from parity.ops.test_lowering import HOPPER
from parity.support.common import (
    MOSAIC,
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    array,
    assert_close,
    cuda_device,
    float64,
    normal,
)
from parity.support.primitives import all_called
from parity.support.tolerances import ROUNDED, products

Arrays = dict[str, jax.Array]


def lowered(call: Callable[..., Any], arrays: Arrays) -> str:
    """The program around compiled kernels, for an H200."""
    with cuda_device(*HOPPER):
        traced = jax.jit(functools.partial(call, interpret=False)).trace(arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_every_primitive_has_a_test():
    assert ops.matmul and len(PRIMITIVES) > 25
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    tested = {
        name for text in texts for names in re.findall(r"all_called\((.*)\)", text) for name in names.split(", ")
    }
    modules = tuple(f"{name[1:-1]}." for name in tested)
    assert [name for name in PRIMITIVES if not name.startswith(modules)] == []


# Triton: functions of x, y and z, (16, 256) in float32, from -2 to 2.
class Function(NamedTuple):
    """What a kernel computes, the same in float64, and the error that it may make in relation to `size`."""

    call: Callable[..., jax.Array]
    exact: Callable[..., Any]
    error: float
    size: Callable[..., Any] | None = None  # the result, if it is not stated


# The GPU's exponential is good to 2^-22, XLA's for a CPU to about 2^-24 |x|. Arguments up to 8 that are a product
# and a sum are off by 2^-20 at most, which moves the result by as much.
EXPONENTIAL = 2.0**-19
FACTOR = float(np.float32(0.7))
FUNCTIONS = (
    Function(triton.fma, lambda x, y, z: x * y + z, 2.0**-23, lambda x, y, z: abs(x * y) + abs(z)),
    Function(lambda x, y, z: triton.exp2(4.0 * x), lambda x, y, z: np.exp2(4 * x), EXPONENTIAL),
    Function(lambda x, y, z: exp2_of(x, FACTOR, y), lambda x, y, z: np.exp2(FACTOR * x + y), EXPONENTIAL),
    Function(exp2_of, lambda x, y, z: np.exp2(x * y + z), EXPONENTIAL),
    *(
        Function(
            lambda x, y, z, dtype=dtype: biased(x, FACTOR, y.astype(dtype)),
            lambda x, y, z, dtype=dtype: FACTOR * x + np.asarray(y, dtype).astype(float),
            2.0**-23,
            lambda x, y, z: abs(FACTOR * x) + abs(y) * (1 + 2.0**-8),
        )
        for dtype in ("float32", "float16", jnp.bfloat16)
    ),
    Function(lambda x, y, z: tanh(x), lambda x, y, z: np.tanh(x), 2.0**-10),  # it has 11 bits
    Function(lambda x, y, z: _row_sums(x * x), lambda x, y, z: np.sum(x * x, 1), 256 * 2.0**-24),
)


def functions_kernel(x_ref: Ref, y_ref: Ref, z_ref: Ref, *refs: Ref) -> None:
    operands = [triton.load(ref.at[:, :]) for ref in (x_ref, y_ref, z_ref)]
    for ref, function in zip(refs, FUNCTIONS, strict=True):
        triton.store(ref.at[(slice(None),) * ref.ndim], function.call(*operands))


def functions(arrays: Arrays, *, interpret: bool) -> list[jax.Array]:
    exact = [np.shape(function.exact(*(np.zeros(x.shape) for x in arrays.values()))) for function in FUNCTIONS]
    call = triton.launch(
        functions_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in exact],
        grid=(1,),
        num_warps=4,
        interpret=interpret,
        name="functions",
    )
    results: list[jax.Array] = call(*arrays.values())
    return results


def test_functions_of_triton():
    rng = np.random.default_rng(72)
    arrays = {name: array(rng.uniform(-2, 2, (16, 256)), "float32") for name in "xyz"}
    with all_called("triton"):
        results = jax.jit(functools.partial(functions, interpret=not ON_GPU))(arrays)
    operands = [float64(x) for x in arrays.values()]
    for function, out in zip(FUNCTIONS, results, strict=True):
        expected = function.exact(*operands)
        size = abs(expected) if function.size is None else function.size(*operands)
        assert np.all(abs(float64(out) - expected) <= function.error * size), FUNCTIONS.index(function)


def test_functions_of_triton_lower():
    arrays = {name: jax.ShapeDtypeStruct((16, 256), jnp.float32) for name in "xyz"}
    assert TRITON_CALL in lowered(functions, arrays)


# Mosaic: a tile of shared memory in one warpgroup's registers, and its transpose, stored and loaded as such.
M, N = 64, 128


def affine(x: jax.Array, index: jax.Array, scale: jax.Array, shift: jax.Array) -> Any:
    return ((x.astype(jnp.float32) * scale + index * 0.125 + shift).astype(x.dtype),)


def transposing(refs: Refs) -> None:
    layout = plgpu.Layout.WGMMA
    for name in ("x", "scale", "shift"):
        plgpu.copy_gmem_to_smem(getattr(refs, name), getattr(refs, f"{name}_tile"), refs.full)
    plgpu.barrier_wait(refs.full)
    x = memory.load(refs.x_tile, layout)
    memory.store(refs.x_again, x)
    index = memory.layout_cast(memory.iota((M, N), 1, layout).astype(jnp.float32), layout)
    vectors = dict(rows=[load_vector(refs.scale_tile, 0)], columns=[load_vector(refs.shift_tile, 1)])
    (y,) = elementwise(affine, x, index, **vectors)
    memory.commit_reads()
    memory.meet(refs)
    memory.store_transposed(refs.o_tile, y)
    refs.t_tile[...] = memory.load_transposed(refs.x_tile, layout)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.o_tile, refs.o)
    plgpu.copy_smem_to_gmem(refs.t_tile, refs.t)
    plgpu.wait_smem_to_gmem(0)


def transposed(arrays: Arrays, *, interpret: bool) -> list[jax.Array]:
    dtype = arrays["x"].dtype
    return launch(
        transposing,
        arrays,
        dict.fromkeys("ot", jax.ShapeDtypeStruct((N, M), dtype)) | dict(x_again=jax.typeof(arrays["x"])),
        dict(
            x_tile=memory.tiled((M, N), dtype),
            scale_tile=plgpu.SMEM((M,), jnp.float32),
            shift_tile=plgpu.SMEM((N,), jnp.float32),
            o_tile=memory.tiled((N, M), dtype),
            t_tile=memory.tiled((N, M), dtype),
            full=plgpu.Barrier(num_arrivals=3),
            **memory.meeting(1, interpret),
        ),
        name="transposed",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )


def tile(dtype: str) -> Arrays:
    rng = np.random.default_rng(73)
    return dict(x=normal(rng, M, N, dtype=dtype), scale=normal(rng, M), shift=normal(rng, N))


OLD = jax.__version_info__ < (0, 11)
STORES_NONE = "JAX 0.10 does not store what it transposes"


@pytest.mark.skipif(OLD and MOSAIC == "mosaic", reason=STORES_NONE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_memory_of_mosaic(dtype):
    arrays = tile(dtype)
    with all_called("mosaic.common.memory", "mosaic.common.elementwise"):
        out, turned, again = jax.jit(functools.partial(transposed, interpret=MOSAIC != "mosaic"))(arrays)
    np.testing.assert_array_equal(turned, arrays["x"].T)
    np.testing.assert_array_equal(again, arrays["x"])
    x, scale, shift = (float64(value) for value in arrays.values())
    assert_close(out, (x * scale[:, None] + np.arange(N) * 0.125 + shift).T, ROUNDED[dtype])


@pytest.mark.skipif(OLD, reason=STORES_NONE)
def test_memory_of_mosaic_lowers():
    assert MOSAIC_CALL in lowered(transposed, jax.eval_shape(lambda: tile("float16")))


# Mosaic: rows 8 and on of an array that ends with the 13th, by a tile's columns and by two tiles' at a time.
def copying(refs: Refs) -> None:
    @pl.loop(1, 2)
    def _(block: jax.Array) -> None:
        rows = pl.Slice(8 * block, M)
        for i, tile in enumerate((refs.one_tile, refs.two_tiles)):
            columns = pl.Slice(0, tile.shape[1])
            copy_rows(refs.x, block, rows, columns, tile, refs.full, i, row_bytes=memory.ROW_BYTES)
            plgpu.barrier_wait(refs.full.at[i])

    for tile, out in ((refs.one_tile, refs.one), (refs.two_tiles, refs.two)):
        plgpu.copy_smem_to_gmem(tile, out)
    plgpu.wait_smem_to_gmem(0)


def copied(arrays: Arrays, *, interpret: bool) -> list[jax.Array]:
    widths, dtype = dict(one=N // 2, two=N), arrays["x"].dtype
    return launch(
        copying,
        arrays,
        {name: jax.ShapeDtypeStruct((M, width), dtype) for name, width in widths.items()},
        dict(
            one_tile=memory.tiled((M, N // 2), dtype),
            two_tiles=memory.tiled((M, N), dtype),
            full=plgpu.Barrier(num_barriers=2),
        ),
        name="copied",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )


# Mosaic: a tile, and two beside one another, to blocks that begin anywhere and end with the array.
def leaving(refs: Refs) -> None:
    for tile, source in ((refs.one_tile, refs.x.at[:, pl.ds(0, N // 2)]), (refs.two_tiles, refs.x)):
        plgpu.copy_gmem_to_smem(source, tile, refs.full)
        plgpu.barrier_wait(refs.full)

    @pl.loop(1, 2)
    def _(i: jax.Array) -> None:
        copy_back(refs.one_tile, refs.items, (i, 8 * i, 16))
        copy_back(refs.two_tiles, refs.channels, (0, 5 * i, 3, 8 * i))

    plgpu.wait_smem_to_gmem(0)


def left(arrays: Arrays, *, interpret: bool) -> list[jax.Array]:
    dtype = arrays["x"].dtype
    return launch(
        leaving,
        arrays,
        dict(
            items=jax.ShapeDtypeStruct((2, 13, N), dtype),
            channels=jax.ShapeDtypeStruct((1, M + 5, 4, N + 8), dtype),
        ),
        dict(
            one_tile=memory.tiled((M, N // 2), dtype),
            two_tiles=memory.tiled((M, N), dtype),
            full=plgpu.Barrier(),
        ),
        name="left",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
    )


@pytest.mark.skipif(OLD, reason="JAX 0.10 does not interpret what lies past the end of an array")
def test_copies_of_rows_past_the_end():
    x = normal(np.random.default_rng(75), 2, 13, N, dtype="float16")
    back = normal(np.random.default_rng(76), M, N, dtype="float16")
    with all_called("mosaic.common.row_copies"):
        one, two = jax.jit(functools.partial(copied, interpret=MOSAIC != "mosaic"))(dict(x=x))
        items, channels = jax.jit(functools.partial(left, interpret=MOSAIC != "mosaic"))(dict(x=back))
    expected = np.zeros((M, N), np.float16)
    expected[:5] = x[1, 8:]
    there = slice(None) if MOSAIC == "mosaic" else slice(5)  # only a GPU says what lies past the end
    np.testing.assert_array_equal(one[there], expected[there, : N // 2])
    np.testing.assert_array_equal(two[there], expected[there])
    np.testing.assert_array_equal(items[1, 8:, 16 : 16 + N // 2], back[:5, : N // 2])
    np.testing.assert_array_equal(channels[0, 5:, 3, 8:], back)


@pytest.mark.skipif(OLD, reason="is for kernels that need JAX 0.11")
def test_copies_of_rows_past_the_end_lower():
    assert MOSAIC_CALL in lowered(copied, dict(x=jax.ShapeDtypeStruct((2, 13, N), jnp.float16)))
    assert MOSAIC_CALL in lowered(left, dict(x=jax.ShapeDtypeStruct((M, N), jnp.float16)))


# Mosaic: rows from registers to items of an array, the last one first, and the sums of their columns.
def storing(refs: Refs) -> None:
    @pl.loop(0, pl.cdiv(refs.o.shape[1], M))
    def _(block: jax.Array) -> None:
        plgpu.copy_gmem_to_smem(refs.x.at[pl.ds(block * M, M)], refs.tile, refs.full)
        plgpu.barrier_wait(refs.full)
        x = memory.load(refs.tile, plgpu.Layout.WGMMA)
        for item in (1, 0):
            store_rows(refs.o, item, pl.Slice(block * M, M), pl.Slice(32, SUMMED), x)
        refs.sums.at[block][...] = column_sums(x.astype(jnp.float32))
        memory.commit_reads()  # all have read


def stored(arrays: Arrays, *, size: int, interpret: bool) -> list[jax.Array]:
    (rows, columns), dtype = arrays["x"].shape, arrays["x"].dtype
    return launch(
        storing,
        arrays,
        dict(
            o=jax.ShapeDtypeStruct((2, size, N), dtype),
            sums=jax.ShapeDtypeStruct((rows // M, 4 * SUMMED), jnp.float32),
        ),
        dict(tile=memory.tiled((M, columns), dtype), full=plgpu.Barrier()),
        name="stored",
        num_ctas=1,
        num_warpgroups=1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )


SIZES = pytest.mark.parametrize("size, dtype", [(M, "float32"), (M + 13, "float16"), (5, "float32")])


@pytest.mark.skipif(OLD, reason="is for kernels that need JAX 0.11")
@SIZES
def test_rows_from_registers(size, dtype):
    x = normal(np.random.default_rng(76), size + -size % M, SUMMED, dtype=dtype)
    with all_called("mosaic.common.row_stores"):
        call = jax.jit(functools.partial(stored, size=size, interpret=MOSAIC != "mosaic"))
        out, sums = call(dict(x=x))
    np.testing.assert_array_equal(out[:, :, 32 : 32 + SUMMED], np.stack([x[:size]] * 2))
    expected = float64(x).reshape(-1, 4, M // 4, SUMMED).sum(2)
    assert_close(sums.reshape(expected.shape), expected, products(M // 4))


@pytest.mark.skipif(OLD, reason="is for kernels that need JAX 0.11")
@SIZES
def test_rows_from_registers_lower(size, dtype):
    x = jax.ShapeDtypeStruct((size + -size % M, SUMMED), dtype)
    assert MOSAIC_CALL in lowered(functools.partial(stored, size=size), dict(x=x))


# Mosaic: the sums that a cluster adds up, step after step, more steps than there are places for them.
CTAS, WARPGROUPS, STEPS, WIDTH = 2, 2, 6, 512
ROW = CTAS * WARPGROUPS * WIDTH


def growing(refs: Refs) -> None:
    """Copies the first array to a sum, to which it adds the second twice."""
    refs.tile[...] = memory.load(refs.first, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    rows = pl.Slice(jax.lax.axis_index("cta") * 64, 64)
    plgpu.copy_smem_to_gmem(refs.tile, refs.total.at[rows])
    plgpu.wait_smem_to_gmem(0)
    refs.tile[...] = memory.load(refs.second, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    for _ in range(2):
        add_to_device(refs.tile, refs.total.at[rows])
        plgpu.wait_smem_to_gmem(0)


def grown(arrays: Arrays, *, interpret: bool) -> list[jax.Array]:
    return launch(
        growing,
        arrays,
        dict(total=jax.ShapeDtypeStruct((128, 64), jnp.float32)),
        dict(tile=memory.tiled((64, 64), jnp.float32)),
        name="grown",
        num_ctas=2,
        num_warpgroups=1,
        interpret=interpret,
    )


def two_tiles() -> Arrays:
    rng = np.random.default_rng(31)
    return dict(first=normal(rng, 64, 64), second=normal(rng, 64, 64))


@pytest.mark.skipif(OLD, reason="is for kernels that need JAX 0.11")
def test_sums_in_device_memory():
    arrays = two_tiles()
    with all_called("mosaic.common.device_sums"):
        (total,) = grown(arrays, interpret=MOSAIC != "mosaic")
    first, second = (np.asarray(x) for x in arrays.values())
    expected = first + second + second  # in this order, each rounded
    np.testing.assert_array_equal(np.asarray(total), np.concatenate([expected] * 2))


@pytest.mark.skipif(OLD, reason="is for kernels that need JAX 0.11")
def test_sums_in_device_memory_lower():
    text = lowered(grown, two_tiles())
    assert text.count(f"@{MOSAIC_CALL}") == 1


def adding(exchange: Exchange, refs: Refs) -> None:
    """Each row becomes its product with its sum, and to that the sum of its squares is added."""
    exchange.start(refs)
    piece = jax.lax.axis_index("warpgroup")
    if exchange.ctas > 1:
        piece += jax.lax.axis_index("rank") * WARPGROUPS
    width = ROW // (exchange.ctas * WARPGROUPS)

    @pl.loop(0, STEPS)
    def _(step: jax.Array) -> None:
        columns = pl.ds(piece * width, width)
        x = memory.load(refs.x.at[step, columns], exchange.layout)
        exchange.send(refs, step, piece, (x, x * x)[: exchange.count])
        total, *squares = exchange.receive(refs, step)
        y = x * total
        for square in squares:
            y += square
        refs.o[step, columns] = y


def sums(arrays: Arrays, *, count: int, interpret: bool) -> jax.Array:
    ctas = cluster_size(CTAS, interpret)
    layout = plgpu.Layout.WG_STRIDED((ROW // (ctas * WARPGROUPS),), vec_size=4)
    exchange = Exchange(ctas, WARPGROUPS, count, layout)
    (out,) = launch(
        functools.partial(adding, exchange),
        arrays,
        dict(o=jax.ShapeDtypeStruct((STEPS, ROW), jnp.float32)),
        exchange.scratch_types(interpret),
        name="sums",
        num_ctas=1,
        cluster=ctas,
        num_warpgroups=WARPGROUPS,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return out


@pytest.mark.parametrize("count", [1, 2])
def test_sums_of_a_cluster(count):
    arrays = dict(x=normal(np.random.default_rng(74), STEPS, ROW, shift=1.0))
    with all_called("mosaic.common.cluster_sums"):
        out = jax.jit(functools.partial(sums, count=count, interpret=MOSAIC != "mosaic"))(arrays)
    x = float64(arrays["x"])
    expected = x * x.sum(1, keepdims=True) + (np.square(x).sum(1, keepdims=True) if count > 1 else 0.0)
    assert_close(out, expected, products(ROW))


@pytest.mark.parametrize("count", [1, 2])
def test_sums_of_a_cluster_lower(count):
    arrays = dict(x=jax.ShapeDtypeStruct((STEPS, ROW), jnp.float32))
    assert MOSAIC_CALL in lowered(functools.partial(sums, count=count), arrays)


@pytest.mark.parametrize("consumers, registers, most", [(2, 248, 504), (3, 168, 512), (4, 120, 480)])
def test_roles_have_no_more_registers_than_warpgroups_begin_with(consumers, registers, most):
    roles = Role(range(consumers), registers, print), Role(range(consumers, consumers + 1), 32, print)
    with pytest.raises(ValueError, match=f"{consumers + 1} warpgroups have {most}"):
        specialize(*roles, warpgroup=jnp.int32(0))
