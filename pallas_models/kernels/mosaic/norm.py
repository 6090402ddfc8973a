"""Layer and RMS norm of rows in the registers of threads; rows that are too long for these are read twice."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.forms.norm import Form
from pallas_models.kernels.mosaic.common.backend import prefer_on_hopper
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import iota
from pallas_models.kernels.mosaic.common.row_config import Config, configs
from pallas_models.kernels.mosaic.common.row_config import heuristic as of_rows
from pallas_models.kernels.mosaic.common.row_reader import Reader
from pallas_models.kernels.mosaic.common.rows import Blocks, sum_of
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_ALONE = range(8193, 16385)  # columns of rows whose threads would be alone on a multiprocessor


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether `norm` is the fastest kernel for a call: not where threads that hold a row are alone on an SM."""
    is_alone = form.residual is not None and form.x.shape[-1] in _ALONE
    return not is_alone and prefer_on_hopper(form, target)


def heuristic(m: int, n: int, dtype: DTypeLike, *, arrays: int, reductions: int) -> Config:
    """Chooses as for all rows, but 256 threads for 8193 to 16384 columns of 16 bits, which they keep.

    512 threads that hold such a row in float32 are alone on their multiprocessor, where nothing is loaded while
    they add up: on an H200 16384 columns took 1.29 (layer norm) and 1.25 (RMS norm) of Triton's time, and 0.85
    and 0.89 as these do.

    Args:
      arrays: how many arrays of such rows are read.
      reductions: how many numbers of a row its threads exchange.
    """
    if n in _ALONE and arrays == 1 and jnp.dtype(dtype).itemsize == 2 and n % 8 == 0:
        return Config(threads=256, block_n=4096, warpgroups=2, keep=True)
    return of_rows(m, n, dtype, arrays, reductions=reductions)


def normalised(blocks: Blocks, y: jax.Array, means: Sequence[jax.Array], factor: jax.Array) -> jax.Array:
    """A block of rows without their means, if there are any, in two parts, times their factors."""
    if not means:
        return y * blocks.spread(factor)
    mean, rest = means
    return (y - blocks.spread(mean)) * blocks.spread(factor) + blocks.spread(-rest * factor)


class _Rows:
    """The rows of a warpgroup."""

    def __init__(self, refs: Refs, blocks: Blocks, form: Form[jax.Array]) -> None:
        self.refs, self.blocks, self.form, self.i = refs, blocks, form, blocks.place()
        self.reader = Reader(blocks, self.i, refs.x, refs.residual)

    def read(self, step: jax.Array | int) -> jax.Array:
        """The sum that is normalised, in the block of a step; 0 past the end of a row."""
        x, *residual = self.reader.read(step)
        return x + residual[0] if residual else x

    def kept(self, step: jax.Array | int, d: jax.Array) -> jax.Array:
        """Deviations from the mean, 0 past the end of a row."""
        inside = self.blocks.inside(self.blocks.column(step))
        return d if inside is None else jnp.where(inside, d, 0.0)

    def mean(self, slot: int, x: jax.Array) -> jax.Array:
        """The mean of every row of terms, of which there are none past its end."""
        return self.blocks.reduce(self.refs, slot, "add", x) * (1.0 / self.blocks.n)

    def invert(self, variance: jax.Array, *means: jax.Array) -> jax.Array:
        """The factor that gives unit variance; for the gradient it and the mean in two parts go to memory."""
        factor = jax.lax.rsqrt(variance + self.form.epsilon)
        if self.refs.statistics is not None:
            for k, value in enumerate((*means, factor)):
                self.blocks.store_numbers(self.refs.statistics, k, self.i, value)
        return factor

    def write(self, step: jax.Array | int, y: jax.Array, means: tuple[jax.Array, ...], factor: jax.Array) -> None:
        """Stores the norm of the block of a step, and the sum that was normalised where it is asked for."""
        blocks, refs, j = self.blocks, self.refs, self.blocks.column(step)
        out = normalised(blocks, y, means, factor) * blocks.load(refs.scale, self.i, j).astype(jnp.float32)
        if refs.bias is not None:
            out += blocks.load(refs.bias, self.i, j).astype(jnp.float32)
        blocks.store(refs.out, self.i, j, out.astype(refs.out.dtype))
        if refs.total is not None:
            blocks.store(refs.total, self.i, j, y.astype(refs.total.dtype))

    def hold(self) -> None:
        """Norm of rows that threads hold."""
        steps = range(self.blocks.steps)
        means: tuple[jax.Array, ...] = ()
        if self.form.subtract_mean:
            mean = self.blocks.rounded(self.mean(0, sum_of(self.read(step) for step in steps)))
            deviations = (self.kept(step, self.read(step) - self.blocks.spread(mean)) for step in steps)
            d, squares = map(sum_of, zip(*((d, d * d) for d in deviations), strict=True))
            rest = self.mean(1, d)  # the error of the rounded mean: it counts in rows that vary less
            means = mean, rest
            variance = jnp.maximum(self.mean(2, squares) - rest * rest, 0.0)
        else:
            variance = self.mean(0, sum_of(jnp.square(self.read(step)) for step in steps))
        factor = self.invert(variance, *means)
        for step in steps:
            self.write(step, self.read(step), means, factor)

    def walk(self) -> None:
        """Norm of long rows, which are read twice, block by block.

        The first time for the statistics, by Welford's method: each place of a block keeps a mean and a sum of
        squared deviations of its own, and they are merged at the end. Sums of squares about 0 would cancel where
        the mean is far from 0.
        """
        blocks = self.blocks

        def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            own, squares = carry
            y = self.read(step)
            d = self.kept(step, y - own)
            part = d * (1.0 / (step + 1).astype(jnp.float32))
            return own + part, squares + d * (d - part)

        def add_squares(step: jax.Array, squares: jax.Array) -> jax.Array:
            y = self.read(step)
            return squares + y * y

        zeros = blocks.full(0.0)
        means: tuple[jax.Array, ...] = ()
        if self.form.subtract_mean:
            own, squares = jax.lax.fori_loop(0, blocks.steps, add, (zeros, zeros))
            counts = self.counts()
            mean = blocks.rounded(self.mean(0, own * counts))
            own -= blocks.spread(mean)
            rest = self.mean(1, own * counts)
            means = mean, rest
            own -= blocks.spread(rest)
            squares += counts * own * own
            variance = self.mean(2, squares)
        else:
            variance = self.mean(0, jax.lax.fori_loop(0, blocks.steps, add_squares, zeros))
        factor = self.invert(variance, *means)

        def write_block(i: jax.Array, carry: None) -> None:
            step = blocks.steps - 1 - i  # the last block read is the likeliest to be in cache still
            self.write(step, self.read(step), means, factor)

        jax.lax.fori_loop(0, blocks.steps, write_block, None)

    def counts(self) -> jax.Array:
        """How many columns each place of a block stands for."""
        blocks = self.blocks
        width = blocks.shape[1]
        place = iota(blocks.shape, 1, blocks.layout) + blocks.column(0) * width
        whole, rest = divmod(blocks.n, width * blocks.row_warpgroups)
        return jnp.where(place < rest, float(whole + 1), float(whole))


def _norm(refs: Refs, blocks: Blocks, form: Form[jax.Array]) -> None:
    rows = _Rows(refs, blocks, form)
    if blocks.are_held:
        rows.hold()
    else:
        rows.walk()


def norm(form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool) -> Any:
    """Layer or RMS norm over the rows of x (M, N).

    Without a residual, the sum that `return_residual` asks for is x, which is not copied.
    """
    x, residual = form.x, form.residual
    m, n = x.shape
    numbers = 3 if form.subtract_mean else 1
    returns_sum = form.return_residual and residual is not None
    variant = {} if residual is None else {"residual": 1}
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op=form.name,
            shape={"m": m, "n": n} | variant | ({"sum": 1} if returns_sum else {}),
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(
                heuristic, m, n, x.dtype, arrays=1 if residual is None else 2, reductions=numbers
            ),
            candidates=functools.partial(configs, m, n, x.dtype),
        ),
        target,
    )
    blocks = Blocks.of(config, x)
    rows = jax.ShapeDtypeStruct((m, n), x.dtype)
    statistics = jax.ShapeDtypeStruct((numbers, m), jnp.float32) if form.return_statistics else None
    out, *others = launch(
        lambda refs: _norm(refs, blocks, form),
        dict(x=x, scale=form.scale, bias=form.bias, residual=residual),
        dict(out=rows, total=rows if returns_sum else None, statistics=statistics),
        blocks.scratch_types(numbers, interpret),
        name=form.name,
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    result = (out, others[0] if returns_sum else x) if form.return_residual else out
    return (result, others[-1]) if form.return_statistics else result
