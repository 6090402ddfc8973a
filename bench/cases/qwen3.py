"""A decoder layer of Qwen3-8B over whole prompts: ours against XLA and torch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring.harness import DTYPES, Benchmark, Contender, Gradient, Shape, Workload, itemsize
from bench.models import decoders
from pallas_models import qwen3
from pallas_models.ops import rotary_table

HELP = "Qwen3-8B decoder layer, prefill: ours, XLA, torch"
SHOWN = "1x2048 bf16"  # the case in README.md

CONFIG = qwen3.Qwen3Config()


def param_shapes() -> Any:
    """The parameters of a layer, without their values."""
    return jax.eval_shape(lambda: qwen3.init_layer(jax.random.key(0), CONFIG))


TREE = jax.tree.structure(param_shapes())


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_inputs(seed: Any, dtype: str, batch: int, seq: int) -> tuple[jax.Array, ...]:
    """x, and the parameters of a layer in the order of `TREE`, as large as real ones."""
    params = jax.tree.leaves(param_shapes())
    x_key, *keys = jax.random.split(jax.random.key(seed), 1 + len(params))
    x = jax.random.normal(x_key, (batch, seq, CONFIG.hidden_size), DTYPES[dtype])
    leaves = [
        1 + 0.1 * jax.random.normal(k, p.shape)
        if p.ndim == 1
        else 0.02 * jax.random.normal(k, p.shape, DTYPES[dtype])
        for k, p in zip(keys, params, strict=True)
    ]
    return x, *leaves


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + CONFIG.epsilon) * scale).astype(x.dtype)


def plain(
    x: jax.Array,
    *leaves: jax.Array,
    attend: Callable[..., jax.Array],
    precision: Any = None,
    config: qwen3.Qwen3Config | None = None,
) -> jax.Array:
    """The layer as a user of jax.numpy writes it, queries, keys and values in one product, gate and up in one."""
    config = config or CONFIG
    p = TREE.unflatten(leaves)
    batch, seq, _ = x.shape
    matmul = functools.partial(jnp.matmul, precision=precision)
    cos, sin = (
        table[:, None, :] for table in rotary_table(jnp.arange(seq), config.head_dim, theta=config.rope_theta)
    )

    def rotate(x: jax.Array, scale: jax.Array) -> jax.Array:
        a, b = jnp.split(norm(x, scale).astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    attention, mlp = p["attention"], p["mlp"]
    qkv = matmul(norm(x, p["attention_norm"]["scale"]), attention["qkv"]["kernel"])
    groups, ends = config.head_groups, (config.num_heads, config.num_heads + config.num_kv_heads)
    heads = qkv.reshape(batch, seq, groups, -1, config.head_dim)
    q, k, v = (
        part.reshape(batch, seq, -1, config.head_dim)
        for part in jnp.split(heads, [end // groups for end in ends], axis=3)
    )
    q, k = rotate(q, attention["q_norm"]["scale"]), rotate(k, attention["k_norm"]["scale"])
    x = x + matmul(attend(q, k, v).reshape(batch, seq, -1), attention["out"]["kernel"])
    gate_up = jnp.tensordot(norm(x, p["mlp_norm"]["scale"]), mlp["gate_up"]["kernel"], 1, precision=precision)
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    return x + matmul(jax.nn.silu(gate) * up, mlp["down"]["kernel"])


def by_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention in float32, one head after another: the scores of all would not fit in memory.

    Nor would they be kept for the gradient, which computes them again.
    """
    seq = q.shape[1]
    causal = jnp.tril(jnp.ones((seq, seq), bool))

    @jax.checkpoint
    def one(head: jax.Array) -> jax.Array:
        group = head // (CONFIG.num_heads // CONFIG.num_kv_heads)
        scores = (
            jnp.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, group], precision="highest") * CONFIG.head_dim**-0.5
        )
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bqk,bkd->bqd", weights, v[:, :, group], precision="highest")

    return jnp.moveaxis(jax.lax.map(one, jnp.arange(CONFIG.num_heads)), 0, 2)


reference = decoders.one_by_one(functools.partial(plain, attend=by_head, precision="highest"))


def in_torch(*, cudnn: bool) -> Callable[..., Any]:
    """The layer of torch.nn.functional, with the attention that torch chooses or cuDNN's."""
    import torch
    from torch.nn import functional

    def layer(x: Any, *arrays: Any) -> Any:
        *leaves, cos, sin = arrays
        p = TREE.unflatten(leaves)

        def norm(x: Any, scale: Any) -> Any:
            return functional.rms_norm(x, x.shape[-1:], scale, CONFIG.epsilon)

        def rotate(x: Any, scale: Any) -> Any:
            y = norm(x, scale)
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        qkv = norm(x, p["attention_norm"]["scale"]) @ p["attention"]["qkv"]["kernel"]
        q, k, v = (
            qkv.unflatten(-1, (-1, CONFIG.head_dim))
            .transpose(1, 2)
            .split((CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads), 1)
        )
        q = rotate(q, p["attention"]["q_norm"]["scale"])
        k = rotate(k, p["attention"]["k_norm"]["scale"])
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2) @ p["attention"]["out"]["kernel"]
        both = norm(x, p["mlp_norm"]["scale"]) @ p["mlp"]["gate_up"]["kernel"].flatten(1)
        gate, up = both.chunk(2, -1)
        return x + (functional.silu(gate) * up) @ p["mlp"]["down"]["kernel"]

    return decoders.in_torch(layer, cudnn=cudnn)


def for_torch(x: Any, *leaves: Any) -> tuple[Any, ...]:
    """The inputs of torch: norms in the dtype of the matrices, and cos and sin as Hugging Face makes them once."""
    import torch

    table = rotary_table(jnp.arange(x.shape[1]), CONFIG.head_dim, theta=CONFIG.rope_theta)
    cos, sin = (torch.from_dlpack(t).to(x.device).repeat(1, 2).to(x.dtype) for t in table)
    return x, *(leaf.to(x.dtype) for leaf in leaves), cos, sin


def workload(dtype: str, shape: Shape) -> Workload:
    """A layer on x (batch, seq, 4096)."""
    batch, seq = map(int, shape)
    rows, parameters = batch * seq, sum(p.size for p in jax.tree.leaves(param_shapes()) if p.ndim > 1)
    half = "" if dtype != "fp32" else decoders.HALF_ONLY
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    def ours() -> Callable[..., jax.Array]:
        return lambda x, *leaves: qwen3.layer(TREE.unflatten(leaves), x, config=CONFIG)

    products, scores = 2.0 * rows * parameters, 2.0 * rows * seq * CONFIG.num_heads * CONFIG.head_dim
    return Workload(
        inputs=lambda seed: random_inputs(seed, dtype, batch, seq),
        reference=reference,
        contenders=[
            Contender("pallas", "ours", ours, gpu=True),
            Contender("xla-cudnn", "xla", lambda: functools.partial(plain, attend=cudnn), gpu=True, skip=half),
            Contender(
                "torch",
                "torch",
                functools.partial(in_torch, cudnn=False),
                prepare=for_torch,
                ways=("eager", "compile"),
                launches=5,
            ),
            Contender(
                "torch-cudnn",
                "torch",
                functools.partial(in_torch, cudnn=True),
                prepare=for_torch,
                ways=("eager", "compile"),
                launches=5,
                gpu=True,
                skip=half,
            ),
        ],
        # Attention computes the scores of a triangle.
        flop=products + scores,
        gradient=Gradient(flop=2.0 * products + 2.5 * scores),
        bytes=float((2 * rows * CONFIG.hidden_size + parameters) * itemsize(dtype)),
        limit=decoders.LIMITS[dtype],
        sets=2,  # the parameters alone exceed the L2 cache
    )


BENCHMARK = Benchmark(
    name="qwen3",
    axes=("batch", "seq"),
    shapes=((1, 1024), (1, 2048), (1, 4096), (1, 8192), (8, 1024), (8, 2048), (8, 4096), (8, 8192)),
    quick_shapes=((1, 1024), (8, 2048)),
    cpu_shapes=((1, 16),),
    dtypes=("bf16",),
    workload=workload,
    compile_budget=40.0,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run
