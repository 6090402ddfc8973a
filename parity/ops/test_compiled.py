"""What XLA makes of the encoder on CUDA: the kernels of this library and no other's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import minilm
from parity.support.common import (
    MOSAIC_CALL,
    ON_GPU,
    TRITON_CALL,
    assert_close,
    assert_equal,
    kernel_calls,
    random_mask,
    random_params,
)

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: reads the program compiled for it")

CONFIG = minilm.MiniLMConfig()


@functools.cache
def tokens(batch: int, seq: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(50)
    return jnp.asarray(rng.integers(0, CONFIG.vocab_size, (batch, seq)), jnp.int32), random_mask(rng, batch, seq)


@functools.cache
def lowered(implementation: str | None, batch: int, seq: int) -> jax.stages.Lowered:
    embed = jax.jit(functools.partial(minilm.embed, implementation=implementation))
    return embed.lower(random_params(CONFIG, "float16"), *tokens(batch, seq))


@functools.cache
def compiled(implementation: str | None, batch: int, seq: int) -> jax.stages.Compiled:
    return lowered(implementation, batch, seq).compile()


# One sentence, whole tiles, the longest, odd.
SHAPES = [(1, 16), (64, 128), (8, 512), (3, 77)]
# What computes, of XLA's own: beside our kernels it may reshape, convert, and combine flags and small integers.
COMPUTES = re.compile(
    r"= \(?(?:f16|bf16|f32)\[\S* (dot|convolution|reduce|exponential|rsqrt|divide|tanh|erf|gather)\("
    r"|(cublas|cudnn|triton_nested_gemm)"
)


def computing(text: str) -> set[str]:
    """The operations of a compiled program that COMPUTES finds."""
    return {operation or library for operation, library in COMPUTES.findall(text)}


@pytest.mark.parametrize("batch, seq", SHAPES)
def test_every_computation_is_a_kernel_of_ours(batch, seq):
    text = compiled(None, batch, seq).as_text()
    targets = re.findall(r'custom_call_target="([^"]*)"', text)
    ours = {TRITON_CALL, MOSAIC_CALL}
    assert set(targets) <= ours, f"calls of others: {set(targets) - ours}"
    assert len(targets) == kernel_calls(lowered(None, batch, seq).as_text()) > 0  # XLA drops and doubles none
    assert computing(text) == set()
    # All of these occur in the plain model: in one of its forms or another XLA would show them.
    plain = computing(compiled("xla", batch, seq).as_text())
    assert {"reduce", "exponential", "divide", "gather"} <= plain
    assert plain & {"dot", "cublas", "triton_nested_gemm"}


@pytest.mark.parametrize("batch, seq", SHAPES)
def test_the_default_on_cuda_is_as_good_as_triton(batch, seq):
    default, named = (
        compiled(i, batch, seq)(random_params(CONFIG, "float16"), *tokens(batch, seq)) for i in (None, "triton")
    )
    assert_close(default, named, 2e-3)  # kernels for Hopper sum up in another order


def test_two_calls_give_the_same_bits():
    first, second = (compiled(None, 64, 128)(random_params(CONFIG, "float16"), *tokens(64, 128)) for _ in range(2))
    assert_equal(first, second)
