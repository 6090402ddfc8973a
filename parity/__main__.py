"""`python -m parity`: is it right on this GPU, and how fast? For a machine with an NVIDIA GPU; needs no network.

Runs the whole suite on CUDA, then every benchmark shortened, and leaves logs, results, a page with plots and a
summary in one folder. The exit code is 0 if all went well, 1 if not, 2 if there is no CUDA device.

The processes of the suite share the GPU's memory: a test that needs more than its part runs again with fewer
beside it, in the end alone. Compiled programs are kept beside the folder, for other processes and the next run.

`python -m parity campaign`, `sanitize`, `lowered`, `timed`, `mutate`, `support` and `compiled` are programs, each
with `--help`.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from parity import ROOT
from parity.support import sharing
from parity.support.sharing import GB

# Every test fits into as much, alone on the GPU: where one does not, it fails.
ENOUGH = 22 * GB

# Seconds in which a program ends after an interrupt.
PATIENCE = 30.0

PROGRAMS = {
    "campaign": "parity.campaign.__main__",
    "sanitize": "parity.support.sanitize",
    "lowered": "parity.support.lowered",
    "timed": "parity.bench._timed",
    "mutate": "parity.support.mutate",
    "support": "parity.support.support_matrix",
    "compiled": "parity.support.compiled",
}

DESCRIBE = """
import jax
try:
    device = jax.devices("cuda")[0]
except RuntimeError as error:
    raise SystemExit(f"JAX {jax.__version__} finds no CUDA device: {error}")
print(f"{device.device_kind}, compute capability {device.compute_capability}, JAX {jax.__version__}")
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """A program to run, with additions to its environment; one that is not `needed` may fail."""

    name: str
    command: Sequence[str]
    needed: bool = True
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of the GPU: `usable` by the suite, of `total`."""

    usable: float
    total: float


def environment() -> dict[str, str]:
    """The environment of the programs: this checkout before anything installed, and no model hub.

    Python keeps what it compiles, whatever the environment says: tests start a hundred processes.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = {"PYTHONDONTWRITEBYTECODE": ""}
    return os.environ | kept | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def describe_gpu() -> str:
    """The GPU and the version of JAX.

    Raises:
      LookupError: JAX finds no GPU, or is not installed.
    """
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], capture_output=True, text=True, env=environment(), check=False
    )
    if done.returncode:
        raise LookupError((done.stderr.strip().splitlines() or ["JAX does not start"])[-1])
    return done.stdout.strip()


def suite(
    folder: Path,
    workers: int,
    memory: Memory,
    chosen: Sequence[str] = (),
    tests: Sequence[str] = (),
    gpus: int = 1,
) -> Step:
    """The suite, or those tests of it again, in so many processes on each of the GPUs."""
    name = f"parity-{workers}" if tests else "parity"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={folder / name}.xml"]
    if tests:  # too many for a command line
        given = folder / f"{name}.tests"
        given.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
        command += ["--whole-grids", f"@{given}"]
    else:
        command += chosen or [str(ROOT / "parity")]
    if workers * gpus > 1:
        command += ["-n", str(workers * gpus), "--dist", "worksteal"]
    share = sharing.fraction(workers, memory.usable, memory.total)
    set_for_it = {
        sharing.COMPILED: str(folder.parent / "compilation"),
        sharing.FRACTION: str(share),
        sharing.GPUS: str(gpus),
    }
    if tests and workers * gpus == 1:  # what JAX keeps of one large test, PyTorch would lack in the next
        set_for_it[sharing.ALLOCATOR] = sharing.GIVES_BACK
    return Step(name, command, environment=set_for_it)


def benchmarks(folder: Path) -> list[Step]:
    """The benchmarks, and the report of their results."""
    python, results = [sys.executable, "-m"], str(folder / "bench")
    return [
        Step("bench", [*python, "bench", "all", "--quick", "--show-results", "--output", results]),
        Step("report", [*python, "bench", "report", "--results", results, "--no-readme"], needed=False),
    ]


def show(printed: IO[str], log: Path) -> None:
    """Shows and keeps lines, each at once: they are there if this program is killed.

    Closes what it reads them from, so that a program ends that nobody listens to.
    """
    with log.open("w", encoding="utf-8", buffering=1) as file, printed:
        for line in printed:
            print(line, end="", flush=True)
            file.write(line)


def run(step: Step, log: Path) -> int:
    """Runs a program; what it prints is shown and kept. Returns its exit code.

    Raises:
      KeyboardInterrupt: after an interrupt, which the program has too: it ends by itself within PATIENCE, and
        says what it has found. Further ones change nothing: `timeout` sends two.
    """
    program = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment() | step.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reader = threading.Thread(target=show, args=(program.stdout, log), daemon=True)
    interrupts: list[float] = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(time.monotonic()))
    try:
        reader.start()
        while (status := program.poll()) is None:
            if interrupts and time.monotonic() > interrupts[0] + PATIENCE:
                program.kill()
            time.sleep(0.1)
        reader.join(5)  # a process that the program left behind may never close what is read
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt
    return status


def outcomes(paths: Sequence[Path]) -> dict[str, ElementTree.Element]:
    """The last outcome of each test in JUnit files, by its name."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ElementTree.ParseError):
            for case in ElementTree.parse(path).iter("testcase"):
                found[f"{case.get('classname')}::{case.get('name')}"] = case
    return found


def has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def needs_memory(case: ElementTree.Element) -> str | None:
    """How pytest calls a test that ran out of its share of memory; None for any other."""
    return _property(case, "needs_memory")


def _property(case: ElementTree.Element, name: str) -> str | None:
    values = [p.get("value") for p in case.iter("property") if p.get("name") == name]
    return values[0] if values else None


def fewer(workers: int, usable: float, cases: Iterable[ElementTree.Element]) -> int:
    """In how many processes tests run again that lacked memory: as many as have room for the largest.

    How much a test takes is known where it said so before it began. If one did not, it is a quarter of the
    processes at most, until all tests fit.
    """
    sizes = [_property(case, "needs_bytes") for case in cases]
    room = min((int(usable // float(size)) for size in sizes if size), default=workers)
    return max(1, min(workers // (4 if None in sizes else 2), room))


def counts(paths: Sequence[Path]) -> str:
    """How many tests passed, failed and were skipped, and which failed, from JUnit files."""
    cases = outcomes(paths)
    if not cases:
        return "no tests were recorded"
    failed = [name for name, case in cases.items() if has_failed(case)]
    skipped = sum(case.find("skipped") is not None for case in cases.values())
    lines = [f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped"]
    lines += [f"  {name}" for name in failed[:20]]
    too_large = [name for name, case in cases.items() if needs_memory(case)]
    lines += [f"{len(too_large)} of the skipped need more memory than there is:"] if too_large else []
    return "\n".join([*lines, *(f"  {name}" for name in too_large)])


def slowest(paths: Sequence[Path]) -> str:
    """The ten slowest tests and the five slowest files, with their seconds, from JUnit files."""
    tests = {name: float(case.get("time") or 0) for name, case in outcomes(paths).items()}
    files = collections.Counter[str]()
    for name, seconds in tests.items():
        files[name.split("::")[0]] += seconds
    found = [*collections.Counter(tests).most_common(10), *files.most_common(5)]
    return "".join(f"{seconds:7.1f} s  {name}\n" for name, seconds in found)


def run_suite(
    folder: Path, workers: int, memory: Memory, chosen: Sequence[str], gpus: int
) -> tuple[int, list[str]]:
    """Runs the suite or what is chosen of it, and again what lacked memory; the exit code and lines to print."""
    code, lines, paths, tests = 0, [], [], []
    with sharing.watch() as most:
        while True:
            step, last = suite(folder, workers, memory, chosen, tests, gpus), workers == 1 and bool(tests)
            started = time.monotonic()
            status = run_step(step, folder)
            seconds = time.monotonic() - started
            paths.append(folder / f"{step.name}.xml")
            lacking = {name: case for case in outcomes(paths).values() if (name := needs_memory(case))}
            tests = list(lacking)
            lines.append(
                said(step, status, f"{seconds:.0f} s, workers: {workers}{' a GPU' if gpus > 1 else ''}", folder)
            )
            code = code or int(status != 0)
            if not tests or last:  # a single process that began with all tests kept memory of the large ones
                break
            lines[-1] += f"; {len(tests)} tests need more memory"
            workers = fewer(workers, memory.usable, lacking.values())
    (folder / "slowest.txt").write_text(slowest(paths), encoding="utf-8")
    used = f"at most {most.bytes / GB:.1f} GB of the GPU in use, {memory.usable / GB:.1f} GB to be used"
    return code or int(bool(tests) and memory.usable >= ENOUGH), [*lines, counts(paths), used]


def run_step(step: Step, folder: Path) -> int:
    print(f"\n== {step.name}: {' '.join(step.command)}", flush=True)
    return run(step, folder / f"{step.name}.log")


def said(step: Step, status: int, details: str, folder: Path) -> str:
    """A line of the summary."""
    word = "ok" if status == 0 else f"FAILED (exit code {status})" if step.needed else "left out"
    return f"{step.name:<8} {word}, {details}, see {folder / step.name}.log"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check or another program; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in PROGRAMS:
        return importlib.import_module(PROGRAMS[arguments[0]]).main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder of logs and results; a new one under build/check")
    parser.add_argument("--only", choices=("parity", "bench"), help="one half of it")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files or tests of the suite; all of it")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of the suite a GPU, where pytest-xdist is installed; one a core, if its memory has room",
    )
    parser.add_argument(
        "--memory", type=float, metavar="GB", help="of the GPU's memory, how much the suite may use (all)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="spread the suite over N GPUs, each process on one; tests of several GPUs need a run without",
    )
    args = parser.parse_args(arguments)
    try:
        gpu = describe_gpu()
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    total = (sharing.gpu_memory() or (0.0, 80 * GB))[1]
    memory = Memory(min(total, args.memory * GB) if args.memory else total, total)
    workers = args.workers or sharing.workers(len(os.sched_getaffinity(0)) // args.gpus, memory.usable)
    if not importlib.util.find_spec("xdist"):
        workers = 1  # which has all of the memory
    now = datetime.datetime.now()
    folder = (args.output or ROOT / "build" / "check" / f"{now:%Y-%m-%d-%H%M%S}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines, code = [f"{gpu}, {now:%Y-%m-%d %H:%M}"], 0
    try:
        if args.only != "bench":
            code, found = run_suite(folder, workers, memory, args.tests, args.gpus)
            lines += found
        for step in benchmarks(folder) if args.only != "parity" else ():
            started = time.monotonic()
            status = run_step(step, folder)
            lines.append(said(step, status, f"{time.monotonic() - started:.0f} s", folder))
            code = code or int(status != 0 and step.needed)
    except KeyboardInterrupt:
        lines.append("interrupted")
        code = 130
    lines += [f"page: {path}" for path in sorted(folder.glob("bench/*/report/index.html"))]
    lines.append(f"all in {folder}: {'everything passed' if code == 0 else 'NOT everything passed'}")
    summary = "\n".join(lines)
    (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    print(f"\n{summary}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
