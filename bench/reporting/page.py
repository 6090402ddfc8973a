"""One HTML page of all results of a GPU: plots, tables and conditions, with nothing loaded from elsewhere."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from bench.measuring.results import Result, slug
from bench.reporting import plots, tables
from bench.reporting.drawing import Plot
from pallas_models import files

NAME = "index.html"
CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def table(markdown: str) -> str:
    """An HTML table made from a Markdown one, in a container of its own in which it can scroll."""
    split = (re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines())
    header, _, *rows = ([cell.strip().replace(r"\|", "|") for cell in cells] for cells in split)

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    label = html.escape("table: " + ", ".join(header[:4]))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>\n'
        f"<thead>{row(header, 'th')}</thead>\n<tbody>{body}</tbody></table></div>"
    )


def items(markdown: str) -> str:
    """An HTML list made from a Markdown one."""
    lines = (html.escape(line.removeprefix("- ")) for line in markdown.splitlines())
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def to_html(text: str) -> str:
    """Tables, lists and paragraphs, from text in which an empty line separates them."""
    forms = {"| ": table, "- ": items}
    return "\n".join(forms.get(p[:2], lambda p: f"<p>{html.escape(p)}</p>")(p) for p in text.split("\n\n"))


def figure(plot: Plot) -> str:
    """A plot with its title and note."""
    return (
        f'<figure id="{plot.name}">\n<h3>{html.escape(plot.title)}</h3>\n{plot.svg(inline=True)}\n'
        f"<figcaption>{html.escape(plot.note)}</figcaption>\n</figure>"
    )


def headline(result: Result) -> str:
    """The geometric means of the speed-ups, large."""
    cards = []
    for kind, clock in tables.CLOCKS.items():
        for family in tables.BASELINES:
            if mean := tables.mean_speedup(result.cases, family, clock):
                cards.append(f"<li><b>{mean:.2f}&times;</b> over the best of {tables.NAMES[family]}, {kind}</li>")
    return f'<ul class="cards">{"".join(cards)}</ul>' if cards else ""


def conditions(result: Result) -> str:
    """The environment, the settings and the measured ceilings, as a list of terms."""
    terms = {"date": result.date} | result.environment | result.settings
    terms |= {name: f"{value:.4g}" for name, value in result.ceilings.items()}
    found = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in terms.items())
    return f'<dl class="conditions">{found}</dl>'


def section(result: Result, summary: str, drawn: Sequence[Plot]) -> str:
    """All about one benchmark."""
    lines = [f'<section id="{slug(result.benchmark)}">', f"<h2>{html.escape(result.benchmark)}</h2>"]
    if result.partial:
        lines.append('<p class="warning">From a shortened or unfinished run: not for publication.</p>')
    lines += [f"<p>{html.escape(tables.conditions(result))}</p>", headline(result)]
    lines.append(f'<div class="plots">{"".join(map(figure, drawn))}</div>')
    lines.append(to_html(summary))
    if failures := tables.failures(result):
        items = "".join(f"<li>{html.escape(line)}</li>" for line in failures)
        lines.append(f"<details open><summary>Without a figure</summary><ul>{items}</ul></details>")
    lines.append(f"<details><summary>Every candidate</summary>{to_html(tables.entries(result))}</details>")
    lines.append(f"<details open><summary>Conditions</summary>{conditions(result)}</details>")
    return "\n".join([*lines, "</section>"])


def page(
    results: Sequence[Result], summaries: Sequence[str], overview: list[Plot], drawn: list[list[Plot]]
) -> str:
    """The whole page: plots of all benchmarks together, then a section for each."""
    device = html.escape(", ".join(dict.fromkeys(r.environment.get("device", "unknown device") for r in results)))
    links = "".join(
        f'<a href="#{slug(result.benchmark)}">{html.escape(result.benchmark)}</a>' for result in results
    )
    body = "\n".join(section(*of) for of in zip(results, summaries, drawn, strict=True))
    if overview:
        together = f'<div class="plots">{"".join(map(figure, overview))}</div>'
        body = f'<section id="all">\n<h2>All benchmarks</h2>\n{together}\n</section>\n{body}'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Benchmarks on {device}</title>
<link rel="icon" href="data:,">
<style>
{CSS}</style>
</head>
<body>
<header>
<h1>Benchmarks on {device}</h1>
<p>Ours against XLA, torch and, where installed, other libraries, side by side in one run; of each family the best
candidate counts. Device time is that in which kernels of a call run
(measured before 2026-11-23, what overlaps counts twice); wall time is what a caller sees with many calls queued,
dispatch included. Figures are medians.</p>
<nav>{links}</nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def write(results: Sequence[Result], summaries: Sequence[str], folder: Path) -> Path:
    """Writes the page and, beside it, each plot as SVG and PNG; plots of an earlier report are removed.

    Raises:
      OSError: the folder cannot be written.
    """
    overview, drawn = plots.overview(results), [plots.plots(result) for result in results]
    folder.mkdir(parents=True, exist_ok=True)
    every = [plot for of in (overview, *drawn) for plot in of]
    for plot in every:
        plot.save(folder)
    path = folder / NAME
    files.write(path, page(results, summaries, overview, drawn))
    names = {plot.name for plot in every}
    for old in (*folder.glob("*.svg"), *folder.glob("*.png")):
        if old.stem not in names:
            old.unlink()
    return path
