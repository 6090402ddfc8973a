"""Kernels of one program compiled side by side.

XLA compiles the Mosaic kernels of a program one after another, after everything else. But a process keeps each
kernel that it has compiled, by a hash of its code. So as soon as JAX has lowered a kernel, a thread compiles it as
a program of its own, and XLA finds it compiled. Where a program is split over devices, XLA asks JAX to lower each
op as it compiles the program, in a module of its own.
"""

import concurrent.futures
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import batching, mlir

from pallas_models import _jax
from pallas_models._processes import cores

_MOST_THREADS = 16
_Options = dict[str, bytes | bool]  # the attributes of a call


def compiled_ahead(results: list[jax.Array]) -> list[jax.Array]:
    """The results of a kernel as they are; where they are lowered for a GPU, a thread compiles the kernel."""
    found: list[jax.Array] = _ahead.bind(*results)
    return found


def _lower(context: mlir.LoweringRuleContext, *values: ir.Value[Any]) -> tuple[ir.Value[Any], ...]:
    devices = _local_gpus(context.module_context.backend)
    if devices and (options := _jax.mosaic_call_options(values[0])) is not None:
        _start(options, devices[0])
    return values


def _local_gpus(backend: Any) -> list[jax.Device]:
    """The GPUs of this process that a program is compiled for; none where it is for other machines."""
    return [] if backend is None or backend.platform != "gpu" else backend.local_devices()


_lock = threading.Lock()
_started: set[bytes | bool] = set()


def _start(options: _Options, device: jax.Device) -> None:
    """Has a kernel compiled, unless that has begun: where it is alone, XLA would compile it no earlier."""
    with _lock:
        is_new = options["kernel_hash"] not in _started
        _started.add(options["kernel_hash"])
    if is_new:
        _pool().submit(_compile, options, device)


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    threads = min(_MOST_THREADS, cores())
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="mosaic")


def _compile(options: _Options, device: jax.Device) -> None:
    """Compiles a program that is one call of a kernel; its operands do not matter, as it never runs."""
    call = jax.ffi.ffi_call(_jax.MOSAIC_CALL, jax.ShapeDtypeStruct((), jnp.float32))
    place = jax.sharding.SingleDeviceSharding(device)
    jax.jit(functools.partial(call, **options), out_shardings=place).lower().compile()


_ahead = Primitive("compiled_ahead")
_ahead.multiple_results = True
_ahead.def_impl(lambda *results: list(results))
_ahead.def_abstract_eval(lambda *results: list(results))
batching.primitive_batchers[_ahead] = lambda args, axes: (_ahead.bind(*args), axes)
mlir.register_lowering(_ahead, _lower, cacheable=False)
