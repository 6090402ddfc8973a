"""Which GPU is compiled for, and that every kernel fits it."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_models import minilm, ops, target
from pallas_models.tuning import Chooser, Problem
from parity.support.common import MOSAIC_CALL, ON_GPU, TRITON_CALL, cuda_device

KIB = 1024
DEVICES = {
    ("NVIDIA H200", 132): ((9, 0), 227),
    ("NVIDIA H100 80GB HBM3", 132): ((9, 0), 227),
    ("NVIDIA GH200 480GB", 132): ((9, 0), 227),
    ("NVIDIA H20", 78): ((9, 0), 227),
    ("NVIDIA A100-SXM4-80GB", 108): ((8, 0), 163),
    ("NVIDIA A30", 56): ((8, 0), 163),
    ("NVIDIA A10G", 80): ((8, 6), 99),
    ("NVIDIA RTX A6000", 84): ((8, 6), 99),
    ("NVIDIA GeForce RTX 3090", 82): ((8, 6), 99),
    ("NVIDIA GeForce RTX 4090", 128): ((8, 9), 99),
    ("NVIDIA L4", 58): ((8, 9), 99),
    ("NVIDIA L40S", 142): ((8, 9), 99),
    ("NVIDIA RTX 6000 Ada Generation", 142): ((8, 9), 99),
    ("NVIDIA B200", 148): ((10, 0), 227),
    ("NVIDIA GB200", 148): ((10, 0), 227),
    ("NVIDIA B300 SXM6", 148): ((10, 3), 227),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188): ((12, 0), 99),
    ("NVIDIA GeForce RTX 5090", 170): ((12, 0), 99),
    ("NVIDIA GB10", 48): ((12, 1), 99),
    ("Tesla T4", 40): ((7, 5), 99),
    ("NVIDIA Something New", 50): ((8, 0), 99),
}
every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device[0].replace(" ", "-"))


@every_device
def test_devices_are_known_by_name(device):
    with cuda_device(*device):
        found = target.current()
    capability, kib = DEVICES[device]
    assert found == target.Target(
        name=device[0],
        capability=capability,
        num_cores=device[1],
        shared_memory=kib * KIB,
        is_linked=device[0] == "NVIDIA H200",
    )
    assert (found.abstract_device.device_kind, found.abstract_device.num_cores) == device
    assert found.runs(target.HOPPER) == (capability == (9, 0))


def test_multiprocessors_are_left():
    """In a program that is traced too, whose cache knows what was left."""
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((4,), ("d",), (AxisType.Auto,), abstract_device=gpu)
    counts = jax.jit(lambda: target.current().num_cores)
    with target.leave_cores(8, mesh):
        assert counts() == target.current().num_cores == 124
    with target.leave_cores(0, mesh):
        assert counts() == 132
    refused = pytest.raises(ValueError, match="num_cores=132 is out of range; expected 0 to 131")
    with refused, target.leave_cores(132, mesh):
        pass
    before = target.current()
    with target.leave_cores(8, jax.make_mesh((1,), ("d",), devices=jax.devices("cpu")[:1])):
        assert target.current() == before


@pytest.mark.skipif(ON_GPU, reason="this machine has a GPU to compile for")
def test_without_a_gpu_programs_are_for_any_from_ampere_on():
    found = target.current()
    assert not found.name and found.capability == (8, 0)
    assert all(found.shared_memory <= kib * KIB for _, kib in DEVICES.values())


class Recorder(Chooser):
    """Notes every problem that it is asked about, and leaves it to the heuristic."""

    def __init__(self) -> None:
        self.problems: list[Problem[Any]] = []

    def choose(self, problem: Problem[Any]) -> None:
        self.problems.append(problem)


def shaped(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(dtype: str, m: int, n: int, k: int, **options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return functools.partial(ops.matmul, **options), (shaped(dtype, m, k), shaped(dtype, k, n))


def triangle_update(n: int, c: int, dtype: str, gate_after: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shapes = [(1, n, n, c), (c,), (c,), (c, 4, c), (c,), (c,), (c, c), (c, c)]
    form = dict(direction="outgoing", gate_after=gate_after, compute_dtype=dtype)
    return functools.partial(ops.triangle_update, **form), tuple(shaped("float32", *s) for s in shapes)


def attention(dtype: str, b: int, s: int, h: int, d: int, causal: bool) -> tuple[Callable[..., Any], tuple]:
    return functools.partial(ops.attention_qkv, num_heads=h, causal=causal), (shaped(dtype, b, s, 3 * h * d),)


CALLS = {
    f"{name} {dtype}": make(dtype)
    for dtype in ("bfloat16", "float32")
    for name, make in {
        "matmul-large": lambda dtype: matmul(dtype, 8192, 8192, 8192),
        "matmul-short": lambda dtype: matmul(dtype, 8192, 1152, 384),
        "matmul-few-rows": lambda dtype: matmul(dtype, 16, 768, 3072),
        "matmul-gelu": lambda dtype: matmul(dtype, 8192, 1536, 384, activation="gelu"),
        "matmul-split": lambda dtype: matmul(dtype, 64, 64, 8192, algorithm="split_k"),
        "gated": lambda dtype: (ops.gated_matmul, (shaped(dtype, 4096, 4096), shaped(dtype, 4096, 2, 12288))),
        "matmul-layer-norm": lambda dtype: (
            ops.matmul_layer_norm,
            (shaped(dtype, 8192, 1536), shaped(dtype, 1536, 384), *[shaped("float32", 384)] * 2),
        ),
        "attention-32": lambda dtype: attention(dtype, 64, 128, 12, 32, False),
        "attention-64": lambda dtype: attention(dtype, 8, 1024, 12, 64, True),
        "attention-128": lambda dtype: attention(dtype, 1, 8192, 16, 128, True),
        "attention-256": lambda dtype: attention(dtype, 2, 300, 4, 256, False),
        "triangle-128": lambda dtype: triangle_update(512, 128, dtype, False),
        "triangle-384": lambda dtype: triangle_update(512, 384, dtype, True),
        "layer-norm": lambda dtype: (
            ops.layer_norm,
            (shaped(dtype, 8192, 4096), *[shaped("float32", 4096)] * 2),
        ),
        "softmax": lambda dtype: (ops.softmax, (shaped(dtype, 128, 65536),)),
        "linear-cross-entropy": lambda dtype: (
            ops.linear_cross_entropy,
            (shaped(dtype, 8192, 768), shaped(dtype, 768, 50257), shaped("int32", 8192)),
        ),
        "mean-pool": lambda dtype: (ops.mean_pool, (shaped(dtype, 64, 512, 384), shaped("int32", 64, 512))),
        "segment-mean-pool": lambda dtype: (
            functools.partial(ops.segment_mean_pool, num_segments=512),
            (shaped(dtype, 64, 64, 384), shaped("int32", 64, 64)),
        ),
    }.items()
}


@pytest.mark.parametrize("capability, seconds, imports", [((9, 0), 0, 1), ((8, 0), 0, 0), ((8, 0), 0.3, 1)])
def test_a_gpu_that_starts_leaves_time_to_import_mosaic(monkeypatch, capability, seconds, imports):
    def starting() -> target.Target:
        time.sleep(seconds)
        return dataclasses.replace(target.ANY, capability=capability)

    imported: list[str] = []
    monkeypatch.setattr(target, "_local", starting)
    monkeypatch.setattr(target.importlib, "import_module", imported.append)
    target.start()
    assert imported == ["jax.experimental.pallas.mosaic_gpu"] * imports


# One of each kind: what is chosen depends on nothing else where no table is asked.
KINDS = list({(*about, device[1]): device for device, about in DEVICES.items()}.values())


def nothing(kernel: Any, out: Any = None, *, out_shape: Any = None, out_type: Any = None, **_: Any) -> Any:
    """In place of `pallas_call` and its like in Mosaic GPU: no kernel is traced, which takes most of a trace."""
    return lambda *operands: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out or out_shape or out_type)


@pytest.mark.parametrize("device", KINDS, ids=lambda device: device[0].replace(" ", "-"))
def test_every_kernel_fits_into_shared_memory(monkeypatch, device):
    """A program asks at most what a CTA may use; nothing is lowered, so all devices and calls are cheap."""
    monkeypatch.setattr(pallas, "pallas_call", nothing)
    monkeypatch.setattr(mosaic_gpu, "kernel", nothing)
    kib = DEVICES[device][1]
    sized = 0
    for name, (function, arrays) in CALLS.items():
        recorder = Recorder()
        with cuda_device(*device):
            jax.eval_shape(functools.partial(function, config=recorder), *arrays)
        for problem in recorder.problems:
            if problem.shared_memory is not None:
                size = problem.shared_memory(problem.heuristic())
                assert 0 < size <= kib * KIB, f"{name}: {problem} takes {size} bytes"
                sized += 1
    assert sized >= len(CALLS) * (DEVICES[device][0] >= (8, 0)) * 0.7


def test_the_gpu_decides_on_kernels_and_tiles():
    def lowered(*device: Any) -> str:
        function, arrays = CALLS["matmul-large bfloat16"]
        with cuda_device(*device):
            return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()

    hopper, ampere, ada = lowered("NVIDIA H200", 132), lowered("NVIDIA A100", 108), lowered("NVIDIA L40", 142)
    assert "mosaic_gpu" in hopper and "mosaic_gpu" not in ampere
    assert ampere != ada


@pytest.mark.parametrize(
    "device, rows, columns, expected",
    [
        (("NVIDIA H200", 132), 256, 256, {MOSAIC_CALL}),
        (("NVIDIA H200", 132), 64, 256, {TRITON_CALL}),  # it serves few rows, and is not the faster
        (("NVIDIA H200", 132), 256, 100, {TRITON_CALL}),  # it does not serve half a tile
        (("NVIDIA A100-SXM4-80GB", 108), 256, 256, {TRITON_CALL}),
        (("Tesla T4", 40), 256, 256, set()),
    ],
)
def test_the_default_is_the_first_kernel_that_runs_serves_and_is_preferred(device, rows, columns, expected):
    function, arrays = matmul("bfloat16", rows, columns, 128)
    with cuda_device(*device):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert {call for call in (MOSAIC_CALL, TRITON_CALL) if call in text} == expected


def test_a_named_kernel_says_which_gpu_it_needs():
    x = jnp.ones((128, 128), jnp.bfloat16)
    with cuda_device("NVIDIA A100", 108):
        with pytest.raises(NotImplementedError, match="'mosaic' needs a Hopper GPU, not NVIDIA A100"):
            jax.eval_shape(functools.partial(ops.matmul, implementation="mosaic"), x, x)
        found = jax.eval_shape(functools.partial(ops.matmul, implementation=("mosaic", "triton")), x, x)
    assert found.shape == (128, 128)


@pytest.mark.parametrize("size, hopper", [(128, True), (19, False)])
def test_a_sequence_of_implementations_serves_a_whole_model(size, hopper):
    """Each op takes the first that serves its call; one name alone serves no model whose ops are not all of it."""
    config = minilm.MiniLMConfig(num_layers=1)
    params = jax.eval_shape(lambda: minilm.init(jax.random.key(0), config, dtype=jnp.float16))
    tokens = shaped("int32", 1, size)

    def lowered(implementation: Any) -> str:
        function = functools.partial(minilm.embed, config=config, implementation=implementation)
        with cuda_device("NVIDIA H200", 132):
            return jax.jit(function).trace(params, tokens, tokens).lower(lowering_platforms=("cuda",)).as_text()

    text = lowered(["mosaic", "triton"])
    assert (MOSAIC_CALL in text) == hopper and TRITON_CALL in text
    assert "stablehlo.dot_general" not in text
    with pytest.raises(NotImplementedError, match="implementation='mosaic' has no kernel for embed_tokens"):
        lowered("mosaic")
    with pytest.raises(ValueError, match=r"implementation=\('mosaic', 'cuda'\) is unknown"):
        lowered(("mosaic", "cuda"))
