"""Softmax over rows in the registers of threads; rows that are too long for these are read twice."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_models.kernels.forms.softmax import Form
from pallas_models.kernels.mosaic.common.backend import prefer_on_hopper
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import LONGEST_HELD, Config, configs, heuristic
from pallas_models.kernels.mosaic.common.row_reader import Reader
from pallas_models.kernels.mosaic.common.rows import Blocks, sum_of
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `softmax` does not serve a call; None if it does."""
    del target
    n = form.x.shape[1]
    if form.algorithm == "naive":
        return "takes algorithm 'online', 'fused' or None, not 'naive'"
    if form.algorithm == "fused" and n > LONGEST_HELD:
        return f"holds rows of up to {LONGEST_HELD} columns with algorithm='fused', not {n}"
    return None


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether `softmax` is the fastest kernel for a call: with a mask it has not been timed on a Hopper GPU."""
    return form.where is None and prefer_on_hopper(form, target)


class _Rows:
    """The rows of a warpgroup."""

    def __init__(self, refs: Refs, blocks: Blocks, form: Form[jax.Array]) -> None:
        self.refs, self.blocks, self.form, self.i = refs, blocks, form, blocks.place()
        self.reader = Reader(blocks, self.i, refs.x)

    def read(self, step: jax.Array | int) -> tuple[jax.Array, jax.Array | None]:
        """The block of a step, scaled, in float32, -inf where it is masked or past the end; and the mask."""
        blocks, j = self.blocks, self.blocks.column(step)
        (y,) = self.reader.read(step)
        if self.form.scale != 1.0:
            y *= self.form.scale
        if self.refs.where is None:
            valid = blocks.inside(j)
        else:
            valid = blocks.load(self.refs.where, self.i, j, self.form.repeat) != 0
        return (y if valid is None else jnp.where(valid, y, -jnp.inf)), valid

    def exp(self, y: jax.Array, peak: jax.Array) -> jax.Array:
        """`exp(y - peak)`, subtracting first: the product with log2(e) would round a large y too coarsely."""
        return jnp.exp2((y - peak) * _LOG2_E)

    def write(self, step: jax.Array | int, weight: jax.Array, valid: jax.Array | None, total: jax.Array) -> None:
        """Stores `weight / total` as the block of a step."""
        out = weight * self.blocks.spread(1.0 / total)
        if valid is not None:
            out = jnp.where(valid, out, 0.0)  # in a row with nothing left it is NaN until here
        out = out.astype(self.refs.out.dtype)
        self.blocks.store(self.refs.out, self.i, self.blocks.column(step), out)

    def hold(self) -> None:
        """Softmax of rows that threads hold."""
        blocks, steps = self.blocks, range(self.blocks.steps)
        peaks = functools.reduce(jnp.maximum, (self.read(step)[0] for step in steps))
        peak = blocks.spread(blocks.reduce(self.refs, 0, "max", peaks))
        total = blocks.reduce(self.refs, 1, "add", sum_of(self.exp(self.read(step)[0], peak) for step in steps))
        for step in steps:
            y, valid = self.read(step)
            self.write(step, self.exp(y, peak), valid, total)

    def walk(self) -> None:
        """Softmax of long rows, which are read twice, block by block: for maximum and sum, and to write.

        Each place of a block keeps a maximum and a sum of its own. The new maximum is either the old one or the
        new value: one exponential of their distance rescales the sum or is added to it. The first maximum is
        finite, so that its distance to -inf is infinite and not NaN.
        """
        blocks = self.blocks

        def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            peak, total = carry
            y, _ = self.read(step)
            e = jnp.exp2(jnp.abs(y - peak) * -_LOG2_E)
            above = y > peak
            return jnp.where(above, y, peak), jnp.where(above, total * e + 1.0, total + e)

        first = blocks.full(_LOWEST), blocks.full(0.0)
        peaks, totals = jax.lax.fori_loop(0, blocks.steps, add, first)
        peak = blocks.reduce(self.refs, 0, "max", peaks)
        total = blocks.reduce(self.refs, 1, "add", totals * self.exp(peaks, blocks.spread(peak)))

        def write_block(i: jax.Array, carry: None) -> None:
            step = blocks.steps - 1 - i  # the last block read is the likeliest to be in cache still
            y, valid = self.read(step)
            self.write(step, self.exp(y, blocks.spread(peak)), valid, total)

        jax.lax.fori_loop(0, blocks.steps, write_block, None)


def _softmax(refs: Refs, blocks: Blocks, form: Form[jax.Array]) -> None:
    rows = _Rows(refs, blocks, form)
    if blocks.are_held:
        rows.hold()
    else:
        rows.walk()


def softmax(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """Softmax over the rows of x (M, N), in the dtype of x."""
    x = form.x
    m, n = x.shape
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="softmax",
            shape={"m": m, "n": n} | ({} if form.where is None else {"masked": 1}),
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, x.dtype, masked=form.where is not None),
            candidates=functools.partial(configs, m, n, x.dtype),
        ),
        target,
    )
    blocks = Blocks.of(config, x)
    if form.algorithm == "fused" and not blocks.are_held:
        raise ValueError(f"algorithm='fused' needs block_n of at least {n}, the length of a row; got {config}")
    (out,) = launch(
        lambda refs: _softmax(refs, blocks, form),
        dict(x=x, where=form.where),
        dict(out=jax.ShapeDtypeStruct((m, n), x.dtype)),
        blocks.scratch_types(2, interpret),
        name="softmax",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return out
