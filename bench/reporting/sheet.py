"""One CSV file of every figure of every GPU, a row for each candidate of each case."""

import csv
import io
from collections.abc import Sequence

from bench.measuring.results import Case, Entry, Result

NAME = "all.csv"  # in the folder of all results
COLUMNS = (
    "gpu",
    "benchmark",
    "case",
    "dtype",
    "candidate",
    "family",
    "status",
    "device_us",
    "wall_us",
    "compile_s",
    "peak_bytes",
    "flop",
    "bytes",
    "error",
    "error_limit",
    "error_measure",
    "metrics",
    "commit",
    "date",
)


def _row(result: Result, case: Case, entry: Entry) -> list[object]:
    accuracy, env = entry.accuracy, result.environment
    figures = [entry.device and entry.device.median_us, entry.wall and entry.wall.median_us]
    figures += [entry.compile_s, entry.peak_bytes, case.flop, case.bytes]
    errors = [accuracy.value, accuracy.limit, accuracy.measure] if accuracy else [None] * 3
    metrics = " ".join(f"{name}={value:g}" for name, value in entry.metrics.items())
    about = [env.get("device"), result.benchmark, case.label, case.dtype, entry.name, entry.family, entry.status]
    return [*about, *figures, *errors, metrics, env.get("commit"), result.date[:10]]


def text(results: Sequence[Result]) -> str:
    """The file, with the candidates in the order of the results; what is not known is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(
        _row(result, case, entry) for result in results for case in result.cases for entry in case.entries
    )
    return file.getvalue()
