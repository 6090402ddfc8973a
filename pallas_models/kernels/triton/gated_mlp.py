"""Gated matrix product: gate and up of the same columns in one program, over one read of x."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.triton import matmul
from pallas_models.kernels.triton._common import Ref, activate, local_gpu
from pallas_models.kernels.triton.matmul import Config, Tile, num_tiles, product, program_tile
from pallas_models.tuning import Chooser, Problem, choose


def heuristic(m: int, n: int, k: int, dtype: DTypeLike, num_cores: int) -> Config:
    """Chooses tiles for x (m, k) and w (k, 2, n): those of a product of n columns, with twice the warps."""
    config = matmul.heuristic(m, n, k, dtype, num_cores)
    return dataclasses.replace(config, num_warps=2 * config.num_warps)


def _gated_matmul_kernel(
    x_ref: Ref,  # (M, K)
    w_ref: Ref,  # (K, 2 * N)
    bias_ref: Ref | None,  # (2 * N,)
    o_ref: Ref,  # (M, N)
    *,
    config: Config,
    activation: str | None,
    precision: jax.lax.Precision,
    interpret: bool,
) -> None:
    m, n = o_ref.shape
    gates, ups = program_tile(config, m, n), program_tile(config, m, n, first=n)
    both = Tile(gates.rows, gates.row_mask, gates.columns + ups.columns)
    ys = product(x_ref, w_ref, both, config, jnp.float32, precision)
    for c in range(len(gates.columns)):
        gate, up = ys[c], ys[c + len(gates.columns)]
        if bias_ref is not None:
            gate += gates.load_vector(bias_ref, c)
            up += ups.load_vector(bias_ref, c)
        gates.store(o_ref, c, activate(activation, gate, interpret=interpret) * up)


def gated_matmul(
    x: jax.Array,
    w_gate_up: jax.Array,
    bias: jax.Array | None,
    *,
    activation: str | None,
    precision: jax.lax.Precision,
    out_dtype: DTypeLike,
    config: Config | Chooser | None,
    interpret: bool,
) -> jax.Array:
    """activation(x @ gate) * (x @ up) for x (M, K), w (K, 2, N); see `pallas_models.ops.gated_matmul`."""
    (m, k), n = x.shape, w_gate_up.shape[2]
    config = choose(
        config,
        Problem(
            op="gated_matmul",
            shape={"m": m, "n": n, "k": k},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, x.dtype, local_gpu().num_cores),
            candidates=functools.partial(configs, m, n, k, local_gpu().num_cores),
            shared_memory=functools.partial(shared_memory, itemsize=x.dtype.itemsize),
        ),
    )
    kernel = functools.partial(
        _gated_matmul_kernel, config=config, activation=activation, precision=precision, interpret=interpret
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(num_tiles(config, m, n),),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="gated_matmul",
    )(x, w_gate_up.reshape(k, 2 * n), None if bias is None else bias.reshape(2 * n))


def configs(m: int, n: int, k: int, num_cores: int) -> Iterator[Config]:
    """The tiles worth measuring: those of a product of 2 n columns, half of which are one program's gates."""
    for config in matmul.configs(m, 2 * n, k, num_cores):
        if config.block_n >= 32:
            yield dataclasses.replace(config, block_n=config.block_n // 2)


def shared_memory(config: Config, itemsize: int) -> int:
    """Bytes of shared memory that a program takes for the operands of its products."""
    return matmul.shared_memory(dataclasses.replace(config, block_n=2 * config.block_n), itemsize)
