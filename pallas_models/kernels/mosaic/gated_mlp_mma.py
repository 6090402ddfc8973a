"""Gated matrix product by `mma`, for GPUs from Ampere on: gate and up of the same columns over one read of x."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.forms.gated_mlp import Form
from pallas_models.kernels.mosaic.common.activations import activate
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import TILE_ROWS, store
from pallas_models.kernels.mosaic.matmul_mma import (
    LEAST,
    Config,
    add_up,
    along_columns,
    configs,
    heuristic,
    shared_memory,
    tile_of,
    uneven,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

_PARTS = 2  # gate and up


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `gated_matmul` does not serve a call; None if it does."""
    if form.x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {form.x.dtype}"
    return uneven(*form.sizes[1:])


def gated_matmul(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> Any:
    """Both products in one kernel, with `return_products` a triple of the result and them."""
    (m, n, k), x = form.sizes, form.x
    if rows := max(-m % TILE_ROWS, LEAST - m):
        padded = form.replace(x=jnp.pad(x, ((0, rows), (0, 0))))
        results = gated_matmul(padded, config=config, target=target, interpret=interpret)
        return jax.tree.map(lambda y: y[:m], results)
    config = choose(
        config,
        Problem(
            backend="mosaic",
            op="gated_matmul_mma",
            shape={"m": m, "n": n, "k": k} | ({"products": 1} if form.return_products else {}),
            bucketed=("m",),
            dtype=x.dtype,
            config=Config,
            heuristic=functools.partial(heuristic, m, n, k, target, _PARTS),
            candidates=functools.partial(configs, m, n, k, target, _PARTS),
            shared_memory=functools.partial(shared_memory, parts=_PARTS),
        ),
        target,
    )
    product = jax.ShapeDtypeStruct((m, n), x.dtype) if form.return_products else None
    out, *products = launch(
        _Kernel(form.abstract(), config).run,
        # Tiles of w have two axes.
        dict(
            x=x, w=form.w_gate_up.reshape(k, _PARTS * n), bias=None if form.bias is None else form.bias.reshape(-1)
        ),
        dict(o=jax.ShapeDtypeStruct((m, n), form.out_dtype), gate=product, up=product),
        {},
        name="gated_matmul_mma",
        num_ctas=pl.cdiv(m, config.block_m) * pl.cdiv(n, config.block_n),
        num_warpgroups=None,
        interpret=interpret,
    )
    return (out, *products) if products else out


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    form: Form[Any]
    config: Config

    def run(self, refs: Refs) -> None:
        """Computes the tile of this CTA."""
        form, (m, n, k) = self.form, self.form.sizes
        rows, columns = tile_of(jax.lax.axis_index("cta"), m, n, self.config)
        parts = [pl.ds(columns.start + part * n, columns.size) for part in range(_PARTS)]
        sums = add_up(refs.x.at[rows], [refs.w.at[:, part] for part in parts], k, self.config)
        if refs.bias is not None:
            sums = tuple(
                y + along_columns(refs.bias.at[part], y.shape) for y, part in zip(sums, parts, strict=True)
            )
        if form.return_products:
            for ref, y in zip((refs.gate, refs.up), sums, strict=True):
                store(ref.at[rows, columns], y.astype(ref.dtype))
        gate, up = sums
        store(
            refs.o.at[rows, columns], (activate(form.activation, gate, form.out_dtype) * up).astype(refs.o.dtype)
        )
