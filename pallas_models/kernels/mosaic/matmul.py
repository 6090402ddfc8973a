"""Matrix product with a fused epilogue, for Hopper GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_models.kernels.mosaic._common import Ref, activate, row, untiled
from pallas_models.kernels.mosaic._gemm import CONSUMERS, Block, Config, Refs, Tile, blocks, gemm, staging, store


def unsupported(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    transpose_w: bool,
    activation: str | None,
    acc_dtype: DTypeLike,
    out_dtype: DTypeLike,
    algorithm: str | None,
    config: Any,
    batch: int,
) -> str | None:
    """Why `matmul` does not serve a call; None if it does."""
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if jnp.dtype(acc_dtype) != jnp.float32:
        return f"accumulates in float32, not {jnp.dtype(acc_dtype)}"
    if residual is not None and residual.dtype != out_dtype:
        return f"takes a residual of the dtype of the result, {out_dtype}, not {residual.dtype}"
    if algorithm is not None:
        return f"has none of the algorithms of the Triton kernel, such as {algorithm!r}"
    if config is not None and not isinstance(config, Config):
        return f"takes a Config of {Config.__module__}, not {type(config).__module__}.{type(config).__name__}"
    if batch > 1:
        return "takes no batch of weights"
    n = w.shape[0 if transpose_w else 1]
    return (
        untiled("x", x.shape, x.dtype)
        or untiled("w", w.shape, w.dtype)
        or untiled("the result", (x.shape[0], n), out_dtype)
    )


def prefer(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    transpose_w: bool,
    activation: str | None,
    out_dtype: DTypeLike,
) -> bool:
    """Whether it is the faster kernel for a call that it serves."""
    return True


def heuristic(m: int, n: int, k: int) -> Config:
    return Config(block_m=128, block_n=256, num_stages=3, ping_pong=False)


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    transpose_w: bool,
    activation: str | None,
    out_dtype: DTypeLike,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """activation(x @ w + bias) + residual for x (M, K), w (K, N) or (N, K); see `pallas_models.ops.matmul`."""
    (m, k), n = x.shape, w.shape[0 if transpose_w else 1]
    config = config or heuristic(m, n, k)
    parts = blocks(config, config.block_n, out_dtype)
    num_slots = min(len(parts), config.num_slots) if residual is None else len(parts)  # a residual waits there
    scratch_types: dict[str, Any] = dict(slots=staging(out_dtype, num_slots))
    num_copies = (bias is not None) + (num_slots if residual is not None else 0)
    if num_copies:
        scratch_types["ready"] = plgpu.Barrier(num_arrivals=num_copies, num_barriers=CONSUMERS)
    if bias is not None:
        scratch_types["bias_tile"] = plgpu.SMEM((CONSUMERS, config.block_n), bias.dtype)

    def prefetch(refs: Refs, tile: Tile, warpgroup: jax.Array) -> None:
        ready = refs.ready.at[warpgroup]
        if bias is not None:
            plgpu.copy_gmem_to_smem(refs.bias.at[tile.columns], refs.bias_tile.at[warpgroup], ready)
        if residual is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left these slots
            for i, block in enumerate(parts):
                plgpu.copy_gmem_to_smem(block.at(refs.residual, tile), refs.slots.at[warpgroup, i], ready)

    def epilogue(refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        if num_copies:
            plgpu.barrier_wait(refs.ready.at[warpgroup])

        def value(block: Block, slot: Ref) -> jax.Array:
            y = block.of(sums[0])
            if bias is not None:
                y += row(refs.bias_tile.at[warpgroup, block.columns], y.shape)
            y = activate(activation, y)
            return y if residual is None else y + slot[...].astype(jnp.float32)

        store(refs.slots.at[warpgroup], refs.o, tile, parts, value, wait=residual is None)

    (out,) = gemm(
        dict(x=x, w=w, bias=bias, residual=residual),
        dict(o=jax.ShapeDtypeStruct((m, n), out_dtype)),
        config=config,
        m=m,
        n=n,
        k=k,
        dtype=x.dtype,
        a=lambda refs, tile, ks: refs.x.at[tile.rows, ks],
        b=[lambda refs, tile, ks: refs.w.at[(tile.columns, ks) if transpose_w else (ks, tile.columns)]],
        transpose_b=transpose_w,
        prefetch=prefetch if num_copies else None,
        epilogue=epilogue,
        scratch_types=scratch_types,
        name="matmul",
        interpret=interpret,
    )
    return out
