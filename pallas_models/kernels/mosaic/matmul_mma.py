"""Matrix product with a fused epilogue by `mma`, which multiplies registers: for every GPU from Ampere on.

A CTA is one warpgroup with one tile of the result. Tiles of the operands are copied to shared memory some steps
ahead of the products that read them. Tiles of the last rows and columns begin where they still fit: what two tiles
have in common is computed twice, with the same result.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import ROW_BYTES, TILE_ROWS, load, row_bytes_of, store, transforms
from pallas_models.kernels.mosaic.matmul import unsupported_by_tensor_cores
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LEAST = 32  # rows, columns and elements of the contraction of a tile


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


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a CTA takes."""
    return 2 * config.num_stages * config.block_k * (config.block_m + config.block_n) + 1024


def configs(m: int, n: int, k: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring, for m of 32 or more."""
    for block_m, block_n, block_k, num_stages in itertools.product(
        (128, 64, 32), (128, 64, 32), (64, 32), (4, 3, 2)
    ):
        # A tile of the last columns begins where a row of a tile in shared memory does.
        begins = n >= block_n and n % min(block_n, ROW_BYTES // 2) == 0
        config = Config(block_m=block_m, block_n=block_n, block_k=block_k, num_stages=num_stages)
        if m >= block_m and begins and k % block_k == 0 and shared_memory(config) <= target.shared_memory:
            yield config


def heuristic(m: int, n: int, k: int, target: Target) -> Config:
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
            config.block_m + config.block_n,
            -config.block_k,
            abs(config.num_stages - 3),
        )

    return min((c for c in configs(m, n, k, target) if c.block_m * c.block_n <= most), key=rank)


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `matmul` does not serve a call; None if it does."""
    if reason := unsupported_by_tensor_cores(form):
        return reason
    _, n, k = form.sizes
    if k % _LEAST or n % _LEAST:
        return f"takes K and N in multiples of {_LEAST}, not {k} and {n}"
    return None


def prefer(form: Form[Any], target: Target) -> bool:
    """Whether it is the fastest kernel for a call: no, as far as is known. It takes the place of missing ones."""
    return False


@meaning(lambda sums, a, b: sums + jnp.dot(a, b, preferred_element_type=jnp.float32))
def _multiply(sums: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`sums + a @ b` by the tensor cores, all in registers."""
    added: jax.Array = plgpu.mma(sums, a, b)
    return added


def matmul(form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool) -> Any:
    """The product with epilogue in one kernel; rows are padded that are fewer than 32 or no multiple of 8."""
    (m, n, k), x, residual = form.sizes, form.x, form.residual
    if rows := max(-m % TILE_ROWS, _LEAST - m):
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
        tile, tiles_m = jax.lax.axis_index("cta"), pl.cdiv(m, config.block_m)
        # Neighbours share columns of w, which stay in the L2 cache.
        rows = _slice(jax.lax.rem(tile, tiles_m), config.block_m, m)
        columns = _slice(jax.lax.div(tile, tiles_m), config.block_n, n)
        step = config.block_k
        w, of_w = refs.w.at[:, columns], ((step, config.block_n), lambda i: (i, 0))
        if form.transpose_w:
            w, of_w = refs.w.at[columns], ((config.block_n, step), lambda i: (0, i))
        sums = plgpu.emit_pipeline(
            self.step,
            grid=(k // step,),
            in_specs=[
                self.tiles((config.block_m, step), lambda i: (0, i)),
                self.tiles(*of_w),
            ],
            max_concurrent_steps=config.num_stages,
            init_carry=jnp.zeros((config.block_m, config.block_n), jnp.float32),
        )(refs.x.at[rows], w)
        self.finish(refs, rows, columns, sums)

    def tiles(self, shape: tuple[int, int], place: Any) -> Any:
        """How tiles of an operand are copied, one a step."""
        row_bytes = row_bytes_of(shape[1], self.form.dtype)
        return plgpu.BlockSpec(shape, place, transforms=transforms(row_bytes, self.form.dtype))

    def step(self, _: Any, x: Ref, w: Ref, sums: jax.Array) -> jax.Array:
        """Adds the product of two tiles."""
        return _multiply(sums, x[...], w.T[...] if self.form.transpose_w else w[...])

    def finish(self, refs: Refs, rows: Any, columns: Any, y: jax.Array) -> None:
        """Stores the tile after bias, activation and residual, and, if kept, after the bias alone."""
        form = self.form
        if refs.bias is not None:
            y += _along_columns(refs.bias.at[columns], y.shape)
        if refs.kept is not None:
            store(refs.kept.at[rows, columns], y.astype(refs.kept.dtype))
        y = activate(form.activation, y, form.out_dtype)
        if refs.residual is not None:
            y += load(refs.residual.at[rows, columns], _layout(y.shape)).astype(jnp.float32)
        store(refs.o.at[rows, columns], y.astype(refs.o.dtype))


def _slice(i: jax.Array, block: int, size: int) -> Any:
    """The i-th block of an axis; the last one ends where the axis does."""
    return pl.ds(jnp.minimum(i * block, size - block), block)


def _layout(shape: tuple[int, ...]) -> Any:
    """The layout of sums of tiles, as `mma` leaves them: it has as many warps along rows as there are rows for."""
    return plgpu.Layout.MMA_ACC(jnp.float32, m_warps=min(4, shape[0] // 16))


def _along_columns(vector: Ref, shape: tuple[int, ...]) -> jax.Array:
    """A vector in device memory as every row of a tile, in float32."""
    loaded = load(vector, _layout(shape).reduce(0)).astype(jnp.float32)
    return jax.lax.broadcast_in_dim(loaded, shape, [1])
