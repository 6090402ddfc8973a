"""Which implementation of an op runs, and how it is differentiated: decided here for every op."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_models import target as targets
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Table
from pallas_models.tuning.table import installed

Name = Literal["mosaic", "triton", "xla", "interpret", "mosaic_interpret"]
Implementation = Name | Sequence[Name]
IMPLEMENTATIONS: tuple[Name, ...] = ("mosaic", "triton", "xla", "interpret", "mosaic_interpret")
# What a name stands for: the backend, and whether its interpreter runs the kernel.
_BACKENDS = {
    "mosaic": ("mosaic", False),
    "triton": ("triton", False),
    "interpret": ("triton", True),
    "mosaic_interpret": ("mosaic", True),
}
_MAX_SIZE = 2**31 - 1  # offsets in kernels are signed 32-bit integers


def _never(*_: Any, **__: Any) -> None:
    return None


def _always(*_: Any, **__: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernel:
    """The kernel of one backend for an op.

    Attributes:
      backend: `"mosaic"` or `"triton"`.
      call: the kernel, called as `call(*arrays, config=, target=, interpret=, **static)`.
      config: the class of its configs; None if `config=` cannot set them.
      refuses: `refuses(*arrays, **static)` gives the reason why it does not serve a call; None where it does.
      preferred: `preferred(*arrays, **static)` says whether it is the fastest kernel for a call that it serves.
      backward: `backward(arrays, out, cotangent, **static)` gives the cotangents of the arrays; where None, the
        gradient is that of the op's reference.
      sharding: how it is partitioned, in place of the op's rule.
    """

    backend: Literal["mosaic", "triton"]
    call: Callable[..., Any]
    config: type | None
    refuses: Callable[..., str | None] = _never
    preferred: Callable[..., bool] = _always
    backward: Callable[..., Any] | None = None
    sharding: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op:
    """Everything that `run` needs to know of an op.

    Attributes:
      name: that of the public function.
      reference: the op in plain XLA, called as `reference(*arrays, **static)`.
      kernels: in the order in which they are preferred.
      derivative: a function that is differentiated in place of the reference, with the same arguments.
      sharding: in einsum notation, which axes can be split over devices.
    """

    name: str
    reference: Callable[..., Any]
    kernels: tuple[Kernel, ...]
    derivative: Callable[..., Any] | None = None
    sharding: str | None = None


def check_implementation(implementation: Implementation | None) -> tuple[Name, ...]:
    """The names that are given, in order of preference; none for None.

    Raises:
      ValueError: a name is unknown, or a sequence is empty.
    """
    if implementation is None:
        return ()
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not names or not set(names) <= set(IMPLEMENTATIONS):
        raise ValueError(f"{implementation=} is unknown; expected None or one of {IMPLEMENTATIONS}, or several")
    return names


def run(
    op: Op,
    *arrays: Any,
    config: Any = None,
    implementation: Implementation | None = None,
    **static: Any,
) -> Any:
    """Runs a kernel of an op or its reference on `arrays` (pytrees; None for an absent operand).

    Calls that are alike share one trace, and in a program one lowering.

    Args:
      config: a config of one of the kernels, a table to ask first, or None.
      implementation: as `pallas_models.ops` has it. None takes the first kernel that serves the call and is
        preferred, on CUDA devices from Ampere on, and the reference elsewhere.
      **static: what else the reference and the kernels take, hashable; a scalar that is an array, as where it is
        traced, is for the reference alone.

    Raises:
      ValueError: `implementation` is not one of the above.
      TypeError: `config` is of none of the kernels.
      NotImplementedError: nothing that `implementation` names serves the call: there is no such kernel, or an
        array is larger than it can index.
    """
    names = check_implementation(implementation)
    target = targets.current()
    _accept_triton()
    traced = {name: value for name, value in static.items() if isinstance(value, jax.Array)}
    # Where users debug their own functions step by step, an op is one step: a compiled kernel has no smaller ones.
    whole = jax.disable_jit(False) if _debugging() else contextlib.nullcontext()
    with whole:
        return _run(
            arrays,
            traced,
            op=op,
            static=tuple((name, value) for name, value in static.items() if name not in traced),
            config=config,
            names=names,
            target=target,
            tables=installed(target.name),
        )


def _debugging() -> bool:
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


_TRITON_WARNING = "The Pallas Triton backend is deprecated"


def _accept_triton() -> None:
    """Keeps JAX's warning about Triton kernels from those who make warnings errors.

    JAX gives it where a kernel is lowered, which is after the call of an op, and who calls one cannot heed it.
    """
    kinds = (kind for _, pattern, kind, *_ in warnings.filters[:1] if pattern and pattern.match(_TRITON_WARNING))
    if DeprecationWarning not in kinds:
        warnings.filterwarnings("ignore", _TRITON_WARNING, DeprecationWarning)


@functools.partial(jax.jit, static_argnames=("op", "static", "config", "names", "target", "tables"))
def _run(
    arrays: tuple[Any, ...],
    traced: dict[str, jax.Array],
    *,
    op: Op,
    static: tuple[tuple[str, Any], ...],
    config: Any,
    names: tuple[Name, ...],
    target: Target,
    tables: tuple[Table, ...],
) -> Any:
    del tables  # a change of them asks for another trace
    options = dict(static)
    with _plain_settings(arrays), jax.named_scope(op.name):
        if traced:  # kernels have their scalars built in
            if names and "xla" not in names:
                scalars = ", ".join(traced)
                raise NotImplementedError(f"implementation={names} takes {scalars} as a number, not as an array")
            return op.reference(*arrays, **options, **traced)
        reference = functools.partial(op.reference, **options)
        forward = _choose(op, arrays, options, config, names, target, reference)
        if forward is reference and op.derivative is None:
            return reference(*arrays)
        derivative = reference if op.derivative is None else functools.partial(op.derivative, **options)
        return _differentiable(forward, derivative)(*arrays)


@contextlib.contextmanager
def _plain_settings(arrays: Any) -> Iterator[None]:
    """JAX's own settings, whatever the user's: ops say what they promote, and kernels count in 32 bits."""
    wide = any(leaf.dtype.itemsize == 8 for leaf in jax.tree.leaves(arrays))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if wide:
            yield
        else:
            with jax.enable_x64(False):
                yield


def _choose(
    op: Op,
    arrays: tuple[Any, ...],
    static: dict[str, Any],
    config: Any,
    names: tuple[Name, ...],
    target: Target,
    reference: Callable[..., Any],
) -> Callable[..., Any]:
    """What computes the result: the reference, a kernel, or the choice of them by platform."""
    by_hand = config is not None and not isinstance(config, Chooser)
    takers = [k for k in op.kernels if not by_hand or (k.config is not None and isinstance(config, k.config))]
    if not takers:
        expected = " or ".join(f"{k.config.__module__}.{k.config.__qualname__}" for k in op.kernels if k.config)
        raise TypeError(f"config is a {type(config).__name__}; expected {expected}, a tuning.Table or None")
    obstacle = _obstacle(arrays, jax.eval_shape(reference, *arrays))
    if obstacle == "":
        return reference

    def call(kernel: Kernel, interpret: bool) -> Callable[..., Any]:
        return functools.partial(kernel.call, config=config, target=target, interpret=interpret, **static)

    if not names:
        for kernel in takers:
            runs = target.is_hopper if kernel.backend == "mosaic" else target.capability >= (8, 0)
            if obstacle or not runs or kernel.refuses(*arrays, **static):
                continue
            if by_hand or kernel.preferred(*arrays, **static):
                compiled = call(kernel, False)
                return lambda *arrays: jax.lax.platform_dependent(*arrays, cuda=compiled, default=reference)
        return reference
    reasons = []
    for name in names:
        if name == "xla":
            return reference
        backend, interpret = _BACKENDS[name]
        found = next((k for k in op.kernels if k.backend == backend), None)
        if found is None:
            reason: str | None = f"has no kernel for {op.name}"
        elif found not in takers:
            takes = "no config" if found.config is None else f"a Config of {found.config.__module__}"
            reason = f"takes {takes}, not {type(config).__module__}.{type(config).__name__}"
        elif backend == "mosaic" and not interpret and target.name and not target.is_hopper:
            reason = f"needs a Hopper GPU, not {target.name}"
        else:
            reason = obstacle or found.refuses(*arrays, **static)
            if reason is None:
                return call(found, interpret)
        reasons.append(f"implementation={name!r} {reason}")
    raise NotImplementedError(f"{'; '.join(reasons)}; use another implementation, such as 'xla', or None")


def _obstacle(*trees: Any) -> str | None:
    """What no kernel serves among the arrays; the empty string for axes of size 0, over which there is no grid."""
    leaves = jax.tree.leaves(trees)
    if any(_is_spread(leaf) for leaf in leaves):
        return "takes no arrays of an explicit mesh, nor of a shard_map with check_vma=True"
    if any(not isinstance(size, int) for leaf in leaves for size in leaf.shape):
        return "takes no symbolic sizes"
    if any(leaf.dtype.itemsize == 8 for leaf in leaves):
        return "takes no 64-bit operands"
    sizes = [leaf.size for leaf in leaves]
    if min(sizes) == 0:
        return ""
    if max(sizes) > _MAX_SIZE:
        return f"takes arrays of up to {_MAX_SIZE} elements, not {max(sizes)}"
    return None


def _is_spread(leaf: Any) -> bool:
    """Whether the type of an array names axes of a mesh, as those of a kernel's outputs would have to."""
    kind = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    varying = getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    spec = getattr(getattr(kind, "sharding", None), "spec", None) or ()
    return bool(varying) or any(axis is not None for axis in spec)


def _differentiable(forward: Callable[..., Any], derivative: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the derivative of another function, in forward and reverse mode and of any order.

    The gradient keeps the operands alone: what else it needs of the forward pass is computed again.
    """

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        with _plain_settings(arrays):  # this is traced again where it is differentiated
            return forward(*arrays)

    @function.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(primals)
        smooth = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
        moving = [t for t, s in zip(jax.tree.leaves(tangents), smooth, strict=True) if s]

        def tangent(leaves: list[jax.Array], moving: list[jax.Array]) -> Any:
            def at(floats: list[jax.Array]) -> Any:
                given = iter(floats)
                mixed = [next(given) if s else leaf for leaf, s in zip(leaves, smooth, strict=True)]
                return derivative(*jax.tree.unflatten(tree, mixed))

            floats = [leaf for leaf, s in zip(leaves, smooth, strict=True) if s]
            with _plain_settings(leaves):
                return jax.jvp(at, (floats,), (moving,))[1]

        return function(*primals), jax.checkpoint(tangent)(leaves, moving)

    return function
