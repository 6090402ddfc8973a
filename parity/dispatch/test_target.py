"""Which GPU is compiled for, and that every kernel fits it."""

import dataclasses
import functools
import inspect
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
from pallas_models.dispatch import program
from pallas_models.tuning import Chooser, Problem
from parity.cases import OPS, Without
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
    assert found.runs(target.BLACKWELL) == (capability[0] == 10)


@pytest.mark.parametrize("gpu", target.GPUS.values(), ids=target.GPUS.keys())
def test_programs_are_lowered_for_gpus_that_are_not_here(gpu):
    """By Triton, too, which JAX lowers for the names that it knows."""
    with target.lowering_for(gpu):
        found = target.current()
        jax.jit(functools.partial(ops.softmax, implementation="triton")).trace(jnp.ones((8, 64))).lower(
            lowering_platforms=("cuda",)
        )
    known = ("capability", "num_cores", "shared_memory")
    assert [getattr(found, name) for name in known] == [getattr(gpu, name) for name in known]
    assert gpu.shared_memory == DEVICES.get((gpu.name, gpu.num_cores), ((), gpu.shared_memory // KIB))[1] * KIB


def test_programs_are_lowered_for_no_gpu_without_a_name():
    with pytest.raises(ValueError, match="has no name"):
        target.lowering_for(target.ANY)


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


# Calls at the sizes of real use: the op, and arguments by a function of the dtype.
LARGE = {
    f"{name} {dtype}": (case.op, functools.partial(arguments, dtype))
    for dtype in ("bfloat16", "float32")
    for case in OPS.values()
    if not isinstance(case.large, Without)
    for name, arguments in case.large.items()
}


def shaped_call(op: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A call as a function of its arrays by name, and the shapes of these."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    return lambda arrays, **more: op(**arrays, **options, **more), arrays


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
    # Nor a reference beside it, which other platforms would run and whose trace is half of what is left.
    monkeypatch.setattr(program, "by_platform", lambda kernel, reference: kernel)
    kib = DEVICES[device][1]
    sized = 0
    for name, (op, arguments) in LARGE.items():
        recorder = Recorder()
        function, arrays = shaped_call(op, arguments())
        options = {"config": recorder} if "config" in inspect.signature(op).parameters else {}
        with cuda_device(*device):
            jax.eval_shape(functools.partial(function, **options), arrays)
        for problem in recorder.problems:
            if problem.shared_memory is not None:
                size = problem.shared_memory(problem.heuristic())
                assert 0 < size <= kib * KIB, f"{name}: {problem} takes {size} bytes"
                sized += 1
    assert sized >= len(LARGE) * (DEVICES[device][0] >= (8, 0)) * 0.7


def test_the_gpu_decides_on_kernels_and_tiles():
    def lowered(*device: Any) -> str:
        op, arguments = LARGE["matmul-large bfloat16"]
        function, arrays = shaped_call(op, arguments())
        with cuda_device(*device):
            return jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()

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
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, 128), (128, columns)))
    with cuda_device(*device):
        text = jax.jit(ops.matmul).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert {call for call in (MOSAIC_CALL, TRITON_CALL) if call in text} == expected


def test_a_named_kernel_says_which_gpu_it_needs():
    x, w, scale = jnp.ones((128, 384), jnp.bfloat16), jnp.ones((384, 384), jnp.bfloat16), jnp.ones(384)

    def call(*names: str) -> Any:
        return jax.eval_shape(functools.partial(ops.matmul_layer_norm, implementation=names), x, w, scale, scale)

    with cuda_device("NVIDIA A100", 108):
        with pytest.raises(NotImplementedError, match="'mosaic' needs a Hopper GPU, not NVIDIA A100"):
            call("mosaic")
        assert call("mosaic", "triton").shape == x.shape


@pytest.mark.parametrize("size, all_mosaic", [(128, True), (19, False)])
def test_a_sequence_of_implementations_serves_a_whole_model(size, all_mosaic):
    """Each op takes the first that serves its call; one name alone serves no model whose ops are not all of it."""
    config = minilm.MiniLMConfig(num_layers=1)
    params = jax.eval_shape(lambda: minilm.init(jax.random.key(0), config, dtype=jnp.float16))
    tokens = jax.ShapeDtypeStruct((1, size), "int32")

    def lowered(implementation: Any) -> str:
        function = functools.partial(minilm.embed, config=config, implementation=implementation)
        with cuda_device("NVIDIA H200", 132):
            return jax.jit(function).trace(params, tokens, tokens).lower(lowering_platforms=("cuda",)).as_text()

    text = lowered(["mosaic", "triton"])
    assert MOSAIC_CALL in text and (TRITON_CALL not in text) == all_mosaic
    assert "stablehlo.dot_general" not in text
    if all_mosaic:
        assert TRITON_CALL not in lowered("mosaic")
    else:
        with pytest.raises(NotImplementedError, match="implementation='mosaic' takes rows in multiples of 8"):
            lowered("mosaic")
    with pytest.raises(ValueError, match=r"implementation=\('mosaic', 'cuda'\) is unknown"):
        lowered(("mosaic", "cuda"))
