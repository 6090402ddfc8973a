"""What got faster or slower between two result files of the same benchmark.

A change counts only where the two ranges from the 20th to the 80th percentile do not touch and the medians differ
by more than a threshold; anything else is noise. Figures of the baselines, whose programs seldom change, say how
well the two runs can be compared at all.
"""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

from bench.measuring import results
from bench.measuring.results import Case, Entry, Result
from bench.measuring.timing import Timing
from bench.reporting import tables

HELP = "what got faster or slower between two result files"

CLOCKS: dict[str, tables.Clock] = {"device": tables.device, "wall": tables.wall}
HIGHER_IS_BETTER = ("_per_s",)  # endings of metrics that are rates
LOWER_IS_BETTER = ("_s", "_us")  # of those that are times
FASTER, SLOWER, SAME = "faster", "SLOWER", "same"


def percentage(text: str) -> float:
    """Parses a percentage of 0 or more into a fraction.

    Raises:
      argparse.ArgumentTypeError: it is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage; expected a number of 0 or more")
    return value / 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench compare`."""
    parser.add_argument("before", type=Path, metavar="A.json[.gz]", help="the result to compare with")
    parser.add_argument("after", type=Path, metavar="B.json[.gz]", help="the result that may be faster or slower")
    parser.add_argument(
        "--threshold", type=percentage, default=0.03, metavar="PERCENT", help="least change that counts; 3"
    )
    parser.add_argument("--clock", choices=(*CLOCKS, "both"), default="both", help="which time to compare; both")
    parser.add_argument("--changed", action="store_true", help="leave out what stayed the same")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything of ours got slower or broke")


def verdict(before: Timing, after: Timing, threshold: float) -> str:
    """Whether a time changed by more than the threshold and the spread of both."""
    apart = before.p80_us < after.p20_us or after.p80_us < before.p20_us
    if not apart or abs(after.median_us / before.median_us - 1) <= threshold:
        return SAME
    return FASTER if after.median_us < before.median_us else SLOWER


def check_comparable(before: Result, after: Result) -> None:
    """Raises ValueError, with the reason, if the figures of two results say nothing about each other."""
    if before.benchmark != after.benchmark:
        raise ValueError(f"A is a result of {before.benchmark!r}, B of {after.benchmark!r}")
    cases = {case.label: case for case in before.cases}
    common = [(cases[case.label], case) for case in after.cases if case.label in cases]
    if not common:
        labels = [", ".join(case.label for case in result.cases) or "none" for result in (before, after)]
        raise ValueError(f"no case in common: A has {labels[0]}; B has {labels[1]}")
    for a, b in common:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"case {a.label} is {a.dtype} {a.shape} in A and {b.dtype} {b.shape} in B")


def differences(before: Result, after: Result) -> list[str]:
    """A line for each condition that differs, and for what only one of the files has."""
    lines = []
    for title, a, b in (
        ("", before.environment, after.environment),
        ("setting ", before.settings, after.settings),
    ):
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                lines.append(f"{title}{name}: {a.get(name, 'absent')} in A, {b.get(name, 'absent')} in B")
    for name in before.ceilings.keys() & after.ceilings.keys():
        ratio = after.ceilings[name] / before.ceilings[name] if before.ceilings[name] else math.nan
        if abs(ratio - 1) > 0.01:
            lines.append(f"measured ceiling {name}: B has {ratio:.3f} times A's")
    for file, result, other in (("A", before, after), ("B", after, before)):
        if only := only_in(result, other):
            lines.append(f"only in {file}: {', '.join(only)}")
    return lines


def only_in(result: Result, other: Result) -> list[str]:
    """The cases that `other` lacks and, of those that it has, the candidates that it lacks."""
    names = {case.label: {entry.name for entry in case.entries} for case in other.cases}
    found = [case.label for case in result.cases if case.label not in names]
    for case in result.cases:
        if case.label in names:
            found += [f"{case.label} {e.name}" for e in case.entries if e.name not in names[case.label]]
    return found


def pairs(before: Result, after: Result) -> list[tuple[Case, Entry, Entry]]:
    """The candidates that both results have, in the order of `after`."""
    found = {(case.label, entry.name): entry for case in before.cases for entry in case.entries}
    return [
        (case, found[case.label, entry.name], entry)
        for case in after.cases
        for entry in case.entries
        if (case.label, entry.name) in found
    ]


def broken(before: Result, after: Result) -> list[tuple[Entry, str]]:
    """Candidates whose status changed, with a line about it."""
    return [
        (b, f"{case.label} {b.name}: {a.status} in A, {b.status} in B{f' ({b.message})' if b.message else ''}")
        for case, a, b in pairs(before, after)
        if a.status != b.status
    ]


Row = tuple[Entry, list[str], str, float]  # the entry of B, its cells, the verdict, B / A


def timed(before: Result, after: Result, clock: tables.Clock, threshold: float) -> list[Row]:
    """A row for every candidate that both results timed."""
    rows: list[Row] = []
    for case, a, b in pairs(before, after):
        times = clock(a), clock(b)
        if times[0] is None or times[1] is None:
            continue
        ratio = times[1].median_us / times[0].median_us
        word = verdict(times[0], times[1], threshold)
        cells = [case.label, b.name, *tables.format_spread(times[0]), *tables.format_spread(times[1])]
        if times[0].method != times[1].method:
            word = f"measured by {times[0].method} in A, {times[1].method} in B"
        rows.append((b, [*cells, f"{ratio:.3f}", word], word, ratio))
    return rows


def metrics(before: Result, after: Result, threshold: float) -> list[Row]:
    """A row for every further figure that both results have; rates and times get a verdict by the threshold."""
    rows: list[Row] = []
    for case, a, b in pairs(before, after):
        for name in (name for name in a.metrics if name in b.metrics):
            old, new = a.metrics[name], b.metrics[name]
            ratio, word = new / old if old else math.nan, ""
            if name.endswith((*HIGHER_IS_BETTER, *LOWER_IS_BETTER)):
                faster = (ratio > 1) == name.endswith(HIGHER_IS_BETTER)
                word = SAME if abs(ratio - 1) <= threshold else FASTER if faster else SLOWER
            rows.append((b, [case.label, b.name, name, f"{old:.7g}", f"{new:.7g}", f"{ratio:.4g}", word], word, 0))
    return rows


def means(rows: list[Row]) -> str:
    """The geometric mean of B / A of each family."""
    found = []
    for family in tables.FAMILIES:
        if ratios := [ratio for entry, _, _, ratio in rows if entry.family == family]:
            found.append(f"{family} {tables.geometric_mean(ratios):.3f}")
    return f"Geometric mean of B / A: {', '.join(found)}."


def show(title: str, header: list[str], rows: list[Row], *, changed: bool) -> None:
    """Prints a table and how many rows are of each verdict."""
    shown = [cells for _, cells, word, _ in rows if not changed or word != SAME]
    print(f"\n{title}:\n")
    print(tables.markdown(header, shown) if shown else "nothing changed")
    counts = Counter(word for *_, word, _ in rows if word in (FASTER, SLOWER, SAME))
    print("\n" + ", ".join(f"{counts[word]} {word}" for word in (FASTER, SLOWER, SAME)) + ".")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 2 if the files cannot be compared, 1 if --check found something."""
    try:
        before, after = results.load(args.before), results.load(args.after)
    except results.ResultError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        check_comparable(before, after)
    except ValueError as error:
        print(f"{args.before} and {args.after} cannot be compared: {error}", file=sys.stderr)
        return 2
    for letter, path, result in (("A", args.before, before), ("B", args.after, after)):
        print(f"{letter}: {path}{' (partial)' if result.partial else ''}: {tables.conditions(result)}")
    for line in differences(before, after):
        print(f"- {line}")
    status = broken(before, after)
    for _, line in status:
        print(f"- {line}")
    rows: list[Row] = []
    for name, clock in CLOCKS.items():
        if args.clock in (name, "both") and (found := timed(before, after, clock, args.threshold)):
            header = ["case", "candidate", "A, us", "20-80%", "B, us", "20-80%", "B / A", "verdict"]
            show(f"{name.capitalize()} time", header, found, changed=args.changed)
            print(means(found))
            rows += found
    if found := metrics(before, after, args.threshold):
        header = ["case", "candidate", "figure", "A", "B", "B / A", "verdict"]
        show("Further figures, single ones without a spread", header, found, changed=args.changed)
        rows += found
    if not rows:
        print("nothing was measured in both")
    worse = any(entry.family == "ours" and word == SLOWER for entry, _, word, _ in rows)
    worse |= any(entry.family == "ours" and entry.status != "ok" for entry, _ in status)
    return int(args.check and worse)
