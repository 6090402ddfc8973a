"""The gradient of the projections of the triangle multiplicative update: of x, its mask and its layer norm.

Projections and gates are computed again, some hidden channels at a time, for all of a block of positions. The
normalised positions are stored on the way: `trimul_weights_backward` multiplies them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.trimul_sides import Side
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.forms.trimul_backward import Given, OfPositions
from pallas_models.kernels.triton.column_sums import column_sums
from pallas_models.kernels.triton.common import (
    activate,
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
from pallas_models.kernels.triton.trimul_project import tanh
from pallas_models.target import HOPPER, Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` positions a step, `block_n` hidden channels at a time.

    `programs_per_core` programs for every multiprocessor share the positions.
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


def heuristic(form: Projection[Any], target: Target) -> Config:
    """Chooses blocks that fit into the shared memory of a target, and whose sums fit into registers."""
    if form.w.dtype.itemsize == 4:
        config = _config(16, 16, 1, 4, 1)
    elif not target.runs(HOPPER):  # operands of products are in registers, too
        config = _config(32, 32, 1, 8, 2)
    else:  # float16 has two sums
        config = _config(64 if form.w.dtype == jnp.float16 else 128, 64, 1, 8, 2)
    return fitted(config, functools.partial(shared_memory, form=form, target=target), target)


def configs(dtype: DTypeLike) -> Iterator[Config]:
    """The blocks worth measuring."""
    blocks = ((16, 32), (16, 32)) if jnp.dtype(dtype).itemsize == 4 else ((64, 128), (32, 64))
    for block_m, block_n, num_warps, num_stages in itertools.product(*blocks, (4, 8), (1, 2, 3)):
        yield _config(block_m, block_n, 8 // num_warps, num_warps, num_stages)


def shared_memory(config: Config, form: Projection[Any], target: Target) -> int:
    """Bytes of shared memory that the operands of products take, and what is loaded ahead."""
    block_m, block_n, itemsize = config.block_m, config.block_n, form.w.dtype.itemsize
    c, ahead = block_size(form.x.shape[2], 16, 1024), config.num_stages - 1
    z = block_m * c * itemsize
    if ahead and max(form.hidden, form.gates) <= block_n:
        # A loop over channels of one step is none to Triton. So it loads ahead in the loop over positions, and all
        # that a step reads. Compiled kernels have these sizes.
        weights, cotangent = 5 * c * block_n * itemsize, block_m * block_n * itemsize
        rows = block_m * (c * form.x.dtype.itemsize + 8)  # and factors of a mask
        if target.runs(HOPPER):  # its products still read operands while the next ones arrive
            kept = weights + rows + cotangent
            if form.x.shape[2] * itemsize % 16 != 0:  # positions that start anywhere: as much as z more
                kept += z
        else:
            kept = max(z, 2 * cotangent)
        return ahead * (weights + rows + 3 * cotangent) + kept
    staged, kept = block_n * (2 * c + block_m) * itemsize, z + 2 * block_m * block_n * itemsize
    return config.num_stages * staged + kept


class Rows(NamedTuple):
    """The place of a block of positions: the item of x, and of left, right and gate as they are filled up."""

    item: jax.Array
    filled: jax.Array
    span: pl.Slice
    mask: jax.Array | None

    @classmethod
    def of(cls, block: jax.Array, block_m: int, form: Projection[Any]) -> "Rows":
        """The place of block number `block` of all items."""
        size = form.x.shape[1]
        columns = jnp.int32(pl.cdiv(size, block_m))
        item, start = jax.lax.div(block, columns), jax.lax.rem(block, columns) * block_m
        filled = item
        if form.rows < form.padded_rows:
            matrix, row = (f(item, jnp.int32(form.rows)) for f in (jax.lax.div, jax.lax.rem))
            filled = matrix * form.padded_rows + row
        return cls(item, filled, span(start, block_m), in_bounds(start, block_m, size))

    def factor(self, mask_ref: Ref | None) -> jax.Array | None:
        """The factors of the mask."""
        return None if mask_ref is None else load(mask_ref.at[self.item, self.span], self.mask).astype(jnp.float32)


def sigmoid(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """In 16 bits from tanh, one instruction of the GPU, good to 11 bits, as the forward pass has it."""
    if jnp.dtype(dtype).itemsize == 4:
        return activate("sigmoid", x)
    return 0.5 * tanh(0.5 * x) + 0.5


class Weights(NamedTuple):
    """The weights of a call, arrays or references.

    Attributes:
      scale: (C,), of the norm.
      shift: (C,), of the norm.
      w: (C, 4, H).
      bias: (4, H), or None.
      gate: (C, G).
    """

    scale: Any
    shift: Any
    w: Any
    bias: Any
    gate: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """A block of positions, whose cotangents are multiplied by all weights.

    Attributes:
      rows: where it is.
      z: its normalised positions, (block_m, C).
      factor: of the mask, or None.
      before: what cotangents of projections and of their gates are multiplied by before they are rounded.
    """

    weights: Weights
    given: Given
    rows: Rows
    z: jax.Array
    factor: jax.Array | None
    before: tuple[jax.Array | float, jax.Array | float]
    block_n: int
    precision: jax.lax.Precision

    @property
    def channels(self) -> tuple[pl.Slice, jax.Array | None]:
        """All channels of x, and which of the block there are."""
        c = self.weights.scale.shape[0]
        return span(0, self.z.shape[1]), in_bounds(0, self.z.shape[1], c)

    def add_side(self, side: int, sums: list[Any]) -> list[Any]:
        """Adds the products of the cotangents of left (0) or right (1) to the sums, and to the mask's sum."""
        (cs, c_mask), weights, rows = self.channels, self.weights, self.rows
        ref, h = (self.given.left, self.given.right)[side], weights.w.shape[2]
        dot = functools.partial(plgpu.dot, precision=self.precision)

        def add(j: jax.Array, sums: list[Any]) -> list[Any]:
            *dzs, dmask = sums
            columns, mask = span(j * self.block_n, self.block_n), in_bounds(j * self.block_n, self.block_n, h)
            places = [jnp.int32(2 * side + k) for k in range(2)]
            ws = [load(weights.w.at[cs, place, columns], tile_mask(c_mask, mask)) for place in places]
            products = [dot(self.z, w) for w in ws]
            if weights.bias is not None:
                biases = [load(weights.bias.at[place, columns], mask)[None, :] for place in places]
                products = [y + bias for y, bias in zip(products, biases, strict=True)]
            given = load(ref.at[rows.filled, columns, rows.span], tile_mask(mask, rows.mask)).T.astype(jnp.float32)
            factor = None if self.factor is None else self.factor[:, None]
            p, g = products
            pulled = Side.pulled(p, sigmoid(g, self.z.dtype), given, factor, self.before, dtype=self.z.dtype)
            for i, d in enumerate((pulled.projection, pulled.gate)):
                dzs[min(i, len(dzs) - 1)] += dot(d, ws[i], trans_b=True)
            if dmask is not None:
                dmask += jnp.sum(given * pulled.value, axis=1)
            return [*dzs, dmask]

        return jax.lax.fori_loop(0, pl.cdiv(h, self.block_n), add, sums)

    def add_gate(self, dz: jax.Array) -> jax.Array:
        """Adds the products of the cotangent of the gate."""
        (cs, c_mask), rows, gates = self.channels, self.rows, self.weights.gate.shape[1]

        def add(j: jax.Array, dz: jax.Array) -> jax.Array:
            columns, mask = span(j * self.block_n, self.block_n), in_bounds(j * self.block_n, self.block_n, gates)
            w = load(self.weights.gate.at[cs, columns], tile_mask(c_mask, mask))
            d = load(self.given.gate.at[rows.filled, columns, rows.span], tile_mask(mask, rows.mask))
            return dz + plgpu.dot(d, w, trans_a=True, trans_b=True, precision=self.precision)

        return jax.lax.fori_loop(0, pl.cdiv(gates, self.block_n), add, dz)


class _Norm(NamedTuple):
    """The layer norm of a block of positions; `inverse` is 0 for what is masked and not finite."""

    mean: jax.Array
    inverse: jax.Array
    masked: bool
    c_mask: jax.Array | None

    @classmethod
    def of(
        cls, x: jax.Array, c: int, c_mask: jax.Array | None, factor: jax.Array | None, epsilon: float
    ) -> "_Norm":
        """The norm of x (block_m, C)."""
        mean = jnp.sum(x, axis=1, keepdims=True) / c
        d = x - mean if c_mask is None else jnp.where(c_mask[None, :], x - mean, 0.0)
        inverse = jax.lax.rsqrt(jnp.sum(d * d, axis=1, keepdims=True) / c + epsilon)
        if factor is not None:
            inverse = jnp.where((factor[:, None] != 0.0) | (inverse > 0.0), inverse, 0.0)
        return cls(mean, inverse, factor is not None, c_mask)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x with mean 0 and variance 1."""
        unit = (x - self.mean) * self.inverse
        if self.masked:
            unit = jnp.where(self.inverse == 0.0, 0.0, unit)
        return unit if self.c_mask is None else jnp.where(self.c_mask[None, :], unit, 0.0)


def _kernel(
    x_ref: Ref,  # (B, M, C)
    mask_ref: Ref | None,  # (B, M)
    weights: Weights,
    given: Given,
    dx_ref: Ref,  # (B, M, C)
    z_ref: Ref,  # (B, M, C)
    dmask_ref: Ref | None,  # (B, M)
    dnorm_ref: Ref,  # (2, programs, C)
    *,
    config: Config,
    programs: int,
    form: Projection[Any],
) -> None:
    (items, size, c), dtype = x_ref.shape, z_ref.dtype
    block_m, block_c = config.block_m, block_size(c, 16, 1024)
    pid, blocks = pl.program_id(0), items * pl.cdiv(size, block_m)
    cs, c_mask = span(0, block_c), in_bounds(0, block_c, c)
    scale, shift = (load(ref.at[cs], c_mask)[None, :] for ref in (weights.scale, weights.shift))
    of_projections, of_gates, of_gate, shrink = (load(given.scales.at[jnp.int32(i)]) for i in range(4))
    # What float16 cannot hold at its own size is summed apart.
    wide = dtype != jnp.float16

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        rows = Rows.of(pid + i * programs, block_m, form)
        view, mask, factor = (
            x_ref.at[rows.item, rows.span, cs],
            tile_mask(rows.mask, c_mask),
            rows.factor(mask_ref),
        )
        x = load(view, mask).astype(jnp.float32)
        norm = _Norm.of(x, c, c_mask, factor, form.epsilon)
        z = (norm(x) * scale + shift).astype(dtype)
        store(z_ref.at[rows.item, rows.span, cs], z, mask)
        block = _Block(
            weights=weights,
            given=given,
            rows=rows,
            z=z,
            factor=factor,
            before=(of_projections, of_gates) if wide else (shrink, 1.0),
            block_n=config.block_n,
            precision=form.precision,
        )
        sums: list[Any] = [jnp.zeros((block_m, block_c), jnp.float32)] * (1 if wide else 2)
        sums += [None if dmask_ref is None else jnp.zeros(block_m, jnp.float32)]
        for side in range(2):
            sums = block.add_side(side, sums)
        *dzs, dmask = sums
        if dmask_ref is not None:
            kept = jnp.where(factor == 0.0, 0.0, dmask * (of_projections * shrink))
            store(dmask_ref.at[rows.item, rows.span], kept, rows.mask)
        if wide:
            dz = block.add_gate(*dzs)
        else:
            dz = block.add_gate((dzs[0] * of_projections + dzs[1] * of_gates) / of_gate) * of_gate
        # Read again: kept, it would take the registers of the products.
        unit, du = norm(load(view, mask).astype(jnp.float32)), dz * scale
        along = jnp.sum(du * unit, axis=1, keepdims=True) / c
        dx = (du - jnp.sum(du, axis=1, keepdims=True) / c - unit * along) * norm.inverse
        store(dx_ref.at[rows.item, rows.span, cs], dx, mask)
        return [totals[0] + jnp.sum(dz * unit, axis=0), totals[1] + jnp.sum(dz, axis=0)]

    steps = jax.lax.div(blocks - pid + programs - 1, jnp.int32(programs))
    totals = jax.lax.fori_loop(0, steps, step, [jnp.zeros(block_c, jnp.float32)] * 2)
    for i, total in enumerate(totals):
        store(dnorm_ref.at[jnp.int32(i), pid, cs], total, c_mask)


def project_backward(
    form: Projection[jax.Array],
    given: Given,
    *,
    of_mask: bool,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> OfPositions:
    """The gradient of `trimul_project.project` but for the weights.

    Args:
      of_mask: whether the cotangent of the mask is wanted.
    """
    x, dtype = form.x, form.w.dtype
    b, size, c = x.shape
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_project_backward",
            shape={"m": b * size, "c": c, "h": form.hidden, "g": form.gates},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, form, target),
            candidates=functools.partial(configs, dtype),
            shared_memory=functools.partial(shared_memory, form=form, target=target),
        ),
        target,
    )
    programs = min(b * pl.cdiv(size, config.block_m), config.programs_per_core * target.num_cores)
    dx, z, dmask, dnorm = launch(
        functools.partial(
            _kernel,
            config=config,
            programs=programs,
            form=form.abstract(),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((b, size, c), x.dtype),
            jax.ShapeDtypeStruct((b, size, c), dtype),
            jax.ShapeDtypeStruct((b, size), jnp.float32) if of_mask else None,
            jax.ShapeDtypeStruct((2, programs, c), jnp.float32),
        ),
        grid=(programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="trimul_project_backward",
    )(x, form.mask, Weights(form.norm_scale, form.norm_bias, form.w, form.bias, form.w_gate), given)
    dscale, dshift = column_sums(dnorm, [jnp.float32] * 2, interpret=interpret)
    return OfPositions(x=dx, mask=dmask, scale=dscale, shift=dshift, z=z)
