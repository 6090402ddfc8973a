"""What this library touches of JAX's internals, each with its reason; a test fails where JAX moves it."""

import contextvars
import functools
import types
from typing import Any

from jax._src import deprecations
from jax._src.pallas import core

_lowers_ours = contextvars.ContextVar("lowers a kernel of this library", default=False)


@functools.cache
def quiet(params: type) -> type:
    """The class of `compiler_params` of our Triton kernels, made from Pallas's: JAX lowers them without a warning.

    From 0.11 on JAX warns, where it lowers a Triton kernel, that the backend is deprecated. Who calls an op cannot
    heed that, it may come long after the call, and `python -W error` would make it an error. JAX still warns of
    kernels of others. Pallas finds the rule that lowers a kernel by the class of its parameters.
    """
    rule = core.get_lowering_rule(params, "gpu")
    if rule is None:  # JAX 0.10, which does not warn
        return params
    from jax._src.pallas.triton import pallas_call_registration

    def lower(*args: Any, **options: Any) -> Any:
        token = _lowers_ours.set(True)
        try:
            return rule(*args, **options)
        finally:
            _lowers_ours.reset(token)

    vars(pallas_call_registration)["deprecations"] = types.SimpleNamespace(warn=_warn)
    ours = type("CompilerParams", (params,), {"__module__": __name__})
    core.register_lowering_rule(ours, lower, "gpu")
    return ours


def _warn(deprecation: str, message: str, stacklevel: int) -> None:
    if not _lowers_ours.get():
        deprecations.warn(deprecation, message, stacklevel=stacklevel + 1)
