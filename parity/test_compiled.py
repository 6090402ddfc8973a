"""What XLA makes of the encoder on CUDA: the kernels of this library and no other's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import minilm
from parity.common import MOSAIC_CALL, ON_GPU, TRITON_CALL, assert_close, assert_equal, random_mask, random_params

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: reads the program compiled for it")

CONFIG = minilm.MiniLMConfig()


@functools.cache
def tokens(batch: int, seq: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(50)
    return jnp.asarray(rng.integers(0, CONFIG.vocab_size, (batch, seq)), jnp.int32), random_mask(rng, batch, seq)


@functools.cache
def compiled(implementation: str | None, batch: int, seq: int) -> jax.stages.Compiled:
    embed = jax.jit(functools.partial(minilm.embed, implementation=implementation))
    return embed.lower(random_params(CONFIG, "float16"), *tokens(batch, seq)).compile()


# One sentence, whole tiles, the longest, odd.
SHAPES = [(1, 16), (64, 128), (8, 512), (3, 77)]


@pytest.mark.parametrize("batch, seq", SHAPES)
def test_every_computation_is_a_kernel_of_ours(batch, seq):
    text = compiled(None, batch, seq).as_text()
    targets = re.findall(r'custom_call_target="([^"]*)"', text)
    ours = {TRITON_CALL, MOSAIC_CALL}
    assert len(targets) >= 2 + 3 * CONFIG.num_layers  # with all that follows attention in one
    assert set(targets) <= ours, f"calls of others: {set(targets) - ours}"
    assert not re.search(r"\bdot\(|\bconvolution\(|\bcublas|\bcudnn|__triton_gemm|triton_nested_gemm", text)
    # What is left to XLA may reshape, convert or copy small integers, and compute nothing.
    assert not re.search(r"\b(reduce|exponential|rsqrt|divide|tanh|erf|gather)\(", text)


@pytest.mark.parametrize("batch, seq", SHAPES)
def test_the_default_on_cuda_is_as_good_as_triton(batch, seq):
    default, named = (
        compiled(i, batch, seq)(random_params(CONFIG, "float16"), *tokens(batch, seq)) for i in (None, "triton")
    )
    assert_close(default, named, 2e-3)  # kernels for Hopper sum up in another order


def test_two_calls_give_the_same_bits():
    first, second = (compiled(None, 64, 128)(random_params(CONFIG, "float16"), *tokens(64, 128)) for _ in range(2))
    assert_equal(first, second)
