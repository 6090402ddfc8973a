"""`python -m parity`: is it right on this GPU, and how fast? For a machine with an NVIDIA GPU; needs no network.

Runs the whole suite on CUDA, then every benchmark shortened, and leaves logs, results, a page with plots and a
summary in one folder. The exit code is 0 if all went well, 1 if not, 2 if there is no CUDA device.

`python -m parity campaign`, `sanitize` and `mutate` are programs of their own; each has `--help`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROGRAMS = {"campaign": "parity.campaign.__main__", "sanitize": "parity.sanitize", "mutate": "parity.mutate"}

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
    """A program to run; one that is not `needed` may fail."""

    name: str
    command: Sequence[str]
    needed: bool = True


def environment() -> dict[str, str]:
    """That of the programs: this checkout before anything installed, and no model hub."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


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


def steps(folder: Path, workers: int) -> list[Step]:
    """What is run."""
    python = [sys.executable, "-m"]
    suite = [*python, "pytest", str(ROOT / "parity"), "-q", f"--junitxml={folder / 'parity.xml'}"]
    suite += ["-n", str(workers)] if workers and importlib.util.find_spec("xdist") else []
    results = str(folder / "bench")
    return [
        Step("parity", suite),
        Step("bench", [*python, "bench", "all", "--quick", "--show-results", "--output", results]),
        Step("report", [*python, "bench", "report", "--results", results, "--no-readme"], needed=False),
    ]


def run(step: Step, log: Path) -> int:
    """Runs a program; what it prints is shown and kept. Returns its exit code."""
    program = subprocess.Popen(
        step.command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with log.open("w", encoding="utf-8") as file, program:
        try:
            for line in program.stdout or ():
                print(line, end="", flush=True)
                file.write(line)
            return program.wait()
        except KeyboardInterrupt:  # the program has it too, and keeps what it had measured
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(30)
            program.kill()
            raise


def counts(path: Path) -> str:
    """How many tests passed, failed and were skipped, and which failed, from a JUnit file."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return "no tests were recorded"
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    lines = [f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped"]
    lines += [f"  {case.get('classname')}::{case.get('name')}" for case in failed[:20]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check or another program; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in PROGRAMS:
        return importlib.import_module(PROGRAMS[arguments[0]]).main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder of logs and results; a new one under build/check")
    parser.add_argument("--only", choices=("parity", "bench"), help="one half of it")
    parser.add_argument(
        "--workers",
        type=int,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="processes of the suite, where pytest-xdist is installed; one a core, at most 8",
    )
    args = parser.parse_args(arguments)
    try:
        gpu = describe_gpu()
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    now = datetime.datetime.now()
    folder = (args.output or ROOT / "build" / "check" / f"{now:%Y-%m-%d-%H%M%S}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    skipped = {"parity": ("bench", "report"), "bench": ("parity",)}.get(args.only, ())
    lines, code = [f"{gpu}, {now:%Y-%m-%d %H:%M}"], 0
    for step in steps(folder, args.workers):
        if step.name in skipped:
            continue
        print(f"\n== {step.name}: {' '.join(step.command)}", flush=True)
        log, started = folder / f"{step.name}.log", time.monotonic()
        try:
            status = run(step, log)
        except KeyboardInterrupt:
            lines.append(f"{step.name:<8} interrupted")
            code = 130
            break
        word = "ok" if status == 0 else f"FAILED (exit code {status})" if step.needed else "left out"
        lines.append(f"{step.name:<8} {word}, {time.monotonic() - started:.0f} s, see {log}")
        if step.name == "parity":
            lines.append(counts(folder / "parity.xml"))
        code = code or int(status != 0 and step.needed)
    lines += [f"page: {path}" for path in sorted(folder.glob("bench/*/report/index.html"))]
    lines.append(f"all in {folder}: {'everything passed' if code == 0 else 'NOT everything passed'}")
    summary = "\n".join(lines)
    (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    print(f"\n{summary}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
