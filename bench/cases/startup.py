"""What a user waits for: compilation on the first call, the first corpus, the latency of a short call.

Each figure comes from a new process (`bench.models.startup_programs`) with an empty compilation cache:

- Programs: seconds of tracing, lowering and compiling a model with the default kernels, through XLA and with the
  Triton kernels; side by side where each of them has eight cores.
- Corpus: seconds from the start of the process until `Encoder.from_pretrained(...).encode(sentences)` with default
  arguments returns; once with an empty persistent compilation cache, once with the one that this left.
- Latency: microseconds of a short call, many queued and one at a time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import weights
from bench.cases import sts
from bench.measuring import environment, results
from bench.measuring.harness import DTYPES, Progress
from bench.measuring.results import Case, Entry, Family, Result
from bench.models import minilm_models
from bench.reporting import tables
from pallas_models._processes import cores

HELP = "first call and latency: ours, XLA, torch"
NAME = "startup"
SHOWN = "minilm 64x128 fp16"  # the case in README.md

LIMIT_S = 300.0  # of one process
CORES = 8  # of a program that is compiled beside others: XLA's own keeps nine busy
QUICK_SENTENCES = 64
EAGER_SIZE = 64
MANY = 100_000  # sentences of a corpus that is embedded without a cache too, and its seconds shown part by part
FAMILIES: dict[str, Family] = {
    "pallas": "ours",
    "pallas-bound": "ours",
    "triton": "ladder",
    "xla": "xla",
    "xla-bound": "xla",
    "one-kernel": "xla",
    "torch-graph": "torch",
}
PARTS = ("programs", "corpus", "latency")
IMPLEMENTATIONS = {"pallas": None, "xla": "xla", "triton": "triton"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, its dtype and the sizes of its input: (batch, seq), or (batch, n, n, channels) of TriMul's."""

    model: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        """`minilm 64x128 fp16`."""
        return f"{self.model} {'x'.join(map(str, self.sizes))} {self.dtype}"


PROGRAMS = (
    *(Program("minilm", "fp16", sizes) for sizes in ((1, 16), (32, 32), (512, 64), (64, 128))),
    Program("gpt2", "bf16", (8, 1024)),
    Program("qwen3", "bf16", (1, 2048)),
    Program("trimul", "bf16", (1, 512, 512, 128)),
)
QUICK_PROGRAMS = (Program("gpt2", "bf16", (8, 1024)),)
CPU_PROGRAMS = (Program("gpt2", "bf16", (1, 16)), Program("trimul", "bf16", (1, 32, 32, 64)))


COLUMNS = (  # of a pass, by their metrics' names
    "encode",
    "processes up at",
    "tokenized at",
    "compiled at",
    "collected at",
    "lowering",
    "tokens awaited",
    "packing",
    "batches started",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench startup`."""
    parser.add_argument("--data", type=Path, help=f"folder with {' and '.join(sts.FILES)}; without it no corpus")
    parser.add_argument(
        "--sentences", type=int, help="of the corpus: those there over and over; all of them, once"
    )
    parser.add_argument("--only", choices=PARTS, help="measure no more than this")
    parser.add_argument("--weights", help="what Encoder.from_pretrained takes; all-MiniLM-L6-v2")
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--show-results", action="store_true", help="print the tables, not only the file's name")
    parser.add_argument("--quick", action="store_true", help=f"fewer programs, {QUICK_SENTENCES} sentences")


class ProgramError(RuntimeError):
    """A measuring process failed: the message is the last line that it wrote to stderr."""


def measured(name: str, *, platform: str | None = None, **options: Any) -> dict[str, Any]:
    """What a program of `startup_programs` measures, run in a process of its own.

    Args:
      name: of the function.
      platform: the only one that JAX may use there; None for all.
      options: arguments of the function.

    Raises:
      ProgramError: it failed, or took longer than LIMIT_S.
    """
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as folder:  # where CUDA's driver keeps what it compiled
        settings = {"CUDA_CACHE_PATH": folder, "TF_CPP_MIN_LOG_LEVEL": "3"}
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        if platform:
            settings["JAX_PLATFORMS"] = platform
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
        command = [sys.executable, "-m", "bench.models.startup_programs", name, json.dumps(options)]
        try:
            done = subprocess.run(
                command, env=inherited | settings, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ProgramError(f"took longer than {LIMIT_S:.0f} s") from None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode or not lines:
        raise ProgramError(lines[-1] if lines else f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def entry(name: str, measure: Callable[[], dict[str, float]], *, skip: str = "") -> Entry:
    """An entry with the figures that `measure` gives, or why it gave none."""
    family = FAMILIES.get(name, "ours")
    if skip:
        return Entry(name=name, family=family, status="skipped", message=skip)
    try:
        return Entry(name=name, family=family, status="ok", metrics=measure())
    except ProgramError as error:
        return Entry(name=name, family=family, status="failed", message=str(error)[:300])


def program_case(program: Program, *, gpu: bool) -> Case:
    """Traces, lowers and compiles a program with each implementation."""

    def measure(implementation: str | None) -> dict[str, float]:
        dtype = DTYPES[program.dtype].__name__
        options = {"dtype": dtype, "sizes": program.sizes, "implementation": implementation}
        found = measured("compile_program", model=program.model, **options)
        return {**found, "total_s": sum(found.values())}

    def entry_of(name: str) -> Entry:
        implementation = IMPLEMENTATIONS[name]
        skip = "it needs a CUDA GPU" if implementation == "triton" and not gpu else ""
        return entry(name, functools.partial(measure, implementation), skip=skip)

    with concurrent.futures.ThreadPoolExecutor(max(cores() // CORES, 1)) as pool:
        entries = list(pool.map(entry_of, IMPLEMENTATIONS))
    axes = ("batch", "n", "m", "channels") if len(program.sizes) == 4 else ("batch", "seq")
    shape = dict(zip(axes, program.sizes, strict=True))
    return Case(label=program.label, dtype=program.dtype, shape=shape, flop=None, entries=entries)


def corpus_case(sentences: Sequence[str], count: int, model: str | None) -> Case:
    """Embeds a corpus, sentences over and over, in a new process, with an empty and a filled compilation cache."""
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder, "sentences.json"), Path(folder, "cache")
        file.write_text(json.dumps(list(sentences)), encoding="utf-8")
        cache.mkdir()

        def measure(state: str) -> dict[str, float]:
            options = {"sentences": str(file), "weights": model, "dtype": "float16", "count": count}
            return measured("encode", **options, cache=None if state == "no" else str(cache), started=time.time())

        states = (*(["no"] if count >= MANY else []), "empty", "filled")
        entries = [entry(f"{state}-cache", functools.partial(measure, state)) for state in states]
    return Case(label="corpus fp16", dtype="fp16", shape={"sentences": count}, flop=None, entries=entries)


def embed_case(dtype: str, *, gpu: bool) -> Case:
    """Microseconds of the forward pass of one short sentence."""
    sizes = {"batch": 1, "seq": 16}
    found: dict[str, Any] = {}
    try:
        found = measured("embed", batch=1, seq=16, dtype=dtype, gpu=gpu)
    except ProgramError as error:
        failed = Entry(name="pallas", family="ours", status="failed", message=str(error)[:300])
    entries = [
        entry(name, functools.partial(dict, figures), skip=figures if isinstance(figures, str) else "")
        for name, figures in found.items()
    ]
    return Case(
        label=f"embed 1x16 {dtype}", dtype=dtype, shape=sizes, flop=None, entries=entries if found else [failed]
    )


def sentence_case(model: str | None) -> Case:
    """Microseconds of `encode` of one short sentence."""
    found = entry("pallas", lambda: measured("sentence", weights=model, dtype="float16"))
    return Case(label="encode one sentence fp16", dtype="fp16", shape={"sentences": 1}, flop=None, entries=[found])


def eager_case(platform: str) -> Case:
    """Microseconds of a small matrix product that is not jitted."""
    sizes = dict.fromkeys("mnk", EAGER_SIZE)
    label = f"eager matmul {EAGER_SIZE}x{EAGER_SIZE} {platform} fp32"
    try:
        found = measured("eager", size=EAGER_SIZE, platform=platform)
    except ProgramError as error:
        entries = [Entry(name="pallas", family="ours", status="failed", message=str(error)[:300])]
    else:
        entries = [Entry(name=n, family=FAMILIES[n], status="ok", metrics=figures) for n, figures in found.items()]
    return Case(label=label, dtype="fp32", shape=sizes, flop=None, entries=entries)


def read_corpus(folder: Path) -> list[str]:
    """The distinct sentences of the STS files.

    Raises:
      OSError, ValueError: a file is missing, or something else than expected.
    """
    pairs = [pair for name in sts.FILES for pair in sts.read_pairs(folder / name)]
    return list(dict.fromkeys(sentence for pair in pairs for sentence in pair[:2]))


def has_weights(path: str | None) -> bool:
    """Whether the encoder's weights can be had; prints why if not."""
    try:
        weights.resolve(*([] if path is None else [path]))
    except OSError as error:
        print(f"encode: left out ({error})")
        return False
    return True


def plan(args: argparse.Namespace, *, gpu: bool) -> dict[str, Callable[[], Case]]:
    """What is measured, by title.

    Raises:
      OSError, ValueError: of `read_corpus`.
    """
    programs = CPU_PROGRAMS if not gpu else QUICK_PROGRAMS if args.quick else PROGRAMS
    found: dict[str, dict[str, Callable[[], Case]]] = {part: {} for part in PARTS}
    found["programs"] = {program.label: functools.partial(program_case, program, gpu=gpu) for program in programs}
    sentences = [] if args.data is None else read_corpus(args.data)[: QUICK_SENTENCES if args.quick else None]
    count = args.sentences or len(sentences)
    there = has_weights(args.weights)
    if args.data is None:
        print("corpus: left out, as it needs --data")
    elif there:
        found["corpus"][f"corpus of {count} sentences"] = lambda: corpus_case(sentences, count, args.weights)
    found["latency"]["embed"] = lambda: embed_case("fp16", gpu=gpu)
    if there:
        found["latency"]["encode one sentence"] = lambda: sentence_case(args.weights)
    for platform in ("cpu", "cuda") if gpu else ("cpu",):
        found["latency"][f"eager matmul, {platform}"] = functools.partial(eager_case, platform)
    chosen = PARTS if args.only is None else (args.only,)
    return {title: measure for part in chosen for title, measure in found[part].items()}


def run(args: argparse.Namespace) -> int:
    """Measures and saves; returns 1 if something of ours failed, 2 if the sentences cannot be read."""
    say = Progress().say
    gpu = environment.has_gpu()
    try:
        todo = plan(args, gpu=gpu)
    except (OSError, ValueError) as error:
        print(error)
        return 2
    result = results.begun(NAME, {"weights": minilm_models.name_of(args.weights)})
    for number, (title, measure) in enumerate(todo.items(), start=1):
        case = measure()
        result.cases.append(case)
        results.save(result, args.output)  # kept, should the run be interrupted
        say(f"{number} of {len(todo)}: {title}: {summary(case)}")
    whole = gpu and not args.quick and not args.sentences
    if whole and {"corpus fp16", "encode one sentence fp16"} <= {c.label for c in result.cases}:
        result = results.complete(result, args.output)
    if args.show_results:
        print(f"\n{table(result)}\n\n{tables.conditions(result)}")
    for line in tables.failures(result):
        print(line)
    say(f"results: {results.path_of(result, args.output)}")
    return int(any(e.status == "failed" for case in result.cases for e in case.entries if e.family == "ours"))


def summary(case: Case) -> str:
    """A line with every candidate's last figure, which is the total where there are several."""
    found = [(e.name, *list(e.metrics.items())[-1]) for e in case.entries if e.metrics]
    return ", ".join(f"{name} {value:.4g} {unit_of(metric)}" for name, metric, value in found) or "no figures"


def unit_of(metric: str) -> str:
    """The unit of a metric, which ends its name."""
    return metric.rpartition("_")[2]


def metrics_of(case: Case) -> dict[str, dict[str, float]]:
    """The figures of each candidate that has some."""
    return {entry.name: entry.metrics for entry in case.entries if entry.metrics}


def ratio(found: dict[str, dict[str, float]], baseline: str, metric: str) -> float | None:
    """How many times the baseline's figure ours is; None where either has none."""
    ours, theirs = (found.get(name, {}).get(metric) for name in ("pallas", baseline))
    return ours / theirs if ours and theirs else None


# An entry of ours, the entry that it is compared with, and whose the latter is.
RIVALS = (("pallas", "xla", "XLA"), ("pallas-bound", "xla-bound", "XLA"), ("pallas", "torch-graph", "torch"))
METRICS = {"total_s": "first call", "queued_us": "queued calls", "synchronised_us": "calls one at a time"}


def comparisons(result: Result) -> list[tables.Comparison]:
    """Ours against XLA's program of the same form, and against torch."""
    return [
        tables.Comparison(clock=title, case=case.label, rival=rival, ratio=of[theirs][metric] / of[ours][metric])
        for case, of in ((case, metrics_of(case)) for case in result.cases)
        for metric, title in METRICS.items()
        for ours, theirs, rival in RIVALS
        if metric in of.get(ours, {}) and metric in of.get(theirs, {})
    ]


def headline(result: Result) -> tables.Headline | None:
    """Seconds of tracing, lowering and compiling, against XLA's own program."""
    ratios = {row.case: row.ratio for row in comparisons(result) if row.clock == METRICS["total_s"]}
    if not ratios:
        return None
    label = SHOWN if SHOWN in ratios else next(iter(ratios))
    found = next(metrics_of(case) for case in result.cases if case.label == label)
    ours, theirs = (f"{found[name]['total_s']:.1f} s" for name in ("pallas", "xla"))
    return tables.Headline(
        case=label,
        ours=f"{ours} before it runs",
        baseline=f"XLA, {theirs}",
        ratio=ratios[label],
        mean=tables.mean(list(ratios.values())),
    )


def table(result: Result) -> str:
    """Seconds of the first call, of a corpus, and microseconds of short calls."""
    sections = {
        "Trace, lower and compile in a new process, seconds": program_table(result),
        "A new process embeds a corpus with `Encoder.encode`, seconds": corpus_table(result),
        "Where these seconds go: of the main thread, and at which others were done": parts_table(result),
        "Short calls, microseconds": latency_table(result),
    }
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in sections.items() if text)


def program_table(result: Result) -> str:
    """The seconds of each program, and how many times XLA's the default takes."""
    rows = []
    for case in result.cases:
        found = metrics_of(case)
        if not any("trace_s" in figures for figures in found.values()):
            continue
        ours = found.get("pallas", {})
        cells = [ours.get(name) for name in ("trace_s", "lower_s", "compile_s", "total_s")]
        cells += [found.get(name, {}).get("total_s") for name in ("xla", "triton")]
        rows.append([case.label, *map(decimal, cells), tables.format_ratio(ratio(found, "xla", "total_s"))])
    header = ["program", "trace", "lower", "compile", "ours", "XLA", "ours by Triton", "ours / XLA"]
    return tables.markdown(header, rows) if rows else ""


def corpus_table(result: Result) -> str:
    """The seconds of a process that embeds a corpus, part by part."""
    columns = ("import_s", "load_s", "first_encode_s", "total_s", "second_encode_s")
    rows = [
        [
            f"{case.shape.get('sentences', '?')} sentences, {name.replace('-', ' ')}",
            *map(decimal, map(figures.get, columns)),
        ]
        for case in result.cases
        for name, figures in metrics_of(case).items()
        if "first_encode_s" in figures
    ]
    header = ["corpus", "import", "load", "first encode", "process start to embeddings", "second encode"]
    return tables.markdown(header, rows) if rows else ""


def parts_table(result: Result) -> str:
    """The seconds of what `startup_programs.Parts` finds in the first and the second pass over a long corpus."""
    rows = [
        [
            f"{which}, {name.replace('-', ' ')}",
            f"{case.shape['sentences'] / figures[f'{which}_encode_s']:,.0f}",
            *(decimal(figures.get(f"{which}_{column.replace(' ', '_')}_s")) for column in COLUMNS),
        ]
        for case in result.cases
        if case.shape.get("sentences", 0) >= MANY
        for name, figures in metrics_of(case).items()
        for which in ("first", "second")
    ]
    return tables.markdown(["pass", "sentences/s", *COLUMNS], rows) if rows else ""


def latency_table(result: Result) -> str:
    """The microseconds of short calls."""
    columns = ("queued_us", "synchronised_us")
    rows = [
        [f"{case.label}, {name}", *(tables.format_number(figures.get(column)) for column in columns)]
        for case in result.cases
        for name, figures in metrics_of(case).items()
        if "synchronised_us" in figures
    ]
    return tables.markdown(["call", "many queued", "one at a time"], rows) if rows else ""


def decimal(value: float | None) -> str:
    """Seconds with two decimals."""
    return "-" if value is None else f"{value:.2f}"
