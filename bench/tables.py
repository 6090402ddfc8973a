"""Tables made from results: for the terminal and, between markers, for README.md."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.results import Case, Entry, Family, Result
from bench.timing import Timing

FAMILIES: tuple[Family, ...] = ("ours", "xla", "torch", "peer")
Clock = Callable[[Entry], Timing | None]


def device(entry: Entry) -> Timing | None:
    """Device time of an entry."""
    return entry.device


def wall(entry: Entry) -> Timing | None:
    """Wall time of an entry."""
    return entry.wall


def best(case: Case, family: Family, clock: Clock) -> tuple[Entry, Timing] | None:
    """The entry of a family with the lowest median, and its time; None where none was timed."""
    timed = [(entry, time) for entry in case.entries if entry.family == family and (time := clock(entry))]
    return min(timed, key=lambda pair: pair[1].median_us, default=None)


def speedup(case: Case, family: Family, clock: Clock) -> float | None:
    """Time of a family's best entry over that of ours: above 1, ours is faster."""
    ours, theirs = best(case, "ours", clock), best(case, family, clock)
    return theirs[1].median_us / ours[1].median_us if ours and theirs else None


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log(values)))."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def mean_speedup(cases: Sequence[Case], family: Family, clock: Clock) -> float | None:
    """Geometric mean of `speedup` over the cases; None unless every case has one."""
    ratios = [ratio for case in cases if (ratio := speedup(case, family, clock)) is not None]
    return geometric_mean(ratios) if ratios and len(ratios) == len(cases) else None


def summary(case: Case, clock: Clock) -> str:
    """A line with the best of each family."""
    pairs = [best(case, family, clock) for family in FAMILIES]
    found = [f"{pair[0].name} {format_us(pair[1])} us" for pair in pairs if pair]
    return ", ".join(found) or "nothing could be timed"


def format_us(time: Timing | None) -> str:
    """Median in microseconds, three digits at least."""
    if time is None:
        return "-"
    return f"{time.median_us:.0f}" if time.median_us >= 100 else f"{time.median_us:.3g}"


def format_spread(time: Timing | None) -> tuple[str, str]:
    """Median, and 20th and 80th percentile, in microseconds."""
    return format_us(time), f"{time.p20_us:.4g}-{time.p80_us:.4g}" if time else "-"


def format_ratio(ratio: float | None) -> str:
    """A ratio with two decimals."""
    return "-" if ratio is None else f"{ratio:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left and the others to the right."""
    widths = [max(3, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def comparison(result: Result) -> str:
    """Ours against the best of XLA and of torch, a row a case, the geometric means below; a table a clock.

    The share of the ceiling is flop / device time over the matrix-product rate measured in the same run.
    """
    ceiling = result.ceilings.get("matmul_bf16_tflop_per_s")
    clocks: list[tuple[str, Clock]] = [("Device time", device), ("Wall time a call, many queued", wall)]
    parts = []
    for title, clock in clocks:
        if not any(clock(entry) for case in result.cases for entry in case.entries):
            continue  # no GPU, no device time
        header = ["case", "ours, us", "XLA, us", "torch, us", "XLA / ours", "torch / ours"]
        rows = []
        for case in result.cases:
            figures = [best(case, family, clock) for family in FAMILIES[:3]]
            row = [case.label, *(format_us(pair[1] if pair else None) for pair in figures)]
            row += [format_ratio(speedup(case, family, clock)) for family in ("xla", "torch")]
            if clock is device:
                rate = case.flop / figures[0][1].median_us / 1e6 if figures[0] and case.flop else None
                row.append("-" if rate is None else f"{rate:.3g}")
                row.append(f"{100 * rate / ceiling:.0f}%" if rate and ceiling else "-")
            rows.append(row)
        mean = ["geometric mean", "", "", ""]
        mean += [format_ratio(mean_speedup(result.cases, family, clock)) for family in ("xla", "torch")]
        if clock is device:
            header += ["ours, TFLOP/s", "of the measured ceiling"]
            mean += ["", ""]
        parts.append(f"{title}:\n\n{markdown(header, [*rows, mean])}")
    return "\n\n".join(parts)


def entries(result: Result) -> str:
    """Every candidate of every case: status, accuracy, times with their spread, method, launches."""
    header = ["case", "candidate", "status", "error", "device, us", "20-80%", "by", "launches"]
    header += ["wall, us", "20-80%", "compile, s"]
    rows = []
    for case in result.cases:
        for entry in case.entries:
            accuracy = f"{entry.accuracy.value:.1e}" if entry.accuracy else "-"
            row = [case.label, entry.name, entry.status, accuracy]
            row += [*format_spread(entry.device), entry.device.method if entry.device else "-"]
            row += [str(len(entry.kernels) or "-"), *format_spread(entry.wall)]
            rows.append([*row, "-" if entry.compile_s is None else f"{entry.compile_s:.1f}"])
    return markdown(header, rows)


def problems(result: Result) -> list[str]:
    """A line for every reason why candidates gave no figure, with their names and the cases."""
    labels: dict[tuple[str, str, str], list[str]] = {}
    for case in result.cases:
        for entry in case.entries:
            if entry.status != "ok":
                labels.setdefault((entry.name, entry.status, entry.message), []).append(case.label)
    names: dict[tuple[str, str, str], list[str]] = {}
    for (name, status, message), of in labels.items():
        cases = "all cases" if len(of) == len(result.cases) > 1 else ", ".join(of)
        names.setdefault((status, message, cases), []).append(name)
    return [f"{', '.join(who)} {status}: {why} ({cases})" for (status, why, cases), who in names.items()]


def conditions(result: Result) -> str:
    """One sentence that says where the figures come from."""
    env = result.environment
    versions = ", ".join(f"{name} {env[name]}" for name in ("jax", "torch") if env.get(name, "absent") != "absent")
    ceilings = result.ceilings
    parts = [f"{env.get('device', 'unknown device')}, driver {env.get('driver', 'unknown')}", versions]
    if "copy_tb_per_s" in ceilings:
        parts.append(f"copy {ceilings['copy_tb_per_s']:.2f} TB/s")
    if "matmul_bf16_tflop_per_s" in ceilings:
        parts.append(f"8192^3 bf16 product {ceilings['matmul_bf16_tflop_per_s']:.0f} TFLOP/s")
    parts += [f"{name}: {value}" for name, value in result.settings.items()]
    return f"{'; '.join(parts)}. Measured {result.date[:10]} at commit {env.get('commit', 'unknown')}."


def replace_marked(text: str, name: str, content: str) -> str:
    """Replaces what stands between `<!-- bench:name -->` and `<!-- /bench:name -->`.

    Raises:
      ValueError: the markers are not there exactly once, in this order.
    """
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"expected {start} and, after it, {end}, each exactly once")
    pattern = re.escape(start) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: f"{start}\n{content}\n{end}", text, flags=re.DOTALL)


def rewrite(path: Path, tables: dict[str, str]) -> list[str]:
    """Rewrites the marked tables of a Markdown file.

    Returns:
      The names of those that the file has no markers for.
    """
    text = path.read_text(encoding="utf-8")
    absent = [name for name in tables if f"bench:{name} -->" not in text]
    for name, content in tables.items():
        if name not in absent:
            text = replace_marked(text, name, content)
    path.write_text(text, encoding="utf-8")
    return absent


def accuracy(result: Result) -> str:
    """Agreement with the reference on real sentences, Spearman's correlation and sentences a second, by dtype."""
    columns = {"min_cosine": ".6f", "mean_cosine": ".6f", "spearman": ".2f"}
    columns |= {"encode_sentences_per_s": ",.0f", "forward_sentences_per_s": ",.0f"}
    header = ["dtype", "lowest cosine", "mean cosine", "Spearman", "sentences/s, text in", "sentences/s, ids in"]
    header.append("torch eager, ids in")
    rows = []
    for case in result.cases:
        metrics = {entry.family: entry.metrics for entry in case.entries}
        ours, torch = metrics.get("ours", {}), metrics.get("torch", {})
        row = [case.dtype, *(f"{ours[name]:{form}}" if name in ours else "-" for name, form in columns.items())]
        theirs = torch.get("forward_sentences_per_s")
        rows.append([*row, f"{theirs:,.0f}" if theirs else "-"])
    return markdown(header, rows)
