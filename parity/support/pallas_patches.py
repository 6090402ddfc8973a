"""The suite's changes to JAX and Pallas: tests start thousands of programs that run once, on little data.

`apply` makes the changes for a process of the suite. They make tests faster and change no result, except that
`interpret_quickly` hides a negative index. So the campaign and the sanitizers run without them, and so does
`make unpatched`, which tests the values of every op with `pytest --unpatched`. The internals of JAX that are
replaced are alike in 0.10.2, 0.11 and 0.12, unless the change says otherwise.

`sums_of_their_own` and `keep_whole_programs` correct errors of JAX and are not among them: only the search for
races needs the one, and only processes that share compiled programs the other.
"""

import contextlib
import functools
import gc
import itertools
import os
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src import compilation_cache, lru_cache
from jax._src.interpreters import mlir
from jax._src.lax import slicing
from jax._src.pallas import hlo_interpreter, primitives
from jax._src.state import discharge


def apply(*, on_gpu: bool) -> None:
    """Makes the changes for this process."""
    share_contexts()
    if not on_gpu:
        interpret_quickly()
    if jax.__version_info__ < (0, 11):
        put_arrays_of_numpy()
        compile_a_warpgroup_once()
        interpret_with_numpy()


_contexts: dict[Callable[[], Any], Any] = {}


def _shared(make: Callable[[], Any]) -> Callable[[], Any]:
    """What `make` returned at first, each time, until programs are dropped."""

    def context() -> Any:
        if threading.get_ident() != threading.main_thread().ident:  # XLA's threads come and go
            return make()
        if make not in _contexts:
            _contexts[make] = make()
        return _contexts[make]

    return context


_make_ir_context = mlir.make_ir_context


def share_contexts() -> None:
    """One MLIR context for all programs, and one for all kernels of Triton.

    JAX loads 20 dialects into a new one for each program, which takes 5 ms, and for each kernel, which takes 2 ms.
    """
    mlir.make_ir_context = _shared(_make_ir_context)
    with contextlib.suppress(ImportError):  # JAX will do without Triton
        from jax._src.pallas.triton import lowering

        lowering._new_ir_context = _shared(lowering._new_ir_context)


def put_arrays_of_numpy() -> None:
    """`jnp.asarray` copies a NumPy array. JAX 0.10 compiles the identity for each shape, which takes 30 ms."""
    from jax._src import literals
    from jax._src.lax import lax

    stage = lax._stage_impl

    def put(x: Any) -> Any:
        is_of_numpy = isinstance(x, literals.TypedNdArray) and not x.weak_type
        # On a mesh that is set, the program says where the array is.
        is_of_numpy = is_of_numpy and jax.sharding.get_abstract_mesh().empty
        return jax.device_put(np.array(x)) if is_of_numpy else stage(x)

    lax.stage_p.def_impl(put)


_interpret = hlo_interpreter.pallas_call_hlo_interpret


@functools.lru_cache(maxsize=1000)
def _interpreted(**params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_interpret, **params), inline=True)


def interpret_quickly() -> None:
    """Pallas's interpreter traces a kernel once for all programs, and compares no index of a block with 0.

    Comparisons are a third of what it traces. An index that is negative by mistake is then 0, and not one from the
    end.
    """
    within = {
        name: functools.partial(getattr(slicing, name), allow_negative_indices=False)
        for name in ("dynamic_slice", "dynamic_update_slice")
    }
    for module, name in ((hlo_interpreter, "slicing"), (primitives, "lax"), (discharge, "lax_slicing")):
        setattr(module, name, types.SimpleNamespace(**vars(getattr(module, name)) | within))
    hlo_interpreter.pallas_call_hlo_interpret = lambda *args, **params: _interpreted(**params)(*args)


def _run(jaxpr: Any, consts: Any, *args: Any) -> None:
    jax.core.eval_jaxpr(jaxpr, consts, *args)


def _run_jaxpr(jaxpr: Any, consts: Any, *args: Any) -> None:
    jax.jit(_run, static_argnums=0).trace(jaxpr, consts, *args).lower().compile()(consts, *args)


def compile_a_warpgroup_once() -> None:
    """Mosaic's interpreter compiles a kernel once. In JAX 0.10 it does so for every warpgroup of each CTA.

    JAX 0.11 has this itself.
    """
    from jax._src.pallas.mosaic.interpret import thread_map

    thread_map._run_jaxpr = _run_jaxpr


def _io_callback(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def interpret_with_numpy() -> None:
    """Mosaic's interpreter gives its callbacks NumPy arrays: it calls Python for each access.

    Arrays of JAX as arguments are a quarter of its time in JAX 0.10. The callbacks of JAX 0.11 expect them.
    """
    callbacks.io_callback_impl = _io_callback


@contextlib.contextmanager
def sums_of_their_own() -> Iterator[None]:
    """Mosaic's interpreter, from JAX 0.11 on, takes no sums of two CTAs for the same while it looks for races.

    It runs one cluster after another. For each it numbers the sums in registers from -100 again and sets all
    vector clocks to 0, but keeps what was read and written under these numbers. So a warpgroup of the second
    cluster that sets its sums seems to race with one of the first. Here no number comes twice.
    """
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

    numbers = itertools.count(-100, -1)
    with mock.patch.object(GPUSharedMemory, "get_next_wgmma_accumulator_id", lambda *_: next(numbers)):
        yield


def keep_whole_programs() -> None:
    """A compiled program is in JAX's cache whole or not at all, for other processes that look for it.

    JAX writes it in place. Who reads it then gets a part and a warning, which is an error where warnings are.
    """
    put = lru_cache.LRUCache.put

    def whole(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
        path = f"{cache.path}/{key}{lru_cache._CACHE_SUFFIX}"
        if not key or cache.eviction_enabled:  # which takes a lock
            put(cache, key, value)
        elif not os.path.exists(path):
            # Not by `files.write`, which each time waits for the disk and lists the folder.
            part = f"{path}.{os.getpid()}.{threading.get_ident()}"
            with open(part, "wb") as file:
                file.write(value)
            os.replace(part, path)

    lru_cache.LRUCache.put = whole


def compress_nothing() -> None:
    """Where JAX's cache would compress programs by zlib, it keeps them as they are, in the format of zlib.

    Compressing takes a third as long again as all else that is done to keep one. Programs of an earlier run can
    still be read.
    """
    if compilation_cache.zstd is None and compilation_cache.zstandard is None:
        compilation_cache.compress_executable = functools.partial(zlib.compress, level=0)


def collect_rarely() -> None:
    """Python looks for garbage rarely: to look among imported modules, which stay, takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def forget() -> None:
    """Drops all compiled programs."""
    _contexts.clear()
    _interpreted.cache_clear()
    jax.clear_caches()
    gc.collect()
