"""What the scales of the cotangents of the end of the triangle multiplicative update follow from."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.trimul_output_scales import Largest
from pallas_models.kernels.forms.trimul import Output
from pallas_models.kernels.triton.common import launch, load, store, tile_mask
from pallas_models.kernels.triton.trimul_output import scaled
from pallas_models.kernels.triton.trimul_places import Places
from pallas_models.target import Target

_BLOCK_M = 64
_PROGRAMS_PER_CORE = 4


def _kernel(
    y_ref: Ref,  # (B', H, M')
    dout_ref: Ref,  # (B, M, C)
    bounds_ref: Ref,  # (parts, 5)
    o_ref: Ref,  # (programs, 3): the largest cotangent; of a position the largest norm, and it times 1 / deviation
    scale_ref: Ref,  # (1,): what y is scaled by
    *,
    places: Places,
    programs: int,
) -> None:
    h, c = y_ref.shape[1], dout_ref.shape[2]
    (hs, h_mask), (cs, c_mask) = places.channels(h), places.channels(c)
    y_scale, y_epsilon = scaled(bounds_ref, places.form)
    first, steps = places.steps(len(y_ref), programs)

    def step(s: jax.Array, largest: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        item, start = places.place(first + s * programs)
        rows, (source, row_mask) = places.span(start), places.source(item, start)
        y = load(y_ref.at[item, hs, rows], tile_mask(h_mask, row_mask)).astype(jnp.float32)
        dout = load(dout_ref.at[source, rows, cs], tile_mask(row_mask, c_mask)).astype(jnp.float32)
        d = y - jnp.sum(y, axis=0, keepdims=True) / h
        if h_mask is not None:
            d = jnp.where(h_mask[:, None], d, 0.0)
        inverse = jax.lax.rsqrt(jnp.sum(d * d, axis=0) / h + y_epsilon)
        most = jnp.max(jnp.abs(dout), axis=1)
        unit = dout * jnp.where(most > 0.0, 1.0 / most, 0.0)[:, None]  # whose squares are within float32
        length = most * jnp.sqrt(jnp.sum(unit * unit, axis=1))
        # What is not finite spoils its own sums alone.
        kept = [jnp.where(a < jnp.inf, a, 0.0) for a in (most, length, length * inverse)]
        return tuple(map(jnp.maximum, largest, kept))

    zeros = (jnp.zeros(places.block_m, jnp.float32),) * 3
    for i, found in enumerate(jax.lax.fori_loop(0, steps, step, zeros)):
        store(o_ref.at[pl.program_id(0), jnp.int32(i)], jnp.max(found))
    store(scale_ref.at[jnp.int32(0)], y_scale)


def find_largest(form: Output[jax.Array], dout: jax.Array, *, target: Target, interpret: bool) -> Largest:
    """`Largest` of dout (B, M, C)."""
    (y,) = form.ys
    places = Places(form.abstract(), _BLOCK_M, y.shape[2])
    programs = min(len(y) * places.columns, _PROGRAMS_PER_CORE * target.num_cores)
    found, y_scale = launch(
        functools.partial(_kernel, places=places, programs=programs),
        out_shape=(
            jax.ShapeDtypeStruct((programs, 3), jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        ),
        grid=(programs,),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="trimul_output_scales",
    )(y, dout, form.bounds)
    cotangent, length, by_deviation = jnp.max(found, axis=0)
    return Largest(cotangent, length, by_deviation * y_scale[0])
