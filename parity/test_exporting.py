"""Artefacts: for several platforms, of any batch, in another process, refused where they do not fit."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import symbolic_shape

from pallas_models import minilm
from pallas_models.exporting import deserialize, export
from parity.common import MOSAIC_CALL, ON_GPU, TRITON_CALL, assert_close, kernel_calls, random_mask, random_params

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: jax.export serialises with it")

CONFIG = minilm.MiniLMConfig(
    vocab_size=50, hidden_size=64, num_layers=1, num_heads=2, intermediate_size=128, max_positions=64
)


def tokens(batch: int, seq: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(90)
    return jnp.asarray(rng.integers(0, 50, (batch, seq)), jnp.int32), random_mask(rng, batch, seq)


def embed(dtype: str):
    return functools.partial(minilm.embed, random_params(CONFIG, dtype), config=CONFIG)


def test_one_artefact_for_cpu_and_cuda(tmp_path):
    function, arrays = embed("float32"), tokens(3, 9)
    artefact = deserialize(export(function, *arrays).serialize())
    assert set(artefact.programs) == {"cpu", "cuda"}
    assert kernel_calls(artefact.programs["cpu"].mlir_module()) == 0
    assert kernel_calls(artefact.programs["cuda"].mlir_module()) >= 7
    on_cpu = jax.device_put(arrays, jax.devices("cpu")[0])
    expected = function(*arrays, implementation="xla")
    assert_close(artefact.call(*on_cpu), expected, 5e-6)
    if ON_GPU:
        assert_close(artefact.call(*arrays), expected, 5e-6)


def test_the_last_of_many_platforms():
    artefact = deserialize(export(jnp.sin, jnp.ones(3), platforms=["tpu", "cuda", "cpu"]).serialize())
    assert {name: program.platforms for name, program in artefact.programs.items()} == {
        name: (name,) for name in ("tpu", "cuda", "cpu")
    }


@pytest.mark.parametrize("device, hopper", [(("NVIDIA H200", 132), True), (("NVIDIA A100", 108), False)])
def test_kernels_are_those_of_the_device(device, hopper):
    artefact = export(embed("float16"), *tokens(4, 64), platforms=["cuda"], device=device)
    text = artefact.programs["cuda"].mlir_module()
    assert (MOSAIC_CALL in text) == hopper
    assert TRITON_CALL in text


def test_any_batch():
    function = embed("float32")
    (batch,) = symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 9), jnp.int32)
    artefact = deserialize(export(function, shape, shape, platforms=["cpu"]).serialize())
    for size in (1, 5):
        arrays = jax.device_put(tokens(size, 9), jax.devices("cpu")[0])
        assert_close(artefact.call(*arrays), function(*arrays, implementation="xla"), 5e-6)


def test_it_runs_without_this_library(tmp_path):
    function, arrays = embed("float32"), tokens(2, 5)
    path = tmp_path / "embed.bin"
    path.write_bytes(export(function, *arrays, platforms=["cpu"]).serialize())
    np.savez(tmp_path / "arrays.npz", *map(np.asarray, arrays))
    np.save(tmp_path / "expected.npy", function(*arrays, implementation="xla"))
    module = Path(sys.modules["pallas_models.exporting"].__file__)
    files = [str(tmp_path / name) for name in ("arrays.npz", "expected.npy")]
    program = f"""
import importlib.util, sys, jax, numpy as np
jax.config.update("jax_platforms", "cpu")
spec = importlib.util.spec_from_file_location("exporting", {str(module)!r})
exporting = sys.modules["exporting"] = importlib.util.module_from_spec(spec); spec.loader.exec_module(exporting)
out = exporting.deserialize(open({str(path)!r}, "rb").read()).call(*np.load({files[0]!r}).values())
assert "pallas_models" not in sys.modules
np.testing.assert_allclose(out, np.load({files[1]!r}), rtol=1e-4, atol=1e-6)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_refusals():
    artefact = export(jnp.sin, jnp.ones(3), platforms=["cuda"])
    with pytest.raises(ValueError, match="the artefact is for cuda, not cpu"):
        artefact.call(jax.device_put(jnp.ones(3), jax.devices("cpu")[0]))
    with pytest.raises(ValueError, match="platforms is empty"):
        export(jnp.sin, jnp.ones(3), platforms=[])
    data = export(jnp.sin, jnp.ones(3), platforms=["cpu"]).serialize()
    for broken in (data[:-1], b"", b"pallas_models.export 1\n{", data[5:]):
        with pytest.raises(ValueError, match="are no artefact of pallas_models, or were cut short"):
            deserialize(broken)


def test_what_serialises_names_its_extra(monkeypatch):
    artefact = export(jnp.sin, jnp.ones(3), platforms=["cpu"])
    data = artefact.serialize()
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for call in (artefact.serialize, functools.partial(deserialize, data)):
        with pytest.raises(ImportError, match=r"flatbuffers: pip install 'pallas-models\[export\]'"):
            call()
