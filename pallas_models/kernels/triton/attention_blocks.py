"""Blocks of pairs of query and key, and the walk over them, in the kernels of attention and of its gradients."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.band import Index, Runs
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.common.scores import biased_in_xla
from pallas_models.kernels.forms.attention import Form
from pallas_models.kernels.triton.common import block_size, fma, plgpu

# Blocks: from here on, masks are searched beforehand for blocks that they rule out. Lines of pairs are many.
_SEARCHED, _SEARCHED_OF_PAIRS = 16, 8
_APART = 4  # blocks: from here on, those that need no mask have a loop of their own

MOST_HEAD_DIM = 256  # a program has a block of queries with all columns of a head

_Carry = TypeVar("_Carry")


def block_of_head(head_dim: int) -> int:
    """The columns that hold a head: a power of two, and no fewer than the 16 that Triton's products take."""
    return block_size(head_dim, 16, MOST_HEAD_DIM)


def every(terms: list[jax.Array]) -> jax.Array | None:
    """Where all of these masks hold; None where there are none."""
    return functools.reduce(operator.and_, terms) if terms else None


def narrowed(runs: Runs, count: int, found: Ref | None, batch: Index, block: Index, *, masked: bool) -> Runs:
    """The `Runs` of a block, of `count` blocks of the other axis, made consistent.

    Args:
      found: the result of `searched`.
      masked: whether there are masks besides the positions.
    """
    first, end, full, full_end = runs
    if found is not None:
        row = batch if found.shape[0] > 1 else jnp.int32(0)
        some, some_end, all_, all_end = (plgpu.load(found.at[row, block, jnp.int32(i)]) for i in range(4))
        first, end = jnp.maximum(first, some), jnp.minimum(end, some_end)
        full, full_end = jnp.maximum(full, all_), jnp.minimum(full_end, all_end)
    if count < _APART or (masked and found is None):
        return first, end, first, first  # one loop, in which all are masked
    if isinstance(full, int) and isinstance(full_end, int):
        return first, end, full, full_end
    if not isinstance(full, int):
        full = jnp.clip(full, first, end)
    return first, end, full, jnp.clip(full_end, full, end)


def joined(runs: Sequence[Runs]) -> Runs:
    """The `Runs` of blocks that one item or another needs, and the blocks that all of them need without a mask."""
    if len(runs) == 1:
        return runs[0]
    least, most = (functools.partial(functools.reduce, f) for f in (jnp.minimum, jnp.maximum))
    firsts, ends, fulls, full_ends = zip(*runs, strict=True)
    if all(isinstance(x, int) for x in (*firsts, *ends, *fulls, *full_ends)):
        return runs[0]  # by their positions, which are alike
    full = most(fulls)
    return least(firsts), most(ends), full, jnp.maximum(least(full_ends), full)


def bias_index(form: Form[Any], shape: tuple[int, ...], item: Index, head: Index) -> tuple[Index, Index]:
    """The element of the batch and the head that a bias of this shape has for an item and a head."""
    of_batch = item if form.items == 1 else jax.lax.div(item, form.items)
    batch, head = (i if n > 1 else jnp.int32(0) for i, n in zip((of_batch, head), shape, strict=False))
    return batch, head


def least_searched(form: Form[Any]) -> int:
    """How many blocks of the other side there must be for a search of the masks to pay."""
    return _SEARCHED if form.item_axis is None else _SEARCHED_OF_PAIRS


def is_shared(form: Form[Any]) -> bool:
    """Whether several items have the same bias, beside which copies of it are small."""
    return form.bias is not None and form.batch > form.bias.shape[0]


def arranged_bias(form: Form[jax.Array], *, keys_first: bool = False) -> jax.Array | None:
    """The bias as kernels load blocks of it, (B or 1, heads or 1, Sq, Skv), or (..., Skv, Sq) if `keys_first`.

    Where items share it, its rows begin at multiples of 16 bytes: threads load as many at a time. Where columns of
    pairs attend, the bias of a pair is given with keys first.
    """
    if form.bias is None:
        return None
    bias = form.bias.swapaxes(-2, -1) if keys_first != (form.item_axis == 2) else form.bias
    more = -bias.shape[-1] % (16 // bias.dtype.itemsize) if is_shared(form) else 0
    return jnp.pad(bias, [(0, 0)] * 3 + [(0, more)]) if more else bias


def _loop(start: Index, end: Index, step: Callable[[Index, _Carry], _Carry], carry: _Carry) -> _Carry:
    if isinstance(start, int) and isinstance(end, int) and end - start <= 1:
        return step(start, carry) if end > start else carry
    return jax.lax.fori_loop(start, end, step, carry)


def walk(runs: Runs, step: Callable[..., _Carry], carry: _Carry) -> _Carry:
    """Takes `step(block, carry, full=...)` over the full blocks, then over the blocks before and after them."""
    first, end, full, full_end = runs
    carry = _loop(full, full_end, functools.partial(step, full=True), carry)
    before = full - first

    def step_masked(i: Index, carry: _Carry) -> _Carry:
        after = full_end - before + i
        return step(
            after if isinstance(before, int) else jnp.where(i < before, first + i, after), carry, full=False
        )

    return _loop(0, before + end - full_end, step_masked, carry)


@meaning(lambda x, scale, shift: jnp.exp2(x * scale + shift))
def exp2_of(x: jax.Array, scale: jax.Array | float, shift: jax.Array) -> jax.Array:
    """`2 ** (x * scale + shift)`, with product and sum in one instruction, where XLA makes two of them."""
    factors = [scale] if isinstance(scale, jax.Array) else []
    factor = "$3" if factors else f"0f{np.float32(scale).view(np.uint32):08X}"
    (y,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 y; fma.rn.ftz.f32 y, $1, {factor}, $2; ex2.approx.ftz.f32 $0, y; }}",
        args=[x, *(jnp.broadcast_to(y, x.shape) for y in (shift, *factors))],
        constraints="=f,f,f" + ",f" * len(factors),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y


@meaning(biased_in_xla)
def biased(scores: jax.Array, scale: float, bias: jax.Array) -> jax.Array:
    """`scores * scale + bias`, float32, rounded once.

    A bias in bfloat16 has two numbers a register, each the upper half of a float32: a shift and a mask unpack it.
    """
    if bias.dtype != jnp.bfloat16:
        return fma(scores, jnp.full(scores.shape, scale, jnp.float32), bias.astype(jnp.float32))
    factor = f"0f{np.float32(scale).view(np.uint32):08X}"
    (y,) = plgpu.elementwise_inline_asm(
        "{ .reg .b32 low, high; shl.b32 low, $4, 16; and.b32 high, $4, 0xffff0000; "
        f"fma.rn.f32 $0, $2, {factor}, low; fma.rn.f32 $1, $3, {factor}, high; }}",
        args=[scores, bias],
        constraints="=f,=f,f,f,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
    )
    return y
