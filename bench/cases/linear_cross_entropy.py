"""Cross entropy of a linear layer: ours against XLA and torch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import tunable
from bench.measuring.contenders import LIMITS
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.tuning import HEURISTIC

HELP = "cross entropy of a linear layer: ours, XLA, torch"
SHOWN = "32768x50257x768+both bf16"  # the case in README.md


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    """float32 means float32, as ours does and torch's; XLA's default on a GPU is TF32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean as a user of jax.numpy writes it, for weights (V, D)."""
    logits = jnp.matmul(x, w.T, precision=_precision(x)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def padded(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """The same with a vocabulary that is a multiple of 128, which cuBLAS takes: XLA multiplies others itself."""
    vocab = len(w)
    w = jnp.pad(w, ((0, -vocab % 128), (0, 0)))
    logits = jnp.matmul(x, w.T, precision=_precision(x)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    known = jnp.arange(logits.shape[1]) < vocab
    return jnp.mean(jax.nn.logsumexp(jnp.where(known, logits, -jnp.inf), axis=1) - chosen)


def ours(**options: Any) -> Callable[..., jax.Array]:
    """This library's."""
    return lambda x, w, labels: ops.linear_cross_entropy(x, w, labels, transpose_w=True, **options)


def in_torch() -> Callable[..., Any]:
    """torch.nn.functional's, of logits in float32."""
    from torch.nn import functional

    return lambda x, w, labels: functional.cross_entropy(functional.linear(x, w).float(), labels)


def workload(dtype: str, shape: Shape) -> Workload:
    """The mean over (tokens, width) for weights (vocabulary, width)."""
    tokens, vocab, width = map(int, shape)
    flop, operands = 2.0 * tokens * vocab * width, float((tokens + vocab) * width * itemsize(dtype))

    def inputs(seed: int) -> tuple[jax.Array, ...]:
        x, w = normal(seed, dtype, (tokens, width), (vocab, width))
        labels = jax.random.randint(jax.random.key(seed), (tokens,), 0, vocab, jnp.int32)
        return x, w * width**-0.5, labels  # logits of about the size of 1

    return Workload(
        inputs=inputs,
        reference=jax.jit(lambda x, w, y: plain(x.astype(jnp.float32), w.astype(jnp.float32), y)),
        contenders=[
            Contender("pallas", "ours", ours, gpu=True),
            Contender("heuristic", "ladder", functools.partial(ours, config=HEURISTIC), gpu=True),
            Contender("xla", "xla", lambda: plain),
            Contender("xla-padded", "xla", lambda: padded, gpu=True, skip="" if vocab % 128 else "nothing to pad"),
            Contender("torch", "torch", in_torch, prepare=lambda x, w, y: (x, w, y.long())),
        ],
        flop=flop,
        bytes=operands + 4.0 * tokens,
        gradient=Gradient(flop=2.0 * flop, bytes=operands, limit=LIMITS[dtype]),
    )


BENCHMARK = Benchmark(
    name="linear-cross-entropy",
    axes=("tokens", "vocabulary", "width"),
    shapes=(
        (32768, 50257, 768),  # GPT-2
        (8192, 151_936, 1024),  # Qwen3-0.6B
        (8192, 32_000, 4096),  # Llama 2
        (512, 512, 384),  # contrastive: in-batch negatives
    ),
    cpu_shapes=((64, 1000, 64),),
    dtypes=("bf16",),
    modes=("forward", "both"),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, tokens: int, vocab: int, width: int) -> Call:
    """A cross entropy with the kernel of tied embeddings, to tune its blocks."""
    x, kernel = tunable.operands(dtype, (tokens, width), (vocab, width))
    labels = jnp.asarray(np.random.default_rng(0).integers(0, vocab, tokens), jnp.int32)
    return ops.linear_cross_entropy, (x, kernel, labels), {"transpose_w": True}


TUNABLES = {
    "linear_cross_entropy": Tunable(
        axes="TxVxD",
        shapes=((2048, 50257, 768), (1024, 151_936, 1024), (4096, 32_000, 4096)),
        call=tuned,
        nearby=(1, 0.75),
    ),
}
