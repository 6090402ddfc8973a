"""`python -m parity`: what the check of a GPU runs, keeps and says."""

import re
import signal
import sys
import time
import types
import xml.etree.ElementTree as ElementTree

import pytest
from jax._src.pallas import hlo_interpreter

from parity import ROOT
from parity import __main__ as check
from parity.support import sharing
from parity.support.common import ON_GPU
from parity.support.sharing import GB

JUNIT = """<testsuites><testsuite>
<testcase classname="parity.test_a" name="one"/>
<testcase classname="parity.test_a" name="two"><skipped/></testcase>
<testcase classname="parity.test_b" name="three[x]"><failure>no</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def programs(monkeypatch):
    """Python programs in place of the steps, by name; the folder is theirs to write into."""
    found = {"parity": "print('suite')", "bench": "print('benchmarks')", "report": "print('page')"}

    def step(folder, name):
        code = f"folder = {str(folder)!r}\n{found[name]}"
        return check.Step(name, [sys.executable, "-c", code], needed=name != "report")

    def suite(folder, workers, memory, chosen=(), tests=(), gpus=1):
        return step(folder, f"parity-{workers}" if tests else "parity")

    monkeypatch.setattr(check, "describe_gpu", lambda: "NVIDIA Test")
    monkeypatch.setattr(check, "suite", suite)
    monkeypatch.setattr(check, "benchmarks", lambda folder: [step(folder, name) for name in ("bench", "report")])
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
    assert check.counts([tmp_path / "parity.xml"]) == "no tests were recorded"


def test_interrupted(programs, tmp_path, monkeypatch, capsys):
    def interrupt(step, log):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupt)
    assert check.main(["--output", str(tmp_path), "--only", "bench"]) == 130
    assert "\ninterrupted\n" in (tmp_path / "summary.txt").read_text()


def test_what_a_program_prints_after_an_interrupt_is_shown_and_kept(tmp_path, capsys):
    interrupts = "import os, signal, time\nfor _ in range(2):\n    os.kill(os.getppid(), signal.SIGINT)\n"
    code = f"{interrupts}time.sleep(0.5)\nprint('1 failed')"
    before = signal.getsignal(signal.SIGINT)  # what a shell starts in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        check.run(check.Step("suite", [sys.executable, "-c", code]), tmp_path / "log")
    assert (tmp_path / "log").read_text() == capsys.readouterr().out == "1 failed\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_the_log_has_each_line_at_once(tmp_path):
    log = tmp_path / "log"
    read = f"log = pathlib.Path({str(log)!r})\nwhile not (log.exists() and log.read_text()):"
    code = f"import pathlib, time\nprint('started', flush=True)\n{read}\n    time.sleep(0.01)\nprint('read')"
    assert check.run(check.Step("suite", [sys.executable, "-c", code]), log) == 0
    assert log.read_text() == "started\nread\n"


def test_a_program_that_goes_on_after_an_interrupt_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "PATIENCE", 0.5)
    code = "import os, signal, time\nprint('started')\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)"
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check.run(check.Step("suite", [sys.executable, "-c", code]), tmp_path / "log")
    assert 0.5 < time.monotonic() - started < 30
    assert (tmp_path / "log").read_text() == "started\n"


def test_a_test_that_hangs_in_a_worker_says_where(tmp_path, request):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed: there are no workers")
    assert 0 < float(request.config.getini("faulthandler_timeout")) <= 300
    (tmp_path / "test_slow.py").write_text("import time\n\ndef test_slow():\n    time.sleep(2)\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-n1", "-p", "no:cacheprovider"]
    step = check.Step("slow", [*command, "-o", "faulthandler_timeout=0.5", str(tmp_path / "test_slow.py")])
    assert check.run(step, tmp_path / "log") == 0
    assert re.search(r'test_slow.py", line 4 in test_slow\n', (tmp_path / "log").read_text())


def test_what_it_runs(tmp_path):
    memory = check.Memory(40 * GB, 160 * GB)
    found = [check.suite(tmp_path / "run", 4, memory), *check.benchmarks(tmp_path / "run")]
    for step in found:
        assert step.command[0] == sys.executable
        assert step.needed == (step.name != "report")
    assert found[0].command[-4:] == ["-n", "4", "--dist", "worksteal"]
    limit = float(found[0].environment[sharing.FRACTION]) * 160 * GB
    assert limit == pytest.approx(sharing.JAX_PART * (10 * GB - sharing.OVERHEAD), rel=1e-3)
    assert found[0].environment[sharing.COMPILED] == str(tmp_path / "compilation")  # the next run's too
    assert check.environment()["HF_HUB_OFFLINE"] == "1"


def junit(*cases: str) -> str:
    """Code that writes a JUnit file of cases, each a name or one that needed more memory than it had."""

    def case(name: str) -> str:
        property = (
            f'<properties><property name="needs_memory" value="test_a.py::{name[1:]}"/></properties><skipped/>'
        )
        return f'<testcase classname="a" name="{name.lstrip("!")}">{property if name[0] == "!" else ""}</testcase>'

    text = "<testsuites><testsuite>" + "".join(map(case, cases)) + "</testsuite></testsuites>"
    return f"open(folder + '/NAME.xml', 'w').write({text!r})"


def test_what_needs_more_memory_runs_again_with_fewer_beside_it(programs, tmp_path, monkeypatch, capsys):
    def write(step: str, *cases: str) -> None:
        programs[step] = junit(*cases).replace("NAME", step)

    write("parity", "one", "!two", "!three[x y]", "!four")
    write("parity-2", "two", "!three[x y]", "!four")
    write("parity-1", "three[x y]", "!four")
    asked = []
    steps = check.suite
    monkeypatch.setattr(check, "suite", lambda *args: asked.append(args[4]) or steps(*args))
    options = ["--output", str(tmp_path), "--only", "parity", "--workers", "8"]
    assert check.main([*options, "--memory", "16"]) == 0
    two, three, four = "test_a.py::two", "test_a.py::three[x y]", "test_a.py::four"
    assert asked == [[], [two, three, four], [three, four]]
    summary = (tmp_path / "summary.txt").read_text()
    assert (
        "3 passed, 0 failed, 1 skipped\n1 of the skipped need more memory than there is:\n  a::four\n" in summary
    )
    assert "workers: 8, see" in summary and "; 3 tests need more memory" in summary
    assert check.main([*options, "--memory", "40"]) == 1  # so much is enough for every test


def test_what_needs_more_memory_runs_again_where_there_is_one_process(programs, tmp_path):
    programs["parity"] = junit("one", "!two").replace("NAME", "parity")
    programs["parity-1"] = junit("two").replace("NAME", "parity-1")
    assert check.main(["--output", str(tmp_path), "--only", "parity", "--workers", "1", "--memory", "40"]) == 0
    assert "2 passed, 0 failed, 0 skipped" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize(
    "workers, usable, sizes, expected",
    [
        (16, 141, [9, 5], 8),
        (16, 141, [9, None], 4),
        (16, 40, [9, 5, None], 4),
        (13, 24, [9], 2),
        (2, 5, [9], 1),
        (16, 141, [None, None], 4),
        (3, 141, [None], 1),
    ],
)
def test_as_many_processes_as_have_room_for_the_largest_test(workers, usable, sizes, expected):
    def case(size: float | None) -> ElementTree.Element:
        said = f'<property name="needs_bytes" value="{size * GB:.0f}"/>' if size else ""
        return ElementTree.fromstring(f'<testcase><property name="needs_memory" value="a"/>{said}</testcase>')

    assert check.fewer(workers, usable * GB, [case(size) for size in sizes]) == expected


def test_processes_on_several_gpus_share_each(tmp_path):
    memory = check.Memory(24 * GB, 80 * GB)
    step = check.suite(tmp_path, 8, memory, gpus=4)
    assert step.command[step.command.index("-n") + 1] == "32" and step.environment[sharing.GPUS] == "4"
    assert step.environment[sharing.FRACTION] == check.suite(tmp_path, 8, memory).environment[sharing.FRACTION]


def test_tests_that_run_again_are_read_from_a_file(tmp_path):
    tests = ["test_a.py::two", "test_a.py::three[x y]"]
    step = check.suite(tmp_path, 1, check.Memory(GB, GB), ["parity/test_a.py"], tests)
    assert (tmp_path / "parity-1.tests").read_text() == "test_a.py::two\ntest_a.py::three[x y]\n"
    assert step.command[-2:] == ["--whole-grids", f"@{tmp_path / 'parity-1.tests'}"] and "-n" not in step.command
    assert check.suite(tmp_path, 1, check.Memory(GB, GB), ["parity/test_a.py"]).command[-1] == "parity/test_a.py"


@pytest.mark.parametrize(
    "workers, tests, gives_back", [(1, ["test_a.py::two"], True), (1, [], False), (2, ["a"], False)]
)
def test_what_runs_again_alone_takes_an_allocator_that_gives_back(tmp_path, workers, tests, gives_back):
    step = check.suite(tmp_path, workers, check.Memory(GB, GB), [], tests)
    assert (step.environment.get(sharing.ALLOCATOR) == sharing.GIVES_BACK) == gives_back


def test_the_slowest_tests_and_files_are_named(programs, tmp_path, capsys):
    cases = "".join(
        f'<testcase classname="parity.test_{i // 3}" name="t{i}" time="{10 * i}.25"/>' for i in range(30)
    )
    programs["parity"] = f"open(folder + '/parity.xml', 'w').write('<testsuite>{cases}</testsuite>')"
    assert check.main(["--output", str(tmp_path), "--only", "parity"]) == 0
    lines = (tmp_path / "slowest.txt").read_text().splitlines()
    assert len(lines) == 15
    assert lines[:2] == ["  290.2 s  parity.test_9::t29", "  280.2 s  parity.test_9::t28"]
    assert lines[10] == "  840.8 s  parity.test_9" and lines[14] == "  480.8 s  parity.test_5"


@pytest.mark.skipif(ON_GPU, reason="this machine has a GPU")
def test_no_gpu(capsys):
    assert check.main([]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_one_process_has_all_of_the_memory_where_there_are_no_workers(programs, tmp_path, monkeypatch, capsys):
    asked = []
    suite = check.suite
    monkeypatch.setattr(check, "suite", lambda *args: asked.append(args[1]) or suite(*args))
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    check.main(["--output", str(tmp_path), "--only", "parity", "--workers", "8"])
    assert asked == [1]


def test_suite_and_benchmarks_do_not_import_each_other():
    """Except for the tests of the benchmarks."""
    imports = re.compile(r"^\s*(?:from|import) (bench|parity)\b", re.MULTILINE)
    for folder, other in (("parity", "bench"), ("bench", "parity")):
        for path in (ROOT / folder).rglob("*.py"):
            if (ROOT / "parity" / "bench") not in path.parents:
                assert other not in imports.findall(path.read_text()), path


def test_campaign_and_sanitizers_run_without_patches():
    campaign = [path for path in (ROOT / "parity" / "campaign").glob("*.py") if not path.name.startswith("test_")]
    for path in (*campaign, ROOT / "parity" / "support" / "sanitize.py"):
        assert "pallas_patches" not in path.read_text(), path


def test_the_suite_runs_with_or_without_patches(request):
    patched = isinstance(hlo_interpreter.slicing, types.SimpleNamespace)
    assert patched == (not ON_GPU and not request.config.getoption("--unpatched"))
