"""The harness of every benchmark: it measures the contenders of a workload side by side.

A benchmark of an operation is a module of `bench.cases` such as this one:

    HELP = "softmax of rows: ours, XLA, torch"

    def workload(dtype: str, shape: Shape) -> Workload:
        rows, columns = shape

        def ours():  # imports what it needs; an ImportError means "skipped: ... is not installed"
            return functools.partial(ops.softmax, implementation="triton")

        def in_torch():
            import torch
            return lambda x: torch.softmax(x, -1)

        return Workload(
            inputs=lambda seed: normal(seed, dtype, (rows, columns)),  # a tuple of arrays
            reference=lambda x: jax.nn.softmax(x.astype(jnp.float32)),  # in float32 or float64
            contenders=[
                Contender("pallas", "ours", ours, gpu=True),
                Contender("xla", "xla", lambda: jax.nn.softmax),
                Contender("torch", "torch", in_torch),  # becomes torch-eager, torch-graph, torch-compile ...
            ],
            bytes=2.0 * rows * columns * itemsize(dtype),
            gradient=Gradient(bytes=3.0 * rows * columns * itemsize(dtype)),  # of the backward pass, for --mode
        )

    BENCHMARK = Benchmark(name="softmax", axes=("rows", "columns"), shapes=((8192, 4096), (32768, 1024)),
                          cpu_shapes=((16, 384),), dtypes=("bf16",), workload=workload)
    add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run

The harness compiles the JAX programs of all cases first, in threads. It runs torch eagerly, in CUDA graphs and
compiled. It compares every output with the reference: a wrong one is reported and not timed. It times the others
in turns (`bench.measuring.timing`) on input sets that rotate, enough of them that inputs come from device memory
and not from the L2 cache, unless `Workload.sets` says otherwise. It saves the result after every case. The exit
code is 1 if a contender of ours failed or was wrong. Details: `Contender`, `Workload`, `Benchmark`.
"""

import argparse
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.measuring import environment, gradients, results, timing
from bench.measuring.contenders import (
    COSINE,
    DTYPES,
    LIMITS,
    RELATIVE,
    Attempt,
    Contender,
    Gradient,
    JaxPrograms,
    Measure,
    Workload,
    cosine_distance,
    normal,
)
from bench.measuring.gradients import MODES, Mode
from bench.measuring.results import Case, Result
from bench.measuring.torch_programs import TorchPrograms
from bench.reporting import tables

__all__ = [
    "COSINE",
    "DTYPES",
    "RELATIVE",
    "Benchmark",
    "Contender",
    "Gradient",
    "Measure",
    "Shape",
    "Workload",
    "cosine_distance",
    "itemsize",
    "normal",
    "parse_dtypes",
    "parse_modes",
]

Shape = tuple[int | str, ...]  # sizes, then flags

OURS = ("ours", "ladder")  # families whose failure is a failure of the benchmark


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


def parse_dtypes(text: str) -> list[str]:
    """Parses `fp16`, `fp16,bf16` or `all`.

    Raises:
      argparse.ArgumentTypeError: an unknown dtype.
    """
    names = list(DTYPES) if text == "all" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in DTYPES]:
        raise argparse.ArgumentTypeError(
            f"unknown dtype {', '.join(unknown)}; expected all or some of {list(DTYPES)}"
        )
    return list(dict.fromkeys(names))


def parse_modes(text: str) -> list[Mode]:
    """Parses `both` or `forward,both`.

    Raises:
      argparse.ArgumentTypeError: an unknown mode.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in MODES]:
        raise argparse.ArgumentTypeError(f"unknown mode {', '.join(unknown)}; expected some of {list(MODES)}")
    return [mode for mode in MODES if mode in names]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark: its cases, and the workload of each.

    Attributes:
      name: of the command and of the result file.
      axes: names of the sizes of a shape, in order.
      flags: words that may follow the sizes: `8192x4096+masked` is the shape (8192, 4096, "masked").
      shapes: the cases on a GPU; with --quick only `quick_shapes`, by default the first two.
      cpu_shapes: the cases without a GPU.
      dtypes: those that are measured by default.
      modes: those that are measured by default: forward, backward, both (`bench.measuring.gradients`).
      workload: gives the workload of a dtype and a shape; a ValueError or NotImplementedError says that there is
        none. None where it depends on the benchmark's own options: `dataclasses.replace` it before `run`.
      shortened: whether the benchmark's own options make the result partial.
      settings: what affects the figures, for the result file.
      budget: how long to measure a candidate; with --quick and without a GPU `timing.QUICK`.
      compile_budget: seconds after which no torch.compile is begun, unless --compile-budget.
      table: makes what --show-results prints instead of comparison and ladder.
    """

    name: str
    axes: Sequence[str]
    shapes: Sequence[Shape]
    cpu_shapes: Sequence[Shape]
    dtypes: Sequence[str]
    modes: Sequence[Mode] = ("forward",)
    workload: Callable[[str, Shape], Workload] | None = None
    flags: Sequence[str] = ()
    quick_shapes: Sequence[Shape] | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    budget: timing.Budget = timing.STANDARD
    compile_budget: float = 15.0
    shortened: bool = False
    table: Callable[[Result], str] | None = None

    def parse_shapes(self, text: str) -> list[Shape]:
        """Parses shapes such as `8192x4096,32x128+masked`.

        Raises:
          argparse.ArgumentTypeError: something in it is not a shape.
        """
        found: list[Shape] = []
        for item in text.split(","):
            numbers, *flags = item.strip().split("+")
            sizes = numbers.split("x")
            good = len(sizes) == len(self.axes) and all(s.isdecimal() and 0 < int(s) < 2**31 for s in sizes)
            if not good or set(flags) - set(self.flags) or len(set(flags)) < len(flags):
                syntax = "x".join(axis.upper() for axis in self.axes) + "".join(f"[+{f}]" for f in self.flags)
                known = ",".join(map(shape_text, self.shapes))
                raise argparse.ArgumentTypeError(f"{item!r} is no shape; expected {syntax}, such as {known}")
            found.append((*map(int, sizes), *flags))
        return found

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the options that all benchmarks share."""
        show = parser.add_argument
        show("--show-results", action="store_true", help="print the tables, not only the file's name")
        show("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
        default = list(self.dtypes)
        show("--dtype", type=parse_dtypes, default=default, help=f"fp32, fp16, bf16 or all; {','.join(default)}")
        default = list(self.modes)
        show("--mode", type=parse_modes, default=default, help=f"some of {','.join(MODES)}; {','.join(default)}")
        example = ",".join(map(shape_text, self.shapes[:2]))
        show("--shapes", type=self.parse_shapes, help=f"e.g. {example}: {' x '.join(self.axes)}")
        show("--quick", action="store_true", help="fewer shapes and samples")
        show("--no-compile", action="store_true", help="leave torch.compile out")
        show(
            "--compile-mode",
            choices=("default", "max-autotune-no-cudagraphs"),
            default="default",
            help="of torch.compile; it is run with and without a CUDA graph around it either way",
        )
        show(
            "--compile-budget",
            type=float,
            default=self.compile_budget,
            metavar="S",
            help=f"no torch.compile is begun after it has taken S seconds; {self.compile_budget:g}",
        )

    def chosen_shapes(self, args: argparse.Namespace, *, gpu: bool) -> list[Shape]:
        """The shapes to measure."""
        if args.shapes:
            return list(args.shapes)
        if not gpu:
            return list(self.cpu_shapes)
        quick = self.shapes[:2] if self.quick_shapes is None else self.quick_shapes
        return list(quick if args.quick else self.shapes)

    def run(self, args: argparse.Namespace) -> int:
        """Measures and saves; returns the exit code: 1 if ours failed or was wrong, 2 if a shape is impossible."""
        say = Progress().say
        gpu = environment.has_gpu()
        shapes = self.chosen_shapes(args, gpu=gpu)
        if self.workload is None:
            raise TypeError(f"benchmark {self.name} has no workload")
        try:
            workloads = {
                (dtype, shape, mode): gradients.of(self.workload(dtype, shape), dtype, mode)
                for dtype in args.dtype
                for mode in args.mode
                for shape in shapes
            }
        except (ValueError, NotImplementedError) as error:
            print(error)
            return 2
        if not gpu:
            print("No CUDA GPU found: XLA and torch are timed on the CPU, wall time only.")
        budget = timing.QUICK if args.quick or not gpu else self.budget
        settings = dict(self.settings)
        if gpu and not args.no_compile:
            settings["torch.compile"] = args.compile_mode
        count = sum(not contender.in_torch for workload in workloads.values() for contender in workload.contenders)
        say(f"{environment.device()}; compiling {count} JAX programs for {len(workloads)} cases")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # importing torch takes as long
            in_torch = pool.submit(
                TorchPrograms,
                gpu=gpu,
                compile_mode=args.compile_mode,
                compile_budget=args.compile_budget,
                no_compile=args.no_compile,
            )
            programs = JaxPrograms(list(workloads.values()), gpu=gpu)
        result = results.begun(self.name, settings)
        if gpu:
            say("measuring the device's ceilings")
            result.ceilings.update(environment.measure_ceilings(budget))
        started = time.perf_counter()
        for done, ((dtype, shape, mode), workload) in enumerate(workloads.items(), start=1):
            flagged = shape if mode == "forward" else (*shape, mode)
            case = self.measure(dtype, flagged, workload, programs, in_torch.result(), budget, gpu=gpu)
            in_torch.result().forget()
            result.cases.append(case)
            results.save(result, args.output)  # kept, should the run be interrupted
            left = (time.perf_counter() - started) / done * (len(workloads) - done)
            time_left = f", about {left:.0f} s left" if left else ""
            best = tables.summary(case, tables.device if gpu else tables.wall)
            say(f"{done} of {len(workloads)}{time_left}: {case.label}: {best}")
        complete = gpu and not (args.quick or args.shapes or args.no_compile or self.shortened)
        whole = set(self.modes) <= set(args.mode) or results.kept(result, args.output)
        if complete and whole and set(self.dtypes) <= set(args.dtype):
            result = results.complete(result, args.output)
        if args.show_results:
            shown = tables.full(result, self.table(result) if self.table else "")
            print("\n" + "\n\n".join([shown, tables.entries(result), tables.conditions(result)]))
        for line in tables.failures(result):
            print(line)
        say(f"results: {results.path_of(result, args.output)}")
        ours = [entry for case in result.cases for entry in case.entries if entry.family in OURS]
        return int(any(entry.status in ("failed", "wrong") for entry in ours))

    def measure(
        self,
        dtype: str,
        shape: Shape,
        workload: Workload,
        programs: JaxPrograms,
        in_torch: TorchPrograms,
        budget: timing.Budget,
        *,
        gpu: bool,
    ) -> Case:
        """Runs one case: every contender is called, checked and, where it is right, timed."""
        sets = workload.input_sets()
        attempts: list[Attempt] = []
        for contender in workload.contenders:
            if contender.in_torch:
                attempts += in_torch.attempts(contender, sets)
            else:
                attempts.append(programs.attempt(workload, contender, sets))
        references = {i: programs.reference(workload, sets[i]) for i in {0, len(sets) - 1}}
        limit = LIMITS[dtype] if workload.limit is None else workload.limit
        for attempt in attempts:
            attempt.check(references, workload.measure, limit)
        ready = {a.name: a.candidate for a in attempts if a.ready and a.candidate is not None}
        outcomes = timing.measure(ready, budget, on_device=gpu)
        sizes = dict(zip(self.axes, (int(size) for size in shape[: len(self.axes)]), strict=True))
        return Case(
            label=f"{shape_text(shape)} {dtype}",
            dtype=dtype,
            shape=sizes | dict.fromkeys(map(str, shape[len(self.axes) :]), 1),
            flop=workload.flop,
            entries=[attempt.entry(outcomes.get(attempt.name)) for attempt in attempts],
            bytes=workload.bytes,
            products=workload.products,
        )


class Progress:
    """Prints lines that begin with the seconds since it was made."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        """Prints a line at once."""
        print(f"[{time.perf_counter() - self.started:4.0f} s] {text}", flush=True)


def shape_text(shape: Shape) -> str:
    """A shape as it is given on the command line."""
    sizes = "x".join(str(size) for size in shape if isinstance(size, int))
    return "+".join([sizes, *(flag for flag in shape if isinstance(flag, str))])
