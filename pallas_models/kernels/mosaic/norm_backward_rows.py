"""Gradients of layer and RMS norm of rows in the registers of threads: CTAs walk the rows, and sum on their way.

A thread has the same columns of all rows that it comes by, so that it adds up its terms of the gradients of scale
and bias in registers. It loads a row ahead of the one that it computes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.mosaic.common.device_sums import sums_of_parts
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import WARPGROUP, threads_of_row
from pallas_models.kernels.mosaic.common.row_walk import Walk, registers
from pallas_models.kernels.mosaic.common.rows import Blocks
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.kernels.mosaic.norm import normalised
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LONGEST, _MULTIPLE = 8192, 8  # columns: 16 for each of 512 threads; 16 bytes of 16 bits each
_MOST_THREADS, _MOST_WARPGROUPS = 512, 4
_OTHERS, _MORE = 24, 16  # registers of a thread for all that is not of a column; more that ptxas takes elsewhere
_FEW = (8, 0), (9, 0), (10, 0), (10, 3)  # capabilities of the GPUs where it does not


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config(Walk):
    """How CTAs walk the rows. With `ahead` a warpgroup loads the next ones while it computes."""

    ahead: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """Bytes of a column of a row in all inputs and in the scale, and numbers that are added up for it."""

    inputs: int
    scale: int
    sums: int

    def registers(self, ahead: bool) -> float:
        """Registers for it: inputs, also of the next row if `ahead`, scale, sums, and one to compute."""
        return (self.inputs * (1 + ahead) + self.scale) / 4 + self.sums + 1


def heuristic(m: int, n: int, column: Column, dtype: DTypeLike, target: Target) -> Config:
    """Chooses a CTA a multiprocessor, of as many warpgroups as have registers to load rows ahead.

    A thread has 16 columns, or up to 32 where 16 would leave threads without any. Registers are divided among the
    threads of a CTA, so that its size says how many a thread has; more CTAs leave more sums to add up.
    """
    vector = vector_length(n, dtype)
    threads = threads_of_row(n, vector, _MOST_THREADS)
    columns = pl.cdiv(n, threads * vector) * vector
    least = max(threads // WARPGROUP, 1)
    sizes = range(_MOST_WARPGROUPS // least * least, least, -least)  # and the least, where no other will do
    busy = [size for size in sizes if m * threads >= size * WARPGROUP * target.num_cores]
    others = _OTHERS + (0 if target.capability in _FEW else _MORE)
    for ahead, warpgroups in itertools.product((True, False), (*busy, least)):
        if columns * column.registers(ahead) + others <= registers(warpgroups):
            return _config(m, threads, warpgroups, 1, ahead, target)
    return _config(m, threads, least, 1, False, target)


def _config(m: int, threads: int, warpgroups: int, at_once: int, ahead: bool, target: Target) -> Config:
    """A config of so many CTAs a multiprocessor, or fewer where they have no rows."""
    num_ctas = min(at_once * target.num_cores, pl.cdiv(m * threads, warpgroups * WARPGROUP))
    return Config(threads=threads, warpgroups=warpgroups, num_ctas=num_ctas, ahead=ahead)


def configs(m: int, n: int, target: Target) -> Iterator[Config]:
    """The configs worth measuring: 8 to 32 columns a thread, up to 16 warpgroups a multiprocessor."""
    found = []
    for columns, warpgroups, at_once, ahead in itertools.product(
        (8, 16, 32), (1, 2, 3, 4), (1, 2, 4, 8), (True, False)
    ):
        threads = pl.next_power_of_2(pl.cdiv(n, columns))
        is_whole = warpgroups % max(threads // WARPGROUP, 1) == 0
        if is_whole and 2 <= warpgroups * at_once <= 16:
            found.append(_config(m, threads, warpgroups, at_once, ahead, target))
    yield from dict.fromkeys(found)  # few rows have few CTAs, and short ones few threads


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `norm_backward` does not serve a call; None if it does."""
    n = form.x.shape[1]
    if n > _LONGEST or n % _MULTIPLE:
        return f"takes rows of up to {_LONGEST} columns, in multiples of {_MULTIPLE}, not {n}"
    return None


_Read = tuple[list[jax.Array], list[jax.Array]]  # blocks of the inputs, and the statistics of their rows


class _Rows:
    """The rows of a warpgroup, in steps."""

    def __init__(self, refs: Refs, blocks: Blocks, ahead: bool) -> None:
        self.refs, self.blocks, self.ahead = refs, blocks, ahead
        self.first, self.column = blocks.place(), blocks.column(0)
        self.apart = blocks.num_ctas * blocks.groups  # blocks from a step to the next one
        self.count = pl.cdiv(blocks.m, blocks.shape[0])
        self.steps = pl.cdiv(self.count, self.apart)
        self.inputs: list[Ref] = [r for r in (refs.x, refs.residual, refs.dout, refs.dsum) if r is not None]
        self.scale = blocks.load(refs.scale, self.first, self.column)

    def place(self, step: jax.Array | int) -> jax.Array:
        """The block of a step, or one past the last row.

        The last rows come first: the kernel before this one wrote them last, and the cache still holds them.
        """
        block = self.first + (self.steps - 1 - step) * self.apart
        return jnp.where(jnp.asarray(step) < self.steps, block, self.count)

    def read(self, step: jax.Array | int) -> _Read:
        blocks, i, statistics = self.blocks, self.place(step), self.refs.statistics
        numbers = [blocks.load_numbers(statistics, i, row=k) for k in range(statistics.shape[0])]
        return [blocks.load(ref, i, self.column) for ref in self.inputs], numbers

    def terms(self, read: _Read) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """The normalised block, its cotangent, which is dout times the scale, dout, and what is left: dsum."""
        blocks, (arrays, (*means, factor)) = self.blocks, read
        y, *rest = (blocks.again(x).astype(jnp.float32) for x in arrays)
        if self.refs.residual is not None:
            y, *rest = y + rest[0], *rest[1:]
        dout, *dsum = rest
        return (
            normalised(blocks, y, means, factor),
            dout * blocks.again(self.scale).astype(jnp.float32),
            dout,
            dsum,
        )

    def step(self, step: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        """Computes dx of a block, and adds up the terms of the gradients of scale and bias."""
        blocks, (ahead, totals) = self.blocks, carry
        read: _Read = ahead or self.read(step)
        following = self.read(step + 1) if self.ahead else ()
        h, dh, dout, _ = self.terms(read)
        # Past the last row factor and normalised values are 0; past the last column they meet cotangents of 0.
        totals = [total + term for total, term in zip(totals, (h * dout, dout), strict=False)]
        slot = jax.lax.rem(step, 2)  # a warp may read the numbers of the last step still
        sums = blocks.reduce_all(self.refs, slot, "add", *(dh * h, dh)[: len(totals)])
        factor = read[1][-1]
        slope, *shift = (blocks.spread(x * factor * (-1.0 / blocks.n)) for x in sums)
        h, dh, _, dsum = self.terms(read)
        dx = h * slope + dh * blocks.spread(factor)
        for x in (*shift, *dsum):
            dx += x
        i = self.place(step)
        for ref in (self.refs.dx, self.refs.dresidual):
            if ref is not None:
                blocks.store(ref, i, self.column, dx.astype(ref.dtype))
        return following, totals

    def run(self) -> None:
        """Walks the rows of the CTA, and stores their terms of the gradients of scale and bias."""
        dvectors = self.refs.dvectors
        zeros = [self.blocks.full(0.0)] * dvectors.shape[0]
        _, totals = jax.lax.fori_loop(0, self.steps, self.step, (self.read(0) if self.ahead else (), zeros))
        for k, total in enumerate(totals):
            self.blocks.store_sums(self.refs, dvectors.at[k], jax.lax.axis_index("cta"), total)


def norm_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    *,
    wanted: tuple[bool, ...],
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array | None, ...]:
    """The cotangents of x (M, N), scale, bias and residual, from the statistics of the rows.

    The gradients of scale and bias are summed in two stages, by each CTA and over the CTAs, always in the same
    order.
    """
    (statistics,), (dout, dsum) = kept, form.cotangents(cotangents)
    x, scale, _, residual = form.operands
    (m, n), name = x.shape, f"{form.name}_backward"
    num_vectors = 2 if form.subtract_mean else 1
    inputs = sum(rows.dtype.itemsize for rows in (x, residual, dout, dsum) if rows is not None)
    column = Column(inputs=inputs, scale=scale.dtype.itemsize, sums=num_vectors)
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op=name,
            shape={"m": m, "n": n} | form.variant(dsum),
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, column, x.dtype, target),
            candidates=functools.partial(configs, m, n, target),
        ),
        target,
    )
    ahead = config.ahead
    blocks = Blocks.of(config.rows(n), x, config.num_ctas)
    apart = residual is not None and residual.dtype != x.dtype
    dx, *dresidual, dvectors = launch(
        lambda refs: _Rows(refs, blocks, ahead).run(),
        dict(x=x, residual=residual, dout=dout, dsum=dsum, scale=scale, statistics=statistics),
        dict(
            dx=jax.ShapeDtypeStruct((m, n), x.dtype),
            dresidual=jax.ShapeDtypeStruct((m, n), residual.dtype) if residual is not None and apart else None,
            dvectors=jax.ShapeDtypeStruct((num_vectors, config.num_ctas, n), jnp.float32),
        ),
        blocks.scratch_types(2, interpret, arrays=num_vectors) | blocks.sums_scratch_types(interpret),
        name=name,
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return form.gradients(dx, sums_of_parts(dvectors, axis=0), *dresidual)
