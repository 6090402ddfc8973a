"""Attention, forward: ours against XLA, cuDNN by way of JAX, torch, and the kernels of JAX and tokamax."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import tunable
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.tuning import HEURISTIC

HELP = "attention: ours, XLA, cuDNN, torch, jax.experimental.pallas.ops, tokamax"
SHOWN = "4x2048x16x16x128+causal bf16"  # the case in README.md

HALF_ONLY = "it takes fp16 and bf16"
LOCAL = 64  # tokens on either side of a token that it sees where attention is local, as ModernBERT's is


def exact(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """In float32 throughout."""
    with jax.default_matmul_precision("highest"):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, **options)


def plain(implementation: Literal["xla", "cudnn"], *, dtype: str, **options: Any) -> Callable[..., Any]:
    """JAX's own, as XLA compiles it or as a call of cuDNN."""
    attend = functools.partial(jax.nn.dot_product_attention, **options, implementation=implementation)

    def f(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        with jax.default_matmul_precision("highest" if dtype == "fp32" else "default"):
            return attend(q, k, v)

    return f


def in_torch(backend: str | None, *, causal: bool, local: bool) -> Callable[..., Any]:
    """torch's scaled_dot_product_attention, by the backend of that name or, if None, by the one that it chooses.

    Raises:
      NotImplementedError: the backend needs a CUDA GPU and there is none.
    """
    import torch
    from torch.nn import attention, functional

    @functools.cache
    def near(seq: int, device: Any) -> Any:
        index = torch.arange(seq, device=device)
        return (index[:, None] - index).abs() <= LOCAL

    def attend(q: Any, k: Any, v: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        options = dict(is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        mask = near(q.shape[1], q.device) if local else None
        return functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, **options).transpose(1, 2)

    if backend is None:
        return attend
    if not torch.cuda.is_available():
        raise NotImplementedError("it needs a CUDA GPU")

    def by_backend(*arrays: Any) -> Any:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            return attend(*arrays)

    return by_backend


def jax_pallas(*, causal: bool, head_dim: int, tuned: bool) -> Callable[..., Any]:
    """JAX's own kernel, with its default tiles or with those that were the fastest of 30 on an H200."""
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    attend = functools.partial(mha, segment_ids=None, sm_scale=head_dim**-0.5, causal=causal)
    if tuned:
        block_q, num_stages = (128, 2) if head_dim == 128 and not causal else (64, 3)
        tiles = BlockSizes(block_q=block_q, block_k=64)
        attend = functools.partial(attend, block_sizes=tiles, num_warps=4, num_stages=num_stages)
    return attend


def tokamax(*, causal: bool) -> Callable[..., Any]:
    """tokamax's, in its default configuration."""
    from tokamax import dot_product_attention  # type: ignore[import-not-found]

    return lambda q, k, v: dot_product_attention(q, k, v, is_causal=causal)


def workload(dtype: str, shape: Shape) -> Workload:
    """Attention of q (batch, seq, heads, head_dim) over kv_heads heads of keys and values of the same length."""
    batch, seq, heads, kv_heads, head_dim = map(int, shape[:5])
    causal, local = "causal" in shape, "local" in shape
    if causal and local:
        raise ValueError("attention that is local is not causal")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} heads of keys and values")
    half = "" if dtype in ("fp16", "bf16") else HALF_ONLY
    window = LOCAL + 1 if local else None
    ours = functools.partial(ops.attention, causal=causal, window=window)
    of_jax = dict(is_causal=causal, local_window_size=LOCAL if local else None)
    triton = functools.partial(ours, implementation="triton")
    heads_of = dict(num_heads=heads, num_kv_heads=kv_heads)
    fused = functools.partial(ops.attention_qkv, **heads_of, causal=causal, window=window)

    def join(*qkv: jax.Array) -> tuple[jax.Array]:
        return (jnp.concatenate([x.reshape(batch, seq, -1) for x in qkv], axis=-1),)

    # Keys that a query sees, on average.
    sees = sum(min(i, LOCAL) + 1 + min(seq - 1 - i, LOCAL) for i in range(seq)) / seq if local else seq
    sees = (seq + 1) / 2 if causal else sees
    one_sided = half or ("its windows are to one side" if local else "")
    without = "it has no such windows" if local else ""
    q_shape, kv_shape = (batch, seq, heads, head_dim), (batch, seq, kv_heads, head_dim)
    return Workload(
        inputs=lambda seed: normal(seed, dtype, q_shape, kv_shape, kv_shape),
        reference=jax.jit(functools.partial(exact, **of_jax)),
        contenders=[
            Contender("pallas", "ours", lambda: ours, gpu=True),
            Contender(
                "pallas-qkv",
                "ladder",
                lambda: lambda qkv: fused(qkv).reshape(q_shape),
                prepare=join,
                gpu=True,
            ),
            Contender("triton", "ladder", lambda: triton, gpu=True),
            Contender("heuristic", "ladder", lambda: functools.partial(triton, config=HEURISTIC), gpu=True),
            Contender("xla", "xla", functools.partial(plain, "xla", dtype=dtype, **of_jax)),
            Contender(
                "xla-cudnn",
                "xla",
                functools.partial(plain, "cudnn", dtype=dtype, **of_jax),
                gpu=True,
                skip=one_sided,
            ),
            Contender("torch", "torch", functools.partial(in_torch, None, causal=causal, local=local)),
            *(
                Contender(
                    f"torch-{name}",
                    "torch",
                    functools.partial(in_torch, backend, causal=causal, local=local),
                    ways=("eager", "graph"),  # compiled, it calls the same kernel
                    skip=half or (without if name == "flash" else ""),
                )
                for name, backend in (("flash", "FLASH_ATTENTION"), ("cudnn", "CUDNN_ATTENTION"))
            ),
            *(
                Contender(
                    name,
                    "peer",
                    functools.partial(jax_pallas, causal=causal, head_dim=head_dim, tuned=tuned),
                    gpu=True,
                    skip=without or ("" if heads == kv_heads else "it takes as many heads of keys as of queries"),
                    differentiable=not tuned,  # its gradient has tiles of its own
                )
                for name, tuned in (("jax-pallas", False), ("jax-pallas-tuned", True))
            ),
            Contender("tokamax", "peer", functools.partial(tokamax, causal=causal), gpu=True, skip=without),
        ],
        flop=4.0 * batch * heads * seq * sees * head_dim,
        gradient=Gradient(flop=10.0 * batch * heads * seq * sees * head_dim),  # scores again, and four products
        bytes=2.0 * batch * seq * (heads + kv_heads) * head_dim * itemsize(dtype),
    )


BENCHMARK = Benchmark(
    name="attention",
    axes=("batch", "seq", "heads", "kv_heads", "head_dim"),
    flags=("causal", "local"),
    shapes=(
        (4, 2048, 16, 16, 64),
        (4, 2048, 16, 16, 128),
        (4, 2048, 16, 16, 128, "causal"),
        (1, 8192, 16, 16, 128, "causal"),
        (64, 128, 12, 12, 32),
        (8, 1024, 12, 12, 64, "causal"),
        (8, 2048, 32, 8, 128, "causal"),
        (16, 1024, 12, 12, 64, "local"),
    ),
    quick_shapes=((4, 2048, 16, 16, 64), (4, 2048, 16, 16, 128, "causal"), (64, 128, 12, 12, 32)),
    cpu_shapes=((1, 128, 2, 2, 32), (1, 128, 4, 2, 32, "causal")),
    dtypes=("bf16",),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, b: int, s: int, h: int, g: int, d: int, *, causal: bool) -> Call:
    """Attention of heads in groups, to tune its blocks."""
    return ops.attention, tunable.operands(dtype, (b, s, h, d), (b, s, g, d), (b, s, g, d)), {"causal": causal}


def tuned_padded(dtype: str, b: int, s: int, h: int, d: int) -> Call:
    """Attention of a padded batch of sentences, to tune its blocks."""
    lengths = np.random.default_rng(1).integers(s // 2, s + 1, b)
    mask = jnp.asarray(np.arange(s) < lengths[:, None], jnp.int32)
    return ops.attention_qkv, tunable.operands(dtype, (b, s, 3 * h * d)), {"num_heads": h, "mask": mask}


TUNABLES = {
    "attention": Tunable(
        axes="BxSxHxGxD",
        shapes=((4, 2048, 16, 16, 64), (4, 2048, 16, 16, 128), (64, 128, 12, 12, 32)),
        call=functools.partial(tuned, causal=False),
        nearby=(1, 0.75),
    ),
    "attention_causal": Tunable(
        axes="BxSxHxGxD",
        shapes=(
            *((4, 2048, 16, 16, 128), (1, 8192, 16, 16, 128)),
            *((1, 128, 12, 12, 64), (1, 1024, 12, 12, 64), (8, 1024, 12, 12, 64), (32, 1024, 12, 12, 64)),
            *((1, 4096, 32, 8, 128), (8, 2048, 32, 8, 128)),
        ),
        call=functools.partial(tuned, causal=True),
        nearby=(1, 0.75),
    ),
    "attention_padded": Tunable(
        axes="BxSxHxD",
        shapes=((64, 16, 12, 32), (64, 128, 12, 32), (256, 32, 12, 32), (512, 16, 12, 32), (32, 512, 12, 32)),
        call=tuned_padded,
        dtypes=("fp16",),
        nearby=(0, 0.75),
    ),
}
