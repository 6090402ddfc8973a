"""The timing core: device time and wall time of candidates that do the same work.

Device time is the time in which kernels of one call run, by the starts and ends that JAX's profiler records. It
leaves out gaps between kernels and copies between buffers, and counts once what overlaps: XLA of JAX 0.11.2 has
its own and Triton's kernels begin while those before them end, until torch captures CUDA graphs in the process.
The profiler records every kernel of the process, and so measures torch and JAX with one clock. It uses CUPTI,
which no other profiler can use meanwhile.

Wall time is what a caller sees in steady state: the time of many queued calls and one wait at the end, divided by
the number of calls. It includes dispatch where dispatch is slower than the device.

Every candidate is warmed up for a given time. The candidates take turns, so that a change of clocks or of
temperature affects all of them. Large matrix products exceed the GPU's power limit, and the GPU lowers its clocks.
Device time is therefore taken in short bursts after pauses, at full clocks: an 8192^3 product on an H200 then
takes 1361 us, always within 2 us, and 1425 to 1538 us without pauses. Wall time is taken under load.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Launch = tuple[str, float]  # name, microseconds for which it ran after all that began earlier had ended
Interval = tuple[float, float, str]  # start and duration in nanoseconds, name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Median time of a call and its spread, in microseconds.

    Attributes:
      median_us, p20_us, p80_us: median, 20th and 80th percentile of the samples.
      samples: how many there were.
      method: how they were taken.
        trace: time in which kernels of one call ran, one sample a call.
        trace_mean: the same over several calls, divided by their number, one sample for each such group;
          used where the launches of the calls differ and cannot be told apart.
        cuda_events: time between two CUDA events around many queued calls, divided by their number; includes
          gaps between kernels. Used for torch where the profiler does not see the kernels.
        cupti, cupti_mean: as trace and trace_mean, but durations added up, what overlaps more than once; of
          results before 2026-11-23.
        wall: host clock around many queued calls and one wait, divided by their number.
    """

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    method: str

    @classmethod
    def of(cls, samples_us: Sequence[float], method: str) -> "Timing":
        """Summarises samples in microseconds."""
        if not samples_us:
            raise ValueError("no samples to summarise")
        p20, median, p80 = (float(p) for p in np.percentile(samples_us, [20, 50, 80]))
        return cls(median_us=median, p20_us=p20, p80_us=p80, samples=len(samples_us), method=method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something to be timed.

    Attributes:
      call: `call(i)` queues the computation on input set number `i` (any integer, taken modulo the number of
        sets) and returns its output without waiting for it.
      wait: `wait(output)` returns once the output is there.
      events: `events(f)` runs `f()`, which queues work, and returns the microseconds between CUDA events before
        and after that work; None where the candidate's framework has no events.
      launches_at_least: fewer kernels than this a call mean that the profiler did not see them all.
    """

    call: Callable[[int], Any]
    wait: Callable[[Any], None]
    events: Callable[[Callable[[], Any]], float] | None = None
    launches_at_least: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to measure a candidate.

    Attributes:
      warmup_s: time of warming up.
      queue_s: about how long a queue of calls takes; a queue gives one sample of wall time.
      wall_samples: number of those queues.
      device_groups, device_calls: the profiler runs `device_groups` times for `device_calls` calls each; a
        call gives one sample of device time.
      pause_s: pause before each of them; five times as long before the first, after the load of the wall times.
    """

    warmup_s: float = 0.15
    queue_s: float = 0.015
    wall_samples: int = 20
    device_groups: int = 4
    device_calls: int = 6
    pause_s: float = 0.02


STANDARD = Budget(warmup_s=0.05, queue_s=0.01, wall_samples=12, device_groups=4, device_calls=5)
QUICK = Budget(warmup_s=0.03, queue_s=0.004, wall_samples=7, device_groups=2, device_calls=5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of a candidate.

    Attributes:
      device: device time; None without a GPU.
      wall: wall time.
      kernels: the kernels of one call in order, with their median part of the device time in microseconds;
        empty unless `device.method` is trace.
    """

    device: Timing | None
    wall: Timing
    kernels: list[Launch] = dataclasses.field(default_factory=list)


class DeviceTimerError(RuntimeError):
    """The profiler is not available, or its record cannot be used."""


def record_kernels(run: Callable[[], None]) -> list[Launch]:
    """Runs `run`, which must wait for what it queues, and returns the kernels that ran meanwhile.

    The time of a kernel is what it adds to that in which any kernel ran; see `parts`.

    Raises:
      DeviceTimerError: the profiler is in use, or saw no kernel.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False  # which takes 0.5 s
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise DeviceTimerError(str(error)) from error
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        traces = [
            jax.profiler.ProfileData.from_file(str(path)) for path in pathlib.Path(folder).rglob("*.xplane.pb")
        ]
    kernels = [
        (event.start_ns, event.duration_ns, event.name)
        for trace in traces
        for plane in trace.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not event.name.startswith(("Memcpy", "Memset"))
    ]
    if not kernels:
        raise DeviceTimerError("the profiler saw no kernel")
    return parts(kernels)


def parts(kernels: Sequence[Interval]) -> list[Launch]:
    """What each kernel, in the order of their starts, adds to the time in which any of them runs."""
    launches, end = [], 0.0
    for start, duration, name in sorted(kernels):
        launches.append((name, max(start + duration - max(start, end), 0.0) / 1e3))
        end = max(end, start + duration)
    return launches


def split_calls(kernels: Sequence[Launch], calls: int) -> list[list[Launch]] | None:
    """Splits the kernels of `calls` equal calls into a list for each call; None where the calls were not equal."""
    each, rest = divmod(len(kernels), calls)
    if rest or not each:
        return None
    found = [list(kernels[i * each : (i + 1) * each]) for i in range(calls)]
    names = [[name for name, _ in launches] for launches in found]
    return found if all(launches == names[0] for launches in names) else None


def without_frames(error: Exception) -> Exception:
    """An error that keeps nothing of where it was raised: tensors there would fill the GPU's memory."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return error


def _queue(candidate: Candidate, calls: int, first: int = 0) -> Any:
    output = None
    for i in range(first, first + calls):
        output = candidate.call(i)
    return output


def _run(candidate: Candidate, calls: int, first: int = 0) -> None:
    candidate.wait(_queue(candidate, calls, first))


class _Device:
    """Collects the device time of one candidate, group by group."""

    def __init__(self, candidate: Candidate, budget: Budget, calls_per_queue: int):
        self.candidate, self.budget, self.calls_per_queue = candidate, budget, calls_per_queue
        self.calls: list[list[Launch]] = []  # kernels of each call
        self.means: list[float] = []  # microseconds a call of each group
        self.events: list[float] = []
        self.error: DeviceTimerError | None = None

    def group(self, turn: int) -> None:
        # The first call of a group is not counted: the device was idle before it.
        calls = self.budget.device_calls + 1
        first = turn * calls  # other input sets than the candidate before, which are in the cache
        if self.error is None:
            try:
                kernels = record_kernels(lambda: _run(self.candidate, calls, first))
                if len(kernels) < calls * self.candidate.launches_at_least:
                    raise DeviceTimerError(
                        f"the profiler saw {len(kernels)} kernels in {calls} calls, expected at least"
                        f" {self.candidate.launches_at_least} a call"
                    )
            except DeviceTimerError as error:
                self.error = error
            else:
                self.means.append(sum(us for _, us in kernels) / calls)
                self.calls += (split_calls(kernels, calls) or [])[1:]
        if self.error is not None and self.candidate.events is not None:
            for _ in range(self.budget.device_calls):
                elapsed = self.candidate.events(lambda: _queue(self.candidate, self.calls_per_queue))
                self.events.append(elapsed / self.calls_per_queue)

    def result(self, wall: Timing) -> tuple[Timing, list[Launch]]:
        if self.error is None:
            names = [[name for name, _ in launches] for launches in self.calls]
            complete = len(self.calls) == self.budget.device_calls * len(self.means)
            if complete and all(launches == names[0] for launches in names):
                durations = np.median([[us for _, us in launches] for launches in self.calls], axis=0)
                kernels = [(name, float(us)) for name, us in zip(names[0], durations, strict=True)]
                return Timing.of([sum(us for _, us in launches) for launches in self.calls], "trace"), kernels
            return Timing.of(self.means, "trace_mean"), []
        if self.events:
            return Timing.of(self.events, "cuda_events"), []
        return wall, []


def measure(
    candidates: dict[str, Candidate], budget: Budget = Budget(), *, on_device: bool = True
) -> dict[str, Measurement | Exception]:
    """Measures candidates side by side.

    Args:
      candidates: by name.
      budget: how long to measure.
      on_device: whether there is a GPU, whose time is measured too.

    Returns:
      For every name its measurement, or the exception that it raised: one that fails does not stop the others.
    """
    failed: dict[str, Exception] = {}
    calls: dict[str, int] = {}

    def attempt(name: str, f: Callable[..., None], *args: Any, **options: Any) -> None:
        if name in failed:
            return
        try:
            f(*args, **options)
        except Exception as error:  # reported as the result of this candidate
            failed[name] = without_frames(error)

    def warm_up(name: str) -> None:
        _run(candidates[name], 2)  # work that is done once, on first use
        start, done, batch = time.perf_counter(), 0, 1
        while (elapsed := time.perf_counter() - start) < budget.warmup_s or not done:
            _run(candidates[name], batch, first=done)
            done += batch
            batch = min(2 * batch, 64)
        calls[name] = int(np.clip(round(budget.queue_s * done / elapsed) if elapsed else 1, 3, 1000))

    def wall_sample(name: str) -> None:
        start = time.perf_counter()
        _run(candidates[name], calls[name])
        walls[name].append(1e6 * (time.perf_counter() - start) / calls[name])

    for name in candidates:
        attempt(name, warm_up, name)
    # All wall times come before all device times: CUPTI, once attached, may slow launches down.
    walls: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(budget.wall_samples):
        for name in candidates:
            attempt(name, wall_sample, name)

    devices = {name: _Device(candidates[name], budget, calls[name]) for name in candidates if name not in failed}
    if on_device:
        turns = [name for _ in range(budget.device_groups) for name in devices]
        for turn, name in enumerate(turns, start=1):
            time.sleep(budget.pause_s * (5 if turn == 1 else 1))
            attempt(name, devices[name].group, turn)

    results: dict[str, Measurement | Exception] = {}
    for name in candidates:
        if name in failed:
            results[name] = failed[name]
            continue
        wall = Timing.of(walls[name], "wall")
        device, kernels = devices[name].result(wall) if on_device else (None, [])
        results[name] = Measurement(device=device, wall=wall, kernels=kernels)
    return results
