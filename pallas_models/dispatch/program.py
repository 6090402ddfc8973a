"""The program of a call: its kernel or its reference, on each device that has a part of it, and its gradient.

compute               _part of each device, where the types of operands say how they are spread, else
  _differentiable       one function of all operands:
    _function             with its derivative, if there is one
      _forward              the kernel that `choice.choose` finds; spread over devices, `_part` by `_of_device`
      _keep                 forward, and what the gradient keeps: `_function` again, of a form that keeps it
      _differentiable_pull  the gradient's kernels, `gradient`; its own derivatives are the reference's
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_models._implementation import Name
from pallas_models.dispatch import choice
from pallas_models.dispatch.axes import CallAxes
from pallas_models.dispatch.derivatives import with_derivative
from pallas_models.dispatch.platforms import by_platform, on_cuda
from pallas_models.dispatch.records import Backward, Call, Kernel
from pallas_models.dispatch.sharding import Total, varying_alike
from pallas_models.dispatch.spreading import Joint, Leaves, Shared, can_spread, is_explicit
from pallas_models.dispatch.whole import whole
from pallas_models.kernels.forms import Form
from pallas_models.tuning import Chooser

F = TypeVar("F", bound=Form)
Operands = tuple[Any, ...]


def compute(call: Call[F], operands: Operands) -> Any:
    """The results of a call, with their derivatives."""
    if is_explicit(operands) and call.names != ("xla",):
        axes, tree = _axes(call)
        part = functools.partial(_part, call, _differentiable)
        shared = Shared(function=part, axes=axes, form=call.form, target=call.target)
        return tree.unflatten(shared.over_explicit(jax.tree.leaves(operands), check_vma=True))
    return _differentiable(call, operands)


def gradient(
    call: Call[F],
    found: tuple[Backward[F], bool],
    wanted: tuple[bool, ...],
    reference: Callable[[Operands, list[Any], list[Any]], Leaves],
) -> Callable[[Operands, list[Any], list[Any]], Leaves]:
    """A function of operands, kept arrays and cotangents: the cotangents of all leaves of the wanted operands.

    Args:
      found: the gradient's kernels, and whether an interpreter runs them.
      reference: the same function, for platforms that do not run them.
    """
    backward, interpret = found
    kernels = functools.partial(_pull, call, backward, interpret, wanted)
    return _on_platforms(kernels, reference, call.names, anywhere=interpret or backward.backend == "xla")


def _differentiable(call: Call[F], operands: Operands) -> Any:
    """The results, with their derivatives, of operands whose types do not say how they are spread."""
    return _function(call)(*varying_alike(operands))


def _of_device(call: Call[F], operands: Operands) -> Any:
    """The results for the operands of one device, by the kernel that is best for its sizes; not differentiated."""
    found = choice.choose(call)
    return call.reference(*operands) if found is None else _run_kernel(call, *found, *operands)


def _run_kernel(call: Call[F], kernel: Kernel[F], interpret: bool, *operands: Any) -> Any:
    return kernel.call(call.form.of(operands), config=call.config, target=call.target, interpret=interpret)


def _function(call: Call[F]) -> Callable[..., Any]:
    """The function of operands that computes a call, with its derivatives."""
    forward = _forward(call)
    if forward is None:
        return call.reference if call.op.derivative is None else with_derivative(call.reference, call.derivative)
    found = choice.choose_backward(call)
    if found is None:
        return with_derivative(forward, call.derivative)
    keep, pull = functools.partial(_keep, call, found[0]), functools.partial(_differentiable_pull, call, found)
    return with_derivative(forward, call.derivative, keep, pull)


def _forward(call: Call[F]) -> Callable[..., Any] | None:
    """A kernel on each device, or the choice of it by platform; None where the reference computes the call."""
    found = choice.choose(call)
    if found is None:
        return None
    _, anywhere = found
    if not can_spread():
        kernel = functools.partial(_run_kernel, call, *found)
        return _on_platforms(kernel, call.reference, call.names, anywhere=anywhere)
    axes, tree = _axes(call)
    part = functools.partial(_part, call, _of_device)
    shared = Shared(function=part, axes=axes, form=call.form, target=call.target)

    def on_devices(*operands: Any) -> Any:
        return tree.unflatten(shared(jax.tree.leaves(operands)))

    return _on_platforms(on_devices, call.reference, call.names, anywhere=anywhere)


def _keep(call: Call[F], backward: Backward[F], *operands: Any) -> tuple[Any, list[Any], int]:
    """The results of the forward pass, the results that the gradient keeps, and how many there are."""
    keeping = call.replace(form=backward.keeping(call.form))
    results = whole(_function(keeping), *operands)
    # In a scan XLA has a kernel run twice if its result is both used and stored with the results of other steps,
    # unless something is in between.
    results = jax.lax.optimization_barrier(results)
    # Policies of `jax.checkpoint` keep by the op's name all that would have its kernel run again.
    results = jax.tree.map(functools.partial(checkpoint_name, name=call.op.name), results)
    leaves = jax.tree.leaves(results)
    kept = leaves[: backward.keeps] if backward.keeps >= 0 else leaves[backward.keeps :]
    return results if keeping.form == call.form else results[0], kept, len(leaves)


def _differentiable_pull(
    call: Call[F],
    found: tuple[Backward[F], bool],
    operands: Operands,
    kept: list[Any],
    cotangents: list[Any],
    wanted: tuple[bool, ...],
) -> list[Any]:
    """The cotangents of all leaves of the wanted operands, with their derivatives."""
    reference = functools.partial(_pull_reference, call, wanted)
    return with_derivative(gradient(call, found, wanted, reference), reference)(operands, kept, cotangents)


def _pull_reference(
    call: Call[F], wanted: tuple[bool, ...], operands: Operands, kept: list[Any], cotangents: list[Any]
) -> list[Any]:
    """The cotangents of all leaves of the wanted operands, by the function that is differentiated."""

    def of_wanted(*some: Any) -> list[Any]:
        given = iter(some)
        every = (next(given) if w else x for x, w in zip(operands, wanted, strict=True))
        return jax.tree.leaves(call.derivative(*every))

    out, pullback = jax.vjp(of_wanted, *(x for x, w in zip(operands, wanted, strict=True) if w))
    given = cotangents[: len(out)]
    full = [jnp.zeros_like(y) if c is None else c for y, c in zip(out, given, strict=True)]
    return jax.tree.leaves(pullback(full))


def _pull(
    call: Call[F],
    backward: Backward[F],
    interpret: bool,
    wanted: tuple[bool, ...],
    operands: Operands,
    kept: list[Any],
    cotangents: list[Any],
) -> Leaves:
    """The cotangents of all leaves of the wanted operands, by a gradient's kernels on each device."""
    arrays = operands, kept, cotangents
    leaves, tree = jax.tree.flatten(arrays)  # type: tuple[Leaves, Any]
    table = call.config if isinstance(call.config, Chooser) else None

    def part(leaves: Leaves, form: F, _: Joint | None) -> Leaves:
        operands, kept, cotangents = tree.unflatten(leaves)
        options = dict(wanted=wanted, config=table, target=call.target, interpret=interpret)
        given = backward.call(form.of(operands), kept, cotangents, **options)
        return jax.tree.leaves([x for x, w in zip(given, wanted, strict=True) if w])

    if not can_spread():
        return part(leaves, call.form, None)
    indices = itertools.count()
    owned = [[next(indices) for _ in jax.tree.leaves(x)] for x in operands]
    keeping = call.replace(form=backward.keeping(call.form.of(operands).abstract()))
    axes = _axes(keeping)[0].backward(
        backward.keeps,
        [i for i, c in enumerate(cotangents) if c is not None],
        [i for own, w in zip(owned, wanted, strict=True) if w for i in own],
    )
    return Shared(function=part, axes=axes, form=call.form, target=call.target)(leaves)


def _axes(call: Call[F]) -> tuple[CallAxes, Any]:
    """The axes of operands and results, and the tree that the results are."""
    tree: Any = jax.tree.structure(call.results())
    return CallAxes.of(call.sharding(), call.form.operands, tree.num_leaves), tree


def _part(
    call: Call[F], function: Callable[[Call[F], Operands], Any], leaves: Leaves, form: F, joint: Joint | None
) -> Leaves:
    """The leaves of `function(call, operands)` for the part of the operands that one device has."""
    if joint is not None:
        linked = call.target.is_linked and call.names[:1] in ((), ("mosaic",))
        target = dataclasses.replace(call.target, has_peers=joint.has_peers and linked)
        call = call.replace(target=target)

    def program(leaves: Leaves, form: F) -> Any:
        operands = _operands(form, leaves)
        return function(call.replace(form=form.of(operands).abstract()), operands)

    if joint is None or not joint.over:
        return jax.tree.leaves(program(leaves, form))
    contracted = call.op.contracted
    assert contracted is not None, f"the sharding of {call.op.name} has an axis that no result has"
    once = joint.once(program)

    def of_part(form: F) -> Any:
        return once(jax.tree.leaves(form.operands), form.abstract())

    total = Total(over=joint.over, target=call.target)
    return jax.tree.leaves(contracted(of_part, total, form.of(_operands(form, leaves))))


def _operands(form: Form, leaves: Leaves) -> Operands:
    """Operands like the form's, with these leaves."""
    operands: Operands = jax.tree.unflatten(jax.tree.structure(form.operands), leaves)
    return operands


def _on_platforms(
    kernel: Callable[..., Any], reference: Callable[..., Any], names: tuple[Name, ...], *, anywhere: bool
) -> Callable[..., Any]:
    """`kernel` on CUDA devices; elsewhere too if it runs `anywhere`, else the reference if the names allow."""
    if names and anywhere:
        return kernel
    return on_cuda(kernel, names) if names and "xla" not in names else by_platform(kernel, reference)
