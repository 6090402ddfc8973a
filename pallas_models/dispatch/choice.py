"""Which kernel, if any, computes a call, and which kernel its gradient."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from pallas_models import _jax
from pallas_models.dispatch.records import Backward, Call, Kernel
from pallas_models.kernels.forms import Form
from pallas_models.tuning import Chooser

F = TypeVar("F", bound=Form)
R = TypeVar("R", Kernel[Any], Backward[Any])

# The backend of each name of an implementation, and whether its interpreter runs the kernel.
_BACKENDS = {
    "mosaic": ("mosaic", False),
    "triton": ("triton", False),
    "interpret": ("triton", True),
    "mosaic_interpret": ("mosaic", True),
}
# Kernels count rows and columns in signed 32-bit integers, and the last tile reaches past the end.
_MOST_ROWS = 2**31 - 2**16


def choose(call: Call[F]) -> tuple[Kernel[F], bool] | None:
    """The kernel that computes a call, and whether an interpreter runs it; None where the reference does.

    Raises:
      TypeError: the config is of none of the kernels.
      NotImplementedError: nothing that is named serves the call; the message has the reason of each.
    """
    op, form, config, target = call.op, call.form, call.config, call.target
    by_hand = config is not None and not isinstance(config, Chooser)
    takers = [k for k in op.kernels if not by_hand or (k.config is not None and isinstance(config, k.config))]
    if not takers:
        expected = " or ".join(f"{k.config.__module__}.{k.config.__qualname__}" for k in op.kernels if k.config)
        raise TypeError(f"config is a {type(config).__name__}; expected {expected}, a tuning.Table or None")
    if call.names[:1] == ("xla",):  # before the reference is traced for the shapes of its results
        return None
    obstacle = _obstacle(form.options, form.operands, call.results())
    if obstacle == "":
        return None
    if not call.names:
        able = (k for k in takers if target.runs(k.architectures) and not k.refuses(form, target))
        best = None if obstacle else _best(able, lambda k: by_hand or k.preferred(form, target))
        return None if best is None else (best, False)

    def refusal(kernel: Kernel[F], interpret: bool) -> str | None:
        if not _is_there(kernel):
            return f"needs jax.experimental.pallas.triton, which JAX {jax.__version__} does not have"
        if kernel not in takers:
            takes = "no config" if kernel.config is None else f"a Config of {kernel.config.__module__}"
            return f"takes {takes}, not {type(config).__module__}.{type(config).__name__}"
        if not interpret and target.name and not target.runs(kernel.architectures):
            return f"needs {kernel.architectures.name}, not {target.name}"
        return obstacle or kernel.refuses(form, target)

    reasons = []
    for name in call.names:
        if name == "xla":
            return None
        backend, interpret = _BACKENDS[name]
        refusals = {kernel: refusal(kernel, interpret) for kernel in op.kernels if kernel.backend == backend}
        if serving := [kernel for kernel, reason in refusals.items() if reason is None]:
            fastest = (kernel for kernel in serving if by_hand or kernel.preferred(form, target))
            return next(fastest, serving[-1]), interpret
        reason = next(iter(refusals.values()), f"has no kernel for {op.name}")
        reasons.append(f"implementation={name!r} {reason}")
    raise NotImplementedError(f"{'; '.join(reasons)}; use another implementation, such as 'xla', or None")


def choose_backward(call: Call[F]) -> tuple[Backward[F], bool] | None:
    """The gradient for a call that a kernel serves, and whether an interpreter runs its kernels; or None."""
    form, target = call.form, call.target
    named = dict(_BACKENDS[name] for name in reversed(call.names) if name != "xla")

    def serves(backward: Backward[F]) -> bool:
        backend = backward.backend
        runs = target.runs(backward.architectures)
        if call.names:
            runs = backend in named and (named[backend] or not target.name or runs)
        return (backend == "xla" or runs) and not backward.refuses(form, target)

    best = _best(filter(serves, call.op.backward), lambda b: bool(call.names) or b.preferred(form, target))
    return None if best is None else (best, named.get(best.backend, False))


def _best(serving: Iterable[R], is_preferred: Callable[[R], bool]) -> R | None:
    """The first that is preferred of those that serve a call.

    Where JAX lacks its backend, it is another that serves the call, though it is slower.
    """
    other, is_missing = None, False
    for record in serving:
        if not _is_there(record):
            is_missing = is_missing or is_preferred(record)
        elif is_missing or is_preferred(record):
            return record
        else:
            other = record
        if is_missing and other:
            return other
    return None


def _is_there(record: Kernel[Any] | Backward[Any]) -> bool:
    """Whether JAX has the backend of a kernel or a gradient."""
    return record.backend != "triton" or _jax.has_triton()


def has_kernel(call: Call[F]) -> bool:
    """Whether a kernel computes a call: one of the first implementation that is named."""
    form, target = call.form, call.target
    if any(isinstance(value, jax.Array) for value in form.options.values()):  # kernels have scalars built in
        return False
    # Before the reference is traced for the shapes of its results.
    if _obstacle(form.options, form.operands) is not None:
        return False
    if all(kernel.refuses(form, target) for kernel in call.op.kernels):
        return False
    try:
        return choose(call.replace(names=call.names[:1])) is not None
    except NotImplementedError:
        return False


def has_backward(call: Call[F]) -> bool:
    """Whether kernels compute a call and its gradient."""
    if _obstacle(call.form.options, call.form.operands) is not None:  # kernels need sizes that are numbers
        return False
    found = choose_backward(call)
    return found is not None and found[0].backend != "xla" and choose(call) is not None


def _obstacle(options: dict[str, Any], *trees: Any) -> str | None:
    """Why no kernel serves such options and arrays; the empty string for axes of size 0, which have no grid."""
    leaves = jax.tree.leaves(trees)
    sizes = itertools.chain(options.values(), *(leaf.shape for leaf in leaves))
    if any(map(jax.export.is_symbolic_dim, sizes)):
        return "takes no symbolic sizes"
    if any(leaf.dtype.itemsize == 8 for leaf in leaves):
        return "takes no 64-bit operands"
    if min(leaf.size for leaf in leaves) == 0:
        return ""
    most = max(_most_rows(leaf) for leaf in leaves)
    if most > _MOST_ROWS:
        return f"takes arrays of up to {_MOST_ROWS} rows and as many columns, not {most}"
    return None


def _most_rows(leaf: Any) -> int:
    """Rows or columns of an array of which all axes but the last are one; its elements, where each is one byte.

    Offsets in an array are 64-bit integers where they have to be; Triton's are from 2**32 bytes on.
    """
    if leaf.ndim == 0 or leaf.dtype.itemsize == 1:
        return int(leaf.size)
    return int(max(leaf.shape[-1], leaf.size // leaf.shape[-1]))
