"""What processes that compile thousands of programs, and run each once, do less often."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.interpreters import mlir

_make_ir_context = mlir.make_ir_context
_contexts: list[Any] = []


def _ir_context() -> Any:
    if threading.get_ident() != threading.main_thread().ident:  # XLA's threads come and go
        return _make_ir_context()
    if not _contexts:
        _contexts.append(_make_ir_context())
    return _contexts[0]


def share_contexts() -> None:
    """One MLIR context for all programs: JAX loads 20 dialects into a new one for each, which takes 5 ms."""
    mlir.make_ir_context = _ir_context


def _io_callback(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def interpret_with_numpy() -> None:
    """Mosaic's interpreter calls Python for each access; arrays of JAX as arguments are a quarter of its time.

    That of JAX 0.11 expects them.
    """
    callbacks.io_callback_impl = _io_callback


def collect_rarely() -> None:
    """Python would look for garbage among what stays, imported modules, for a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def forget() -> None:
    """Drops all that was compiled."""
    _contexts.clear()
    jax.clear_caches()
    gc.collect()
