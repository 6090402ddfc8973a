"""The program of one device in a shard_map, traced without the types of arrays that shard_map checks."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from pallas_models import _jax
from pallas_models.dispatch.sharding import varying_alike


def on_device(function: Callable[..., list[jax.Array]], leaves: list[jax.Array]) -> list[jax.Array]:
    """`function(*leaves)`, which has kernels in it: Pallas has no types for the results of kernels."""
    leaves = varying_alike(leaves)
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    with _jax.without_shard_map_types():
        program = jax.make_jaxpr(function)(*plain)
    results: list[jax.Array] = _device_program.bind(*leaves, program=program)
    return results


def _evaluate(*args: Any, program: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(program)(*args)


def _types(*avals: Any, program: ClosedJaxpr) -> list[Any]:
    """The results vary over the axes that the first operand varies over, as all operands do."""
    like = avals[0]

    def of_result(aval: Any) -> Any:
        sharding = like.sharding.update(spec=PartitionSpec(*[None] * aval.ndim))
        return like.update(shape=aval.shape, dtype=aval.dtype, weak_type=aval.weak_type, sharding=sharding)

    return [of_result(aval) for aval in program.out_avals]


def _lower(context: mlir.LoweringRuleContext, *values: Any, program: ClosedJaxpr) -> Any:
    untyped = context.replace(avals_in=program.in_avals, avals_out=program.out_avals)
    with _jax.without_shard_map_types():
        return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(untyped, *values)


_device_program = Primitive("device_program")
_device_program.multiple_results = True
_device_program.def_impl(_evaluate)
_device_program.def_abstract_eval(_types)
_jax.is_lowered_alone(_device_program)
mlir.register_lowering(_device_program, _lower)
