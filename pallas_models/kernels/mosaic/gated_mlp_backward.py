"""The gradient of a gated product's epilogue: the cotangents of gate and up, and their sums for the biases.

It needs nothing that only Hopper has, but has been compiled for Hopper only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.activations import slope
from pallas_models.kernels.mosaic import activation_backward
from pallas_models.kernels.mosaic.activation_backward import Config
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.tiles import Tile
from pallas_models.kernels.mosaic.common.vectors import vector_length
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def _kernel(refs: Refs, *, tile: Tile, config: Config, activation: str | None) -> None:
    (m, n), splits, block_m = refs.gate.shape, config.splits, config.block_m
    blocks = pl.cdiv(n, tile.columns)
    cta = jax.lax.axis_index("cta")
    split, column = jax.lax.div(cta, blocks), jax.lax.rem(cta, blocks) * tile.columns

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        start = (split + i * splits) * (block_m * tile.rows)
        places = [start + j * tile.rows + tile.index() for j in range(block_m)]
        operands = refs.gate, refs.up, refs.dout
        loaded = [[tile.load(ref, rows, column) for ref in operands] for rows in places]
        for rows, arrays in zip(places, loaded, strict=True):
            gate, up, dout = (x.astype(jnp.float32) for x in arrays)
            dgate = dout * up
            if activation is not None:
                dgate *= slope(activation, gate, jnp.exp2)
            parts = [dgate, dout * activate(activation, gate, jnp.float32)]
            for part, dy in enumerate(parts):
                tile.store(refs.dy, 2 * rows + part, dy, column)
            totals = [total + dy for total, dy in zip(totals, parts, strict=False)]  # none without biases
        return totals

    steps = pl.cdiv(pl.cdiv(m, block_m * tile.rows), splits)
    zeros = [] if refs.dbias is None else [tile.full(0.0)] * 2
    for part, total in enumerate(jax.lax.fori_loop(0, steps, step, zeros)):
        tile.store(refs.dbias, (part * splits + split) * tile.rows + tile.index(), total, column)


def heuristic(m: int, n: int, dtype: DTypeLike, target: Target, *, has_bias: bool) -> Config:
    """As for an activation's gradient; with sums for biases in 6 CTAs a multiprocessor, whose registers fit."""
    config = activation_backward.heuristic(m, n, dtype, target)
    return dataclasses.replace(config, splits=max(3 * config.splits // 4, 1)) if has_bias else config


def gated_mlp_backward(
    gate: jax.Array,
    up: jax.Array,
    dout: jax.Array,
    *,
    activation: str | None,
    has_bias: bool,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The cotangents of gate and up, (M, N) each, as (M, 2, N) in their dtype, and their sums for biases, (2, N).

    `dout` is the cotangent of activation(gate) * up.
    """
    m, n = gate.shape
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="gated_mlp_backward",
            shape={"m": m, "n": n} | ({"bias": 1} if has_bias else {}),
            bucketed=("m",),
            dtype=gate.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, gate.dtype, target, has_bias=has_bias),
            candidates=functools.partial(activation_backward.configs, m, n, gate.dtype, target),
        ),
        target,
    )
    tile = Tile(config.threads, vector_length(n, gate.dtype))
    sums = jax.ShapeDtypeStruct((2 * config.splits * tile.rows, n), jnp.float32)
    dy, *dbias = launch(
        functools.partial(_kernel, tile=tile, config=config, activation=activation),
        dict(gate=gate, up=up, dout=dout),
        dict(
            dy=jax.ShapeDtypeStruct((2 * m, n), gate.dtype),  # of a row gate and up, one after the other
            dbias=sums if has_bias else None,
        ),
        {},
        name="gated_mlp_backward",
        num_ctas=config.splits * pl.cdiv(n, tile.columns),
        num_warpgroups=1,
        interpret=interpret,
    )
    return dy.reshape(m, 2, n), jnp.sum(dbias[0].reshape(2, -1, n), axis=1) if dbias else None
