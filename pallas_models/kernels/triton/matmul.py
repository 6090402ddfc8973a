"""Matrix product: each program computes a strip or tile of the output, over all of K or a part of it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul import Activation, Algorithm, Form
from pallas_models.kernels.triton.common import activate, launch
from pallas_models.kernels.triton.product import (
    Config,
    Dot,
    Tile,
    multiply_and_add,
    num_tiles,
    product,
    product_parts,
    program_tile,
    shared_memory,
    steps_per_part,
)
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser, Problem, choose


def _config(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, group_m: int = 8, splits: int = 1
) -> Config:
    return Config(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        group_m=group_m,
        splits=splits,
    )


_NAIVE = _config(1, 128, 32, 4, 1, group_m=1)  # a strip of one row
_TILED = _config(64, 64, 32, 4, 1, group_m=1)  # loads wait for products, tiles go row by row
_SUM = _config(4, 256, 16, 4, 1, group_m=1)  # adds up the parts of K


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """A config, how many of its programs a multiprocessor runs at once, and us per tile and per unit of K."""

    config: Config
    resident: int
    tile_us: float
    k_us: float


# Fitted to 34 products of 16 to 32768 rows and K of 384 to 12288 in bfloat16 on an H200; the tiles that the fit
# chooses take 2% longer than the best of 15.
_HALF = (
    _Measured(_config(128, 256, 64, 8, 3, group_m=16), 1, 3.3, 0.0107),
    _Measured(_config(128, 128, 64, 4, 2), 3, 0.93, 0.00665),
    _Measured(_config(64, 192, 64, 4, 3), 2, 0.94, 0.00534),
    _Measured(_config(64, 128, 64, 4, 3), 3, 0.56, 0.00369),
    _Measured(_config(64, 64, 64, 4, 4), 3, 0.34, 0.00253),
    _Measured(_config(64, 32, 128, 4, 3), 3, 0.46, 0.00215),
    _Measured(_config(16, 64, 128, 4, 4), 3, 0.42, 0.00188),
    _Measured(_config(16, 32, 128, 4, 6), 4, 0.31, 0.00142),
)
# Products with a residual to read. 128 x 128 sums in 4 warps leave no registers for it: half as long again.
_HALF_AND_RESIDUAL = (
    _Measured(_config(128, 256, 64, 8, 3, group_m=16), 1, 6.5, 0.0107),
    _Measured(_config(128, 128, 64, 8, 3), 2, 2.87, 0.0059),
    _Measured(_config(64, 192, 64, 4, 3), 2, 1.84, 0.00534),
    _Measured(_config(64, 128, 64, 4, 3), 3, 1.02, 0.00369),
    *_HALF[4:],
)
_FLOAT32 = (_Measured(_config(64, 64, 32, 4, 3), 4, 1.0, 0.025),)  # without tensor cores; estimated
_CORE_BANDWIDTH, _LATENCY_US = 29_500, 1.3  # of device memory: bytes a microsecond, and under load
_SUM_US = 1.5  # of the kernel that adds up parts
_PART_US, _PART_OUTPUT_US = 0.07, 1e-6  # what each part adds, and each of its outputs
SPLITS = (1, 2, 3, 4, 6, 8)


def heuristic(
    m: int,
    n: int,
    k: int,
    dtype: DTypeLike,
    target: Target,
    *,
    batch: int = 1,
    splits: tuple[int, ...] = SPLITS,
    residual: bool = False,
    summed: bool = False,
) -> Config:
    """Chooses tiles for `batch` products (m, k) @ (k, n), and into how many of `splits` parts to split each.

    Args:
      residual: whether the tile of a residual is read.
      summed: whether a kernel that adds up parts follows in any case.
    """
    itemsize = jnp.dtype(dtype).itemsize
    w_bytes = batch * k * n * itemsize

    def time_us(choice: tuple[_Measured, int]) -> float:
        measured, split = choice
        config = measured.config
        programs = batch * num_tiles(config, m, n) * split
        depth = steps_per_part(k, config, split) * config.block_k
        tiles = programs / target.num_cores  # of a core
        whole = measured.resident == 1 or tiles <= measured.resident
        us = (math.ceil(tiles) if whole else tiles + 0.3) * (measured.tile_us + depth * measured.k_us)
        # The rate at which w is read is limited by the number of cores and by the bytes that each has in flight.
        ahead = shared_memory(config, itemsize) * (1 - 1 / config.num_stages)
        in_flight = ahead * min(math.ceil(tiles), measured.resident)
        reading = min(programs, target.num_cores) * min(_CORE_BANDWIDTH, in_flight / _LATENCY_US)
        us = max(us, w_bytes / reading)
        if split > 1 or summed:
            us += split * (_PART_US + _PART_OUTPUT_US * batch * m * n)
        return us + (_SUM_US if split > 1 and not summed else 0.0)

    choices = [
        (measured, split)
        for measured in (_FLOAT32 if itemsize == 4 else _HALF_AND_RESIDUAL if residual else _HALF)
        for split in splits
        if shared_memory(measured.config, itemsize) <= target.shared_memory
        and (split == splits[0] or batch * num_tiles(measured.config, m, n) < 2 * target.num_cores)
    ]
    chosen, split = min(choices, key=time_us)
    stages = min(chosen.config.num_stages, max(steps_per_part(k, chosen.config, split), 2))
    if itemsize == 4 and not target.runs(HOPPER):  # a third stage spills registers of an A10 and an L4
        stages = min(stages, 2)
    return dataclasses.replace(chosen.config, splits=split, num_stages=stages)


def _finish(
    tile: Tile,
    ys: list[jax.Array],
    bias_ref: Ref | None,
    residual_ref: Ref | None,
    o_ref: Ref,
    kept_ref: Ref | None,
    activation: Activation | None,
) -> None:
    """Stores a tile of the product after bias, activation and residual, and, if kept, after the bias alone."""
    for c, y in enumerate(ys):
        if bias_ref is not None:
            y += tile.load_vector(bias_ref, c)
        if kept_ref is not None:
            tile.store(kept_ref, c, y)
        y = activate(activation, y)
        if residual_ref is not None:
            y += tile.load(residual_ref, c)
        tile.store(o_ref, c, y)


def _matmul_kernel(
    x_ref: Ref,  # (M, K)
    w_ref: Ref,  # (K, N), or (N, K) if transposed
    bias_ref: Ref | None,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    o_ref: Ref,  # (M, N)
    kept_ref: Ref | None,  # (M, N)
    *,
    config: Config,
    dot: Dot,
    activation: Activation | None,
) -> None:
    tile = program_tile(config, *o_ref.shape)
    ys = product(x_ref, w_ref, tile, config, dot)
    _finish(tile, ys, bias_ref, residual_ref, o_ref, kept_ref, activation)


def _sum_kernel(
    parts_ref: Ref,  # (P, M, N)
    bias_ref: Ref | None,  # (N,)
    residual_ref: Ref | None,  # (M, N)
    o_ref: Ref,  # (M, N)
    kept_ref: Ref | None,  # (M, N)
    *,
    config: Config,
    activation: Activation | None,
) -> None:
    parts, m, n = parts_ref.shape
    tile = program_tile(config, m, n)
    ys = [tile.load(parts_ref, c, jnp.int32(0)) for c in range(len(tile.columns))]
    for part in range(1, parts):
        ys = [y + tile.load(parts_ref, c, jnp.int32(part)) for c, y in enumerate(ys)]
    _finish(tile, ys, bias_ref, residual_ref, o_ref, kept_ref, activation)


def _choose_config(form: Form[jax.Array], config: Config | Chooser | None, target: Target) -> Config:
    """The config of an algorithm, None being the fastest.

    Raises:
      ValueError: `config` is not one of that algorithm.
    """
    (m, n, k), dtype, algorithm, residual = form.sizes, form.dtype, form.algorithm, form.residual is not None
    variant = {"batch": form.batch} if form.batch > 1 else {}
    if form.transpose_w:
        variant["transpose_w"] = 1
    if residual:
        variant["residual"] = 1
    chosen_by_shape = functools.partial(heuristic, m, n, k, dtype, target, batch=form.batch, residual=residual)
    defaults: dict[Algorithm | None, Callable[[], Config]] = {
        None: chosen_by_shape,
        "naive": lambda: _NAIVE,
        "tiled": lambda: _TILED,
        "pipelined": functools.partial(chosen_by_shape, splits=(1,)),
        "split_k": functools.partial(chosen_by_shape, splits=SPLITS[1:]),
    }
    config = choose(
        config,
        Problem(
            backend="triton",
            op=f"matmul_{algorithm}" if algorithm else "matmul",
            shape={"m": m, "n": n, "k": k} | variant,
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=defaults[algorithm],
            candidates=tuple if algorithm else functools.partial(configs, m, n, k, target.num_cores),
            shared_memory=functools.partial(shared_memory, itemsize=dtype.itemsize),
        ),
        target,
    )
    if algorithm == "naive" and config.block_m != 1:
        raise ValueError(f"algorithm='naive' takes strips of one row, not block_m={config.block_m}")
    if algorithm != "naive" and config.block_m < 16:
        raise ValueError(f"block_m={config.block_m} is too small; expected at least 16 but for algorithm='naive'")
    if algorithm not in (None, "split_k") and config.splits > 1:
        raise ValueError(f"algorithm={algorithm!r} does not split the contraction, as splits={config.splits} asks")
    return config


def matmul(form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool) -> Any:
    """The product with epilogue in one kernel, or in two where its contraction is split.

    Raises:
      ValueError: `config` does not fit the algorithm.
    """
    x, (m, n, _) = form.x, form.sizes
    config = _choose_config(form, config, target)
    dot = Dot(
        precision=form.precision,
        acc_dtype=form.acc_dtype,
        transpose_w=form.transpose_w,
        multiply=multiply_and_add if form.algorithm == "naive" else jax.lax.dot_general,
    )
    operands: tuple[jax.Array, ...] = (x, form.w)
    kernel = functools.partial(_matmul_kernel, config=config, dot=dot, activation=form.activation)
    if config.splits > 1:
        operands = (product_parts(x, form.w, dot=dot, config=config, interpret=interpret),)
        config = _SUM
        kernel = functools.partial(_sum_kernel, config=config, activation=form.activation)
    out, kept = launch(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((m, n), form.out_dtype),
            jax.ShapeDtypeStruct((m, n), form.dtype) if form.return_preactivation else None,
        ),
        grid=(num_tiles(config, m, n),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="matmul",
    )(*operands, form.bias, form.residual)
    return (out, kept) if form.return_preactivation else out


def configs(m: int, n: int, k: int, num_cores: int) -> Iterator[Config]:
    """The tiles worth measuring: 64 to 192 sums a thread, or fewer where such tiles are too few for the cores.

    Where there are many, a second order of them, for L2; where they are too few, splits of the contraction; and
    for few rows, which take no longer than to read w, and for wide tiles in short steps, more loads ahead.
    """
    many = pl.cdiv(m, 128) * pl.cdiv(n, 128) >= 2 * num_cores
    fewest = 64 if many else 16 if min(m, n) >= 64 else 4
    for block_m, block_n, block_k, num_warps, num_stages in itertools.product(
        (16, 32, 64, 128, 256), (32, 64, 128, 192, 256, 384), (32, 64, 128), (4, 8), (2, 3, 4, 6)
    ):
        fits = min(m, 64) <= block_m < 2 * max(m, 16) and block_n < 2 * max(n, 32)
        deepest = 6 if block_m == 16 or block_n == 384 else 4
        fits = fits and num_stages <= min(max(pl.cdiv(k, block_k), 2), deepest)
        most = 192 if block_k == 32 else 128
        if not fits or not fewest <= block_m * block_n // (32 * num_warps) <= most:
            continue
        config = _config(block_m, block_n, block_k, num_warps, num_stages)
        yield config
        if block_k == 64 and num_stages == 3:
            if num_tiles(config, m, n) >= 8 * num_cores and m > 8 * block_m:
                yield dataclasses.replace(config, group_m=16)
            for splits in (2, 4, 8):
                if num_tiles(config, m, n) * splits < 2 * num_cores and steps_per_part(k, config, splits) >= 2:
                    yield dataclasses.replace(config, splits=splits)
