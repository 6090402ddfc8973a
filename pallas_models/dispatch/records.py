"""An op as it states itself, and a call of it: data, from which the rest of dispatch decides."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Self, TypeVar

import jax

from pallas_models._implementation import Name
from pallas_models.dispatch.sharding import Sharding, Total
from pallas_models.kernels.forms import Form
from pallas_models.target import AMPERE_ON, Architectures, Target

F = TypeVar("F", bound=Form)


def never(form: Form, target: Target) -> None:
    """Refuses no call."""
    del form, target


def always(form: Form, target: Target) -> bool:
    """Prefers every call."""
    del form, target
    return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kernel(Generic[F]):
    """The kernel of one backend for an op.

    Attributes:
      backend: the part of Pallas that it is written in.
      architectures: the GPUs that it runs on.
      call: the kernel, called as `call(form, config=, target=, interpret=)`.
      config: the class of its configs; None if `config=` cannot set them.
      refuses: `refuses(form, target)` gives the reason why it does not serve a call; None where it does.
      preferred: `preferred(form, target)` says whether it is the fastest kernel for a call that it serves.
    """

    backend: Literal["mosaic", "triton"]
    architectures: Architectures
    call: Callable[..., Any]
    config: type | None
    refuses: Callable[[F, Target], str | None] = never
    preferred: Callable[[F, Target], bool] = always


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backward(Generic[F]):
    """A gradient of an op that is better than the gradient of its reference, for results that a kernel computed.

    Forward mode, and derivatives of the gradient, differentiate the reference all the same.

    Attributes:
      backend: of the gradient's kernels, which may be another than the forward kernel's; `"xla"` if it has none.
      architectures: the GPUs that its kernels run on.
      call: gives the cotangents of the operands, a sequence like them with anything for those not wanted. It is
        `call(form, kept, cotangents, wanted=, config=, target=, interpret=)`. `kept` are results of the forward
        pass; `cotangents` has one for each of its results, the first an array, any other None where it is zero or
        not a result of this call; `wanted` says of each operand whether its cotangent is used; `config` is a table
        to ask first or None.
      keeps: how many results of the forward pass are kept: so many of the first or, negative, of the last.
      options: the options with which the forward pass gives these results: `{"return_lse": True}`; or
        `options(form)`, which says so. It then gives a tuple, of which the first is the result of a call without
        them.
      refuses: `refuses(form, target)` gives the reason why it does not serve a call; None where it does.
      preferred: `preferred(form, target)` says whether it is the fastest gradient for a call that it serves.
    """

    backend: Literal["mosaic", "triton", "xla"]
    call: Callable[..., Any]
    architectures: Architectures = AMPERE_ON
    keeps: int = 0
    options: Mapping[str, Any] | Callable[[F], Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    refuses: Callable[[F, Target], str | None] = never
    preferred: Callable[[F, Target], bool] = always

    def keeping(self, form: F) -> F:
        """The call whose results are kept."""
        return form.replace(**(self.options(form) if callable(self.options) else self.options))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Others(Generic[F]):
    """Other ops that compute a call, where kernels serve some of them.

    Attributes:
      parts: `parts(form)` gives the ops that kernels have to serve, each with its form, for a form of shapes and
        dtypes; none where the call is not computed so.
      call: `call(form, names)` is the call made of them, which are given the implementations that `names` names.
    """

    parts: Callable[[F], Sequence[tuple["Op[Any]", Form]]]
    call: Callable[[F, tuple[Name, ...]], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op(Generic[F]):
    """Everything that `run` needs to know of an op.

    Attributes:
      name: the name of the public function.
      reference: the op in plain XLA, called as `reference(form)`; None for what an op `stands_for`, in XLA.
      kernels: in the order in which they are preferred.
      sharding: which axes can be split over devices; or `sharding(form)`, which says so. Gradients are split as
        the operands are.
      derivative: a function that is differentiated in place of the reference, with the same argument.
      backward: gradients to take in place of the reference's, of which the first counts that serves a call. Where
        implementations are named, its backend is one of theirs.
      contracted: `contracted(call, total, form)` is the op where an axis is split that no result has, with `call`
        like the reference and `total` adding up the results of devices.
      stands_for: `stands_for(form, names)` is the op made of other ops, which are given the implementations that
        `names` names. It is differentiated where a kernel serves the call and no gradient of `backward` does, and
        where no kernel does it runs in place of a reference, which it is with names of `("xla",)`.
      pays: `pays(form, target)` says whether a kernel is faster than the ops that the op `stands_for`. It is asked
        of whole calls where no implementation is named, and not again of the part of a call that a device has.
      maps: whether kernels are for calls that are mapped over (`vmap`), too; where not, and no implementation is
        named, these are the ops that the op `stands_for`.
      fewer: ops that it is made of in place of those that it `stands_for`, where kernels serve them.
      together: what an op that `stands_for` others is differentiated as, where kernels serve these and their
        gradients.
    """

    name: str
    kernels: tuple[Kernel[F], ...]
    sharding: Sharding | Callable[[F], Sharding]
    reference: Callable[[F], Any] | None = None
    stands_for: Callable[[F, tuple[Name, ...]], Any] | None = None
    pays: Callable[[F, Target], bool] = always
    maps: bool = True
    fewer: Others[F] | None = None
    together: Others[F] | None = None
    derivative: Callable[[F], Any] | None = None
    backward: tuple[Backward[F], ...] = ()
    contracted: Callable[[Callable[[F], Any], Total, F], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[F]):
    """A call of an op as dispatch has it.

    Attributes:
      form: the form of the call, with the shapes of its operands.
      config: a config of one of the kernels, a table to ask first, or None.
      names: the implementations that are named, in order of preference; none for the best there is.
      target: the GPU that it is for.
    """

    op: Op[F]
    form: F
    config: object
    names: tuple[Name, ...]
    target: Target

    def reference(self, *operands: Any) -> Any:
        """The results in plain XLA."""
        return _in_xla(self.op, self.form.of(operands))

    def results(self) -> Any:
        """The shapes and dtypes of the results."""
        operands, tree = jax.tree.flatten(self.form)
        wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return _results(self.op, tree, tuple(operands), wide)

    def derivative(self, *operands: Any) -> Any:
        """The results by the function that is differentiated."""
        if self.op.derivative is None:
            return self.reference(*operands)
        return self.op.derivative(self.form.of(operands))

    def sharding(self) -> Sharding:
        """The rule for a call of this form."""
        rule = self.op.sharding
        return rule if isinstance(rule, Sharding) else rule(self.form)

    def replace(self, **fields: Any) -> Self:
        """The same call with other values for some fields."""
        return dataclasses.replace(self, **fields)


def _in_xla(op: Op[F], form: F) -> Any:
    """The results of a call by the op's reference, or by the ops that it stands for."""
    if op.reference is not None:
        return op.reference(form)
    assert op.stands_for is not None, f"{op.name} has neither a reference nor ops that it stands for"
    return op.stands_for(form, ("xla",))


@functools.lru_cache(maxsize=4096)
def _results(op: Op[Any], tree: Any, operands: tuple[jax.ShapeDtypeStruct, ...], wide: bool) -> Any:
    """The shapes of the results of a form; calls that are alike, on any device, trace the reference once for them.

    That takes a third of the time to trace a call. What else JAX's settings change is no shape or dtype.
    """
    del wide
    form = tree.unflatten(operands)
    return jax.eval_shape(lambda *operands: _in_xla(op, form.of(operands)), *form.operands)
