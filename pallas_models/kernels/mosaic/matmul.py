"""Matrix product with a fused epilogue, for Hopper GPUs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul import Activation, Form
from pallas_models.kernels.mosaic.common import gemm as _gemm
from pallas_models.kernels.mosaic.common.activations import activate, derivative
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm import (
    Block,
    Config,
    Measured,
    Output,
    Tile,
    blocks,
    candidates,
    fastest,
    gemm,
    staging,
    store,
)
from pallas_models.kernels.mosaic.common.interpreter import interprets_transposed
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import row, untiled
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LARGE = 1 << 20  # weights


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `matmul` does not serve a call; None if it does."""
    x, w, residual = form.x, form.w, form.residual
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if form.acc_dtype != jnp.float32:
        return f"accumulates in float32, not {form.acc_dtype}"
    if residual is not None and residual.dtype != form.out_dtype:
        return f"takes a residual of the dtype of the result, {form.out_dtype}, not {residual.dtype}"
    if form.algorithm is not None:
        return f"has none of the algorithms of the Triton kernel, such as {form.algorithm!r}"
    if form.batch > 1:
        return "takes no batch of weights"
    m, n, _ = form.sizes
    return (
        untiled("x", x.shape, x.dtype)
        or untiled("w", w.shape, w.dtype)
        or untiled("the result", (m, n), form.out_dtype)
    )


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the faster kernel for a call that it serves."""
    return is_long(form.x.shape[0], form.w.size)


def is_long(rows: int, weights: int) -> bool:
    """Whether a product of so many rows and weights takes so long that Mosaic's kernel is faster than Triton's.

    XLA has a Triton kernel begin while the kernel before it ends, but not a kernel of Mosaic. Where both kernels
    are short that decides.
    """
    return rows >= 256 or (rows >= 128 and weights >= _LARGE)


# Fitted to 34 products of 128 to 32768 rows and K of 384 to 12288 in bfloat16 on an H200; the tiles that the fit
# chooses take 1% longer than the best of 10, and 5% at most.
_TILES = (
    Measured(256, 192, False, 1.60, 0.0147),
    Measured(128, 256, False, 1.27, 0.0100),
    Measured(128, 192, True, 0.70, 0.0074),
    Measured(128, 128, True, 0.60, 0.0051),
    Measured(64, 192, True, 0.55, 0.0040),
    Measured(64, 128, True, 0.30, 0.0030),
    Measured(128, 64, False, 0.40, 0.0030),
    Measured(64, 64, True, 0.35, 0.0022, block_k=128),
)
# Fitted to 45 products of 1024 to 65536 rows, K of 256 and 384 in float16: up to 10% shorter than those above, and
# at most 3% longer. The steps are half as long where operand and result exceed the L2 cache.
_RESIDENT = Measured(64, 192, True, 0.10, 0.0043, block_k=128, resident=True)
_L2 = 35 << 20  # bytes of an H200's that they can have
# The same with a residual, which waits in shared memory and leaves the ring less of it.
_TILES_AND_RESIDUAL = (
    Measured(128, 256, False, 2.17, 0.0100),
    Measured(128, 192, False, 1.70, 0.0074),
    Measured(128, 128, False, 0.67, 0.0052),
    Measured(64, 128, True, 0.41, 0.0030),
    Measured(128, 64, False, 0.40, 0.0029),
    Measured(64, 64, True, 0.45, 0.0022, block_k=128),
)

# With an activation's slope at a residual, which takes longer than the sum beside which it is computed.
_TILES_AND_SLOPE = (
    Measured(128, 192, True, 1.85, 0.0079),
    Measured(128, 128, True, 1.29, 0.0051),
    Measured(64, 128, True, 1.00, 0.0030),
    Measured(64, 64, True, 0.60, 0.0022, block_k=128),
)


def num_slots(config: Config, columns: int, out_dtype: DTypeLike, *, residual: bool) -> int:
    """Slots for a warpgroup: for all of its part of a tile with a residual, which waits there."""
    count = config.rows * columns * jnp.dtype(out_dtype).itemsize // _gemm.SLOT_BYTES
    return count if residual else min(count, config.num_slots)


def shared_memory(
    config: Config, k: int, out_dtype: DTypeLike, *, residual: bool = False, preactivation: DTypeLike | None = None
) -> int:
    """Bytes of shared memory that a block takes for a contraction of `k`.

    `preactivation` is its dtype, None where it is not kept.
    """
    slots = num_slots(config, config.block_n, out_dtype, residual=residual)
    if preactivation is not None:
        slots += num_slots(config, config.block_n, preactivation, residual=False)
    return _gemm.shared_memory(config, slots, k)


def heuristic(
    m: int,
    n: int,
    k: int,
    target: Target,
    *,
    out_dtype: DTypeLike,
    residual: bool = False,
    activation: bool = False,
    preactivation: DTypeLike | None = None,
    slope: bool = False,
    peers: bool = False,
) -> Config:
    """Chooses tiles for x (m, k) and w (k, n), such as divide n for stores to `peers`."""
    if slope:
        tiles: Sequence[Measured] = _TILES_AND_SLOPE
    elif residual:
        tiles = _TILES_AND_RESIDUAL
    else:  # an activation takes as long as a short sum: it wants to be computed beside one
        tiles = [t for t in _TILES if (t.ping_pong or not activation) and not (peers and n % t.block_n)]
        itemsize = jnp.dtype(out_dtype).itemsize
        fitted = k >= 256 and k % _RESIDENT.block_k == 0 and n % _RESIDENT.block_n == 0
        if itemsize == 2 and preactivation is None and not peers and fitted:
            short = not activation and m * (n + k) * itemsize > _L2
            tiles.append(dataclasses.replace(_RESIDENT, block_k=64 if short else 128))
    size = functools.partial(
        shared_memory, k=k, out_dtype=out_dtype, residual=residual, preactivation=preactivation
    )
    return fastest(tiles, m, n, k, size, target)


def matmul(
    form: Form[jax.Array],
    *,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
    slope: Activation | None = None,
    peers: Peers | None = None,
) -> Any:
    """activation(x @ w + bias) + residual for x (M, K), w (K, N) or (N, K); see `pallas_models.ops.matmul`.

    With `return_preactivation` a pair: this, and x @ w + bias in the dtype of x. With `slope`, the name of an
    activation, the result is x @ w times its derivative at `residual`: the gradient by what it was applied to.

    With `peers` rows are split into as many parts as there are GPUs, and part i is stored on GPU i. The result,
    (GPUs, M / GPUs, N), is what all GPUs stored. Parts are multiples of the rows of a tile, at most 256, and N of
    its columns.
    """
    if form.transpose_w and interpret and not interprets_transposed():
        form = form.replace(w=form.w.T, transpose_w=False)
    x, w, bias, residual, transpose_w, activation = (
        form.x,
        form.w,
        form.bias,
        form.residual,
        form.transpose_w,
        form.activation,
    )
    m, n, k = form.sizes
    out_dtype = form.out_dtype
    kept = x.dtype if form.return_preactivation else None
    what: dict[str, Any] = dict(out_dtype=out_dtype, residual=residual is not None, preactivation=kept)
    size = functools.partial(shared_memory, k=k, **what)
    variant = {
        "transpose_w": transpose_w,
        "residual": residual is not None,
        "activation": activation is not None,
        "preactivation": kept is not None,
        "wide_out": jnp.dtype(out_dtype).itemsize == 4,
        "slope": slope is not None,
        "peers": peers is not None,
    }
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="matmul",
            shape={"m": m, "n": n, "k": k} | {name: 1 for name, present in variant.items() if present},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(
                heuristic,
                m,
                n,
                k,
                target,
                activation=activation is not None,
                slope=slope is not None,
                peers=peers is not None,
                **what,
            ),
            candidates=functools.partial(candidates, m, n, size, target, resident=True),
            shared_memory=size,
        ),
        target,
    )
    slots = num_slots(config, config.block_n, out_dtype, residual=residual is not None)
    parts = blocks(config, config.block_n, out_dtype, slots, joined=residual is None and peers is None)
    scratch_types: dict[str, Any] = dict(slots=staging(config, parts, out_dtype, slots))
    if kept is not None:
        kept_slots = num_slots(config, config.block_n, kept, residual=False)
        kept_parts = blocks(config, config.block_n, kept, kept_slots)
        scratch_types["kept_slots"] = staging(config, kept_parts, kept, kept_slots)
    num_copies = (bias is not None) + (len(parts) if residual is not None else 0)
    if num_copies:
        scratch_types["ready"] = plgpu.Barrier(num_arrivals=num_copies, num_barriers=config.num_consumers)
    if bias is not None:
        scratch_types["bias_tile"] = plgpu.SMEM((config.num_consumers, config.block_n), bias.dtype)

    def rows_of_x(tile: Tile) -> pl.Slice:
        if peers is None:
            return tile.rows
        receiver, there = peers.turn(tile.row, config.block_m)
        return pl.Slice(receiver * (m // peers.count) + there, tile.num_rows)

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

        @functools.cache
        def shift(column: int, shape: tuple[int, ...]) -> jax.Array:
            return row(refs.bias_tile.at[warpgroup, pl.ds(column, shape[1])], shape)

        def preactivation(block: Block, _: Ref) -> jax.Array:
            y = block.of(sums[0])
            return y if bias is None else y + shift(block.column, y.shape)

        def value(block: Block, slot: Ref) -> jax.Array:
            y = preactivation(block, slot)
            if slope is not None:
                return y * derivative(slope, slot[...], out_dtype)
            y = activate(activation, y, out_dtype)
            return y if residual is None else y + slot[...].astype(jnp.float32)

        copy = None
        if peers is not None:
            receiver, there = peers.turn(tile.row, config.block_m)
            tile = dataclasses.replace(tile, row=there)

            def copy(slot: Ref, o: Ref, at: Callable[[Ref], Ref]) -> None:
                peers.store(slot, o, receiver, lambda o: at(o.at[peers.index]))

        out = Output(refs.slots, warpgroup, refs.o, value, copy)
        if kept is None:
            store(tile, parts, out, wait=residual is None)
            return
        kept_out = Output(refs.kept_slots, warpgroup, refs.kept, preactivation)
        if kept_parts == parts:
            store(tile, parts, kept_out, out, wait=True)
        else:
            store(tile, kept_parts, kept_out, wait=True)
            store(tile, parts, out, wait=residual is None)

    out, *others = gemm(
        dict(x=x, w=w, bias=bias, residual=residual),
        dict(
            o=jax.ShapeDtypeStruct((m, n) if peers is None else (peers.count, m // peers.count, n), out_dtype),
            kept=None if kept is None else jax.ShapeDtypeStruct((m, n), kept),
        ),
        config=config,
        m=m,
        n=n,
        k=k,
        dtype=x.dtype,
        a=lambda refs, tile, ks: refs.x.at[rows_of_x(tile), ks],
        b=[lambda refs, tile, ks: refs.w.at[(tile.columns, ks) if transpose_w else (ks, tile.columns)]],
        transpose_b=transpose_w,
        prefetch=prefetch if num_copies else None,
        epilogue=epilogue,
        scratch_types=scratch_types,
        peers=peers,
        name="matmul",
        target=target,
        interpret=interpret,
    )
    return (out, *others) if others else out
