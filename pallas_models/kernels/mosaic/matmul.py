"""Matrix product with a fused epilogue, for Hopper GPUs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.matmul import Activation, Form
from pallas_models.kernels.mosaic.common import gemm
from pallas_models.kernels.mosaic.common.activations import activate, derivative
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm import Product
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.gemm_heuristic import Measured, candidates, fastest
from pallas_models.kernels.mosaic.common.interpreter import interprets_transposed
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import row, untiled
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.common.staging import Block, Output, Staging, store
from pallas_models.kernels.mosaic.common.tile_walk import Tile
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_LARGE = 1 << 20  # weights


def unsupported_by_tensor_cores(form: Form[Any]) -> str | None:
    """Why neither `wgmma` nor `mma` serves a call; None if one of them may."""
    if form.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.dtype}"
    if form.acc_dtype != jnp.float32:
        return f"accumulates in float32, not {form.acc_dtype}"
    if form.algorithm is not None:
        return f"has none of the algorithms of the Triton kernel, such as {form.algorithm!r}"
    if form.batch > 1:
        return "takes no batch of weights"
    return None


def unsupported(form: Form[Any], target: Target) -> str | None:
    """Why `matmul` does not serve a call; None if it does."""
    if reason := unsupported_by_tensor_cores(form):
        return reason
    x, w, residual = form.x, form.w, form.residual
    if residual is not None and residual.dtype != form.out_dtype:
        return f"takes a residual of the dtype of the result, {form.out_dtype}, not {residual.dtype}"
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
# Fitted to 45 products of 1024 to 65536 rows, K of 256 and 384 in float16: they take up to 10% less than the tiles
# above, and at most 3% more. The steps are half as long where operand and result exceed the L2 cache.
_RESIDENT = Measured(64, 192, True, 0.10, 0.0043, block_k=128, resident=True)
_L2 = 35 << 20  # bytes of the L2 cache of an H200 that operand and result can have
# Products with a residual, which waits in shared memory and leaves the ring less of it.
_TILES_AND_RESIDUAL = (
    Measured(128, 256, False, 2.17, 0.0100),
    Measured(128, 192, False, 1.70, 0.0074),
    Measured(128, 128, False, 0.67, 0.0052),
    Measured(64, 128, True, 0.41, 0.0030),
    Measured(128, 64, False, 0.40, 0.0029),
    Measured(64, 64, True, 0.45, 0.0022, block_k=128),
)

# Products with an activation's slope at a residual, which takes longer than the sum beside which it is computed.
_TILES_AND_SLOPE = (
    Measured(128, 192, True, 1.85, 0.0079),
    Measured(128, 128, True, 1.29, 0.0051),
    Measured(64, 128, True, 1.00, 0.0030),
    Measured(64, 64, True, 0.60, 0.0022, block_k=128),
)


def shared_memory(
    config: Config, k: int, out_dtype: DTypeLike, *, residual: bool = False, preactivation: DTypeLike | None = None
) -> int:
    """Bytes of shared memory that a CTA takes for a contraction of `k`.

    `preactivation` is its dtype, None where it is not kept.
    """
    stagings = [Staging.of(config, config.block_n, out_dtype, whole=residual)]
    if preactivation is not None:
        stagings.append(Staging.of(config, config.block_n, preactivation))
    return gemm.shared_memory(config, *stagings, k=k)


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
    """Chooses tiles for x (m, k) and w (k, n); for stores to `peers` tiles that divide n."""
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
    """The product with epilogue in one kernel.

    Args:
      slope: the name of an activation. The result is then x @ w times the activation's derivative at `residual`:
        the gradient by what the activation was applied to.
      peers: GPUs that share the result. Its rows are split into as many parts as there are GPUs, and part i is
        stored on GPU i: the result, (GPUs, M / GPUs, N), is what all GPUs stored here. Parts are multiples of the
        rows of a tile, at most 256, and N of its columns.
    """
    if form.transpose_w and interpret and not interprets_transposed():
        form = form.replace(w=form.w.T, transpose_w=False)
    (m, n, k), x, out_dtype = form.sizes, form.x, form.out_dtype
    config = _choose(form, config, target, slope=slope, peers=peers)
    kept_dtype = form.dtype if form.return_preactivation else None
    epilogue = _Epilogue(form.abstract(), config, slope, peers)

    def rows(tile: Tile) -> pl.Slice:
        if peers is None:
            return tile.rows
        receiver, there = peers.turn(tile.row, config.block_m)
        return pl.Slice(receiver * (m // peers.count) + there, tile.num_rows)

    transpose_w = form.transpose_w
    out, *others = gemm.gemm(
        dict(x=x, w=form.w, bias=form.bias, residual=form.residual),
        dict(
            o=jax.ShapeDtypeStruct((m, n) if peers is None else (peers.count, m // peers.count, n), out_dtype),
            kept=None if kept_dtype is None else jax.ShapeDtypeStruct((m, n), kept_dtype),
        ),
        Product(
            m=m,
            n=n,
            k=k,
            dtype=x.dtype,
            a=lambda refs, tile, ks: refs.x.at[rows(tile), ks],
            b=[lambda refs, tile, ks: refs.w.at[(tile.columns, ks) if transpose_w else (ks, tile.columns)]],
            transpose_b=transpose_w,
        ),
        gemm.Epilogue(
            store=epilogue.store,
            scratch_types=epilogue.scratch_types,
            prefetch=epilogue.prefetch if epilogue.num_copies else None,
            peers=peers,
        ),
        config=config,
        name="matmul",
        target=target,
        interpret=interpret,
    )
    return (out, *others) if others else out


def _choose(
    form: Form[jax.Array],
    config: Config | Chooser | None,
    target: Target,
    *,
    slope: Activation | None,
    peers: Peers | None,
) -> Config:
    """The config of a call: what is given, else what a table or the heuristic has for its shape."""
    (m, n, k), x, out_dtype = form.sizes, form.x, form.out_dtype
    kept = form.dtype if form.return_preactivation else None
    stored: dict[str, Any] = dict(out_dtype=out_dtype, residual=form.residual is not None, preactivation=kept)
    does: dict[str, Any] = dict(
        activation=form.activation is not None, slope=slope is not None, peers=peers is not None
    )
    size = functools.partial(shared_memory, k=k, **stored)
    variant = {
        "transpose_w": form.transpose_w,
        "residual": form.residual is not None,
        "activation": does["activation"],
        "preactivation": kept is not None,
        "wide_out": out_dtype.itemsize == 4,
        "slope": does["slope"],
        "peers": does["peers"],
    }
    return choose(
        config,
        Problem(
            backend="mosaic",
            op="matmul",
            shape={"m": m, "n": n, "k": k} | {name: 1 for name, present in variant.items() if present},
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, target, **does, **stored),
            candidates=functools.partial(candidates, m, n, size, target, resident=True),
            shared_memory=size,
        ),
        target,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Epilogue:
    """Bias, activation and residual, or an activation's slope, in registers, and stores of the result.

    A residual waits in the slots through which the result leaves.
    """

    form: Form[Any]
    config: Config
    slope: Activation | None
    peers: Peers | None

    @property
    def out(self) -> Staging:
        """Where the result leaves."""
        residual, config = self.form.residual is not None, self.config
        joined = not residual and self.peers is None
        return Staging.of(config, config.block_n, self.form.out_dtype, whole=residual, joined=joined)

    @property
    def kept(self) -> Staging | None:
        """The place through which the values before the activation leave."""
        if not self.form.return_preactivation:
            return None
        return Staging.of(self.config, self.config.block_n, self.form.dtype)

    @property
    def num_copies(self) -> int:
        """Copies to shared memory for each tile of a warpgroup."""
        return (self.form.bias is not None) + (0 if self.form.residual is None else len(self.out.blocks))

    @property
    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of both methods below."""
        types: dict[str, Any] = dict(slots=self.out.scratch_type)
        if self.kept is not None:
            types["kept_slots"] = self.kept.scratch_type
        if self.num_copies:
            types["ready"] = plgpu.Barrier(num_arrivals=self.num_copies, num_barriers=self.config.num_consumers)
        if self.form.bias is not None:
            shape = self.config.num_consumers, self.config.block_n
            types["bias_tile"] = plgpu.SMEM(shape, self.form.bias.dtype)
        return types

    def prefetch(self, refs: Refs, tile: Tile, warpgroup: jax.Array) -> None:
        """Copies the tile's bias and residual to shared memory."""
        ready = refs.ready.at[warpgroup]
        if refs.bias is not None:
            plgpu.copy_gmem_to_smem(refs.bias.at[tile.columns], refs.bias_tile.at[warpgroup], ready)
        if refs.residual is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left these slots
            for i, block in enumerate(self.out.blocks):
                plgpu.copy_gmem_to_smem(block.at(refs.residual, tile), refs.slots.at[warpgroup, i], ready)

    def store(self, refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        """Finishes a tile and stores it, and the values before the activation."""
        form, slope, peers, out, kept = self.form, self.slope, self.peers, self.out, self.kept
        if self.num_copies:
            plgpu.barrier_wait(refs.ready.at[warpgroup])

        @functools.cache
        def bias(column: int, shape: tuple[int, ...]) -> jax.Array:
            return row(refs.bias_tile.at[warpgroup, pl.ds(column, shape[1])], shape)

        def preactivation(block: Block, _: Ref) -> jax.Array:
            y = block.of(sums[0])
            return y if refs.bias is None else y + bias(block.column, y.shape)

        def value(block: Block, slot: Ref) -> jax.Array:
            y = preactivation(block, slot)
            if slope is not None:
                return y * derivative(slope, slot[...], form.out_dtype)
            y = activate(form.activation, y, form.out_dtype)
            return y if refs.residual is None else y + slot[...].astype(jnp.float32)

        copy = None
        if peers is not None:
            receiver, there = peers.turn(tile.row, self.config.block_m)
            tile = dataclasses.replace(tile, row=there)

            def copy(slot: Ref, o: Ref, block: Block, tile: Tile) -> None:
                peers.store(slot, o, receiver, lambda o: block.at(o.at[peers.index], tile))

        output = Output(refs.slots, warpgroup, refs.o, value, copy)
        if kept is None:
            store(tile, out, output, wait=refs.residual is None)
            return
        kept_output = Output(refs.kept_slots, warpgroup, refs.kept, preactivation)
        if kept.blocks == out.blocks:
            store(tile, out, kept_output, output, wait=True)
        else:
            store(tile, kept, kept_output, wait=True)
            store(tile, out, output, wait=refs.residual is None)
