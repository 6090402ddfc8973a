"""A problem of tuning, which is a kernel and the shape it is built for, and choosers of its config."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

Config = TypeVar("Config")  # a kernel module's frozen dataclass of tile sizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Generic[Config]):
    """A kernel, the shape it is to be built for, and the configs that it could have.

    Attributes:
      backend: the kernel's, `"mosaic"` or `"triton"`.
      op: the kernel's name.
      shape: every size that the best config depends on, by name; an optional operand or feature that the call has,
        such as a residual, is a size of 1.
      bucketed: names of the sizes that may differ a little without another config becoming the best, such as the
        number of rows.
      dtype: of the operands.
      config: the class of the configs.
      heuristic: gives the config that is used where nothing was measured.
      candidates: gives the configs worth measuring.
      shared_memory: gives the bytes of shared memory that a CTA takes with a config; None where they are few.
    """

    backend: str
    op: str
    shape: Mapping[str, int]
    bucketed: tuple[str, ...]
    dtype: DTypeLike
    config: type[Config]
    heuristic: Callable[[], Config]
    candidates: Callable[[], Iterable[Config]]
    shared_memory: Callable[[Config], int] | None = None

    @property
    def key(self) -> tuple[str, str, str, tuple[tuple[str, int], ...]]:
        """Identifies the problem: op, backend, dtype and shape."""
        return self.op, self.backend, jnp.dtype(self.dtype).name, tuple(self.shape.items())

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.shape.items())
        return f"{self.backend} {self.op} ({sizes}) in {jnp.dtype(self.dtype).name}"


class Chooser(abc.ABC):
    """Chooses the config of a kernel, as a table does; an op takes one in place of a config."""

    @abc.abstractmethod
    def choose(self, problem: Problem[Config]) -> Config | None:
        """The config of a problem; None to leave it to the tables and the heuristic."""


class _Heuristic(Chooser):
    def choose(self, problem: Problem[Config]) -> Config:
        return problem.heuristic()


HEURISTIC = _Heuristic()
"""As an op's `config`: the choice of its heuristic, without regard to tables."""
