"""`python -m parity sanitize`: every kernel of both backends under NVIDIA's compute-sanitizer.

memcheck finds accesses outside of arrays, racecheck races in shared memory, synccheck barriers that not all
threads reach. Each runs all calls of `BY_BACKEND` in `parity/calls.py`, at odd and at even sizes, with gradients
where these have kernels, in processes of its own. They are compiled before, without a tool, under which that takes
minutes. The exit code is 0 without a finding, 1 with one, 2 where a tool cannot run or does not get through.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_models import files
from parity.__main__ import describe_gpu

TOOLS = ("memcheck", "racecheck", "synccheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
# Of XLA's: none to choose from, and none of cuBLAS, which brings many that are not run.
_FEW_KERNELS = "--xla_gpu_autotune_level=0 --xla_gpu_cublas_fallback=false"
_CALL = re.compile(r"^call (.*)$", re.MULTILINE)
_TOTAL = re.compile(r"^of (\d+) calls$", re.MULTILINE)


def runs() -> Iterator[tuple[str, Any, str, int]]:
    """Backend, call, dtype and size of everything that is run."""
    from parity.calls import BY_BACKEND

    for backend, calls in BY_BACKEND.items():
        for call in calls:
            for size, dtype in ((1, "bfloat16"), (16, "float16")):
                yield backend, call, dtype, size


def traced(backend: str, call: Any, arrays: Sequence[Any]) -> Any:
    """A call, with its gradient if that has kernels: what XLA computes is none of ours."""
    import jax
    import jax.numpy as jnp

    from parity.common import kernel_calls

    floats, rest = arrays[: call.floats], arrays[call.floats :]

    def forward(*floats):
        return call(backend)(*floats, *rest)

    def both(*floats):
        out, pullback = jax.vjp(forward, *floats)
        return out, pullback(jnp.ones_like(out))

    alone, whole = (jax.jit(function).trace(*floats) for function in (forward, both))
    kernels = [kernel_calls(t.lower(lowering_platforms=("cuda",)).as_text()) for t in (alone, whole)]
    return whole if kernels[1] > kernels[0] else alone


def run_calls(folder: str) -> None:
    """Runs those of the calls that this GPU serves which no other process has taken, and names each on stdout."""
    import jax

    from parity.common import ON_HOPPER

    served = [run for run in runs() if run[0] != "mosaic" or ON_HOPPER]
    print(f"of {len(served)} calls", flush=True)
    for i, (backend, call, dtype, size) in enumerate(served):
        try:
            (Path(folder) / str(i)).touch(exist_ok=False)
        except FileExistsError:
            continue
        print(f"begin {backend} {call.name} {dtype} {size}", flush=True)
        started = time.monotonic()
        arrays = call.arrays(dtype, size)
        jax.block_until_ready(traced(backend, call, arrays).lower().compile()(*arrays[: call.floats]))
        print(f"call {backend} {call.name} {dtype} {size}: {time.monotonic() - started:.1f} s", flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one tool found in the calls that ended, of `total`; `findings` is None where some did not."""

    tool: str
    calls: list[str]
    total: int
    findings: int | None
    log: str


def parse(tool: str, log: str, code: int) -> Outcome:
    """What the output of a process of a tool says."""
    counts = [int(count) for count in _SUMMARY.findall(log)]
    ended = bool(counts) and code in (0, 1)
    total = max(map(int, _TOTAL.findall(log)), default=0)
    return Outcome(tool, _CALL.findall(log), total, sum(counts) if ended else None, log)


def merged(parts: Sequence[Outcome]) -> Outcome:
    """What the processes of a tool found together."""
    calls = [call for part in parts for call in part.calls]
    total = max(part.total for part in parts)
    ended = all(part.findings is not None for part in parts) and len(calls) == total > 0
    findings = sum(part.findings or 0 for part in parts) if ended else None
    log = "\n".join(part.log for part in parts if part.findings != 0)
    return Outcome(parts[0].tool, calls, total, findings, log)


def environment(cache: str) -> dict[str, str]:
    """That of the processes: what they compile is kept in a folder."""
    return os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",  # buffers of their own, so that memcheck sees the end of each
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_FEW_KERNELS}",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
        ),
    }


def sanitize(
    tool: str | None, folder: Path, *, program: str, until: float, environment: dict[str, str]
) -> Outcome:
    """Runs calls under one tool, or under none, which finds nothing. In the folder it says which it has taken."""
    command = [sys.executable, "-c", f"from parity import sanitize; sanitize.run_calls({str(folder)!r})"]
    if tool is not None:
        command = [program, "--tool", tool, "--error-exitcode", "1", "--print-limit", "20", *command]
    seconds = max(until - time.monotonic(), 1.0)
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
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(64) as pool:
        run = functools.partial(
            sanitize,
            program=program,
            until=started + args.seconds,
            environment=environment(str(Path(scratch) / "cache")),
        )

        def by_each(which: Sequence[str | None], workers: int) -> list[Outcome]:
            jobs = [(tool, Path(scratch) / (tool or "none")) for tool in which for _ in range(workers)]
            for _, folder in jobs:
                folder.mkdir(exist_ok=True)
            return list(pool.map(run, *zip(*jobs, strict=True)))

        compiled = merged(by_each([None], args.workers * len(tools)))
        seconds = time.monotonic() - started
        print(f"{len(compiled.calls)} of {compiled.total} calls compiled in {seconds:.0f} s", flush=True)
        if len(compiled.calls) < compiled.total:
            print(compiled.log[-4000:])
        parts = by_each(tools, args.workers)
    outcomes = [merged([part for part in parts if part.tool == tool]) for tool in tools]
    for outcome in outcomes:
        found = "did not get to the end" if outcome.findings is None else f"{outcome.findings} findings"
        print(f"{outcome.tool}: {len(outcome.calls)} of {outcome.total} calls, {found}")
        if outcome.findings != 0:
            print(outcome.log[-4000:])
    if args.output is not None:
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        tail = {o.tool: o.log.splitlines()[-60:] for o in outcomes if o.findings != 0}
        result = {
            "gpu": gpu,
            "sanitizer": version.stdout.strip().splitlines()[-1:],
            "seconds": round(time.monotonic() - started),
            "tools": [
                {"tool": o.tool, "findings": o.findings, "total": o.total, "calls": sorted(o.calls)}
                for o in outcomes
            ],
            "logs": tail,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        files.write(args.output, json.dumps(result, indent=1) + "\n")
    findings = [outcome.findings for outcome in outcomes]
    return 2 if None in findings else int(any(findings))


if __name__ == "__main__":
    sys.exit(main())
