"""Arrays that are spread over devices: every model under shard_map as it is by default, and on explicit meshes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from pallas_models import gpt2, minilm, ops, qwen3, trimul

assert len(jax.devices()) == 2
key, rng = jax.random.key(0), np.random.default_rng(0)
ids = jnp.asarray(rng.integers(0, 40, (4, 8)), jnp.int32)
pair = jnp.asarray(rng.normal(size=(4, 5, 5, 16)), jnp.float32)
x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 8), (8, 6)))
sizes = dict(vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=16)
bert, gpt = minilm.MiniLMConfig(**sizes), gpt2.GPT2Config(**sizes)
qwen = qwen3.Qwen3Config(**sizes, num_kv_heads=1, head_dim=16)
calls = {
    "softmax": (lambda _, x: ops.softmax(x), (), x),
    "matmul": (lambda w, x: ops.matmul(x, w), w, x),
    "minilm": (lambda p, i: minilm.embed(p, i, i * 0 + 1, config=bert), minilm.init(key, bert), ids),
    "gpt2": (lambda p, i: gpt2.logits(p, i, config=gpt), gpt2.init(key, gpt), ids),
    "qwen3": (lambda p, i: qwen3.logits(p, i, config=qwen), qwen3.init(key, qwen), ids),
    "trimul": (
        lambda p, x: trimul.trimul(p, x, direction="outgoing"),
        trimul.init(key, trimul.TriMulConfig(channels=16, hidden=16)),
        pair,
    ),
}
"""
DEFAULT_SHARD_MAP = """
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
for name, (call, params, data) in calls.items():
    spread = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    out, expected = jax.jit(spread)(params, data), call(params, data)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5, err_msg=name)
loss = lambda x: jnp.sum(jax.shard_map(ops.softmax, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x) ** 2)
np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(lambda x: jnp.sum(ops.softmax(x) ** 2))(x), atol=1e-6)
"""
EXPLICIT = """
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
expected = {name: call(params, data) for name, (call, params, data) in calls.items()}
with jax.set_mesh(mesh):
    for name, (call, params, data) in calls.items():
        spread = jax.device_put(data, P("d", *(None,) * (data.ndim - 1)))
        out = jax.jit(call)(params, spread)
        assert out.sharding.spec[0] == "d", name
        np.testing.assert_allclose(out, expected[name], rtol=2e-5, atol=2e-5, err_msg=name)
    try:
        jax.jit(lambda x: ops.softmax(x, implementation="interpret"))(jax.device_put(x, P("d", None)))
    except NotImplementedError as error:
        assert "takes no arrays of an explicit mesh" in str(error)
    else:
        raise AssertionError("a kernel took an array of an explicit mesh")
"""


@pytest.mark.parametrize("program", [DEFAULT_SHARD_MAP, EXPLICIT], ids=["shard_map", "explicit"])
def test_spread_over_two_devices(program):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", PROGRAM + program]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
