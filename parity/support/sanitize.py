"""`python -m parity sanitize`: every kernel of both backends under NVIDIA's compute-sanitizer.

memcheck finds accesses outside of arrays, racecheck races in shared memory, and synccheck barriers that not all
threads reach. Each tool runs all calls of `parity.cases.BY_BACKEND`, at odd and at even sizes, with gradients
where these have kernels, each call in a process of its own. The calls are compiled before that without a tool,
because compiling under one takes minutes. Some processes hang under a tool while they load compiled code: such a
process is ended, its call begins anew, and the report names it. The exit code is 0 without a finding, 1 with one,
and 2 if a tool cannot run or does not get to the end.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_models import files
from parity import ROOT
from parity.__main__ import describe_gpu

TOOLS = ("memcheck", "racecheck", "synccheck")
TRIES = 3
PATIENCE = 100.0  # seconds; what runs at all takes a tenth of that
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)\b(?! \w+ were not printed)")
_HOST = re.compile(r"=========\s+(?:Host Frame:|in /|Saved host backtrace|$)")
# Of XLA's: none to choose from, and none of cuBLAS, which brings many that are not run.
_FEW_KERNELS = "--xla_gpu_autotune_level=0 --xla_gpu_cublas_fallback=false"

_NAMES = "from parity.support import sanitize; print(*sanitize.served(), sep='\\n')"


def runs() -> Iterator[tuple[str, Any, str, int]]:
    """Backend, call, dtype and size of everything that is run."""
    from parity.cases import BY_BACKEND

    for backend, calls in BY_BACKEND.items():
        for call in calls:
            for size, dtype in ((1, "bfloat16"), (16, "float16")):
                yield backend, call, dtype, size


def functions(backend: str, call: Any, rest: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of the floats of a call: its result; and with it, which may take other kernels, its gradient."""
    import jax
    import jax.numpy as jnp

    def forward(*floats: Any) -> Any:
        return call(backend)(*floats, *rest)

    def both(*floats: Any) -> Any:
        out, pullback = jax.vjp(forward, *floats)
        return forward(*floats), pullback(jnp.ones_like(out))

    return forward, both


def kernels(jaxpr: Any) -> int:
    """How many kernels a traced program has, as it would have once it is lowered, which takes longer."""
    from jax.interpreters import partial_eval

    from parity.support.common import equations

    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return sum(equation.primitive.name in ("pallas_call", "mpmd_map") for equation in equations(used))


def traced(backend: str, call: Any, arrays: Sequence[Any]) -> Any:
    """A call, with its gradient if that has kernels: what XLA computes is none of ours."""
    import jax

    floats, rest = arrays[: call.floats], arrays[call.floats :]
    alone, whole = (jax.jit(function).trace(*floats) for function in functions(backend, call, rest))
    return whole if kernels(whole.jaxpr.jaxpr) > kernels(alone.jaxpr.jaxpr) else alone


def served() -> dict[str, tuple[str, Any, str, int]]:
    """The runs that this GPU serves, by name."""
    from parity.support.common import ON_HOPPER

    return {
        f"{backend} {call.name} {dtype} {size}": (backend, call, dtype, size)
        for backend, call, dtype, size in runs()
        if backend != "mosaic" or ON_HOPPER
    }


def run_call(name: str) -> None:
    """Runs one of `served`."""
    import jax

    backend, call, dtype, size = served()[name]
    arrays = call.arrays(dtype, size)
    jax.block_until_ready(traced(backend, call, arrays).lower().compile()(*arrays[: call.floats]))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one tool found in one call, in how many tries; `findings` is None where none of them ended."""

    tool: str | None
    call: str
    findings: int | None
    tries: int
    log: str


def findings(tool: str | None, log: str, code: int) -> int | None:
    """The findings in the output of a tool's process; None where it did not get to its end."""
    if tool is None:
        return 0 if code == 0 else None
    counts = [int(count) for count in _SUMMARY.findall(log)]
    return sum(counts) if counts and code in (0, 1) else None


def excerpt(log: str) -> list[str]:
    """The lines of an output without where the host was: the first findings, and how it ended."""
    lines = [line for line in log.splitlines() if not _HOST.match(line)]
    return lines if len(lines) <= 100 else [*lines[:60], "...", *lines[-40:]]


def environment(cache: str) -> dict[str, str]:
    """The environment of the processes, which keep compiled programs in a folder."""
    return os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",  # buffers of their own, so that memcheck sees the end of each
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_FEW_KERNELS}",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def output(command: Sequence[str], seconds: float, environment: dict[str, str]) -> tuple[str, int]:
    """The output of a program and its exit code: -9 if it was ended, with all that it had started."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"{process.communicate()[0]}\nnot at the end after {seconds:.0f} s", -signal.SIGKILL


def sanitize(
    tool: str | None, call: str, *, program: str, until: float, environment: dict[str, str], patience: float
) -> Outcome:
    """Runs a call under one tool, or under none, which finds nothing; again while the process hangs."""
    command = [sys.executable, "-c", f"from parity.support import sanitize; sanitize.run_call({call!r})"]
    if tool is not None:
        command = [program, "--tool", tool, "--error-exitcode", "1", "--print-limit", "20", *command]
    tries, code, log = 0, -signal.SIGKILL, ""
    while code == -signal.SIGKILL and tries < TRIES and (left := until - time.monotonic()) > 0:
        log, code = output(command, min(patience, left) if tool else left, environment)
        tries += 1
    return Outcome(tool, call, findings(tool, log, code), tries, log)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The findings of a tool in all calls: None before each has got to its end."""
    ended = [outcome.findings for outcome in outcomes if outcome.findings is not None]
    return {
        "findings": sum(ended) if len(ended) == len(outcomes) > 0 else None,
        "ended": len(ended),
        "begun_anew": [outcome.call for outcome in outcomes if outcome.tries > 1],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tools; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m parity sanitize", description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one of them; all when not given")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="processes at a time")
    parser.add_argument("--seconds", type=float, default=1800, metavar="N", help="for all of it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of what was run and found")
    args = parser.parse_args(arguments)
    started = time.monotonic()
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not installed or not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    try:
        gpu = describe_gpu()
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    tools = args.tool or TOOLS
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        kept = environment(str(Path(scratch) / "cache"))
        until = started + args.seconds
        names = subprocess.run(
            [sys.executable, "-c", _NAMES], stdout=subprocess.PIPE, text=True, env=kept, check=True
        )
        calls = names.stdout.splitlines()
        run = functools.partial(sanitize, program=program, until=until, environment=kept, patience=PATIENCE)
        compiled = list(pool.map(run, [None] * len(calls), calls))
        done = sum(outcome.findings == 0 for outcome in compiled)
        print(f"{done} of {len(calls)} calls compiled in {time.monotonic() - started:.0f} s", flush=True)
        outcomes = list(pool.map(run, *zip(*itertools.product(tools, calls), strict=True)))
    tools_say = {tool: summary([outcome for outcome in outcomes if outcome.tool == tool]) for tool in tools}
    for tool, said in tools_say.items():
        found = "did not get to the end" if said["findings"] is None else f"{said['findings']} findings"
        print(f"{tool}: {said['ended']} of {len(calls)} calls, {found}")
    logs = {f"{o.tool} {o.call}": excerpt(o.log) for o in (*compiled, *outcomes) if o.findings != 0}
    for name, log in logs.items():
        print(f"\n{name}:", *log, sep="\n")
    if args.output is not None:
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        result = {
            "gpu": gpu,
            "sanitizer": version.stdout.strip().splitlines()[-1:],
            "seconds": round(time.monotonic() - started),
            "calls": calls,
            "tools": tools_say,
            "logs": logs,  # also of calls that did not end
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        files.write(args.output, json.dumps(result, indent=1) + "\n")
    counts = [said["findings"] for said in tools_say.values()]
    return 2 if None in counts else int(any(counts))


if __name__ == "__main__":
    sys.exit(main())
