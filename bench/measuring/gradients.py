"""What `--mode` makes of a workload: its backward pass alone, or forward and backward of one call.

Floating-point inputs and parameters have gradients, for a random cotangent of the result. A backward pass is timed
on the residuals of its forward pass, which were computed before. In torch autograd holds that, and no
CUDA graph is made of it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bench.measuring.contenders import LIMITS, RELATIVE, Contender, Workload

Mode = Literal["forward", "backward", "both"]
MODES: tuple[Mode, ...] = ("forward", "backward", "both")


def of(workload: Workload, dtype: str, mode: Mode) -> Workload:
    """The workload in a mode.

    Raises:
      NotImplementedError: it has no gradient.
    """
    if mode == "forward":
        return workload
    gradient = workload.gradient
    if gradient is None:
        raise NotImplementedError("its gradient is not measured; `python -m bench train` has whole training steps")
    both, exact = mode == "both", gradient.exact or workload.reference
    limit = gradient.limit or 2 * (workload.limit or LIMITS[dtype])  # twice as many operations

    def inputs(seed: int) -> tuple[Any, ...]:
        given = workload.inputs(seed)
        shape = jax.tree.leaves(jax.eval_shape(exact, *given))[0].shape
        kind = next(x.dtype for x in jax.tree.leaves(given) if is_floating(x))
        return jax.random.normal(jax.random.key(seed + 2**16), shape).astype(kind), *given

    def reference(*given: Any) -> tuple[jax.Array, ...]:
        in_float32 = [x.astype(jnp.float32) if is_floating(x) else x for x in given]
        return forward_and_backward(exact, 0, gradient.inputs)(*in_float32)[0 if both else 1 :]

    def total(forward: float | None, backward: float | None) -> float | None:
        if not both:
            return backward
        return None if forward is None or backward is None else forward + backward

    given = jax.eval_shape(lambda: workload.inputs(0))
    return dataclasses.replace(
        workload,
        inputs=inputs,
        reference=jax.jit(reference),
        contenders=[
            _contender(c, given, gradient.inputs, both=both) for c in workload.contenders if c.differentiable
        ],
        flop=total(workload.flop, gradient.flop),
        bytes=total(workload.bytes, gradient.bytes),
        measure=RELATIVE,
        limit=limit,
    )


def is_floating(x: Any) -> bool:
    """Whether an array, or a tensor of torch, holds floating-point numbers."""
    return x.is_floating_point() if hasattr(x, "is_floating_point") else jnp.issubdtype(x.dtype, jnp.floating)


def _contender(contender: Contender, inputs: tuple[Any, ...], count: int | None, *, both: bool) -> Contender:
    """A contender with gradients by the first `count` inputs; `inputs` are the workload's, without values."""
    if contender.in_torch:
        prepare = None if contender.prepare is None else _after_cotangent(contender.prepare)
        ways = [way for way in contender.ways if both or "graph" not in way]
        around = functools.partial(
            _torch_both if both else _torch_backward, count=len(inputs) if count is None else count
        )
        return dataclasses.replace(contender, around=around, prepare=prepare, ways=ways)
    # Inputs may be prepared, such as weights put side by side: gradients are compared as far as they are the same.
    prepared = jax.eval_shape(contender.prepared, inputs)
    pairs = zip(inputs[:count], prepared, strict=False)
    same = itertools.takewhile(lambda pair: pair[0].shape == pair[1].shape, pairs)
    compared = sum(is_floating(a) for a, _ in same)
    if not compared:
        return dataclasses.replace(contender, skip="its gradients are of other inputs")
    if both:

        def load() -> Callable[..., Any]:
            return forward_and_backward(contender.load(), len(contender.params), count)

        prepare = None if contender.prepare is None else _after_cotangent(contender.prepare)
        return dataclasses.replace(contender, load=load, prepare=prepare, compared=1 + compared)
    backward = _Backward(contender, count)
    return dataclasses.replace(
        contender, load=lambda: backward.pull, prepare=backward.prepare, params=(), compared=compared
    )


def _after_cotangent(prepare: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    return lambda cotangent, *inputs: (cotangent, *prepare(*inputs))


def _vjp(
    function: Callable[..., Any], params: Sequence[Any], inputs: Sequence[Any], count: int | None
) -> tuple[jax.Array, Any]:
    """The first result, and what gives the cotangents of the first `count` inputs and of params from its own."""
    leaves, tree = jax.tree.flatten((tuple(inputs[:count]), tuple(params)))
    moving = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

    def of_moving(*some: jax.Array) -> jax.Array:
        every = list(leaves)
        for i, x in zip(moving, some, strict=True):
            every[i] = x
        first, params = jax.tree.unflatten(tree, every)
        return jax.tree.leaves(function(*params, *first, *inputs[len(first) :]))[0]

    return jax.vjp(of_moving, *(leaves[i] for i in moving))


def forward_and_backward(
    function: Callable[..., Any], num_params: int, count: int | None
) -> Callable[..., tuple[jax.Array, ...]]:
    """Of parameters, a cotangent and inputs: the result and its gradients, by inputs and then by parameters."""

    def both(*arrays: Any) -> tuple[jax.Array, ...]:
        params, cotangent, inputs = arrays[:num_params], arrays[num_params], arrays[num_params + 1 :]
        out, pull = _vjp(function, params, inputs, count)
        return out, *pull(cotangent.astype(out.dtype))

    return both


class _Backward:
    """The backward pass of a JAX contender; the residuals of the forward pass are its input."""

    def __init__(self, contender: Contender, count: int | None):
        self.contender, self.count = contender, count
        self.tree: Any = None

    @functools.cached_property
    def forward(self) -> Callable[..., tuple[Any, ...]]:
        """The cotangent, and what a forward pass of parameters and inputs keeps."""
        function = self.contender.load()

        def kept(params: Sequence[Any], cotangent: jax.Array, inputs: Sequence[Any]) -> tuple[jax.Array, ...]:
            out, pull = _vjp(function, params, inputs, self.count)
            leaves, self.tree = jax.tree.flatten(pull)
            return cotangent.astype(out.dtype), *leaves

        return jax.jit(kept)

    def prepare(self, cotangent: Any, *inputs: Any) -> tuple[Any, ...]:
        """What `pull` takes."""
        return self.forward(self.contender.params, cotangent, self.contender.prepared(inputs))

    def pull(self, cotangent: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
        """The gradients."""
        return tuple(jax.tree.unflatten(self.tree, kept)(cotangent))


def _leaves(inputs: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """The inputs of a torch function as new leaves, and the leaves among the first `count` that have gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs[:count] if is_floating(x)]
    rest = iter(leaves)
    return [next(rest) if i < count and is_floating(x) else x for i, x in enumerate(inputs)], leaves


def _torch_both(function: Callable[..., Any], *, count: int) -> Callable[..., Any]:
    def both(cotangent: Any, *inputs: Any) -> tuple[Any, ...]:
        import torch

        given, leaves = _leaves(inputs, count)
        out = function(*given)
        return out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))

    return both


def _torch_backward(function: Callable[..., Any], *, count: int) -> Callable[..., Any]:
    held: dict[int, Any] = {}

    def backward(cotangent: Any, *inputs: Any) -> tuple[Any, ...]:
        import torch

        if id(cotangent) not in held:  # it lives as long as this contender's inputs do
            given, leaves = _leaves(inputs, count)
            out = function(*given)
            held[id(cotangent)] = out, leaves, cotangent.to(out.dtype)
        out, leaves, seed = held[id(cotangent)]
        return tuple(torch.autograd.grad(out, leaves, seed, retain_graph=True))

    return backward
