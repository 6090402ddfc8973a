"""`python -m parity compiled`: its page says what fits, and a program compiles where the CUDA plugin is."""

import dataclasses
import json

import jax
import pytest

from parity import __main__ as check
from parity.cases import OPS, Without
from parity.support import compiled, compiling
from parity.support.compiling import GENERATIONS, Resources

needs_compilers = pytest.mark.skipif(
    compiling.ptxas() is None or jax.__version_info__ < (0, 11),
    reason="needs the CUDA plugin of JAX 0.11 and its ptxas",
)
ROW = ("softmax", "softmax", "triton", "float32")


def test_every_kernel_of_the_page_fits():
    rows = compiled.parsed(compiled.PAGE.read_text("utf-8"))
    assert list(compiled.problems(rows)) == []
    with_kernels = {name for name, case in OPS.items() if not isinstance(case.calls, Without)}
    assert {op for op, *_ in rows} >= {program.op for program in compiling.programs()} & with_kernels
    assert {generation for found in rows.values() for generation in found} == GENERATIONS.keys()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the page has programs that JAX 0.10 has not")
def test_the_page_is_of_every_program_for_every_generation():
    text, number = compiled.PAGE.read_text("utf-8"), len(list(compiling.programs()))
    counted = compiled.counts(dict.fromkeys(GENERATIONS, number))
    assert compiled.page(compiled.parsed(text), counted=counted) == text


def test_what_does_not_fit_is_a_problem(monkeypatch):
    def found(**taken: int) -> list[str]:
        numbers = dict(registers=32, spills=0, shared_memory=1024) | taken
        return list(compiled.problems({ROW: {"sm_86": Resources("softmax", "triton", **numbers)}}))

    monkeypatch.setattr(compiled, "EXCEPTIONS", ())
    assert found() == found(shared_memory=99 * 1024) == []
    assert found(shared_memory=99 * 1024 + 1)[0].endswith("101377 bytes of shared memory, of 101376")
    assert found(spills=8) == ["sm_86, softmax softmax triton float32: spills 8 bytes"]
    allowed = compiled.Spills("softmax", "triton", "float32", ("sm_86",), 8, "a test")
    monkeypatch.setattr(compiled, "EXCEPTIONS", (allowed,))
    assert found(spills=8) == []
    assert found()[0].startswith("sm_86: no kernel spills as the exceptions say")
    assert found(spills=12)[0].endswith("spills 12 bytes")


@pytest.mark.parametrize(
    "other", [dict(kernel="rotary"), dict(backend="mosaic"), dict(dtype="bfloat16"), dict(generations=("sm_89",))]
)
def test_an_exception_is_of_one_kernel_on_named_architectures(other):
    allowed = compiled.Spills("softmax", "triton", "float32", ("sm_86", "sm_90"), 8, "a test")
    assert allowed.covers(ROW, "sm_86", 8) and allowed.covers(ROW, "sm_90", 4)
    assert not allowed.covers(ROW, "sm_80", 8)
    assert not dataclasses.replace(allowed, **other).covers(ROW, "sm_86", 8)


def test_what_ptxas_says_is_read():
    said = """ptxas info    : Compiling entry function 'f' for 'sm_80'
ptxas info    : Function properties for f
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack size, 512 bytes smem
ptxas info    : Compiling entry function 'g' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    assert list(compiling.entries(said)) == [("f", 40, 12, 512), ("g", 12, 0, 0)]


def test_a_program_that_ended_its_process_is_a_problem(tmp_path):
    name = "softmax/softmax/float32/forward/triton"
    kernels = [
        {"kernel": "softmax", "backend": "triton", "registers": n, "spills": 0, "shared_memory": 9 - n}
        for n in (1, 2)
    ]
    lines = [
        {"program": name},
        {"program": name, "kernels": kernels},
        {"program": name.replace("triton", "mosaic")},
    ]
    (tmp_path / "sm_80.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, failed = compiled.taken(tmp_path)
    assert rows == {ROW: {"sm_80": Resources("softmax", "triton", 2, 0, 8)}}
    assert failed == ["sm_80, softmax/softmax/float32/forward/mosaic: the compiler ended the process"]
    assert compiled.parsed(compiled.page(rows)) == rows


@needs_compilers
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """Of both backends; with 99 KiB of shared memory, and on the first generation."""
    page = tmp_path / "page.md"
    arguments = [
        "--output",
        str(page),
        "--results",
        str(tmp_path),
        "--workers",
        "1",
        "--only",
        "^rms_norm/small.*forward",
    ]
    check.main(["compiled", *arguments])  # 1, as the exceptions are of other kernels
    rows = {backend: found for (_, _, backend, _), found in compiled.parsed(page.read_text()).items()}
    assert rows.keys() == {"mosaic", "triton"}
    for found in rows.values():
        assert found.keys() == GENERATIONS.keys()
        assert all(0 < x.registers <= 255 and not x.spills for x in found.values())
