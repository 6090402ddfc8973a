"""Which implementation of an op runs, and how it is differentiated: decided here for every op."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax

Result = TypeVar("Result")  # an array, or a tuple of them
Implementation = Literal["mosaic", "triton", "xla", "interpret", "mosaic_interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("mosaic", "triton", "xla", "interpret", "mosaic_interpret")
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # in names of devices
_MAX_SIZE = 2**31 - 1  # Triton's offsets are signed 32-bit integers


@functools.cache
def _local_cuda_capabilities() -> tuple[float, ...]:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no CUDA backend here: what is lowered for CUDA will run elsewhere
        return ()
    return tuple(float(d.compute_capability) for d in devices)


def _for_hopper() -> bool:
    """Whether what is traced here will run on Hopper GPUs: those of this process, unless another one is named."""
    if (device := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return any(name in device.device_kind for name in _HOPPER)
    capabilities = _local_cuda_capabilities()
    return bool(capabilities) and all(9.0 <= capability < 10.0 for capability in capabilities)


def run(
    implementation: Implementation | None,
    kernel: Callable[..., Result],
    reference: Callable[..., Result],
    *args: Any,
    mosaic: Callable[..., Result] | str = "has no kernel for this op",
    prefer_mosaic: bool = True,
) -> Result:
    """Runs an op's kernel or its reference on `args` (arrays, or None for an absent operand).

    Args:
      implementation: `"triton"` and `"mosaic"` run a kernel compiled, `"interpret"` and `"mosaic_interpret"` run
        the bodies of the same kernels in Pallas's interpreters, `"xla"` runs the reference. `None` is decided per
        lowering: a kernel on CUDA devices from Ampere on, that of Mosaic GPU where they are of Hopper and it
        serves the call and is preferred, else that of Triton; the reference on every other platform.
      kernel: the Triton one, called as `kernel(*args, interpret=bool)`.
      reference: called as `reference(*args)`; also defines the gradient of the kernels.
      mosaic: the kernel for Hopper GPUs, called as `kernel` is, or why it does not serve this call.
      prefer_mosaic: whether it is the faster one here.

    Raises:
      ValueError: `implementation` is not one of the above.
      NotImplementedError: a kernel is asked for by name, and there is none for this call, or an array has 2**31
        elements or more.
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
    if implementation in ("mosaic", "mosaic_interpret"):
        if isinstance(mosaic, str):
            raise NotImplementedError(f"{implementation=} {mosaic}; use 'triton' or None")
        kernel = mosaic
    elif implementation is None and prefer_mosaic and not isinstance(mosaic, str) and _for_hopper():
        kernel = mosaic
    compiled = functools.partial(kernel, interpret=False)

    @jax.custom_vjp
    def op(*args: Any) -> Result:
        if implementation in ("triton", "mosaic"):
            return compiled(*args)
        if implementation is not None:
            return kernel(*args, interpret=True)
        if any(capability < 8.0 for capability in _local_cuda_capabilities()):
            return reference(*args)
        return jax.lax.platform_dependent(*args, cuda=compiled, default=reference)

    def forward(*args: Any) -> tuple[Result, tuple[Any, ...]]:
        return op(*args), args

    def backward(args: tuple[Any, ...], cotangent: Result) -> tuple[Any, ...]:
        return jax.vjp(reference, *args)[1](cotangent)

    op.defvjp(forward, backward)
    return op(*args)
