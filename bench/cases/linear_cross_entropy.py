"""Cross entropy of a linear layer and, without +forward, its gradient: ours against XLA and torch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring.harness import Benchmark, Contender, Shape, Workload, itemsize, normal
from pallas_models import ops
from pallas_models.tuning import HEURISTIC

HELP = "cross entropy of a linear layer with its gradient: ours, XLA, torch"
SHOWN = "32768x50257x768 bf16"  # the case in README.md


def plain(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean as a user of jax.numpy writes it, for a kernel (V, D)."""
    logits = (x @ kernel.T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def padded(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """The same with a vocabulary that is a multiple of 128, which cuBLAS takes: XLA multiplies others itself."""
    vocab = len(kernel)
    logits = (x @ jnp.pad(kernel, ((0, -vocab % 128), (0, 0))).T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    known = jnp.arange(logits.shape[1]) < vocab
    return jnp.mean(jax.nn.logsumexp(jnp.where(known, logits, -jnp.inf), axis=1) - chosen)


def ours(**options: Any) -> Callable[..., jax.Array]:
    """This library's."""
    return lambda x, kernel, labels: ops.linear_cross_entropy(x, kernel, labels, transposed=True, **options)


def in_torch(*, forward: bool) -> Callable[..., Any]:
    """torch.nn.functional's, of logits in float32."""
    import torch
    from torch.nn import functional

    def loss(x: Any, kernel: Any, labels: Any) -> Any:
        return functional.cross_entropy(functional.linear(x, kernel).float(), labels)

    def with_gradient(x: Any, kernel: Any, labels: Any) -> Any:
        leaves = x.detach().requires_grad_(), kernel.detach().requires_grad_()
        value = loss(*leaves, labels)
        return value.detach(), *torch.autograd.grad(value, leaves)

    return loss if forward else with_gradient


def workload(dtype: str, shape: Shape) -> Workload:
    """The mean over (tokens, width) for a kernel (vocabulary, width), and its gradient by both."""
    tokens, vocab, width = map(int, shape[:3])
    forward = "forward" in shape

    def inputs(seed: int) -> tuple[jax.Array, ...]:
        x, kernel = normal(seed, dtype, (tokens, width), (vocab, width))
        labels = jax.random.randint(jax.random.key(seed), (tokens,), 0, vocab, jnp.int32)
        return x, kernel * width**-0.5, labels  # logits of about the size of 1

    def step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
        if forward:
            return loss

        def with_gradient(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
            value, gradients = jax.value_and_grad(loss, (0, 1))(x, kernel, labels)
            return value, *gradients

        return with_gradient

    exact = step(plain)
    return Workload(
        inputs=inputs,
        reference=jax.jit(lambda x, kernel, y: exact(x.astype(jnp.float32), kernel.astype(jnp.float32), y)),
        contenders=[
            Contender("pallas", "ours", lambda: step(ours()), gpu=True),
            Contender("heuristic", "ladder", lambda: step(ours(config=HEURISTIC)), gpu=True),
            Contender("xla", "xla", lambda: step(plain)),
            Contender(
                "xla-padded", "xla", lambda: step(padded), gpu=True, skip="" if vocab % 128 else "nothing to pad"
            ),
            Contender(
                "torch", "torch", lambda: in_torch(forward=forward), prepare=lambda x, w, y: (x, w, y.long())
            ),
        ],
        flop=(2.0 if forward else 6.0) * tokens * vocab * width,  # products: logits, and the gradients of both
        bytes=(1.0 if forward else 2.0) * (tokens + vocab) * width * itemsize(dtype) + 4.0 * tokens,
    )


BENCHMARK = Benchmark(
    name="linear-cross-entropy",
    axes=("tokens", "vocabulary", "width"),
    flags=("forward",),
    shapes=(
        (32768, 50257, 768),  # GPT-2
        (32768, 50257, 768, "forward"),
        (8192, 151_936, 1024),  # Qwen3-0.6B
        (8192, 32_000, 4096),  # Llama 2
        (512, 512, 384),  # contrastive: in-batch negatives
    ),
    cpu_shapes=((64, 1000, 64), (64, 1000, 64, "forward")),
    dtypes=("bf16",),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run
