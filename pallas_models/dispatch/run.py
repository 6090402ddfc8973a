"""Runs a call of an op: its kernel or its reference, on each device, and the gradient of it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_models import target as targets
from pallas_models._implementation import Implementation, Name, check_implementation
from pallas_models.dispatch import choice
from pallas_models.dispatch.derivatives import differentiated_as, with_derivative
from pallas_models.dispatch.platforms import by_platform, on_cuda
from pallas_models.dispatch.records import Backward, Call, Kernel, Op
from pallas_models.dispatch.settings import as_one_step, plain_settings
from pallas_models.dispatch.sharding import (
    Layout,
    Total,
    can_spread,
    is_explicit,
    over_explicit,
    spread,
    varying_alike,
)
from pallas_models.kernels.forms import Form
from pallas_models.tuning import Chooser, Table
from pallas_models.tuning.table import installed

F = TypeVar("F", bound=Form)
Operands = tuple[Any, ...]


def run(op: Op[F], form: F, *, config: Any = None, implementation: Implementation | None = None) -> Any:
    """Runs a kernel of an op or its reference.

    Calls that are alike share one trace, and in a program one lowering.

    Args:
      form: the call, with arrays.
      config: a config of one of the kernels, a table to ask first, or None.
      implementation: as `pallas_models.ops` has it. None takes the first kernel that serves the call and is
        preferred, on CUDA devices from Ampere on, and the reference elsewhere.

    Raises:
      ValueError: `implementation` is not one of the above.
      TypeError: `config` is of none of the kernels.
      NotImplementedError: nothing that `implementation` names serves the call: there is no such kernel, or an
        array is larger than it can index. Where the program is lowered: kernels for GPUs are named alone, and it
        is for another platform than CUDA.
    """
    operands = form.operands
    traced = {name: value for name, value in form.options.items() if isinstance(value, jax.Array)}
    # How JAX knows calls that are alike: the operands have their shapes beside it.
    options = form.replace(**dict.fromkeys((*form.OPERANDS, *traced)))
    names, target = check_implementation(implementation), targets.current()
    call = Call(op=op, form=options, config=config, names=names, target=target)
    if op.stands_for is not None:
        others = functools.partial(_stand_for, form, op.stands_for, names)
        if op.together is not None and _all_have_backward(op.together.parts(form.abstract()), implementation):
            together = functools.partial(_stand_for, form, op.together.call, names)
            return differentiated_as(others, together)(*operands)
        if traced or not has_kernel(op, form, implementation=implementation):
            return others(*operands)
        return differentiated_as(functools.partial(_run_whole, call), others)(*operands)
    return _run_whole(call, *operands, traced=traced)


def _stand_for(form: Form, function: Callable[..., Any], names: tuple[Name, ...], *operands: Any) -> Any:
    return function(form.of(operands), names)


def run_backward(
    op: Op[F],
    form: F,
    kept: list[jax.Array],
    cotangents: list[jax.Array | None],
    wanted: tuple[bool, ...],
    reference: Callable[..., list[jax.Array]],
    *,
    config: Any = None,
    implementation: Implementation | None = None,
) -> list[jax.Array]:
    """The cotangents of the leaves of those operands that are wanted, in the kernels of the op's gradient.

    What is `kept` may be of a larger call that these operands are a part of: their part of it is differentiated.

    Args:
      reference: `reference(operands, kept, cotangents)`, where no kernel serves the call.
    """
    call, operands = _call(op, form, config, implementation), form.operands
    with plain_settings(operands), jax.named_scope(op.name):
        found = None if choice.choose(call) is None else choice.choose_backward(call)
        if found is None:
            return reference(operands, kept, cotangents)
        in_kernels = functools.partial(_pull, call, *found, wanted)
        anywhere = found[1] or found[0].backend == "xla"
        return _on_platforms(in_kernels, reference, call.names, anywhere)(operands, kept, cotangents)


def has_kernel(op: Op[F], form: F, *, implementation: Implementation | None) -> bool:
    """Whether a kernel computes a call: one of the first implementation that is named."""
    with plain_settings(form.operands):
        return choice.has_kernel(_call(op, form, None, implementation))


def has_backward(op: Op[F], form: F, *, implementation: Implementation | None) -> bool:
    """Whether kernels compute a call and its gradient."""
    with plain_settings(form.operands):
        return choice.has_backward(_call(op, form, None, implementation))


def _all_have_backward(parts: Iterable[tuple[Op[Any], Form]], implementation: Implementation | None) -> bool:
    return all(has_backward(op, form, implementation=implementation) for op, form in parts)


def _call(op: Op[F], form: F, config: Any, implementation: Implementation | None) -> Call[F]:
    names = check_implementation(implementation)
    return Call(op=op, form=form.abstract(), config=config, names=names, target=targets.current())


def _run_whole(call: Call[F], *operands: Any, traced: dict[str, jax.Array] | None = None) -> Any:
    with as_one_step():
        return _run(operands, traced or {}, call=call, tables=installed(call.target.name))


@functools.partial(jax.jit, static_argnames=("call", "tables"))
def _run(operands: Operands, traced: dict[str, jax.Array], *, call: Call[F], tables: tuple[Table, ...]) -> Any:
    del tables  # a change of them asks for another trace
    call = call.replace(form=call.form.of(operands).abstract())
    with plain_settings(operands), jax.named_scope(call.op.name):
        if traced:  # kernels have their scalars built in
            if call.names and "xla" not in call.names:
                scalars = ", ".join(traced)
                raise NotImplementedError(
                    f"implementation={call.names} takes {scalars} as a number, not as an array"
                )
            return call.replace(form=call.form.replace(**traced)).reference(*operands)
        if is_explicit(operands) and call.names != ("xla",):
            layout, tree = _layout(call)
            part = functools.partial(_part, call, _compute)
            leaves = over_explicit(part, layout, jax.tree.leaves(operands), call.form, check_vma=True)
            return tree.unflatten(leaves)
        return _compute(call, operands)


def _compute(call: Call[F], operands: Operands) -> Any:
    """The results of operands that are on one device, or spread in ways that their types do not tell."""
    return _differentiable(call)(*varying_alike(operands))


def _compute_part(call: Call[F], operands: Operands) -> Any:
    """The results for the operands of one device, by the kernel that is best for its sizes; not differentiated."""
    found = choice.choose(call)
    return call.reference(*operands) if found is None else _run_kernel(call, *found, *operands)


def _run_kernel(call: Call[F], kernel: Kernel[F], interpret: bool, *operands: Any) -> Any:
    return kernel.call(call.form.of(operands), config=call.config, target=call.target, interpret=interpret)


def _layout(call: Call[F]) -> tuple[Layout, Any]:
    """How operands and results are split, and the tree that the results are."""
    tree: Any = jax.tree.structure(jax.eval_shape(call.reference, *call.form.operands))
    return Layout.of(call.sharding(), call.form.operands, tree.num_leaves), tree


def _part(
    call: Call[F],
    compute: Callable[[Call[F], Operands], Any],
    leaves: list[jax.Array],
    form: F,
    total: Total | None,
) -> list[jax.Array]:
    """The leaves of `compute(call, operands)` for the part of the operands that one device has."""
    if total is not None:
        linked = call.target.is_linked and call.names[:1] in ((), ("mosaic",))
        target = dataclasses.replace(call.target, has_peers=total.has_peers and linked)
        call, total = call.replace(target=target), dataclasses.replace(total, target=target)

    def program(leaves: list[jax.Array], form: F) -> Any:
        operands = jax.tree.unflatten(jax.tree.structure(form.operands), leaves)
        return compute(call.replace(form=form.of(operands).abstract()), operands)

    if total is None or not total.over:
        return jax.tree.leaves(program(leaves, form))
    contracted = call.op.contracted
    assert contracted is not None, f"the sharding of {call.op.name} has an axis that no result has"
    once = total.once(program)

    def of_part(form: F) -> Any:
        return once(jax.tree.leaves(form.operands), form.abstract())

    operands = jax.tree.unflatten(jax.tree.structure(form.operands), leaves)
    return jax.tree.leaves(contracted(of_part, total, form.of(operands)))


def _differentiable(call: Call[F]) -> Callable[..., Any]:
    """The function of operands that computes a call, with its derivatives."""
    forward = _forward(call)
    if forward is None:
        if call.op.derivative is None:
            return call.reference
        return with_derivative(call.reference, call.derivative)
    found = choice.choose_backward(call)
    if found is None:
        return with_derivative(forward, call.derivative)
    backward, interpret = found
    keeping = call.replace(form=call.form.replace(**backward.options))

    def keep(*operands: Any) -> tuple[Any, list[Any], int]:
        results = _differentiable(keeping)(*operands)
        # In a scan XLA has a kernel run twice if its result is both used and stored with those of the other steps,
        # unless something is in between.
        results = jax.lax.optimization_barrier(results)
        # Policies of `jax.checkpoint` keep by the op's name all that would have its kernel run again.
        results = jax.tree.map(functools.partial(checkpoint_name, name=call.op.name), results)
        leaves = jax.tree.leaves(results)
        kept = leaves[: backward.keeps] if backward.keeps >= 0 else leaves[backward.keeps :]
        return results if keeping.form == call.form else results[0], kept, len(leaves)

    def pull(operands: Operands, kept: list[Any], cotangents: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
        """The cotangents of all leaves of the wanted operands."""

        def in_reference(operands: Operands, kept: list[Any], cotangents: list[Any]) -> list[Any]:
            del kept

            def of_wanted(*some: Any) -> list[Any]:
                given = iter(some)
                every = (next(given) if w else x for x, w in zip(operands, wanted, strict=True))
                return jax.tree.leaves(call.derivative(*every))

            out, pullback = jax.vjp(of_wanted, *(x for x, w in zip(operands, wanted, strict=True) if w))
            given = cotangents[: len(out)]
            full = [jnp.zeros_like(y) if c is None else c for y, c in zip(out, given, strict=True)]
            return jax.tree.leaves(pullback(full))

        in_kernels = functools.partial(_pull, call, backward, interpret, wanted)
        anywhere = interpret or backward.backend == "xla"
        gradient = with_derivative(_on_platforms(in_kernels, in_reference, call.names, anywhere), in_reference)
        return gradient(operands, kept, cotangents)

    return with_derivative(forward, call.derivative, keep, pull)


def _pull(
    call: Call[F], backward: Backward[F], interpret: bool, wanted: tuple[bool, ...], *arrays: Any
) -> list[Any]:
    """The cotangents of all leaves of the wanted operands, by a gradient's kernels on each device.

    Args:
      *arrays: the operands, what is kept, the cotangents of the results.
    """
    operands, _, cotangents = arrays
    leaves, tree = jax.tree.flatten(arrays)  # type: tuple[list[jax.Array], Any]
    table = call.config if isinstance(call.config, Chooser) else None

    def part(leaves: list[jax.Array], form: F, _: Total | None = None) -> list[jax.Array]:
        operands, kept, cotangents = tree.unflatten(leaves)
        options = dict(wanted=wanted, config=table, target=call.target, interpret=interpret)
        given = backward.call(form.of(operands), kept, cotangents, **options)
        return jax.tree.leaves([x for x, w in zip(given, wanted, strict=True) if w])

    if not can_spread():
        return part(leaves, call.form)
    indices = itertools.count()
    owned = [[next(indices) for _ in jax.tree.leaves(x)] for x in operands]
    keeping = call.replace(form=call.form.of(operands).replace(**backward.options).abstract())
    layout = _layout(keeping)[0].backward(
        backward.keeps,
        [i for i, c in enumerate(cotangents) if c is not None],
        [i for own, w in zip(owned, wanted, strict=True) if w for i in own],
    )
    return spread(part, layout, leaves, call.form)


def _forward(call: Call[F]) -> Callable[..., Any] | None:
    """A kernel on each device, or the choice of it by platform; None where the reference computes the call."""
    found = choice.choose(call)
    if found is None:
        return None
    _, anywhere = found
    if not can_spread():
        return _on_platforms(functools.partial(_run_kernel, call, *found), call.reference, call.names, anywhere)
    layout, tree = _layout(call)
    part = functools.partial(_part, call, _compute_part)

    def on_devices(*operands: Any) -> Any:
        return tree.unflatten(spread(part, layout, jax.tree.leaves(operands), call.form))

    return _on_platforms(on_devices, call.reference, call.names, anywhere)


def _on_platforms(
    kernel: Callable[..., Any], reference: Callable[..., Any], names: tuple[Name, ...], anywhere: bool
) -> Callable[..., Any]:
    """`kernel` on CUDA devices; elsewhere too where it runs `anywhere`, else what the names have for there."""
    if names and anywhere:
        return kernel
    return on_cuda(kernel, names) if names and "xla" not in names else by_platform(kernel, reference)
