"""Functions with kernels in them that devices share: under jit, under shard_map and on explicit meshes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AbstractDevice, AxisType, Mesh, NamedSharding

from pallas_models import _jax, exporting
from pallas_models.dispatch.axes import CallAxes, Split
from pallas_models.dispatch.device_program import on_device
from pallas_models.kernels.forms import Form
from pallas_models.target import Target

F = TypeVar("F", bound=Form)
Leaves = list[jax.Array]
Program = Callable[[Leaves, F], Any]  # a function of the leaves of operands, and of a call's form


def as_it_is(program: Program[F]) -> Program[F]:
    """A program that is lowered with all around it."""
    return program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Joint:
    """How a device computes a part that needs other devices.

    Attributes:
      over: the axes of the mesh that the op adds up over; empty where it asks other devices for something else.
      once: makes of a program, before which nothing is sent, one that is lowered once.
      has_peers: whether kernels may store to the memory of the other devices, if they are GPUs that can.
    """

    over: tuple[str, ...] = ()
    once: Callable[[Program[Any]], Program[Any]] = as_it_is
    has_peers: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shared(Generic[F]):
    """A function of the leaves of operands, each device computing its part.

    Attributes:
      function: `function(leaves, form, joint)` gives the leaves of the results. The form has the operands of the
        whole call, and the options of the part that the leaves are; `joint` is None where the part needs no other
        device.
      axes: of leaves and results.
      form: the whole call.
      target: the GPU of a device.
    """

    function: Callable[[Leaves, F, Joint | None], Leaves]
    axes: CallAxes
    form: F
    target: Target

    def __call__(self, leaves: Leaves) -> Leaves:
        """The results, where the types of the leaves do not say how they are spread.

        Under `jit` that is known only when XLA partitions the program; it then asks for the program of a part.
        Inside of a shard_map the leaves are a part.
        """
        if is_explicit(leaves):  # of an axis that vmap maps: others are split before
            return self.over_explicit(leaves, check_vma=False)
        is_part = bool(jax.sharding.get_abstract_mesh().manual_axes)

        @custom_vmap
        def call(*leaves: jax.Array) -> Leaves:
            if is_part:
                return on_device(lambda *leaves: self.function(list(leaves), self.form, None), list(leaves))
            return self._partitioned(leaves)

        @call.def_vmap
        def _(size: int, mapped: list[bool], *leaves: jax.Array) -> tuple[Leaves, list[bool]]:
            results = self._mapped(mapped, size)(list(leaves))
            return results, [True] * len(results)

        results: Leaves = call(*leaves)
        return results

    def over_explicit(self, leaves: Leaves, *, check_vma: bool) -> Leaves:
        """The results on an explicit mesh: a shard_map of the function.

        Args:
          check_vma: as in `jax.shard_map`, which has to be so where it is differentiated.
        """
        types = [jax.typeof(x).sharding for x in leaves]
        mesh = next(t.mesh for t in types if not t.mesh.empty)
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        arrays = ((axes, t.spec) for axes, t in zip(self.axes.operands, types, strict=True))
        split = self.axes.split(arrays, mesh.shape)
        into, out_of = self.axes.specs(split)
        part = jax.shard_map(
            lambda *leaves: self._part(leaves, split, mesh.shape),
            mesh=mesh,
            in_specs=into,
            out_specs=out_of,
            axis_names={a for a, kind in kinds if kind == AxisType.Explicit},
            check_vma=check_vma,
        )
        resharded = (
            jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, into, strict=True)
        )
        results: Leaves = part(*resharded)
        return results

    def _partitioned(self, leaves: Sequence[jax.Array]) -> Leaves:
        """The results as XLA's partitioner takes them."""
        lowered = _Lowered(self.target)
        axes = self.axes

        @custom_partitioning
        def call(*leaves: jax.Array) -> Leaves:
            return self.function(list(leaves), self.form, None)

        def partition(mesh: Mesh, operands: Any, results: Any) -> tuple[Any, Callable[..., Any], Any, Any]:
            arrays = zip((*axes.results, *axes.operands), (*results, *operands), strict=True)
            specs = ((names, _jax.partition_spec(x.sharding, mesh)) for names, x in arrays)
            split = axes.split(specs, mesh.shape)
            into, out_of = ([NamedSharding(mesh, spec) for spec in specs] for specs in axes.specs(split))
            once = functools.partial(lowered.once, mesh.devices.flat[0])

            def part(*leaves: jax.Array) -> Leaves:
                return self._part(leaves, split, mesh.shape, once, _has_peers(mesh))

            return mesh, part, out_of, tuple(into)

        def rule(_: Any, operands: Any, results: Any) -> SdyShardingRule:
            return axes.rule((x.shape for x in operands), (x.shape for x in results))

        call.def_partition(partition, decode_shardings=False, sharding_rule=rule)
        results: Leaves = call(*leaves)
        return results

    def _part(
        self,
        leaves: Sequence[jax.Array],
        split: Split,
        mesh: Mapping[str, int],
        once: Callable[[Program[F]], Program[F]] = as_it_is,
        has_peers: bool = False,
    ) -> Leaves:
        """The results of a device for its part of the leaves, the same for all devices that share its part."""
        form = self.axes.part(self.form, split, mesh)
        if contracted := self.axes.contracted(split):
            results = self.function(list(leaves), form, Joint(over=contracted, once=once, has_peers=has_peers))
        elif self.axes.asks_others(split):  # lowered apart it could not ask other devices
            results = self.function(list(leaves), form, Joint(has_peers=has_peers))
        else:
            results = once(lambda leaves, form: self.function(leaves, form, None))(list(leaves), form)
        lacking = self.axes.lacking(split)
        return [jax.lax.psum(x, axes) if axes else x for x, axes in zip(results, lacking, strict=True)]

    def _mapped(self, mapped: list[bool], size: int) -> Self:
        """The function under vmap: with one more axis in front of some leaves and of all results."""

        def of_all(leaves: Leaves, form: F, joint: Joint | None) -> Leaves:
            def of_one(*leaves: jax.Array) -> Leaves:
                return self.function(list(leaves), form, joint)

            if all(len(x) == 1 for x, m in zip(leaves, mapped, strict=True) if m):  # a device's part may be one
                parts = (x[0] if m else x for x, m in zip(leaves, mapped, strict=True))
                return [y[None] for y in of_one(*parts)]
            if joint is not None:  # a program that is lowered cannot be mapped
                joint = Joint(over=joint.over)
            results: Leaves = jax.vmap(of_one, [0 if m else None for m in mapped])(*leaves)
            return results

        return dataclasses.replace(self, function=of_all, axes=self.axes.mapped(mapped, size))


def can_spread() -> bool:
    """Whether a program that is traced now may run on several devices: in a shard_map, or on those that JAX sees.

    Then it is `Shared`. Programs for a machine with one device have nothing of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_elsewhere = mesh.empty and mesh.abstract_device is not None
    return bool(mesh.manual_axes) or (not is_elsewhere and jax.device_count() > 1)


def is_explicit(arrays: Any) -> bool:
    """Whether the type of an array says how it is spread over the axes of an explicit mesh."""
    return any(a is not None for x in jax.tree.leaves(arrays) for a in jax.typeof(x).sharding.spec)


def _has_peers(mesh: Mesh) -> bool:
    """Whether kernels get the addresses that outputs have on all devices of a mesh: up to 8, of one process."""
    in_order = [device.id for device in mesh.devices.flat] == list(range(mesh.size))
    alone = jax.process_count() == 1
    return _jax.since(0, 11) and len(mesh.shape) == 1 < mesh.size <= 8 and in_order and alone


class _Lowered:
    """The programs of the parts of a call, each lowered on its first call with leaves of some shapes.

    XLA asks for the program of a part at each place where a program has it, and a kernel takes half a second.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._programs = target, dict[Any, Any]()

    def once(self, device: jax.Device, program: Program[F]) -> Program[F]:
        """The program, lowered for a device of the mesh."""

        def call(leaves: Leaves, form: F) -> Any:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
            key = tuple((x.shape, x.dtype) for x in shapes), form
            if key not in self._programs:
                platform = "cuda" if device.platform == "gpu" else device.platform
                self._programs[key] = exporting.lower(
                    lambda leaves: program(leaves, form), (shapes,), platform, self._traced_for(device)
                )
            return self._programs[key].call(leaves)

        return call

    def _traced_for(self, device: jax.Device) -> AbstractDevice:
        """The target of the call, which may leave cores to others: an op inside of a kernel's call has it too."""
        if self._target.abstract_device is not None:
            return self._target.abstract_device
        cores = getattr(device, "core_count", None)
        return AbstractDevice(device_kind=device.device_kind, num_cores=cores, platform=device.platform)
