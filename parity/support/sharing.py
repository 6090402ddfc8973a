"""How the processes of the suite share one GPU: each keeps to a part of its memory, and says so where that ends.

A process of JAX keeps what its allocator once took, and PyTorch's likewise: side by side, without a limit, they
fill any GPU. This module is imported before JAX.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

GB = 2**30
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Over how many GPUs the processes are spread.
GPUS = "PARITY_GPUS"
# Names a folder for compiled programs. JAX's own variable would also reach the programs that tests start.
COMPILED = "PARITY_COMPILED"
# Bytes that a process takes beside its arrays: a CUDA context, loaded kernels, libraries' workspaces.
OVERHEAD = 1.0 * GB
# With less for its arrays, most tests of a process would have to run again.
LEAST = 2.0 * GB
# The largest part that JAX takes of the memory for arrays; PyTorch has the rest, which it gives back.
JAX_PART = 0.8
# JAX's variable, and its allocator that takes each array from CUDA and gives it back at once. It knows no limit.
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
GIVES_BACK = "platform"


def gpu_memory() -> tuple[float, float] | None:
    """Bytes in use, and in all, on the GPU that has the least in all, of those that CUDA_VISIBLE_DEVICES leaves.

    Of equal ones it is the GPU with the most in use. None where there is none to ask.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    query += [f"--id={visible}"] if visible else []
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        return min((_mebibytes(line) for line in lines), key=lambda found: (found[1], -found[0]))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def _mebibytes(line: str) -> tuple[float, float]:
    used, total = (float(number) * 2**20 for number in line.split(","))
    return used, total


def workers(cores: int, memory: float) -> int:
    """As many as there are cores, if the GPU's memory in bytes has room for their arrays."""
    return max(1, min(cores, int(memory // (OVERHEAD + LEAST))))


def fraction(count: int, memory: float, total: float) -> float:
    """The part of a GPU's `total` memory that JAX may take in each of `count` processes, which share `memory`."""
    return round(JAX_PART * max(memory / count - OVERHEAD, 0.1 * GB) / total, 6)


def limits() -> dict[str, str]:
    """Variables that hold this process to its GPU and its share of that, if they are set before JAX starts.

    `python -m parity` has set the limit. A worker of pytest-xdist else takes its part of the whole.
    """
    if (gpus := int(os.environ.get(GPUS, "1"))) > 1 and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": visible[int(worker.removeprefix("gw")) % len(visible)]}
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if FRACTION in os.environ or count == 1 or not (found := gpu_memory()):
        return {}
    return {FRACTION: str(fraction(count, found[1], found[1]))}


def hold_torch() -> None:
    """Lets PyTorch have what JAX leaves of this process's share, and takes back what it keeps without need."""
    torch = sys.modules.get("torch")
    if FRACTION not in os.environ or torch is None or not torch.cuda.is_initialized():
        return
    import jax

    keeps = os.environ.get(ALLOCATOR) != GIVES_BACK
    taken = jax.devices()[0].memory_stats()["pool_bytes"] if keeps else 0
    total = torch.cuda.get_device_properties(0).total_memory
    part = float(os.environ[FRACTION]) / JAX_PART
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(max(part - taken / total, (1 - JAX_PART) * part))


def share() -> float | None:
    """Bytes that this process may take; None if it has the GPU to itself."""
    found = gpu_memory() if FRACTION in os.environ else None
    return found and float(os.environ[FRACTION]) / JAX_PART * found[1]


class NeedsMemory(MemoryError):
    """A test needs more than its process may take: it says how much, in bytes."""

    def __init__(self, num_bytes: float) -> None:
        super().__init__(f"out of memory before it began: it needs {num_bytes / GB:.0f} GB")
        self.num_bytes = num_bytes


def needs(num_bytes: float) -> None:
    """Ends a test that is known to need more than this process may take, before it has computed for long.

    Raises:
      NeedsMemory: it does, and `pytest_runtest_makereport` treats it as any other lack of memory.
    """
    have = share()
    if have is not None and have < num_bytes:
        raise NeedsMemory(num_bytes)


def ran_out(error: BaseException) -> str | None:
    """The line of an error that says that the GPU's memory ran out, or None if it is another error.

    Hypothesis raises the failures of several examples as one: each of them has to say so.
    """
    if isinstance(error, BaseExceptionGroup):
        lines = [ran_out(each) for each in error.exceptions]
        return lines[0] if all(lines) else None
    seen: BaseException | None = error
    while seen is not None:
        for line in () if isinstance(seen, AssertionError) else str(seen).splitlines():
            if "out of memory" in line.lower().replace("_", " "):  # a kernel's shared memory is another matter
                return line.strip()
        seen = seen.__cause__ or seen.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """A test that needs more memory than it may take is skipped, with the reason and the size.

    `python -m parity` runs it again with fewer beside it. A process that has the GPU to itself fails.
    """
    report = yield
    error = call.excinfo.value if call.excinfo else None
    line = ran_out(error) if report.failed and error else None
    have = share() if line else None
    if line:
        forget(call.excinfo)
    if line and have:
        report.outcome = "skipped"
        report.longrepr = (
            str(item.path),
            item.location[1] or 0,
            f"needs more than its {have / GB:.1f} GB of the GPU: {line}",
        )
        item.user_properties.append(("needs_memory", item.nodeid))
        if isinstance(error, NeedsMemory):
            item.user_properties.append(("needs_bytes", f"{error.num_bytes:.0f}"))
    return report


def forget(error: pytest.ExceptionInfo[BaseException]) -> None:
    """Drops the arrays that an error holds: pytest keeps it, and the next tests would lack memory too."""
    held: list[BaseException | None] = [error.value]
    while held:
        if (seen := held.pop()) is not None:
            traceback.clear_frames(seen.__traceback__)
            held += [seen.__cause__ or seen.__context__, *getattr(seen, "exceptions", ())]
    gc.collect()


class Failures:
    """Names each failure as it comes: pytest's own list is its last word, and a run may be cut off before."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = (crash.message if crash else report.longreprtext).strip().partition("\n")[0]
            self.config.get_terminal_writer().line(f"\nFAILED {report.nodeid} ({report.when}): {reason}")


def name_failures(config: pytest.Config) -> None:
    """Names failures as they come, where they are printed: not in a worker."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(config))


def pytest_testnodedown(node: object, error: object) -> None:
    """Says why a worker died, as far as its end and the memory that is left tell."""
    if error is None:
        return
    io = getattr(getattr(node, "gateway", None), "_io", None)
    status = io.popen.wait(10) if io is not None else None
    print(f"\n{getattr(node, 'gateway', node)}: {death(status)}", flush=True)


def death(status: int | None) -> str:
    """How a process with that exit code ended, beside the memory that there is now."""
    if status is not None and status < 0:
        ended = f"ended by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            ended += ", as Linux ends a process where memory has run out"
    else:
        ended = f"ended with exit code {status}"
    return f"{ended}; in use now: {', '.join(memory_in_use())}"


def memory_in_use() -> list[str]:
    """The memory of the GPU and of this machine, in words."""
    found = []
    if gpu := gpu_memory():
        found.append(f"{gpu[0] / GB:.1f} of {gpu[1] / GB:.1f} GB of the GPU")
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        sizes = {name.rstrip(":"): int(size) * 1024 for name, size, *_ in lines}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
        found.append(f"{(total - free) / GB:.1f} of {total / GB:.1f} GB of the machine")
    return found or ["unknown"]


class Most:
    """The most memory in use on the GPU, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0.0


@contextlib.contextmanager
def watch(seconds: float = 1.0) -> Iterator[Most]:
    """Asks for the memory in use as long as it is entered."""
    most, ended = Most(), threading.Event()

    def ask() -> None:
        while (found := gpu_memory()) and not ended.wait(seconds):
            most.bytes = max(most.bytes, found[0])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()
