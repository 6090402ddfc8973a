"""Runs every benchmark, each in a process of its own, so that one that fails or hangs does not stop the others.

All of them share a time budget. A benchmark may use the time that earlier ones left over and half of the time that
is meant for later ones. Then it is interrupted, and its measurements are kept as a partial result. The options
given here are passed to each benchmark that has them. With --resume they go on where an earlier run ended:
benchmarks whose whole result of this GPU and commit is there are left out, or run in the modes that it lacks.

With --gpus N as many benchmarks run side by side, each on a GPU and on cores of its own, and what one prints is
shown when it ends. Those of several GPUs come last and alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bench.__main__ import BENCHMARKS, module_of
from bench.measuring import results
from bench.measuring.harness import parse_dtypes, parse_modes

HELP = "every benchmark, one after the other"

BUDGET_S, QUICK_BUDGET_S = 870.0, 170.0  # of all together; with --quick
SHARES = {  # of the budget; 1 for the others
    "minilm": 4.0,
    "trimul": 4.0,
    "train": 3.0,
    "attention": 3.0,
    "pairformer": 3.0,
    "startup": 3.0,
    "triangle-attention": 2.0,
    "sts": 2.0,
    "corpus": 2.0,
}
FORWARD_ONLY = ("minilm",)  # token ids have no gradients
SEVERAL_GPUS = ("scaling",)  # take all there are
POLL_S = 0.1  # between two looks at the benchmarks that run
GRACE_S = 15.0  # between the request to stop and the end by force

Status = Literal["ok", "FAILED", "left out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a benchmark ended: its status, why, and the seconds that it took."""

    name: str
    status: Status
    message: str = ""
    seconds: float = 0.0


def parse_names(text: str) -> list[str]:
    """Parses `minilm,sts`.

    Raises:
      argparse.ArgumentTypeError: something in it is no benchmark.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in BENCHMARKS]:
        message = f"unknown benchmark {', '.join(unknown)}; expected some of {', '.join(BENCHMARKS)}"
        raise argparse.ArgumentTypeError(message)
    return names


def parse_shapes(text: str) -> dict[str, str]:
    """Parses `gemm:512x512x512,1024x1024x1024,minilm:1x16`: shapes belong to the benchmark named before them.

    Raises:
      argparse.ArgumentTypeError: a shape without a benchmark, a name that is no benchmark, or one that takes no
        shapes, or not such ones.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for item in text.split(","):
        head, colon, shape = item.strip().partition(":")
        if colon:
            (name,) = parse_names(head)
        elif name:
            shape = head
        else:
            message = f"{item!r}: expected BENCHMARK:SHAPE, such as gemm:512x512x512,minilm:1x16"
            raise argparse.ArgumentTypeError(message)
        found.setdefault(name, []).append(shape)
    for name, shapes in found.items():
        action = options_of(name).get("--shapes")
        if action is None or not callable(action.type):
            raise argparse.ArgumentTypeError(f"{name} takes no shapes")
        try:
            action.type(",".join(shapes))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None
    return {name: ",".join(shapes) for name, shapes in found.items()}


def parse_seconds(text: str) -> float:
    """Parses a number of seconds above 0.

    Raises:
      argparse.ArgumentTypeError: it is something else.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def parse_count(text: str) -> int:
    """Parses how many GPUs.

    Raises:
      argparse.ArgumentTypeError: it is no whole number above 0.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs above 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench all`."""
    parser.add_argument("--only", type=parse_names, default=list(BENCHMARKS), help="e.g. minilm,sts")
    parser.add_argument(
        "--quick", action="store_true", help="shortened, under 3 minutes in all, without torch.compile"
    )
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        default={},
        help="e.g. gemm:512x512x512,minilm:1x16,64x128; benchmarks not named here run their own",
    )
    parser.add_argument("--dtype", type=parse_dtypes, help="fp32, fp16, bf16 or all; each benchmark has a default")
    parser.add_argument(
        "--mode",
        type=parse_modes,
        help="some of forward,backward,both; each benchmark that has them has a default",
    )
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--resume", action="store_true", help="leave out what is measured at this commit")
    parser.add_argument("--show-results", action="store_true", help="print the tables of each benchmark")
    parser.add_argument(
        "--gpus",
        type=parse_count,
        default=1,
        metavar="N",
        help="run on N GPUs side by side, one benchmark each; 1",
    )
    parser.add_argument("--weights", help="checkpoint folder of the benchmarks of MiniLM")
    parser.add_argument("--data", type=Path, help="folder of the sentences that sts, corpus and startup read")
    parser.add_argument(
        "--budget",
        type=parse_seconds,
        metavar="S",
        help=f"seconds for all together; {BUDGET_S:.0f}, with --quick {QUICK_BUDGET_S:.0f}",
    )


def budget_of(args: argparse.Namespace) -> float:
    """Seconds that all benchmarks together may take."""
    return float(args.budget or (QUICK_BUDGET_S if args.quick else BUDGET_S))


def limit(names: Sequence[str], left: float) -> float:
    """Seconds that the first of the benchmarks still to run may take, of those that are left."""
    shares = [SHARES.get(name, 1.0) for name in names]
    return left * (1 - 0.5 * sum(shares[1:]) / sum(shares))


def options_of(name: str) -> dict[str, argparse.Action]:
    """The options that a benchmark has."""
    parser = argparse.ArgumentParser(add_help=False)
    module_of(name).add_arguments(parser)
    return dict(parser._option_string_actions)


def command(name: str, args: argparse.Namespace) -> list[str]:
    """How to run a benchmark.

    Raises:
      LookupError: it needs an option that was not given.
    """
    given: dict[str, list[str] | None] = {
        "--output": [str(args.output)],
        "--dtype": [",".join(args.dtype)] if args.dtype else None,
        "--mode": [",".join(args.mode)] if args.mode and name not in FORWARD_ONLY else None,
        "--shapes": [args.shapes[name]] if name in args.shapes else None,
        "--weights": [args.weights] if args.weights else None,
        "--data": [str(args.data)] if args.data else None,
        "--quick": [] if args.quick else None,
        "--no-compile": [] if args.quick else None,
        "--show-results": [] if args.show_results else None,
    }
    cache = args.compilation_cache
    found = [sys.executable, "-m", "bench", name]
    found += ["--no-compilation-cache"] if cache is None else ["--compilation-cache", str(cache)]
    for option, action in options_of(name).items():
        value = given.get(option)
        if value is not None:
            found += [option, *value]
        elif action.required:
            raise LookupError(f"needs {option}")
    return found


def _environment() -> dict[str, str]:
    """Of a process that finds this checkout."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A GPU and the cores that a benchmark may use while others use the rest.

    Attributes:
      gpu: as CUDA_VISIBLE_DEVICES names it.
      cores: numbers of cores.
      others: how many GPUs others may use.
    """

    gpu: str
    cores: frozenset[int]
    others: int

    def environment(self) -> dict[str, str]:
        """What tells a process of it; results keep the last of it."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu, "BENCH_BESIDE": str(self.others)}


def places(count: int) -> list[Place]:
    """So many GPUs, each with its part of the cores.

    Raises:
      ValueError: there are fewer GPUs, or CUDA_VISIBLE_DEVICES names fewer.
    """
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listing = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
            named = ",".join(subprocess.check_output(listing, text=True, timeout=20).split())
    gpus = list(filter(None, (named or "").split(",")))
    if len(gpus) < count:
        raise ValueError(f"--gpus {count}: there are {len(gpus)}, of those that CUDA_VISIBLE_DEVICES leaves")
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // count, 1)
    parts = [frozenset(cores[i * each : (i + 1) * each] or cores) for i in range(count)]
    return [Place(gpu, part, count - 1) for gpu, part in zip(gpus, parts, strict=False)]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process, and ends it by force if that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A benchmark in a process of its own, which writes to the same place as this one, or to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    budget: float
    started: float
    place: Place | None
    log: Path | None

    @classmethod
    def begin(cls, name: str, args: argparse.Namespace, budget: float, place: Place | None) -> Running | Outcome:
        """Starts it, on its GPU and cores if given; or tells why it cannot be."""
        try:
            line = command(name, args)
        except LookupError as error:
            return Outcome(name=name, status="left out", message=str(error))
        except Exception as error:  # a benchmark that cannot be imported must not stop the others
            return Outcome(name=name, status="FAILED", message=f"{type(error).__name__}: {error}")
        if place is None:
            return cls(name, subprocess.Popen(line, env=_environment()), budget, time.monotonic(), None, None)
        number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, place.cores)  # the process has them from here
        try:
            environment = _environment() | place.environment()
            process = subprocess.Popen(line, env=environment, stdout=number, stderr=number)
        finally:
            os.sched_setaffinity(0, before)
            os.close(number)
        return cls(name, process, budget, time.monotonic(), place, Path(path))

    def outcome(self) -> Outcome | None:
        """How it ended, interrupted if its time is up; None as long as it runs."""
        try:
            code = self.process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() < self.started + self.budget:
                return None
            stop(self.process)
            return self.ended("FAILED", f"took longer than the {self.budget:.0f} s left for it (--budget)")
        if code < 0:
            return self.ended("FAILED", f"ended by signal {-code}")
        return self.ended("FAILED", f"exit code {code}") if code else self.ended("ok")

    def ended(self, status: Status, message: str = "") -> Outcome:
        """Its outcome; shows what it has printed, if that was kept."""
        if self.log is not None:
            print(self.log.read_text(errors="replace"), end="", flush=True)
            self.log.unlink()
        print(f"== {self.name}: {status} {message}".rstrip(), flush=True)
        seconds = time.monotonic() - self.started
        return Outcome(name=self.name, status=status, message=message, seconds=seconds)


def summary(outcomes: list[Outcome], written: list[Path]) -> str:
    """How each benchmark ended, and the files that were written."""
    lines = [f"{o.name:<20} {o.status:<9} {o.seconds:5.0f} s  {o.message}".rstrip() for o in outcomes]
    lines += [f"results: {path}" for path in written] or ["no results were written"]
    if failed := [o.name for o in outcomes if o.status == "FAILED"]:
        lines.append(f"failed: {', '.join(failed)}")
    return "\n".join(lines)


def measured(folder: Path) -> dict[str, set[str]]:
    """The modes of the benchmarks whose whole results of this GPU and this commit the folder holds."""
    # In a process of its own, which gives the memory of the GPU back.
    code = "from bench.measuring import environment as e; print(e.device(), e.commit(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=True
    )
    device, commit = done.stdout.splitlines()[-2:]
    environment = {"device": device, "commit": commit}
    found = {name: results.earlier(name, environment, folder) for name in BENCHMARKS}
    return {name: {case.mode for case in result.cases} for name, result in found.items() if result}


def left_to_do(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The benchmarks to run and their options: with --resume without modes, or at all, that are measured."""
    done = measured(args.output) if args.resume else {}
    found = {}
    for name in args.only:
        modes = args.mode
        if name in done:
            has_modes = bool(modes) and name not in FORWARD_ONLY and "--mode" in options_of(name)
            modes = [mode for mode in modes if mode not in done[name]] if has_modes else []
            if not modes:
                continue
        found[name] = argparse.Namespace(**vars(args) | {"mode": modes})
    return found


def files(folder: Path) -> dict[Path, int]:
    """The result files of all GPUs, with when they were written."""
    return {path: path.stat().st_mtime_ns for path in results.stored(folder)}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run(args: argparse.Namespace) -> int:
    """Runs the benchmarks; returns 1 if one failed or none ran, 2 for what cannot be run, 130 if stopped."""
    if idle := [name for name in args.shapes if name not in args.only]:
        print(f"--shapes: {', '.join(idle)} is not among --only {','.join(args.only)}", file=sys.stderr)
        return 2
    try:
        free = [None] if args.gpus == 1 else places(args.gpus)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    previous = signal.signal(signal.SIGTERM, _interrupt)  # no benchmark is left behind running
    try:
        return run_all(args, free)
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_all(args: argparse.Namespace, free: Sequence[Place | None]) -> int:
    """Runs the benchmarks where nothing else runs and prints how each ended; returns the exit code."""
    before, started = files(args.output), time.monotonic()
    todo = left_to_do(args)
    waiting = list(todo)
    if args.gpus > 1:  # the longest first
        waiting.sort(key=lambda name: (name in SEVERAL_GPUS, -SHARES.get(name, 1.0)))
    outcomes = [
        Outcome(name=name, status="left out", message="measured before") for name in args.only if name not in todo
    ]
    count, free, running, interrupted = len(waiting), list(free), list[Running](), False
    try:
        while waiting or running:
            while waiting and free and not (running and waiting[0] in SEVERAL_GPUS):
                left = max(budget_of(args) - (time.monotonic() - started), 1.0)
                seconds = min(limit(waiting, left * args.gpus), left)
                times = f"at most {seconds:.0f} s, at most {left:.0f} s left in all"
                name, place = waiting.pop(0), free.pop(0)
                on = f" on GPU {place.gpu}" if place and name not in SEVERAL_GPUS else ""
                print(f"\n== {count - len(waiting)} of {count}: {name}{on}; {times}", flush=True)
                begun = Running.begin(name, todo[name], seconds, place if name not in SEVERAL_GPUS else None)
                if isinstance(begun, Running):
                    running.append(begun)
                else:
                    print(f"== {name}: {begun.status} {begun.message}".rstrip(), flush=True)
                    outcomes.append(begun)
                    free.append(place)
            for one in list(running):
                if (ended := one.outcome()) is not None:
                    running.remove(one)
                    outcomes.append(ended)
                    free.append(one.place)
    except KeyboardInterrupt:
        interrupted = True
        for one in running:
            stop(one.process)
            outcomes.append(one.ended("FAILED", "interrupted"))
        outcomes += [Outcome(name=name, status="left out", message="interrupted before it") for name in waiting]
    written = [path for path, at in files(args.output).items() if before.get(path) != at]
    print(f"\n{summary(outcomes, written)}\n{time.monotonic() - started:.0f} s in all", flush=True)
    if interrupted:
        return 130
    return int(
        any(o.status == "FAILED" for o in outcomes)
        or (count > 0 and all(o.status == "left out" for o in outcomes))
    )
