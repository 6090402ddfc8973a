"""A function that keeps its derivative where JAX takes the steps of a scan apart."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_models import _jax
from pallas_models.dispatch.tangents import jvp_by


def whole(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`. In the gradient of a scan, too, it is differentiated by its own rule.

    Before 0.12 JAX drops rules of `jax.custom_jvp` as it moves out of a scan what all steps share. A derivative
    of such a gradient, as a product with the Hessian is, would differentiate the kernels themselves.
    """
    if _jax.since(0, 12):
        return function(*arrays)
    leaves, tree = jax.tree.flatten(arrays)

    def of_leaves(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    traced, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), _whole.bind(*leaves, function=traced))


_whole = Primitive("whole")
_whole.multiple_results = True


def _evaluate(*args: Any, function: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(function)(*args)


def _jvp(primals: Any, tangents: Any, *, function: ClosedJaxpr) -> tuple[list[Any], list[Any]]:
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    return jvp_by(jaxpr_as_fun(function), primals, moving, [tangents[i] for i in moving])


def _batch(axis: Any, args: Any, axes: Any, *, function: ClosedJaxpr) -> tuple[list[Any], Any]:
    # Not by `jax.vmap`: a result that is not mapped must stay so, as it is where nothing is differentiated.
    mapped, out_axes = _jax.batched(function, axis, tuple(axes))
    return _whole.bind(*args, function=mapped), out_axes


_whole.def_impl(_evaluate)
_whole.def_effectful_abstract_eval(lambda *_, function: (function.out_avals, function.effects))  # an interpreter's
ad.primitive_jvps[_whole] = _jvp
batching.fancy_primitive_batchers[_whole] = _batch
mlir.register_lowering(_whole, mlir.lower_fun(_evaluate, multiple_results=True))
