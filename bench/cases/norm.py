"""Layer norm and, with +rms, RMS norm of rows: ours against XLA, torch and the kernels of JAX and tokamax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.cases.softmax import ROWS
from bench.measuring import tunable
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.tuning import HEURISTIC

HELP = "layer norm and RMS norm of rows: ours, XLA, torch, jax.experimental.pallas.ops, tokamax"
SHOWN = "8192x4096 bf16"  # the case in README.md

EPSILON = 1e-5


def plain(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Layer norm, or RMS norm without a bias, as a user of jax.numpy writes it; computed in float32."""
    y = x.astype(jnp.float32)
    if bias is not None:
        y -= y.mean(-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + EPSILON)
    y = y * scale if bias is None else y * scale + bias
    return y.astype(x.dtype)


def in_torch(columns: int, *, rms: bool) -> Callable[..., Any]:
    """torch.nn.functional's."""
    from torch.nn import functional

    function = functional.rms_norm if rms else functional.layer_norm
    return lambda x, *parameters: function(x, (columns,), *parameters, eps=EPSILON)


def jax_pallas(*, rms: bool) -> Callable[..., Any]:
    """JAX's own kernel, which takes (batch, rows, columns) and always a bias."""
    if rms:
        from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm

        return lambda x, scale: rms_norm(x[None], scale, jnp.zeros_like(scale), eps=EPSILON)[0]
    from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm

    return lambda x, scale, bias: layer_norm(x[None], scale, bias, eps=EPSILON)[0]


def tokamax(*, rms: bool) -> Callable[..., Any]:
    """tokamax's, in its default configuration."""
    from tokamax import layer_norm  # type: ignore[import-not-found]

    return lambda x, scale, bias=None: layer_norm(x, scale, bias, epsilon=EPSILON, subtract_mean=not rms)


def workload(dtype: str, shape: Shape) -> Workload:
    """The norm over the last axis of (rows, columns)."""
    rows, columns = map(int, shape[:2])
    rms = "rms" in shape
    vectors = 1 if rms else 2
    ours = functools.partial(ops.rms_norm if rms else ops.layer_norm, epsilon=EPSILON)
    return Workload(
        inputs=lambda seed: normal(seed, dtype, (rows, columns), *[(columns,)] * vectors),
        reference=jax.jit(lambda *inputs: plain(*(x.astype(jnp.float32) for x in inputs))),
        contenders=[
            Contender("pallas", "ours", lambda: ours, gpu=True),
            Contender("heuristic", "ladder", lambda: functools.partial(ours, config=HEURISTIC), gpu=True),
            Contender("xla", "xla", lambda: plain),
            Contender("torch", "torch", functools.partial(in_torch, columns, rms=rms)),
            Contender(
                "jax-pallas", "peer", functools.partial(jax_pallas, rms=rms), gpu=True, differentiable=False
            ),
            Contender("tokamax", "peer", functools.partial(tokamax, rms=rms), gpu=True, differentiable=False),
        ],
        flop=(4.0 if rms else 7.0) * rows * columns,  # sums 2 or 3, difference 0 or 1, products and sums after it
        bytes=float((2 * rows * columns + vectors * columns) * itemsize(dtype)),
        gradient=Gradient(bytes=float((3 * rows * columns + 2 * vectors * columns) * itemsize(dtype))),
    )


BENCHMARK = Benchmark(
    name="norm",
    axes=("rows", "columns"),
    flags=("rms",),
    shapes=(*ROWS, *((*rows, "rms") for rows in ROWS)),
    quick_shapes=(ROWS[0], (*ROWS[0], "rms")),
    cpu_shapes=((64, 768), (64, 768, "rms")),
    dtypes=("bf16",),
    modes=("forward", "both"),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, m: int, n: int, *, rms: bool) -> Call:
    """A norm of rows, to tune its blocks."""
    vectors = [(n,)] * (1 if rms else 2)
    return ops.rms_norm if rms else ops.layer_norm, tunable.operands(dtype, (m, n), *vectors), {}


TUNABLES = {
    name: Tunable(axes="MxN", shapes=ROWS, call=functools.partial(tuned, rms=name == "rms_norm"))
    for name in ("layer_norm", "rms_norm")
}
