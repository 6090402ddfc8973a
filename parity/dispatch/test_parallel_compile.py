"""Kernels for Hopper GPUs that threads compile while JAX lowers the rest of their program."""

import hashlib

import jax
import jax.numpy as jnp
import pytest

from pallas_models import ops
from pallas_models.kernels.mosaic.common import parallel_compile
from parity.support.common import ON_GPU, cuda_device


class AtOnce:
    """A pool without threads."""

    def submit(self, function, *args):
        function(*args)


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled ahead, and for which device, where the machine has a GPU."""
    calls = []
    monkeypatch.setattr(parallel_compile, "_local_gpus", lambda backend: ["gpu"])
    monkeypatch.setattr(parallel_compile, "_pool", AtOnce)
    monkeypatch.setattr(parallel_compile, "_compile", lambda options, device: calls.append((options, device)))
    monkeypatch.setattr(parallel_compile, "_started", set())
    return calls


def lower(*depths):
    """Lowers a program of a product 128 x depth x 128 for each depth."""

    def f(*operands):
        pairs = zip(operands[::2], operands[1::2], strict=True)
        return [ops.matmul(x, w, implementation="mosaic") for x, w in pairs]

    shapes = [shape for k in depths for shape in ((128, k), (k, 128))]
    with cuda_device("NVIDIA H200", 132):
        operands = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
        return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_each_kernel_is_compiled_once(compiled):
    lower(64)  # XLA asks for the parts of a program that is split over devices one by one
    assert len(compiled) == 1
    text = lower(64, 128, 192, 128)
    hashes = [options["kernel_hash"] for options, _ in compiled]
    assert len(set(hashes)) == len(hashes) == text.count("kernel_hash") == 3
    for options, device in compiled:
        assert hashlib.sha256(options["module"]).digest() == options["kernel_hash"]
        assert device == "gpu"
        assert options["use_custom_barrier"] is False  # the call has the other attributes
    lower(64, 256)
    assert len(compiled) == 4


@pytest.mark.skipif(ON_GPU, reason="what is lowered for CUDA is for this machine")
def test_nothing_is_compiled_for_other_machines(compiled, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(parallel_compile, "_compile", lambda *args: compiled.append(args))
    lower(64, 128)
    assert not compiled
