"""Which implementation of an op runs, and how it is differentiated: decided here for every op."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax

Result = TypeVar("Result")  # an array, or a tuple of them
Implementation = Literal["triton", "xla", "interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("triton", "xla", "interpret")
_MAX_SIZE = 2**31 - 1  # Triton's offsets are signed 32-bit integers


@functools.cache
def _local_cuda_predates_ampere() -> bool:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no CUDA backend here: what is lowered for CUDA will run elsewhere
        return False
    return any(float(d.compute_capability) < 8.0 for d in devices)


def run(
    implementation: Implementation | None,
    kernel: Callable[..., Result],
    reference: Callable[..., Result],
    *args: Any,
) -> Result:
    """Runs an op's kernel or its reference on `args` (arrays, or None for an absent operand).

    Args:
      implementation: `"triton"` runs the kernel compiled, `"interpret"` runs the same kernel body in
        Pallas's interpreter, `"xla"` runs the reference. `None` is decided per lowering: the kernel on
        CUDA devices from Ampere on, the reference on every other platform.
      kernel: called as `kernel(*args, interpret=bool)`.
      reference: called as `reference(*args)`; also defines the gradient of the kernel.

    Raises:
      ValueError: `implementation` is not one of the above.
      NotImplementedError: the kernel is asked for by name and an array has 2**31 elements or more.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} is unknown; expected None or one of {IMPLEMENTATIONS}")
    if implementation == "xla":
        return reference(*args)
    sizes = [leaf.size for leaf in jax.tree.leaves((args, jax.eval_shape(reference, *args)))]
    if min(sizes) == 0:  # there is no grid for a kernel over nothing
        return reference(*args)
    if max(sizes) > _MAX_SIZE:
        if implementation is None:
            return reference(*args)
        raise NotImplementedError(
            f"an array of {max(sizes)} elements is too large for the kernels, which index up to {_MAX_SIZE}; "
            "use smaller batches or implementation='xla'"
        )
    compiled = functools.partial(kernel, interpret=False)

    @jax.custom_vjp
    def op(*args: Any) -> Result:
        if implementation == "triton":
            return compiled(*args)
        if implementation == "interpret":
            return kernel(*args, interpret=True)
        if _local_cuda_predates_ampere():
            return reference(*args)
        return jax.lax.platform_dependent(*args, cuda=compiled, default=reference)

    def forward(*args: Any) -> tuple[Result, tuple[Any, ...]]:
        return op(*args), args

    def backward(args: tuple[Any, ...], cotangent: Result) -> tuple[Any, ...]:
        return jax.vjp(reference, *args)[1](cotangent)

    op.defvjp(forward, backward)
    return op(*args)
