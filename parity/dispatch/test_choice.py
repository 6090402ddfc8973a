"""What it takes to choose what computes a call."""

import dataclasses
from typing import Any

import jax
import pytest

from pallas_models.dispatch.run import run
from pallas_models.kernels.forms.softmax import Form
from pallas_models.ops.softmax import _OP
from pallas_models.ops.softmax import reference as in_xla


@pytest.mark.parametrize("implementation", ["xla", ("xla", "triton")])
def test_a_reference_that_is_named_is_traced_once(implementation):
    """Ops that a fused op stands for name it, and only a kernel asks for the shapes of results before that."""
    traced = []

    def reference(form: Form[jax.Array]) -> jax.Array:
        traced.append(form)
        return in_xla(form)

    op = dataclasses.replace(_OP, reference=reference)

    def call(x: Any) -> Any:
        form = Form(x=x, where=None, scale=1.0, repeat=1, algorithm=None)
        return run(op, form, implementation=implementation)

    x = jax.ShapeDtypeStruct((8, 16), "float32")
    assert jax.eval_shape(call, x).shape == x.shape
    assert len(traced) == 1
