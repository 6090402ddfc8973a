"""The gradient of the end of the triangle multiplicative update: of its projection, its gate and its norm."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_models.kernels.common.activations import times
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.forms.trimul import Output
from pallas_models.kernels.forms.trimul_backward import OfEnd
from pallas_models.kernels.triton.column_sums import column_sums
from pallas_models.kernels.triton.common import (
    block_size,
    check_powers_of_two,
    fitted,
    launch,
    load,
    plgpu,
    store,
    tile_mask,
)
from pallas_models.kernels.triton.trimul_output import scaled
from pallas_models.kernels.triton.trimul_places import Places
from pallas_models.target import BLACKWELL, HOPPER, Target
from pallas_models.tuning import Chooser, Problem, choose


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """`block_m` positions a step; `programs_per_core` programs for every multiprocessor share the positions."""

    block_m: int
    programs_per_core: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, "block_m", "num_warps")
        if self.programs_per_core < 1:
            raise ValueError(f"{__name__}: programs_per_core={self.programs_per_core} must be at least 1")


def _config(block_m: int, programs_per_core: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m=block_m, programs_per_core=programs_per_core, num_warps=num_warps, num_stages=num_stages)


def heuristic(form: Output[Any], target: Target) -> Config:
    """Chooses blocks that fit into the shared memory of a target, and off Hopper into registers."""
    is_hopper = target.runs(HOPPER)
    if form.w.dtype.itemsize == 4:
        config = _config(16, 1, 4 if is_hopper else 16, 1)
    else:  # elsewhere products have their operands in registers, too
        config = _config(64 if is_hopper or target.runs(BLACKWELL) else 16, 1, 8, 2)
    return fitted(config, functools.partial(shared_memory, form=form), target)


def configs(dtype: DTypeLike) -> Iterator[Config]:
    """The blocks worth measuring."""
    blocks = (16, 32) if jnp.dtype(dtype).itemsize == 4 else (32, 64)
    for block_m, programs, num_warps, num_stages in itertools.product(blocks, (1, 2), (4, 8), (1, 2, 3)):
        yield _config(block_m, programs, num_warps, num_stages)


def shared_memory(config: Config, form: Output[Any]) -> int:
    """Bytes of shared memory for weights, for operands of products, and for blocks that are loaded ahead."""
    h, c = (block_size(n, 16, 1024) for n in form.w.shape)
    itemsize, gates = form.w.dtype.itemsize, c if form.gate_after else h
    held = (h * c + config.block_m * (h + c)) * itemsize
    turned = config.block_m * c * 4
    return held + turned + (config.num_stages - 1) * config.block_m * ((h + gates) * itemsize + c * 4)


class Operands(NamedTuple):
    """The operands of both kernels, arrays or references.

    Attributes:
      y: (B', H, M').
      gate: (B', G, M').
      dout: (B, M, C).
      bounds: (parts, 5).
      scale: (H,).
      shift: (H,).
      w: (H, C).
      bias: (C,), or None.
    """

    y: Any
    gate: Any
    dout: Any
    bounds: Any
    scale: Any
    shift: Any
    w: Any
    bias: Any


class _Pulled(NamedTuple):
    """The cotangents of a block of positions, channels first; (H, positions) but for the gate and the result."""

    y: jax.Array
    gate: jax.Array  # of what the gate is the sigmoid of
    normed: jax.Array  # of the result of the norm
    unit: jax.Array  # y with mean 0 and variance 1
    operand: jax.Array  # what is multiplied by the weights
    product: jax.Array  # (C, positions), of the product with the weights, scaled and rounded
    bias: jax.Array  # (C,)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """What is computed again of the end of the update, and its gradient, for a block of positions.

    Attributes:
      w: (H, C).
      scale: (H, 1).
      shift: (H, 1).
      bias: (C, 1), or None.
      y_scale: what y is scaled by.
      y_epsilon: of the norm of y.
    """

    places: Places
    w: jax.Array
    scale: jax.Array
    shift: jax.Array
    bias: jax.Array | None
    y_scale: jax.Array
    y_epsilon: jax.Array

    @classmethod
    def of(cls, places: Places, operands: Operands) -> "_End":
        """Loads the weights."""
        (hs, h_mask), (cs, c_mask) = map(places.channels, operands.w.shape)
        y_scale, y_epsilon = scaled(operands.bounds, places.form)
        return cls(
            places=places,
            w=load(operands.w.at[hs, cs], tile_mask(h_mask, c_mask)),
            scale=load(operands.scale.at[hs], h_mask)[:, None],
            shift=load(operands.shift.at[hs], h_mask)[:, None],
            bias=None if operands.bias is None else load(operands.bias.at[cs], c_mask)[:, None],
            y_scale=y_scale,
            y_epsilon=y_epsilon,
        )

    def pull(self, operands: Operands, block: jax.Array, scale: jax.Array | float) -> _Pulled:
        """The cotangents of a block of positions.

        Args:
          scale: what the cotangent of the product is multiplied by before it is rounded to the dtype of the
            weights.
        """
        places, form, dtype = self.places, self.places.form, self.w.dtype
        (h, c), dot = form.w.shape, functools.partial(plgpu.dot, precision=form.precision)
        item, start = places.place(block)
        rows, (source, row_mask) = places.span(start), places.source(item, start)
        (hs, h_mask), (cs, c_mask) = places.channels(h), places.channels(c)
        gates, gate_mask = (cs, c_mask) if form.gate_after else (hs, h_mask)
        y = load(operands.y.at[item, hs, rows], tile_mask(h_mask, row_mask)).astype(jnp.float32)
        gate = load(operands.gate.at[item, gates, rows], tile_mask(gate_mask, row_mask)).astype(jnp.float32)
        dout = load(operands.dout.at[source, rows, cs], tile_mask(row_mask, c_mask)).T.astype(jnp.float32)

        d = y - jnp.sum(y, axis=0, keepdims=True) / h
        if h_mask is not None:
            d = jnp.where(h_mask[:, None], d, 0.0)
        inverse = jax.lax.rsqrt(jnp.sum(d * d, axis=0, keepdims=True) / h + self.y_epsilon)
        unit = d * inverse
        normed = unit * self.scale + self.shift
        product = times(dout, gate) if form.gate_after else dout
        dbias = jnp.sum(product, axis=1)
        # What is not finite adds nothing where its result has a cotangent of 0, as a position that is masked has.
        operand = normed if form.gate_after else normed * gate
        given = jnp.max(jnp.abs(product), axis=0, keepdims=True) != 0.0
        operand = jnp.where(given, operand, 0.0).astype(dtype)
        product, back = (product * scale).astype(dtype), 1.0 / scale
        doperand = dot(self.w, product) * back
        if form.gate_after:
            out = dot(self.w, operand, trans_a=True)
            dgate = dout * (out if self.bias is None else out + self.bias)
            dnormed = doperand
        else:
            dgate, dnormed = doperand * normed, times(doperand, gate)
        dgate = times(dgate, gate * (1.0 - gate))
        dunit = dnormed * self.scale
        along = jnp.sum(dunit * unit, axis=0, keepdims=True) / h
        dy = (dunit - jnp.sum(dunit, axis=0, keepdims=True) / h - unit * along) * (inverse * self.y_scale)
        return _Pulled(dy, dgate, dnormed, unit, operand, product, dbias)


def _kernel(
    operands: Operands,
    scales_ref: Ref | None,  # (3,): of the cotangents of the product, of y and of the gate; 1 where there is none
    dy_ref: Ref,  # (B', H, M')
    dgate_ref: Ref,  # (B', G, M')
    dw_ref: Ref,  # (programs, H, C)
    dnorm_ref: Ref,  # (2, programs, H)
    db_ref: Ref | None,  # (1, programs, C)
    *,
    places: Places,
    programs: int,
) -> None:
    form, pid = places.form, pl.program_id(0)
    end = _End.of(places, operands)
    of_product, of_y, of_gate = (
        1.0 if scales_ref is None else load(scales_ref.at[jnp.int32(i)]) for i in range(3)
    )
    (hs, h_mask), (cs, c_mask) = map(places.channels, operands.w.shape)
    gates, gate_mask = (cs, c_mask) if form.gate_after else (hs, h_mask)
    first, steps = places.steps(len(operands.y), programs)

    def step(s: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
        dw, dscale, dshift, *db = carry
        block = first + s * programs
        pulled = end.pull(operands, block, of_product)
        item, start = places.place(block)
        rows, row_mask = places.span(start), places.within(start, places.width)
        store(dy_ref.at[item, hs, rows], pulled.y * of_y, tile_mask(h_mask, row_mask))
        store(dgate_ref.at[item, gates, rows], pulled.gate * of_gate, tile_mask(gate_mask, row_mask))
        dw += plgpu.dot(pulled.operand, pulled.product, trans_b=True, precision=form.precision)
        dscale += jnp.sum(pulled.normed * pulled.unit, axis=1)
        dshift += jnp.sum(pulled.normed, axis=1)
        return [dw, dscale, dshift, *(total + pulled.bias for total in db)]

    h, c = end.w.shape
    zeros = [jnp.zeros(shape, jnp.float32) for shape in ((h, c), h, h, *([c] if db_ref is not None else []))]
    dw, dscale, dshift, *db = jax.lax.fori_loop(0, steps, step, zeros)
    store(dw_ref.at[pid, hs, cs], dw, tile_mask(h_mask, c_mask))
    store(dnorm_ref.at[jnp.int32(0), pid, hs], dscale, h_mask)
    store(dnorm_ref.at[jnp.int32(1), pid, hs], dshift, h_mask)
    if db_ref is not None:
        store(db_ref.at[jnp.int32(0), pid, cs], db[0], c_mask)


def output_backward(
    form: Output[jax.Array],
    dout: jax.Array,
    scales: jax.Array | None,
    *,
    config: Config | Chooser | None,
    target: Target,
    interpret: bool,
) -> OfEnd:
    """The gradient of `trimul_output.output`, for the cotangent (B, M, C) of its result, of any float dtype."""
    (y,), (h, c), dtype = form.ys, form.w.shape, form.w.dtype
    (items, _, width), gates = y.shape, c if form.gate_after else h
    config = choose(
        config,
        Problem(
            backend="triton",
            op="trimul_output_backward",
            shape={"m": form.batch * form.size, "h": h, "c": c, "gate_after": int(form.gate_after)},
            bucketed=("m",),
            dtype=dtype,
            config=Config,
            heuristic=functools.partial(heuristic, form, target),
            candidates=functools.partial(configs, dtype),
            shared_memory=functools.partial(shared_memory, form=form),
        ),
        target,
    )
    places = Places(form.abstract(), config.block_m, width)
    programs = min(items * places.columns, config.programs_per_core * target.num_cores)
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    dy, dgate, dw, dnorm, db = launch(
        functools.partial(_kernel, places=places, programs=programs),
        out_shape=(
            jax.ShapeDtypeStruct((items, h, width), dtype),
            jax.ShapeDtypeStruct((items, gates, width), dtype),
            float32((programs, h, c)),
            float32((2, programs, h)),
            None if form.bias is None else float32((1, programs, c)),
        ),
        grid=(programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="trimul_output_backward",
    )(Operands(y, form.gate, dout, form.bounds, form.scale, form.shift, form.w, form.bias), scales)
    total = functools.partial(column_sums, interpret=interpret)
    (dw,), (dscale, dshift) = total(dw.reshape(1, programs, h * c), [jnp.float32]), total(dnorm, [jnp.float32] * 2)
    dw = dw.reshape(h, c)
    return OfEnd(
        y=dy,
        gate=dgate,
        w=dw if scales is None else dw / scales[0],
        scale=dscale,
        shift=dshift,
        bias=None if db is None else total(db, [jnp.float32])[0],
    )
