"""Which implementation of an op runs, and how it is differentiated: decided here for every op."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_models import target as targets
from pallas_models._implementation import Implementation, Name, check_implementation
from pallas_models.dispatch.platforms import by_platform, on_cuda
from pallas_models.dispatch.sharding import (
    Layout,
    Options,
    Sharding,
    Total,
    can_spread,
    is_explicit,
    over_explicit,
    spread,
    varying_alike,
)
from pallas_models.dispatch.transposable import linear
from pallas_models.target import Target
from pallas_models.tuning import Chooser, Table
from pallas_models.tuning.table import installed

# What a name stands for: the backend, and whether its interpreter runs the kernel.
_BACKENDS = {
    "mosaic": ("mosaic", False),
    "triton": ("triton", False),
    "interpret": ("triton", True),
    "mosaic_interpret": ("mosaic", True),
}
# Kernels count rows and columns in signed 32-bit integers, and the last tile reaches past the end.
_MOST_ROWS = 2**31 - 2**16


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
    """

    backend: Literal["mosaic", "triton"]
    call: Callable[..., Any]
    config: type | None
    refuses: Callable[..., str | None] = _never
    preferred: Callable[..., bool] = _always


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backward:
    """A gradient of an op that is better than that of its reference, for calls whose result a kernel computes.

    Derivatives in forward mode, and those of the gradient, are the reference's all the same.

    Attributes:
      backend: of its kernels, which need not be that of the forward; `"xla"` if it has none.
      call: gives the cotangents of the arrays, a sequence like them with anything for those not wanted, called as
        `call(*arrays, *kept, *cotangents, wanted=, config=, target=, interpret=, **static)`. `kept` are results
        of the forward; `cotangents` one for each of its results, the first an array, any other None where it is
        zero or not a result of this call; `wanted` says of each of the arrays whether its cotangent is used;
        `config` is a table to ask first or None; `static` what the forward was called with.
      keeps: how many results of the forward are kept for it: so many of the first or, negative, of the last.
      options: those with which the forward gives these results: `{"return_lse": True}`. It then gives a tuple, of
        which the result of a call without them is the first.
      refuses: as that of a `Kernel`, and
      preferred: so too.
    """

    backend: Literal["mosaic", "triton", "xla"]
    call: Callable[..., Any]
    keeps: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refuses: Callable[..., str | None] = _never
    preferred: Callable[..., bool] = _always


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op:
    """Everything that `run` needs to know of an op.

    Attributes:
      name: that of the public function.
      reference: the op in plain XLA, called as `reference(*arrays, **static)`.
      kernels: in the order in which they are preferred.
      derivative: a function that is differentiated in place of the reference, with the same arguments.
      backward: what computes the gradient in place of that, the first that serves a call. Where implementations
        are named, its backend is one of theirs.
      sharding: which axes can be split over devices; or `sharding(*arrays, **static)`, which says so. Gradients
        are split as the operands are.
      contracted: `contracted(call, total, *arrays, **static)` is the op where an axis is split that no result has,
        with `call` like the reference and `total` adding up what the devices have.
    """

    name: str
    reference: Callable[..., Any]
    kernels: tuple[Kernel, ...]
    sharding: Sharding | Callable[..., Sharding]
    derivative: Callable[..., Any] | None = None
    backward: tuple[Backward, ...] = ()
    contracted: Callable[..., Any] | None = None


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
        array is larger than it can index. Where the program is lowered: kernels for GPUs are named alone, and it
        is for another platform than CUDA.
    """
    names = check_implementation(implementation)
    target = targets.current()
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


def run_backward(
    op: Op,
    arrays: tuple[Any, ...],
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    wanted: tuple[bool, ...],
    reference: Callable[..., list[jax.Array]],
    *,
    config: Any = None,
    implementation: Implementation | None = None,
    **static: Any,
) -> list[jax.Array]:
    """The cotangents of the leaves of those `arrays` that are wanted, in the kernels of the op's gradient.

    What is `kept` may be of a larger call that these arrays are a part of: what they add to it is differentiated.

    Args:
      reference: `reference(arrays, kept, cotangents)`, where no kernel serves the call.
    """
    names, target = check_implementation(implementation), targets.current()
    plain = functools.partial(op.reference, **static)
    with _plain_settings(arrays), jax.named_scope(op.name):
        found = None
        if _choose(op, arrays, static, config, names, target, plain) is not plain:
            found = _choose_backward(op, arrays, static, names, target)
        if found is None:
            return reference(arrays, kept, cotangents)
        in_kernels = functools.partial(_pull, op, static, config, target, *found, wanted)
        anywhere = found[1] or found[0].backend == "xla"
        return _on_platforms(in_kernels, reference, names, anywhere)(arrays, kept, cotangents)


def has_backward(op: Op, *arrays: Any, implementation: Implementation | None, **static: Any) -> bool:
    """Whether kernels compute a call, of arrays like these, and its gradient."""
    if _obstacle(static, arrays) is not None:  # kernels that are asked need sizes that are numbers
        return False
    names, target = check_implementation(implementation), targets.current()
    with _plain_settings(arrays):
        found = _choose_backward(op, arrays, static, names, target)
        if found is None or found[0].backend == "xla":
            return False
        reference = functools.partial(op.reference, **static)
        return _choose(op, arrays, static, None, names, target, reference) is not reference


def serves(op: Op, *arrays: Any, implementation: Implementation | None, **static: Any) -> bool:
    """Whether a kernel computes a call, of arrays like these: that of the first implementation that is named.

    None does with a scalar that is an array, see `run`: what stands for the op then may be differentiated by it.
    """
    if any(isinstance(value, jax.Array) for value in static.values()):
        return False
    names, target = check_implementation(implementation), targets.current()
    reference = functools.partial(op.reference, **static)
    # Before the reference is traced for the shapes of its results.
    if _obstacle(static, arrays) is not None or all(k.refuses(*arrays, **static) for k in op.kernels):
        return False
    with _plain_settings(arrays):
        try:
            return _choose(op, arrays, static, None, names[:1], target, reference) is not reference
        except NotImplementedError:
            return False


def differentiated_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; where it is differentiated, another that computes the same in its place."""

    @jax.custom_jvp
    def call(*arrays: Any) -> Any:
        return function(*arrays)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(primals)
        changes = jax.tree.leaves(tangents)
        moving = [i for i, t in enumerate(changes) if not isinstance(t, SymbolicZero)]

        def at(*some: jax.Array) -> Any:
            every = list(leaves)
            for i, x in zip(moving, some, strict=True):
                every[i] = x
            return other(*jax.tree.unflatten(tree, every))

        return jax.jvp(at, [leaves[i] for i in moving], [changes[i] for i in moving])

    call.defjvp(jvp, symbolic_zeros=True)
    return call


def _debugging() -> bool:
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


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
        if is_explicit(arrays) and names != ("xla",):
            layout, tree = _layout(op, arrays, options)
            part = functools.partial(_part, op, jax.tree.structure(arrays), _compute, config, names, target)
            return tree.unflatten(over_explicit(part, layout, jax.tree.leaves(arrays), options, check_vma=True))
        return _compute(op, arrays, options, config, names, target)


def _compute(
    op: Op, arrays: tuple[Any, ...], static: Options, config: Any, names: tuple[Name, ...], target: Target
) -> Any:
    """The op of arrays that are on one device, or spread in ways that their types do not tell."""
    arrays = varying_alike(arrays)
    return _differentiable(op, arrays, static, config, names, target)(*arrays)


def _layout(op: Op, arrays: tuple[Any, ...], static: Options) -> tuple[Layout, Any]:
    """How operands and results are split, and the tree that the results are."""
    sharding = op.sharding if isinstance(op.sharding, Sharding) else op.sharding(*arrays, **static)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    tree: Any = jax.tree.structure(jax.eval_shape(functools.partial(op.reference, **static), *plain))
    return Layout.of(sharding, arrays, tree.num_leaves), tree


def _part(
    op: Op,
    tree: Any,
    compute: Callable[..., Any],
    config: Any,
    names: tuple[Name, ...],
    target: Target,
    leaves: list[jax.Array],
    static: Options,
    total: Total | None,
) -> list[jax.Array]:
    """The leaves of `compute(op, arrays, static, ...)` of what one device has of the arrays."""

    def call(*arrays: Any, **static: Any) -> Any:
        return compute(op, arrays, static, config, names, target)

    arrays = tree.unflatten(leaves)
    if total is not None:
        has_peers = total.has_peers and target.is_linked and names[:1] in ((), ("mosaic",))
        target = dataclasses.replace(target, has_peers=has_peers)
        total = dataclasses.replace(total, target=target)
    if total is None or not total.over:
        return jax.tree.leaves(call(*arrays, **static))
    assert op.contracted is not None, f"the sharding of {op.name} has an axis that no result has"
    return jax.tree.leaves(op.contracted(total.once(call), total, *arrays, **static))


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
    reference: functools.partial[Any],
) -> functools.partial[Any]:
    """What computes the result: the reference or a kernel."""
    by_hand = config is not None and not isinstance(config, Chooser)
    takers = [k for k in op.kernels if not by_hand or (k.config is not None and isinstance(config, k.config))]
    if not takers:
        expected = " or ".join(f"{k.config.__module__}.{k.config.__qualname__}" for k in op.kernels if k.config)
        raise TypeError(f"config is a {type(config).__name__}; expected {expected}, a tuning.Table or None")
    obstacle = _obstacle(static, arrays, jax.eval_shape(reference, *arrays))
    if obstacle == "":
        return reference

    def call(kernel: Kernel, interpret: bool) -> functools.partial[Any]:
        return functools.partial(kernel.call, config=config, target=target, interpret=interpret, **static)

    if not names:
        for kernel in takers:
            if obstacle or not _runs(kernel.backend, target) or kernel.refuses(*arrays, **static):
                continue
            if by_hand or kernel.preferred(*arrays, **static):
                return call(kernel, False)
        return reference

    def refusal(kernel: Kernel, interpret: bool) -> str | None:
        if kernel not in takers:
            takes = "no config" if kernel.config is None else f"a Config of {kernel.config.__module__}"
            return f"takes {takes}, not {type(config).__module__}.{type(config).__name__}"
        if kernel.backend == "mosaic" and not interpret and target.name and not target.is_hopper:
            return f"needs a Hopper GPU, not {target.name}"
        return obstacle or kernel.refuses(*arrays, **static)

    reasons = []
    for name in names:
        if name == "xla":
            return reference
        backend, interpret = _BACKENDS[name]
        refusals = {kernel: refusal(kernel, interpret) for kernel in op.kernels if kernel.backend == backend}
        if serving := [kernel for kernel, reason in refusals.items() if reason is None]:
            fastest = (kernel for kernel in serving if by_hand or kernel.preferred(*arrays, **static))
            return call(next(fastest, serving[-1]), interpret)
        reason = next(iter(refusals.values()), f"has no kernel for {op.name}")
        reasons.append(f"implementation={name!r} {reason}")
    raise NotImplementedError(f"{'; '.join(reasons)}; use another implementation, such as 'xla', or None")


def _obstacle(static: Mapping[str, Any], *trees: Any) -> str | None:
    """What no kernel serves among options and arrays; the empty string for axes of size 0, which have no grid."""
    leaves = jax.tree.leaves(trees)
    if any(map(jax.export.is_symbolic_dim, itertools.chain(static.values(), *(leaf.shape for leaf in leaves)))):
        return "takes no symbolic sizes"
    if any(leaf.dtype.itemsize == 8 for leaf in leaves):
        return "takes no 64-bit operands"
    if min(leaf.size for leaf in leaves) == 0:
        return ""
    most = max(_most_rows(leaf) for leaf in leaves)
    if most > _MOST_ROWS:
        return f"takes arrays of up to {_MOST_ROWS} rows and as many columns, not {most}"
    return None


def _most_rows(leaf: Any) -> int:
    """Rows or columns of an array of which all axes but the last are one; its elements, where each is one byte.

    Offsets in an array are 64-bit integers where they have to be; Triton's are from 2**32 bytes on.
    """
    if leaf.ndim == 0 or leaf.dtype.itemsize == 1:
        return leaf.size
    return max(leaf.shape[-1], leaf.size // leaf.shape[-1])


def _runs(backend: str, target: Target) -> bool:
    """Whether a target runs the kernels of a backend."""
    return target.is_hopper if backend == "mosaic" else target.capability >= (8, 0)


def _differentiable(
    op: Op,
    arrays: tuple[Any, ...],
    static: dict[str, Any],
    config: Any,
    names: tuple[Name, ...],
    target: Target,
) -> Callable[..., Any]:
    """The function of arrays like these that computes the op, with its derivatives."""
    reference = functools.partial(op.reference, **static)
    forward = _forward(op, arrays, static, config, names, target, reference)
    derivative = reference if op.derivative is None else functools.partial(op.derivative, **static)
    if forward is reference:
        return reference if op.derivative is None else _with_derivative(reference, derivative)
    found = _choose_backward(op, arrays, static, names, target)
    if found is None:
        return _with_derivative(forward, derivative)
    backward, interpret = found
    options = static | dict(backward.options)

    def keep(*arrays: Any) -> tuple[Any, list[Any], int]:
        results = _differentiable(op, arrays, options, config, names, target)(*arrays)
        # In a scan XLA has a kernel run twice if its result is both used and stored with those of the other steps,
        # unless something is in between.
        results = jax.lax.optimization_barrier(results)
        # Policies of `jax.checkpoint` keep by the op's name all that would have its kernel run again.
        results = jax.tree.map(functools.partial(checkpoint_name, name=op.name), results)
        leaves = jax.tree.leaves(results)
        kept = leaves[: backward.keeps] if backward.keeps >= 0 else leaves[backward.keeps :]
        return results if options == static else results[0], kept, len(leaves)

    def pull(
        arrays: tuple[Any, ...], kept: list[Any], cotangents: list[Any], wanted: tuple[bool, ...]
    ) -> list[Any]:
        """The cotangents of all leaves of the wanted arrays."""

        in_kernels = functools.partial(_pull, op, static, config, target, backward, interpret, wanted)

        def in_reference(arrays: tuple[Any, ...], kept: list[Any], cotangents: list[Any]) -> list[Any]:
            del kept

            def of_wanted(*some: Any) -> list[Any]:
                given = iter(some)
                every = (next(given) if w else x for x, w in zip(arrays, wanted, strict=True))
                return jax.tree.leaves(derivative(*every))

            out, pullback = jax.vjp(of_wanted, *(x for x, w in zip(arrays, wanted, strict=True) if w))
            given = cotangents[: len(out)]
            full = [jnp.zeros_like(y) if c is None else c for y, c in zip(out, given, strict=True)]
            return jax.tree.leaves(pullback(full))

        anywhere = interpret or backward.backend == "xla"
        gradient = _with_derivative(_on_platforms(in_kernels, in_reference, names, anywhere), in_reference)
        return gradient(arrays, kept, cotangents)

    return _with_derivative(forward, derivative, keep, pull)


def _pull(
    op: Op,
    static: Options,
    config: Any,
    target: Target,
    backward: Backward,
    interpret: bool,
    wanted: tuple[bool, ...],
    *operands: Any,
) -> list[Any]:
    """The cotangents of all leaves of the wanted arrays, by a gradient's kernels on each device.

    Args:
      *operands: the arrays, what is kept, the cotangents of the results.
    """
    arrays, _, cotangents = operands
    leaves, tree = jax.tree.flatten(operands)  # type: tuple[list[jax.Array], Any]

    def part(leaves: list[jax.Array], static: Options, _: Total | None = None) -> list[jax.Array]:
        arrays, kept, cotangents = tree.unflatten(leaves)
        table = config if isinstance(config, Chooser) else None
        options = dict(wanted=wanted, config=table, target=target, interpret=interpret, **static)
        given = backward.call(*arrays, *kept, *cotangents, **options)
        return jax.tree.leaves([x for x, w in zip(given, wanted, strict=True) if w])

    if not can_spread():
        return part(leaves, static)
    indices = itertools.count()
    owned = [[next(indices) for _ in jax.tree.leaves(x)] for x in arrays]
    layout = _layout(op, arrays, static | dict(backward.options))[0].backward(
        backward.keeps,
        [i for i, c in enumerate(cotangents) if c is not None],
        [i for own, w in zip(owned, wanted, strict=True) if w for i in own],
    )
    return spread(part, layout, leaves, static)


def _forward(
    op: Op,
    arrays: tuple[Any, ...],
    static: Options,
    config: Any,
    names: tuple[Name, ...],
    target: Target,
    reference: functools.partial[Any],
) -> Callable[..., Any]:
    """What computes the result: the reference, a kernel on each device, or the choice of them by platform."""
    kernel = _choose(op, arrays, static, config, names, target, reference)
    if kernel is reference:
        return reference
    anywhere = kernel.keywords["interpret"]
    if not can_spread():
        return _on_platforms(kernel, reference, names, anywhere)
    layout, tree = _layout(op, arrays, static)
    part = functools.partial(_part, op, jax.tree.structure(arrays), _compute_part, config, names, target)

    def on_devices(*arrays: Any) -> Any:
        return tree.unflatten(spread(part, layout, jax.tree.leaves(arrays), static))

    return _on_platforms(on_devices, reference, names, anywhere)


def _on_platforms(
    kernel: Callable[..., Any], reference: Callable[..., Any], names: tuple[Name, ...], anywhere: bool
) -> Callable[..., Any]:
    """`kernel` on CUDA devices; elsewhere too where it runs `anywhere`, else what the names have for there."""
    if names and anywhere:
        return kernel
    return on_cuda(kernel, names) if names and "xla" not in names else by_platform(kernel, reference)


def _compute_part(
    op: Op, arrays: tuple[Any, ...], static: Options, config: Any, names: tuple[Name, ...], target: Target
) -> Any:
    """The result for what one device has, by the kernel that is best for its sizes; not differentiated."""
    reference = functools.partial(op.reference, **static)
    return _choose(op, arrays, static, config, names, target, reference)(*arrays)


def _choose_backward(
    op: Op, arrays: tuple[Any, ...], static: dict[str, Any], names: tuple[Name, ...], target: Target
) -> tuple[Backward, bool] | None:
    """What computes the gradient of a call that a kernel serves, and whether in an interpreter; else None."""
    named = dict(_BACKENDS[name] for name in reversed(names) if name != "xla")
    for backward in op.backward:
        backend = backward.backend
        serves = backend == "xla" or (backend in named if names else _runs(backend, target))
        serves = serves and bool(names or backward.preferred(*arrays, **static))
        if serves and not backward.refuses(*arrays, **static):
            return backward, named.get(backend, False)
    return None


def _with_derivative(
    forward: Callable[..., Any],
    derivative: Callable[..., Any],
    keep: Callable[..., tuple[Any, list[Any], int]] | None = None,
    pull: Callable[..., list[Any]] | None = None,
) -> Callable[..., Any]:
    """`forward` with the derivative of another function, in forward and reverse mode and of any order.

    The gradient keeps the operands, and computes what else it needs of the forward pass again; unless there is

      keep: `keep(*arrays)` gives the result, what is kept of it, and how many results have a cotangent, and
      pull: `pull(arrays, kept, cotangents, wanted)` the cotangents of the leaves of those arrays that are wanted.
    """

    @jax.custom_jvp
    def function(*arrays: Any) -> Any:
        with _plain_settings(arrays):  # this is traced again where it is differentiated
            return forward(*arrays)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        with _plain_settings(primals):
            out, kept, results = (function(*primals), [], 0) if keep is None else keep(*primals)
        leaves, tree = jax.tree.flatten(primals)
        # What is transposed later keeps no array of this trace.
        count, first = len(leaves), jax.typeof(jax.tree.leaves(out)[0])
        changes = jax.tree.leaves(tangents)
        moving = [i for i, t in enumerate(changes) if not isinstance(t, SymbolicZero)]
        if not moving:
            return out, jax.tree.map(jnp.zeros_like, out)

        def tangent(residuals: list[jax.Array], moved: list[jax.Array]) -> list[jax.Array]:
            def at(*some: jax.Array) -> Any:
                every = residuals[:count]
                for i, x in zip(moving, some, strict=True):
                    every[i] = x
                return derivative(*jax.tree.unflatten(tree, every))

            with _plain_settings(residuals):
                primals = tuple(residuals[i] for i in moving)
                return jax.tree.leaves(jax.jvp(at, primals, tuple(moved))[1])

        def transpose(residuals: list[Any], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
            assert pull is not None
            arrays = jax.tree.unflatten(tree, residuals[:count])
            used = {i for i, w in zip(moving, wanted, strict=True) if w}
            indices = iter(range(count))
            owned = [[next(indices) for _ in jax.tree.leaves(x)] for x in arrays]
            asked = tuple(not used.isdisjoint(own) for own in owned)
            if cotangents[0] is None:
                # Zeros that are mapped under vmap as the other cotangents are: JAX fails where a function with a
                # derivative of its own has results that are mapped in the derivative alone.
                other = next(c for c in cotangents if c is not None)
                zero = jnp.where(other.ravel()[0] == 0, 0.0, 0.0)
                cotangents = [jnp.broadcast_to(zero, first.shape).astype(first.dtype), *cotangents[1:]]
            cotangents = cotangents + [None] * (results - len(cotangents))
            given = pull(arrays, residuals[count:], cotangents, asked)
            found = dict(
                zip((i for own, w in zip(owned, asked, strict=True) if w for i in own), given, strict=True)
            )
            return [found.get(i) for i in moving]

        residuals = leaves + [jax.lax.stop_gradient(x) for x in kept]
        moved = linear(tangent, None if pull is None else transpose, residuals, [changes[i] for i in moving])
        return out, jax.tree.unflatten(jax.tree.structure(out), moved)

    function.defjvp(jvp, symbolic_zeros=True)
    return function
