"""`python -m parity mutate`: do the tests notice when something is broken?

It applies the breaks of `parity/support/mutants.txt`, one after another, to a copy of the project and runs the
tests that each break names. A mutant lives if its tests pass. It is not tried where they are all skipped, as on a
version of JAX without the kernel's backend: `--but` tries those that are left on another. The exit code is 0 if
no mutant lives, 1 if one does, and 2 if tests fail on the unbroken copy.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pallas_models import files
from pallas_models._processes import cores
from parity import ROOT
from parity.support.mutants import MUTANTS, Mutant

_OUTPUTS = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "dist", ".hypothesis")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of a mutant: tests `killed` it, or it `lives`, or its tests `cannot run` or are all `skipped`."""

    mutant: Mutant
    state: str
    by: str
    seconds: float


def _left_out(folder: str, names: list[str]) -> set[str]:
    """The names in a folder of the project that a copy does not need."""
    return set(_OUTPUTS(folder, names)) | ({"models"} if Path(folder) == ROOT else set())  # converted weights


def applied(mutant: Mutant, text: str) -> str:
    """The text of the mutant's file with the break in it.

    Raises:
      ValueError: the file does not hold the text to replace exactly once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {count} times; expected once")
    return text.replace(mutant.old, mutant.new)


def tested(tests: str, tree: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs tests, given as in a mutant, on a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += shlex.split(tests)
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def passes(tests: str, tree: Path, seconds: float) -> bool:
    """Whether tests pass in time."""
    try:
        return tested(tests, tree, seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def attempt(mutant: Mutant, tree: Path, seconds: float) -> Outcome:
    """Breaks a copy of the project, runs the tests, and mends it."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(applied(mutant, text), encoding="utf-8")
    started = time.monotonic()
    try:
        done = tested(mutant.tests, tree, seconds)
    except subprocess.TimeoutExpired:
        return Outcome(mutant, "killed", f"no answer in {seconds:.0f} s", seconds)
    finally:
        path.write_text(text, encoding="utf-8")
    state = {0: "lives", 1: "killed"}.get(done.returncode, "cannot run")
    if state == "lives" and not re.search(r"\d passed", done.stdout):
        state = "skipped"
    last = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    by = last[0] if last else "\n".join((done.stdout + done.stderr).splitlines()[-3:])
    return Outcome(mutant, state, by, time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the mutants; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m parity mutate", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mutants with this in their file, old or new text"
    )
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="processes")
    parser.add_argument("--seconds", type=float, default=300, metavar="N", help="that tests of a mutant may take")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of what became of each")
    parser.add_argument(
        "--but",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="but those that died in other runs, as of other JAXs",
    )
    args = parser.parse_args(arguments)
    dead = [
        outcome["mutant"]
        for path in args.but
        for outcome in json.loads(path.read_text("utf-8"))
        if outcome["state"] == "killed"
    ]
    named = [m for m in MUTANTS if args.only in f"{m.file} {m.old} {m.new}"]
    mutants = [m for m in named if dataclasses.asdict(m) not in dead]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(args.workers):
            trees.put(Path(shutil.copytree(ROOT, Path(folder) / str(i), ignore=_left_out)))

        def run(function: Callable[..., Any], what: Any) -> Any:
            tree = trees.get()
            try:
                return function(what, tree, args.seconds)
            finally:
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
            tests = sorted({mutant.tests for mutant in mutants})
            unbroken = pool.map(functools.partial(run, passes), tests)
            if failing := [name for name, passed in zip(tests, unbroken, strict=True) if not passed]:
                print("these tests do not pass as it is:", *failing, sep="\n", file=sys.stderr)
                return 2
            for outcome in pool.map(functools.partial(run, attempt), mutants):
                outcomes.append(outcome)
                new = " ".join(outcome.mutant.new.split())
                print(
                    f"{outcome.state:10} {outcome.seconds:4.0f} s  {outcome.mutant.file}: {new[:80]}", flush=True
                )
                print(f"{'':20}{outcome.by.splitlines()[-1][:150] if outcome.by else ''}", flush=True)
    count = collections.Counter(outcome.state for outcome in outcomes)
    print(f"{len(outcomes)} mutants: {', '.join(f'{n} {state}' for state, n in count.most_common())}")
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        files.write(args.output, json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1) + "\n")
    return int(count["lives"] + count["cannot run"] > 0)


if __name__ == "__main__":
    sys.exit(main())
