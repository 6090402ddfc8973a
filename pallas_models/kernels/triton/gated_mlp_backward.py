"""The gradient of a gated product's epilogue: the cotangents of gate and up, and their sums for the biases."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.activations import slope
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.triton.activation_backward import Config, configs, heuristic
from pallas_models.kernels.triton.common import activate, exp2, in_bounds, launch, load, span, store, tile_mask
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def _kernel(
    gate_ref: Ref,  # (M, N)
    up_ref: Ref,  # (M, N)
    dout_ref: Ref,  # (M, N)
    dy_ref: Ref,  # (M, 2, N)
    dbias_ref: Ref | None,  # (splits, 2, N)
    *,
    config: Config,
    activation: str | None,
) -> None:
    m, n = gate_ref.shape
    block_m, block_n, splits = config.block_m, config.block_n, config.splits
    split, column = pl.program_id(0), pl.program_id(1) * block_n
    columns, column_mask = span(column, block_n), in_bounds(column, block_n, n)
    whole = m % (block_m * splits) == 0

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        start = (split + i * splits) * block_m
        rows = span(start, block_m)
        mask = tile_mask(None if whole else start + jnp.arange(block_m) < m, column_mask)
        operands = (load(ref.at[rows, columns], mask) for ref in (gate_ref, up_ref, dout_ref))
        gate, up, dout = (x.astype(jnp.float32) for x in operands)
        dgate = dout * up
        if activation is not None:
            dgate *= slope(activation, gate, exp2)
        parts = [dgate, dout * activate(activation, gate)]
        for part, dy in enumerate(parts):
            store(dy_ref.at[rows, jnp.int32(part), columns], dy, mask)
        return [total + dy for total, dy in zip(totals, parts, strict=False)]  # none without biases

    steps = pl.cdiv(pl.cdiv(m, block_m), splits)
    zeros = [] if dbias_ref is None else [jnp.zeros((block_m, block_n), jnp.float32)] * 2
    totals = jax.lax.fori_loop(0, steps, step, zeros)
    if dbias_ref is not None:
        for part, total in enumerate(totals):
            store(dbias_ref.at[split, jnp.int32(part), columns], jnp.sum(total, axis=0), column_mask)


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
            backend="triton",
            op="gated_mlp_backward",
            shape={"m": m, "n": n},
            bucketed=("m",),
            dtype=gate.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, target),
            candidates=functools.partial(configs, m, n, target),
        ),
        target,
    )
    dy, dbias = launch(
        functools.partial(_kernel, config=config, activation=activation),
        out_shape=(
            jax.ShapeDtypeStruct((m, 2, n), gate.dtype),
            jax.ShapeDtypeStruct((config.splits, 2, n), jnp.float32) if has_bias else None,
        ),
        grid=(config.splits, pl.cdiv(n, config.block_n)),
        num_warps=config.num_warps,
        interpret=interpret,
        name="gated_mlp_backward",
    )(gate, up, dout)
    return dy, jnp.sum(dbias, axis=0) if has_bias else None
