"""What is tuned: a kernel that is about to be built for a shape, and whoever chooses its config."""

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
      backend: whose kernel it is, `"mosaic"` or `"triton"`.
      op: the kernel's name.
      shape: every size that the best config depends on, by name; 1 for what is there and need not be.
      bucketed: the names of those sizes in whose neighbourhood a config stays good, such as the number of rows.
      dtype: of the operands.
      config: the class of the configs.
      heuristic: the config that is taken where nothing was measured.
      candidates: the configs worth measuring.
      shared_memory: the bytes of shared memory that a config takes in a program; None where that is few.
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
        """What tells one problem from another."""
        return self.op, self.backend, jnp.dtype(self.dtype).name, tuple(self.shape.items())

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.shape.items())
        return f"{self.backend} {self.op} ({sizes}) in {jnp.dtype(self.dtype).name}"


class Chooser(abc.ABC):
    """What an op takes for its `config` in place of one: something that chooses it, such as a table."""

    @abc.abstractmethod
    def choose(self, problem: Problem[Config]) -> Config | None:
        """The config of a problem; None to leave it to the tables and the heuristic."""


class _Heuristic(Chooser):
    def choose(self, problem: Problem[Config]) -> Config:
        return problem.heuristic()


HEURISTIC = _Heuristic()
"""As an op's `config`: what its heuristic chooses, whatever tables there are."""
