"""Whole training steps: GPT-2 124M on text, MiniLM on pairs of sentences; ours against plain JAX and torch.

A step is loss, gradients and AdamW, on float32 parameters with bfloat16 products (`bench.models.train_programs`).
Every contender begins with the same parameters and takes the same batches; the losses of its first steps must
equal the losses of a float32 model in plain JAX, which for MiniLM rounds parameters as contenders do. Then the
contenders are timed in turns, as in every benchmark.
The figure of a step is its wall time, many queued, as in training. Memory is the peak of a step, with parameters
and the state of the optimiser.
"""

import argparse
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import environment, results, timing
from bench.measuring.contenders import COMPILED_AT_ONCE, absent
from bench.measuring.harness import Progress
from bench.measuring.results import Accuracy, Case, Entry, Family, Result
from bench.models import minilm_models
from bench.models import train_programs as programs
from bench.models.train_programs import Batch, Trainer
from bench.reporting import tables
from pallas_models import gpt2, training
from pallas_models.gpt2 import GPT2Config

HELP = "training steps of GPT-2 124M and MiniLM: ours, plain JAX, torch"
NAME = "train"
SHOWN = "gpt2 32x1024 bf16"  # the case in README.md

BATCHES = 2  # that the steps rotate through
CHECKED = 6  # steps whose losses are compared
# In nats. Rounding the cosines of bfloat16 vectors, half an ulp below 1, moves scores by 20 times 2^-9 = 0.04. The
# loss of a text averages errors of either sign over many more tokens. AdamW moves a parameter by the sign of its
# gradient in its first steps, which rounding turns only where the gradient is close to zero.
LIMIT = 0.05

UNITS = {"gpt2": "tokens", "minilm": "pairs"}
SHAPES = {"gpt2": ((16, 1024), (32, 1024)), "minilm": ((256, 64), (512, 32))}
CPU_SHAPES = {"gpt2": ((2, 16),), "minilm": ((4, 12),)}
CPU_GPT2 = GPT2Config(vocab_size=128, hidden_size=192, num_layers=2, num_heads=12, intermediate_size=256)

Make = Callable[[], Trainer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train: its name and family, what makes it ready to take steps, and why it is skipped, if it is."""

    name: str
    family: Family
    make: Make
    skip: str = ""

    @property
    def is_compiled(self) -> bool:
        """Whether making it ready takes seconds, of a compiler."""
        return not self.skip and self.name != "torch-eager"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model to be trained: its batches, its contenders, the right way among them, and the work of a step."""

    batches: list[Batch]
    contenders: list[Contender]
    reference: Make
    flop: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench train`."""
    parser.add_argument("--model", choices=tuple(SHAPES), help="of one model only")
    parser.add_argument(
        "--weights", help="MiniLM's checkpoint folder; all-MiniLM-L6-v2, or random ones without it"
    )
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--show-results", action="store_true", help="print the tables, not only the file's name")
    parser.add_argument("--quick", action="store_true", help="the smaller batch of each model, fewer samples")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


def gpt2_workload(batch: int, seq: int, *, gpu: bool, no_compile: str) -> Workload:
    """GPT-2 small from random parameters, on sequences of random ids."""
    config = programs.gpt2_config() if gpu else CPU_GPT2
    params = gpt2.init(jax.random.key(0), config)
    batches = [programs.text(config, batch, seq, seed) for seed in range(BATCHES)]

    def jax_trainer(loss: programs.Loss, *, stacked: bool = False) -> Make:
        def make() -> Trainer:
            given = training.stack_layers(params) if stacked else params
            return programs.in_jax(loss, given, batches, programs.RATES["gpt2"], gpu=gpu)

        return make

    def torch_trainer(*, compiled: bool) -> Trainer:
        loss, leaves = programs.gpt2_torch(config, params, "cuda" if gpu else "cpu")
        return programs.in_torch(loss, leaves, batches, programs.RATES["gpt2"], compiled=compiled)

    bf16, attention = jnp.bfloat16, "cudnn" if gpu else "xla"
    by_hand = programs.gpt2_plain(config, bf16, attention=attention)
    kept = programs.gpt2_ours(config, bf16, "block")
    h, f, layers = config.hidden_size, config.intermediate_size, config.num_layers
    forward = 2.0 * batch * seq * (layers * (4 * h**2 + 2 * h * f + seq * h) + h * config.vocab_size)
    return Workload(
        batches=batches,
        contenders=[
            Contender(name="pallas", family="ours", make=jax_trainer(programs.gpt2_ours(config, bf16))),
            Contender(name="pallas-stacked-remat", family="ladder", make=jax_trainer(kept, stacked=True)),
            Contender(name=f"xla-{attention}", family="xla", make=jax_trainer(by_hand)),
            *in_torch(torch_trainer, no_compile),
        ],
        reference=jax_trainer(
            programs.gpt2_plain(config, jnp.float32, attention="xla", one_by_one=True), stacked=True
        ),
        flop=3 * forward,  # the backward pass takes each product twice
    )


def minilm_workload(
    batch: int, seq: int, checkpoint: minilm_models.Checkpoint, *, gpu: bool, no_compile: str
) -> Workload:
    """MiniLM from its checkpoint, on pairs of random sentences."""
    config = checkpoint.config
    batches = [programs.pairs(config, batch, seq, seed) for seed in range(BATCHES)]
    rate = programs.RATES["minilm"]

    def ours() -> Trainer:
        loss = programs.minilm_ours(config, jnp.bfloat16)
        return programs.in_jax(loss, checkpoint.params("fp32"), batches, rate, gpu=gpu)

    def plain(dtype: str, attention: Any, rounded: str | None = None) -> Trainer:
        loss, params = programs.minilm_plain(checkpoint, dtype, attention=attention, rounded=rounded)
        return programs.in_jax(loss, params, batches, rate, gpu=gpu)

    def torch_trainer(*, compiled: bool) -> Trainer:
        loss, leaves = programs.minilm_torch(checkpoint, "cuda" if gpu else "cpu")
        return programs.in_torch(loss, leaves, batches, rate, compiled=compiled)

    attention = "cudnn" if gpu else "einsum"
    return Workload(
        batches=batches,
        contenders=[
            Contender(name="pallas", family="ours", make=ours),
            Contender(name=f"xla-{attention}", family="xla", make=lambda: plain("bf16", attention)),
            *in_torch(torch_trainer, no_compile),
        ],
        # An update of 2e-5 is less than bfloat16 can tell of most weights: which of them a step rounds up or down
        # moves the losses by 0.05, and is no error of a contender.
        reference=lambda: plain("fp32", "einsum", rounded="bf16"),
        flop=3 * 2 * minilm_models.flop(config, batch, seq),
    )


def in_torch(make: Callable[..., Trainer], no_compile: str) -> Iterator[Contender]:
    """torch's contenders: eager, and compiled unless there is a reason against it."""
    for way in ("compile", "eager"):
        compiled = way == "compile"
        yield Contender(
            name=f"torch-{way}",
            family="torch",
            make=lambda compiled=compiled: make(compiled=compiled),
            skip=no_compile if compiled else "",
        )


def compiled_in(
    in_jax: concurrent.futures.Executor,
    in_torch: concurrent.futures.Executor,
    workload: Workload,
    say: Callable[[str], None],
) -> Workload:
    """The workload with what its contenders compile compiled in two pools."""

    def submit(name: str, make: Make, pool: concurrent.futures.Executor) -> Make:
        def compiled() -> Trainer:
            start = time.perf_counter()
            try:
                return make()
            finally:
                say(f"{name}: {time.perf_counter() - start:.0f} s")

        return pool.submit(compiled).result

    contenders = [
        dataclasses.replace(
            contender,
            make=submit(contender.name, contender.make, in_torch if contender.family == "torch" else in_jax),
        )
        if contender.is_compiled
        else contender
        for contender in workload.contenders
    ]
    return dataclasses.replace(
        workload, contenders=contenders, reference=submit("reference", workload.reference, in_jax)
    )


def losses(trainer: Trainer) -> np.ndarray:
    """The losses of the first steps."""
    return np.array([float(trainer.step(i)) for i in range(CHECKED)])


def measure(workload: Workload, budget: timing.Budget, *, gpu: bool) -> list[Entry]:
    """Checks and times the contenders of a workload; an entry for each."""
    expected = losses(workload.reference())
    entries: dict[str, Entry] = {}
    ready: dict[str, timing.Candidate] = {}
    for contender in workload.contenders:
        entry = Entry(name=contender.name, family=contender.family, status="ok")
        try:
            if contender.skip:
                raise NotImplementedError(contender.skip)
            trainer = contender.make()
            found = losses(trainer)
        except (ImportError, NotImplementedError) as error:
            message = absent(error) if isinstance(error, ImportError) else str(error)
            entries[entry.name] = dataclasses.replace(entry, status="skipped", message=message)
            continue
        except Exception as error:  # reported as this contender's result
            entries[entry.name] = failed(entry, error)
            continue
        error = float(np.max(np.abs(found - expected)))
        error = error if np.isfinite(error) else 1e9
        entry = dataclasses.replace(
            entry,
            accuracy=Accuracy(measure="error of the losses, nats", value=error, limit=LIMIT),
            compile_s=trainer.compile_s,
            peak_bytes=trainer.peak_bytes(),
        )
        if error > LIMIT:
            message = f"losses {np.round(found, 3)}, expected {np.round(expected, 3)}"
            entry = dataclasses.replace(entry, status="wrong", message=message)
        else:
            ready[entry.name] = timing.Candidate(call=trainer.step, wait=trainer.wait)
        entries[entry.name] = entry
    for name, outcome in timing.measure(ready, budget, on_device=gpu).items():
        if isinstance(outcome, Exception):
            entries[name] = failed(entries[name], outcome)
        else:
            entries[name] = entries[name].timed(outcome)
    return list(entries.values())


def failed(entry: Entry, error: Exception) -> Entry:
    """The entry of a contender that raised."""
    return dataclasses.replace(entry, status="failed", message=f"{type(error).__name__}: {error}"[:300])


def run(args: argparse.Namespace) -> int:
    """Measures and saves; returns 1 if ours failed or was wrong, 2 if the weights cannot be read."""
    say = Progress().say
    gpu = environment.has_gpu()
    models = [args.model] if args.model else list(SHAPES)
    try:
        checkpoint = minilm_models.load_checkpoint(args.weights)
    except (OSError, ValueError) as error:
        print(error)
        return 2
    shapes = SHAPES if gpu else CPU_SHAPES
    todo = [(m, shape) for m in models for shape in (shapes[m][:1] if args.quick else shapes[m])]
    result = results.begun(NAME, {"MiniLM's weights": checkpoint.origin})
    if gpu:
        result.ceilings.update(environment.measure_ceilings(timing.QUICK))
    budget = timing.QUICK if args.quick or not gpu else timing.STANDARD
    no_compile = "--no-compile" if args.no_compile else "" if gpu else "torch.compile is measured on a GPU"
    say(f"compiling: {COMPILED_AT_ONCE} programs of JAX at a time, and one of torch")
    jax_pool = concurrent.futures.ThreadPoolExecutor(COMPILED_AT_ONCE)
    with jax_pool, concurrent.futures.ThreadPoolExecutor(1) as torch_pool:
        workloads = [
            compiled_in(
                jax_pool,
                torch_pool,
                gpt2_workload(*shape, gpu=gpu, no_compile=no_compile)
                if model == "gpt2"
                else minilm_workload(*shape, checkpoint, gpu=gpu, no_compile=no_compile),
                say,
            )
            for model, shape in todo
        ]
    for model, (batch, seq) in todo:
        workload = workloads.pop(0)  # with which its parameters go
        case = Case(
            label=f"{model} {batch}x{seq} bf16",
            dtype="bf16",
            shape={"batch": batch, "seq": seq},
            flop=workload.flop,
            entries=measure(workload, budget, gpu=gpu),
        )
        result.cases.append(case)
        results.save(result, args.output)  # kept, should the run be interrupted
        say(f"{len(result.cases)} of {len(todo)}: {case.label}: {summary(case)}")
    if gpu and not (args.quick or args.no_compile or args.model):
        result = results.complete(result, args.output)
    if args.show_results:
        print(f"\n{table(result)}\n\n{tables.entries(result)}\n\n{tables.conditions(result)}")
    for line in tables.failures(result):
        print(line)
    say(f"results: {results.path_of(result, args.output)}")
    return int(any(e.status != "ok" for case in result.cases for e in case.entries if e.family == "ours"))


def rate(case: Case, entry: Entry) -> float | None:
    """Tokens or pairs a second; None where nothing was timed."""
    per_step = case.shape["batch"] * (case.shape["seq"] if unit(case) == "tokens" else 1)
    return 1e6 * per_step / entry.wall.median_us if entry.wall else None


def unit(case: Case) -> str:
    """What is counted."""
    return UNITS[case.label.split()[0]]


def summary(case: Case) -> str:
    """A line with the rate of each contender."""
    found = [(entry.name, rate(case, entry)) for entry in case.entries]
    return (
        ", ".join(f"{name} {value:,.0f} {unit(case)}/s" for name, value in found if value) or "nothing was timed"
    )


def headline(result: Result) -> tables.Headline | None:
    """Tokens a second against the best of the others."""
    found = {}
    for case in result.cases:
        ours, other = tables.best(case, "ours", tables.wall), tables.best_baseline(case, tables.wall)
        if ours and other:
            found[case.label] = (case, ours[0], other[0], other[1].median_us / ours[1].median_us)
    if not found:
        return None
    case, ours, other, ratio = found.get(SHOWN) or next(iter(found.values()))
    return tables.Headline(
        case=case.label,
        ours=f"{rate(case, ours):,.0f} {unit(case)}/s",
        baseline=f"{tables.NAMES[other.family]}, {rate(case, other):,.0f} {unit(case)}/s",
        ratio=ratio,
        mean=tables.mean([of[3] for of in found.values()]),
    )


def table(result: Result) -> str:
    """Time, rate and memory of a step of every contender, and how many times its rate ours is."""
    rows = []
    for case in result.cases:
        ours = tables.best(case, "ours", tables.wall)
        for entry in case.entries:
            if entry.wall is None:
                continue
            memory = "-" if entry.peak_bytes is None else f"{entry.peak_bytes / 1e9:.2f}"
            ratio = entry.wall.median_us / ours[1].median_us if ours else None
            figures = f"{entry.wall.median_us / 1e3:.2f}", f"{rate(case, entry):,.0f} {unit(case)}/s", memory
            device = f"{entry.device.median_us / 1e3:.2f}" if entry.device else "-"
            rows.append([f"{case.label}, {entry.name}", *figures, device, tables.format_ratio(ratio)])
    header = ["step", "ms", "rate", "memory, GB", "device time, ms", "time / ours"]
    return tables.markdown(header, rows) if rows else ""
