"""A process that reads files that may be hostile: where it hangs, dies or eats memory, another takes its place."""

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parity import ROOT

# Seconds of the processor, after which a process hangs; it may wait longer, for a processor that others have too.
TIMEOUT_S, WAITING = 20.0, 10
# Bytes beside 4 times the size of the files: for compiling a program and reading code for the first time.
SLACK = 96 << 20
ADDRESSES = 2 << 30  # that a process may reserve on top of those it has when it is ready


class Sandbox:
    """Calls `attempt(request)` of a module in another process.

    Its `warm_up()` runs first. Its `CLEAR` are the exceptions that are good answers, if they name one of what the
    request has under "named".
    """

    def __init__(self, module: str):
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], timeout: float = TIMEOUT_S) -> str | None:
        """What is wrong with how the module answered; None if nothing is."""
        if self._process is None:
            command = [sys.executable, "-m", "parity.campaign._sandbox", self._module]
            paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
            )
            if self._answer(600) is None:
                return f"{self._module} did not start: {self._end()}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(timeout)
        return answer["wrong"] if answer is not None else self._end()

    def _answer(self, timeout: float) -> dict[str, Any] | None:
        """The process's next line; None where it ends, works for too long or waits for too long."""
        assert self._process is not None and self._process.stdout is not None
        last, worked, line = time.monotonic() + WAITING * timeout, _worked(self._process.pid) + timeout, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], timeout / 4)
            if not ready and time.monotonic() < last and _worked(self._process.pid) < worked:
                continue
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                return None
            line += part
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self) -> str:
        """Ends a process that gave no answer, and says what became of it."""
        assert self._process is not None
        process, self._process = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        code = process.poll()
        process.kill()
        with process:
            return "it hangs" if code is None else f"it died with exit code {code}"

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None


def _worked(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(field: str) -> int:
    """A figure in bytes of /proc/self/status, such as VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def judge(module: Any, request: dict[str, Any]) -> str | None:
    """Calls `attempt` of a module: what is wrong with its answer, or with the memory that it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _memory("VmRSS")
    try:
        wrong = module.attempt(request)
    except module.CLEAR as error:
        message = str(error)
        wrong = None
        if not any(name in message for name in request["named"]):
            wrong = f"names no file: {message:.300}"
        elif isinstance(error.__cause__, MemoryError) or "allocate memory" in message:
            wrong = f"asked for too much memory: {message:.300}"
    except BaseException as error:  # also what comes from Rust's panics
        wrong = f"{type(error).__name__}: {error!s:.300}"
    used = _memory("VmHWM") - before
    if wrong is None and used > 4 * request["size"] + SLACK:
        wrong = f"took {used >> 20} MiB for {request['size']} bytes"
    return wrong


def main() -> None:
    """Answers requests, one a line, until there are no more."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)  # what nobody reads is not written again at the end
    os.dup2(2, 1)  # what libraries print is no answer
    module = importlib.import_module(sys.argv[1])
    module.warm_up()
    limit = _memory("VmSize") + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(BrokenPipeError):  # whoever asks has gone, as time was up
        answers.write(json.dumps({"ready": True}).encode() + b"\n")
        for line in sys.stdin:
            answers.write(json.dumps({"wrong": judge(module, json.loads(line))}).encode() + b"\n")


if __name__ == "__main__":
    main()
