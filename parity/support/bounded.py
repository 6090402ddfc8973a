"""Arithmetic on values with bounds of their errors: how far off a float32 kernel may be, step by step.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3), to first order and in
float64: a formula written with these functions gives the exact value and a bound for whoever computes it in
float32, in any order. Nothing in the bounds is fitted.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

Array = np.ndarray[Any, Any]

TF32 = 2.0**-10  # operands cut off to 10 + 1 bits, where `precision` allows it
UNIT = 2.0**-23  # of float32: rounding is off by half of it, the sums of tensor cores, which cut off, by all
TINY = 2.0**-126  # products that are smaller may be rounded to 0
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half of the smallest number of a format; bfloat16 has the range of float32.
SMALLEST = {"float32": TINY, "float16": 2.0**-25, "bfloat16": TINY}


@dataclasses.dataclass(frozen=True, slots=True)
class Bounded:
    """Float64 values and how far off, element by element, a float32 computation of them may be."""

    value: Array
    error: Array

    def __add__(self, other: "Bounded") -> "Bounded":
        value = self.value + other.value
        return Bounded(value, self.error + other.error + UNIT * np.abs(value))

    def __neg__(self) -> "Bounded":
        return Bounded(-self.value, self.error)

    def __sub__(self, other: "Bounded") -> "Bounded":
        return self + -other

    def __mul__(self, other: "Bounded") -> "Bounded":
        value = self.value * other.value
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return Bounded(value, error + UNIT * np.abs(value) + TINY)

    def __truediv__(self, other: "Bounded") -> "Bounded":
        value = self.value / other.value
        least = np.maximum(np.abs(other.value) - other.error, 0.0)
        return Bounded(value, (self.error + np.abs(value) * other.error) / least + 2 * UNIT * np.abs(value) + TINY)

    def map(self, function: Callable[[Array], Array]) -> "Bounded":
        """The same values in another shape or order."""
        return Bounded(function(self.value), function(self.error))

    def off(self, error: Array | float) -> "Bounded":
        """The same, off by so much more."""
        return Bounded(self.value, self.error + error)


def exact(x: Any) -> Bounded:
    """Values that are given; `Bounded` ones stay as they are."""
    if isinstance(x, Bounded):
        return x
    value = np.asarray(x, np.float64)
    return Bounded(value, np.zeros_like(value))


def dot(a: Bounded, b: Bounded, *terms: Array | None, operand: float = 0.0, dtype: str = "float32") -> Bounded:
    """The matrix product plus `terms`, any of which a compiler may begin the sum with.

    `operand` is the relative error of operands that are rounded before, as to TF32. `dtype` is their dtype:
    tensor cores align products by the exponents of their operands, of which subnormal numbers all have the least.
    """
    size = a.value.shape[-1]
    absolute_a, absolute_b = np.abs(a.value), np.abs(b.value)
    error_a, error_b = a.error + operand * absolute_a, b.error + operand * absolute_b
    least = float(jnp.finfo(dtype).smallest_normal)
    aligned_a, aligned_b = (np.where(x == 0.0, 0.0, np.maximum(x, least)) for x in (absolute_a, absolute_b))
    sums = size * UNIT * (aligned_a @ aligned_b) + size * TINY
    y = Bounded(a.value @ b.value, absolute_a @ error_b + error_a @ (absolute_b + error_b) + sums)
    for term in terms:
        if term is not None:
            y = (y + exact(term)).off(size * UNIT * np.abs(term))
    return y


def plus(y: Bounded, *terms: Array | None) -> Bounded:
    """y plus all terms that there are, one after another."""
    for term in terms:
        if term is not None:
            y = y + exact(term)
    return y


def operand(dtype: str, precision: str | None) -> float:
    """The relative error of an operand of a product: `precision` allows TF32 for float32."""
    return TF32 if dtype == "float32" and precision is not None else 0.0


def product(
    x: Array | Bounded,
    w: Array,
    *terms: Array | None,
    dtype: str,
    precision: str | None,
    acc_dtype: str = "float32",
) -> Bounded:
    """x w plus terms, as kernels compute it of operands in `dtype`."""
    x = exact(x)
    y = dot(x, exact(w), *terms, operand=operand(dtype, precision), dtype=dtype)
    if acc_dtype == "float16":  # every partial sum is rounded; where one leaves float16, so may the result
        size = x.value.shape[-1] * (np.abs(x.value) @ np.abs(w))
        off = HALF_ULP["float16"] * 2 * size + x.value.shape[-1] * SMALLEST["float16"]
        y = y.off(np.where(size > 65504, np.inf, off))
    return y


def joined(*parts: Bounded, axis: int = -1) -> Bounded:
    """The parts, one after another on an axis."""
    values, errors = zip(*((part.value, part.error) for part in parts), strict=True)
    return Bounded(np.concatenate(values, axis), np.concatenate(errors, axis))


def total(x: Bounded) -> Bounded:
    """The sum over the last axis, which is kept."""
    size = x.value.shape[-1]
    error = np.sum(x.error + size * UNIT * np.abs(x.value), -1, keepdims=True)
    return Bounded(np.sum(x.value, -1, keepdims=True), error)


def mean(x: Bounded) -> Bounded:
    """The mean over the last axis, which is kept."""
    return total(x) / exact(float(x.value.shape[-1]))


def exp(x: Bounded) -> Bounded:
    """Exponentials, computed as powers of 2: the argument's product with log2(e) is rounded."""
    off = x.error + UNIT * (2 * np.abs(x.value) + 4)
    value = np.exp(x.value)
    error = np.exp(x.value + np.where(np.isfinite(x.value), off, 0.0)) - value
    return Bounded(value, error + np.where(np.isneginf(x.value), 0.0, TINY))


def rsqrt(x: Bounded) -> Bounded:
    """1 / sqrt(x), for positive x."""
    value = 1 / np.sqrt(x.value)
    return Bounded(value, 1 / np.sqrt(np.maximum(x.value - x.error, 0.0)) - value + 4 * UNIT * value)


def where(kept: Array, x: Bounded, value: float) -> Bounded:
    """x where it is kept, and exactly `value` elsewhere."""
    return Bounded(np.where(kept, x.value, value), np.where(kept, x.error, 0.0))


def rounded(x: Bounded, dtype: str) -> Bounded:
    """x rounded to `dtype`, as if its range had no end: a value beyond it has to stay right or become infinite."""
    if dtype == "float32":
        return x
    return x.off(HALF_ULP[dtype] * (np.abs(x.value) + x.error) + SMALLEST[dtype])


def held(x: Bounded, dtype: str) -> Bounded:
    """x after a way through memory in `dtype`: nothing is known of a value beyond its range."""
    beyond = np.abs(x.value) + x.error > float(jnp.finfo(dtype).max)
    return x.off(np.where(beyond, np.inf, 0.0))


def centred(y: Bounded) -> Bounded:
    """y less its mean over the last axis."""
    return y - mean(y)


def normalised(y: Bounded, epsilon: float, *, subtract_mean: bool) -> Bounded:
    """y by its root mean square over the last axis, less its mean before."""
    d = centred(y) if subtract_mean else y
    return d * rsqrt(mean(d * d) + exact(epsilon))


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: 0.5 * x * special.erfc(-x / np.sqrt(2)),
    "gelu_tanh": lambda x: x * special.expit(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)),
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": special.expit,
    "silu": lambda x: x * special.expit(x),
}


def activation(name: str | None, x: Bounded, dtype: str = "float32") -> Bounded:
    """An activation: none is steeper than 1.13. `dtype` is that which the kernel rounds the result to.

    The kernels' polynomials for gelu are off by 5e-7, for a result in float16 by 5.5e-5 and in bfloat16 by
    3e-4, and there a tanh of 11 bits takes the place of exponentials. Arguments of exponentials are off by a few
    roundings of their size, which matters where the result is not yet 0 or 1: up to 16.
    """
    if name is None:
        return x
    value, size = _FUNCTIONS[name](x.value), np.abs(x.value)
    if name == "relu":
        return Bounded(value, x.error)
    error = 1.13 * x.error + 8 * UNIT * np.abs(value) + UNIT * 64 * np.minimum(np.abs(size), 16.0)
    error += (5.5e-5 if dtype == "float16" else 5e-7) if name == "gelu" else TINY
    if dtype == "bfloat16":
        error += 2.0**-11 * (1.0 if name == "sigmoid" else size) + (3e-4 if name == "gelu" else 0.0)
    return Bounded(value, error)


@np.errstate(all="ignore")
def disagreement(out: Any, expected: Bounded, dtype: str) -> tuple[str | None, float, float]:
    """What is wrong with an array computed in `dtype`, its error as a part of the bound, and relative to the norm.

    What cannot be represented may be infinite or NaN; NaN is to be NaN, infinities are to be the same.
    """
    out = np.asarray(out).astype(np.float64)
    value = expected.value
    if out.shape != value.shape:
        return f"shape {out.shape}, expected {value.shape}", np.inf, np.inf
    bound = expected.error + (HALF_ULP[dtype] * np.abs(value) + SMALLEST[dtype])
    bound = np.where(np.isnan(bound), np.inf, bound)  # infinite errors times 0
    finite = np.isfinite(value)
    beyond = finite & (np.abs(value) + bound > float(jnp.finfo(dtype).max)) & ~np.isfinite(out)
    off = np.abs(out - np.where(finite, value, 0.0))
    part = np.where(expected.error == 0.0, np.where(off <= bound, 0.0, np.inf), off / bound)
    part = np.where(finite, np.where(np.isnan(off), np.inf, part), 0.0)
    part = np.where(beyond, 0.0, part)
    same = np.where(np.isnan(value), np.isnan(out), np.where(finite, True, out == value))
    part = np.where(same, part, np.inf)
    compared = finite & ~beyond & np.isfinite(bound)
    norm = float(np.linalg.norm(value[compared]))
    relative = float(np.linalg.norm(off[compared])) / norm if norm else 0.0
    if part.size == 0:
        return None, 0.0, 0.0
    worst = np.unravel_index(np.argmax(part), part.shape)
    largest = float(part[worst])
    if largest <= 1.0:
        return None, largest, relative
    wrong = int(np.sum(~(part <= 1.0)))
    return (
        f"{wrong} of {part.size} values are off, at {tuple(map(int, worst))} {out[worst]:.9g}, "
        f"expected {value[worst]:.9g} +- {bound[worst]:.2g}",
        largest,
        relative,
    )


@np.errstate(all="ignore")
def apart(
    out: Any, expected: Any, tolerance: float, floor: float, moved: Any = None, small: float = 0.0
) -> tuple[str | None, float]:
    """What is wrong with the leaves of a result, and the largest error of one as a part of its bound.

    A value beyond the range of its dtype may be infinite or NaN.

    Args:
      tolerance: of the norm of a leaf.
      floor: of the norm of all, or of 1, which operands are of: a result that cancels is off by roundings of what
        it is a difference of.
      moved: the expected result for operands, and with sums (`shaken`), that are off. Later operations amplify the
        error of an op as they amplify an error of operands, which is measured so; three times as much is let pass.
      small: absolute, of leaves of fewer than 8 numbers: sums that cancel, of which one measurement says little.
    """
    found = [np.asarray(x) for x in jax.tree.leaves(out)]
    wanted, others = (
        [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
        for tree in (expected, expected if moved is None else moved)
    )
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return f"shapes are {[x.shape for x in found]}, expected {[x.shape for x in wanted]}", np.inf
    whole = math.sqrt(sum(float(np.sum(np.square(x[np.isfinite(x)]))) for x in wanted))
    worst = 0.0
    for i, (given, y, z) in enumerate(zip(found, wanted, others, strict=True)):
        x, finite = given.astype(np.float64), np.isfinite(y)
        if not np.array_equal(np.where(finite, 0.0, x), np.where(finite, 0.0, y), equal_nan=True):
            return f"result {i} holds {x[~finite][:3]} where {y[~finite][:3]} is expected", np.inf
        if jnp.issubdtype(given.dtype, jnp.floating):
            finite &= np.isfinite(x) | (np.abs(y) < 0.99 * float(jnp.finfo(given.dtype).max))
        off, size, move = (float(np.linalg.norm(d[finite])) for d in (x - y, y, z - y))
        bound = tolerance * size + 3 * move + floor * max(whole, 1.0) + (small if x.size < 8 else 0.0)
        if not off <= bound:
            return (
                f"result {i} of {x.shape} is off by {off:.3g} of {size:.3g}, expected at most {bound:.3g}",
                np.inf,
            )
        worst = max(worst, off / bound if off else 0.0)
    return None, worst
