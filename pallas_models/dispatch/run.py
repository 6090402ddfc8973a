"""Runs a call of an op, the one way into dispatch: by a kernel or by the op's reference."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from pallas_models import target as targets
from pallas_models._implementation import Implementation, Name, check_implementation
from pallas_models.dispatch import choice, program
from pallas_models.dispatch.derivatives import differentiated_as
from pallas_models.dispatch.records import Call, Op
from pallas_models.dispatch.settings import as_one_step, plain_settings
from pallas_models.kernels.forms import Form
from pallas_models.target import Target
from pallas_models.tuning import Table
from pallas_models.tuning.table import installed

F = TypeVar("F", bound=Form)
Operands = tuple[Any, ...]


def run(op: Op[F], form: F, *, config: Any = None, implementation: Implementation | None = None) -> Any:
    """Runs a kernel of an op, or its reference, or the ops that it stands for.

    Calls that are alike share one trace, and in a program one lowering.

    Args:
      form: the call, with arrays.
      config: a config of one of the kernels, a table to ask first, or None.
      implementation: as `pallas_models.ops` has it. None takes the first kernel that serves the call and is
        preferred, on CUDA devices from Ampere on, and elsewhere the reference or the ops that it stands for.

    Raises:
      ValueError: `implementation` is not one of the above.
      TypeError: `config` is of none of the kernels.
      NotImplementedError: nothing that `implementation` names serves the call: there is no such kernel, or an
        array is larger than it can index. Where the program is lowered: kernels for GPUs are named alone, and it
        is for another platform than CUDA.
    """
    names, target = check_implementation(implementation), targets.current()
    if op.stands_for is None:
        return _run_whole(op, form, config, names, target)
    return _run_or_stand_for(op, form, config, names, target)


def _run_or_stand_for(op: Op[F], form: F, config: Any, names: tuple[Name, ...], target: Target) -> Any:
    """Runs a kernel where one serves the call and pays, else the reference of the op or the ops it stands for."""
    operands, implementation = form.operands, names or None
    form = form.abstract()  # what is differentiated later holds no arrays of a trace that has ended

    def as_others(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: function(form.of(operands), names)

    def whole(*operands: Any) -> Any:
        return _run_whole(op, form.of(operands), config, names, target)

    others = as_others(functools.partial(_stand_for, op))
    if op.together is not None and _all_have_backward(op.together.parts(form), implementation):
        return differentiated_as(others, as_others(op.together.call))(*operands)
    if not has_kernel(op, form, implementation=implementation):
        return others(*operands) if op.reference is None else whole(*operands)
    if not names and not op.pays(form, target):
        return others(*operands)
    by_kernel = whole if names or op.maps else _mapped_as(whole, others)
    if has_backward(op, form, implementation=implementation):
        return by_kernel(*operands)
    return differentiated_as(by_kernel, others)(*operands)


def _stand_for(op: Op[F], form: F, names: tuple[Name, ...]) -> Any:
    """The ops that a call is made of: fewer where kernels serve them, else those that the op stands for."""
    assert op.stands_for is not None, f"{op.name} stands for no other ops"
    if op.fewer is not None:
        parts = op.fewer.parts(form.abstract())
        if parts and all(has_kernel(part, of, implementation=names or None) for part, of in parts):
            return op.fewer.call(form, names)
    return op.stands_for(form, names)


def _mapped_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; where it is mapped over, another that computes the same in its place."""
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def _(_: int, mapped: Any, *operands: Any) -> tuple[Any, Any]:
        results = jax.vmap(other, jax.tree.map(lambda m: 0 if m else None, mapped))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return call


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

    Arrays `kept` may be of a larger call that these operands are a part of: their part of it is differentiated.

    Args:
      reference: `reference(operands, kept, cotangents)`, where no kernel serves the call.
    """
    call, operands = _call(op, form, config, implementation), form.operands
    with plain_settings(operands), jax.named_scope(op.name):
        found = None if choice.choose(call) is None else choice.choose_backward(call)
        if found is None:
            return reference(operands, kept, cotangents)
        return program.gradient(call, found, wanted, reference)(operands, kept, cotangents)


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


def _run_whole(op: Op[F], form: F, config: Any, names: tuple[Name, ...], target: Target) -> Any:
    """Runs an op as one program, by its kernel or its reference."""
    options = form.options
    traced = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    for name in traced:
        del options[name]
    with as_one_step():
        return _run(
            form.operands,
            traced,
            op=op,
            kind=type(form),
            options=tuple(options.items()),  # a form would be hashed and compared in Python
            config=config,
            names=names,
            target=target,
            tables=installed(target.name),
        )


@functools.partial(jax.jit, static_argnames=("op", "kind", "options", "config", "names", "target", "tables"))
def _run(
    operands: Operands,
    traced: dict[str, jax.Array],
    *,
    op: Op[F],
    kind: type[F],
    options: tuple[tuple[str, Any], ...],
    config: Any,
    names: tuple[Name, ...],
    target: Target,
    tables: tuple[Table, ...],
) -> Any:
    del tables  # a change of them asks for another trace
    form = kind.made_of((*options, *traced.items()), operands)
    call = Call(op=op, form=form.abstract(), config=config, names=names, target=target)
    with plain_settings(operands), jax.named_scope(op.name):
        if not traced:
            return program.compute(call, operands)
        if names and "xla" not in names:  # kernels have their scalars built in
            scalars = ", ".join(traced)
            raise NotImplementedError(f"implementation={names} takes {scalars} as a number, not as an array")
        return call.reference(*operands)
