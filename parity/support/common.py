"""Shared by all tests: where they run, random inputs, the error metric."""

import contextlib
import fcntl
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_models import _jax, minilm, ops
from pallas_models.target import Target

K = TypeVar("K", bound=Hashable)

ON_GPU = jax.default_backend() == "gpu"
KERNEL = "triton" if ON_GPU else "interpret"
ON_HOPPER = ON_GPU and jax.devices()[0].compute_capability == "9.0"
MOSAIC = "mosaic" if ON_HOPPER else "mosaic_interpret"
# Kernels of Mosaic for every generation run on Hopper GPUs here, and in the interpreter of JAX 0.11.
interprets_mosaic = pytest.mark.skipif(
    not ON_HOPPER and (ON_GPU or jax.__version_info__ < (0, 11)),
    reason="needs a Hopper GPU, or a CPU with JAX 0.11, whose interpreter reads past the end of an array",
)
KERNELS = [KERNEL, *([None] if ON_HOPPER else [])]  # elsewhere the choice of both is one of them, or plain XLA
IMPLEMENTATIONS = ["xla", *KERNELS]

# Of tests that stand in for a GPU where there is none: they lower kernels for CUDA and run nothing. The suite on a
# CPU has them, with the same result on every machine; on a GPU the kernels themselves run.
without_gpu = pytest.mark.skipif(ON_GPU, reason="only lowers, as the suite on a CPU does: here kernels run")

TRITON_CALL = "__gpu$xla.gpu.triton"  # the custom call that a Triton kernel is lowered to
MOSAIC_CALL = "mosaic_gpu_v2"
HOPPER = "NVIDIA H200", 132  # a device to lower for


@functools.cache
def _program(name: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(getattr(ops, name), **dict(options)))


class _Compiled:
    """The functions of `pallas_models.ops`, each call one program, kept for all calls of its kind.

    An eager call compiles every small operation around a kernel by itself, which takes most of a test's time.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            arrays = {key: x for key, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
            static = sorted(item for item in options.items() if item[0] not in arrays)
            return _program(name, tuple(static))(*args, **arrays)

        return call


compiled = _Compiled()


def together(calls: Mapping[K, tuple[Callable[..., Any], Sequence[Any]]]) -> dict[K, Any]:
    """The results of functions of their operands, as one program: what recurs in a program is compiled once.

    The gradients of eight blocks of the pair stack compile in 28 s where each in its own takes 103 s in all.
    """

    def program(operands: Sequence[Sequence[Any]]) -> list[Any]:
        return [function(*given) for (function, _), given in zip(calls.values(), operands, strict=True)]

    found = jax.jit(program)([operands for _, operands in calls.values()])
    return dict(zip(calls, found, strict=True))


@contextlib.contextmanager
def naming(case: str) -> Iterator[None]:
    """An assertion that fails inside says in which case."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"case: {case}")
        raise


def by_device(*, cpu: Sequence[Any], gpu: Sequence[Any]) -> Sequence[Any]:
    """The cases for this machine: few and small where kernels are interpreted, real ones on CUDA."""
    return gpu if ON_GPU else cpu


def once(name: str, make: Callable[[], str], folders: pytest.TempPathFactory) -> str:
    """`make()`, called by the first worker of a run that asks for `name`; the others wait for its result."""
    base = folders.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.once"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(make(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def array(x: Any, dtype: Any = None) -> jax.Array:
    """`jnp.asarray(x, dtype)` that compiles nothing: numpy converts."""
    return jax.device_put(np.asarray(x, dtype and jnp.dtype(dtype)))


# Arrays of more elements are drawn and compared on the GPU: the host takes seconds and gigabytes, in each worker.
_LARGE = 2**24


def normal(
    rng: np.random.Generator, *shape: int, dtype: str = "float32", scale: float = 1.0, shift: float = 0.0
) -> jax.Array:
    """Normal random numbers, rounded to `dtype`: both sides of a comparison start from these."""
    if ON_GPU and math.prod(shape) > _LARGE:
        return _normal(jax.random.key(rng.integers(2**31)), shape, dtype, scale, shift)
    return array(rng.normal(shift, scale, shape), dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float, shift: float) -> jax.Array:
    return (shift + scale * jax.random.normal(key, shape)).astype(dtype)


def random_mask(rng: np.random.Generator, batch: int, seq: int) -> jax.Array:
    """A padding mask with holes, at least one token a row, the last row's only token its last."""
    mask = rng.integers(0, 2, (batch, seq))
    mask[np.arange(batch), rng.integers(0, seq, batch)] = 1
    mask[-1] = 0
    mask[-1, -1] = 1
    return array(mask, "int32")


@functools.cache
def random_params(config: Any, dtype: str = "float32", init: Callable[..., Any] = minilm.init) -> dict[str, Any]:
    """Parameters of the size that real ones have, none of them the zeros and ones of `init`."""
    rng = np.random.default_rng(40)
    shapes = jax.eval_shape(functools.partial(init, config=config, dtype=dtype), jax.random.key(0))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_scale = path[-1].key == "scale"
        return normal(rng, *leaf.shape, dtype=str(leaf.dtype), scale=0.05, shift=1.0 if is_scale else 0.0)

    return jax.tree.map_with_path(draw, shapes)


def float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def kept(x: Any, mask: Any) -> np.ndarray:
    """The rows of x that belong to tokens, and so have a meaning, in float64."""
    return float64(x)[np.asarray(mask) == 1]


def relative_error(out: Any, expected: Any) -> float:
    """||out - expected|| / ||expected||, in float64."""
    out, expected = float64(out), float64(expected)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def assert_close(out: Any, expected: Any, tolerance: float) -> None:
    """Asserts that `out` is finite and near `expected`, as a whole and element by element."""
    out, expected = (x if isinstance(x, jax.Array) else np.asarray(x) for x in (out, expected))
    assert out.shape == expected.shape, f"shape {out.shape}, expected {expected.shape}"
    found = _compared(out, expected)
    assert found.all_expected, "the reference itself is not finite"
    assert not found.infinite, f"{found.infinite} of {out.size} values are not finite"
    assert found.error <= tolerance, f"relative error {found.error:.2e} is over {tolerance:.0e}"
    # The norm would hide one wrong element among a million.
    assert found.excess <= 8 * tolerance, _values_at(int(found.worst), out, expected)


def _values_at(index: int, out: Any, expected: Any) -> str:
    """Two values in words; only for a failure: to read one value of an array, JAX compiles a program."""
    place = tuple(map(int, np.unravel_index(index, out.shape)))
    return f"at {place}: {float(out[place]):.6g}, expected {float(expected[place]):.6g}"


class _Comparison(NamedTuple):
    """Of a result with what is expected."""

    all_expected: Any  # whether all that is expected is finite
    infinite: Any  # how many values of the result are not
    error: Any  # ||out - expected|| / ||expected||
    excess: Any  # the largest error of an element, in relation to its size and the root mean square of all
    worst: Any  # where that is, in the flat array


def _compared(out: Any, expected: Any) -> _Comparison:
    if ON_GPU and out.size > _LARGE:
        with jax.enable_x64(True):
            return jax.device_get(_on_device(out, expected))
    with np.errstate(all="ignore"):  # infinities and NaN are counted
        return _compare(np, np.asarray(out), np.asarray(expected))


def _compare(xp: Any, out: Any, expected: Any) -> _Comparison:
    """In float64, with numpy or jax.numpy."""
    out, expected = out.astype("float64").ravel(), expected.astype("float64").ravel()
    error, size = xp.abs(out - expected), xp.abs(expected)
    norm = xp.sqrt(xp.sum(xp.square(expected)))
    excess = error / (norm / math.sqrt(out.size) + size)
    worst = xp.argmax(excess)
    return _Comparison(
        all_expected=xp.all(xp.isfinite(expected)),
        infinite=xp.sum(~xp.isfinite(out)),
        error=xp.sqrt(xp.sum(xp.square(error))) / norm,
        excess=excess[worst],
        worst=worst,
    )


_on_device = jax.jit(functools.partial(_compare, jnp))


def assert_gradients_close(
    function: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    cotangent: jax.Array,
    expected: Sequence[Any],
    tolerance: float,
) -> None:
    """Asserts that the gradients of `function` at `arrays`, for one cotangent, are near `expected`."""

    @jax.jit
    def pull_back(cotangent: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(function, *arrays)
        return pullback(cotangent.astype(out.dtype))

    gradients = pull_back(cotangent, *arrays)
    assert len(gradients) == len(expected)
    for array, gradient, wanted in zip(arrays, gradients, expected, strict=True):
        assert gradient.dtype == array.dtype
        assert_close(gradient, wanted, tolerance)


def assert_named_close(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> None:
    """Asserts that arrays by name, such as gradients, are finite and each as a whole near those of `wanted`."""
    for name, x in found.items():
        assert np.all(np.isfinite(float64(x))), name
        error = relative_error(x, wanted[name])
        assert error <= tolerance, f"{name}: relative error {error:.2e} is over {tolerance:.1e}"


def assert_equal(a: Any, b: Any) -> None:
    """Asserts that two results are bit for bit the same, and not NaN."""
    if ON_GPU and a.size > _LARGE:
        assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
        differing, infinite = jnp.sum(a != b), jnp.sum(~jnp.isfinite(a))
        assert not differing and not infinite, f"{differing} of {a.size} values differ, {infinite} are not finite"
        return
    np.testing.assert_array_equal(float64(a), float64(b))
    assert np.all(np.isfinite(float64(a)))


def cosines(a: Any, b: Any) -> np.ndarray:
    """The cosine of each row of `a` with the same row of `b`."""
    a, b = float64(a), float64(b)
    return np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def kernel_calls(text: str) -> int:
    """How many kernels of ours a lowered program calls, of either backend; called twice, one counts twice."""
    parts = re.split(r"func\.func (?:public|private) @([\w.$-]+)", text)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))

    @functools.cache
    def count(name: str) -> int:
        called = re.findall(r"\bcall @([\w.$-]+)", bodies[name])
        own = sum(bodies[name].count(f"@{call}") for call in (TRITON_CALL, MOSAIC_CALL))
        return own + sum(count(other) for other in called)

    return count("main")


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a traced program, and of those that they call."""
    for equation in jaxpr.eqns:
        yield equation
        for called in core.jaxprs_in_params(equation.params):
            yield from equations(called)


def traces(kernel: str, function: Callable[..., Any], *arrays: Any) -> bool:
    """Whether a kernel of that name is in the program of `function`."""
    program = jax.make_jaxpr(function)(*arrays).jaxpr
    return any(equation.params.get("name") == kernel for equation in equations(program))


def cuda_device(kind: str, num_cores: int) -> contextlib.AbstractContextManager[Any]:
    """Lowering inside of this is for CUDA device `kind`, whatever this machine has."""
    device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """JAX as it will be when it no longer has Pallas's Triton backend, which it has deprecated."""
    name = "jax.experimental.pallas.triton"

    def forget() -> None:
        _jax.has_triton.cache_clear()
        jax.clear_caches()

    before = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = None  # type: ignore[assignment]  # as Python has it for a module that cannot be imported
    forget()
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)
        forget()


def lowered_calls(f: Callable[..., Any], *args: Any) -> int:
    """How many kernels of Mosaic GPU there are in `f` lowered for a Hopper GPU."""
    with cuda_device(*HOPPER):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count(f"@{MOSAIC_CALL}")


def gpu(num_cores: int = 132, shared_memory: int = 227 * 1024) -> Target:
    """A GPU as heuristics see it, like an H200 if nothing else is said."""
    return Target(name="NVIDIA H200", capability=(9, 0), num_cores=num_cores, shared_memory=shared_memory)
