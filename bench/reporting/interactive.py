"""Plots that answer to a reader, on the site: forward beside the gradient, by time, ratio or memory.

plotly draws them in the browser.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.measuring.results import Case, Entry, Family, Result
from bench.reporting import plots, tables
from bench.reporting.drawing import COLORS

MODES = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
HEIGHT = 380  # of a plot, in pixels

Measure = Callable[[Case, Family], tuple[float, Entry] | None]


def by_time(clock: tables.Clock) -> Measure:
    """The time of a family's best, in microseconds."""

    def measure(case: Case, family: Family) -> tuple[float, Entry] | None:
        found = tables.best(case, family, clock)
        return found and (found[1].median_us, found[0])

    return measure


def ratio(case: Case, family: Family) -> tuple[float, Entry] | None:
    """How many times the time of ours a family's best takes, of the device where that was measured."""
    clock = tables.device if tables.best(case, "ours", tables.device) else tables.wall
    found, value = tables.best(case, family, clock), tables.speedup(case, family, clock)
    return (value, found[0]) if found and value and family != "ours" else None


def memory(case: Case, family: Family) -> tuple[float, Entry] | None:
    """What a call of a family's best takes of the device's memory, in GB: inputs, results and temporaries."""
    found = tables.best(case, family, tables.device) or tables.best(case, family, tables.wall)
    return (found[0].peak_bytes / 1e9, found[0]) if found and found[0].peak_bytes else None


MEASURES: dict[str, Measure] = {
    "device time (us)": by_time(tables.device),
    "wall time (us)": by_time(tables.wall),
    "times slower than ours": ratio,
    "memory of a call (GB)": memory,
}


def figure(cases: Sequence[Case], title: str) -> Any | None:
    """The plot of cases, from small ones to large; None where nothing was timed."""
    from plotly import graph_objects

    labels = dict(zip([case.label for case in cases], plots.labels_of(cases), strict=True))
    cases = sorted(cases, key=lambda case: plots.size_of(case)[0])
    curves: list[tuple[str, Any]] = []
    for (name, measure), family in itertools.product(MEASURES.items(), tables.FAMILIES):
        found = [(case, *point) for case in cases if (point := measure(case, family))]
        if not found:
            continue
        curve = graph_objects.Scatter(
            x=[labels[case.label].replace(f"+{case.mode}", "") for case, _, _ in found],
            y=[value for _, value, _ in found],
            text=[entry.name for _, _, entry in found],
            name=tables.NAMES[family],
            mode="lines+markers",
            line_color=COLORS[family],
            hovertemplate="%{x}<br>%{text}: %{y:.4g}<extra></extra>",
            visible=not curves or name == curves[0][0],
        )
        curves.append((name, curve))
    if not curves:
        return None
    buttons = [
        dict(
            label=name,
            method="update",
            args=[{"visible": [owner == name for owner, _ in curves]}, {"yaxis.title.text": name}],
        )
        for name in dict.fromkeys(name for name, _ in curves)
    ]
    layout = dict(
        title=dict(text=title, x=1.0, xanchor="right", y=0.95),
        height=HEIGHT,
        margin=dict(l=60, r=10, t=90, b=10),
        xaxis_automargin=True,
        yaxis=dict(type="log", title=curves[0][0]),
        legend=dict(orientation="h", y=1.0, yanchor="bottom"),
        updatemenus=[dict(buttons=buttons, x=0.0, xanchor="left", y=1.36, yanchor="top")],
        showlegend=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return graph_objects.Figure([curve for _, curve in curves], layout)


def fragment(result: Result) -> str:
    """A plot for each mode as HTML for a page that has loaded `script()`; empty where nothing was timed."""
    found = []
    for mode, title in MODES.items():
        cases = [case for case in result.cases if case.mode == mode]
        if drawn := figure(cases, title) if cases else None:
            options: dict[str, Any] = dict(
                full_html=False, include_plotlyjs=False, div_id=f"{result.benchmark}-{mode}"
            )
            found.append(drawn.to_html(config=dict(displayModeBar=False, responsive=True), **options))
    return f'<div class="explored">{"".join(found)}</div>' if found else ""


def script() -> Path:
    """plotly's code for browsers, from the installed package: nothing is loaded from elsewhere."""
    import plotly

    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
