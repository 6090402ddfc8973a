"""The benchmark of the triangle multiplicative update: its contenders compute it, its floors and tables add up."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.cases import trimul
from bench.measuring import environment
from bench.measuring.harness import shape_text
from bench.measuring.results import Case, Entry, Kernel, Result
from bench.measuring.timing import Timing
from bench.models import trimul_models
from parity.support.common import assert_close

CEILINGS = {"matmul_bf16_tflop_per_s": 790.0, "copy_tb_per_s": 4.28}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "shape", [(1, 12, 24), (2, 10, 24, "masked", "cauchy"), (1, 12, 128, "after"), (1, 12, 24, "bf16")], ids=str
)
def test_contenders_compute_the_update(monkeypatch, shape):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    workload = trimul.workload("fp32", shape)
    inputs = workload.inputs(3)
    expected = workload.reference(*inputs)
    assert expected.dtype == jnp.float32
    compared = set()
    for contender in workload.contenders:
        if contender.gpu:
            continue
        function = functools.partial(contender.load(), *contender.params)
        if contender.in_torch:
            out = function(*map(torch.from_dlpack, inputs))
            out = jax.dlpack.from_dlpack(out.contiguous())
        else:
            out = jax.jit(function)(*inputs)
        assert out.dtype == inputs[0].dtype
        assert workload.measure.of(out, expected) < 0.3, contender.name
        assert workload.measure.of(out.at[-1, 0, -1, -1].add(0.2), expected) > 1
        compared.add(contender.name)
    assert compared == {"xla", "torch"} | (set() if "after" in shape else {"article"})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family, gate_after", [("lucidrains", False), ("boltz", True)])
def test_the_torch_program_is_that_of_the_models(torch_trimul, family, gate_after):
    torch = pytest.importorskip("torch")
    c, n, generator = 16, 7, torch.Generator().manual_seed(5)
    module = torch_trimul.draw_(torch_trimul.FAMILIES[family](c, c), generator)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    update = trimul_models.torch_module(state, gate_after=gate_after, device="cpu", precision="highest")
    x, mask = torch.randn(2, n, n, c, generator=generator), torch.rand(2, n, n, generator=generator).round()
    with torch.no_grad():
        assert_close(update(x, mask).numpy(), module(x, mask).numpy(), 1e-6)


def test_measure():
    expected = np.array([0.0, 1.0, -100.0], np.float32)
    assert trimul.worst(expected + np.float32([0.01, 0, 0]), expected) == pytest.approx(0.5, rel=1e-3)
    assert trimul.worst(expected + np.float32([0, 0.04, 2.02]), expected) == pytest.approx(1.0, rel=1e-3)
    assert trimul.worst(expected * np.nan, expected) == trimul.NOT_FINITE
    with pytest.raises(ValueError, match=r"shape \(2,\), the reference \(3,\)"):
        trimul.worst(expected[1:], expected)


def test_inputs():
    x, mask = trimul.random_inputs(0, (2, 40, 8), ())
    assert float(jnp.std(x)) == pytest.approx(1.0, abs=0.05)
    assert np.all(mask == 1.0)
    heavy, mask = trimul.random_inputs(0, (2, 40, 8), ("cauchy", "masked"))
    assert float(jnp.median(jnp.abs(heavy))) == pytest.approx(2.0, abs=0.1)  # of Cauchy(0, 2)
    assert float(mask.mean()) == pytest.approx(0.5, abs=0.05)
    assert trimul.random_inputs(0, (2, 40, 8), ("bf16",))[0].dtype == jnp.bfloat16
    assert not np.array_equal(x, trimul.random_inputs(1, (2, 40, 8), ())[0])


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"1x32x64 fp16: x is fp32, or bf16 with \+bf16"):
        trimul.workload("fp16", (1, 32, 64))
    args = argparse.Namespace(shapes=[(1, 32, 64)], dtype=["fp16"], mode=["forward"], quick=True)
    assert trimul.run(args) == 2


def make_result(kernels: tuple[str, ...] = ("trimul_project", "trimul_product", "trimul_out")) -> Result:
    def entry(name: str, family: str, us: float, **fields) -> Entry:
        time = Timing(median_us=us, p20_us=us, p80_us=us, samples=9, method="cupti")
        return Entry(name=name, family=family, status="ok", device=time, wall=time, **fields)

    cases = []
    for i, shape in enumerate((*trimul.SEVEN, (1, 1024, 128, "bf16"), (1, 2048, 128))):
        ours = [Kernel(name=name, us=100.0 * (i + 1)) for name in kernels]
        sizes = dict(zip(("batch", "n", "channels"), shape, strict=False)) | dict.fromkeys(shape[3:], 1)
        entries = [
            entry("pallas", "ours", 300.0 * (i + 1), kernels=ours, peak_bytes=2e9),
            entry("xla", "xla", 900.0),
            entry("article-eager", "torch", 5000.0, peak_bytes=6e9),
            entry("article-graph", "torch", 4000.0),
        ]
        cases.append(Case(label=f"{shape_text(shape)} fp32", dtype="fp32", shape=sizes, flop=1.0, entries=entries))
    return Result(
        benchmark="trimul",
        date="2026-11-21T12:00:00+00:00",
        partial=False,
        environment={"device": "NVIDIA H200"},
        ceilings=CEILINGS,
        settings={},
        cases=cases,
    )


def test_floors():
    # By hand for (1, 1024, 128): 1.34 GB; 275 GFLOP; 1.07 GB.
    result = make_result()
    found = {case.label: trimul.floors(result, case) for case in result.cases}
    assert found["1x1024x128+cauchy fp32"] == pytest.approx(
        {"project": 313.6, "product": 347.9, "out": 250.9}, rel=1e-3
    )
    totals = [sum(found[label].values()) / 1e3 for label in trimul.SEVEN_LABELS]
    assert totals == pytest.approx([0.094, 0.464, 0.168, 0.188, 0.913, 0.796, 1.50], rel=0.01)
    assert found["1x1024x128+bf16 fp32"]["out"] < 0.8 * found["1x1024x128+cauchy fp32"]["out"]


def lines(text: str, start: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if start in line]


def test_tables():
    text = trimul.table(make_result())
    for title in (
        "The seven shapes of the competition",
        "Others",
        "Growth with N, one item of 128 channels",
        "Kernels of ours",
    ):
        assert f"{title}:\n\n|" in text
    (header,) = lines(text, "| ms ")[:1]
    assert header == ["ms", "ours", "XLA", "torch, fp16", "floor of three kernels"]
    assert lines(text, "geometric mean") == [["geometric mean", "1.014", "0.900", "4.000", "0.395"]]
    growth = lines(text, "| 2048 ")[0]
    assert growth == ["2048", "2.700", "0.900", "-", "4.000", "2.000", "-", "-", "6.000", "7.516"]
    kernels = lines(text, "product")[0]
    assert kernels == ["2x256x128 fp32", "product", "1", "100", "101", "1.01", "86", "24%"]


def test_kernels_are_those_before_and_after_the_product():
    text = trimul.kernel_table(make_result(("layer_norm", "trimul_project", "trimul_product", "trimul_out")))
    assert lines(text, "2x256x128 ")[0][1:4] == ["project", "2", "200"]
    assert trimul.kernel_table(make_result(("fused",))) == ""
