"""A corpus from files to files: sentences a second, and the memory that it takes.

The distinct sentences of STS over and over, in one file, embedded by all-MiniLM-L6-v2 in float16 and written in
shards, as `python -m pallas_models embed` does it. Each case has a process of its own, which compiles
its programs and starts other processes before the clock starts. Memory is the resident memory of that process and
of the processes that tokenize for it, per million of sentences.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import weights
from bench.cases import startup, sts
from bench.measuring import environment, results
from bench.measuring.harness import Progress
from bench.measuring.results import Case, Result
from bench.models import minilm_models
from bench.reporting import tables
from pallas_models import files
from pallas_models._processes import cores
from pallas_models.corpus import job, manifest, reading
from pallas_models.corpus.embedder import Embedder
from pallas_models.corpus.job import Layout
from pallas_models.sentence import pipeline

HELP = "a corpus from files to files: sentences a second, memory"
NAME = "corpus"
SHOWN = "txt to parquet"  # the case in README.md

SENTENCES, QUICK_SENTENCES, CPU_SENTENCES = 1_000_000, 200_000, 400
LONG = 10_000_000  # sentences of the case that looks at memory
SHARD = 8 * pipeline.CHUNK  # sentences of a file, as the program's default
PASSES = 3  # of which the median counts
PER = 1_000_000  # sentences for which memory is averaged
INTERVAL_S = 0.1
KINDS = (("txt", "parquet"), ("parquet", "parquet"), ("txt", "npy"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench corpus`."""
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {' and '.join(sts.FILES)}")
    parser.add_argument("--weights", help="what Encoder.from_pretrained takes; all-MiniLM-L6-v2")
    parser.add_argument("--sentences", type=int, help=f"of a corpus; {SENTENCES} on a GPU")
    parser.add_argument("--long", type=int, help=f"of the corpus that shows memory; {LONG} on a GPU, 0 for none")
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--show-results", action="store_true", help="print the table, not only the file's name")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SENTENCES} sentences, and no long corpus")


def write(path: Path, sentences: Sequence[str], count: int) -> None:
    """Writes `count` sentences, those given over and over, as text or Parquet."""
    repeated = itertools.islice(itertools.cycle(" ".join(s.split()) for s in sentences), count)
    with files.replacing(path) as file:
        if path.suffix == ".parquet":
            pa = reading.pyarrow("Parquet")
            pa.parquet.write_table(pa.table({"text": list(repeated)}), file)
        else:
            file.writelines(f"{sentence}\n".encode() for sentence in repeated)


def resident_mib() -> float:
    """What is resident of this process and its children, in MiB."""
    children = [words(path) for path in Path("/proc/self/task").glob("*/children")]
    pages = (words(Path(f"/proc/{pid}/statm")) for pid in itertools.chain(["self"], *children))
    return sum(int(page[1]) for page in pages if page) * os.sysconf("SC_PAGE_SIZE") / 2**20


def words(path: Path) -> list[str]:
    """The words of a file of /proc, none if the thread or process has ended."""
    try:
        return path.read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


class Watch:
    """Counts rows as they pass, and looks at the memory again and again while the context lasts."""

    def __init__(self) -> None:
        self.count = 0
        self.samples: list[tuple[int, float]] = []  # sentences so far, MiB
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self.count += len(rows)
        return rows

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.samples.append((self.count, resident_mib()))


def memory(samples: Sequence[tuple[int, float]], per: int = PER) -> dict[str, float]:
    """Of the sentences after the first `per`: MiB on average in the second and the last `per`, least and most."""
    parts = {
        part: [mib for _, mib in group] for part, group in itertools.groupby(samples, lambda at: at[0] // per)
    }
    later = [parts[part] for part in sorted(parts) if part]
    if not later:
        return {}
    means = [float(np.mean(part)) for part in later]
    return {
        "resident_second_mib": means[0],
        "resident_last_mib": means[-1],
        "resident_lowest_mean_mib": min(means),
        "resident_highest_mean_mib": max(means),
        "resident_least_mib": min(map(min, later)),
        "resident_most_mib": max(map(max, later)),
    }


def embed(
    source: Path, count: int, folder: Path, format: str, embedder: Embedder, passes: int
) -> dict[str, float]:
    """Embeds the `count` sentences of a file into shards, so many times; for a process of its own."""
    corpus = reading.Corpus([source])
    # Starts processes and compiles: what is left of the corpus after the last whole chunk has programs of its own.
    embedder.embed(itertools.islice(corpus, min(SHARD + count % pipeline.CHUNK, count)))
    layout = Layout("float16", format, SHARD)
    rates, watch = [], Watch()
    for number in range(passes):
        os.sync()  # what was written before is on the disk
        watch, target = Watch(), folder / str(number)
        planned = manifest.Manifest({}, dataclasses.asdict(layout))
        with job.begin(target, planned) as begun, watch:
            start = time.perf_counter()
            job.embed_to_folder(corpus, lambda chunks: map(watch, embedder(chunks)), target, begun, layout)  # noqa: B023
        rates.append(begun.sentences / (time.perf_counter() - start))
    rate = {"sentences_per_s": float(np.median(rates)), "slowest_sentences_per_s": min(rates)}
    return rate | memory(watch.samples)


def case(label: str, count: int, sentences: Sequence[str], embedder: Embedder, passes: int) -> Case:
    """Embeds `count` sentences from and to the formats that the label begins with."""
    source, _, target = label.split(",")[0].split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"sentences.{source}")
        write(path, sentences, count)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            call = functools.partial(embed, path, count, Path(folder), target, embedder, passes)
            entry = sts.entry_of("pallas", "ours", lambda: pool.submit(call).result())
    return Case(label=label, dtype="fp16", shape={"sentences": count}, flop=None, entries=[entry])


def plan(args: argparse.Namespace, *, gpu: bool) -> dict[str, tuple[int, int]]:
    """Sentences and passes of each case, by label."""
    default = CPU_SENTENCES if not gpu else QUICK_SENTENCES if args.quick else SENTENCES
    found = {f"{source} to {target}": (args.sentences or default, PASSES) for source, target in KINDS}
    long = (LONG if gpu and not args.quick else 0) if args.long is None else args.long
    return found | ({f"{SHOWN}, long": (long, 1)} if long else {})


def run(args: argparse.Namespace) -> int:
    """Measures and saves; returns 1 if a case failed, 2 if the sentences or the weights cannot be read."""
    say = Progress().say
    gpu = environment.has_gpu()
    try:
        sentences = startup.read_corpus(args.data)
        found = weights.resolve(*([] if args.weights is None else [args.weights]))
    except (OSError, ValueError) as error:
        print(error)
        return 2
    embedder = Embedder(model=str(found), compute_dtype="float16" if gpu else "float32")
    result = results.begun(NAME, {"weights": minilm_models.name_of(args.weights), "cores": str(cores())})
    for label, (count, passes) in plan(args, gpu=gpu).items():
        result.cases.append(case(label, count, sentences, embedder, passes))
        results.save(result, args.output)  # kept, should the run be interrupted
        entry = result.cases[-1].entries[0]
        figures = ", ".join(f"{name} {value:,.0f}" for name, value in entry.metrics.items())
        say(f"{label}, {count:,} sentences: {figures or entry.message}")
    if gpu and not args.quick and any("long" in case.label for case in result.cases):
        result = results.complete(result, args.output)
    if args.show_results:
        print(f"\n{table(result)}\n\n{tables.conditions(result)}")
    for line in tables.failures(result):
        print(line)
    say(f"results: {results.path_of(result, args.output)}")
    return int(any(case.entries[0].status != "ok" for case in result.cases))


TABLE = (  # columns: title, metric
    ("sentences/s", "sentences_per_s"),
    ("slowest pass", "slowest_sentences_per_s"),
    ("second million, MiB", "resident_second_mib"),
    ("last million", "resident_last_mib"),
    ("lowest million", "resident_lowest_mean_mib"),
    ("highest million", "resident_highest_mean_mib"),
    ("least", "resident_least_mib"),
    ("most", "resident_most_mib"),
)


def table(result: Result) -> str:
    """Sentences a second and, where a corpus is long, resident memory after its first million."""
    found = [(case, case.entries[0].metrics) for case in result.cases]
    columns = [column for column in TABLE if any(column[1] in metrics for _, metrics in found)]
    rows = [
        [case.label, f"{case.shape['sentences']:,}"]
        + [f"{metrics[name]:,.0f}" if name in metrics else "-" for _, name in columns]
        for case, metrics in found
    ]
    return tables.markdown(["files", "sentences", *(title for title, _ in columns)], rows)


def headline(result: Result) -> tables.Headline | None:
    """Sentences a second from files to files, which nothing else does."""
    found = next((case.entries[0].metrics for case in result.cases if case.label == SHOWN), {})
    if "sentences_per_s" not in found:
        return None
    return tables.Headline(
        case=SHOWN, ours=f"{found['sentences_per_s']:,.0f} sentences/s", baseline="-", ratio=None, mean=None
    )
