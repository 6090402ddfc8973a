"""Measures the configs of a kernel on the GPU of this process and keeps the fastest."""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import target as targets
from pallas_models._processes import cores
from pallas_models.tuning.problem import Chooser, Config, Problem
from pallas_models.tuning.table import Entry, Table, cache_path

# How far an output may be from XLA's, relative to its norm; eight times that for a single element.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
MIN_GAIN = 0.02  # the least gain for which a heuristic's config is given up

_FIRST_SAMPLES = 5  # of every config
_FINALISTS, _ROUNDS, _ROUND_SAMPLES = 5, 8, 6  # the fastest and the heuristic's, in turns
_BUSY_S = 0.1  # clocks rise within this
_PAUSE = 3.0  # after a burst of calls, in times of it: large products without pauses draw so much that clocks fall

Program = functools.partial[Any]  # a compiled call and its operands


@dataclasses.dataclass(kw_only=True, eq=False)
class Trial:
    """One config with its times, or the reason why it has none.

    Attributes:
      config: the config.
      samples_us: device times of single calls; empty unless it was timed.
      failure: why it was not timed, or why its times do not count.
    """

    config: Any
    samples_us: list[float] = dataclasses.field(default_factory=list)
    failure: str = ""

    @property
    def us(self) -> float:
        """The median of the samples; infinite if there are none."""
        return float(np.median(self.samples_us)) if self.samples_us else float("inf")

    def is_faster(self, other: "Trial") -> bool:
        """Whether it is faster by more than the noise: the 20th to 80th percentiles of the two lie apart."""
        if not self.samples_us or not other.samples_us:
            return False
        apart = np.percentile(self.samples_us, 80) < np.percentile(other.samples_us, 20)
        return bool(apart and self.us < (1 - MIN_GAIN) * other.us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of tuning a kernel for a shape.

    Attributes:
      problem: the kernel and the shape.
      gpu: the GPU that it was measured on.
      heuristic: the trial of the config that the heuristic chooses.
      trials: of all configs, the heuristic's among them.
      pruned: number of configs that were not tried because they do not fit in shared memory.
      seconds: how long tuning took.
    """

    problem: Problem[Any]
    gpu: str
    heuristic: Trial
    trials: tuple[Trial, ...]
    pruned: int
    seconds: float

    @property
    def best(self) -> Trial:
        """The fastest trial if it beats the heuristic's by more than the noise, else the heuristic's."""
        timed = [trial for trial in self.trials if not trial.failure]
        fastest = min(timed, key=lambda trial: trial.us)
        return fastest if fastest.is_faster(self.heuristic) else self.heuristic

    @property
    def config(self) -> Any:
        """The config to use."""
        return self.best.config

    @property
    def entry(self) -> Entry:
        """The outcome as an entry of a table."""
        import pallas_models  # which imports this

        op, backend, dtype, shape = self.problem.key
        return Entry(
            op=op,
            backend=backend,
            dtype=dtype,
            shape=dict(shape),
            bucketed=self.problem.bucketed,
            config=None if self.best is self.heuristic else dataclasses.asdict(self.best.config),
            us=round(self.best.us, 3),
            heuristic=dataclasses.asdict(self.heuristic.config),
            heuristic_us=round(self.heuristic.us, 3),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=f"pallas_models {pallas_models.__version__}, jax {jax.__version__}",
        )

    def save(self, path: Path | str | None = None) -> Path:
        """Adds the outcome to the table at `path`, by default the user's own, which every op looks into.

        Programs that were traced before, by `jax.jit` too, keep their configs.

        Raises:
          TableError: there is a file that is no table.
          ValueError: the table is for another GPU.
        """
        path = cache_path(self.gpu) if path is None else Path(path)
        table = Table.load(path) if path.exists() else Table(gpu=self.gpu)
        if table.gpu != self.gpu:
            raise ValueError(f"{path} is for {table.gpu}; these times are of {self.gpu}")
        table.updated(self.entry).save(path)
        return path

    def summary(self, rows: int = 10) -> str:
        """The fastest trials as a table, with the heuristic's, and how many failed."""
        timed = sorted((trial for trial in self.trials if not trial.failure), key=lambda trial: trial.us)
        shown = timed[:rows] + [trial for trial in timed[rows:] if trial is self.heuristic]
        lines = [f"{self.problem} on {self.gpu}"]
        for trial in shown:
            marks = [name for name, of in (("best", self.best), ("heuristic", self.heuristic)) if trial is of]
            fields = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(trial.config).items())
            lines.append(f"{trial.us:10.2f} us  {fields}  {' and '.join(marks)}".rstrip())
        failed = [trial for trial in self.trials if trial.failure]
        lines.append(
            f"{len(timed)} of {len(self.trials)} configs timed in {self.seconds:.1f} s, {self.pruned} more do not"
            " fit in shared memory; the best is"
            f" {self.heuristic.us / self.best.us:.3f} times as fast as the heuristic's"
        )
        lines += [f"failed: {trial.config}: {trial.failure}" for trial in failed[:3]]
        return "\n".join(lines)


def autotune(
    fn: Callable[..., Any],
    *args: Any,
    op: str | None = None,
    candidates: Iterable[Any] | None = None,
    tolerance: float | None = None,
    seconds: float | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Result:
    """Finds the fastest tile config for a call of an op, e.g. `autotune(ops.matmul, x, w, activation="gelu")`.

    Configs that do not fit in shared memory are left out before anything is compiled. The others are compiled
    in parallel; each must agree with XLA before its time counts. The fastest few and the heuristic's are
    then measured again in turns, and the heuristic's stays unless another is faster by more than the noise and 2%.
    Times are the GPU's, from CUPTI, of repeated calls on the given arrays: those that fit in the L2
    cache are read from there. They should not be zeros or constants, which take less power.

    It changes nothing: `result.config` can be given to the op, `result.save()` adds it to the user's table.

    Args:
      fn: an op: it takes `config` and `implementation`.
      *args: its operands.
      op: the name of the kernel to tune, where the call has several.
      candidates: the configs to try beside the heuristic's; the kernel's own when None.
      tolerance: how far the output may be from XLA's, relative to its norm; when None 1e-5 in float32, 2e-3 in
        float16, 1e-2 in bfloat16.
      seconds: after this time no further config is begun; no limit when None.
      progress: whether to show a bar; on a terminal when None.
      **options: the op's other arguments. Without `implementation`, the kernel that runs by default is tuned: on a
        Hopper GPU that may be the one of Mosaic.

    Raises:
      TypeError: `fn` is no op.
      ValueError: the call has no kernel that can be tuned, or several and `op` names none of them; or the
        heuristic's config does not agree with XLA.
      RuntimeError: this process has no CUDA device, or its times cannot be had.
    """
    started = time.monotonic()
    target = targets.current()
    if not target.name:
        raise RuntimeError("autotune times kernels on a CUDA device; JAX finds none in this process")
    call = _Call(fn, args, options)
    problem = call.problem(op)
    heuristic = Trial(config=problem.heuristic())
    wanted = dict.fromkeys(problem.candidates() if candidates is None else candidates)
    size, limit = problem.shared_memory or (lambda config: 0), target.shared_memory
    fitting = [config for config in wanted if size(config) <= limit]
    trials = [heuristic, *(Trial(config=config) for config in fitting if config != heuristic.config)]
    if tolerance is None:
        tolerance = TOLERANCE[jnp.dtype(problem.dtype).name]

    with _bar(str(problem), 2 * len(trials), progress) as advance:
        reference, programs = _compile_all(call, problem, trials, started, seconds, advance)
        expected = reference()
        _keep_busy(reference)
        for trial, program in programs.items():
            _try(trial, program, expected, tolerance)
            advance()
        if heuristic.failure:
            raise ValueError(f"{problem}: the heuristic's {heuristic.config} failed: {heuristic.failure}")
        ready = sorted((trial for trial in trials if not trial.failure), key=lambda trial: trial.us)
        finalists = [heuristic, *(trial for trial in ready[:_FINALISTS] if trial is not heuristic)]
        rounds = [
            [_device_times_us(programs[trial], _ROUND_SAMPLES) for trial in finalists] for _ in range(_ROUNDS)
        ]
        for trial, samples in zip(finalists, zip(*rounds, strict=True), strict=True):
            trial.samples_us = [us for turn in samples for us in turn]
    return Result(
        problem=problem,
        gpu=target.name,
        heuristic=heuristic,
        trials=tuple(trials),
        pruned=len(wanted) - len(fitting),
        seconds=time.monotonic() - started,
    )


class _Probe(Chooser):
    """Records the problems that kernels ask about, and leaves them to the heuristic."""

    def __init__(self) -> None:
        self.problems: dict[Any, Problem[Any]] = {}

    def choose(self, problem: Problem[Config]) -> Config:
        self.problems[problem.key] = problem
        return problem.heuristic()


class _Fixed(Chooser):
    """Answers one problem with a given config."""

    def __init__(self, problem: Problem[Any], config: Any) -> None:
        self.key, self.config = problem.key, config

    def choose(self, problem: Problem[Config]) -> Config | None:
        return self.config if problem.key == self.key else None


class _Call:
    """A call of an op, without its config and implementation."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        missing = {"config", "implementation"} - set(inspect.signature(fn).parameters)
        if missing:
            raise TypeError(f"fn takes no {' and no '.join(sorted(missing))}; expected one of pallas_models.ops")
        self.fn, self.implementation = fn, options.pop("implementation", None)
        self.arrays = args, {name: value for name, value in options.items() if isinstance(value, jax.Array)}
        self.static = {name: value for name, value in options.items() if not isinstance(value, jax.Array)}

    def function(self, implementation: str, config: Any) -> Callable[..., Any]:
        def call(args: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
            return self.fn(*args, **arrays, **self.static, config=config, implementation=implementation)

        return call

    def problem(self, op: str | None) -> Problem[Any]:
        """The problem that the call's kernel asks a config for."""
        probe = _Probe()
        jax.eval_shape(self.function(self.implementation, probe), *self.arrays)
        found = [problem for problem in probe.problems.values() if op in (None, problem.op)]
        if len(found) != 1:
            names = ", ".join(sorted(str(problem) for problem in probe.problems.values())) or "none"
            raise ValueError(
                f"{op=} does not tell which kernel to tune; the kernels of this call that can be: {names}"
            )
        return found[0]

    def compile(self, implementation: str, config: Any) -> Program:
        compiled = jax.jit(self.function(implementation, config)).lower(*self.arrays).compile()
        return functools.partial(compiled, *self.arrays)


def _compile_all(
    call: _Call,
    problem: Problem[Any],
    trials: Sequence[Trial],
    started: float,
    seconds: float | None,
    advance: Callable[[], None],
) -> tuple[Program, dict[Trial, Program]]:
    """Compiles XLA's version of the call, and the call with the config of each trial, several at a time.

    Notes in the trial if that fails.
    """

    def compile_one(trial: Trial) -> Program | None:
        try:
            if seconds is not None and time.monotonic() > started + seconds and trial is not trials[0]:
                raise TimeoutError(f"not begun within {seconds:g} s")
            return call.compile(call.implementation, _Fixed(problem, trial.config))
        except Exception as error:  # such as too much shared memory: it belongs to this config
            trial.failure = _first_line(error)
            return None
        finally:
            advance()

    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        reference = pool.submit(call.compile, "xla", None)
        programs = dict(zip(trials, pool.map(compile_one, trials), strict=True))
    return reference.result(), {trial: program for trial, program in programs.items() if program is not None}


def _try(trial: Trial, program: Program, expected: Any, tolerance: float) -> None:
    """Holds the output of a program against XLA's and, if it is right, times it."""
    try:
        error = float(_error(program(), expected))
        if not error <= tolerance:
            trial.failure = f"its output is off by {error:.1e}, more than {tolerance:.0e}"
        else:
            trial.samples_us = _device_times_us(program, _FIRST_SAMPLES)
    except jax.errors.JaxRuntimeError as error:
        trial.failure = _first_line(error)


@jax.jit
def _error(out: Any, expected: Any) -> jax.Array:
    """||out - expected|| / ||expected||, or an eighth of the largest error of an element if that is more."""

    def of(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))  # infinities too
        difference = jnp.where(same, 0.0, a - b)
        b = jnp.where(jnp.isfinite(b), b, 0.0)
        rms = jnp.sqrt(jnp.mean(jnp.square(b))) + jnp.finfo(jnp.float32).tiny
        whole = jnp.sqrt(jnp.mean(jnp.square(difference))) / rms
        return jnp.maximum(whole, jnp.max(jnp.abs(difference) / (rms + jnp.abs(b))) / 8)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(of, out, expected))))


def _device_times_us(program: Program, samples: int) -> list[float]:
    """Device times of calls of a program: the sums of the durations of their kernels."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError as error:
        raise RuntimeError(f"this jaxlib has no CUPTI profiler ({error})") from error
    compiled, arrays = program.func, program.args
    _, ms = profiler.measure(compiled, iterations=samples + 1)(*arrays)
    if ms is None:
        raise RuntimeError("CUPTI saw no kernel")
    time.sleep(_PAUSE * sum(ms) / 1e3)
    return [1e3 * value for value in ms[1:]]  # the first meets a device that was idle while CUPTI was attached


def _keep_busy(program: Program) -> None:
    """Runs a program until clocks have risen."""
    end = time.monotonic() + _BUSY_S
    while time.monotonic() < end:
        jax.block_until_ready(program())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]


@contextlib.contextmanager
def _bar(title: str, total: int, show: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar; the function to call after each of `total` steps."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
