"""How an op is split over the devices of a mesh: one rule in einsum notation for every kind of mesh."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AxisType, NamedSharding, PartitionSpec

from pallas_models import _jax, exporting
from pallas_models import target as targets
from pallas_models.kernels.forms import Form
from pallas_models.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sharding:
    """Which axes of the operands and results of an op can be split over devices.

    Attributes:
      equation: `"m k, k n, N -> m n"`: the axes of each of the arrays, absent ones too, and of each result that
        there can be. An axis in lower case can be split; of one in capitals every device needs all. `(g D)` is an
        axis of g parts that can be split between them. Axes of one name are split alike. A result without an axis
        that another result has is the sum of what the devices have where that axis is split. Over an axis that
        no result has the op is summed as its `contracted` says.
      sizes: of each g as above.
      divides: for each g the options of a call that count it.
      over: for each axis of which a device's part of the result needs those of other devices: the option of a call
        that names the axes of the mesh that it is split over. The op asks the other devices for what it needs.
    """

    equation: str
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    divides: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    over: Mapping[str, str] = dataclasses.field(default_factory=dict)


Axes = tuple[str | None, ...]  # the name of each axis of an array; None for one that is not split
Split = Mapping[str, tuple[str, ...]]  # the axes of the mesh that each axis is split over
Program = Callable[[list[jax.Array], Form], Any]  # a function of the leaves of arrays, and of a call's form
Once = Callable[[Program], Program]  # what lowers a function once


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Total:
    """Adds up what the devices have.

    Attributes:
      over: the axes of the mesh; empty where each device's part is a result, and nothing is added up.
      once: for what is computed before.
      has_peers: whether kernels may store to the memory of the other devices, if they are GPUs that can.
      target: the GPU of a device's part.
    """

    over: tuple[str, ...] = ()
    once: Once = lambda function: function
    has_peers: bool = False
    target: Target = targets.ANY

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.over)


# `function(leaves, form, total)` gives the results. `total` is given where they need other devices. The form has
# the operands of the whole call, and the options of the part that the leaves are.
Function = Callable[[list[jax.Array], Form, Total | None], list[jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """A `Sharding` for the operands of one call.

    Attributes:
      operands: the axes of each leaf of the arrays.
      results: those of each result.
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
    def of(cls, sharding: Sharding, arrays: Any, results: int) -> Self:
        """That of a call with so many results."""
        given, gives = (side.split(",") for side in sharding.equation.split("->"))
        leaves = jax.tree.leaves(arrays, is_leaf=lambda x: x is None)
        sizes = dict(sharding.sizes)
        single = {name for name, size in sizes.items() if size == 1}
        operands = []
        for term, leaf in zip(given, leaves, strict=True):
            if leaf is None:
                continue
            axes = zip(_axes(term), leaf.shape, strict=True)
            # One of size 1 is broadcast or cannot be split; nor can one of a single part, which Shardy refuses.
            operands.append(tuple(None if size == 1 or name in single else name for name, size in axes))
            for name, size in zip(operands[-1], leaf.shape, strict=True):
                if name is not None:
                    sizes.setdefault(name, size)
        named = [
            tuple(a if a in sizes and a not in single else None for a in _axes(term)) for term in gives[:results]
        ]
        return cls(
            operands=tuple(operands),
            results=tuple(named),
            summed=frozenset(a for axes in named for a in axes if a is not None),
            sizes=sizes,
            divides=sharding.divides,
            over=sharding.over,
        )

    def backward(self, keeps: int, cotangents: Iterable[int], wanted: Iterable[int]) -> Self:
        """That of the gradient: of the operands, the results kept and some cotangents.

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
        """That of the call under vmap, with one more axis in front of some operands and of all results."""
        name = f"mapped{len(self.sizes)}"
        return dataclasses.replace(
            self,
            operands=tuple((name, *axes) if m else axes for axes, m in zip(self.operands, operands, strict=True)),
            results=tuple((name, *axes) for axes in self.results),
            summed=self.summed | {name},
            sizes=dict(self.sizes) | {name: size},
        )

    def split(self, arrays: Iterable[tuple[Axes, PartitionSpec]], mesh: Mapping[str, int]) -> Split:
        """How the axes of arrays that are spread like these are split, where those of the mesh divide them.

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

    def part(
        self,
        function: Function,
        leaves: Iterable[jax.Array],
        form: Form,
        split: Split,
        mesh: Mapping[str, int],
        once: Once = lambda function: function,
        has_peers: bool = False,
    ) -> list[jax.Array]:
        """What a device computes of its part of the leaves, the same as all devices that share its part."""
        options = form.options
        changed: dict[str, Any] = {}
        for name, divided in self.divides.items():
            count = math.prod(mesh[a] for a in split.get(name, ()))
            changed |= {option: options[option] // count for option in divided}
        changed |= {option: split[name] for name, option in self.over.items() if name in split}
        form = form.replace(**changed)

        def over(names: Iterable[str | None]) -> tuple[str, ...]:
            return tuple(a for name in split if name in set(names) for a in split[name])

        contracted = over(set(split) - self.summed)
        if contracted:
            results = function(list(leaves), form, Total(over=contracted, once=once, has_peers=has_peers))
        elif not self.over.keys().isdisjoint(split):  # lowered apart it could not ask other devices
            results = function(list(leaves), form, Total(has_peers=has_peers))
        else:
            results = once(lambda leaves, form: function(leaves, form, None))(list(leaves), form)
        lacking = (over(self.summed - set(axes)) for axes in self.results)
        return [jax.lax.psum(x, axes) if axes else x for x, axes in zip(results, lacking, strict=True)]

    def specs(self, split: Split) -> tuple[tuple[PartitionSpec, ...], list[PartitionSpec]]:
        """How operands and results are spread."""
        operands, results = (
            [PartitionSpec(*(split.get(name) if name else None for name in axes)) for axes in arrays]
            for arrays in (self.operands, self.results)
        )
        return tuple(operands), results

    def rule(self, shapes: Iterable[tuple[int, ...]], result_shapes: Iterable[tuple[int, ...]]) -> SdyShardingRule:
        """The same for Shardy, which carries shardings from one operation to the next."""
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


def spread(function: Function, layout: Layout, leaves: list[jax.Array], form: Form) -> list[jax.Array]:
    """`function(leaves, form, None)`, which has kernels in it, each device computing its part.

    Under `jit` how leaves are spread is known only when XLA partitions the program; it then asks for the program
    of a part. Inside of a shard_map the leaves are a part.
    """
    if is_explicit(leaves):  # of an axis that vmap maps: others are split before
        return over_explicit(function, layout, leaves, form, check_vma=False)
    apply = _on_device if jax.sharding.get_abstract_mesh().manual_axes else _partitioned

    @custom_vmap
    def call(*leaves: jax.Array) -> list[jax.Array]:
        return apply(function, layout, list(leaves), form)

    @call.def_vmap
    def _(size: int, mapped: list[bool], *leaves: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        def of_all(leaves: list[jax.Array], form: Form, total: Total | None) -> list[jax.Array]:
            def of_one(*leaves: jax.Array) -> list[jax.Array]:
                return function(list(leaves), form, total)

            if all(len(x) == 1 for x, m in zip(leaves, mapped, strict=True) if m):  # a device's part may be one
                parts = (x[0] if m else x for x, m in zip(leaves, mapped, strict=True))
                return [y[None] for y in of_one(*parts)]
            if total is not None:  # a program that is lowered cannot be mapped
                total = dataclasses.replace(total, once=lambda function: function, has_peers=False)
            return jax.vmap(of_one, [0 if m else None for m in mapped])(*leaves)

        results = spread(of_all, layout.mapped(mapped, size), list(leaves), form)
        return results, [True] * len(results)

    return call(*leaves)


def can_spread() -> bool:
    """Whether what is traced now may run on several devices: in a shard_map, or on those that JAX sees.

    Then it goes through `spread`. Programs for a machine with one device have nothing of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_elsewhere = mesh.empty and mesh.abstract_device is not None
    return bool(mesh.manual_axes) or (not is_elsewhere and jax.device_count() > 1)


def _partitioned(function: Function, layout: Layout, leaves: list[jax.Array], form: Form) -> list[jax.Array]:
    """The function as XLA's partitioner takes it."""

    programs: dict[Any, Any] = {}

    @custom_partitioning
    def call(*leaves: jax.Array) -> list[jax.Array]:
        return function(list(leaves), form, None)

    def partition(mesh: Any, operands: Any, results: Any) -> tuple[Any, Callable[..., Any], Any, Any]:
        arrays = zip((*layout.results, *layout.operands), (*results, *operands), strict=True)
        split = layout.split(((axes, _jax.partition_spec(x.sharding, mesh)) for axes, x in arrays), mesh.shape)
        into, out_of = ([NamedSharding(mesh, spec) for spec in specs] for specs in layout.specs(split))
        once = functools.partial(_lowered_once, programs, mesh.devices.flat[0])

        def part(*leaves: jax.Array) -> list[jax.Array]:
            return layout.part(function, leaves, form, split, mesh.shape, once, _has_peers(mesh))

        return mesh, part, out_of, tuple(into)

    def rule(_: Any, operands: Any, results: Any) -> SdyShardingRule:
        return layout.rule((x.shape for x in operands), (x.shape for x in results))

    call.def_partition(partition, decode_shardings=False, sharding_rule=rule)
    return call(*leaves)


def _has_peers(mesh: Any) -> bool:
    """Whether kernels get the addresses that outputs have on all devices of a mesh: up to 8, of one process."""
    in_order = [device.id for device in mesh.devices.flat] == list(range(mesh.size))
    alone = jax.process_count() == 1
    return _jax.since(0, 11) and len(mesh.shape) == 1 < mesh.size <= 8 and in_order and alone


def _lowered_once(programs: dict[Any, Any], device: Any, function: Program) -> Program:
    """The function, lowered for a device on its first call of a form with operands of some shapes.

    XLA asks for the program of a part at each place where a program has it, and a kernel takes half a second.
    """

    def call(leaves: list[jax.Array], form: Form) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        key = tuple((x.shape, x.dtype) for x in shapes), form
        if key not in programs:
            platform = "cuda" if device.platform == "gpu" else device.platform
            kind = AbstractDevice(
                device_kind=device.device_kind,
                num_cores=getattr(device, "core_count", None),
                platform=device.platform,
            )
            program = functools.partial(function, form=form)
            programs[key] = exporting.lower(program, (shapes,), platform, kind)
        return programs[key].call(leaves)

    return call


def varying_alike(arrays: Any) -> Any:
    """The arrays, all varying over the axes of a shard_map that one varies over, as a kernel's results will."""
    leaves, tree = jax.tree.flatten(arrays)
    over = [_varying(x) for x in leaves]
    every = frozenset().union(*over)
    leaves = [
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if own < every else x
        for x, own in zip(leaves, over, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _on_device(function: Function, layout: Layout, leaves: list[jax.Array], form: Form) -> list[jax.Array]:
    """The function, traced without the types that shard_map checks: Pallas has none for the results of kernels."""
    del layout
    leaves = varying_alike(leaves)
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    with _jax.without_shard_map_types():
        program = jax.make_jaxpr(lambda *leaves: function(list(leaves), form, None))(*plain)
    return _device_program.bind(*leaves, program=program)


_device_program = Primitive("device_program")
_device_program.multiple_results = True
_jax.is_lowered_alone(_device_program)


def _types(*avals: Any, program: ClosedJaxpr) -> list[Any]:
    like = avals[0]

    def of_result(aval: Any) -> Any:
        sharding = like.sharding.update(spec=PartitionSpec(*[None] * aval.ndim))
        return like.update(shape=aval.shape, dtype=aval.dtype, weak_type=aval.weak_type, sharding=sharding)

    return [of_result(aval) for aval in program.out_avals]


def _lower(context: mlir.LoweringRuleContext, *values: Any, program: ClosedJaxpr) -> Any:
    untyped = context.replace(avals_in=program.in_avals, avals_out=program.out_avals)
    with _jax.without_shard_map_types():
        return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(untyped, *values)


_device_program.def_impl(lambda *args, program: jaxpr_as_fun(program)(*args))
_device_program.def_abstract_eval(_types)
mlir.register_lowering(_device_program, _lower)


def is_explicit(arrays: Any) -> bool:
    """Whether the type of an array says how it is spread over the axes of an explicit mesh."""
    return any(a is not None for x in jax.tree.leaves(arrays) for a in jax.typeof(x).sharding.spec)


def over_explicit(
    function: Function, layout: Layout, leaves: list[jax.Array], form: Form, *, check_vma: bool
) -> list[jax.Array]:
    """The function on an explicit mesh: a shard_map of what each device computes.

    Args:
      check_vma: as in `jax.shard_map`, which has to be so where it is differentiated.
    """
    types = [jax.typeof(x).sharding for x in leaves]
    mesh = next(t.mesh for t in types if not t.mesh.empty)
    explicit = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    split = layout.split(((axes, t.spec) for axes, t in zip(layout.operands, types, strict=True)), mesh.shape)
    into, out_of = layout.specs(split)
    part = jax.shard_map(
        lambda *leaves: layout.part(function, leaves, form, split, mesh.shape),
        mesh=mesh,
        in_specs=into,
        out_specs=out_of,
        axis_names=explicit,
        check_vma=check_vma,
    )
    return part(
        *(jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, into, strict=True))
    )
