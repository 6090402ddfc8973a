"""Softmax of rows: ours and its ladder of algorithms against XLA, torch and JAX's own Pallas kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring import tunable
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.kernels.forms.softmax import ALGORITHMS
from pallas_models.tuning import HEURISTIC

HELP = "softmax of rows: ours and its ladder of algorithms, XLA, torch, jax.experimental.pallas.ops"
SHOWN = "8192x4096 bf16"  # the case in README.md


def in_torch() -> Callable[..., Any]:
    """torch.softmax."""
    import torch

    return lambda x: torch.softmax(x, -1)


def jax_pallas() -> Callable[..., Any]:
    """JAX's own kernel."""
    from jax.experimental.pallas.ops.gpu.softmax import softmax

    return softmax


def workload(dtype: str, shape: Shape) -> Workload:
    """Softmax over the last axis of (rows, columns)."""
    rows, columns = map(int, shape[:2])
    ours = ops.softmax
    ladder = [
        Contender(name, "ladder", functools.partial(functools.partial, ours, algorithm=name), gpu=True)
        for name in ALGORITHMS
    ]
    too_long = "it holds a row in the registers of 4 warps" if columns > 32768 else ""
    return Workload(
        inputs=lambda seed: normal(seed, dtype, (rows, columns)),
        reference=jax.jit(lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1)),
        contenders=[
            Contender("pallas", "ours", lambda: ours, gpu=True),
            *ladder,
            Contender("heuristic", "ladder", lambda: functools.partial(ours, config=HEURISTIC), gpu=True),
            Contender("xla", "xla", lambda: jax.nn.softmax),
            Contender("torch", "torch", in_torch),
            Contender("jax-pallas", "peer", jax_pallas, gpu=True, skip=too_long, differentiable=False),
        ],
        flop=5.0 * rows * columns,  # maximum, difference, exponential, sum, division
        bytes=2.0 * rows * columns * itemsize(dtype),
        gradient=Gradient(bytes=3.0 * rows * columns * itemsize(dtype)),  # the result and two cotangents
    )


ROWS = ((8192, 4096), (32768, 1024), (65536, 4096), (8192, 768), (8192, 384), (2048, 65536))
BENCHMARK = Benchmark(
    name="softmax",
    axes=("rows", "columns"),
    shapes=ROWS,
    cpu_shapes=((64, 768), (32, 4096)),
    dtypes=("bf16",),
    modes=("forward", "both"),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, m: int, n: int) -> Call:
    """A softmax of rows, to tune its blocks."""
    return ops.softmax, tunable.operands(dtype, (m, n)), {}


TUNABLES = {"softmax": Tunable(axes="MxN", shapes=ROWS, call=tuned)}
