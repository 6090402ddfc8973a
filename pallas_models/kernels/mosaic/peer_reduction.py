"""Sums of the parts that all GPUs of a mesh have stored here, stored on all of them, for Hopper GPUs."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.target import Target

# Rows and columns that are summed up at a time, one run of memory: Mosaic copies more than 256 elements only in
# rows.
ROWS, COLUMNS = 16, 256
_CTAS = 2  # of one warpgroup on a multiprocessor: one sums up while the other waits


def sum_of_parts(
    parts: jax.Array, residual: jax.Array | None, *, peers: Peers, target: Target, interpret: bool
) -> jax.Array:
    """The sum of parts (GPUs, M, N) on GPU i, in float32, as rows i M to (i + 1) M of the result on all GPUs.

    M N is a multiple of ROWS * COLUMNS.

    Args:
      residual: (GPUs * M, N), added before the sum is rounded, or None.

    Returns:
      (GPUs * M, N) in the dtype of parts.
    """
    count, m, n = parts.shape
    rows, terms = m * n // COLUMNS, count + (residual is not None)
    num_pieces = rows // ROWS
    num_ctas = min(_CTAS * num_cores(target, interpret), num_pieces)

    def kernel(refs: Refs) -> None:
        cta, first = jax.lax.axis_index("cta"), peers.index * rows
        steps = jax.lax.div(num_pieces - cta + num_ctas - 1, num_ctas)

        def piece(step: jax.Array) -> jax.Array:
            return pl.multiple_of((cta + step * num_ctas) * ROWS, ROWS)

        def fetch(step: jax.Array) -> None:
            slot, start = jax.lax.rem(step, 2), piece(step)
            sources = [refs.parts.at[i, pl.ds(start, ROWS)] for i in range(count)]
            if residual is not None:
                sources.append(refs.residual.at[pl.ds(first + start, ROWS)])
            for i, source in enumerate(sources):
                plgpu.copy_gmem_to_smem(source, refs.pieces.at[slot, i], refs.full.at[slot])

        fetch(jnp.int32(0))

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            pl.when(step + 1 < steps)(lambda: fetch(step + 1))
            slot = jax.lax.rem(step, 2)
            plgpu.barrier_wait(refs.full.at[slot])
            total = sum(refs.pieces[slot, i].astype(jnp.float32) for i in range(terms))
            plgpu.wait_smem_to_gmem(peers.count, wait_read_only=True)  # the copies of the sum before the last
            refs.sums[slot] = total.astype(parts.dtype)
            plgpu.commit_smem()
            for i in range(1, peers.count + 1):  # each begins with the next GPU, so that all links carry alike
                out = peers.on(refs.out, jax.lax.rem(peers.index + i, peers.count))
                plgpu.copy_smem_to_gmem(refs.sums.at[slot], out.at[pl.ds(first + piece(step), ROWS)])

        peers.finish(refs, storing=1, waits=True)

    (out,) = launch(
        kernel,
        dict(
            parts=parts.reshape(count, rows, COLUMNS),
            residual=None if residual is None else residual.reshape(-1, COLUMNS),
        ),
        dict(out=jax.ShapeDtypeStruct((count * rows, COLUMNS), parts.dtype)),
        dict(
            pieces=plgpu.SMEM((2, terms, ROWS, COLUMNS), parts.dtype),
            sums=plgpu.SMEM((2, ROWS, COLUMNS), parts.dtype),
            full=plgpu.Barrier(num_arrivals=terms, num_barriers=2),
            **peers.scratch_types,
        ),
        name="sum_of_parts",
        num_ctas=num_ctas,
        num_warpgroups=1,
        interpret=interpret,
    )
    return out.reshape(count * m, n)
