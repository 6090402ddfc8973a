"""How plots are drawn: narrow, so that they can be read on a phone, and without a background.

What is neither a bar nor a curve (text, axes, grid) is drawn in INK, which `svg` replaces by the colour of the
text around the plot, so that one drawing serves light and dark pages.
"""

import dataclasses
import functools
import html
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measuring.results import Family
from pallas_models import files

WIDTH = 4.0  # inches
INK = "#212529"
COLORS: dict[Family, str] = {
    "ours": "#1f8fd6",
    "ladder": "#8c7ae6",
    "xla": "#e69f00",
    "torch": "#cc79a7",
    "peer": "#009e73",
}
PALETTE = ("#1f8fd6", "#e69f00", "#009e73", "#cc79a7", "#8c7ae6", "#d55e00", "#56b4e9", "#a6a000", "#8d99a6")
STYLE: dict[str, Any] = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # text stays text: small files, and the reader's browser can find it
    "svg.hashsalt": "pallas_models.bench",  # the same file from the same result
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "grid.color": INK,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure with its title, note and text alternative.

    Attributes:
      name: of its files, unique on the page.
      title: heading.
      alt: what it shows, for those who cannot see it.
      note: how to read it.
      figure: the matplotlib figure.
    """

    name: str
    title: str
    alt: str
    note: str
    figure: Any

    @functools.cached_property
    def _rendered(self) -> str:
        text = io.StringIO()
        with style():
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        return text.getvalue()

    def svg(self, *, inline: bool) -> str:
        """The drawing; `inline`: to stand in an HTML page, without declarations and with ids of its own."""
        drawing = re.sub(r"<metadata>.*?</metadata>", "", self._rendered, flags=re.DOTALL)
        drawing = re.sub(r"(?<![\w-])(id=\"|xlink:href=\"#|url\(#)", rf"\g<1>{self.name}-", drawing)
        drawing = drawing.replace(INK, "currentColor")
        root = drawing.index("<svg")
        end = drawing.index(">", root)
        box = re.search(r'viewBox="[^"]*"', drawing[root:end])
        label = html.escape(f"{self.title}: {self.alt}")
        attributes = f'{box[0] if box else ""} role="img" aria-label="{label}"'
        body = drawing[end + 1 :]
        if inline:
            return f"<svg {attributes}>{body}"
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        adapt = f"svg{{color:{INK}}}@media(prefers-color-scheme:dark){{svg{{color:#e3e6ea}}}}"
        return f"<svg {spaces} {attributes}><style>{adapt}</style>{body}"

    def save(self, folder: Path) -> None:
        """Writes NAME.svg, which adapts to light and dark, and NAME.png, on white."""
        files.write(folder / f"{self.name}.svg", self.svg(inline=False))
        self.save_png(folder)

    def save_png(self, folder: Path) -> None:
        """Writes NAME.png, on white, with a palette: drawings have few colors, and a file is a third as large."""
        from PIL import Image  # matplotlib needs it

        drawn = io.BytesIO()
        with style():
            self.figure.savefig(drawn, format="png", dpi=130, facecolor="white")
        image = Image.open(drawn).convert("RGB").quantize(16, Image.Quantize.FASTOCTREE)
        with files.replacing(folder / f"{self.name}.png") as file:
            image.save(file, format="png", optimize=True)


def style() -> Any:
    """The context in which everything is drawn."""
    import matplotlib

    return matplotlib.rc_context(STYLE)  # type: ignore[arg-type]


def axes_of(height: float) -> tuple[Any, Any]:
    """An empty figure of that height in inches, and its axes."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots()


def plain_ticks(axis: Any) -> None:
    """Labels a logarithmic axis, on which all has been drawn, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Any, columns: int) -> None:
    """Puts the legend below the axes."""
    with style():
        figure.legend(loc="outside lower center", ncols=columns, handlelength=1.5, columnspacing=1.2)


def bars(
    cases: Sequence[str], series: dict[str, tuple[str, list[float | None]]], label: str, form: str
) -> tuple[Any, Any]:
    """Horizontal bars, a group a case with those that it has; `series`: colour and values by name."""
    groups = [[n for n, (_, values) in series.items() if values[i] is not None] for i in range(len(cases))]
    ends = list(itertools.accumulate(len(names) + 0.8 for names in groups))
    starts = [end - 0.8 - len(names) for end, names in zip(ends, groups, strict=True)]
    figure, axes = axes_of(1.0 + 0.18 * ends[-1])
    with style():
        for name, (color, values) in series.items():
            there = [i for i, names in enumerate(groups) if name in names]
            at = [starts[i] + groups[i].index(name) + 0.5 for i in there]
            drawn = axes.barh(at, [values[i] for i in there], 0.92, color=color, label=name)
            axes.bar_label(drawn, [format(values[i], form) for i in there], padding=3, fontsize=8)
        axes.set_yticks([start + len(names) / 2 for start, names in zip(starts, groups, strict=True)], cases)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.14, y=0.02)
        axes.set_xlabel(label)
    legend(figure, min(3, len(series)))
    return figure, axes
