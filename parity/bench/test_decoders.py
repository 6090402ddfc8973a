"""The GPT-2 and Qwen3 benchmarks: everybody computes the same block, at small sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.cases import gpt2, qwen3
from bench.measuring import gradients
from pallas_models.gpt2 import GPT2Config
from pallas_models.qwen3 import Qwen3Config
from parity.support.common import KERNEL, assert_close

MODULES = {
    gpt2: GPT2Config(hidden_size=64, num_heads=2, intermediate_size=96),
    qwen3: Qwen3Config(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96),
}


@pytest.fixture(params=MODULES, ids=lambda module: module.__name__)
def module(request, monkeypatch):
    """The benchmark with a small model."""
    monkeypatch.setattr(request.param, "CONFIG", MODULES[request.param])
    return request.param


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype, mode", [*(("fp32", mode) for mode in gradients.MODES), ("bf16", "forward")])
def test_contenders_agree(module, dtype, mode):
    torch = pytest.importorskip("torch")
    workload = gradients.of(module.workload(dtype, (2, 16)), dtype, mode)
    inputs = workload.inputs(0)
    expected = jax.tree.leaves(workload.reference(*inputs))
    assert {x.dtype for x in expected} == {jnp.dtype("float32")} and (len(expected) == 1) == (mode == "forward")
    checked = set()
    for contender in workload.contenders:
        if contender.skip or "cudnn" in contender.name:
            continue
        function = contender.load()
        if contender.in_torch:
            given = contender.prepared(tuple(torch.from_dlpack(x) for x in inputs))
            out = contender.around(function)(*given) if contender.around else function(*given)
            found = [x.float().detach().cpu().numpy() for x in jax.tree.leaves(out)]
        elif contender.gpu and KERNEL != "triton":
            continue
        else:
            found = jax.tree.leaves(jax.jit(function)(*contender.prepared(inputs)))
        for x, wanted in zip(found, expected, strict=True):
            assert_close(x, wanted, workload.limit)
        checked.add(contender.family)
    assert "torch" in checked


@pytest.mark.usefixtures("on_cpu")
def test_what_xla_is_given_computes_the_layer(monkeypatch):
    """Qwen3's only contender in XLA has cuDNN's attention, which no CPU has."""
    monkeypatch.setattr(qwen3, "CONFIG", MODULES[qwen3])
    inputs = qwen3.random_inputs(1, "fp32", 2, 16)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    function = functools.partial(qwen3.plain, attend=attend)
    assert_close(jax.jit(function)(*inputs), qwen3.reference(*inputs), 1e-5)


def test_operations_are_counted_once():
    # Microseconds at 790 TFLOP/s.
    floors = [gpt2.workload("bf16", shape).flop / 790e6 for shape in gpt2.BENCHMARK.shapes]
    np.testing.assert_allclose(floors, [2.3, 20, 163, 652], rtol=0.03)
    case = qwen3.workload("bf16", (8, 2048))
    np.testing.assert_allclose(case.flop, 2 * 16384 * 192_937_984 + 4 * 8 * 2048**2 / 2 * 4096)
