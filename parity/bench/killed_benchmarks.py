"""Benchmarks that are killed while they write: a result or a page is the older one or the newer one."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.__main__ import main
from bench.measuring import results
from parity import ROOT
from parity.campaign import kills
from parity.campaign._case import Case

RESULTS = ROOT / "bench" / "results" / "nvidia-h200"


def _bench(folder: Path) -> Callable[[int], int]:
    options = ["--quick", "--no-compile", "--dtype", "fp32", "--output", str(folder / "out")]
    return lambda turn: main(["softmax", "--shapes", ("16x64", "16x64,8x128")[turn], *options])


def _results(folder: Path) -> Callable[[int], int]:
    loaded = [results.load(RESULTS / f"{name}.json.gz") for name in ("trimul", "attention")]
    both = [result.__class__(**{**vars(result), "benchmark": "gemm"}) for result in loaded]
    return lambda turn: int(not results.save(both[turn], folder / "out"))


def _report(folder: Path) -> Callable[[int], int]:
    (folder / "out").mkdir(exist_ok=True)
    readme = folder / "out" / "README.md"
    readme.write_text("text\n" * 10_000 + "<!-- bench:summary -->\n<!-- /bench:summary -->\n")
    for turn, names in enumerate((("gemm", "norm"), ("gemm", "norm", "softmax"))):
        for name in names:
            gpu = folder / f"results-{turn}" / "nvidia-h200"
            gpu.mkdir(parents=True, exist_ok=True)
            shutil.copy(RESULTS / f"{name}.json.gz", gpu)
    return lambda turn: main(
        ["report", "--results", str(folder / f"results-{turn}"), "--readme", str(readme), "--no-html"]
    )


WRITERS: kills.Writers = {"bench": _bench, "results": _results, "report": _report}


def _is_result(path: Path) -> bool:
    """Whether a file is a whole result: its times differ from run to run."""
    try:
        results.load(path)
    except results.ResultError:
        return False
    return path.suffix == ".json" and "softmax" in path.name


def cases(seed: int) -> Iterator[Case]:
    """Writers of the benchmarks that are killed; see the module."""
    return kills.kills(seed, WRITERS, "parity.bench.killed_benchmarks", _is_result)


if __name__ == "__main__":
    kills.main(WRITERS, sys.argv[1], Path(sys.argv[2]))
