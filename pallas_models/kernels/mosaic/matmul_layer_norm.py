"""Matrix product, residual and layer norm for Hopper GPUs: the warpgroups of a CTA own whole rows together."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul_layer_norm import Form
from pallas_models.kernels.mosaic.common import gemm
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm import Product
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import load, row, untiled
from pallas_models.kernels.mosaic.common.staging import Block, Output, Staging, store
from pallas_models.kernels.mosaic.common.tile_walk import Tile
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
    _, n, _ = form.sizes
    if n % (2 * _COLUMNS) or n > _MOST_COLUMNS:
        return f"takes rows of up to {_MOST_COLUMNS} columns in multiples of {2 * _COLUMNS}, not of {n}"
    return untiled("x", x.shape, x.dtype)


def fills(rows: int, target: Target, share: float = 0.72) -> bool:
    """Whether tiles of so many rows are at least a share of what multiprocessors have in as many rounds.

    A round of tiles takes its time however few there are in it. For 8192 rows, which are a tile for nearly every
    multiprocessor of an H200, it takes 0.72 of the time of Triton's kernel.
    """
    tiles = pl.cdiv(rows, _ROWS)
    return tiles >= share * target.num_cores * pl.cdiv(tiles, target.num_cores)


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the faster kernel for a call that it serves.

    It is faster with half of the tiles of its first round too, where Triton has two kernels.
    """
    rows = form.x.shape[0]
    return fills(rows, target, 0.72 if rows > target.num_cores * _ROWS else 0.5)


def _staging(config: Config, dtype: DTypeLike) -> Staging:
    """Where the halves of rows leave, and where a residual waits."""
    return Staging.of(config, config.block_n // 2, dtype, whole=True, joined=False)


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a CTA takes: ring, parts of rows that come and leave, vectors and moments."""
    rows = _staging(config, jnp.float16).num_bytes
    return config.ring_bytes(0) + rows + 3 * 4 * config.block_n + 4 * 4 * config.block_m + 512


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
    (m, n, k), x, residual = form.sizes, form.x, form.residual
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
    vectors = {"scale": form.scale, "offset": form.offset} | ({} if form.bias is None else {"bias": form.bias})
    epilogue = _Epilogue(
        config, form.epsilon, x.dtype, {name: v.dtype for name, v in vectors.items()}, residual is not None
    )
    (out,) = gemm.gemm(
        dict(x=x, w=form.w, residual=residual, **vectors),
        dict(o=jax.ShapeDtypeStruct((m, n), x.dtype)),
        Product(
            m=m,
            n=half,
            k=k,
            dtype=x.dtype,
            a=lambda refs, tile, ks: refs.x.at[tile.rows, ks],
            b=[
                lambda refs, tile, ks: refs.w.at[ks, pl.ds(0, half)],
                lambda refs, tile, ks: refs.w.at[ks, pl.ds(half, half)],
            ],
        ),
        gemm.Epilogue(
            store=epilogue.store,
            scratch_types=epilogue.scratch_types,
            prefetch=epilogue.prefetch,
            split_n=True,
        ),
        config=config,
        name="matmul_layer_norm",
        target=target,
        interpret=interpret,
    )
    return out


def _along_rows(v: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(v, (_ROWS, _COLUMNS), [0])


def _total(values: Iterable[jax.Array]) -> jax.Array:
    """The sum of each row of blocks side by side."""
    return functools.reduce(operator.add, (jnp.sum(y, axis=1) for y in values))


@dataclasses.dataclass(frozen=True, slots=True)
class _Epilogue:
    """Bias, residual and layer norm in registers, where each of two warpgroups has a half of every row.

    Attributes:
      dtype: of operands and result.
      vectors: the dtypes of scale, offset and maybe the bias of the product.
      has_residual: whether there is one, which waits in the slots through which the result leaves.
    """

    config: Config
    epsilon: float
    dtype: jnp.dtype
    vectors: Mapping[str, jnp.dtype]
    has_residual: bool

    @property
    def half(self) -> int:
        """Columns of a warpgroup."""
        return self.config.block_n // 2

    @property
    def out(self) -> Staging:
        """Where the result leaves."""
        return _staging(self.config, self.dtype)

    @property
    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of the methods below."""
        num_copies = len(self.vectors) + (len(self.out.blocks) if self.has_residual else 0)
        return dict(
            slots=self.out.scratch_type,
            ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=2),
            moments=plgpu.SMEM((2, 2, _ROWS), jnp.float32),
            known=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            **{f"{name}_tile": plgpu.SMEM((2, self.half), dtype) for name, dtype in self.vectors.items()},
        )

    def prefetch(self, refs: Refs, tile: Tile, warpgroup: jax.Array) -> None:
        """Copies the vectors and the tile's residual to shared memory."""
        ready = refs.ready.at[warpgroup]
        for name in self.vectors:
            source, there = getattr(refs, name), getattr(refs, f"{name}_tile")
            plgpu.copy_gmem_to_smem(source.at[tile.columns], there.at[warpgroup], ready)
        if self.has_residual:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left these slots
            for i, block in enumerate(self.out.blocks):
                plgpu.copy_gmem_to_smem(block.at(refs.residual, tile), refs.slots.at[warpgroup, i], ready)

    def moments(self, refs: Refs, ys: Sequence[jax.Array], warpgroup: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of each row, of which the other warpgroup has the other half.

        They are combined as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
        """
        half = self.half
        mean = _total(ys) * (1.0 / half)
        square = _total(jnp.square(y - _along_rows(mean)) for y in ys)
        for i, value in enumerate((mean, square)):
            refs.moments.at[warpgroup, i][...] = value
        plgpu.barrier_arrive(refs.known.at[0])
        plgpu.barrier_wait(refs.known.at[0])
        rows = plgpu.Layout.WGMMA.reduce(1)
        mean_there, square_there = (load(refs.moments.at[1 - warpgroup, i], rows) for i in range(2))
        plgpu.barrier_arrive(refs.known.at[1])  # both have read before the next tile's are written
        plgpu.barrier_wait(refs.known.at[1])
        square += square_there + jnp.square(mean - mean_there) * (half / 2)
        return (mean + mean_there) * 0.5, square * (1.0 / self.config.block_n)

    def store(self, refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        """Normalises this warpgroup's half of the rows of a tile, and stores it."""

        def vector(name: str, block: Block) -> jax.Array:
            return row(getattr(refs, f"{name}_tile").at[warpgroup, block.columns], (_ROWS, _COLUMNS))

        plgpu.barrier_wait(refs.ready.at[warpgroup])
        blocks = self.out.blocks
        ys = [block.of(sums[0]) for block in blocks]
        if "bias" in self.vectors:
            ys = [y + vector("bias", block) for y, block in zip(ys, blocks, strict=True)]
        if self.has_residual:
            ys = [y + refs.slots.at[warpgroup, i][...].astype(jnp.float32) for i, y in enumerate(ys)]
        mean, variance = self.moments(refs, ys, warpgroup)
        rstd = jax.lax.rsqrt(variance + self.epsilon)

        def value(block: Block, _: Ref) -> jax.Array:
            y = (ys[block.column // _COLUMNS] - _along_rows(mean)) * _along_rows(rstd)
            return y * vector("scale", block) + vector("offset", block)

        store(tile, self.out, Output(refs.slots, warpgroup, refs.o, value), wait=not self.has_residual)
