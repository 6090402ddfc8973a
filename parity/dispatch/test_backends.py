"""What each backend needs of JAX: one that is absent is missed by its own kernels only."""

import os
import pkgutil
import subprocess
import sys

import pytest

import pallas_models
from parity import ROOT

WITHOUT_TRITON = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("jax.experimental.pallas.triton") or name.startswith("jax._src.pallas.triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
IMPORTS = """
import pallas_models, weights
for package in (pallas_models, weights):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
XLA = """
import jax, jax.numpy as jnp
from pallas_models import ops
x = jnp.ones((8, 64), jnp.bfloat16)
jax.jit(lambda x: ops.matmul(x, x, transpose_w=True, implementation="xla")).lower(x).compile()

"""
MOSAIC = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from pallas_models import ops
device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    f = jax.jit(lambda x: ops.matmul(x, x, implementation="mosaic"))
    text = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
assert "mosaic_gpu" in text
"""
INTERPRETER = """
import jax, jax.numpy as jnp, numpy as np
from pallas_models import ops
x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 128)), jnp.bfloat16)
out = ops.matmul(x, x, implementation="mosaic_interpret")
expected = ops.matmul(x, x, implementation="xla")
np.testing.assert_allclose(out.astype("float32"), expected.astype("float32"), rtol=2e-2, atol=2e-2)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_without_pallas_triton():
    """All but the Triton kernels works, and these name what they miss."""
    call = """
try:
    ops.softmax(jnp.ones((2, 3)), implementation="triton")
except ImportError as error:
    assert "No module named 'jax.experimental.pallas.triton'" in str(error), error
else:
    raise AssertionError("it ran")
"""
    done = run(WITHOUT_TRITON + IMPORTS + XLA + MOSAIC + INTERPRETER + call)
    assert done.returncode == 0, done.stderr


def test_what_is_imported_when_it_is_wanted():
    """Backends, and what only loading and text need."""
    program = """
import sys
def check(*names):
    assert not {*names} & sys.modules.keys(), {*names} & sys.modules.keys()
backends = [f"jax.experimental.pallas.{name}" for name in ("mosaic_gpu", "triton")]
import pallas_models
check("jax", "flax", "numpy")
import pallas_models.minilm, pallas_models.__main__
from pallas_models.minilm import Encoder
check("weights", "tokenizers", "safetensors", "huggingface_hub", *backends)
import pallas_models.ops, pallas_models.kernels.mosaic.attention, pallas_models.kernels.triton.attention
check(*backends)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_every_public_module_is_there():
    """As an attribute, by itself; `kernels` and `dispatch` are rooms that nobody enters from outside."""
    modules = {module.name for module in pkgutil.iter_modules(pallas_models.__path__)}
    public = {name for name in modules if name[0] != "_"} - {"kernels", "dispatch"}
    assert {*pallas_models.__all__} == public <= {*dir(pallas_models)}
    done = run("import pallas_models\nprint(pallas_models.modernbert.ModernBertConfig().num_layers)")
    assert done.stdout == "22\n", done.stderr
    with pytest.raises(AttributeError, match="module 'pallas_models' has no attribute 'bert'"):
        pallas_models.bert  # noqa: B018


def test_no_backend_imports_another():
    kernels = ROOT / "pallas_models" / "kernels"
    for backend, other in (("mosaic", "triton"), ("triton", "mosaic")):
        for path in (kernels / backend).rglob("*.py"):
            assert f"kernels.{other}" not in path.read_text(), path
