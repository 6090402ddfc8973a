"""Products of Hopper's tensor cores, which go on while threads do other things, and the sums that they add to."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.memory import layout_cast

_T = TypeVar("_T")
Operand = Any  # a reference to shared memory, or an array in registers


def with_sums(function: Callable[..., _T], *shapes: tuple[int, ...]) -> _T:
    """Calls a function with sums of products in registers, in float32, which begin with 0."""
    result: _T = pl.run_scoped(function, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
    return result


def _put(sums: Ref, value: jax.Array) -> None:
    jax.ref.set(sums, ..., value)


@meaning(_put)
def put(sums: Ref, value: jax.Array) -> None:
    """Sets sums, to which the next products are added."""
    sums[...] = value


def _multiply(sums: Ref, a: Operand, b: Ref, *, transpose_b: bool = False) -> None:
    right = b[...].T if transpose_b else b[...]
    _put(sums, sums[...] + jnp.dot(a[...], right, preferred_element_type=jnp.float32))
    plgpu.commit_smem()


@meaning(_multiply)
def multiply(sums: Ref, a: Operand, b: Ref, *, transpose_b: bool = False) -> None:
    """Begins to add a @ b to sums. Who reads them waits for it; until then neither operand may change."""
    plgpu.wgmma(sums, a, b.transpose((1, 0)) if transpose_b else b)


def sums_but_for(sums: Ref, pending: int) -> jax.Array:
    """The sums; the last products, `pending` of them, are to other sums and may go on."""
    value: jax.Array = plgpu.wgmma_accumulator_load(sums, wait_n=pending)
    return value


def in_layout(sums: Ref, pending: int = 0) -> jax.Array:
    """`sums_but_for` in the layout of products: where it is not said, to infer all layouts takes long or fails."""
    return layout_cast(sums_but_for(sums, pending), plgpu.Layout.WGMMA)


def product(
    a: Operand, b: Ref, *, transpose_b: bool = False, then: Callable[[], None] | None = None, pending: int = 1
) -> jax.Array:
    """a @ b in float32. The products that `then` begins, `pending` of them, may go on."""

    def compute(sums: Ref) -> jax.Array:
        multiply(sums, a, b, transpose_b=transpose_b)
        if then is not None:
            then()
        return sums_but_for(sums, 0 if then is None else pending)

    return with_sums(compute, (a.shape[0], b.shape[0 if transpose_b else 1]))


def products(*operands: tuple[Operand, Ref, bool]) -> list[jax.Array]:
    """The products of pairs, (a, b, transpose_b) as `product` has them, all under way together."""

    def compute(*sums: Ref) -> list[jax.Array]:
        for total, (a, b, transpose_b) in zip(sums, operands, strict=True):
            multiply(total, a, b, transpose_b=transpose_b)
        return [total[...] for total in sums]

    return with_sums(compute, *((a.shape[0], b.shape[0 if flip else 1]) for a, b, flip in operands))


def _added_up(first: jax.Array, add: Callable[[Ref], None]) -> jax.Array:
    def compute(sums: Ref) -> jax.Array:
        add(sums)
        return sums[...] + first

    return with_sums(compute, first.shape)


@meaning(_added_up)
def added_up(first: jax.Array, add: Callable[[Ref], None]) -> jax.Array:
    """Sums in registers that begin with `first`, and to which `add(sums)` adds products."""

    def compute(sums: Ref) -> jax.Array:
        sums[...] = first
        add(sums)
        total: jax.Array = sums[...]
        return total

    return with_sums(compute, first.shape)
