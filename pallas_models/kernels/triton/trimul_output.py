"""The end of the triangle multiplicative update: layer norm over the hidden channels, gate, projection."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common import trimul_scales
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.trimul import Output
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    fitted,
    in_bounds,
    launch,
    load,
    plgpu,
    span,
    store,
    tile_mask,
)
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser, Problem, choose

_HELD_BYTES = 96 * 1024  # weights up to this size stay in shared memory for all blocks of positions of a program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` positions a step, their output in blocks of `block_n` channels.

    The kernel is persistent: `programs_per_core` programs for every multiprocessor share the positions, and each
    loads its next block while it computes.
    """

    block_m: int
    block_n: int
    programs_per_core: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.programs_per_core < 1:
            raise ValueError(f"{__name__}: programs_per_core={self.programs_per_core} must be at least 1")


def _config(block_m: int, block_n: int, programs_per_core: int, num_warps: int, num_stages: int) -> Config:
    return Config(
        block_m=block_m,
        block_n=block_n,
        programs_per_core=programs_per_core,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def heuristic(form: Output[Any], target: Target) -> Config:
    """Chooses blocks that fit into the shared memory of a target, and off Hopper into registers."""
    (h, c), dtype = form.w.shape, form.w.dtype
    config = _measured(form, target)
    if not target.runs(HOPPER) and dtype.itemsize == 4:
        config = _config(16, 16, 4, 8, 1)
    elif not target.runs(HOPPER) and h > 128:
        config = dataclasses.replace(config, num_warps=8)
    size = functools.partial(shared_memory, h=h, c=c, dtype=dtype, gate_after=form.gate_after)
    return fitted(config, size, target)


def _measured(form: Output[Any], target: Target) -> Config:
    """The fastest blocks on an H200."""
    (h, c), gate_after = form.w.shape, form.gate_after
    if form.w.dtype.itemsize == 4:
        return _config(32, 32, 4, 4, 1)
    wide_out = form.out_dtype.itemsize == 4
    if h <= 128 and c <= 128 and wide_out and form.batch * form.size >= 4096 * target.num_cores:
        return _config(128, 64, 2, 4, 2) if gate_after else _config(128, 64, 1, 4, 3)
    block_m = 64 if h <= 128 else 32
    if gate_after and c > 128:  # the gate leaves no registers and no shared memory for loading ahead
        return _config(block_m, 64 if wide_out else 128, 2, 4, 1)
    return _config(block_m, 64 if c <= (64 if gate_after else 128) else 128, 2, 4, 3)


def configs(dtype: DTypeLike) -> Iterator[Config]:
    """The blocks worth measuring."""
    sizes = ((16, 32), (32, 64)) if jnp.dtype(dtype).itemsize == 4 else ((32, 64, 128), (32, 64, 128))
    for block_m, block_n, programs, num_stages in itertools.product(*sizes, (1, 2, 3, 4), (1, 2, 3)):
        yield _config(block_m, block_n, programs, 4, num_stages)


def shared_memory(config: Config, h: int, c: int, dtype: DTypeLike, *, gate_after: bool) -> int:
    """Bytes of shared memory for weights and for the blocks that are loaded ahead.

    As ptxas has it from Ampere to Blackwell, or up to 8 KiB more: of y a block a stage, and of a gate before the
    product, which y is multiplied by in registers, a block for each stage ahead.
    """
    block_h = block_size(h, 16, 1024)
    weights = block_h * pl.cdiv(c, config.block_n) * config.block_n * jnp.dtype(dtype).itemsize
    held = weights if weights <= _HELD_BYTES else config.num_stages * block_h * config.block_n * 2
    blocks = config.num_stages if gate_after else 2 * config.num_stages - 1
    return held + blocks * block_h * config.block_m * jnp.dtype(dtype).itemsize


def scaled(bounds_ref: Ref, form: Output[Any]) -> tuple[jax.Array, jax.Array]:
    """What y is scaled by, and the epsilon of its norm."""
    largest = [jnp.max(load(bounds_ref.at[:, jnp.int32(i)])) for i in range(bounds_ref.shape[1])]
    return trimul_scales.scaled_sums(largest, form.w.dtype, form.factor, form.epsilon)


def _output_kernel(
    y_refs: Sequence[Ref],  # (B', H / parts, M) each
    gate_ref: Ref,  # (B', G, M)
    bounds_ref: Ref,  # (parts, 5)
    scale_ref: Ref,  # (H,)
    shift_ref: Ref,  # (H,)
    w_ref: Ref,  # (H, C)
    b_ref: Ref | None,  # (C,)
    x_ref: Ref | None,  # (B, M, C), if it is added
    o_ref: Ref,  # (B, M, C)
    *,
    config: Config,
    programs: int,
    form: Output[Any],
) -> None:
    batches, size, c = o_ref.shape
    part, h, gate_after = y_refs[0].shape[1], form.hidden, form.gate_after
    block_m, block_n, block_h = config.block_m, config.block_n, block_size(part, 16, 1024)
    pid, row_blocks = pl.program_id(0), jnp.int32(pl.cdiv(size, block_m))
    all_row_blocks = batches * pl.cdiv(size, block_m)
    h_mask = in_bounds(0, block_h, part)
    parts = [span(i * part, block_h) for i in range(len(y_refs))]
    scales, shifts = ([load(ref.at[p], h_mask)[:, None] for p in parts] for ref in (scale_ref, shift_ref))

    def columns_of(j: jax.Array | int) -> tuple[pl.Slice, jax.Array | None]:
        return span(j * block_n, block_n), in_bounds(j * block_n, block_n, c)

    def weights(j: jax.Array | int) -> list[jax.Array]:
        columns, mask = columns_of(j)
        return [load(w_ref.at[p, columns], tile_mask(h_mask, mask)) for p in parts]

    column_blocks = pl.cdiv(c, block_n)
    held = len(parts) * block_h * column_blocks * block_n * w_ref.dtype.itemsize <= _HELD_BYTES
    ws = [weights(j) for j in range(column_blocks)] if held else []

    _, y_epsilon = scaled(bounds_ref, form)
    total = functools.partial(functools.reduce, operator.add)

    def source(batch: jax.Array) -> jax.Array:
        """The item of y and of the gate that an item of the result is made of."""
        kept, rows = form.rows
        if kept == rows:
            return batch
        return jax.lax.div(batch, jnp.int32(kept)) * rows + jax.lax.rem(batch, jnp.int32(kept))

    def step(s: jax.Array, carry: jax.Array) -> jax.Array:
        i = pid + s * programs
        batch, row = jax.lax.div(i, row_blocks), jax.lax.rem(i, row_blocks) * block_m
        item = source(batch)
        rows, row_mask = span(row, block_m), in_bounds(row, block_m, size)
        mask = tile_mask(h_mask, row_mask)
        ys = [load(ref.at[item, span(0, block_h), rows], mask).astype(jnp.float32) for ref in y_refs]
        mean = total(jnp.sum(y, axis=0, keepdims=True) for y in ys) / h
        ds = [y - mean for y in ys]
        if h_mask is not None:
            ds = [jnp.where(h_mask[:, None], d, 0.0) for d in ds]
        inverse = jax.lax.rsqrt(total(jnp.sum(d * d, axis=0, keepdims=True) for d in ds) / h + y_epsilon)
        zs = [d * inverse * scale + shift for d, scale, shift in zip(ds, scales, shifts, strict=True)]
        if not gate_after:
            zs = [
                z * load(gate_ref.at[item, p, rows], mask).astype(jnp.float32)
                for z, p in zip(zs, parts, strict=True)
            ]
        zs = [z.astype(w_ref.dtype) for z in zs]

        def write(j: jax.Array | int, w: list[jax.Array]) -> None:
            columns, column_mask = columns_of(j)
            mask = tile_mask(row_mask, column_mask)
            products = (
                plgpu.dot(z, v, trans_a=True, precision=form.precision) for z, v in zip(zs, w, strict=True)
            )
            out = total(products)
            if b_ref is not None:
                out += load(b_ref.at[columns], column_mask)[None, :]
            if gate_after:
                gate = load(gate_ref.at[item, columns, rows], tile_mask(column_mask, row_mask))
                out *= gate.T.astype(jnp.float32)
            if x_ref is not None:
                out += load(x_ref.at[batch, rows, columns], mask).astype(jnp.float32)
            store(o_ref.at[batch, rows, columns], out, mask)

        if held:
            for j, w in enumerate(ws):
                write(j, w)
            return carry

        def write_block(j: jax.Array, carry: jax.Array) -> jax.Array:
            write(j, weights(j))
            return carry

        return jax.lax.fori_loop(0, column_blocks, write_block, carry)

    steps = jax.lax.div(all_row_blocks - pid + programs - 1, jnp.int32(programs))
    jax.lax.fori_loop(0, steps, step, jnp.int32(0))


def output(
    form: Output[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """The end of the update, (B, size, C)."""
    b, size, (h, c), dtype = form.batch, form.size, form.w.shape, form.w.dtype
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_output",
            shape={"m": b * size, "h": h, "c": c, "gate_after": int(form.gate_after)},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, form, target),
            candidates=functools.partial(configs, dtype),
            shared_memory=functools.partial(shared_memory, h=h, c=c, dtype=dtype, gate_after=form.gate_after),
        ),
        target,
    )
    programs = min(b * pl.cdiv(size, config.block_m), config.programs_per_core * target.num_cores)
    return launch(
        functools.partial(_output_kernel, config=config, programs=programs, form=form.abstract()),
        out_shape=jax.ShapeDtypeStruct((b, size, c), form.out_dtype),
        grid=(programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="trimul_output",
    )(list(form.ys), form.gate, form.bounds, form.scale, form.shift, form.w, form.bias, form.residual)
