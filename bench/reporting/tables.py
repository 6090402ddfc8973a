"""Tables made from results: for the terminal and for the generated pages."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from bench.measuring import roofline
from bench.measuring.results import Case, Entry, Family, Result
from bench.measuring.timing import Timing

FAMILIES: tuple[Family, ...] = ("ours", "xla", "torch", "peer")  # of each, the best contender counts
BASELINES: tuple[Family, ...] = FAMILIES[1:]
NAMES: dict[Family, str] = {"ours": "ours", "ladder": "ladder", "xla": "XLA", "torch": "torch", "peer": "peers"}
Clock = Callable[[Entry], Timing | None]


def device(entry: Entry) -> Timing | None:
    """Device time of an entry."""
    return entry.device


def wall(entry: Entry) -> Timing | None:
    """Wall time of an entry."""
    return entry.wall


CLOCKS: dict[str, Clock] = {"device time": device, "wall time": wall}


def best(case: Case, family: Family, clock: Clock) -> tuple[Entry, Timing] | None:
    """The entry of a family with the lowest median, and its time; None where none was timed."""
    timed = [(entry, time) for entry in case.entries if entry.family == family and (time := clock(entry))]
    return min(timed, key=lambda pair: pair[1].median_us, default=None)


def speedup(case: Case, family: Family, clock: Clock) -> float | None:
    """Time of a family's best entry over the time of our best: above 1, ours is faster."""
    ours, theirs = best(case, "ours", clock), best(case, family, clock)
    return theirs[1].median_us / ours[1].median_us if ours and theirs else None


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log(values)))."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def mean_speedup(cases: Sequence[Case], family: Family, clock: Clock) -> float | None:
    """Geometric mean of `speedup` over the cases; None unless every case has one."""
    ratios = [ratio for case in cases if (ratio := speedup(case, family, clock)) is not None]
    return geometric_mean(ratios) if ratios and len(ratios) == len(cases) else None


def forward(cases: Sequence[Case]) -> list[Case]:
    """The cases without a backward pass."""
    return [case for case in cases if case.mode == "forward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """A benchmark in one line.

    Attributes:
      case: which of its cases is shown.
      ours, baseline: the figures of ours and of the fastest baseline in it, with their units; "-" without any.
      ratio: how many times faster ours is in that case; None without a baseline.
      mean: the geometric mean of that over all cases that have both; None if only one has.
      wall_mean: the same by wall time, where `mean` is by device time.
    """

    case: str
    ours: str
    baseline: str
    ratio: float | None
    mean: float | None
    wall_mean: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ours and the fastest of the others in one row of a table.

    Attributes:
      clock: the time that they are compared by, such as "device time".
      case: the row.
      rival: the family of the other, or the name of a peer.
      ratio: how many times faster ours is.
      overlaps: whether their ranges from the 20th to the 80th percentile overlap.
    """

    clock: str
    case: str
    rival: str
    ratio: float
    overlaps: bool = False

    @property
    def is_slower(self) -> bool:
        """Whether ours is the slower, as far as a table shows it."""
        return float(format_ratio(self.ratio)) < 1


def closest(cases: Sequence[Case], clock: Clock) -> float | None:
    """Geometric mean over the cases of the best of all others over ours; None where no case has both."""
    pairs = [(best(case, "ours", clock), best_baseline(case, clock)) for case in cases]
    ratios = [other[1].median_us / ours[1].median_us for ours, other in pairs if ours and other]
    return geometric_mean(ratios) if ratios else None


def comparisons(result: Result) -> list[Comparison]:
    """Ours against the best of all others in every case, by device time and then by wall time."""
    found = []
    for name, clock in CLOCKS.items():
        for case in result.cases:
            ours, other = best(case, "ours", clock), best_baseline(case, clock)
            if ours and other:
                found.append(
                    Comparison(
                        clock=name,
                        case=case.label,
                        rival=rival(other[0]),
                        ratio=other[1].median_us / ours[1].median_us,
                        overlaps=ours[1].p20_us <= other[1].p80_us and other[1].p20_us <= ours[1].p80_us,
                    )
                )
    return found


def rival(entry: Entry) -> str:
    """What an entry of another family is called: XLA, torch, or its own name."""
    return entry.name if entry.family == "peer" else NAMES[entry.family]


def best_baseline(case: Case, clock: Clock) -> tuple[Entry, Timing] | None:
    """The fastest entry of any other family; None where none was timed."""
    found = [pair for family in BASELINES if (pair := best(case, family, clock))]
    return min(found, key=lambda pair: pair[1].median_us, default=None)


def headline(result: Result, label: str) -> Headline | None:
    """The device times of one case, of that label if there is one; None if no case has ours and a baseline."""
    found = comparisons(result)
    ratios = {row.case: row.ratio for row in found if row.clock == "device time"}
    if not ratios:
        return None
    shown = label if label in ratios else next(iter(ratios))
    case = next(case for case in result.cases if case.label == shown)
    ours, other = best(case, "ours", device), best_baseline(case, device)
    assert ours and other
    return Headline(
        case=shown,
        ours=f"{format_us(ours[1])} us, {roofline.rate(case, result.ceilings, ours[1])}",
        baseline=f"{rival(other[0])}, {format_us(other[1])} us",
        ratio=ratios[shown],
        mean=mean(list(ratios.values())),
        wall_mean=mean([row.ratio for row in found if row.clock == "wall time"]),
    )


def mean(ratios: Sequence[float]) -> float | None:
    """Their geometric mean, if there are several."""
    return geometric_mean(ratios) if len(ratios) > 1 else None


def means(result: Result) -> str:
    """A sentence with the geometric means of the speed-ups by both clocks; empty where one is not known."""
    found: dict[Family, list[float]] = {}
    for family in BASELINES:
        if all(values := [mean_speedup(result.cases, family, clock) for clock in CLOCKS.values()]):
            found[family] = [value for value in values if value]
    if not found:
        return ""
    by = [", ".join(f"{values[i]:.2f} over {NAMES[f]}" for f, values in found.items()) for i in range(2)]
    return f"Geometric means: {by[0]} by device time; {by[1]} by wall time, in which a call's dispatch counts."


def summary(case: Case, clock: Clock) -> str:
    """A line with the best of each family."""
    pairs = [best(case, family, clock) for family in FAMILIES]
    found = [f"{pair[0].name} {format_us(pair[1])} us" for pair in pairs if pair]
    return ", ".join(found) or "nothing could be timed"


def format_number(value: float | None) -> str:
    """A number, three digits at least."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_us(time: Timing | None) -> str:
    """Median in microseconds."""
    return format_number(time.median_us if time else None)


def format_spread(time: Timing | None) -> tuple[str, str]:
    """Median, and 20th and 80th percentile, in microseconds."""
    return format_us(time), f"{time.p20_us:.4g}-{time.p80_us:.4g}" if time else "-"


def format_ratio(ratio: float | None) -> str:
    """A ratio with two decimals."""
    return "-" if ratio is None else f"{ratio:.2f}"


def cell(text: str) -> str:
    """Text as it can stand in a cell of a Markdown table."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", r"\|")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left and the others to the right.

    What would end a cell or a row is escaped: `|`, line breaks and other control characters.
    """
    header, rows = [cell(text) for text in header], [[cell(text) for text in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def format_share(share: float | None) -> str:
    """A share as a percentage."""
    return "-" if share is None else f"{100 * share:.0f}%"


def present(result: Result, clock: Clock) -> list[Family]:
    """The families of which something was timed, and ours, XLA and torch in any case."""
    return [f for f in FAMILIES if f != "peer" or any(best(case, f, clock) for case in result.cases)]


def comparison(result: Result) -> str:
    """Ours against the best of each other family, device time and wall time: see `compared`."""
    titles = ("Device time", "Wall time a call, many queued")
    tables = [(title, compared(result, clock)) for title, clock in zip(titles, CLOCKS.values(), strict=True)]
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in tables if table)


def compared(result: Result, clock: Clock) -> str:
    """Ours against the best of each other family, a row a case, the geometric means below.

    For device time with the rate of ours, and its share of what the ceilings measured in the same run allow. Empty
    if nothing was timed, such as device time without a GPU.
    """
    if not any(clock(entry) for case in result.cases for entry in case.entries):
        return ""
    families = present(result, clock)
    header = ["case", *(f"{NAMES[f]}, us" for f in families), *(f"{NAMES[f]} / ours" for f in families[1:])]
    rows = []
    for case in result.cases:
        figures = [best(case, family, clock) for family in families]
        row = [case.label, *(format_us(pair[1] if pair else None) for pair in figures)]
        row += [format_ratio(speedup(case, family, clock)) for family in families[1:]]
        if clock is device:
            time = figures[0][1] if figures[0] else None
            least = roofline.floor(case, result.ceilings)
            row += [roofline.rate(case, result.ceilings, time) if time else "-"]
            row += [format_share(roofline.share(case, result.ceilings, time)), least.by if least else "-"]
        rows.append(row)
    mean = ["geometric mean", *("" for _ in families)]
    mean += [format_ratio(mean_speedup(result.cases, family, clock)) for family in families[1:]]
    if clock is device:
        header += ["rate of ours", "of its ceiling", "ceiling"]
        mean += ["", "", ""]
    return markdown(header, [*rows, mean])


def floors(result: Result) -> str:
    """The floor of each case, what sets it, and the share of it that each family's best reaches."""
    families = present(result, device)
    rows = []
    for case in result.cases:
        if least := roofline.floor(case, result.ceilings):
            row = [case.label, *map(format_number, (roofline.intensity(case), least.us)), least.by]
            for family in families:
                pair = best(case, family, device)
                row.append(format_share(roofline.share(case, result.ceilings, pair[1] if pair else None)))
            rows.append(row)
    header = ["case", "flop/byte", "floor, us", "set by", *(f"{NAMES[f]} reaches" for f in families)]
    return markdown(header, rows) if rows else ""


LADDER = "Variants of ours: rate (of XLA's, of the ceiling)"


def ladder(result: Result) -> str:
    """The rates of the variants of ours, the default and XLA's best, a row a case; empty if there are none."""
    cases = [case for case in result.cases if any(e.family == "ladder" and e.device for e in case.entries)]
    variants = dict.fromkeys(e.name for case in cases for e in case.entries if e.family == "ladder")
    rows = []
    for case in cases:
        found = {e.name: e.device for e in case.entries if e.family == "ladder"}
        ours, xla = (pair[1] if (pair := best(case, family, device)) else None for family in ("ours", "xla"))
        row, unit = [], ""
        for time in (*map(found.get, variants), ours, xla):
            against = xla.median_us / time.median_us if xla and time else None
            shares = (against, roofline.share(case, result.ceilings, time))
            rate = roofline.rate(case, result.ceilings, time) if time else ""
            number, _, unit = rate.partition(" ") if rate else ("", "", unit)
            row.append(f"{number} ({', '.join(map(format_share, shares)).replace('%, ', ', ')})" if rate else "-")
        rows.append([f"{case.label}, {unit}", *row])
    return markdown(["case", *variants, "the default", "XLA"], rows) if rows else ""


def brief(result: Result) -> str:
    """What a GPU's page has of an operation: both times against the baselines, and the ladder."""
    found = [comparison(result), ladder(result)]
    return f"\n\n{LADDER}:\n\n".join(filter(None, found))


def full(result: Result, own: str = "") -> str:
    """A benchmark's own tables, or else comparison and ladder; and the floors."""
    titled = {"Floor at the measured ceilings": floors(result), LADDER: "" if own else ladder(result)}
    more = [f"{title}:\n\n{table}" for title, table in titled.items() if table]
    return "\n\n".join(filter(None, [own or comparison(result), *more]))


def entries(result: Result) -> str:
    """Every candidate that was run, case by case: status, accuracy, times with their spread, method, launches."""
    header = ["case", "candidate", "status", "error", "device, us", "20-80%", "by", "launches"]
    header += ["wall, us", "20-80%", "compile, s", "memory, MB"]
    rows = []
    for case in result.cases:
        for entry in case.entries:
            if entry.status == "skipped":
                continue
            accuracy = f"{entry.accuracy.value:.1e}" if entry.accuracy else "-"
            row = [case.label, entry.name, entry.status, accuracy]
            row += [*format_spread(entry.device), entry.device.method if entry.device else "-"]
            row += [str(entry.launches or "-"), *format_spread(entry.wall)]
            row.append("-" if entry.compile_s is None else f"{entry.compile_s:.1f}")
            rows.append([*row, format_number(entry.peak_bytes and entry.peak_bytes / 1e6)])
    return markdown(header, rows)


def failures(result: Result) -> list[str]:
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
    found = [f"{env.get('device', 'unknown device')}, driver {env.get('driver', 'unknown')}", versions]
    if "copy_tb_per_s" in ceilings:
        found.append(f"copy {ceilings['copy_tb_per_s']:.2f} TB/s")
    if "matmul_bf16_tflop_per_s" in ceilings:
        found.append(f"8192^3 bf16 product {ceilings['matmul_bf16_tflop_per_s']:.0f} TFLOP/s")
    told = {name: env[name] for name in ("cores", "beside") if name in env} | result.settings
    found += [f"{name}: {value}" for name, value in told.items()]
    same = f", whose programs are those of {result.confirmed}" if result.confirmed else ""
    return f"{'; '.join(found)}. Measured {result.date[:10]} at commit {env.get('commit', 'unknown')}{same}."
