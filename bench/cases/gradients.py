"""Forward and backward of what a benchmark computes: the flag +grad of a shape."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring.harness import Contender, Workload, itemsize, normal


def in_jax(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """The result and its gradients, of a cotangent and the inputs."""

    def both(cotangent: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(function, *inputs)
        return out, *pull(cotangent)

    return both


def in_torch(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The same in torch, by autograd."""

    def both(cotangent: Any, *inputs: Any) -> tuple[Any, ...]:
        import torch

        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    return both


def of(workload: Workload, dtype: str, shape: tuple[int, ...], passes: int) -> Workload:
    """The workload forward and backward, for results of that shape, in `passes` over an array of it at the least.

    Other libraries' kernels are left out: few of them have a gradient.
    """

    def load(contender: Contender) -> Callable[..., Any]:
        return (in_torch if contender.in_torch else in_jax)(contender.load())

    def reference(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return in_jax(workload.reference)(*(x.astype(jnp.float32) for x in inputs))

    def inputs(seed: int) -> tuple[jax.Array, ...]:
        return *normal(seed + 2**16, dtype, shape), *workload.inputs(seed)

    return dataclasses.replace(
        workload,
        inputs=inputs,
        reference=jax.jit(reference),
        contenders=[
            dataclasses.replace(contender, load=functools.partial(load, contender))
            for contender in workload.contenders
            if contender.family != "peer"
        ],
        flop=None,
        bytes=float(passes * math.prod(shape) * itemsize(dtype)),
    )
