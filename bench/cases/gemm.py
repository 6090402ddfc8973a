"""Products of row-major matrices: ours and its ladder of algorithms against cuBLAS by way of XLA and torch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring import tunable
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.kernels.forms.matmul import ALGORITHMS
from pallas_models.tuning import HEURISTIC

HELP = "matrix products: ours and its ladder of algorithms, XLA, torch"
SHOWN = "8192x8192x8192 bf16"  # the case in README.md

CUBES = ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048))  # the ladder's sizes


def in_torch() -> Callable[..., Any]:
    """torch's product, which is cuBLAS's."""
    import torch

    return torch.matmul


def workload(dtype: str, shape: Shape) -> Workload:
    """The product of (M, K) and (K, N)."""
    m, n, k = map(int, shape)
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    plain = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST if dtype == "fp32" else None)
    triton = functools.partial(ops.matmul, implementation="triton")
    ladder = [
        Contender(name, "ladder", functools.partial(functools.partial, triton, algorithm=name), gpu=True)
        for name in ALGORITHMS
        if shape in CUBES
    ]
    return Workload(
        inputs=lambda seed: normal(seed, dtype, (m, k), (k, n)),
        reference=jax.jit(lambda x, w: exact(x.astype(jnp.float32), w.astype(jnp.float32))),
        contenders=[
            Contender("pallas", "ours", lambda: ops.matmul, gpu=True),
            Contender("triton", "ladder", lambda: triton, gpu=True),
            *ladder,
            Contender("heuristic", "ladder", lambda: functools.partial(triton, config=HEURISTIC), gpu=True),
            Contender("xla", "xla", lambda: plain),
            Contender("torch", "torch", in_torch, ways=("eager", "graph")),  # compiled, it calls cuBLAS too
        ],
        flop=2.0 * m * n * k,
        bytes=float((m * k + k * n + m * n) * itemsize(dtype)),
        gradient=Gradient(flop=4.0 * m * n * k, bytes=float((2 * (m * k + k * n) + m * n) * itemsize(dtype))),
    )


BENCHMARK = Benchmark(
    name="gemm",
    axes=("m", "n", "k"),
    shapes=(
        *CUBES,
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 24576, 4096),
        (8192, 1152, 384),
        (8192, 1536, 384),
        (8192, 384, 1536),
        (1024, 2304, 768),
        (1024, 3072, 768),
        (1024, 768, 3072),
    ),
    quick_shapes=((1024, 1024, 1024), (8192, 1152, 384)),
    cpu_shapes=((128, 128, 128), (256, 192, 64)),
    dtypes=("bf16",),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, m: int, n: int, k: int) -> Call:
    """A product, to tune its tiles."""
    return ops.matmul, tunable.operands(dtype, (m, k), (k, n)), {}


TUNABLES = {
    "matmul": Tunable(
        axes="MxNxK",
        shapes=(
            *((8192, 8192, 8192), (4096, 4096, 4096), (8192, 24576, 4096)),
            *((8192, 1152, 384), (8192, 1536, 384), (8192, 384, 1536)),
            *((1024, 2304, 768), (1024, 3072, 768), (1024, 768, 3072)),
        ),
        call=tuned,
    ),
}
