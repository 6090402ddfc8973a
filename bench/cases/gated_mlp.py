"""Gated products, silu(x Wg) * (x Wu), and with +down the whole MLP: ours against XLA, torch and tokamax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring import tunable
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.tuning import HEURISTIC

HELP = "gated products (SwiGLU) and gated MLPs: ours, XLA, torch, tokamax"
SHOWN = "8192x4096x12288 bf16"  # the case in README.md


def plain(
    x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array | None = None, *, precision: Any = None
) -> jax.Array:
    """As a user of jax.numpy writes it."""
    matmul = functools.partial(jnp.matmul, precision=precision)
    y = jax.nn.silu(matmul(x, gate)) * matmul(x, up)
    return y if down is None else matmul(y, down)


def stacked_plain(
    x: jax.Array, gate_up: jax.Array, down: jax.Array | None = None, *, precision: Any = None
) -> jax.Array:
    """The same with gate and up as one product."""
    gate, up = jnp.split(jnp.matmul(x, gate_up.reshape(len(gate_up), -1), precision=precision), 2, axis=-1)
    y = jax.nn.silu(gate) * up
    return y if down is None else jnp.matmul(y, down, precision=precision)


def in_torch() -> Callable[..., Any]:
    """As models in torch have it."""
    import torch
    from torch.nn import functional

    def mlp(x: Any, gate: Any, up: Any, down: Any = None) -> Any:
        y = functional.silu(torch.matmul(x, gate)) * torch.matmul(x, up)
        return y if down is None else torch.matmul(y, down)

    return mlp


def ours(*, down: bool, **options: Any) -> Callable[..., jax.Array]:
    """The product, or the whole MLP."""
    return functools.partial(ops.gated_mlp if down else ops.gated_matmul, **options)


def tokamax() -> Callable[..., Any]:
    """tokamax's product, in its default configuration, and XLA's for what follows."""
    from tokamax import gated_linear_unit  # type: ignore[import-not-found]

    def mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array | None = None) -> jax.Array:
        y = gated_linear_unit(x, gate_up, activation=jax.nn.silu)
        return y if down is None else y @ down

    return mlp


def stack(x: jax.Array, gate: jax.Array, up: jax.Array, *down: jax.Array) -> tuple[jax.Array, ...]:
    """An input set with gate and up in one array."""
    return x, ops.stack_gate_up(gate, up), *down


def workload(dtype: str, shape: Shape) -> Workload:
    """x (M, K), gate and up (K, N), and with the flag down a projection (N, K)."""
    m, k, n = map(int, shape[:3])
    down = "down" in shape
    operands = [(m, k), (k, n), (k, n), *([(n, k)] if down else [])]
    exact = functools.partial(plain, precision=jax.lax.Precision.HIGHEST)
    precision = jax.lax.Precision.HIGHEST if dtype == "fp32" else None

    def inputs(seed: int) -> tuple[jax.Array, ...]:
        x, *weights = normal(seed, dtype, *operands)
        return x, *((w * len(w) ** -0.5).astype(w.dtype) for w in weights)  # gates of order one

    def in_float32(*arrays: jax.Array) -> jax.Array:
        return exact(*(a.astype(jnp.float32) for a in arrays))

    one_product = functools.partial(functools.partial, stacked_plain, precision=precision)
    triton = functools.partial(ours, down=down, implementation="triton")
    contenders = [
        Contender("pallas", "ours", functools.partial(ours, down=down), prepare=stack, gpu=True),
        Contender("triton", "ladder", triton, prepare=stack, gpu=True),
        Contender("xla", "xla", lambda: functools.partial(plain, precision=precision)),
        Contender("xla-stacked", "xla", one_product, prepare=stack),
        Contender("torch", "torch", in_torch),
        Contender("tokamax", "peer", tokamax, prepare=stack, gpu=True),
    ]
    if not down:
        untuned = functools.partial(triton, config=HEURISTIC)
        contenders.insert(2, Contender("heuristic", "ladder", untuned, prepare=stack, gpu=True))
    return Workload(
        inputs=inputs,
        reference=jax.jit(in_float32),
        contenders=contenders,
        flop=(6.0 if down else 4.0) * m * n * k,
        gradient=Gradient(flop=(12.0 if down else 8.0) * m * n * k),
        bytes=float((sum(a * b for a, b in operands) + m * (k if down else n)) * itemsize(dtype)),
    )


SHAPES = ((8192, 4096, 12288), (2048, 4096, 12288), (8192, 1024, 3072))
BENCHMARK = Benchmark(
    name="gated-mlp",
    axes=("m", "k", "n"),
    flags=("down",),
    shapes=(*SHAPES, *((*shape, "down") for shape in SHAPES)),
    quick_shapes=(SHAPES[2], (*SHAPES[2], "down")),
    cpu_shapes=((64, 32, 48), (64, 32, 48, "down")),
    dtypes=("bf16",),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, m: int, n: int, k: int) -> Call:
    """A gated product, to tune its tiles."""
    return ops.gated_matmul, tunable.operands(dtype, (m, k), (k, 2, n)), {}


TUNABLES = {
    "gated_matmul": Tunable(
        axes="MxNxK", shapes=((8192, 12288, 4096), (2048, 12288, 4096), (8192, 3072, 1024)), call=tuned
    ),
}
