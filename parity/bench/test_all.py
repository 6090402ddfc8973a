"""`python -m bench all`: what it runs, and what it says and keeps when a benchmark fails, hangs or is stopped."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import __main__ as cli
from bench.measuring import all as everything
from bench.measuring import environment, results
from pallas_models import compilation_cache
from parity.bench.test_bench import make_result

SAVE = """
import sys
from pathlib import Path
from bench.measuring import results
result = results.load(Path({source!r}))
results.save(result, Path({folder!r}))
"""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Python programs that run in place of two benchmarks, by name; one without a program is left out."""
    found: dict[str, str] = {}
    monkeypatch.setattr(everything, "BENCHMARKS", ("minilm", "sts"))
    # What is started in the background of a shell ignores SIGINT, and so do those that it starts.
    monkeypatch.setattr(everything, "GRACE_S", 0.5)

    def command(name: str, args: argparse.Namespace) -> list[str]:
        if name not in found:
            raise LookupError("needs --data")
        return [sys.executable, "-c", found[name]]

    monkeypatch.setattr(everything, "command", command)
    return found


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str], str]:
    """A program that saves a result of a benchmark under tmp_path / "out"."""

    def program(name: str) -> str:
        source = results.save(make_result(benchmark=name), tmp_path / "source")
        return SAVE.format(source=str(source), folder=str(tmp_path / "out"))

    return program


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    everything.add_arguments(parser)
    compilation_cache.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_failure_stops_nobody_else(tmp_path, programs, save, capfd):
    programs["minilm"], programs["sts"] = save("minilm") + "sys.exit(3)", save("sts")
    assert cli.main(["all", "--output", str(tmp_path / "out")]) == 1
    out = capfd.readouterr().out
    assert "== 1 of 2: minilm; at most 725 s, at most 870 s left in all" in out  # 870 * (1 - 2 / 6 / 2)
    assert re.search(r"== 2 of 2: sts; at most (8\d\d) s, at most \1 s left in all", out)
    assert "failed: minilm\n" in out and "exit code 3" in out
    for name in ("minilm", "sts"):
        assert f"results: {tmp_path / 'out' / 'nvidia-h200' / name}.json" in out


def test_success_lists_only_what_was_written(tmp_path, programs, save, capfd):
    programs["sts"] = save("sts")
    old = results.save(make_result(), tmp_path / "out")
    assert cli.main(["all", "--output", str(tmp_path / "out")]) == 0
    out = capfd.readouterr().out
    assert "minilm               left out" in out and "needs --data" in out and "failed" not in out
    assert str(old) not in out and "sts.json" in out


def test_nothing_ran(tmp_path, programs, capfd):
    assert cli.main(["all", "--output", str(tmp_path)]) == 1
    assert "no results were written" in capfd.readouterr().out


HANG = "\nimport time\nprint('measuring', flush=True)\ntime.sleep(60)"
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


@pytest.mark.parametrize("first", ["", STUBBORN])
def test_budget(tmp_path, programs, save, capfd, monkeypatch, first):
    monkeypatch.setattr(everything, "files", lambda folder: {p: 0 for p in folder.glob("*/*.json")})
    programs["minilm"], programs["sts"] = first + save("minilm") + HANG, "print('ran')"
    waits = []

    class UpOnceSaved(subprocess.Popen):
        """The first one's time is up when its result is there, however fast the machine is."""

        def wait(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 1:
                while self.poll() is None and not (tmp_path / "out" / "nvidia-h200" / "minilm.json").exists():
                    time.sleep(0.01)
                later = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 6.0)
                monkeypatch.setattr(everything, "time", later)
            return super().wait(timeout)

    monkeypatch.setattr(everything.subprocess, "Popen", UpOnceSaved)
    assert cli.main(["all", "--output", str(tmp_path / "out"), "--budget", "7"]) == 1
    out = capfd.readouterr().out
    assert "took longer than the 6 s left for it" in out and "ran\n" in out and "sts                  ok" in out
    assert results.load(tmp_path / "out" / "nvidia-h200" / "minilm.json") == make_result()


def test_interrupted(tmp_path, programs, capfd, monkeypatch):
    programs["minilm"] = programs["sts"] = HANG
    waits = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(everything.subprocess, "Popen", Interrupted)
    assert cli.main(["all", "--output", str(tmp_path)]) == 130
    out = capfd.readouterr().out
    assert "minilm               FAILED" in out and "interrupted\n" in out
    assert "sts                  left out" in out and "interrupted before it" in out
    # Once more where this process ignores SIGINT: then the benchmark does too, and is ended by force.
    assert len(waits) > 1, "the benchmark was not waited for"


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_signals(tmp_path, programs, save, capfd, number):
    programs["minilm"] = save("minilm") + f"\nimport os, signal\nos.kill(os.getppid(), signal.{number})" + HANG
    handlers = [signal.getsignal(of) for of in (signal.SIGINT, signal.SIGTERM)]
    if number == "SIGINT" and handlers[0] is not signal.default_int_handler:
        pytest.skip("SIGINT is ignored or handled by another in this process")
    assert cli.main(["all", "--output", str(tmp_path / "out")]) == 130
    out = capfd.readouterr().out
    assert "minilm.json" in out and "interrupted before it" in out
    assert [signal.getsignal(of) for of in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_interrupted_benchmark(capsys, monkeypatch):
    from bench.reporting import report

    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run", run)
    assert cli.main(["report"]) == 130
    assert "interrupted" in capsys.readouterr().err


TOGETHER = """
import json, os, sys, time
from pathlib import Path
folder, name = Path({folder!r}), {name!r}
print(name, "begins", flush=True)
(folder / name).write_text(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0))]))
until = time.monotonic() + 20
while not (folder / {other!r}).exists():
    assert time.monotonic() < until, "the other does not run beside it"
    time.sleep(0.01)
print(name, "ends")
"""


def test_benchmarks_on_gpus_of_their_own(tmp_path, programs, capfd, monkeypatch):
    monkeypatch.setattr(everything, "BENCHMARKS", ("scaling", "minilm", "sts"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    monkeypatch.setenv("BENCH_BESIDE", "")
    for name, other in (("minilm", "sts"), ("sts", "minilm")):
        programs[name] = TOGETHER.format(folder=str(tmp_path), name=name, other=other)
    programs["scaling"] = "import os; print('all of', os.environ['CUDA_VISIBLE_DEVICES'])"
    only = ["--only", "scaling,minilm,sts"]
    assert cli.main(["all", *only, "--gpus", "2", "--output", str(tmp_path / "out")]) == 0
    out = capfd.readouterr().out
    assert "== 1 of 3: minilm on GPU 5;" in out and "== 2 of 3: sts on GPU 3;" in out
    assert "minilm begins\nminilm ends\n== minilm: ok" in out and "sts begins\nsts ends\n== sts: ok" in out
    assert out.index("3 of 3: scaling;") > max(out.index("sts ends"), out.index("minilm ends"))
    assert "all of 5,3,1\n" in out
    (gpu, cores), (other, others) = (json.loads((tmp_path / name).read_text()) for name in ("minilm", "sts"))
    assert (gpu, other) == ("5", "3")
    assert len(os.sched_getaffinity(0)) == 1 or not set(cores) & set(others)


def test_what_ran_beside_a_benchmark_is_told(monkeypatch):
    place = everything.Place("1", frozenset(os.sched_getaffinity(0)), 3)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    found = environment.describe()
    assert found["beside"] == "benchmarks, one on each of the other GPUs used (3)"
    assert found["cores"] == str(len(os.sched_getaffinity(0)))
    monkeypatch.delenv("BENCH_BESIDE")
    assert "beside" not in environment.describe()


@pytest.mark.parametrize("visible", [None, "", "0"])
def test_fewer_gpus_than_asked_for(tmp_path, capsys, monkeypatch, visible):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cli.main(["all", "--gpus", "2", "--output", str(tmp_path)]) == 2
    assert f"--gpus 2: there are {len(visible or '')}, " in capsys.readouterr().err


def test_options_reach_the_benchmarks_that_have_them(tmp_path):
    args = options(
        "--quick", "--dtype", "bf16,fp32", "--output", "out", "--show-results", "--data", "d", "--weights", "w"
    )
    args.compilation_cache = None
    minilm, sts = (everything.command(name, args)[3:] for name in ("minilm", "sts"))
    for line in (minilm, sts):
        line.remove("--no-compilation-cache")
    shared = ["--output", "out", "--dtype", "bf16,fp32", "--quick", "--show-results"]
    for line in (minilm, sts):
        assert set(shared) <= set(line)
    assert "--data" in sts and "--data" not in minilm
    assert line[line.index("--weights") + 1] == "w"
    assert "--no-compile" in minilm and "--no-compile" not in sts
    for name, line in (("minilm", minilm), ("sts", sts)):  # the benchmarks take what they are given
        parser = argparse.ArgumentParser()
        cli.module_of(name).add_arguments(parser)
        assert parser.parse_args(line[1:]).dtype == ["bf16", "fp32"]


def test_defaults():
    full, quick = options(), options("--quick", "--only", "minilm")
    assert full.only == list(cli.BENCHMARKS) and everything.budget_of(full) < 15 * 60
    assert not {"--dtype", "--shapes", "--no-compile"} & set(everything.command("minilm", full))
    assert everything.budget_of(quick) < 180
    with pytest.raises(LookupError, match="needs --data"):
        everything.command("sts", full)


def test_limits():
    """No benchmark is given all the time of those after it, and what is not used goes to the next."""
    assert everything.limit(["gemm"], 100) == 100
    assert everything.limit(["gemm", "norm"], 100) == 75
    assert everything.limit(["minilm", "gemm", "norm"], 90) == 75


def test_shapes():
    args = options("--shapes", "gemm:512x512x512,64x128x32,norm:8x9+rms", "--only", "gemm,norm,minilm")
    assert args.shapes == {"gemm": "512x512x512,64x128x32", "norm": "8x9+rms"}
    line = everything.command("gemm", args)
    assert line[line.index("--shapes") + 1] == "512x512x512,64x128x32"
    assert "--shapes" not in everything.command("minilm", args)


def test_modes_reach_the_benchmarks_that_have_gradients():
    args = options("--mode", "both,forward")
    line = everything.command("norm", args)
    assert line[line.index("--mode") + 1] == "forward,both"
    assert not [name for name in ("minilm", "train") if "--mode" in everything.command(name, args)]


def test_shapes_of_a_benchmark_that_does_not_run(capsys):
    assert cli.main(["all", "--only", "norm", "--shapes", "gemm:8x8x8"]) == 2
    assert "--shapes: gemm is not among --only norm" in capsys.readouterr().err


def test_a_benchmark_that_cannot_be_imported(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(everything, "BENCHMARKS", ("absent",))
    monkeypatch.setitem(cli.COMMANDS, "absent", "cases")
    assert cli.main(["all", "--output", str(tmp_path)]) == 1
    assert "ModuleNotFoundError: No module named 'bench.cases.absent'" in capfd.readouterr().out


def test_a_real_benchmark(tmp_path, capfd):
    """In its own process, from another folder: it does not find its data."""
    data = tmp_path / "nothing"
    assert cli.main(["all", "--only", "sts", "--data", str(data), "--output", str(tmp_path / "out")]) == 1
    out = capfd.readouterr().out
    assert f"{data}/stsb-en-test.csv" in out and "exit code 2" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "minilm,conv"], "unknown benchmark conv; expected some of minilm, "),
        (["--shapes", "8x8"], "'8x8': expected BENCHMARK:SHAPE"),
        (["--shapes", "conv:8x8"], "unknown benchmark conv"),
        (["--shapes", "gemm:8x8"], "gemm: '8x8' is no shape; expected MxNxK, such as 512x512x512,"),
        (["--shapes", "norm:8x8+causal"], "norm: '8x8+causal' is no shape; expected ROWSxCOLUMNS[+rms]"),
        (["--shapes", "sts:8x8"], "sts takes no shapes"),
        (["--budget", "0"], "'0' is no number of seconds above 0"),
        (["--budget", "long"], "'long' is no number of seconds above 0"),
        (["--gpus", "0"], "'0' is no number of GPUs above 0"),
        (["--dtype", "fp8"], "unknown dtype fp8"),
    ],
)
def test_wrong_options(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["all", *arguments])
    assert message in capsys.readouterr().err


def test_help_when_a_benchmark_cannot_be_imported(capsys, monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", {"report": "reporting", "absent": "cases"})
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "cannot be loaded: No module named 'bench.cases.absent'" in out
        and "make pages with tables and plots" in out
    )
    with pytest.raises(ImportError, match=r"bench\.cases\.absent"):
        cli.main(["absent"])


def test_resume_runs_what_is_not_measured_at_this_commit(tmp_path, programs, save, capfd, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr(everything.results, "slug", lambda device: "nvidia-h200")  # in place of this machine's
    environment = make_result().environment | {"commit": "abc"}
    programs["minilm"], programs["sts"] = "print('ran minilm')", save("sts") + "print('ran sts')"
    for changes in ({"partial": True}, {"environment": make_result().environment}):
        results.save(make_result(benchmark="minilm", **({"environment": environment} | changes)), out)
    results.save(make_result(benchmark="sts", environment=environment), out)
    assert cli.main(["all", "--resume", "--output", str(out)]) == 0
    said = capfd.readouterr().out
    assert "== 1 of 1: minilm" in said and "ran minilm" in said and "ran sts" not in said
    assert re.search(r"sts +left out .*measured before", said)
    results.save(make_result(benchmark="minilm", environment=environment), out)
    assert cli.main(["all", "--resume", "--output", str(out)]) == 0
    assert "ran" not in capfd.readouterr().out
    (out / "nvidia-h200" / "sts.json").write_text("{")
    assert cli.main(["all", "--resume", "--output", str(out)]) == 0
    assert "ran sts" in capfd.readouterr().out


def test_resume_runs_the_modes_that_were_not_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr(everything.results, "slug", lambda device: "nvidia-h200")
    environment = make_result().environment | {"commit": "abc"}
    for name in ("norm", "minilm", "sts"):
        results.save(make_result(benchmark=name, environment=environment), tmp_path)

    def todo(*arguments):
        args = options("--resume", "--only", "norm,minilm,sts,gemm", "--output", str(tmp_path), *arguments)
        return {name: found.mode for name, found in everything.left_to_do(args).items()}

    assert todo("--mode", "forward,both") == {"norm": ["both"], "gemm": ["forward", "both"]}
    assert todo("--mode", "forward") == {"gemm": ["forward"]} and todo() == {"gemm": None}
