"""Matrix product, residual and layer norm for Hopper GPUs, of fewer rows than give each CTA a tile of whole ones.

The CTAs of a cluster share the columns of 64 rows, and tell one another the moments of theirs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul_layer_norm import Form
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_sums import all_gather
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, cluster_size
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, tiled
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

Slice = pl.Slice | slice  # as `pl.ds` gives it
_ROWS = 64  # of a tile: as many as one instruction of the tensor cores has
_STEPS = {64: 128, 128: 128, 192: 64}  # by the columns of a CTA, the longest of the contraction that pay


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A CTA has `block_n` columns of 64 rows; the ring has `num_stages` steps of `block_k` of the contraction."""

    block_n: int
    block_k: int
    num_stages: int


def shared_memory(config: Config) -> int:
    """Bytes of shared memory that a CTA takes: ring, result, moments of up to eight CTAs, barriers."""
    ring = config.num_stages * (_ROWS + config.block_n) * config.block_k * 2
    return ring + _ROWS * config.block_n * 2 + 8 * 2 * 4 * _ROWS + 512


def _parts(n: int) -> list[int]:
    """The columns that a CTA may have."""
    return [block_n for block_n in _STEPS if block_n < n and n % block_n == 0]


def candidates(n: int, k: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring, each with as many steps in the ring as fit."""
    for block_n in _parts(n):
        for block_k in (128, 64):
            if k % block_k == 0 and block_k <= _STEPS[block_n]:
                config = Config(block_n=block_n, block_k=block_k, num_stages=k // block_k)
                while shared_memory(config) > target.shared_memory:
                    config = dataclasses.replace(config, num_stages=config.num_stages - 1)
                if config.num_stages >= min(2, k // block_k):
                    yield config


def heuristic(m: int, n: int, k: int, target: Target) -> Config:
    """The tiles for m rows: the fewest columns with which all CTAs run at once, in the longest steps."""
    configs = list(candidates(n, k, target))
    return next((config for config in configs if _at_once(m, n, config.block_n, target)), configs[-1])


def _at_once(m: int, n: int, block_n: int, target: Target) -> bool:
    """Whether all CTAs run at once.

    The CTAs of a cluster share a GPC, some of whose multiprocessors are left over: clusters of more than two CTAs
    have 100 of the 132 multiprocessors of an H200.
    """
    ctas = n // block_n
    return pl.cdiv(m, _ROWS) * ctas <= target.num_cores * (132 if ctas <= 2 else 100) // 132


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the fastest kernel for a call that it serves, as measured on an H200.

    With fewer rows Triton is faster, which adds up parts of the contraction; with more the kernel of whole rows.
    """
    m, n, k = form.sizes
    return m >= max(256, k // 3) and any(_at_once(m, n, block_n, target) for block_n in _parts(n))


def matmul_layer_norm(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Product, residual and layer norm in one kernel, for calls that the kernel of whole rows serves too."""
    (m, n, k), x = form.sizes, form.x
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="matmul_layer_norm_cluster",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, target),
            candidates=functools.partial(candidates, n, k, target),
            shared_memory=shared_memory,
        ),
        target,
    )
    block_n, block_k, num_stages = dataclasses.astuple(config)
    steps = k // block_k
    if block_n % 64 or n % block_n or block_k % 64 or k % block_k or num_stages < min(2, steps):
        raise ValueError(
            f"{config} does not fit {k=} and {n=}; expected divisors, multiples of 64, and a deeper ring"
        )
    ctas = cluster_size(n // block_n, interpret)
    if interpret:
        check_interpreted_sizes(m=(m, _ROWS))
    kernel = _Kernel(
        ctas=ctas,
        block_n=n // ctas,
        block_k=block_k,
        steps=steps,
        num_stages=min(num_stages, steps),
        epsilon=form.epsilon,
    )
    (out,) = launch(
        kernel,
        dict(x=x, w=form.w, scale=form.scale, offset=form.offset, bias=form.bias, residual=form.residual),
        dict(o=jax.ShapeDtypeStruct((m, n), x.dtype)),
        kernel.scratch_types(x.dtype),
        name="matmul_layer_norm_cluster",
        num_ctas=pl.cdiv(m, _ROWS),
        cluster=ctas,
        num_warpgroups=1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return out


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """The body of the kernel: `block_n` columns of 64 rows, for each of the `ctas` of a cluster.

    Attributes:
      steps: of the contraction, `block_k` of it each, of which `num_stages` are in the ring.
    """

    ctas: int
    block_n: int
    block_k: int
    steps: int
    num_stages: int
    epsilon: float

    def scratch_types(self, dtype: DTypeLike) -> dict[str, Any]:
        """Shared memory and barriers for operands of a dtype."""
        return dict(
            x_ring=tiled((self.num_stages, _ROWS, self.block_k), dtype),
            w_ring=tiled((self.num_stages, self.block_k, self.block_n), dtype),
            slot=tiled((_ROWS, self.block_n), dtype),
            moments=plgpu.SMEM((self.ctas, 2, _ROWS), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=self.num_stages),
            ready=plgpu.Barrier(),
        )

    def __call__(self, refs: Refs) -> None:
        rank = 0 if self.ctas == 1 else jax.lax.axis_index("rank")
        rows = pl.Slice(jax.lax.axis_index("cta") * _ROWS, _ROWS)
        columns = pl.ds(rank * self.block_n, self.block_n)
        copy = functools.partial(self.copy, refs, rows, columns)

        def vector(ref: Ref) -> jax.Array:
            return self.along(load(ref.at[columns], plgpu.Layout.WGMMA.reduce(0)), 1)

        pl.loop(0, self.num_stages)(copy)
        if refs.residual is not None:
            plgpu.copy_gmem_to_smem(refs.residual.at[rows, columns], refs.slot, refs.ready)
        bias = None if refs.bias is None else vector(refs.bias)
        accumulator = plgpu.ACC((_ROWS, self.block_n), jnp.float32)
        y = pl.run_scoped(functools.partial(self.product, refs, copy), accumulator)
        if bias is not None:
            y += bias
        if refs.residual is not None:
            plgpu.barrier_wait(refs.ready)
            y += refs.slot[...].astype(jnp.float32)
        mean = jnp.sum(y, axis=1) * (1.0 / self.block_n)
        square = jnp.sum(jnp.square(y - self.along(mean, 0)), axis=1)
        scale, offset = vector(refs.scale), vector(refs.offset)  # on their way during the exchange
        if self.ctas > 1:
            mean, square = self.exchange(refs, rank, mean, square)
        rstd = jax.lax.rsqrt(square * (1.0 / (self.ctas * self.block_n)) + self.epsilon)
        out = (y - self.along(mean, 0)) * self.along(rstd, 0) * scale + offset
        refs.slot[...] = out.astype(refs.o.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.slot, refs.o.at[rows, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def along(self, values: jax.Array, axis: int) -> jax.Array:
        """A value of each row, or of each column, as a tile."""
        return jax.lax.broadcast_in_dim(values.astype(jnp.float32), (_ROWS, self.block_n), [axis])

    def copy(self, refs: Refs, rows: Slice, columns: Slice, step: jax.Array) -> None:
        """Copies the operands of a step of the contraction to its slot."""
        slot, ks = jax.lax.rem(step, self.num_stages), pl.Slice(step * self.block_k, self.block_k)
        full = refs.full.at[slot]
        plgpu.copy_gmem_to_smem(refs.x.at[rows, ks], refs.x_ring.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.w.at[ks, columns], refs.w_ring.at[slot], full)

    def product(self, refs: Refs, copy: Callable[[jax.Array], None], sums: Ref) -> jax.Array:
        """The product of this CTA's tile; `copy(step)` fills slots as they become free."""

        @pl.loop(0, self.steps)
        def _(step: jax.Array) -> None:
            slot = jax.lax.rem(step, self.num_stages)
            plgpu.barrier_wait(refs.full.at[slot])
            plgpu.wgmma(sums, refs.x_ring.at[slot], refs.w_ring.at[slot])
            plgpu.wgmma_wait(1)
            following = step - 1 + self.num_stages

            @pl.when((step > 0) & (following < self.steps))
            def _() -> None:
                plgpu.commit_smem()  # then all warps have read the slot of the step before
                copy(following)

        plgpu.wgmma_wait(0)
        return sums[...]

    def exchange(
        self, refs: Refs, rank: jax.Array | int, mean: jax.Array, square: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Means of whole rows, and sums of squared distances to them, from the moments of each CTA's columns.

        They are combined as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
        """
        for i, value in enumerate((mean, square)):
            refs.moments.at[rank, i][...] = value
        all_gather(refs.moments.at[rank], self.ctas)

        def moment(j: jax.Array, i: int) -> jax.Array:
            return load(refs.moments.at[j, i], plgpu.Layout.WGMMA.reduce(1))

        def total(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
            return jax.lax.fori_loop(1, self.ctas, lambda j, before: before + term(j), term(jnp.int32(0)))

        mean = total(lambda j: moment(j, 0)) * (1.0 / self.ctas)
        square = total(lambda j: moment(j, 1) + jnp.square(moment(j, 0) - mean) * self.block_n)
        return mean, square
