"""Matrix product with a fused epilogue by `mma`, which multiplies registers: for every GPU from Ampere on.

A CTA is one warpgroup with one tile of the result. Tiles of the operands are copied to shared memory some steps
ahead of the products that read them. Tiles of the last rows and columns begin where they still fit: what two tiles
have in common is computed twice, with the same result.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS, load, row_bytes_of, store, transforms
from pallas_models.kernels.mosaic.common.products_mma import multiply
from pallas_models.kernels.mosaic.matmul import unsupported_by_tensor_cores
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

LEAST = 32  # rows, columns and elements of the contraction of a tile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tiles of the result (block_m, block_n) and of the contraction (block_k), and steps that are copied ahead."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int

    def __post_init__(self) -> None:
        sizes = self.block_m in (32, 64, 128) and self.block_n in (32, 64, 128) and self.block_k in (32, 64)
        if not sizes or not 2 <= self.num_stages <= 8:
            raise ValueError(
                f"{self}: expected block_m and block_n of 32, 64 or 128, block_k of 32 or 64, and 2 to 8 stages"
            )


def shared_memory(config: Config, parts: int = 1) -> int:
    """Bytes of shared memory that a CTA takes; `parts` are right operands, of which each has a tile."""
    return 2 * config.num_stages * config.block_k * (config.block_m + parts * config.block_n) + 1024


def configs(m: int, n: int, k: int, target: Target, parts: int = 1) -> Iterator[Config]:
    """The configs worth measuring, for m of 32 or more."""
    for block_m, block_n, block_k, num_stages in itertools.product(
        (128, 64, 32), (128, 64, 32), (64, 32), (4, 3, 2)
    ):
        # A tile of the last columns begins where a row of a tile in shared memory does.
        begins = n >= block_n and n % min(block_n, ROW_BYTES // 2) == 0
        config = Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages)
        fits = shared_memory(config, parts) <= target.shared_memory and parts * block_m * block_n <= 128 * 128
        if m >= block_m and begins and k % block_k == 0 and fits:
            yield config


def heuristic(m: int, n: int, k: int, target: Target, parts: int = 1) -> Config:
    """The largest tiles of which there are enough for all multiprocessors, else the smallest; not measured."""

    # With an activation's argument kept 128 x 128 sums spill 56 bytes on an RTX PRO 6000, as compiled.
    most = 128 * (64 if target.capability[0] >= 12 else 128)

    def rank(config: Config) -> tuple[bool, int, int, int, int]:
        size = config.block_m * config.block_n
        few = pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n) < target.num_cores
        # Of two alike the squarer one; then long steps, three of which are under way.
        return (
            few,
            size if few else -size,
            config.block_m + parts * config.block_n,
            -config.block_k,
            abs(config.num_stages - 3),
        )

    return min((c for c in configs(m, n, k, target, parts) if parts * c.block_m * c.block_n <= most), key=rank)


def uneven(n: int, k: int) -> str | None:
    """Why tiles do not cover columns and contraction; None if they do."""
    return f"takes K and N in multiples of {LEAST}, not {k} and {n}" if k % LEAST or n % LEAST else None


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `matmul` does not serve a call; None if it does."""
    return unsupported_by_tensor_cores(form) or uneven(*form.sizes[1:])


def matmul(form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool) -> Any:
    """The product with epilogue in one kernel; rows are padded that are fewer than 32 or no multiple of 8."""
    (m, n, k), x, residual = form.sizes, form.x, form.residual
    if rows := max(-m % TILE_ROWS, LEAST - m):
        padded = form.replace(
            x=jnp.pad(x, ((0, rows), (0, 0))),
            residual=None if residual is None else jnp.pad(residual, ((0, rows), (0, 0))),
        )
        return jax.tree.map(lambda y: y[:m], matmul(padded, config=config, target=target, interpret=interpret))
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="matmul_mma",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, target),
            candidates=functools.partial(configs, m, n, k, target),
            shared_memory=shared_memory,
        ),
        target,
    )
    out, *kept = launch(
        _Kernel(form.abstract(), config).run,
        dict(x=x, w=form.w, bias=form.bias, residual=residual),
        dict(
            o=jax.ShapeDtypeStruct((m, n), form.out_dtype),
            kept=jax.ShapeDtypeStruct((m, n), form.dtype) if form.return_preactivation else None,
        ),
        {},
        name="matmul_mma",
        num_ctas=pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n),
        num_warpgroups=None,
        interpret=interpret,
    )
    return (out, *kept) if kept else out


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Form[Any]
    config: Config

    def run(self, refs: Refs) -> None:
        """Computes the tile of this CTA."""
        form, (m, n, k), config = self.form, self.form.sizes, self.config
        rows, columns = tile_of(jax.lax.axis_index("cta"), m, n, config)
        w = refs.w.at[columns] if form.transpose_w else refs.w.at[:, columns]
        (sums,) = add_up(refs.x.at[rows], [w], k, config, transpose_w=form.transpose_w)
        self.finish(refs, rows, columns, sums)

    def finish(self, refs: Refs, rows: Any, columns: Any, y: jax.Array) -> None:
        """Stores the tile after bias, activation and residual, and, if kept, after the bias alone."""
        form = self.form
        if refs.bias is not None:
            y += along_columns(refs.bias.at[columns], y.shape)
        if refs.kept is not None:
            store(refs.kept.at[rows, columns], y.astype(refs.kept.dtype))
        y = activate(form.activation, y, form.out_dtype)
        if refs.residual is not None:
            y += load(refs.residual.at[rows, columns], layout_of(y.shape)).astype(jnp.float32)
        store(refs.o.at[rows, columns], y.astype(refs.o.dtype))


def tile_of(cta: jax.Array, m: int, n: int, config: Config) -> tuple[Any, Any]:
    """The rows and the columns of the tile of a CTA. Neighbours share columns, which stay in the L2 cache.

    The last block of an axis ends where the axis does.
    """
    tiles_m = pl.cdiv(m, config.block_m)
    places = (jax.lax.rem(cta, tiles_m), config.block_m, m), (jax.lax.div(cta, tiles_m), config.block_n, n)
    rows, columns = (pl.ds(jnp.minimum(i * block, size - block), block) for i, block, size in places)
    return rows, columns


def add_up(
    x: Ref, right: Sequence[Ref], k: int, config: Config, *, transpose_w: bool = False
) -> tuple[jax.Array, ...]:
    """The products of x (block_m, k) and each right operand, (k, block_n) or, transposed, (block_n, k)."""
    block_m, block_n, step = config.block_m, config.block_n, config.block_k

    def tiles(shape: tuple[int, int], place: Any) -> Any:
        return plgpu.BlockSpec(shape, place, transforms=transforms(row_bytes_of(shape[1], x.dtype), x.dtype))

    def add(_: Any, x: Ref, *rest: Any) -> tuple[jax.Array, ...]:
        *tiles, sums = rest
        a = x[...]
        return tuple(
            multiply(total, a, w.T[...] if transpose_w else w[...]) for total, w in zip(sums, tiles, strict=True)
        )

    of_w = ((block_n, step), lambda i: (0, i)) if transpose_w else ((step, block_n), lambda i: (i, 0))
    sums: tuple[jax.Array, ...] = plgpu.emit_pipeline(
        add,
        grid=(k // step,),
        in_specs=[tiles((block_m, step), lambda i: (0, i)), *[tiles(*of_w)] * len(right)],
        max_concurrent_steps=config.num_stages,
        init_carry=(jnp.zeros((block_m, block_n), jnp.float32),) * len(right),
    )(x, *right)
    return sums


def layout_of(shape: tuple[int, ...]) -> Any:
    """The layout of sums of tiles, as `mma` leaves them: it has as many warps along rows as there are rows for."""
    return plgpu.Layout.MMA_ACC(jnp.float32, m_warps=min(4, shape[0] // 16))


def along_columns(vector: Ref, shape: tuple[int, ...]) -> jax.Array:
    """A vector in device memory as every row of a tile, in float32."""
    loaded = load(vector, layout_of(shape).reduce(0)).astype(jnp.float32)
    return jax.lax.broadcast_in_dim(loaded, shape, [1])
