"""Gated matrix product: gate and up of the same columns in one program, over one read of x."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.gated_mlp import Form
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.triton import matmul
from pallas_models.kernels.triton.common import activate, launch, load, tile_mask
from pallas_models.kernels.triton.product import (
    Config,
    Dot,
    Load,
    Tile,
    accumulate,
    load_rows,
    num_tiles,
    program_tile,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def _halved(config: Config) -> Config:
    """The config of a gated product from one for 2 n columns: half of them are for gate, half for up."""
    return dataclasses.replace(config, block_n=config.block_n // 2)


def heuristic(m: int, n: int, k: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses tiles for x (m, k) and w (k, 2, n)."""
    return _halved(matmul.heuristic(m, 2 * n, k, dtype, target, splits=(1,)))


def _load_gate_up(w_ref: Ref, tile: Tile, n: int) -> Load:
    """Loads gate and up of a tile's columns as one block, twice as wide: its product reads x half as often."""

    def load_w(ks: pl.Slice, k_mask: jax.Array | None) -> list[jax.Array]:
        rows = ks.start + jnp.arange(ks.size)
        blocks = []
        for columns, mask in tile.columns:
            lane = jnp.arange(2 * columns.size)
            # Up lies n columns after gate. Triton sees that neighbouring lanes are contiguous from a quotient.
            column = columns.start + lane + jax.lax.div(lane, columns.size) * (n - columns.size)
            if mask is not None:
                mask = columns.start + jax.lax.rem(lane, columns.size) < n
            blocks.append(load(w_ref.at[rows[:, None], column[None, :]], tile_mask(k_mask, mask)))
        return blocks

    return load_w


def _gated_matmul_kernel(
    x_ref: Ref,  # (M, K)
    w_ref: Ref,  # (K, 2 * N)
    bias_ref: Ref | None,  # (2, N)
    o_ref: Ref,  # (M, N)
    gate_ref: Ref | None,  # (M, N)
    up_ref: Ref | None,  # (M, N)
    *,
    config: Config,
    activation: Activation | None,
    dot: Dot,
) -> None:
    m, n = o_ref.shape
    tile = program_tile(config, m, n, largest=128)
    ys = accumulate(
        load_rows(x_ref, tile),
        _load_gate_up(w_ref, tile, n),
        [2 * int(columns.size) for columns, _ in tile.columns],
        x_ref.shape[1],
        config,
        dot,
    )
    for c, y in enumerate(ys):
        gate, up = jnp.split(y, 2, axis=1)
        if bias_ref is not None:
            gate += tile.load_vector(bias_ref, c, jnp.int32(0))
            up += tile.load_vector(bias_ref, c, jnp.int32(1))
        for ref, kept in ((gate_ref, gate), (up_ref, up)):
            if ref is not None:
                tile.store(ref, c, kept)
        tile.store(o_ref, c, activate(activation, gate) * up)


def gated_matmul(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> Any:
    """Both products in one kernel, with `return_products` a triple of the result and them."""
    x, (m, n, k) = form.x, form.sizes
    config = choose(
        config,
        Problem(
            backend="triton",
            op="gated_matmul",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, x.dtype, target),
            candidates=functools.partial(configs, m, n, k, target.num_cores),
            shared_memory=functools.partial(shared_memory, itemsize=x.dtype.itemsize),
        ),
        target,
    )
    if config.splits > 1:
        raise ValueError(f"splits={config.splits}: a gated product does not split its contraction")
    kernel = functools.partial(
        _gated_matmul_kernel,
        config=config,
        activation=form.activation,
        dot=Dot(precision=form.precision),
    )
    product = jax.ShapeDtypeStruct((m, n), x.dtype) if form.return_products else None
    out, *products = launch(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((m, n), form.out_dtype), product, product),
        grid=(num_tiles(config, m, n),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="gated_matmul",
    )(x, form.w_gate_up.reshape(k, 2 * n), form.bias)
    return (out, *products) if form.return_products else out


def configs(m: int, n: int, k: int, num_cores: int) -> Iterator[Config]:
    """The tiles worth measuring."""
    for config in matmul.configs(m, 2 * n, k, num_cores):
        if config.block_n >= 32 and config.splits == 1:
            yield _halved(config)


def shared_memory(config: Config, itemsize: int) -> int:
    """Bytes of shared memory that a program takes for the operands of its products."""
    return matmul.shared_memory(dataclasses.replace(config, block_n=2 * config.block_n), itemsize)
