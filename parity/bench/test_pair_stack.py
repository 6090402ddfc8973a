"""The benchmark of the Pairformer's block: its torch programs compute what ours does, and its count of flop."""

import sys
import types

import jax
import numpy as np
import pytest

from bench.cases import pairformer
from parity.support.common import ON_GPU, assert_close
from parity.support.tolerances import CHAIN

torch = pytest.importorskip("torch", reason="torch is not installed: the programs are written in it")
from torch.nn import functional as F  # noqa: E402


def triangle_attention(q, k, v, bias, mask=None):
    """What cuEquivariance's documentation says of its own."""
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    return torch.where(mask, scores, -1e9).softmax(-1) @ v


def triangle_multiplicative_update(x, *, direction, mask, eps, **w):
    x = F.layer_norm(x, x.shape[-1:], w["norm_in_weight"], w["norm_in_bias"], eps)
    sides = F.linear(x, w["p_in_weight"]) * F.linear(x, w["g_in_weight"]).sigmoid() * mask[..., None]
    equation = {"outgoing": "bikd,bjkd->bijd", "incoming": "bkid,bkjd->bijd"}[direction]
    y = torch.einsum(equation, *sides.chunk(2, -1))
    y = F.layer_norm(y, y.shape[-1:], w["norm_out_weight"], w["norm_out_bias"], eps)
    return F.linear(y, w["p_out_weight"]) * F.linear(x, w["g_out_weight"]).sigmoid()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_torch_programs(monkeypatch, on_cpu, fused):
    kernels = types.SimpleNamespace(
        triangle_attention=triangle_attention, triangle_multiplicative_update=triangle_multiplicative_update
    )
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", kernels)
    monkeypatch.setitem(sys.modules, "cuequivariance_ops_torch", types.SimpleNamespace())
    inputs = pairformer.random_inputs(0, "fp32", 2, 5)
    tensors = pairformer.of_one_dtype(*(torch.tensor(np.asarray(x)) for x in inputs))
    function = pairformer.in_torch(fused=fused)
    assert_close(function(*tensors), pairformer.reference(*inputs), CHAIN)
    traced = torch.compile(function, backend="eager", fullgraph=True)
    assert_close(traced(*tensors), function(*tensors), CHAIN)


@pytest.mark.skipif(ON_GPU, reason="XLA counts the operations of a program for a CPU")
def test_flop():
    """Those of XLA's products of a block with all of its scores at once."""
    inputs = jax.eval_shape(lambda: pairformer.random_inputs(0, "fp32", 1, 16))
    found = jax.jit(pairformer.reference).lower(*inputs).cost_analysis()["flops"]
    assert pairformer.workload("fp32", (1, 16)).flop == pytest.approx(found, rel=0.05)
