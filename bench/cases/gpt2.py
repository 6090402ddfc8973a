"""A transformer block of GPT-2 small, causal: ours against XLA and torch."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bench.measuring.harness import DTYPES, Benchmark, Contender, Gradient, Shape, Workload, itemsize
from bench.models import decoders
from pallas_models import gpt2

HELP = "GPT-2 block, causal: ours, XLA, torch"
SHOWN = "8x1024 bf16"  # the case in README.md

CONFIG = gpt2.GPT2Config()


def param_shapes() -> Any:
    """The parameters of a block, without their values."""
    return jax.eval_shape(lambda: gpt2.init_block(jax.random.key(0), CONFIG))


TREE = jax.tree.structure(param_shapes())


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_inputs(seed: Any, dtype: str, batch: int, seq: int) -> tuple[jax.Array, ...]:
    """x, and the parameters of a block in the order of `TREE`, as large as real ones: each call has its own.

    In a model the weights of a block come from memory too: the other blocks have used theirs since.
    """
    params = jax.tree.leaves(param_shapes())
    x_key, *keys = jax.random.split(jax.random.key(seed), 1 + len(params))
    x = jax.random.normal(x_key, (batch, seq, CONFIG.hidden_size)).astype(DTYPES[dtype])
    leaves = TREE.unflatten([0.03 * jax.random.normal(k, p.shape) for k, p in zip(keys, params, strict=True)])
    for norm in (leaves["attention_norm"], leaves["mlp_norm"]):
        norm["scale"] += 1.0
    return x, *(p if p.ndim == 1 else p.astype(DTYPES[dtype]) for p in jax.tree.leaves(leaves))


def plain(
    x: jax.Array, *leaves: jax.Array, attention: Literal["xla", "cudnn"], precision: Any = None
) -> jax.Array:
    """The block as a user of jax.numpy writes it, with that attention of `jax.nn.dot_product_attention`."""
    p = TREE.unflatten(leaves)

    def norm(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        y = x.astype(jnp.float32)
        y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + CONFIG.epsilon)
        return (y * p["scale"] + p["bias"]).astype(x.dtype)

    def linear(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        return jnp.matmul(x, p["kernel"], precision=precision) + p["bias"].astype(x.dtype)

    heads = linear(norm(x, p["attention_norm"]), p["attention"]["qkv"])
    q, k, v = jnp.unstack(heads.reshape(*x.shape[:2], 3, CONFIG.num_heads, -1), axis=2)
    with jax.default_matmul_precision(precision):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + linear(y.reshape(x.shape), p["attention"]["out"])
    y = jax.nn.gelu(linear(norm(x, p["mlp_norm"]), p["mlp"]["up"]), approximate=True)
    return x + linear(y, p["mlp"]["down"])


reference = decoders.one_by_one(functools.partial(plain, attention="xla", precision="highest"))


def in_torch(*, cudnn: bool) -> Callable[..., Any]:
    """The block of torch.nn.functional, with the attention that torch chooses or cuDNN's."""
    from torch.nn import functional

    def block(x: Any, *leaves: Any) -> Any:
        p = TREE.unflatten(leaves)

        def norm(x: Any, p: dict[str, Any]) -> Any:
            return functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], CONFIG.epsilon)

        def linear(x: Any, p: dict[str, Any]) -> Any:
            return functional.linear(x, p["kernel"].t(), p["bias"])

        heads = linear(norm(x, p["attention_norm"]), p["attention"]["qkv"])
        q, k, v = heads.unflatten(-1, (3, CONFIG.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), p["attention"]["out"])
        y = functional.gelu(linear(norm(x, p["mlp_norm"]), p["mlp"]["up"]), approximate="tanh")
        return x + linear(y, p["mlp"]["down"])

    return decoders.in_torch(block, cudnn=cudnn)


def of_one_dtype(x: Any, *leaves: Any) -> tuple[Any, ...]:
    """The inputs of torch, where biases and norms have the dtype of the matrices."""
    return x, *(leaf.to(x.dtype) for leaf in leaves)


def workload(dtype: str, shape: Shape) -> Workload:
    """A block on x (batch, seq, 768)."""
    batch, seq = map(int, shape)
    rows, h, f = batch * seq, CONFIG.hidden_size, CONFIG.intermediate_size
    half = "" if dtype != "fp32" else decoders.HALF_ONLY
    precision = "highest" if dtype == "fp32" else None

    def ours() -> Callable[..., jax.Array]:
        return lambda x, *leaves: gpt2.block(TREE.unflatten(leaves), x, num_heads=CONFIG.num_heads)

    def xla(attention: Literal["xla", "cudnn"]) -> Contender:
        function = functools.partial(plain, attention=attention, precision=precision)
        cudnn = attention == "cudnn"
        name = "xla-cudnn" if cudnn else "xla"
        return Contender(name, "xla", lambda: function, gpu=cudnn, skip=half if cudnn else "")

    products, scores = 2.0 * rows * (4 * h**2 + 2 * h * f), 2.0 * rows * seq * h
    return Workload(
        inputs=lambda seed: random_inputs(seed, dtype, batch, seq),
        reference=reference,
        contenders=[
            Contender("pallas", "ours", ours, gpu=True),
            xla("xla"),
            xla("cudnn"),
            Contender(
                "torch", "torch", functools.partial(in_torch, cudnn=False), prepare=of_one_dtype, launches=4
            ),
            Contender(
                "torch-cudnn",
                "torch",
                functools.partial(in_torch, cudnn=True),
                prepare=of_one_dtype,
                ways=("graph", "compile-graph"),
                launches=4,
                gpu=True,
                skip=half,
            ),
        ],
        # Attention computes the scores of a triangle.
        flop=products + scores,
        gradient=Gradient(flop=2.0 * products + 2.5 * scores),
        bytes=float((2 * rows * h + 4 * h**2 + 2 * h * f) * itemsize(dtype)),
        limit=decoders.LIMITS[dtype],
    )


BENCHMARK = Benchmark(
    name="gpt2",
    axes=("batch", "seq"),
    shapes=((1, 128), (1, 1024), (8, 1024), (32, 1024)),
    cpu_shapes=((1, 16),),
    dtypes=("bf16",),
    workload=workload,
    compile_budget=40.0,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run
