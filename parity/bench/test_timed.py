"""Results count as of today's code if what they time is lowered as it was."""

import pytest

from bench.__main__ import BENCHMARKS
from parity import __main__ as check
from parity.bench import _timed as timed
from parity.support import lowered
from parity.support.lowered import Program
from parity.support.test_lowered import X, scaled


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`python -m parity timed FOLDER OPTIONS` with one program of a scale."""

    def run(folder, scale, *options):
        monkeypatch.setattr(timed, "programs", lambda: iter([Program("softmax", scaled(scale), (X,))]))
        return check.main(["timed", str(tmp_path / folder), *options])

    monkeypatch.setattr(timed.results, "confirm", lambda folder, commit: [f"{commit} is confirmed"])
    return run


def test_results_are_confirmed_unless_something_is_lowered_otherwise(run, tmp_path, capsys):
    confirm = ("--compare", str(tmp_path / "before"), "--confirm", "abc")
    assert run("before", 2.0) == 0
    assert run("after", 2.0, *confirm) == 0
    assert capsys.readouterr().out.endswith("\n0 differ\nabc is confirmed\n")
    assert run("after", 3.0, *confirm) == 1
    assert capsys.readouterr().out.endswith("\n1 differ\n")
    for options in (confirm[2:], (*confirm, "--only", "softmax")):
        with pytest.raises(SystemExit, match="2"):
            run("after", 2.0, *options)
        assert "--confirm takes all programs" in capsys.readouterr().err


def test_results_are_not_confirmed_where_programs_could_not_be_lowered(run, tmp_path, capsys, monkeypatch):
    def lower(program):
        raise ModuleNotFoundError("jax_cuda")

    monkeypatch.setattr(lowered, "lower", lower)
    assert run("before", 2.0) == 0
    assert run("after", 2.0, "--compare", str(tmp_path / "before"), "--confirm", "abc") == 1
    assert "not confirmed: without JAX's CUDA plugin" in capsys.readouterr().out


def test_what_benchmarks_time_and_users_call_has_a_program():
    found = [program.name.split("/") for program in timed.programs()]
    of_benchmarks = {second for first, second, *_ in found if first == "bench"}
    assert of_benchmarks == set(BENCHMARKS) - {"minilm", "sts", "corpus"}  # which embed sentences
    names = set(map("/".join, found))
    assert {"bench/norm/8192x4096+both bf16/pallas", "bench/train/gpt2 32x1024"} <= names
    assert {"minilm/float16/64x128", "triton/softmax/float16/16/H200/None/gradient"} <= names
    assert "triton/softmax/float16/16/H200/triton" not in names
