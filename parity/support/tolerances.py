"""The bounds on relative errors, ||out - expected|| / ||expected||: one place, with where each comes from.

A bound holds on every CPU and GPU: none depends on the order in which a compiler adds, which differs between
CPUs of the same kind. Where a bound is a test's own, for a constant of its data, it stands in that test.
"""

import math

_HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def _roundings(count: int) -> float:
    """What so many float32 roundings of either sign add up to: each is even in half an ulp, so 1 / 3 in square."""
    return math.sqrt(count / 3) * _HALF_ULP["float32"]


def products(count: int) -> float:
    """A float32 sum of so many products, one after another: a rounding each for product and sum."""
    return _roundings(2 * count)


# Rounding a result to its dtype: half an ulp at most.
ROUNDED = _HALF_ULP
# One op. In float32: sums of up to 4096 products, a rounding each for product and sum. In half precision rounding
# the result costs 2e-4 and 1.7e-3, an ulp being even from 1 to 2 times its size; roundings inside (weights of
# attention, norms that are not fused) up to twice that again.
OP = {"float32": _roundings(2 * 3750), "float16": 8e-4, "bfloat16": 6e-3}
# A model of a few layers: OP by about the square root of the number of ops that round, which is 2 to 6. In
# float32 the residual stream outweighs all that is added to it.
MODEL = {"float32": OP["float32"], "float16": 2e-3, "bfloat16": 1.4e-2}

# The least cosine of an embedding with the exact one: a relative error of 4.5e-3 or 1.4e-2.
COSINE = {"float32": 0.99999, "float16": 0.9999, "bfloat16": 0.9999}

# One op in float32:
SAME = _roundings(200)  # the same arithmetic in another program, which may fuse a product and a sum
SHORT = _roundings(800)  # sums of up to 200 products, and an activation: gelu's polynomial takes half of this
LONG = _roundings(3200)  # sums of up to 1000 products; attention: two of them, and exponentials
GRADIENT = OP["float32"]  # of one op: one product more, of sums as long as the op's own
# Several ops in float32, each of which has an error of OP or less that the next may amplify:
CHAIN = _roundings(20_000)  # an encoder of one layer; a triangle update; logits of two layers, with sums of 3072
DEEP = _roundings(80_000)  # a model against another library in float32; sums of gradients over a batch
MODEL_GRADIENT = _roundings(320_000)  # of parameters of a model: forward and backward, twice as deep

TF32 = 2.0**-10  # operands of 10 + 1 bits, half an ulp for either
# 512 additions in float16 of products of either sign. The sum grows with the square root of their number, so that
# its roundings count half in square: at most sqrt(512 / 3 / 2) 2^-11 = 4.5e-3, fewer in the steps of tensor cores.
FLOAT16_SUM = 4e-3
