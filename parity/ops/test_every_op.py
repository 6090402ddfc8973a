"""Every op, from its case file: values in every dtype and derivatives, against float64 and torch."""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from pallas_models import ops
from parity.cases import BY_BACKEND, CALLS, FILES, OPS, Call, Case, Without, records
from parity.support.bounded import Bounded, disagreement
from parity.support.common import (
    KERNEL,
    KERNELS,
    MOSAIC,
    assert_close,
    by_device,
    float64,
    interprets_mosaic,
    normal,
)
from parity.support.tolerances import GRADIENT, SAME

# The calls that have a formula, in each dtype.
WITH_FORMULA = [call for call in CALLS if not isinstance(OPS[call.op.__name__].formula, Without)]
WITH_TORCH = [call for call in CALLS if not isinstance(OPS[call.op.__name__].torch, Without)]


def by_name(calls: Sequence[Call]) -> Any:
    return pytest.mark.parametrize("call", calls, ids=lambda call: call.name)


# Records of ops that no user calls, with the op in whose case their kernels are called.
PARTS = {"attention_matmul_layer_norm": "attention_post_norm_mlp"}


def test_every_op_has_a_case():
    """In the file of its name: every public function that has kernels, and every record."""
    functions = [f for name in ops.__all__ if inspect.isfunction(f := getattr(ops, name))]
    public = {f.__name__: f for f in functions if "implementation" in inspect.signature(f).parameters}
    assert public == {case.name: case.op for case in OPS.values()}
    for stem, cases in FILES.items():
        assert {case.op.__module__ for case in cases} == {f"{ops.__name__}.{stem}"}
    assert records().keys() - PARTS <= FILES.keys() and set(PARTS.values()) <= FILES.keys()


def test_nothing_in_a_case_is_left_to_a_default():
    assert all(field.default is field.default_factory is dataclasses.MISSING for field in dataclasses.fields(Case))
    for case in OPS.values():
        values = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
        empty = [name for name, value in values.items() if value in ((), {}, "", None, Without(""))]
        assert not empty, f"{case.name}: say why with Without(...)"
        assert all(call.op is case.op for calls in (case.calls, case.hopper_calls) for call in listed(calls))


def listed(calls: tuple[Call, ...] | Without) -> tuple[Call, ...]:
    return () if isinstance(calls, Without) else calls


def test_a_backend_has_calls_where_it_has_kernels():
    """Which of its kernels they call is for the test of the sanitizers."""
    for backend, calls in BY_BACKEND.items():
        stems = {call.op.__module__.rpartition(".")[2] for call in calls}
        with_kernels = {
            stem
            for stem, of_module in records().items()
            if any(kernel.backend == backend for record in of_module.values() for kernel in record.kernels)
        }
        if backend == "mosaic" and jax.__version_info__ < (0, 11):
            with_kernels.remove("rotary")
        assert {PARTS.get(stem, stem) for stem in with_kernels} - {"ring_attention"} <= stems


def in_float64(call: Call, given: Sequence[Any], moved: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a call with other arrays, of float64: dtypes among the options stay as given."""

    def chosen(argument: Any, wide: Any) -> Any:
        return wide if isinstance(argument, jax.Array) else argument

    return jax.tree.map(chosen, call.arguments(*given), call.arguments(*moved))


def expected(call: Call, dtype: str, given: Sequence[Any], moved: Sequence[Any]) -> list[Bounded]:
    """The results of the formula for arrays of float64."""
    with np.errstate(all="ignore"):  # a bound can be infinite
        out = OPS[call.op.__name__].formula(dtype=dtype, **in_float64(call, given, moved))
    return list(out) if isinstance(out, tuple) else [out]


def assert_within_bounds(call: Call, implementation: Any, dtype: str, size: int) -> tuple[jax.Array, ...]:
    """Asserts that the results of a program are as near float64 as they have to be; returns them."""
    arrays = call.arrays(dtype, size)
    out = jax.jit(functools.partial(call.outputs, implementation=implementation))(*arrays)
    outs = out if isinstance(out, tuple) else (out,)
    for found, wanted in zip(outs, expected(call, dtype, arrays, [float64(x) for x in arrays]), strict=True):
        message, _, _ = disagreement(found, wanted, str(found.dtype))
        assert message is None, message
    return outs


@pytest.mark.covering(1)
@by_name(WITH_FORMULA)
def test_values(call: Call, dtype):
    """Of a program, and in float32 step by step too."""
    outs = assert_within_bounds(call, KERNEL, dtype, 1)
    if dtype == "float32":
        eager = call.outputs(*call.arrays(), implementation=KERNEL)
        for out, found in zip(outs, jax.tree.leaves(eager), strict=True):
            assert_close(found, out, SAME)


OF_MOSAIC = [call for call in BY_BACKEND["mosaic"] if not isinstance(OPS[call.op.__name__].formula, Without)]


@interprets_mosaic
@by_name(OF_MOSAIC)
@pytest.mark.parametrize(
    "dtype, size", by_device(cpu=[("bfloat16", 1)], gpu=list(itertools.product(("float16", "bfloat16"), (1, 16))))
)
def test_values_of_mosaic(call: Call, dtype, size):
    assert_within_bounds(call, MOSAIC, dtype, size)


# Options that say how a kernel computes, and not what.
HOW = ("config", "algorithm", "compute_dtype")


def of_torch(reference: Any, call: Call, arrays: Sequence[Any]) -> Any:
    """The result of the reference in torch, for tensors."""
    arguments = {name: value for name, value in call.arguments(*arrays).items() if name not in HOW}
    return getattr(reference, OPS[call.op.__name__].torch)(**arguments)


@by_name([call for call in WITH_TORCH if call in WITH_FORMULA])
def test_formula_and_torch_agree(reference, call: Call):
    """Two references of an op, written apart from each other."""
    arrays = call.arrays()
    outs = of_torch(reference, call, [reference.tensor(x) for x in arrays])
    outs = outs if isinstance(outs, tuple) else (outs,)
    for wanted, out in zip(expected(call, "float32", arrays, [float64(x) for x in arrays]), outs, strict=True):
        assert_close(wanted.value, out.cpu().numpy(), 1e-12)


def slope(call: Call, arrays: Sequence[Any], tangents: Sequence[Any], weights: Sequence[np.ndarray]) -> float:
    """The derivative of the weighted sum of the results along a direction, by differences in float64."""
    step, floats = 1e-5, len(tangents)
    wide = [float64(x) for x in arrays]

    def at(t: float) -> float:
        moved = [x + t * float64(d) for x, d in zip(wide, tangents, strict=False)]
        outs = expected(call, "float32", arrays, [*moved, *wide[floats:]])
        return sum(float(np.vdot(out.value, w)) for out, w in zip(outs, weights, strict=True))

    return (at(step) - at(-step)) / (2 * step)


def torch_gradients(reference: Any, call: Call, arrays: Sequence[Any], weights: Sequence[np.ndarray]) -> list[Any]:
    """The gradients of the weighted sum of the results, by torch in float64."""
    import torch

    tensors = [reference.tensor(x) for x in arrays]
    leaves = [x.requires_grad_() for x in tensors[: call.floats]]
    outs = of_torch(reference, call, [*leaves, *tensors[call.floats :]])
    outs = outs if isinstance(outs, tuple) else (outs,)
    cotangents = [reference.tensor(w) for w in weights]
    return [x.cpu().numpy() for x in torch.autograd.grad(outs, leaves, cotangents)]


@by_name(CALLS)
def test_derivatives(request, call: Call):
    """Along a direction, as the reference in plain XLA; and gradients, as the formula and torch in float64."""
    arrays = call.arrays()
    floats, rest = arrays[: call.floats], arrays[call.floats :]
    rng = np.random.default_rng(62)
    tangents = tuple(normal(rng, *x.shape) for x in floats)
    outs = jax.eval_shape(functools.partial(call.outputs, implementation="xla"), *arrays)
    weights = jax.tree.map(lambda x: normal(rng, *x.shape), outs)
    weighed = [float64(w) for w in jax.tree.leaves(weights)]
    wanted, torch_wants = None, None
    if call in WITH_FORMULA:
        wanted = slope(call, arrays, tangents, weighed)
    if call in WITH_TORCH and importlib.util.find_spec("torch"):
        torch_wants = torch_gradients(request.getfixturevalue("reference"), call, arrays, weighed)

    def of(implementation: Any) -> Any:
        return lambda *floats: call.outputs(*floats, *rest, implementation=implementation)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation: Any) -> Any:
        _, tangent = jax.jvp(of(implementation), floats, tangents)
        return tangent, jax.vjp(of(implementation), *floats)[1](weights)

    plain = jax.jit(lambda *tangents: jax.jvp(of("xla"), floats, tangents)[1])(*tangents)
    for implementation in KERNELS:
        tangent, gradients = derivatives(implementation)
        for found, expected_tangent in zip(*map(jax.tree.leaves, (tangent, plain)), strict=True):
            assert_close(found, expected_tangent, 1e-5)
        gradients = [float64(g) for g in gradients]
        along = sum(np.vdot(g, float64(t)) for g, t in zip(gradients, tangents, strict=True))
        size = sum(
            np.linalg.norm(g) * np.linalg.norm(float64(t)) for g, t in zip(gradients, tangents, strict=True)
        )
        pushed = sum(np.vdot(w, float64(x)) for w, x in zip(weighed, jax.tree.leaves(tangent), strict=True))
        assert abs(along - pushed) <= 1e-5 * size
        if wanted is not None:
            assert abs(along - wanted) <= 1e-5 * size
        for gradient, wants in zip(gradients, torch_wants or gradients, strict=True):
            assert_close(gradient, wants, GRADIENT)
