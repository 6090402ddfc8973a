"""The plots of a result."""

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence

from bench.measuring import roofline
from bench.measuring.results import Case, Entry, Family, Result, slug
from bench.reporting import tables
from bench.reporting.drawing import (
    CLOSEST,
    COLORS,
    INK,
    PALETTE,
    Plot,
    axes_of,
    bars,
    legend,
    plain_ticks,
    style,
)
from bench.reporting.tables import NAMES


def labels_of(cases: Sequence[Case]) -> list[str]:
    """The labels of cases, without the dtype where all have the same."""
    if len({case.dtype for case in cases}) > 1:
        return [case.label for case in cases]
    return [case.label.removesuffix(f" {case.dtype}") for case in cases]


def key_of(cases: Sequence[Case]) -> str:
    """What the numbers in the labels of cases are, and their dtype where all have one."""
    numbers = re.findall(r"\d+", re.split("[ +]", cases[0].label)[0])
    sizes = [name.replace("_", " ") for name in cases[0].shape][: len(numbers)]
    dtypes = {case.dtype for case in cases}
    return ", ".join([" x ".join(sizes), *(dtypes if len(dtypes) == 1 else ())])


def named(family: Family, cases: Sequence[Case]) -> str:
    """The name of a family; of peers, with those that are the best in a case."""
    if family != "peer":
        return NAMES[family]
    found = (tables.best(case, family, tables.device) or tables.best(case, family, tables.wall) for case in cases)
    return f"peers ({', '.join(sorted({pair[0].name for pair in found if pair}))})"


def speedup(result: Result, name: str, clock: tables.Clock, kind: str) -> Plot | None:
    """Speed-up of ours over the best of each other family."""
    families: list[Family] = [
        f for f in tables.BASELINES if any(tables.speedup(c, f, clock) for c in result.cases)
    ]
    if not families:
        return None
    labels = labels_of(result.cases)
    series: dict[str, tuple[str, list[float | None]]] = {
        f"over {named(f, result.cases)}": (COLORS[f], [tables.speedup(case, f, clock) for case in result.cases])
        for f in families
    }
    figure, axes = bars(labels, series, "speed-up of ours (times)", ".2f", key_of(result.cases))
    with style():
        axes.axvline(1, color=INK, linewidth=1)
    means = {f: tables.mean_speedup(result.cases, f, clock) for f in families}
    said = ", ".join(f"{mean:.2f} over {NAMES[f]}" for f, mean in means.items() if mean)
    return Plot(
        name=name,
        title=f"Speed-up of {result.benchmark}, {kind}",
        alt=f"bars for {len(labels)} cases; geometric mean {said or 'not known, as some were not measured'}",
        note="Time of the best candidate of each family over ours. Right of the line, ours is faster.",
        figure=figure,
    )


def size_of(case: Case) -> tuple[float, str]:
    """How large a case is, and what that counts."""
    if case.shape.keys() == {"batch", "seq"}:
        return float(math.prod(case.shape.values())), "tokens"
    if case.flop and "rows" not in case.shape:
        return case.flop / 1e9, "Gflop"
    return float(math.prod(case.shape.values())), "elements"


def times(result: Result, name: str, clock: tables.Clock, kind: str, dtype: str) -> Plot | None:
    """Time of every candidate against the size of the workload, without variants that few cases have."""
    cases = [case for case in result.cases if case.dtype == dtype and "devices" not in case.shape]
    if not cases:
        return None
    everywhere = set.intersection(*({entry.name for entry in case.entries} for case in cases))
    points: dict[tuple[Family, str], list[tuple[float, float]]] = {}
    for case in cases:
        for entry in case.entries:
            if (entry.family != "ladder" or entry.name in everywhere) and (time := clock(entry)):
                size, unit = size_of(case)
                points.setdefault((entry.family, entry.name), []).append((size, time.median_us))
    if not points or len({size for found in points.values() for size, _ in found}) < 2:
        return None
    figure, axes = axes_of(4.0)
    lines: dict[Family, Iterator[str]] = {f: itertools.cycle(("-", "--", ":", "-.")) for f in COLORS}
    marks: dict[Family, Iterator[str]] = {f: itertools.cycle("os^Dv") for f in COLORS}
    with style():
        for (family, label), found in points.items():
            sizes = sorted({size for size, _ in found})
            curve = [tables.geometric_mean([us for s, us in found if s == size]) for size in sizes]
            mark, color = next(marks[family]), COLORS[family]
            axes.plot(sizes, curve, next(lines[family]), marker=mark, markersize=4, color=color, label=label)
            axes.plot(*zip(*found, strict=True), mark, markersize=3, color=color, alpha=0.45)
        axes.set(xscale="log", yscale="log", xlabel=f"{unit} a call", ylabel=f"{kind} (us)")
        plain_ticks(axes.xaxis)
        plain_ticks(axes.yaxis)
    legend(figure, 2)
    names = ", ".join(label for _, label in points)
    return Plot(
        name=name,
        title=f"{kind.capitalize()} against size, {dtype}",
        alt=f"curves of {names} over {unit}, both axes logarithmic",
        note="Every candidate; lower is better. Where several cases have one size the curve goes through their"
        " geometric mean, and each has a faint mark.",
        figure=figure,
    )


def share(result: Result, name: str) -> Plot | None:
    """How near each family's best comes to the floor that the measured ceilings set."""
    found = [(case, least) for case in result.cases if (least := roofline.floor(case, result.ceilings))]
    series: dict[str, tuple[str, list[float | None]]] = {}
    for family in tables.FAMILIES:
        pairs = [tables.best(case, family, tables.device) for case, _ in found]
        shares = [
            100 * least.us / pair[1].median_us if pair else None
            for (_, least), pair in zip(found, pairs, strict=True)
        ]
        if any(shares):
            series[NAMES[family]] = COLORS[family], shares
    if not series:
        return None
    labels = [
        f"{label}\n({least.by})"
        for label, (_, least) in zip(labels_of([case for case, _ in found]), found, strict=True)
    ]
    figure, _ = bars(labels, series, "share of the ceiling (%)", ".0f")
    said = "ours not measured"
    if "ours" in series:
        pairs_of = zip(found, series["ours"][1], strict=True)
        said = ", ".join(f"{case.label} {value:.0f}%" for (case, _), value in pairs_of if value)
    return Plot(
        name=name,
        title="Share of the measured ceiling",
        alt=f"bars of the best of each family; ours: {said}",
        note="The least time that the work takes at the rates measured in the same run, over the device time."
        " In brackets what limits the case: matrix products or memory.",
        figure=figure,
    )


RATES = {  # what limits a case: title, name of the axis, ceiling, unit
    "memory": ("Bandwidth", "bandwidth", "copy_tb_per_s", "TB/s"),
    "matmul": ("Rate of matrix products", "rate", "matmul_bf16_tflop_per_s", "TFLOP/s"),
}


def rates(result: Result, name: str, by: str) -> Plot | None:
    """The rates of each family's best in the cases that `by` limits."""
    title, axis, key, unit = RATES[by]
    cases = [c for c in result.cases if (least := roofline.floor(c, result.ceilings)) and least.by == by]
    work = [case.bytes if by == "memory" else case.flop for case in cases]
    series: dict[str, tuple[str, list[float | None]]] = {}
    for family in tables.FAMILIES:
        pairs = [tables.best(case, family, tables.device) for case in cases]
        values = [w / p[1].median_us / 1e6 if w and p else None for w, p in zip(work, pairs, strict=True)]
        if any(values):
            series[NAMES[family]] = COLORS[family], values
    if not series:
        return None
    figure, axes = bars(labels_of(cases), series, f"{axis} ({unit})", ".3g")
    ceiling = result.ceilings[key]
    with style():
        axes.axvline(ceiling, color=INK, linewidth=1, linestyle="--")
    best = ", ".join(f"{family} up to {max(v or 0 for v in values):.3g}" for family, (_, values) in series.items())
    return Plot(
        name=name,
        title=f"{title}, device time",
        alt=f"bars for {len(cases)} cases under a ceiling of {ceiling:.3g} {unit}; {best}",
        note="The best of each family, in the cases that this limits. The dashed line is the ceiling,"
        f" {ceiling:.3g} {unit}, measured in the same run.",
        figure=figure,
    )


def rooflines(results: Sequence[Result], name: str) -> Plot | None:
    """Rate against arithmetic intensity under the measured ceilings: of one result by family, of several ours.

    Below it the shares of the ceilings, as a logarithmic axis has no room for them.
    """
    points: dict[str, list[tuple[float, float, float]]] = {}  # flop/byte, TFLOP/s, % of the ceiling
    ceilings: list[tuple[float, float]] = []
    for result in results:
        for case in result.cases:
            flop_a_byte = roofline.intensity(case)
            if flop_a_byte is None or len(roofline.floors(case, result.ceilings)) < 2:
                continue
            ceilings.append((result.ceilings["matmul_bf16_tflop_per_s"], result.ceilings["copy_tb_per_s"]))
            for family in tables.FAMILIES if len(results) == 1 else ("ours",):
                pair = tables.best(case, family, tables.device)
                reached = roofline.share(case, result.ceilings, pair[1]) if pair else None
                if case.flop and pair and reached:
                    label = named(family, result.cases) if len(results) == 1 else result.benchmark
                    rate = case.flop / pair[1].median_us / 1e6
                    points.setdefault(label, []).append((flop_a_byte, rate, 100 * reached))
    if not points:
        return None
    families = {named(f, results[0].cases): COLORS[f] for f in tables.FAMILIES} if len(results) == 1 else {}
    colors = families or dict(zip(points, itertools.cycle(PALETTE), strict=False))
    matmul, copy = (tables.geometric_mean(found) for found in zip(*ceilings, strict=True))
    figure, (rates, shares) = axes_of(5.6, rows=(3, 2))
    xs = [x for found in points.values() for x, *_ in found]
    ridge = matmul / copy
    low, high = min(*xs, ridge) / 2, max(*xs, ridge) * 2
    with style():
        rates.plot([low, ridge, high], [low * copy, matmul, matmul], color=INK, linewidth=1.2, label="ceilings")
        shares.axhline(100, color=INK, linewidth=1.2)
        for (label, found), mark in zip(points.items(), itertools.cycle("os^Dvp<>hXP*d"), strict=False):
            x, rate, share = zip(*found, strict=True)
            form = dict(color=colors[label], markersize=5, markeredgecolor="white", markeredgewidth=0.3)
            rates.plot(x, rate, mark, label=label, **form)
            shares.plot(x, share, mark, **form)
        rates.set(xscale="log", yscale="log", ylabel="rate (TFLOP/s)")
        shares.set(xlabel="arithmetic intensity (flop/byte)", ylabel="share of ceiling (%)", ylim=(0, 108))
        plain_ticks(rates.xaxis)
        plain_ticks(rates.yaxis)
        rates.set_title(f"ceilings: products {matmul:.0f} TFLOP/s, copies {copy:.2f} TB/s", fontsize=8)
        rates.margins(y=0.12)
    legend(figure, 4)
    count = sum(map(len, points.values()))
    of = "families" if len(results) == 1 else "benchmarks"
    return Plot(
        name=name,
        title=f"Roofline of {results[0].benchmark}" if len(results) == 1 else "Roofline of our kernels",
        alt=f"{count} points of {', '.join(points)} under ceilings of {copy:.2f} TB/s and {matmul:.0f} TFLOP/s",
        note=f"A mark for each case, a colour for each of the {of}. Bytes are what the whole call must move at the"
        " least, had it no intermediate results. A share is of the ceilings of the same run; of several runs"
        " the line is their mean.",
        figure=figure,
    )


def means(results: Sequence[Result], name: str) -> Plot | None:
    """Geometric means of the speed-ups in device time: of forward passes, and of training steps."""
    cases = {result.benchmark: tables.forward(result.cases) for result in results}
    every = [case for of in cases.values() for case in of]
    found: dict[str, tuple[str, list[float | None]]] = {
        "over the best of all others": (CLOSEST, [tables.closest(of, tables.device) for of in cases.values()])
    }
    for f in tables.BASELINES:
        ratios = [[r for case in of if (r := tables.speedup(case, f, tables.device))] for of in cases.values()]
        found[f"over {named(f, every)}"] = COLORS[f], [tables.geometric_mean(r) if r else None for r in ratios]
    kept = [i for i in range(len(results)) if any(values[i] for _, values in found.values())]
    series: dict[str, tuple[str, list[float | None]]] = {
        label: (color, [values[i] for i in kept]) for label, (color, values) in found.items() if any(values)
    }
    if not series:
        return None
    names = [results[i].benchmark for i in kept]
    figure, axes = bars(names, series, "speed-up of ours (times)", ".2f")
    with style():
        axes.axvline(1, color=INK, linewidth=1)
    said = "; ".join(
        f"{of} {value:.2f} {label}"
        for label, (_, values) in series.items()
        for of, value in zip(names, values, strict=True)
        if value
    )
    return Plot(
        name=name,
        title="Speed-up by benchmark, device time",
        alt=f"bars of geometric means: {said}",
        note="Geometric mean over the forward cases of each benchmark, and over training steps, of the other's"
        " time over ours: the best of all others in each case, then the best of each family, in the"
        " cases that it has.",
        figure=figure,
    )


def headlines(results: Sequence[Result]) -> list[Plot]:
    """The plots that say most: of all results together, and the speed-up of each in device time."""
    found = [speedup(r, f"{slug(r.benchmark)}-speedup-device", tables.device, "device time") for r in results]
    return [*overview(results), *(plot for plot in found if plot)]


def overview(results: Sequence[Result]) -> list[Plot]:
    """The plots of several results together."""
    if len(results) < 2:
        return []
    found = [means(results, "all-speedup"), rooflines(results, "all-roofline")]
    return [plot for plot in found if plot]


def _our_kernels(case: Case) -> dict[str, float]:
    """Microseconds of ours by kernel; `x__1`, another kernel of the same function, is called `x 2`.

    Kernels of Mosaic GPU have names too long for a legend.
    """
    pair = tables.best(case, "ours", tables.device)
    totals: dict[str, float] = {}
    for kernel in pair[0].kernels if pair else []:
        name = kernel.name.replace("_mosaic_gpu_kernel", ", Mosaic")
        base, _, number = name.rpartition("__")
        label = f"{base} {int(number) + 1}" if base and number.isdecimal() else name
        totals[label] = totals.get(label, 0) + kernel.us
    return totals


def breakdown(result: Result, name: str) -> Plot | None:
    """Where the device time of ours goes, kernel by kernel."""
    found = {case.label: totals for case in result.cases if (totals := _our_kernels(case))}
    kernels = list(dict.fromkeys(kernel for totals in found.values() for kernel in totals))
    if len(kernels) < 2:
        return None
    shares = {label: {k: 100 * us / sum(t.values()) for k, us in t.items()} for label, t in found.items()}
    weight = {kernel: sum(s.get(kernel, 0) for s in shares.values()) for kernel in kernels}
    shown = sorted(kernels, key=weight.__getitem__, reverse=True)[: len(PALETTE) - 1]
    figure, axes = axes_of(1.2 + 0.34 * len(found) + 0.17 * math.ceil(len(shown) / 2))
    left = [0.0] * len(found)
    with style():
        for kernel, color in zip([*(k for k in kernels if k in shown), None], PALETTE, strict=False):
            values = [
                100 - x if kernel is None else s.get(kernel, 0) for x, s in zip(left, shares.values(), strict=True)
            ]
            if max(values) > 1e-6:
                axes.barh(range(len(found)), values, 0.75, left, color=color, label=kernel or "others")
            left = [x + value for x, value in zip(left, values, strict=True)]
        labels = [f"{label}\n{sum(totals.values()):.0f} us" for label, totals in found.items()]
        axes.set_yticks(range(len(found)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set(xlabel="share of the device time (%)", xlim=(0, 100))
    legend(figure, 2)
    largest = {label: max(s, key=s.__getitem__) for label, s in shares.items()}
    said = "; ".join(f"{label}: most in {k}, {shares[label][k]:.0f}%" for label, k in largest.items())
    return Plot(
        name=name,
        title="Where the time of ours goes",
        alt=f"stacked bars by kernel. {said}",
        note="All launches of one kernel together. A number after a name: the same function with another shape.",
        figure=figure,
    )


def _metric(result: Result, family: Family, name: str) -> list[float | None]:
    entries: list[Entry | None] = [
        next((e for e in case.entries if e.family == family and name in e.metrics), None) for case in result.cases
    ]
    return [entry.metrics[name] if entry else None for entry in entries]


def throughput(result: Result, name: str) -> Plot | None:
    """Sentences a second by dtype."""
    series = {
        "ours, text in": ("#7fc4f0", _metric(result, "ours", "encode_sentences_per_s")),
        "sentence-transformers": (COLORS["peer"], _metric(result, "peer", "encode_sentences_per_s")),
        "ours, ids in": (COLORS["ours"], _metric(result, "ours", "forward_sentences_per_s")),
        "torch eager, ids in": (COLORS["torch"], _metric(result, "torch", "forward_sentences_per_s")),
    }
    series = {label: pair for label, pair in series.items() if any(pair[1])}
    if not series:
        return None
    thousands = {label: (c, [v and v / 1e3 for v in values]) for label, (c, values) in series.items()}
    labels = [case.label for case in result.cases]
    figure, _ = bars(labels, thousands, "thousand sentences a second", ".0f")
    best = ", ".join(
        f"{label} up to {max(v or 0 for v in values):,.0f}/s" for label, (_, values) in series.items()
    )
    return Plot(
        name=name,
        title="Sentences a second",
        alt=f"bars by dtype; {best}",
        note="Text in, as sentence-transformers has it: with tokenisation on the host. Ids in: the forward pass on"
        " ids that lie on the device.",
        figure=figure,
    )


def accuracy(result: Result, name: str) -> Plot | None:
    """Largest distance of an output from its reference, against the limit, for each case."""
    pairs = [
        (case.label, entry.accuracy)
        for case in result.cases
        for entry in case.entries
        if entry.family == "ours" and entry.accuracy
    ]
    if not pairs:
        return None
    labels = [label for label, _ in pairs]
    values = [max(found.value, 1e-16) for _, found in pairs]
    figure, axes = axes_of(1.2 + 0.36 * len(pairs))
    with style():
        axes.barh(labels, values, 0.6, color=COLORS["ours"], label="ours")
        limits = [found.limit for _, found in pairs]
        axes.plot(limits, labels, "|", color=PALETTE[5], markersize=16, markeredgewidth=2.5, label="limit")
        axes.set(xscale="log", xlim=(min(values) / 10, max(*values, *limits) * 10))
        axes.set_xlabel(textwrap.fill(f"largest {pairs[0][1].measure} (no unit)", 30), loc="right")
        axes.invert_yaxis()
        axes.grid(False, axis="y")
    legend(figure, 2)
    said = ", ".join(f"{label} {found.value:.1e} (limit {found.limit:.0e})" for label, found in pairs)
    return Plot(
        name=name,
        title="Distance from the reference",
        alt=f"bars, logarithmic: {said}",
        note="Of the worst output, from the float32 reference. Beyond its limit a result counts as wrong.",
        figure=figure,
    )


def scaling(result: Result, name: str) -> Plot | None:
    """Speed-up of ours on several devices over one."""
    found: dict[str, dict[int, float]] = {}
    for case in result.cases:
        if "devices" in case.shape and (pair := tables.best(case, "ours", tables.wall)):
            model = case.label.rpartition(f" {case.dtype} on ")[0]
            found.setdefault(model, {})[case.shape["devices"]] = pair[1].median_us
    speedups = {
        model: {n: times[1] / us for n, us in times.items()} for model, times in found.items() if 1 in times
    }
    counts = sorted({n for times in speedups.values() for n in times if n > 1})
    if not counts:
        return None
    labels = list(speedups)
    series: dict[str, tuple[str, list[float | None]]] = {
        f"{n} devices": (color, [times.get(n) for times in speedups.values()])
        for n, color in zip(counts, PALETTE, strict=False)
    }
    figure, axes = bars(labels, series, "times one device", ".2f")
    with style():
        axes.set_xticks([0, 1, *counts])
    said = "; ".join(
        f"{model} {', '.join(f'{times[n]:.2f} on {n}' for n in counts if n in times)}"
        for model, times in speedups.items()
    )
    return Plot(
        name=name,
        title="Speed-up on several devices",
        alt=f"bars: {said}",
        note="Wall time on one device over that on several. The best is as many times as there are devices.",
        figure=figure,
    )


def plots(result: Result) -> list[Plot]:
    """Every plot that a result has the figures for."""
    name = slug(result.benchmark)
    clocks: list[tuple[str, str, tables.Clock]] = [
        ("device", "device time", tables.device),
        ("wall", "wall time a call", tables.wall),
    ]
    dtypes = dict.fromkeys(case.dtype for case in result.cases)
    found = [speedup(result, f"{name}-speedup-{key}", clock, kind) for key, kind, clock in clocks]
    for key, kind, clock in clocks:
        found += [times(result, f"{name}-time-{key}-{slug(dtype)}", clock, kind, dtype) for dtype in dtypes]
    found += [share(result, f"{name}-share"), rooflines([result], f"{name}-roofline")]
    found += [rates(result, f"{name}-rate-{by}", by) for by in RATES]
    found += [breakdown(result, f"{name}-breakdown"), throughput(result, f"{name}-throughput")]
    found += [scaling(result, name), accuracy(result, f"{name}-accuracy")]
    return [plot for plot in found if plot]
