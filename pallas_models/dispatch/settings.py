"""JAX's settings while an op is traced."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def plain_settings(arrays: Any) -> Iterator[None]:
    """JAX's default settings in place of the user's: ops promote explicitly, and kernels count in 32 bits.

    With 64-bit arrays, which no kernel takes, x64 stays as the user has it.
    """
    wide = any(leaf.dtype.itemsize == 8 for leaf in jax.tree.leaves(arrays))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if wide:
            yield
        else:
            with jax.enable_x64(False):
                yield


def as_one_step() -> contextlib.AbstractContextManager[Any]:
    """Compiles an op also where users run their own functions step by step: a kernel has no smaller steps."""
    debugging = bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]
    return jax.disable_jit(False) if debugging else contextlib.nullcontext()
