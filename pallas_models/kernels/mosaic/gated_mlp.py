"""Gated matrix product for Hopper GPUs: gate and up of the same columns side by side, over one read of x."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.gated_mlp import Form
from pallas_models.kernels.mosaic.common import gemm
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.gemm import Product
from pallas_models.kernels.mosaic.common.gemm_config import Config
from pallas_models.kernels.mosaic.common.gemm_heuristic import Measured, candidates, fastest
from pallas_models.kernels.mosaic.common.launch import Refs
from pallas_models.kernels.mosaic.common.memory import row, untiled
from pallas_models.kernels.mosaic.common.staging import Block, Output, Staging, store
from pallas_models.kernels.mosaic.common.tile_walk import Tile
from pallas_models.kernels.mosaic.matmul import is_long
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `gated_matmul` does not serve a call; None if it does."""
    (m, n, k), x = form.sizes, form.x
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    return (
        untiled("x", x.shape, x.dtype)
        or untiled("gate and up", (k, n), x.dtype)
        or untiled("the result", (m, n), form.out_dtype)
    )


def prefer(form: Form[jax.ShapeDtypeStruct], target: Target) -> bool:
    """Whether it is the faster kernel for a call that it serves."""
    return is_long(form.x.shape[0], form.w_gate_up.size)


def shared_memory(config: Config, out_dtype: DTypeLike, *, products: DTypeLike | None = None) -> int:
    """Bytes of shared memory that a CTA takes; `products` is their dtype, None where they are not kept."""
    dtypes = {jnp.dtype(dtype) for dtype in (out_dtype, products) if dtype is not None}
    return gemm.shared_memory(config, *(_staging(config, dtype) for dtype in dtypes))


def _staging(config: Config, dtype: DTypeLike) -> Staging:
    """Where an output leaves: by way of slots of which the first is free again when the next output begins."""
    staging = Staging.of(config, config.block_n // 2, dtype)
    in_turn = len(staging.blocks) % staging.num_slots == 0
    return staging if in_turn else dataclasses.replace(staging, num_slots=1)


# Fitted to 6 products of 128 to 16384 rows in bfloat16 on an H200; columns count gate and up together.
_TILES = (
    Measured(192, 256, False, 0.90, 0.0151, num_consumers=3),
    Measured(128, 256, False, 0.90, 0.0104),
    Measured(128, 128, True, 0.60, 0.0052),
    Measured(64, 128, True, 0.35, 0.0030),
)


def heuristic(
    m: int, n: int, k: int, target: Target, *, out_dtype: DTypeLike, products: DTypeLike | None = None
) -> Config:
    """Chooses tiles for x (m, k) and w (k, 2, n): `block_n` counts columns of gate and up together."""
    size = functools.partial(shared_memory, out_dtype=out_dtype, products=products)
    return fastest(_TILES, m, 2 * n, k, size, target)


def gated_matmul(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> Any:
    """Both products in one kernel, with `return_products` a triple of the result and them."""
    (m, n, k), x, out_dtype = form.sizes, form.x, form.out_dtype
    kept = x.dtype if form.return_products else None
    what: dict[str, Any] = dict(out_dtype=out_dtype, products=kept)
    size = functools.partial(shared_memory, **what)
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="gated_matmul",
            shape={"m": m, "n": n, "k": k} | ({"products": 1} if form.return_products else {}),
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, target, **what),
            candidates=functools.partial(candidates, m, 2 * n, size, target, parts=2),
            shared_memory=size,
        ),
        target,
    )
    epilogue = _Epilogue(form.abstract(), config)
    product_type = None if kept is None else jax.ShapeDtypeStruct((m, n), kept)
    out, *products = gemm.gemm(
        dict(x=x, w=form.w_gate_up, bias=form.bias),
        dict(o=jax.ShapeDtypeStruct((m, n), out_dtype), gate=product_type, up=product_type),
        Product(
            m=m,
            n=n,
            k=k,
            dtype=x.dtype,
            a=lambda refs, tile, ks: refs.x.at[tile.rows, ks],
            b=[
                lambda refs, tile, ks: refs.w.at[ks, 0, tile.columns],
                lambda refs, tile, ks: refs.w.at[ks, 1, tile.columns],
            ],
        ),
        gemm.Epilogue(
            store=epilogue.store,
            scratch_types=epilogue.scratch_types,
            prefetch=None if form.bias is None else epilogue.prefetch,
        ),
        config=config,
        name="gated_matmul",
        target=target,
        interpret=interpret,
    )
    return (out, *products) if products else out


@dataclasses.dataclass(frozen=True, slots=True)
class _Epilogue:
    """Biases, activation and the product of gate and up in registers, and stores of it and of both."""

    form: Form[Any]
    config: Config

    @property
    def out(self) -> Staging:
        """Where the result leaves."""
        return _staging(self.config, self.form.out_dtype)

    @property
    def kept(self) -> Staging | None:
        """Where gate and up leave, one after the other: by way of the result's slots if they have its dtype."""
        if not self.form.return_products:
            return None
        return _staging(self.config, self.form.x.dtype)

    @property
    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of both methods below."""
        consumers, columns = self.config.num_consumers, self.config.block_n // 2
        types: dict[str, Any] = dict(slots=self.out.scratch_type)
        if self.kept is not None and self.kept != self.out:
            types["kept_slots"] = self.kept.scratch_type
        if self.form.bias is not None:
            types["ready"] = plgpu.Barrier(num_arrivals=2, num_barriers=consumers)
            types["bias_tiles"] = plgpu.SMEM((consumers, 2, columns), self.form.bias.dtype)
        return types

    def prefetch(self, refs: Refs, tile: Tile, warpgroup: jax.Array) -> None:
        """Copies the tile's biases to shared memory."""
        for part in range(2):
            plgpu.copy_gmem_to_smem(
                refs.bias.at[part, tile.columns], refs.bias_tiles.at[warpgroup, part], refs.ready.at[warpgroup]
            )

    def store(self, refs: Refs, tile: Tile, sums: Sequence[jax.Array], warpgroup: jax.Array) -> None:
        """Finishes a tile; stores both products, if they are kept, and then the result."""
        form = self.form
        if refs.bias is not None:
            plgpu.barrier_wait(refs.ready.at[warpgroup])

        def product(part: int, block: Block, _: Ref) -> jax.Array:
            y = block.of(sums[part])
            if refs.bias is None:
                return y
            return y + row(refs.bias_tiles.at[warpgroup, part, block.columns], y.shape)

        def value(block: Block, slot: Ref) -> jax.Array:
            return activate(form.activation, product(0, block, slot), form.out_dtype) * product(1, block, slot)

        if self.kept is not None:
            slots = refs.slots if self.kept == self.out else refs.kept_slots
            for part, of in enumerate((refs.gate, refs.up)):
                store(tile, self.kept, Output(slots, warpgroup, of, functools.partial(product, part)), wait=True)
        store(tile, self.out, Output(refs.slots, warpgroup, refs.o, value), wait=True)
