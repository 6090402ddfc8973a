"""The gradient of softmax over rows, from its result, in the registers of threads; long rows are read twice."""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_models.kernels.forms.softmax import Form
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.row_config import Config, configs, heuristic
from pallas_models.kernels.mosaic.common.row_reader import Reader
from pallas_models.kernels.mosaic.common.rows import Blocks, sum_of
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def _softmax_backward(refs: Refs, blocks: Blocks, scale: float) -> None:
    i = blocks.place()
    reader = Reader(blocks, i, refs.kept, refs.dout)

    def read(step: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The result, and its cotangent where that is not 0: a masked entry has none, whatever is handed back."""
        out, dout = reader.read(step)
        return out, jnp.where(out == 0.0, 0.0, dout)

    def write(step: jax.Array | int, out: jax.Array, dout: jax.Array, mean: jax.Array) -> None:
        dx = out * (dout - blocks.spread(mean)) * scale
        blocks.store(refs.dx, i, blocks.column(step), dx.astype(refs.dx.dtype))

    if blocks.are_held:
        steps = range(blocks.steps)
        mean = blocks.reduce(refs, 0, "add", sum_of(operator.mul(*read(step)) for step in steps))
        for step in steps:
            write(step, *read(step), mean)
        return

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        out, dout = read(step)
        return total + out * dout

    mean = blocks.reduce(refs, 0, "add", jax.lax.fori_loop(0, blocks.steps, add, blocks.full(0.0)))

    def write_block(k: jax.Array, carry: None) -> None:
        step = blocks.steps - 1 - k  # the last block read is the likeliest to be in cache still
        write(step, *read(step), mean)

    jax.lax.fori_loop(0, blocks.steps, write_block, None)


def softmax_backward(
    form: Form[jax.Array],
    kept: list[jax.Array],
    cotangents: list[jax.Array],
    *,
    wanted: tuple[bool, ...],
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, None]:
    """The cotangent of x (M, N), `out * (dout - sum(out * dout)) * scale`, which is 0 wherever out is."""
    assert wanted[0], "where has no cotangent"
    (out,), (dout,) = kept, cotangents
    m, n = out.shape
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="softmax_backward",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=out.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, out.dtype, 2, reductions=1),
            candidates=functools.partial(configs, m, n, out.dtype),
        ),
        target,
    )
    blocks = Blocks.of(config, out)
    (dx,) = launch(
        lambda refs: _softmax_backward(refs, blocks, form.scale),
        dict(kept=out, dout=dout),
        dict(dx=jax.ShapeDtypeStruct((m, n), form.x.dtype)),
        blocks.scratch_types(1, interpret),
        name="softmax_backward",
        num_ctas=blocks.num_ctas,
        num_warpgroups=blocks.warpgroups,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return dx, None
