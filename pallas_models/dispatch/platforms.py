"""Where kernels for GPUs may be lowered: the platform of a lowering decides, not the devices of this process."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def by_platform(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `kernel` where it is lowered for CUDA, and `reference` elsewhere."""
    return functools.partial(_by_platform, kernel, reference)


def on_cuda(kernel: Callable[..., Any], implementation: tuple[str, ...]) -> Callable[..., Any]:
    """`kernel`, whose lowering for a platform other than CUDA raises NotImplementedError."""
    return functools.partial(_on_cuda, kernel, implementation)


def _by_platform(kernel: Callable[..., Any], reference: Callable[..., Any], *operands: Any) -> Any:
    return jax.lax.platform_dependent(*operands, cuda=kernel, default=reference)


def _on_cuda(kernel: Callable[..., Any], implementation: tuple[str, ...], *operands: Any) -> Any:
    (first, *others), tree = jax.tree.flatten(operands)
    first = _cuda_only.bind(first, implementation=implementation)
    return kernel(*jax.tree.unflatten(tree, [first, *others]))


def _refuse(context: mlir.LoweringRuleContext, *_: Any, implementation: tuple[str, ...]) -> Any:
    platforms = " and ".join(context.platforms or context.module_context.platforms)
    named = repr(implementation[0] if len(implementation) == 1 else implementation)
    raise NotImplementedError(
        f"implementation={named} runs on NVIDIA GPUs, not on the platform {platforms}, which this program is "
        "lowered for; expected None or 'xla' there, or 'interpret', which runs kernels in an interpreter, slowly"
    )


# The identity, of an operand of a kernel; only the lowering for CUDA has it.
_cuda_only = Primitive("cuda_only")
_cuda_only.def_impl(lambda x, **_: x)
_cuda_only.def_abstract_eval(lambda x, **_: x)
batching.primitive_batchers[_cuda_only] = lambda args, axes, **params: (_cuda_only.bind(*args, **params), axes[0])
mlir.register_lowering(_cuda_only, _refuse)
mlir.register_lowering(_cuda_only, lambda _, x, **__: [x], platform="cuda")
