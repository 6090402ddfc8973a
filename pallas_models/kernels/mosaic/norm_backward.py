"""Gradients of layer and RMS norm of rows that no CTA holds, for Hopper GPUs: a cluster of CTAs shares a row.

Every warpgroup has a piece of each row. It copies pieces of the next rows ahead, and keeps a piece on chip until
it knows the sums over its row, so that rows are read from device memory once. While the sums of one row are on
their way between the CTAs, the warpgroup adds up its piece of the next row.
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
from pallas_models.kernels.mosaic.common.device_sums import sums_of_parts
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
_INPUTS = "x", "dout", "residual", "dsum"  # the arrays of rows, in the order of their slots


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Rows in `ctas * warpgroups` pieces of `width` columns; a cluster holds `stages` rows."""

    ctas: int
    warpgroups: int
    width: int
    stages: int


def pieces_of(n: int, row_bytes: int) -> Pieces | None:
    """How a cluster shares rows of n columns, `row_bytes` in all inputs together; None if it cannot.

    Few CTAs with much of a row each are fastest, as long as there are two: a CTA alone cannot send.
    """
    for ctas, warpgroups in itertools.product(range(2, _MOST_CTAS + 1), range(_MOST_WARPGROUPS, 0, -1)):
        width, rest = divmod(n, ctas * warpgroups)
        stages = min(_SLOTS * ctas // row_bytes, _MOST_STAGES)
        if not rest and not width % _MULTIPLE and 0 < width <= _WIDEST and stages >= _LEAST_STAGES:
            return Pieces(ctas=ctas, warpgroups=warpgroups, width=width, stages=stages)
    return None


def clusters_at_once(ctas: int, target: Target) -> int:
    """How many clusters run at once: one more would wait for another to end, and take as long again.

    A cluster is on the multiprocessors of one GPC. A GPC has 16 or 18, one of them may have fewer: an H200 of 132
    multiprocessors ran 15 clusters of 8, 22 of 5 and 30 of 4 at once, but not 16, 24 and 31.
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


class _Rows:
    """A warpgroup's piece of each row of its cluster: a row is added up in one step and finished in the next."""

    def __init__(self, refs: Refs, pieces: Pieces, num_clusters: int, exchange: Exchange) -> None:
        self.refs, self.pieces, self.num_clusters, self.exchange = refs, pieces, num_clusters, exchange
        self.inputs = [name for name in _INPUTS if getattr(refs, name) is not None]
        self.m, self.n = refs.x.shape
        self.cluster, self.warpgroup = jax.lax.axis_index("cta"), jax.lax.axis_index("warpgroup")
        self.piece = self.warpgroup
        if pieces.ctas > 1:
            self.piece = jax.lax.axis_index("rank") * pieces.warpgroups + self.warpgroup
        self.columns = pl.ds(self.piece * pieces.width, pieces.width)
        self.steps = jax.lax.div(self.m - self.cluster + num_clusters - 1, num_clusters)
        self.scales = self.float32(refs.scale.at[self.columns])

    def float32(self, ref: Ref) -> jax.Array:
        return load(ref, self.exchange.layout).astype(jnp.float32)

    def row(self, step: jax.Array | int) -> jax.Array:
        """The row of a step; after the last step the last row."""
        return jnp.minimum(self.cluster + step * self.num_clusters, self.m - 1)

    def slot(self, name: str, step: jax.Array | int) -> Ref:
        """Where the piece of an input lies in shared memory."""
        return self.refs.slots.at[self.inputs.index(name), self.warpgroup, jax.lax.rem(step, self.pieces.stages)]

    def full(self, step: jax.Array | int) -> Ref:
        """The barrier of the copies of a step."""
        stages = self.pieces.stages
        return self.refs.full.at[self.warpgroup * stages + jax.lax.rem(step, stages)]

    def copy(self, step: jax.Array | int) -> None:
        """Begins to copy the piece of each input."""
        for name in self.inputs:
            source = getattr(self.refs, name).at[self.row(step), self.columns]
            whole = _copies.OOBFillMode.PROMISE_IN_BOUNDS  # then it is one copy, of any length
            plgpu.copy_gmem_to_smem(source, self.slot(name, step), self.full(step), oob_mode=whole)

    def statistics(self, step: jax.Array | int) -> list[jax.Array]:
        """The mean of a row in two parts, for layer norm, and the factor that it was multiplied by."""
        statistics = self.refs.statistics
        return [statistics[i, self.row(step)] for i in range(statistics.shape[0])]

    def read(self, step: jax.Array | int, statistics: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The normalised piece, its cotangent, which is dout times the scale, and dout."""
        *means, factor = statistics
        h = self.float32(self.slot("x", step))
        if self.refs.residual is not None:
            h += self.float32(self.slot("residual", step))
        for part in means:
            h -= part
        dout = self.float32(self.slot("dout", step))
        return h * factor, dout * self.scales, dout

    def add(self, step: jax.Array | int, statistics: list[jax.Array]) -> None:
        """Waits for a piece, and sends its terms of the sums over the row."""
        plgpu.barrier_wait(self.full(step))
        h, dh, _ = self.read(step, statistics)
        self.exchange.send(self.refs, step, self.piece, (dh * h, dh)[: self.exchange.count])

    def finish(self, step: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Adds up the next row, then computes and stores the piece of dx, and copies the piece some rows ahead."""
        refs, stages = self.refs, self.pieces.stages
        now, following, totals = carry
        after = self.statistics(step + 2)
        pl.when(step + 1 < self.steps)(functools.partial(self.add, step + 1, following))
        h, dh, dout = self.read(step, now)
        slope, *shift = (total * (1.0 / self.n) for total in self.exchange.receive(refs, step))
        dx = dh - h * slope
        for mean in shift:
            dx -= mean
        dx *= now[-1]
        if refs.dsum is not None:
            dx += self.float32(self.slot("dsum", step))
        slot = self.slot("x", step)
        slot[...] = dx.astype(slot.dtype)
        plgpu.commit_smem()  # the other inputs have been read, too
        plgpu.copy_smem_to_gmem(slot, refs.dx.at[self.row(step), self.columns])

        @pl.when((step > 0) & (step - 1 + stages < self.steps))
        def _() -> None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            self.copy(step - 1 + stages)

        return following, after, [total + term for total, term in zip(totals, (h * dout, dout), strict=False)]

    def run(self) -> None:
        """Walks the rows of the cluster, and stores their terms of the gradients of scale and bias."""
        self.exchange.start(self.refs)
        for step in range(self.pieces.stages):
            pl.when(step < self.steps)(functools.partial(self.copy, step))
        self.add(0, self.statistics(0))
        zeros = [jnp.zeros((self.pieces.width,), jnp.float32)] * self.exchange.count
        first = self.statistics(0), self.statistics(1), zeros
        *_, totals = jax.lax.fori_loop(0, self.steps, self.finish, first)
        for i, total in enumerate(totals):
            self.refs.dvectors[i, self.cluster, self.columns] = total
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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
    x, scale, _, residual = form.operands
    (m, n), num_vectors = x.shape, 2 if form.subtract_mean else 1
    rows = dict(zip(_INPUTS, (x, dout, residual, dsum), strict=True))
    num_inputs = sum(value is not None for value in rows.values())
    alone = Pieces(ctas=1, warpgroups=2, width=n // 2, stages=3)  # the interpreter has no clusters
    pieces = alone if interpret else pieces_of(n, num_inputs * n * x.dtype.itemsize)
    assert pieces is not None  # see `unsupported`
    ctas, warpgroups, width, stages = dataclasses.astuple(pieces)
    num_clusters = min(m, 2 if interpret else clusters_at_once(ctas, target))
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=4)
    exchange = Exchange(ctas, warpgroups, num_vectors, layout)
    dx, dvectors = launch(
        lambda refs: _Rows(refs, pieces, num_clusters, exchange).run(),
        {**rows, "scale": scale, "statistics": statistics},
        dict(
            dx=jax.ShapeDtypeStruct((m, n), x.dtype),
            dvectors=jax.ShapeDtypeStruct((num_vectors, num_clusters, n), jnp.float32),
        ),
        dict(
            slots=plgpu.SMEM((num_inputs, warpgroups, stages, width), x.dtype),
            full=plgpu.Barrier(num_arrivals=num_inputs, num_barriers=warpgroups * stages),
            **exchange.scratch_types(interpret),
        ),
        name=f"{form.name}_backward",
        num_ctas=num_clusters,
        cluster=ctas,
        num_warpgroups=warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return form.gradients(dx, sums_of_parts(dvectors, axis=0))
