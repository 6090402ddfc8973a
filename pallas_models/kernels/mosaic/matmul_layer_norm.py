"""Matrix product, residual and layer norm for Hopper GPUs: the warpgroups of a CTA own whole rows together."""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul_layer_norm import Form
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm import Block, Config, Output, Tile, gemm, staging, store
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import load, row, untiled
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_MOST_COLUMNS = 512  # of rows that fit on a multiprocessor, a half in the registers of each warpgroup
_ROWS = 64  # of a tile
_COLUMNS = 64  # that leave at a time, as in `store`


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `matmul_layer_norm` does not serve a call; None if it does."""
    x, residual = form.x, form.residual
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if residual is not None and residual.dtype != x.dtype:
        return f"takes a residual of the dtype of x, {x.dtype}, not {residual.dtype}"
    if form.return_kept:
        return "does not keep what the gradient wants"
    _, n, _ = form.sizes
    if n % (2 * _COLUMNS) or n > _MOST_COLUMNS:
        return f"takes rows of up to {_MOST_COLUMNS} columns in multiples of {2 * _COLUMNS}, not of {n}"
    return untiled("x", x.shape, x.dtype)


def fills(rows: int, target: Target, share: float = 0.72) -> bool:
    """Whether tiles of so many rows are at least a share of what multiprocessors have in as many rounds.

    A round of tiles takes its time however few there are in it: 0.72 of what Triton's kernel takes for 8192 rows,
    which are one for nearly every multiprocessor of an H200.
    """
    tiles = pl.cdiv(rows, _ROWS)
    return tiles >= share * target.num_cores * pl.cdiv(tiles, target.num_cores)


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the faster kernel for a call that it serves.

    It is faster with half of the tiles of its first round too, where Triton has two kernels.
    """
    rows = form.x.shape[0]
    return fills(rows, target, 0.72 if rows > target.num_cores * _ROWS else 0.5)


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a block takes: ring, parts of rows that come and leave, vectors and moments."""
    ring = config.num_stages * (config.block_m + config.block_n) * config.block_k * 2
    rows = config.block_m * config.block_n * 2
    return ring + rows + 3 * 4 * config.block_n + 4 * 4 * config.block_m + 512


def heuristic(n: int, target: Target) -> Config:
    """Chooses the steps in the ring for n columns: as many as fit, or two, which the interpreter has room for."""
    return max(candidates(n, target), key=lambda config: config.num_stages, default=_config(n, 2))


def _config(n: int, num_stages: int) -> Config:
    return Config(block_m=_ROWS, block_n=n, num_stages=num_stages, ping_pong=False, split_n=True)


def candidates(n: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring."""
    for num_stages in range(2, 9):
        config = _config(n, num_stages)
        if shared_memory(config) <= target.shared_memory:
            yield config


def matmul_layer_norm(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Product, residual and layer norm in one kernel, whose CTAs have whole rows."""
    (m, n, k), x, bias, residual = form.sizes, form.x, form.bias, form.residual
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="matmul_layer_norm",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, n, target),
            candidates=functools.partial(candidates, n, target),
            shared_memory=shared_memory,
        ),
        target,
    )
    if (config.block_m, config.block_n, config.num_consumers) != (_ROWS, n, 2):
        expected = f"block_m={_ROWS}, block_n={n} and num_consumers=2"
        raise ValueError(f"{config} has the wrong tiles; expected {expected}")
    half = n // 2
    blocks = [Block(0, column, _COLUMNS) for column in range(0, half, _COLUMNS)]
    vectors = {"scale": form.scale, "offset": form.offset} | ({} if bias is None else {"bias": bias})
    scratch_types: dict[str, Any] = dict(
        slots=staging(config, blocks, x.dtype, len(blocks)),
        ready=plgpu.Barrier(num_arrivals=len(vectors) + (0 if residual is None else len(blocks)), num_barriers=2),
        moments=plgpu.SMEM((2, 2, _ROWS), jnp.float32),
        known=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        **{f"{name}_tile": plgpu.SMEM((2, half), v.dtype) for name, v in vectors.items()},
    )

    def prefetch(refs: Refs, tile: Tile, warpgroup: jax.Array) -> None:
        ready = refs.ready.at[warpgroup]
        for name in vectors:
            source, there = getattr(refs, name), getattr(refs, f"{name}_tile")
            plgpu.copy_gmem_to_smem(source.at[tile.columns], there.at[warpgroup], ready)
        if residual is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left these slots
            for i, block in enumerate(blocks):
                plgpu.copy_gmem_to_smem(block.at(refs.residual, tile), refs.slots.at[warpgroup, i], ready)

    def along_rows(v: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(v, (_ROWS, _COLUMNS), [0])

    def total(values: Iterable[jax.Array]) -> jax.Array:
        """The sum of each row of blocks side by side."""
        return functools.reduce(operator.add, (jnp.sum(y, axis=1) for y in values))

    def moments(refs: Refs, ys: Sequence[jax.Array], warpgroup: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of each row, of which the other warpgroup has the other half.

        They are combined as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
        """
        mean = total(ys) * (1.0 / half)
        square = total(jnp.square(y - along_rows(mean)) for y in ys)
        for i, value in enumerate((mean, square)):
            refs.moments.at[warpgroup, i][...] = value
        plgpu.barrier_arrive(refs.known.at[0])
        plgpu.barrier_wait(refs.known.at[0])
        rows = plgpu.Layout.WGMMA.reduce(1)
        mean_there, square_there = (load(refs.moments.at[1 - warpgroup, i], rows) for i in range(2))
        plgpu.barrier_arrive(refs.known.at[1])  # both have read before the next tile's are written
        plgpu.barrier_wait(refs.known.at[1])
        square += square_there + jnp.square(mean - mean_there) * (half / 2)
        return (mean + mean_there) * 0.5, square * (1.0 / n)

    def epilogue(refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        def vector(name: str, block: Block) -> jax.Array:
            return row(getattr(refs, f"{name}_tile").at[warpgroup, block.columns], (_ROWS, _COLUMNS))

        plgpu.barrier_wait(refs.ready.at[warpgroup])
        ys = [block.of(sums[0]) for block in blocks]
        if bias is not None:
            ys = [y + vector("bias", block) for y, block in zip(ys, blocks, strict=True)]
        if residual is not None:
            ys = [y + refs.slots.at[warpgroup, i][...].astype(jnp.float32) for i, y in enumerate(ys)]
        mean, variance = moments(refs, ys, warpgroup)
        rstd = jax.lax.rsqrt(variance + form.epsilon)

        def value(block: Block, _: Ref) -> jax.Array:
            y = (ys[block.column // _COLUMNS] - along_rows(mean)) * along_rows(rstd)
            return y * vector("scale", block) + vector("offset", block)

        store(tile, blocks, Output(refs.slots, warpgroup, refs.o, value), wait=residual is None)

    (out,) = gemm(
        dict(x=x, w=form.w, residual=residual, **vectors),
        dict(o=jax.ShapeDtypeStruct((m, n), x.dtype)),
        config=config,
        m=m,
        n=half,
        k=k,
        dtype=x.dtype,
        a=lambda refs, tile, ks: refs.x.at[tile.rows, ks],
        b=[
            lambda refs, tile, ks: refs.w.at[ks, pl.ds(0, half)],
            lambda refs, tile, ks: refs.w.at[ks, pl.ds(half, half)],
        ],
        split_n=True,
        prefetch=prefetch,
        epilogue=epilogue,
        scratch_types=scratch_types,
        name="matmul_layer_norm",
        target=target,
        interpret=interpret,
    )
    return out
