"""`python -m parity sanitize`: every kernel of both backends under NVIDIA's compute-sanitizer.

memcheck finds accesses outside of arrays, racecheck races in shared memory, synccheck barriers that not all
threads reach. Each runs all calls of `BY_BACKEND` in `parity/calls.py` and their gradients, at odd and at even
sizes, in processes of its own. They are compiled before, without a tool, under which that takes minutes. The exit
code is 0 without a finding, 1 with one, 2 where a tool cannot run, and that is said.
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
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_models import files
from parity.__main__ import describe_gpu

TOOLS = ("memcheck", "racecheck", "synccheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_CALL = re.compile(r"^call (.*)$", re.MULTILINE)


def runs() -> Iterator[tuple[str, Any, str, int]]:
    """Backend, call, dtype and size of everything that is run."""
    from parity.calls import BY_BACKEND

    for backend, calls in BY_BACKEND.items():
        for call in calls:
            for size, dtype in ((1, "bfloat16"), (16, "float16")):
                yield backend, call, dtype, size


def run_calls(part: int, parts: int) -> None:
    """Runs one of equal parts of the calls that this GPU serves, and their gradients, and names each on stdout."""
    import jax
    import jax.numpy as jnp

    from parity.common import ON_HOPPER

    served = [run for run in runs() if run[0] != "mosaic" or ON_HOPPER]
    for backend, call, dtype, size in served[part::parts]:
        arrays = call.arrays(dtype, size)
        floats, rest = arrays[: call.floats], arrays[call.floats :]

        def both(floats, rest, backend=backend, call=call):
            out, pullback = jax.vjp(lambda *floats: call(backend)(*floats, *rest), *floats)
            return out, pullback(jnp.ones_like(out))

        print(f"call {backend} {call.name} {dtype} {size}", flush=True)
        jax.block_until_ready(jax.jit(both)(floats, rest))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one tool found; `findings` is None where it did not get to the end."""

    tool: str
    calls: list[str]
    findings: int | None
    log: str


def parse(tool: str, log: str, code: int) -> Outcome:
    """What a tool's output says."""
    counts = [int(count) for count in _SUMMARY.findall(log)]
    ended = bool(counts) and code in (0, 1)
    return Outcome(tool, _CALL.findall(log), sum(counts) if ended else None, log)


def merged(parts: Sequence[Outcome]) -> Outcome:
    """What the processes of a tool found together."""
    findings = None if any(part.findings is None for part in parts) else sum(part.findings or 0 for part in parts)
    calls = [call for part in parts for call in part.calls]
    return Outcome(parts[0].tool, calls, findings, "\n".join(part.log for part in parts if part.findings != 0))


def environment(cache: str) -> dict[str, str]:
    """That of the processes: what they compile is kept in a folder."""
    return os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",  # buffers of their own, so that memcheck sees the end of each
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",  # no kernels but ours
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
        ),
    }


def sanitize(
    tool: str | None, part: int, parts: int, *, program: str, seconds: float, environment: dict[str, str]
) -> Outcome:
    """Runs a part of the calls under one tool, or under none, which finds nothing."""
    command = [sys.executable, "-c", f"from parity import sanitize; sanitize.run_calls({part}, {parts})"]
    if tool is not None:
        command = [program, "--tool", tool, "--error-exitcode", "1", "--print-limit", "20", *command]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=seconds
        )
    except subprocess.TimeoutExpired as expired:
        log = (expired.stdout or b"").decode(errors="replace")
        return parse(tool or "", f"{log}\nnot at the end after {seconds:.0f} s", -1)
    return parse(tool or "", done.stdout, done.returncode)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tools; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m parity sanitize", description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one of them; all when not given")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes of each tool")
    parser.add_argument("--seconds", type=float, default=1800, metavar="N", help="for each tool")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of what was run and found")
    args = parser.parse_args(arguments)
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
    with tempfile.TemporaryDirectory() as cache, concurrent.futures.ThreadPoolExecutor() as pool:
        run = functools.partial(sanitize, program=program, seconds=args.seconds, environment=environment(cache))
        list(pool.map(run, itertools.repeat(None), range(args.workers), itertools.repeat(args.workers)))
        jobs = itertools.product(tools, range(args.workers), (args.workers,))
        parts = list(pool.map(run, *zip(*jobs, strict=True)))
    outcomes = [merged([part for part in parts if part.tool == tool]) for tool in tools]
    for outcome in outcomes:
        found = "did not get to the end" if outcome.findings is None else f"{outcome.findings} findings"
        print(f"{outcome.tool}: {len(outcome.calls)} calls, {found}")
        if outcome.findings != 0:
            print(outcome.log[-4000:])
    if args.output is not None:
        tail = {o.tool: o.log.splitlines()[-60:] for o in outcomes if o.findings != 0}
        result = {
            "gpu": gpu,
            "tools": [{"tool": o.tool, "calls": o.calls, "findings": o.findings} for o in outcomes],
            "logs": tail,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        files.write(args.output, json.dumps(result, indent=1) + "\n")
    findings = [outcome.findings for outcome in outcomes]
    return 2 if None in findings else int(any(findings))


if __name__ == "__main__":
    sys.exit(main())
