"""The same input gives the same bits: no kernel adds up in an order that changes from call to call.

The interpreters run one thread after another: without a GPU one call of each kind shows that the tests run.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import gpt2, minilm, qwen3, trimul
from parity.cases import BY_BACKEND, CALLS, Call
from parity.support.common import KERNEL, ON_GPU, ON_HOPPER, by_device, normal, random_mask, random_params

TIMES = 1000 if ON_GPU else 3
every_op = pytest.mark.parametrize("call", by_device(cpu=CALLS[:1], gpu=CALLS), ids=lambda call: call.name)
SIZES = dict(vocab_size=500, hidden_size=256, num_layers=2, num_heads=4, intermediate_size=512, max_positions=256)
# The choice between the backends where there is one, else the kernels of Triton in the interpreter.
IMPLEMENTATION = None if ON_GPU else KERNEL


def assert_the_same_bits(function: Callable[..., Any], *arrays: Any) -> None:
    """Asserts that calls of a function, compiled once, differ in no bit; other work goes on in between."""
    compiled = jax.jit(function)
    first = jax.tree.leaves(compiled(*arrays))
    assert all(np.all(np.isfinite(np.asarray(leaf, np.float32))) for leaf in first)

    @jax.jit
    def differing(first: list[jax.Array], second: list[jax.Array]) -> jax.Array:
        return sum((jnp.sum(a != b) for a, b in zip(first, second, strict=True)), start=jnp.int32(0))

    counts = [differing(first, jax.tree.leaves(compiled(*arrays))) for _ in range(TIMES)]
    assert int(jnp.max(jnp.stack(counts))) == 0


@every_op
def test_ops(call: Call):
    arrays = call.arrays("float32", *by_device(cpu=[1], gpu=[16]))
    assert_the_same_bits(call(KERNEL), *arrays)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("call", BY_BACKEND["mosaic"], ids=lambda call: call.name)
@pytest.mark.parametrize("size", [1, 16])
def test_kernels_for_hopper(call: Call, size):
    assert_the_same_bits(call("mosaic"), *call.arrays("bfloat16", size))


@every_op
def test_gradients(call: Call):
    arrays = call.arrays("float32")
    floats, rest = arrays[: call.floats], arrays[call.floats :]
    loss = lambda *floats: jnp.sum(jnp.square(call(KERNEL)(*floats, *rest)))  # noqa: E731
    assert_the_same_bits(jax.grad(loss, tuple(range(call.floats))), *floats)


def tokens(batch: int, seq: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(95)
    return jnp.asarray(rng.integers(0, SIZES["vocab_size"], (batch, seq)), jnp.int32), random_mask(rng, batch, seq)


def models() -> dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]]:
    """Every model's function and a call of it: real lengths on a GPU."""
    batch, seq = by_device(cpu=[(2, 9)], gpu=[(8, 256)])[0]
    n, c = by_device(cpu=[(6, 16)], gpu=[(256, 128)])[0]
    configs = {
        "minilm": minilm.MiniLMConfig(**SIZES),
        "gpt2": gpt2.GPT2Config(**SIZES),
        "qwen3": qwen3.Qwen3Config(**SIZES, num_kv_heads=2, head_dim=64),
    }
    entry = {"minilm": minilm.embed, "gpt2": gpt2.logits, "qwen3": qwen3.logits}
    module = {"minilm": minilm, "gpt2": gpt2, "qwen3": qwen3}
    calls = {
        name: (
            functools.partial(entry[name], config=config, implementation=IMPLEMENTATION),
            (random_params(config, "bfloat16", module[name].init), *tokens(batch, seq)),
        )
        for name, config in configs.items()
    }
    pair = trimul.TriMulConfig(channels=c, hidden=c, use_bias=True)
    update = functools.partial(trimul.trimul, direction="outgoing", implementation=IMPLEMENTATION)
    x = normal(np.random.default_rng(96), 1, n, n, c, dtype="bfloat16")
    return calls | {"trimul": (update, (random_params(pair, "bfloat16", trimul.init), x))}


@pytest.mark.parametrize("name", by_device(cpu=["minilm"], gpu=["minilm", "gpt2", "qwen3", "trimul"]))
def test_models(name):
    function, arrays = models()[name]
    assert_the_same_bits(lambda *arrays: function(*arrays), *arrays)


def test_calls_that_differ_are_found():
    counter = iter(range(10_000))

    def unsteady(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return x + 1e-7 * jax.pure_callback(lambda: np.float32(next(counter) % 2), shape)

    with pytest.raises(AssertionError):
        assert_the_same_bits(unsteady, jnp.ones(3))
