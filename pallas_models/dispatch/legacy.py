"""Ops whose calls are not forms yet: arrays in order and options by name. It goes when there are none."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax

from pallas_models.dispatch import run as _run
from pallas_models.dispatch.records import Backward, Kernel
from pallas_models.dispatch.records import Op as _Op
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms import Form


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Untyped(Form):
    arrays: tuple[Any, ...]
    given: tuple[tuple[str, Any], ...]

    def __hash__(self) -> int:
        leaves, tree = jax.tree.flatten(self.arrays)
        return hash((tuple(leaves), tree, self.given))

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.arrays

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.given)

    def of(self, operands: tuple[Any, ...]) -> Self:
        return dataclasses.replace(self, arrays=tuple(operands))

    OPERANDS = ("arrays",)

    def replace(self, **fields: Any) -> Self:
        if "arrays" in fields:
            return dataclasses.replace(
                self,
                arrays=(),
                given=tuple((self.options | {k: v for k, v in fields.items() if k != "arrays"}).items()),
            )
        return dataclasses.replace(self, given=tuple((self.options | fields).items()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op:
    name: str
    reference: Callable[..., Any]
    kernels: tuple[Kernel[Any], ...]
    sharding: Sharding | Callable[..., Sharding]
    derivative: Callable[..., Any] | None = None
    backward: tuple[Backward[Any], ...] = ()
    contracted: Callable[..., Any] | None = None


def _given(function: Any) -> Any:
    return lambda form, *_, **runs: function(*form.operands, **form.options, **runs)


def _asked(function: Any) -> Any:
    if function.__module__ == "pallas_models.dispatch.records":
        return function
    return lambda form, target: function(*form.operands, **form.options)


def _pulled(function: Any) -> Any:
    return lambda form, kept, cotangents, **runs: function(
        *form.operands, *kept, *cotangents, **form.options, **runs
    )


def _contracted(function: Any) -> Any:
    def contracted(call: Any, total: Any, form: _Untyped) -> Any:
        def plain(*arrays: Any, **options: Any) -> Any:
            return call(_Untyped(arrays=arrays, given=tuple(options.items())))

        return function(plain, total, *form.operands, **form.options)

    return contracted


@functools.cache
def typed(op: Op) -> _Op[Any]:
    def record(r: Any, call: Any) -> Any:
        return dataclasses.replace(r, call=call(r.call), refuses=_asked(r.refuses), preferred=_asked(r.preferred))

    return _Op(
        name=op.name,
        reference=_given(op.reference),
        kernels=tuple(record(k, _given) for k in op.kernels),
        sharding=op.sharding if isinstance(op.sharding, Sharding) else _given(op.sharding),
        derivative=op.derivative and _given(op.derivative),
        backward=tuple(record(b, _pulled) for b in op.backward),
        contracted=op.contracted and _contracted(op.contracted),
    )


def run(op: Any, *arrays: Any, config: Any = None, implementation: Any = None, **static: Any) -> Any:
    form = _Untyped(arrays=arrays, given=tuple(static.items()))
    return _run.run(typed(op), form, config=config, implementation=implementation)


def run_backward(
    op: Any,
    arrays: Any,
    kept: Any,
    cotangents: Any,
    wanted: Any,
    reference: Any,
    *,
    config: Any = None,
    implementation: Any = None,
    **static: Any,
) -> Any:
    form = _Untyped(arrays=arrays, given=tuple(static.items()))
    runs = dict(config=config, implementation=implementation)
    return _run.run_backward(typed(op), form, kept, cotangents, wanted, reference, **runs)


def has_backward(op: Any, *arrays: Any, implementation: Any, **static: Any) -> bool:
    form = _Untyped(arrays=arrays, given=tuple(static.items()))
    return _run.has_backward(typed(op), form, implementation=implementation)


def serves(op: Any, *arrays: Any, implementation: Any, **static: Any) -> bool:
    form = _Untyped(arrays=arrays, given=tuple(static.items()))
    return _run.has_kernel(typed(op), form, implementation=implementation)
