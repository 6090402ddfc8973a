"""Gradients of layer and RMS norm of rows that no CTA holds, for Hopper GPUs: a cluster of CTAs shares a row.

Every warpgroup has a piece of each row. It copies pieces of the next rows ahead, and keeps one on chip until it
knows what the whole row adds up to, so that rows are read from device memory once. While the sums of one row are
on their way between the CTAs, it adds up the next one's.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.cluster_sums import Exchange
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load
from pallas_models.target import Target
from pallas_models.tuning import Chooser

_copies = Backend("jax.experimental.mosaic.gpu.launch_context")

_SHORTEST = 8192  # columns: shorter rows fit well into the registers of one CTA
_MULTIPLE = 512  # columns: four for each thread of a warpgroup, 8 or 16 bytes
_WIDEST = 2048  # columns of a piece: registers hold sums of as many columns
_MOST_CTAS, _MOST_WARPGROUPS, _MOST_STAGES = 8, 4, 8
_LEAST_STAGES = 3  # the row that is finished, the next one, which is added up, and one on its way
_SLOTS = 216 * 1024  # bytes of shared memory for pieces of rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Rows of `ctas * warpgroups * width` columns, of which a cluster holds `stages`."""

    ctas: int
    warpgroups: int
    width: int
    stages: int


def pieces_of(n: int, row_bytes: int) -> Pieces | None:
    """How rows of n columns, `row_bytes` of all inputs together, are shared; None if they cannot be.

    Few CTAs with much of a row each are fastest, as long as there are two: a CTA alone cannot send.
    """
    for ctas, warpgroups in itertools.product(range(2, _MOST_CTAS + 1), range(_MOST_WARPGROUPS, 0, -1)):
        width, rest = divmod(n, ctas * warpgroups)
        stages = min(_SLOTS * ctas // row_bytes, _MOST_STAGES)
        if not rest and not width % _MULTIPLE and 0 < width <= _WIDEST and stages >= _LEAST_STAGES:
            return Pieces(ctas=ctas, warpgroups=warpgroups, width=width, stages=stages)
    return None


def clusters_at_once(ctas: int, target: Target) -> int:
    """How many clusters run at once: those that wait for others take as long again.

    A cluster is on the multiprocessors of one GPC, which are 16 or 18, or fewer in one of them: an H200 of 132 ran
    15 clusters of 8, 22 of 5 and 30 of 4 at once, but not 16, 24 and 31.
    """
    whole, rest = divmod(max(target.num_cores - 12, ctas), 16)
    return whole * (16 // ctas) + rest // ctas


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `norm_backward` does not serve a call; None if it does."""
    x, residual = form.x, form.residual
    if residual is not None and residual.dtype != x.dtype:
        return f"takes a residual of the dtype of x, {x.dtype}, not {residual.dtype}"
    n, inputs = x.shape[1], 2 + (residual is not None) + form.return_residual
    if n <= _SHORTEST or pieces_of(n, inputs * n * x.dtype.itemsize) is None:
        return (
            f"takes rows of over {_SHORTEST} columns, which 2 to {_MOST_CTAS} CTAs of up to {_MOST_WARPGROUPS} "
            f"warpgroups share in pieces of a multiple of {_MULTIPLE} up to {_WIDEST}, and of which they hold "
            f"{_LEAST_STAGES}; not {inputs} arrays of {n} columns in {x.dtype}"
        )
    return None


def norm_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of x (M, N), scale, bias and residual, from the statistics of the rows.

    The gradients of scale and bias are summed in two stages, by each cluster and over the clusters, always in the
    same order.
    """
    (statistics,), (dout, dsum) = kept, form.cotangents(cotangents)
    x, scale, bias, residual = form.operands
    (m, n), num_vectors = x.shape, 2 if form.subtract_mean else 1
    given = dict(x=x, dout=dout, residual=residual, dsum=dsum)
    inputs = {name: value for name, value in given.items() if value is not None}
    if interpret:  # it has no clusters
        pieces: Pieces | None = Pieces(ctas=1, warpgroups=2, width=n // 2, stages=3)
    else:
        pieces = pieces_of(n, len(inputs) * n * x.dtype.itemsize)
    assert pieces is not None  # see `unsupported`
    ctas, warpgroups, width, stages = dataclasses.astuple(pieces)
    num_clusters = min(m, 2 if interpret else clusters_at_once(ctas, target))
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=4)
    exchange = Exchange(ctas, warpgroups, num_vectors, layout, interpret)

    def body(refs: Refs) -> None:
        cluster, warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
        piece = warpgroup if ctas == 1 else jax.lax.axis_index("rank") * warpgroups + warpgroup
        columns = pl.ds(piece * width, width)
        steps = jax.lax.div(m - cluster + num_clusters - 1, num_clusters)

        def float32(ref: Ref) -> jax.Array:
            return load(ref, layout).astype(jnp.float32)

        scales = float32(refs.scale.at[columns])

        def row_of(step: jax.Array | int) -> jax.Array:
            """The row of a step; after the last step the last row."""
            return jnp.minimum(cluster + step * num_clusters, m - 1)

        def slot_of(name: str, step: jax.Array | int) -> Ref:
            return refs.slots.at[list(inputs).index(name), warpgroup, jax.lax.rem(step, stages)]

        def full(step: jax.Array | int) -> Ref:
            return refs.full.at[warpgroup * stages + jax.lax.rem(step, stages)]

        def copy(step: jax.Array | int) -> None:
            for name in inputs:
                source = getattr(refs, name).at[row_of(step), columns]
                whole = _copies.OOBFillMode.PROMISE_IN_BOUNDS  # then it is one copy, of any length
                plgpu.copy_gmem_to_smem(source, slot_of(name, step), full(step), oob_mode=whole)

        def known(step: jax.Array | int) -> list[jax.Array]:
            """The statistics of a row."""
            return [refs.statistics[i, row_of(step)] for i in range(statistics.shape[0])]

        def read(step: jax.Array | int, known: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            """What was normalised, its cotangent before it was scaled, and dout."""
            *means, factor = known
            h = float32(slot_of("x", step))
            if residual is not None:
                h += float32(slot_of("residual", step))
            for part in means:
                h -= part
            dout = float32(slot_of("dout", step))
            return h * factor, dout * scales, dout

        def add(step: jax.Array | int, known: list[jax.Array]) -> None:
            plgpu.barrier_wait(full(step))
            h, dh, _ = read(step, known)
            exchange.send(refs, step, piece, (dh * h, dh)[:num_vectors])

        def finish(step: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            now, following, totals = carry
            after = known(step + 2)
            pl.when(step + 1 < steps)(functools.partial(add, step + 1, following))
            h, dh, dout = read(step, now)
            slope, *shift = (total * (1.0 / n) for total in exchange.receive(refs, step))
            dx = dh - h * slope
            for mean in shift:
                dx -= mean
            dx *= now[-1]
            if dsum is not None:
                dx += float32(slot_of("dsum", step))
            slot = slot_of("x", step)
            slot[...] = dx.astype(x.dtype)
            plgpu.commit_smem()  # the other inputs have been read, too
            plgpu.copy_smem_to_gmem(slot, refs.dx.at[row_of(step), columns])

            @pl.when((step > 0) & (step - 1 + stages < steps))
            def _() -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                copy(step - 1 + stages)

            return following, after, [total + term for total, term in zip(totals, (h * dout, dout), strict=False)]

        exchange.start(refs)
        for step in range(stages):
            pl.when(step < steps)(functools.partial(copy, step))
        add(0, known(0))
        zeros = [jnp.zeros((width,), jnp.float32)] * num_vectors
        *_, totals = jax.lax.fori_loop(0, steps, finish, (known(0), known(1), zeros))
        for i, total in enumerate(totals):
            refs.dvectors[i, cluster, columns] = total
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    dx, dvectors = launch(
        body,
        {**inputs, "scale": scale, "statistics": statistics},
        dict(
            dx=jax.ShapeDtypeStruct((m, n), x.dtype),
            dvectors=jax.ShapeDtypeStruct((num_vectors, num_clusters, n), jnp.float32),
        ),
        dict(
            slots=plgpu.SMEM((len(inputs), warpgroups, stages, width), x.dtype),
            full=plgpu.Barrier(num_arrivals=len(inputs), num_barriers=warpgroups * stages),
            **exchange.scratch_types,
        ),
        name=f"{form.name}_backward",
        num_ctas=num_clusters,
        cluster=ctas,
        num_warpgroups=warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    dscale, *dbias = jnp.sum(dvectors, axis=1)
    return (
        dx,
        dscale.astype(scale.dtype),
        None if bias is None else dbias[0].astype(bias.dtype),
        None if residual is None else dx,
    )
