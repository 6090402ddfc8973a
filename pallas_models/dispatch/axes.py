"""The axes of the operands and results of one call, by name, and how the axes of a mesh split them."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Self, TypeVar

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms import Form

F = TypeVar("F", bound=Form)
Axes = tuple[str | None, ...]  # the name of each axis of an array; None for one that is not split
Split = Mapping[str, tuple[str, ...]]  # the axes of the mesh that each axis is split over


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CallAxes:
    """A `Sharding` for the arrays of one call.

    Attributes:
      operands: the axes of each leaf of the operands.
      results: the axes of each result.
      summed: the axes that a result without them is a sum over.
      sizes: in how many parts each axis can be split at most.
      divides: as in `Sharding`.
      over: as in `Sharding`.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    summed: frozenset[str]
    sizes: Mapping[str, int]
    divides: Mapping[str, tuple[str, ...]]
    over: Mapping[str, str]

    @classmethod
    def of(cls, sharding: Sharding, operands: Any, results: int) -> Self:
        """The axes of a call with so many results."""
        given, gives = (side.split(",") for side in sharding.equation.split("->"))
        leaves = jax.tree.leaves(operands, is_leaf=lambda x: x is None)
        sizes = dict(sharding.sizes)
        single = {name for name, size in sizes.items() if size == 1}
        named: list[Axes] = []
        for term, leaf in zip(given, leaves, strict=True):
            if leaf is None:
                continue
            axes = zip(_axes(term), leaf.shape, strict=True)
            # One of size 1 is broadcast or cannot be split; nor can one of a single part, which Shardy refuses.
            named.append(tuple(None if size == 1 or name in single else name for name, size in axes))
            for name, size in zip(named[-1], leaf.shape, strict=True):
                if name is not None:
                    sizes.setdefault(name, size)
        found = tuple(
            tuple(a if a in sizes and a not in single else None for a in _axes(term)) for term in gives[:results]
        )
        return cls(
            operands=tuple(named),
            results=found,
            summed=frozenset(a for axes in found for a in axes if a is not None),
            sizes=sizes,
            divides=sharding.divides,
            over=sharding.over,
        )

    def backward(self, keeps: int, cotangents: Iterable[int], wanted: Iterable[int]) -> Self:
        """The axes of the gradient, whose operands are the call's, the results kept and some cotangents.

        Args:
          keeps: how many of the first or, negative, of the last results are kept.
          cotangents: of which results.
          wanted: of which operands the cotangents are its results.
        """
        kept = self.results[:keeps] if keeps >= 0 else self.results[keeps:]
        return dataclasses.replace(
            self,
            operands=(*self.operands, *kept, *(self.results[i] for i in cotangents)),
            results=tuple(self.operands[i] for i in wanted),
        )

    def mapped(self, operands: Sequence[bool], size: int) -> Self:
        """The axes of the call under vmap, with one more axis in front of some operands and of all results."""
        name = f"mapped{len(self.sizes)}"
        return dataclasses.replace(
            self,
            operands=tuple((name, *axes) if m else axes for axes, m in zip(self.operands, operands, strict=True)),
            results=tuple((name, *axes) for axes in self.results),
            summed=self.summed | {name},
            sizes=dict(self.sizes) | {name: size},
        )

    def split(self, arrays: Iterable[tuple[Axes, PartitionSpec]], mesh: Mapping[str, int]) -> Split:
        """How the axes of arrays that are spread like these are split, where the axes of the mesh divide them.

        Where two arrays, or two axes, are spread differently, the first counts.
        """
        found: dict[str, tuple[str, ...]] = {}
        for axes, spec in arrays:
            for name, over in zip(axes, spec, strict=False):
                if name is None or name in found or over is None:
                    continue
                used = set(itertools.chain.from_iterable(found.values()))
                free = [a for a in ((over,) if isinstance(over, str) else over) if a not in used]
                while free and self.sizes[name] % math.prod(mesh[a] for a in free):
                    free.pop()
                if free:
                    found[name] = tuple(free)
        return found

    def part(self, form: F, split: Split, mesh: Mapping[str, int]) -> F:
        """The call with the options of a device's part."""
        options: dict[str, Any] = {}
        for name, divided in self.divides.items():
            count = math.prod(mesh[a] for a in split.get(name, ()))
            options |= {option: form.options[option] // count for option in divided}
        options |= {option: split[name] for name, option in self.over.items() if name in split}
        return form.replace(**options)

    def contracted(self, split: Split) -> tuple[str, ...]:
        """The axes of the mesh that axes are split over which no result has."""
        return _over(split, set(split) - self.summed)

    def asks_others(self, split: Split) -> bool:
        """Whether a device's part of the result needs the parts of other devices."""
        return not self.over.keys().isdisjoint(split)

    def lacking(self, split: Split) -> list[tuple[str, ...]]:
        """The axes of the mesh that each result is to be summed over."""
        return [_over(split, self.summed - set(axes)) for axes in self.results]

    def specs(self, split: Split) -> tuple[tuple[PartitionSpec, ...], list[PartitionSpec]]:
        """How operands and results are spread."""
        operands, results = (
            [PartitionSpec(*(split.get(name) if name else None for name in axes)) for axes in arrays]
            for arrays in (self.operands, self.results)
        )
        return tuple(operands), results

    def rule(self, shapes: Iterable[tuple[int, ...]], result_shapes: Iterable[tuple[int, ...]]) -> SdyShardingRule:
        """The axes as a rule for Shardy, which carries shardings from one operation to the next."""
        numbers = itertools.count()
        whole: list[str] = []
        sizes: dict[str, int] = {}

        def factors(name: str | None, size: int) -> str | CompoundFactor:
            if name is not None and size == self.sizes[name]:
                return name
            whole.append(f"whole{next(numbers)}")
            if name is None:
                return whole[-1]
            sizes.update({name: self.sizes[name], whole[-1]: size // self.sizes[name]})
            return CompoundFactor(name, whole[-1])

        operands, results = (
            tuple(ArrayMapping(*map(factors, *pair)) for pair in zip(arrays, given, strict=True))
            for arrays, given in ((self.operands, shapes), (self.results, result_shapes))
        )
        # Of an axis that is somewhere all of its factor, Shardy takes the size from there.
        plain = {dim for array in (*operands, *results) for dim in array if isinstance(dim, str)}
        given, kept = (
            {name for axes in arrays for name in axes if name} for arrays in (self.operands, self.results)
        )
        return SdyShardingRule(
            operands,
            results,
            reduction_factors=tuple(sorted(given - kept)),
            need_replication_factors=tuple(whole),
            **{name: size for name, size in sizes.items() if name not in plain},  # type: ignore[arg-type]
        )


def _axes(term: str) -> Axes:
    names = (token.strip("()").split()[0] for token in re.findall(r"\([^)]*\)|\w+", term))
    return tuple(name if name.islower() else None for name in names)


def _over(split: Split, names: Set[str | None]) -> tuple[str, ...]:
    """The axes of the mesh that the named axes are split over."""
    return tuple(a for name in split if name in names for a in split[name])
