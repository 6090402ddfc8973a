"""Calls of ops as records, which references and kernels take: a file for each op, by its name."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

# The operands of a form: arrays, or their shapes and dtypes.
A = TypeVar("A", bound=jax.Array | np.ndarray | jax.ShapeDtypeStruct)


@functools.cache
def _options(form: type["Form"]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(form) if field.name not in form.OPERANDS)


def _flattened(form: "Form") -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    return form.operands, tuple(form.options.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A call of an op: its operands by name, and its options.

    Each op has its own class of forms. References, kernels and gradients are given forms of arrays; refusals,
    preferences and sharding rules are given forms whose operands are `jax.ShapeDtypeStruct`s, which are hashable.

    Attributes:
      OPERANDS: the fields that are operands, in order: arrays, pytrees of arrays, or None for an absent operand.
        All other fields are options: hashable, or a scalar that is an array, as where it is traced, which only the
        reference takes.

    A form is a pytree of its operands, so that functions of forms can be under `jax.jit`.
    """

    OPERANDS: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_pytree_node(cls, _flattened, cls.made_of)

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands, in order."""
        return tuple(getattr(self, name) for name in self.OPERANDS)

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {name: getattr(self, name) for name in _options(type(self))}  # type: ignore[arg-type]

    @classmethod
    def made_of(cls, options: Iterable[tuple[str, Any]], operands: tuple[Any, ...]) -> Self:
        """The call of operands, in order, with options."""
        return cls(**dict(zip(cls.OPERANDS, operands, strict=True)), **dict(options))

    def of(self, operands: tuple[Any, ...]) -> Self:
        """The same call of other operands."""
        return self.replace(**dict(zip(self.OPERANDS, operands, strict=True)))

    def replace(self, **fields: Any) -> Self:
        """The same call with other values for some fields."""
        return dataclasses.replace(self, **fields)

    def abstract(self) -> Self:
        """The call with the shapes and dtypes of its operands in their places."""
        return self.of(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.operands))
