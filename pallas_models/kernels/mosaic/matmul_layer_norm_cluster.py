"""Matrix product, residual and layer norm of few rows for Hopper GPUs: the CTAs of a cluster share the columns.

With a CTA for whole rows there were too few of them. Here each has a part of the columns of up to 64 rows, and
the others tell it the moments of theirs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels._common import Ref
from pallas_models.kernels.mosaic._common import check_interpreted_sizes, load, plgpu, tiled
from pallas_models.kernels.mosaic._exchange import all_gather
from pallas_models.kernels.mosaic._launch import Refs, launch
from pallas_models.target import Target
from pallas_models.tuning import Chooser

_UNROLL = False
_DELAY = 2  # steps
_ROWS = 64  # that the tensor cores multiply, however few of them are in a tile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A CTA has `block_n` columns of 64 rows; `num_stages` steps of `block_k` of the contraction are in the ring."""

    block_n: int
    block_k: int
    num_stages: int


def heuristic(m: int, n: int, k: int, target: Target) -> Config:
    """The tiles for m rows: the fewest columns with which all clusters run at once."""
    block_n = 64 if m <= 1024 else 128 if m <= 2560 else 192
    if n % block_n:
        block_n = 128
    block_k = 128 if k % 128 == 0 and block_n < 192 else 64
    num_stages = 200 * 512 // ((_ROWS + block_n) * block_k)
    return Config(block_n=block_n, block_k=block_k, num_stages=num_stages)


def prefer(x: jax.Array, w: jax.Array, *_: jax.Array | None, **__: Any) -> bool:
    """Whether it is the fastest kernel for a call that it serves, as measured on an H200."""
    return True


def matmul_layer_norm(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    offset: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    epsilon: float,
    precision: jax.lax.Precision,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """layer_norm(x @ w + bias + residual) for x (M, K), where `matmul_layer_norm` of whole rows serves the call."""
    del precision
    (m, k), n, dtype = x.shape, w.shape[1], x.dtype
    if not isinstance(config, Config):
        config = heuristic(m, n, k, target)
    if interpret:  # it has no clusters
        check_interpreted_sizes(m=(m, _ROWS))
        config = dataclasses.replace(config, block_n=n)
    width, block_k, num_stages = dataclasses.astuple(config)
    if width % 64 or n % width or block_k % 64 or k % block_k or num_stages < min(_DELAY + 1, k // block_k):
        raise ValueError(f"{config} does not fit {k=} and {n=}; expected divisors in multiples of 64")
    ctas, steps = n // width, k // block_k
    num_stages = min(num_stages, steps)

    def body(refs: Refs) -> None:
        rank = 0 if ctas == 1 else jax.lax.axis_index("rank")
        rows = pl.Slice(jax.lax.axis_index("cta") * _ROWS, _ROWS)
        columns = pl.ds(rank * width, width)

        def copy(step: jax.Array) -> None:
            slot, ks = jax.lax.rem(step, num_stages), pl.Slice(step * block_k, block_k)
            full = refs.full.at[slot]
            plgpu.copy_gmem_to_smem(refs.x.at[rows, ks], refs.x_ring.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.w.at[ks, columns], refs.w_ring.at[slot], full)

        def vector(ref: Ref) -> jax.Array:
            return along(load(ref.at[columns], plgpu.Layout.WGMMA.reduce(0), interpret=interpret), 1)

        def along(values: jax.Array, axis: int) -> jax.Array:
            return jax.lax.broadcast_in_dim(values.astype(jnp.float32), (_ROWS, width), [axis])

        def product(sums: Ref) -> jax.Array:
            @pl.loop(0, steps)
            def _(step: jax.Array) -> None:
                slot = jax.lax.rem(step, num_stages)
                plgpu.barrier_wait(refs.full.at[slot])
                plgpu.wgmma(sums, refs.x_ring.at[slot], refs.w_ring.at[slot])
                plgpu.wgmma_wait(_DELAY)
                following = step - _DELAY + num_stages

                @pl.when((step >= _DELAY) & (following < steps))
                def _() -> None:
                    plgpu.commit_smem()  # then all warps have read that slot
                    copy(following)

            plgpu.wgmma_wait(0)
            return sums[...]

        pl.loop(0, num_stages)(copy)
        if residual is not None:
            plgpu.copy_gmem_to_smem(refs.residual.at[rows, columns], refs.slot, refs.ready)
        bias = None if refs.bias is None else vector(refs.bias)
        y = pl.run_scoped(product, plgpu.ACC((_ROWS, width), jnp.float32))
        if bias is not None:
            y += bias
        if residual is not None:
            plgpu.barrier_wait(refs.ready)
            y += refs.slot[...].astype(jnp.float32)
        mean = jnp.sum(y, axis=1) * (1.0 / width)
        square = jnp.sum(jnp.square(y - along(mean, 0)), axis=1)
        scale, offset = vector(refs.scale), vector(refs.offset)  # on their way during the exchange
        if ctas > 1:
            for i, value in enumerate((mean, square)):
                refs.moments.at[rank, i][...] = value
            all_gather(refs.moments.at[rank], ctas)

            def moment(j: jax.Array, i: int) -> jax.Array:
                return load(refs.moments.at[j, i], plgpu.Layout.WGMMA.reduce(1), interpret=interpret)

            def total(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
                return jax.lax.fori_loop(
                    1, ctas, lambda j, before: before + term(j), term(jnp.int32(0)), unroll=_UNROLL
                )

            # As in Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
            mean = total(lambda j: moment(j, 0)) * (1.0 / ctas)
            square = total(lambda j: moment(j, 1) + jnp.square(moment(j, 0) - mean) * width)
        rstd = jax.lax.rsqrt(square * (1.0 / n) + epsilon)
        refs.slot[...] = ((y - along(mean, 0)) * along(rstd, 0) * scale + offset).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.slot, refs.o.at[rows, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    (out,) = launch(
        body,
        dict(x=x, w=w, scale=scale, offset=offset, bias=bias, residual=residual),
        dict(o=jax.ShapeDtypeStruct((m, n), dtype)),
        dict(
            x_ring=tiled((num_stages, _ROWS, block_k), dtype),
            w_ring=tiled((num_stages, block_k, width), dtype),
            slot=tiled((_ROWS, width), dtype),
            moments=plgpu.SMEM((ctas, 2, _ROWS), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            ready=plgpu.Barrier(),
        ),
        name="matmul_layer_norm_cluster",
        num_ctas=pl.cdiv(m, _ROWS),
        cluster=ctas,
        num_warpgroups=1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return out
