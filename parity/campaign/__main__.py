"""`python -m parity campaign`: random trials for as long as wanted, and a report of what failed.

Worker processes make the cases, so that one that crashes or never ends is a failure like any other.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_models import files
from pallas_models._processes import cores
from parity import COMPILES_ALONE, campaign
from parity import bench as of_benchmarks

# Cases that a worker makes one after another: calls of ops share a program. Of parts that are not here, one. Parts
# begin in this order.
_CHUNKS = {
    "ops": 16,
    "transformations": 32,
    "shardings": 8,
    "encoders": 16,
    "exports": 4,
    "models": 8,
    "compiled": 8,
    "jobs": 1,
    "folders": 8,
    "checkpoints": 16,
    "files": 16,
    "damaged_results": 16,
    "kills": 1,
    "killed_benchmarks": 1,
}


def _parts() -> dict[str, str]:
    """The modules of this package and those against the benchmarks, by name."""
    found = {
        module.name: f"{package.__name__}.{module.name}"
        for package in (campaign, of_benchmarks)
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith(("_", "test_"))
    }
    return {name: found[name] for name in sorted(found, key=lambda name: [*_CHUNKS, name].index(name))}


PARTS = _parts()
# Parts whose processes are not like the others: they have no GPU where there is one, or so many devices of a CPU.
_ENVIRONMENTS = {
    "compiled": COMPILES_ALONE,
    "shardings": {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA warns where it gathers an array that an op takes otherwise
    },
}
# Packages without which no part is left out.
OURS = ("bench", "pallas_models", "parity", "weights")
_EXPECTED = 5.0  # seconds that they take, until that is known
_BEGINNING = 5.0  # seconds that a process takes to import what a part needs
_SHOWN = 40  # failures, one of each name


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A case that went wrong, and the command that makes it again."""

    part: str
    case: int
    name: str
    message: str
    command: str


@dataclasses.dataclass(slots=True)
class Report:
    """What came of a campaign."""

    cases: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    late: list[Failure] = dataclasses.field(default_factory=list)  # begun, and not at their end when time was up
    interrupted: bool = False
    absent: dict[str, str] = dataclasses.field(default_factory=dict)  # parts left out, and what they lack
    rows: dict[tuple[str, ...], dict[str, float]] = dataclasses.field(default_factory=dict)

    def add(self, row: tuple[str, ...], measured: dict[str, float]) -> None:
        """Adds up columns, and of a column that is named `largest` keeps the largest value."""
        kept = self.rows.setdefault(row, {})
        for column, value in measured.items():
            counted = not column.startswith("largest")
            kept[column] = kept.get(column, 0.0) + value if counted else max(kept.get(column, 0.0), value)

    def as_json(self) -> dict[str, Any]:
        return {
            "cases": dict(self.cases),
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "late": [dataclasses.asdict(case) for case in self.late],
            "absent": self.absent,
            "interrupted": self.interrupted,
            "rows": [{"row": row, **columns} for row, columns in sorted(self.rows.items())],
        }

    def table(self) -> str:
        """The rows as Markdown; empty if there are none."""
        if not self.rows:
            return ""
        columns = list(dict.fromkeys(itertools.chain.from_iterable(self.rows.values())))
        width = max(map(len, self.rows))
        lines = [
            "| " + " | ".join(["", *[""] * (width - 1), *columns]) + " |",
            "|---" * (width + len(columns)) + "|",
        ]
        for row, measured in sorted(self.rows.items()):
            cells = [f"{measured[c]:.3g}" if c in measured else "" for c in columns]
            lines.append("| " + " | ".join([*row, *[""] * (width - len(row)), *cells]) + " |")
        return "\n".join(lines)

    def summary(self) -> str:
        lines = [f"{part}: {count} cases" for part, count in self.cases.items()]
        lines += [f"{part}: left out, {reason}" for part, reason in self.absent.items()]
        alike: dict[tuple[str, str], list[Failure]] = {}
        for failure in self.failures:
            alike.setdefault((failure.part, failure.name), []).append(failure)
        for first, *others in itertools.islice(alike.values(), _SHOWN):
            more = f" and {len(others)} more of it" if others else ""
            lines.append(f"FAILED {first.command}{more}\n  {first.name}\n  {first.message}")
        lines += [f"LATE {case.command}\n  {case.name}\n  {case.message}" for case in self.late[:_SHOWN]]
        ended = ", interrupted" if self.interrupted else ""
        lines.append(f"{sum(self.cases.values())} cases, {len(self.failures)} failures{ended}")
        # Damaged texts hold what no encoding has.
        return "\n".join(lines).encode(errors="backslashreplace").decode()


def make_cases(connection: multiprocessing.connection.Connection, seed: int, options: dict[str, Any]) -> None:
    """The work of a process: it makes the cases that it is told, and tells when each begins and ends."""
    os.setsid()  # an interrupt from the keyboard is for who makes the report
    import jax

    if jax.default_backend() == "cpu":  # compiling well takes longer than running badly
        jax.config.update("jax_disable_most_optimizations", True)
    while True:
        part, start, stop = connection.recv()
        try:
            cases = importlib.import_module(part).cases(seed, **options.get(part, {}))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in OURS:
                raise
            connection.send(str(error))
            continue
        for number, case in zip(range(start, stop), itertools.islice(cases, start, stop), strict=False):
            connection.send((number, case.name, None))
            try:
                message = case.run()
            except Exception:
                message = traceback.format_exc(limit=-4)
            connection.send((number, case.name, (message, case.row, case.measured)))
        connection.send(None)


@dataclasses.dataclass(slots=True)
class _Deadline:
    """When no more cases are made, in seconds of `time.monotonic`; an interrupt makes it earlier."""

    until: float

    def left(self) -> float:
        return self.until - time.monotonic()


_STARTING_S = 120.0  # before its first case a process imports JAX, slowly where others compile beside it
_starting = threading.Lock()


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables that a process has which starts inside of this; flags of XLA are added to those that there are."""
    before = {name: os.environ.get(name) for name in changes}
    for name, value in changes.items():
        os.environ[name] = f"{before[name] or ''} {value}".strip() if name == "XLA_FLAGS" else value
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class _Worker:
    """A process that makes cases, and another one after it where it crashed or did not end."""

    def __init__(
        self,
        seed: int,
        options: dict[str, Any],
        patience: float,
        deadline: _Deadline,
        environment: Mapping[str, str],
    ) -> None:
        self.seed, self.options, self.patience, self.deadline = seed, options, patience, deadline
        self.environment = environment
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=make_cases, args=(other, self.seed, self.options), daemon=True)
        with _starting, _environment(self.environment):
            self.process.start()
        other.close()

    def make(self, part: str, start: int, stop: int) -> list[tuple[int, str, Any]] | str:
        """The results of cases [start, stop): number, name, and message, row and what was measured.

        Those that are not there in time are left out; `late` tells of the first of them. What a part lacks that
        cannot be imported is given in their place.
        """
        results: list[tuple[int, str, Any]] = []
        begun, name, since = start, "", time.monotonic()
        self.late: tuple[int, str, float] | None = None
        self.connection.send((part, start, stop))
        while (left := self.deadline.left()) > 0:
            patience = self.patience if name else max(self.patience, _STARTING_S)
            try:
                if not self.connection.poll(min(patience, left)):
                    if left < patience:
                        self.late = (begun, name, time.monotonic() - since) if name else None
                        break
                    raise TimeoutError(f"no answer in {patience:.0f} s")
                answer = self.connection.recv()
            except (EOFError, OSError, TimeoutError) as error:
                if self.deadline.left() <= 0:  # it was ended
                    break
                self.process.kill()
                self.process.join()
                what = str(error) if isinstance(error, TimeoutError) else f"crashed with {self.process.exitcode}"
                results.append((begun, name, (f"the process {what}", (), {})))
                self._start()
                if begun + 1 >= stop:
                    return results
                begun, name = begun + 1, ""
                self.connection.send((part, begun, stop))
                continue
            if answer is None:
                return results
            if isinstance(answer, str):
                return answer
            begun, name, result = answer
            since = time.monotonic()
            if result is not None:
                results.append(answer)
        return results

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def run(
    parts: Mapping[str, str],
    seed: int,
    *,
    cases: int | None = None,
    minutes: float | None = None,
    first: int = 0,
    workers: int = 1,
    patience: float = 300.0,
    options: dict[str, Any] | None = None,
    command: str = "python -m parity campaign",
) -> Report:
    """Makes cases of every part, from `first` on, of all for as long.

    Args:
      parts: modules with `cases(seed)`, by name.
      cases: how many of each part; without end when None.
      minutes: after which no more are made.
      workers: processes.
      patience: seconds after which a case that does not end has failed.
      options: keyword arguments of `cases`, by module.
      command: what failures are made again with.
    """
    options = options or {}
    deadline = _Deadline(math.inf if minutes is None else time.monotonic() + 60 * minutes)
    report, lock, running = Report(), threading.Lock(), list[_Worker]()
    last = math.inf if cases is None else first + cases
    begun, spent = dict.fromkeys(parts, first), dict.fromkeys(parts, 0.0)

    def next_chunk(made: Collection[str]) -> tuple[str, int, int] | None:
        """Cases of the part that has had the least time, counting what others do of it now.

        One that the worker has made before is preferred, unless it is ahead by what it takes to begin another.
        """
        left = [part for part in parts if begun[part] < last and part not in report.absent]
        if not left or deadline.left() <= 0:
            return None
        part = min(left, key=lambda part: spent[part] + _BEGINNING * (part not in made))
        start = begun[part]
        begun[part] = int(min(start + _CHUNKS.get(part, 1), last))
        spent[part] += _EXPECTED
        return part, start, begun[part]

    def again(part: str, number: int) -> str:
        return f"{command} --only {part} --seed {seed} --case {number}"

    def work() -> None:
        workers: dict[str, _Worker] = {}  # one for each environment
        made: set[str] = set()
        while True:
            with lock:
                chunk = next_chunk(made)
            if chunk is None:
                break
            part, start, stop = chunk
            made.add(part)
            started = time.monotonic()
            kind = part if part in _ENVIRONMENTS else ""
            if kind not in workers:
                workers[kind] = _Worker(seed, options, patience, deadline, _ENVIRONMENTS.get(part, {}))
                running.append(workers[kind])
            worker = workers[kind]
            results = worker.make(parts[part], start, stop)
            with lock:
                spent[part] += time.monotonic() - started - _EXPECTED
                if isinstance(results, str):
                    report.absent[part] = results
                    continue
                for number, name, (message, row, measured) in results:
                    report.cases[part] += 1
                    if row:
                        report.add(row, measured)
                    if message is not None:
                        report.failures.append(Failure(part, number, name, message, again(part, number)))
                if worker.late is not None:
                    number, name, seconds = worker.late
                    message = f"began {seconds:.0f} s before time was up"
                    report.late.append(Failure(part, number, name, message, again(part, number)))
        for worker in workers.values():
            worker.end()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        report.interrupted, deadline.until = True, time.monotonic()
        for worker in running:
            worker.end()
        for thread in threads:
            thread.join()
    for found in (report.failures, report.late):
        found.sort(key=lambda failure: (failure.part, failure.case))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a campaign; returns the exit code: 1 if a case failed, 2 if none could be made, 130 if stopped."""
    parser = argparse.ArgumentParser(prog="python -m parity campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after so long")
    parser.add_argument("--cases", type=int, metavar="N", help="stop after so many cases of each part")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another one gives other cases")
    parser.add_argument("--only", choices=PARTS, nargs="+", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--case", type=int, metavar="I", help="case I alone, of one part as --only")
    parser.add_argument("--implementation", metavar="NAME", help="of ops, in place of those that are drawn")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="processes; one a core")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for campaign.json and campaign.md")
    args = parser.parse_args(arguments)
    if args.case is not None and len(args.only or ()) != 1:
        parser.error("--case needs one part as --only")
    if args.minutes is None and args.cases is None and args.case is None:
        parser.error("--minutes or --cases says when to stop")
    if importlib.util.find_spec("pytest") is None:
        print("campaigns need pytest and what else the extra `test` has: pip install '.[test]'", file=sys.stderr)
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share a GPU
    os.environ.setdefault("PJRT_NPROC", "32")  # threads for the interpreter of Mosaic GPU
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = "python -m parity campaign"
    command += f" --implementation {args.implementation}" if args.implementation else ""
    started = time.monotonic()
    report = run(
        {part: PARTS[part] for part in args.only or PARTS},
        args.seed,
        cases=args.cases if args.case is None else 1,
        minutes=args.minutes,
        first=args.case or 0,
        workers=args.workers if args.case is None else 1,
        options={
            PARTS[part]: {"implementation": args.implementation}
            for part in PARTS.keys() & {"ops", "transformations"}
        },
        command=command,
    )
    ended = f"seed {args.seed}, {time.monotonic() - started:.0f} s"
    text = "\n\n".join(filter(None, [report.summary(), report.table(), ended]))
    print(text)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        files.write(args.output / "campaign.json", json.dumps(report.as_json(), indent=1) + "\n")
        files.write(args.output / "campaign.md", text + "\n")
    if not report.cases:
        print("no case came to its end; processes alone take half a minute to start", file=sys.stderr)
        return 2
    return 130 if report.interrupted else int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
