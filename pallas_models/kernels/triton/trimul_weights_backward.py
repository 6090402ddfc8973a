"""The gradient of the weights and biases of the projections of the triangle multiplicative update.

The gradient of all weights does not fit into a multiprocessor's registers. So a program has some of the columns,
walks its share of the positions, and computes again what it needs of the projections there.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.trimul_sides import Side
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.forms.trimul_backward import Given, OfWeights
from pallas_models.kernels.triton.column_sums import column_sums
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    fitted,
    in_bounds,
    launch,
    load,
    plgpu,
    span,
    store,
    tile_mask,
)
from pallas_models.kernels.triton.trimul_project_backward import Rows, sigmoid
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A program has `block_n` projections and their gates, or twice as many gates: `block_m` positions a step.

    `splits` programs share the positions of the same columns.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.splits < 1:
            raise ValueError(f"{__name__}: splits={self.splits} must be at least 1")


def _config(
    form: Projection[Any],
    target: Target,
    block_m: int,
    block_n: int,
    per_core: int,
    num_warps: int,
    num_stages: int,
) -> Config:
    splits = max(per_core * target.num_cores // _chunks(form, block_n), 1)
    return Config(block_m=block_m, block_n=block_n, splits=splits, num_warps=num_warps, num_stages=num_stages)


def heuristic(form: Projection[Any], target: Target) -> Config:
    """Chooses blocks that fit into the shared memory of a target, and off Hopper into registers."""
    of = functools.partial(_config, form, target)
    block_n = 64 if target.runs(HOPPER) else 32
    config = of(16, 16, 2, 4, 1) if form.w.dtype.itemsize == 4 else of(128, block_n, 1, 8, 2)
    return fitted(config, functools.partial(shared_memory, form=form), target)


def configs(form: Projection[Any], target: Target) -> Iterator[Config]:
    """The blocks worth measuring."""
    blocks = ((16, 32), (16, 32)) if form.w.dtype.itemsize == 4 else ((64, 128), (32, 64))
    for (block_m, block_n), per_core, num_warps, num_stages in itertools.product(
        itertools.product(*blocks), (1, 2), (4, 8), (2, 3, 4)
    ):
        yield _config(form, target, block_m, block_n, per_core, num_warps, num_stages)


def shared_memory(config: Config, form: Projection[Any]) -> int:
    """Bytes of shared memory that the operands of products take."""
    c, itemsize = block_size(form.x.shape[2], 16, 1024), form.w.dtype.itemsize
    staged = config.block_m * (c + config.block_n)
    kept = 2 * config.block_n * (c + config.block_m)
    return (config.num_stages * staged + kept) * itemsize


def _chunks(form: Projection[Any], block_n: int) -> int:
    """How many programs share the columns."""
    return 2 * pl.cdiv(form.hidden, block_n) + pl.cdiv(form.gates, 2 * block_n)


def _kernel(
    z_ref: Ref,  # (B, M, C)
    mask_ref: Ref | None,  # (B, M)
    w_ref: Ref,  # (C, 4, H)
    b_ref: Ref | None,  # (4, H)
    given: Given,
    dw_ref: Ref,  # (splits, chunks, 2, C, block_n)
    db_ref: Ref | None,  # (splits, chunks, 2, block_n)
    *,
    config: Config,
    form: Projection[Any],
) -> None:
    items, size, c = z_ref.shape
    h, gates, dtype = w_ref.shape[2], given.gate.shape[1], w_ref.dtype
    block_m, block_n, block_c = config.block_m, config.block_n, block_size(c, 16, 1024)
    dot = functools.partial(plgpu.dot, precision=form.precision)
    cs, c_mask, ns = span(0, block_c), in_bounds(0, block_c, c), span(0, block_n)
    split, chunk, of_a_side = pl.program_id(0), pl.program_id(1), pl.cdiv(h, block_n)
    steps = jax.lax.div(items * pl.cdiv(size, block_m) - split + config.splits - 1, jnp.int32(config.splits))

    def add_up(cotangents: Callable[[Rows, jax.Array], list[jax.Array]]) -> None:
        """Sums of both halves of the columns, from `cotangents(rows, z)`, (block_m, block_n) each."""

        def step(i: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
            rows = Rows.of(split + i * config.splits, block_m, form)
            z = load(z_ref.at[rows.item, rows.span, cs], tile_mask(rows.mask, c_mask))
            ds = cotangents(rows, z)
            dws = [dw + dot(z, d, trans_a=True) for dw, d in zip(carry[:2], ds, strict=True)]
            return dws + [
                db + jnp.sum(d.astype(jnp.float32), axis=0) for db, d in zip(carry[2:], ds, strict=False)
            ]

        zeros = [jnp.zeros((block_c, block_n), jnp.float32)] * 2
        zeros += [] if db_ref is None else [jnp.zeros(block_n, jnp.float32)] * 2
        sums = jax.lax.fori_loop(0, steps, step, zeros)
        for k in range(2):
            store(dw_ref.at[split, chunk, jnp.int32(k), cs, ns], sums[k], tile_mask(c_mask, None))
            if db_ref is not None:
                store(db_ref.at[split, chunk, jnp.int32(k), ns], sums[2 + k])

    def of_side(side: int, dside_ref: Ref) -> None:
        start = (chunk - side * of_a_side) * block_n
        channels, n_mask = span(start, block_n), in_bounds(start, block_n, h)
        ws = [load(w_ref.at[cs, jnp.int32(2 * side + k), channels], tile_mask(c_mask, n_mask)) for k in range(2)]
        biases = None
        if b_ref is not None:
            biases = [load(b_ref.at[jnp.int32(2 * side + k), channels], n_mask)[None, :] for k in range(2)]
        shrink = load(given.scales.at[jnp.int32(3)])

        def cotangents(rows: Rows, z: jax.Array) -> list[jax.Array]:
            products = [dot(z, w) for w in ws]
            if biases is not None:
                products = [y + b for y, b in zip(products, biases, strict=True)]
            cotangent = load(dside_ref.at[rows.filled, channels, rows.span], tile_mask(n_mask, rows.mask)).T
            factor = rows.factor(mask_ref)
            p, g = products
            pulled = Side.pulled(
                p,
                sigmoid(g, dtype),
                cotangent.astype(jnp.float32),
                None if factor is None else factor[:, None],
                (shrink, 1.0),
                dtype=dtype,
            )
            return [pulled.projection, pulled.gate]

        add_up(cotangents)

    @pl.when(chunk < of_a_side)
    def of_left() -> None:
        of_side(0, given.left)

    @pl.when((chunk >= of_a_side) & (chunk < 2 * of_a_side))
    def of_right() -> None:
        of_side(1, given.right)

    @pl.when(chunk >= 2 * of_a_side)
    def of_gate() -> None:
        def cotangents(rows: Rows, _: jax.Array) -> list[jax.Array]:
            starts = [(2 * (chunk - 2 * of_a_side) + k) * block_n for k in range(2)]
            return [
                load(
                    given.gate.at[rows.filled, span(start, block_n), rows.span],
                    tile_mask(start + jnp.arange(block_n) < gates, rows.mask),
                ).T
                for start in starts
            ]

        add_up(cotangents)


def weights_backward(
    form: Projection[jax.Array],
    z: jax.Array,
    given: Given,
    *,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> OfWeights:
    """The gradient of `trimul_project.project` for the weights, from the normalised positions z (B, M, C).

    Each is still to be multiplied by the scale of its cotangent among the first three `scales`.
    """
    b, size, c = z.shape
    h, gates, dtype = form.hidden, form.gates, form.w.dtype
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_weights_backward",
            shape={"m": b * size, "c": c, "h": h, "g": gates},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, form, target),
            candidates=functools.partial(configs, form, target),
            shared_memory=functools.partial(shared_memory, form=form),
        ),
        target,
    )
    block_n, chunks = config.block_n, _chunks(form, config.block_n)
    has_bias = form.bias is not None or form.b_gate is not None
    config = dataclasses.replace(config, splits=min(config.splits, b * pl.cdiv(size, config.block_m)))
    dw, db = launch(
        functools.partial(_kernel, config=config, form=form.abstract()),
        out_shape=(
            jax.ShapeDtypeStruct((config.splits, chunks, 2, c, block_n), jnp.float32),
            jax.ShapeDtypeStruct((config.splits, chunks, 2, block_n), jnp.float32) if has_bias else None,
        ),
        grid=(config.splits, chunks),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="trimul_weights_backward",
    )(z, form.mask, form.w, form.bias, given)

    def total(parts: jax.Array) -> jax.Array:
        """The sums over all programs, (chunks, 2, C or 1, block_n)."""
        (y,) = column_sums(parts.reshape(1, config.splits, -1), [jnp.float32], interpret=interpret)
        return y.reshape(chunks, 2, -1, block_n)

    def side_columns(y: jax.Array) -> jax.Array:
        """(C, 4, H) from chunks of left and then of right."""
        y = y.reshape(2, -1, *y.shape[1:]).transpose(3, 0, 2, 1, 4)  # C, side, projection or gate, chunk, column
        return y.reshape(len(y), 4, -1)[:, :, :h]

    def gate_columns(y: jax.Array) -> jax.Array:
        """(C, G) from chunks of two halves."""
        return y.transpose(2, 0, 1, 3).reshape(y.shape[2], -1)[:, :gates]

    of_sides = 2 * pl.cdiv(h, block_n)
    sums = [total(dw)] + ([] if db is None else [total(db)])
    w, *bias = (side_columns(y[:of_sides]) for y in sums)
    w_gate, *b_gate = (gate_columns(y[of_sides:]) for y in sums)
    if not has_bias:
        return OfWeights(w=w, bias=None, w_gate=w_gate, b_gate=None)
    return OfWeights(w=w, bias=bias[0][0], w_gate=w_gate, b_gate=b_gate[0][0])
