"""Projections of the triangle multiplicative update with their gates, written channel by channel.

The product over third positions needs that layout, and tensor cores produce it at no cost: the weights are the
left operand, the positions the right one. Rows of 64 or 128 channels are normalised here and stay in shared memory
for all columns of the weights. Others are normalised by a kernel of their own before: wider ones do not fit.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.triton import norm
from pallas_models.kernels.triton.common import (
    activate,
    block_size,
    check_powers_of_two,
    in_bounds,
    launch,
    load,
    plgpu,
    span,
    store,
    tile_mask,
)
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Problem, choose

# Channels of rows of x that are normalised in this kernel, in a loop over blocks of columns. With 16 or 32, ptxas
# of CUDA 13.0 and 13.5 may unroll the loop, and then takes the product of the first block for the other products.
_NARROW = 64, 128
_GROUP = 8  # rows: projections and gates alternate in groups of 8, so that a thread holds a value and its gate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` positions times `block_n` columns of the projections, `block_k` channels of x a step.

    `block_k` is used only where x is not normalised in this kernel.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        if self.block_n < 2 * _GROUP:
            raise ValueError(f"{__name__}: block_n={self.block_n} must be at least {2 * _GROUP}")


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def heuristic(m: int, c: int, dtype: DTypeLike, target: Target) -> Config:
    """Chooses tiles for m positions of c channels, products being of `dtype`; measured on an H200."""
    if jnp.dtype(dtype).itemsize == 4:
        return _config(32, 32, 32, 4, 2)
    few = m < 256 * target.num_cores
    if is_narrow(c):
        return _config(64, 64, 64, 4, 2) if few else _config(128, 64, 64, 8, 2)
    return _config(128, 64, 64, 4, 3) if few else _config(128, 128, 64, 4, 2)


def configs(c: int, dtype: DTypeLike) -> Iterator[Config]:
    """The tiles worth measuring for c channels."""
    if jnp.dtype(dtype).itemsize == 4:
        yield from (_config(m, n, 32, 4, s) for m, n, s in itertools.product((16, 32, 64), (32, 64), (1, 2, 3)))
        return
    for block_m, block_n, num_stages in itertools.product((64, 128), (64, 128), (1, 2, 3)):
        for block_k, num_warps in itertools.product((64,) if is_narrow(c) else (32, 64), (4, 8)):
            yield _config(block_m, block_n, block_k, num_warps, num_stages)


def shared_memory(config: Config, c: int, dtype: DTypeLike) -> int:
    """Bytes of shared memory that the operands of a product take."""
    depth = c if is_narrow(c) else config.block_k
    staged, kept = config.block_n * depth, config.block_m * depth
    stages = max(config.num_stages, 1)
    tiles = kept + stages * staged if is_narrow(c) else stages * (kept + staged)
    return tiles * jnp.dtype(dtype).itemsize


def is_narrow(c: int) -> bool:
    """Whether rows of so many channels are normalised in this kernel."""
    return c in _NARROW


@meaning(lambda x: jnp.tanh(x))
def tanh(x: jax.Array) -> jax.Array:
    """tanh in float32, one instruction of the GPU that is good to 11 bits."""
    y: jax.Array = plgpu.approx_tanh(x)
    return y


def _gated(p: jax.Array | float, g: jax.Array, *, fast: bool) -> jax.Array:
    """2 p sigmoid(2 g), from the tanh of the GPU where it is to be `fast`."""
    if fast:
        return p * (tanh(g) + 1.0)
    return 2.0 * p * activate("sigmoid", 2.0 * g)


def _paired(y: jax.Array) -> list[jax.Array]:
    """Splits rows that alternate in groups of `_GROUP` into the even groups and the odd groups."""
    rows, columns = y.shape
    pairs = y.reshape(rows // (2 * _GROUP), 2, _GROUP, columns).transpose(0, 2, 3, 1)
    return [half.reshape(rows // 2, columns) for half in jnp.unstack(pairs, axis=-1)]


def _interleave(w: jax.Array, channels: int) -> jax.Array:
    """(..., 4, H), H padded to `channels`, as (..., 4 * channels) in the order that `_paired` takes apart."""
    lead = w.shape[:-2]
    w = _pad_last(w, channels).reshape(*lead, 2, 2, channels // _GROUP, _GROUP).swapaxes(-3, -2)
    return w.reshape(*lead, 4 * channels)


def _halved(w: jax.Array, width: int, block_n: int) -> jax.Array:
    """(..., G), padded to `width`, halves of each block of `block_n` in the order that `_paired` takes apart."""
    w = _pad_last(w, width)
    blocks = w.reshape(*w.shape[:-1], width // block_n, 2, block_n // (2 * _GROUP), _GROUP)
    return blocks.swapaxes(-3, -2).reshape(w.shape)


def _pad_last(w: jax.Array, size: int) -> jax.Array:
    if w.shape[-1] == size:
        return w
    return jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, size - w.shape[-1])])


def _project_kernel(
    x_ref: Ref,  # (B, M, C): x, or the layer norm of x where `narrow` is False
    mask_ref: Ref | None,  # (B, M)
    scale_ref: Ref,  # (C,)
    shift_ref: Ref,  # (C,)
    w_ref: Ref,  # (C, 4 H + G), halves of the weights: projections and their gates interleaved, the out gate
    b_ref: Ref | None,  # (4 H + G,), halves of the biases
    sides_ref: Ref | None,  # (B', 2 H, M'): left, then right
    gate_ref: Ref | None,  # (B', G, M')
    *,
    config: Config,
    narrow: bool,
    form: Projection[Any],
) -> None:
    (_, size, c), padded_size = x_ref.shape, form.result[1]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    side_blocks = 0 if sides_ref is None else 2 * sides_ref.shape[1] // block_n
    blocks = w_ref.shape[1] // block_n
    gated = functools.partial(_gated, fast=w_ref.dtype != jnp.float32)
    # Channels are the rows of the result, so that stores, channel by channel, are contiguous.
    dot = functools.partial(plgpu.dot, trans_a=True, trans_b=True, precision=form.precision)

    pid, row_blocks = pl.program_id(0), jnp.int32(pl.cdiv(padded_size, block_m))
    column_block = jnp.int32(0)
    if not narrow:  # programs of the same rows one after another
        pid, column_block = jax.lax.div(pid, jnp.int32(blocks)), jax.lax.rem(pid, jnp.int32(blocks))
    batch, row = jax.lax.div(pid, row_blocks), jax.lax.rem(pid, row_blocks) * block_m
    rows, row_mask = span(row, block_m), in_bounds(row, block_m, padded_size)
    item, x_mask = batch, row_mask  # type: jax.Array, Any
    if form.padded is not None:
        matrix, of_matrix = (f(batch, jnp.int32(form.padded_rows)) for f in (jax.lax.div, jax.lax.rem))
        item = matrix * form.rows + jnp.minimum(of_matrix, form.rows - 1)
        x_mask = (row + jnp.arange(block_m) < size) & (of_matrix < form.rows)

    def pairs(j: jax.Array) -> list[jax.Array]:
        """The two halves of a block of columns of the projections, (block_n / 2, block_m) each."""
        columns = span(j * block_n, block_n)

        def step(s: jax.Array, acc: jax.Array) -> jax.Array:
            ks, k_mask = span(s * block_k, block_k), in_bounds(s * block_k, block_k, c)
            x = load(x_ref.at[item, rows, ks], tile_mask(x_mask, k_mask))
            return acc + dot(load(w_ref.at[ks, columns], tile_mask(k_mask, None)), x)

        if narrow:
            y = dot(plgpu.load(w_ref.at[:, columns]), z)
        else:
            y = jax.lax.fori_loop(0, pl.cdiv(c, block_k), step, jnp.zeros((block_n, block_m), jnp.float32))
        return _paired(y if b_ref is None else y + plgpu.load(b_ref.at[columns])[:, None])

    def side(j: jax.Array, carry: jax.Array) -> jax.Array:
        assert sides_ref is not None
        y = gated(*pairs(j))
        if mask_ref is not None:  # read at every step: kept, it would take registers that a third program needs
            factor = load(mask_ref.at[item, rows], x_mask).astype(jnp.float32)[None, :]
            y = jnp.where(factor == 0.0, 0.0, factor * y)  # 0 times what is not finite would be NaN
        elif form.padded is not None:
            y = jnp.where(x_mask[None, :], y, 0.0)
        channels = span(j * (block_n // 2), block_n // 2)
        store(sides_ref.at[batch, channels, rows], y, tile_mask(None, row_mask))
        return carry

    def gate(j: jax.Array, carry: jax.Array) -> jax.Array:
        assert gate_ref is not None
        first = (j - side_blocks) * block_n
        for half, y in enumerate(pairs(j)):  # in halves: a store takes shared memory of its size
            channels = span(first + half * (block_n // 2), block_n // 2)
            store(gate_ref.at[batch, channels, rows], gated(0.5, y), tile_mask(None, row_mask))
        return carry

    if not narrow and (gate_ref is None or sides_ref is None):
        (side if gate_ref is None else gate)(column_block, jnp.int32(0))
        return
    if not narrow:
        jax.lax.cond(
            column_block < side_blocks,
            lambda: side(column_block, jnp.int32(0)),
            lambda: gate(column_block, jnp.int32(0)),
        )
        return
    x = load(x_ref.at[item, rows, :], tile_mask(x_mask, None)).astype(jnp.float32)
    d = x - jnp.sum(x, axis=1, keepdims=True) / c
    d *= jax.lax.rsqrt(jnp.sum(d * d, axis=1, keepdims=True) / c + form.epsilon)
    z = (d * plgpu.load(scale_ref.at[:])[None, :] + plgpu.load(shift_ref.at[:])[None, :]).astype(w_ref.dtype)
    if sides_ref is not None:
        jax.lax.fori_loop(0, side_blocks, side, jnp.int32(0))
    if gate_ref is not None:
        jax.lax.fori_loop(side_blocks, blocks, gate, jnp.int32(0))


def project(
    form: Projection[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Left and right, and the gate, in the dtype of the weights.

    Returns:
      (B', 2 H', M'), left in the first H channels and right in those from H' >= H on, masked, or None for H = 0;
      and the gate, (B', G', M'), G' >= G, or None for G = 0.
    """
    x, dtype, hidden = form.x, form.w.dtype, form.hidden
    (b, size, c), (items, padded_size) = x.shape, form.result
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_project",
            shape={"m": b * size, "c": c, "h": hidden, "g": form.gates},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, b * size, c, dtype, target),
            candidates=functools.partial(configs, c, dtype),
            shared_memory=functools.partial(shared_memory, c=c, dtype=dtype),
        ),
        target,
    )
    narrow = is_narrow(c)
    if not narrow:
        z = norm.sum_layer_norm(
            x.reshape(1, b * size, c),
            form.norm_scale,
            form.norm_bias,
            None,
            None,
            epsilon=form.epsilon,
            out_dtype=dtype,
            config=norm.Config(block_m=2, block_n=block_size(c, 16, 8192), num_warps=block_size(c // 512, 1, 8)),
            target=target,
            interpret=interpret,
        )
        x = z.reshape(b, size, c)
    channels = pl.cdiv(2 * hidden, config.block_n) * config.block_n // 2
    gates = pl.cdiv(form.gates, config.block_n) * config.block_n
    weights, biases = _arranged(form, channels, gates, config.block_n)
    kernel = functools.partial(
        _project_kernel,
        config=config,
        narrow=narrow,
        form=form.abstract(),
    )
    column_blocks = 1 if narrow else (4 * channels + gates) // config.block_n
    sides, gate = launch(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((items, 2 * channels, padded_size), dtype) if channels else None,
            jax.ShapeDtypeStruct((items, gates, padded_size), dtype) if gates else None,
        ),
        grid=(items * pl.cdiv(padded_size, config.block_m) * column_blocks,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="trimul_project",
    )(x, form.mask, form.norm_scale, form.norm_bias, weights, biases)
    return sides, gate


def _arranged(
    form: Projection[jax.Array], channels: int, gates: int, block_n: int
) -> tuple[jax.Array, jax.Array | None]:
    """Halves of all weights side by side, and halves of all biases, None where there are none."""
    halved = functools.partial(_halved, width=gates, block_n=block_n)
    weights = 0.5 * jnp.concatenate([_interleave(form.w, channels), halved(form.w_gate)], axis=1)
    if form.bias is None and form.b_gate is None:
        return weights, None
    b_sides = jnp.zeros(4 * channels) if form.bias is None else _interleave(form.bias, channels)
    b_gates = jnp.zeros(gates) if form.b_gate is None else halved(form.b_gate)
    return weights, 0.5 * jnp.concatenate([b_sides, b_gates])
