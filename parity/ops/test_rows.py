"""Rows in the registers of Mosaic's threads: the primitives, the configs, and the generations of GPUs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import ops
from pallas_models.kernels.mosaic.common import memory, row_columns
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import LONGEST_HELD, Config, configs, heuristic
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.triton import softmax
from parity.ops.test_lowering import DEVICES, HOPPER, every_device, lowered_for_cuda
from parity.support.common import (
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    array,
    assert_close,
    cuda_device,
    float64,
    normal,
    without_gpu,
)
from parity.support.primitives import all_called
from parity.support.tolerances import SHORT

ROWS = "mosaic" if ON_GPU else "mosaic_interpret"  # these kernels run on every GPU
REPEAT = 2
WAYS = [
    Config(threads=1, block_n=16),  # walked
    Config(threads=8, block_n=512, rows=2),  # held
    Config(threads=32, block_n=64, warpgroups=2),
    Config(threads=128, block_n=256, rows=2),
    Config(threads=256, block_n=128, warpgroups=2),
    Config(threads=512, block_n=512, warpgroups=4),
    Config(threads=4, block_n=16, keep=True),  # held in steps
    Config(threads=256, block_n=16, warpgroups=2, keep=True),
]
every_way = pytest.mark.parametrize("config", WAYS, ids=lambda c: f"{c.threads}x{c.block_n}{c.keep * '-kept'}")


def walking(refs: Refs, blocks: Blocks) -> None:
    """Adds a vector to x where a mask is not 0; leaves the sum and the largest size of each row, too.

    And the element of x in a column of each row, and of the vector; in the result 7 is there.
    """
    i, total, peak = blocks.place(), blocks.full(0.0), blocks.of_threads.full(0.0)
    columns = blocks.load_numbers(refs.columns, i)
    chosen = [blocks.load_numbers(ref, i, columns).astype(jnp.float32) for ref in (refs.x, refs.vector)]
    for step in range(blocks.steps):
        j = blocks.column(step)
        y = blocks.load(refs.x, i, j).astype(jnp.float32) + blocks.load(refs.vector, i, j)
        y = jnp.where(blocks.load(refs.where, i, j, REPEAT) != 0, blocks.again(y), 0.0)
        inside = blocks.inside(j)
        if inside is not None:
            y = jnp.where(inside, y, 0.0)
        total, largest = total + y, blocks.fold("max", jnp.abs(y))
        peak = jnp.maximum(peak, largest)
        y = jnp.where(jnp.abs(y) <= blocks.unfold(largest), y, jnp.nan)
        blocks.store(refs.o, i, j, y.astype(refs.o.dtype))
    total = blocks.of_threads.reduce(refs, 0, "add", blocks.fold("add", total))
    total, peak = blocks.rounded(total), blocks.of_threads.reduce(refs, 1, "max", peak)
    for k, number in enumerate((total, peak, *chosen)):
        blocks.store_numbers(refs.numbers, k, i, number)
    memory.meet(refs)
    blocks.store_at(refs.o, i, columns, jnp.full_like(total, 7.0).astype(refs.o.dtype))


def adding(refs: Refs, blocks: Blocks) -> None:
    """Walks x from its last row on, with factors, and leaves sums of rows and of their squares, and of columns."""
    apart, columns = blocks.num_ctas * blocks.groups, blocks.full(0.0)
    for step in range(-(-blocks.m // (blocks.shape[0] * apart))):
        i = blocks.place() + step * apart
        y = blocks.look_up(refs.x, i, blocks.column(0), blocks.m - 1 - blocks.index(i)).astype(jnp.float32)
        y *= blocks.spread(blocks.load_numbers(refs.factors, i, row=1))
        columns += y
        for k, number in enumerate(blocks.reduce_all(refs, step % 2, "add", y, y * y)):
            blocks.store_numbers(refs.numbers, k, i, number)
    for k in range(2):
        blocks.store_sums(refs, refs.columns_of_ctas.at[k], jax.lax.axis_index("cta"), columns * (k + 1.0))


def added(x: jax.Array, factors: jax.Array, *, config: Config, ctas: int, interpret: bool) -> list[jax.Array]:
    (m, n), blocks = x.shape, Blocks.of(dataclasses.replace(config, block_n=x.shape[1]), x, ctas)
    return launch(
        functools.partial(adding, blocks=blocks),
        dict(x=x, factors=factors),
        dict(
            numbers=jax.ShapeDtypeStruct((2, m), jnp.float32),
            columns_of_ctas=jax.ShapeDtypeStruct((2, ctas, n), jnp.float32),
        ),
        blocks.scratch_types(2, interpret, arrays=2) | blocks.sums_scratch_types(interpret),
        name="added",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )


def reducing(refs: Refs, blocks: Blocks) -> None:
    """Leaves the sum and the largest size of each column of the rows that a CTA walks."""
    total, largest = blocks.full(0.0), blocks.full(0.0)
    for step in range(-(-blocks.m // (blocks.shape[0] * blocks.num_ctas * blocks.groups))):
        i = blocks.place() + step * blocks.num_ctas * blocks.groups
        y = blocks.load(refs.x, i, blocks.column(0)).astype(jnp.float32)
        total, largest = total + y, jnp.maximum(largest, jnp.abs(y))
    columns = row_columns.columns_of(blocks)
    for _ in range(2):  # the second time what the first one left is in the way
        found = row_columns.reduce_rows(blocks, refs, ("add", "max"), total, largest)
    for k, x in enumerate(found):
        columns.store(refs.o.at[k], columns.place(), columns.column(0), x)


def reduced(x: jax.Array, *, config: Config, ctas: int, interpret: bool) -> jax.Array:
    blocks = Blocks.of(dataclasses.replace(config, block_n=x.shape[1]), x, ctas)
    columns = row_columns.columns_of(blocks)
    (found,) = launch(
        functools.partial(reducing, blocks=blocks),
        dict(x=x),
        dict(o=jax.ShapeDtypeStruct((2, ctas, columns.n), jnp.float32)),
        row_columns.scratch_types(blocks, 2, interpret),
        name="reduced",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return found


def walked(arrays: dict[str, jax.Array], *, config: Config, interpret: bool) -> list[jax.Array]:
    x = arrays["x"]
    blocks = Blocks.of(config, x)
    return launch(
        functools.partial(walking, blocks=blocks),
        arrays,
        dict(o=jax.ShapeDtypeStruct(x.shape, x.dtype), numbers=jax.ShapeDtypeStruct((4, x.shape[0]), jnp.float32)),
        blocks.scratch_types(2, interpret) | memory.meeting(blocks.warpgroups, interpret),
        name="walked",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )


def drawn(m: int, n: int, dtype: str, mask: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(80)
    where = array(rng.integers(0, 2, (3, n)), mask)
    columns = array(rng.integers(-1, n + 1, m), "int32")  # some rows have none
    return dict(x=normal(rng, m, n, dtype=dtype), vector=normal(rng, n), where=where, columns=columns)


# Vectors of 16 bytes and of single elements; rows of a thread, a part of a warp, some warps, some warpgroups.
WALKED = pytest.mark.parametrize(
    "m, n, dtype, mask, config",
    [
        (5, 12, "float16", "int8", Config(threads=1, block_n=8)),
        (150, 33, "float16", "uint8", Config(threads=4, block_n=64, rows=2, warpgroups=2)),
        (7, 1002, "bfloat16", "int32", Config(threads=64, block_n=300, rows=3)),
        (5, 516, "float32", "int8", Config(threads=128, block_n=1024, warpgroups=2)),
        (3, 3000, "float32", "int16", Config(threads=256, block_n=1024, rows=2, warpgroups=2)),
        (4, 2048, "bfloat16", "int8", Config(threads=512, block_n=4096, warpgroups=4)),
        (7, 520, "float16", "int8", Config(threads=256, block_n=1024, warpgroups=4)),
    ],
    ids=lambda value: str(value).replace("Config", ""),
)


@WALKED
def test_rows_of_mosaic(m, n, dtype, mask, config):
    arrays = drawn(m, n, dtype, mask)
    factors = normal(np.random.default_rng(81), 2, m)
    with all_called("mosaic.common.rows"):
        out, numbers = jax.jit(functools.partial(walked, config=config, interpret=not ON_GPU))(arrays)
        add = jax.jit(functools.partial(added, config=config, ctas=2, interpret=not ON_GPU))
        sums, column_sums = add(arrays["x"], factors)
    kept = float64(arrays["where"])[np.arange(m) // REPEAT % 3] != 0
    y = np.where(kept, float64(arrays["x"]) + float64(arrays["vector"]), 0.0)
    columns = np.asarray(arrays["columns"])
    is_one = np.arange(n) == columns[:, None]
    wanted = np.where(is_one, 7.0, y.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(out, wanted)
    assert_close(numbers[:2], np.stack([y.sum(1), np.abs(y).max(1)]), SHORT)
    chosen = [np.sum(np.where(is_one, float64(arrays[name]), 0.0), 1) for name in ("x", "vector")]
    np.testing.assert_array_equal(numbers[2:], np.stack(chosen))
    y = float64(arrays["x"])[::-1] * float64(factors)[1][:, None]
    assert_close(sums, np.stack([y.sum(1), np.square(y).sum(1)]), SHORT)
    assert_close(column_sums.sum(1), np.stack([y.sum(0), 2 * y.sum(0)]), SHORT)


@WALKED
def test_columns_of_rows_of_mosaic(m, n, dtype, mask, config):
    x = drawn(m, n, dtype, mask)["x"]
    with all_called("mosaic.common.row_columns"):
        out = jax.jit(functools.partial(reduced, config=config, ctas=2, interpret=not ON_GPU))(x)
    y, (total, largest) = float64(x), float64(out)
    assert_close(total.sum(0)[:n], y.sum(0), SHORT)
    np.testing.assert_array_equal(largest.max(0)[:n], np.abs(y).max(0))
    assert not np.any(float64(out)[..., n:])


@without_gpu
@WALKED
def test_rows_of_mosaic_lower(m, n, dtype, mask, config):
    with cuda_device(*DEVICES[0]):
        call = functools.partial(walked, config=config, interpret=False)
        arrays = jax.eval_shape(lambda: drawn(m, n, dtype, mask))
        assert MOSAIC_CALL in lowered_for_cuda(call, arrays)
        call = functools.partial(added, config=config, ctas=2, interpret=False)
        assert MOSAIC_CALL in lowered_for_cuda(call, arrays["x"], jax.ShapeDtypeStruct((2, m), "float32"))
        call = functools.partial(reduced, config=config, ctas=2, interpret=False)
        assert MOSAIC_CALL in lowered_for_cuda(call, arrays["x"])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(threads=48), "threads=48 must be a power of two up to 1024"),
        (dict(threads=2048, warpgroups=16), "threads=2048 must be a power of two"),
        (dict(block_n=0), "block_n=0 must be positive"),
        (dict(rows=-1), "rows=-1 must be positive"),
        (dict(warpgroups=9), "warpgroups=9 must be 8 or fewer"),
        (dict(threads=256, warpgroups=3), "warpgroups of a CTA must be a multiple of those that share a row"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**dict(threads=32, block_n=64) | changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 33, 384, 768, 4096, 20001, 32768, 65536, 1_000_003])
def test_threads_hold_what_registers_have_room_for(n, dtype):
    x = jax.ShapeDtypeStruct((5, n), dtype)
    for arrays in (1, 2):
        blocks = Blocks.of(heuristic(5, n, dtype, arrays), x)
        assert blocks.columns * blocks.vector <= 32
        longest = LONGEST_HELD * 4 // x.dtype.itemsize if arrays == 1 else LONGEST_HELD // 2
        assert blocks.are_held == (n <= longest)
        masked = Blocks.of(heuristic(5, n, dtype, arrays, masked=True), x)
        assert masked.are_held == (n <= min(longest, LONGEST_HELD))
    found = list(configs(5, n, dtype))
    assert found and len(found) == len(set(found))
    for config in found:
        assert Blocks.of(config, x).columns * Blocks.of(config, x).vector * config.rows <= 128
        assert not config.keep or config.rows * n * x.dtype.itemsize <= 128 * config.threads


@pytest.mark.parametrize(
    "m, n, dtype, arrays, expected",
    [  # what was fastest on an H200, or as fast as any
        (8192, 384, "bfloat16", 1, [(16, 1), (16, 2)]),
        (8192, 768, "bfloat16", 1, [(32, 1), (32, 2)]),
        (32768, 1024, "bfloat16", 1, [(64, 1), (32, 2)]),
        (8192, 4096, "bfloat16", 1, [(256, 1), (128, 2)]),
        (8192, 4096, "bfloat16", 2, [(256, 1), (128, 1)]),
        (8192, 4096, "float32", 1, [(256, 1), (128, 1)]),
        (40, 4096, "bfloat16", 1, [(256, 1), (128, 1)]),
    ],
)
def test_threads_of_a_row_and_their_rows(m, n, dtype, arrays, expected):
    found = [heuristic(m, n, dtype, arrays, reductions=reductions) for reductions in (1, 3)]
    assert [(config.threads, config.rows) for config in found] == expected


def calls() -> dict[str, tuple[Any, ...]]:
    x, scale = jax.ShapeDtypeStruct((40, 768), "bfloat16"), jax.ShapeDtypeStruct((768,), "float32")
    return {
        "layer_norm": (ops.layer_norm, x, scale, scale),
        "rms_norm": (ops.rms_norm, x, scale),
        "softmax": (ops.softmax, x),
    }


older = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has Mosaic for Hopper and later GPUs")


@older
@every_device
@pytest.mark.parametrize("name", list(calls()))
def test_rows_in_mosaic_are_for_every_gpu_and_named_elsewhere_than_on_hopper(device, name):
    function, *arrays = calls()[name]

    def gradient(implementation):
        call = functools.partial(function, implementation=implementation)
        return lambda x, *vectors: jax.vjp(call, x, *vectors)[1](x)

    with cuda_device(*device):
        named = lowered_for_cuda(gradient("mosaic"), *arrays)
        best = lowered_for_cuda(gradient(None), *arrays)
    assert MOSAIC_CALL in named and TRITON_CALL not in named
    by_default, other = (MOSAIC_CALL, TRITON_CALL) if device == HOPPER else (TRITON_CALL, MOSAIC_CALL)
    assert by_default in best and other not in best


FAST = jax.ShapeDtypeStruct((40, 768), "bfloat16")


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), MOSAIC_CALL),
        (dict(x=jax.ShapeDtypeStruct((1, 7, 65536), "float16")), MOSAIC_CALL),
        (dict(x=jax.ShapeDtypeStruct((40, 768), "float32")), TRITON_CALL),  # not timed
        (dict(x=jax.ShapeDtypeStruct((40, 771), "bfloat16")), TRITON_CALL),  # not timed
        (dict(where=jax.ShapeDtypeStruct((40, 768), "bool")), TRITON_CALL),  # not timed
        (dict(algorithm="online"), MOSAIC_CALL),
        (dict(algorithm="naive"), TRITON_CALL),
        (dict(implementation="triton"), TRITON_CALL),
        (dict(implementation=("triton", "mosaic")), TRITON_CALL),
        (dict(config=softmax.Config(block_m=1, block_n=1024, num_warps=4)), TRITON_CALL),
        (dict(config=Config(threads=32, block_n=768), x=jax.ShapeDtypeStruct((40, 771), "float32")), MOSAIC_CALL),
    ],
    ids=str,
)
def test_softmax_on_hopper_is_mosaics_where_it_was_timed(options, expected):
    arrays = {name: options[name] for name in ("x", "where") if name in options}
    call = functools.partial(ops.softmax, **{k: v for k, v in options.items() if k not in arrays})
    if jax.__version_info__ < (0, 11) and "config" not in options:
        expected = TRITON_CALL
    with cuda_device(*HOPPER):
        text = lowered_for_cuda(lambda arrays: call(**arrays), dict(x=FAST) | arrays)
    assert {c for c in (MOSAIC_CALL, TRITON_CALL) if c in text} == {expected}


@older
def test_a_gradient_that_is_named_runs_on_the_gpu_that_it_is_for():
    """Long rows have a gradient for Hopper alone: what is named elsewhere has XLA's."""
    x, scale = jax.ShapeDtypeStruct((40, 16384), "bfloat16"), jax.ShapeDtypeStruct((16384,), "float32")

    def gradient(x, scale):
        call = functools.partial(ops.rms_norm, implementation="mosaic")
        return jax.vjp(call, x, scale)[1](x)

    for device, kernels in zip(DEVICES, (2, 1), strict=True):
        with cuda_device(*device):
            assert lowered_for_cuda(gradient, x, scale).count(f"@{MOSAIC_CALL}") == kernels
