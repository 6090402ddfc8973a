"""What it takes to choose what computes a call."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

from pallas_models.dispatch.run import run
from pallas_models.kernels.forms.softmax import Form
from pallas_models.ops.softmax import _OP
from pallas_models.ops.softmax import reference as in_xla
from parity.support.common import HOPPER, cuda_device


@pytest.fixture
def counted() -> tuple[Any, list[Form[jax.Array]]]:
    """`call(x, implementation)` of an op of its own, and the forms that its reference was traced for."""
    traced: list[Form[jax.Array]] = []

    def reference(form: Form[jax.Array]) -> jax.Array:
        traced.append(form)
        return in_xla(form)

    op = dataclasses.replace(_OP, reference=reference)

    def call(x: Any, implementation: Any) -> Any:
        form = Form(x=x, where=None, scale=1.0, repeat=1, algorithm=None)
        return run(op, form, implementation=implementation)

    return call, traced


@pytest.mark.parametrize("implementation", ["xla", ("xla", "triton")])
def test_a_reference_that_is_named_is_traced_once(counted, implementation):
    """Ops that a fused op stands for name it, and only a kernel asks for the shapes of results before that."""
    call, traced = counted
    x = jax.ShapeDtypeStruct((8, 16), "float32")
    assert jax.eval_shape(functools.partial(call, implementation=implementation), x).shape == x.shape
    assert len(traced) == 1


def test_a_reference_is_traced_once_for_the_shapes_of_results(counted):
    """For calls that are alike, whatever GPU they are for."""
    call, traced = counted
    for rows, times in ((8, 1), (16, 2)):
        x = jax.ShapeDtypeStruct((rows, 16), "float32")
        for device in (HOPPER, ("NVIDIA A100-SXM4-80GB", 108)):
            with cuda_device(*device):
                out = jax.eval_shape(functools.partial(call, implementation="triton"), x)
            assert out.shape == x.shape and len(traced) == times
