"""JAX's internals that this library touches: each piece with its reason and the versions that have it.

No other module of the library names `jax._src`. A test for each piece fails where a version of JAX moves it:
parity/dispatch/test_jax_internals.py.
"""

import contextlib
import functools
import importlib.util
import sys
import types
from typing import Any

import jax
from jax._src import config, sharding_impls
from jax._src.interpreters import batching
from jax._src.pallas import core
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import Mesh, PartitionSpec

MOSAIC_CALL = "mosaic_gpu_v2"  # the name of the calls that Mosaic's kernels are in a program


def since(*version: int) -> bool:
    """Whether JAX is of a version or newer."""
    return bool(jax.__version_info__ >= version)


@functools.cache
def has_triton() -> bool:
    """Whether JAX has Pallas's Triton backend. It deprecates it from 0.11 on, and says that it will be removed."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def quiet(params: type) -> type:
    """The class of `compiler_params` of our Triton kernels, made from Pallas's: JAX lowers them without a warning.

    From 0.11 on JAX warns, where it lowers a Triton kernel, that the backend is deprecated. Who calls an op cannot
    heed that, it may come long after the call, and `python -W error` would make it an error. Pallas finds the rule
    that lowers a kernel by the class of its parameters. Ours have a copy of the rule in which the function that
    warns does nothing: JAX's module stays as it is, and JAX still warns of kernels of others.
    """
    rule = core.get_lowering_rule(params, "gpu")
    if rule is None:  # JAX 0.10, which does not warn
        return params
    names = rule.__globals__ | {"deprecations": types.SimpleNamespace(warn=lambda *_, **__: None)}
    own = types.FunctionType(rule.__code__, names, rule.__name__, rule.__defaults__, rule.__closure__)
    own.__kwdefaults__ = rule.__kwdefaults__
    ours = type("CompilerParams", (params,), {"__module__": __name__})
    core.register_lowering_rule(ours, own, "gpu")
    return ours


@functools.cache
def find_triton_dialect() -> None:
    """Puts the module of Triton's dialect where MLIR looks for it, which halves the time to lower a Triton kernel.

    MLIR asks for `jaxlib.mlir.dialects.tt` for each operation of the dialect, and remembers only that it
    has found it. JAX has the module under another name, so that Python searches its folders for nothing, hundreds
    of times a kernel. Nothing happens where a version has a module of that name. In all versions from 0.10 on.
    """
    from jax._src.lib.triton import dialect

    name = "jaxlib.mlir.dialects.tt"
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        sys.modules[name] = dialect


def without_shard_map_types() -> contextlib.AbstractContextManager[None]:
    """A context that is traced without the types that `jax.shard_map` checks.

    The result of a kernel has no such type, and Pallas refuses a kernel where they are checked. Nothing public
    turns the check off for a part of a program. In all versions from 0.10 on.
    """
    unchecked: contextlib.AbstractContextManager[None] = config._check_vma(False)
    return unchecked


def is_lowered_alone(primitive: Primitive) -> None:
    """Says that JAX need not rewrite a program that is a parameter of a primitive, whose lowering lowers it alone.

    JAX asks this for each call. It says yes for programs that it calls high, from 0.12 on programs inside
    of a shard_map among them, and then wants a rule of the primitive that rewrites them. The method is in all
    versions from 0.10 on.
    """
    primitive.is_high = lambda *_, **__: False  # type: ignore[method-assign]


def batched(program: ClosedJaxpr, axis: Any, axes: tuple[int | None, ...]) -> tuple[ClosedJaxpr, Any]:
    """A program mapped over axes of its arguments, None where it is not, and the axes of its results.

    `jax.vmap` does not say which results are mapped. In all versions from 0.10 on.

    Args:
      axis: of what size, as a rule in `fancy_primitive_batchers` has it.
    """
    found: tuple[ClosedJaxpr, Any] = batching.batch_jaxpr2(program, axis, axes)
    return found


def partition_spec(sharding: Any, mesh: Mesh) -> PartitionSpec:
    """The axes of the mesh that an array is split over; none where it is split over a part of an axis.

    XLA's partitioner says it in a form of its own. JAX decodes that for `custom_partitioning` too, but fails on an
    array that is split over a part of an axis, in any of the ways below. XLA makes such a split of a reshape: of
    projections over 4 devices that are 2 heads, say. In all versions from 0.10 on.
    """
    try:
        spec: PartitionSpec = sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0]
    except (ValueError, LookupError, AssertionError, NotImplementedError):
        return PartitionSpec()
    return spec


def mosaic_interpreter_params() -> Any:
    """What selects the interpreter of Mosaic GPU for a kernel; private in JAX 0.10, public from 0.11 on."""
    from jax.experimental.pallas import mosaic_gpu

    if hasattr(mosaic_gpu, "InterpretGPUParams"):
        return mosaic_gpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def prepare_mosaic_module(context: Any, name: str) -> None:
    """Makes the module of a Mosaic kernel one that compiles faster, and once for equal kernels.

    Args:
      context: Mosaic's, as `plgpu.inline_mgpu` gives it.
      name: of the kernel.
    """
    if since(0, 11):
        _set_name(ir.InsertionPoint.current.block, name)
    find_equal_layouts_fast()
    context.scratch.host_init.append(functools.partial(_copy_words, context.scratch))


def _set_name(block: Any, name: str) -> None:
    """Names the module; else JAX, from 0.11 on, numbers modules as a process comes to lower them.

    By their numbers equal kernels would differ: XLA would compile each of them, and the persistent compilation
    cache would find a program only where a process has lowered the same kernels before it.
    """
    module = block.owner
    while module.parent is not None:
        module = module.parent
    module.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)


@functools.cache
def find_equal_layouts_fast() -> None:
    """Has Mosaic find the equal variables of a kernel's layouts without printing the kernel for each of them.

    JAX sorts the variables by their text, so that each run has the same order. The text names a value by its
    number in the kernel, and MLIR numbers all values of the kernel for each text: of the time to lower a block of
    the Pairformer with its gradient that is an eighth. The function here gives the same variables, in the order in
    which equations name them. It takes the place of JAX's for all Mosaic kernels of a process. In versions 0.10
    and 0.11; since 0.12 JAX prints nothing either.
    """
    from jax.experimental.mosaic.gpu import constraints

    if not since(0, 12):
        constraints.compute_transitively_equal_vars = _equal_variables


def _equal_variables(system: Any) -> dict[Any, list[Any]]:
    """Of each variable in an equation of two variables, all others that equal it."""
    from jax.experimental.mosaic.gpu import constraints as cs

    groups: dict[Any, list[Any]] = {}
    for constraint in system.constraints:
        match constraint:
            case cs.Equals(lhs=cs.Variable() as left, rhs=cs.Variable() as right):
                group, other = groups.setdefault(left, [left]), groups.setdefault(right, [right])
                if group is not other:
                    group += other
                    groups.update(dict.fromkeys(other, group))
    return {variable: [other for other in group if other != variable] for variable, group in groups.items()}


def _copy_words(scratch: Any, memory: Any) -> None:
    """Has the host hand over the descriptors of copies, 128 bytes each, in vectors of 64 bytes.

    JAX hands them over as an array of bytes, which LLVM loads and stores one by one; the time to optimise that
    grows with the square of their number. It was a quarter of the time to compile a product with five of them;
    with words of 64 bits it was a fifth of the time to compile a kernel with 24. In all versions from 0.10 on.
    """
    words = ir.Type.parse(f"!llvm.array<{scratch.next_offset // 64} x vector<8xi64>>")
    memory.owner.attributes["elem_type"] = ir.TypeAttr.get(words)
    (load,) = (use.owner for use in memory.uses if use.owner.name == "llvm.load")
    load.result.set_type(words)


def barrier_address(barrier: Any) -> jax.Array:
    """The address in shared memory of an array of barriers, in bytes, 64 bits for each: a scalar of int32.

    Inside a Mosaic kernel that is compiled. `plgpu.inline_mgpu` takes references to arrays and no barriers, at
    which what it inlines may want to arrive. In all versions from 0.11 on.
    """
    address: jax.Array = _barrier_address().bind(barrier)
    return address


@functools.cache
def _barrier_address() -> Primitive:
    from jax._src.pallas.mosaic_gpu import lowering
    from jax.experimental.mosaic import gpu

    def lower(_: Any, barrier: Any) -> Any:
        address = barrier.barrier_ref.base_address
        return gpu.utils.llvm.ptrtoint(ir.IntegerType.get_signless(32), address)

    primitive = Primitive("barrier_address")
    primitive.def_abstract_eval(lambda _: jax.core.ShapedArray((), jax.numpy.int32))
    lowering.register_lowering_rule(primitive, gpu.LoweringSemantics.Warpgroup)(lower)
    return primitive


def mosaic_call_options(result: ir.Value[Any]) -> dict[str, bytes | bool] | None:
    """The attributes of the call of a Mosaic kernel that gives a value in a lowered program; None of another one.

    `kernel_hash`, by which a process keeps each kernel that it has compiled, is among them, and `module`, the
    kernel. In all versions from 0.10 on.
    """
    call = result.owner
    if not isinstance(call, stablehlo.CustomCallOp) or call.call_target_name.value != MOSAIC_CALL:
        return None
    attributes: Any = call.attributes["mhlo.backend_config"]
    return {
        entry.name: entry.attr.value_bytes if isinstance(entry.attr, ir.StringAttr) else entry.attr.value
        for entry in attributes
    }
