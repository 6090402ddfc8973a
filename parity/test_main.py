"""`python -m parity`: what the check of a GPU runs, keeps and says."""

import sys

import pytest

from parity import __main__ as check
from parity.common import ON_GPU

JUNIT = """<testsuites><testsuite>
<testcase classname="parity.test_a" name="one"/>
<testcase classname="parity.test_a" name="two"><skipped/></testcase>
<testcase classname="parity.test_b" name="three[x]"><failure>no</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def programs(monkeypatch):
    """Python programs in place of the steps, by name; the folder is theirs to write into."""
    found = {"parity": "print('suite')", "bench": "print('benchmarks')", "report": "print('page')"}
    monkeypatch.setattr(check, "describe_gpu", lambda: "NVIDIA Test")

    def steps(folder, workers):
        return [
            check.Step(name, [sys.executable, "-c", f"folder = {str(folder)!r}\n{code}"], needed=name != "report")
            for name, code in found.items()
        ]

    monkeypatch.setattr(check, "steps", steps)
    return found


def test_everything_is_kept_in_one_folder(programs, tmp_path, capsys):
    programs["report"] = "import pathlib\npage = pathlib.Path(folder, 'bench/gpu/report/index.html')\n"
    programs["report"] += "page.parent.mkdir(parents=True)\npage.touch()"
    assert check.main(["--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "out" / "parity.log").read_text() == "suite\n"
    assert (tmp_path / "out" / "bench.log").read_text() == "benchmarks\n"
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert out.endswith(summary)
    assert summary.startswith("NVIDIA Test, ") and "everything passed" in summary
    assert f"page: {tmp_path / 'out' / 'bench' / 'gpu' / 'report' / 'index.html'}" in summary


@pytest.mark.parametrize("name, code", [("parity", 1), ("bench", 1), ("report", 0)])
def test_a_step_that_fails_stops_no_other(programs, tmp_path, name, code, capsys):
    programs[name] = "import sys\nprint('oh')\nsys.exit(3)"
    assert check.main(["--output", str(tmp_path)]) == code
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.count(" ok, ") == 2
    assert (f"{name:<8} FAILED (exit code 3)" in summary) == bool(code)
    assert ("NOT everything passed" in summary) == bool(code)


def test_tests_are_counted(programs, tmp_path, capsys):
    programs["parity"] = f"open(folder + '/parity.xml', 'w').write({JUNIT!r})\nraise SystemExit(1)"
    assert check.main(["--output", str(tmp_path), "--only", "parity"]) == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert "1 passed, 1 failed, 1 skipped\n  parity.test_b::three[x]\n" in summary
    assert "bench" not in summary
    (tmp_path / "parity.xml").write_text("<cut")
    assert check.counts(tmp_path / "parity.xml") == "no tests were recorded"


def test_interrupted(programs, tmp_path, monkeypatch, capsys):
    def interrupt(step, log):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupt)
    assert check.main(["--output", str(tmp_path), "--only", "bench"]) == 130
    assert "bench    interrupted" in (tmp_path / "summary.txt").read_text()


def test_what_it_runs(tmp_path, monkeypatch):
    for name, step in {step.name: step for step in check.steps(tmp_path, 4)}.items():
        assert step.command[0] == sys.executable
        assert step.needed == (name != "report")
    assert check.environment()["HF_HUB_OFFLINE"] == "1"


@pytest.mark.skipif(ON_GPU, reason="this machine has a GPU")
def test_no_gpu(capsys):
    assert check.main([]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err
