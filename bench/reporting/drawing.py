"""How plots are drawn: narrow, so that they can be read on a phone, and without a background.

What is neither a bar nor a curve (text, axes, grid) is drawn in INK, which `svg` replaces by the colour of the
text around the plot, so that one drawing serves light and dark pages.
"""

import dataclasses
import functools
import hashlib
import html
import io
import itertools
import re
import textwrap
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
CLOSEST = "#5c6770"  # of the best of all other families
# Of lines that stand for no family: none is like another beside it.
PALETTE = (
    *("#1f8fd6", "#e69f00", "#009e73", "#cc79a7", "#6a51c7", "#d55e00", "#8b5a2b", "#a6a000", "#8d99a6"),
    *("#a11d33", "#2e4a7d", "#5f7f3a", "#17becf"),
)
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
        """Writes NAME.png, with the title, on white and with a palette: a file is a third as large.

        The file holds the digest of its drawing, and stays as it is where the digest is the same: another version
        of matplotlib draws the same in other pixels.
        """
        from PIL import Image, PngImagePlugin  # matplotlib needs it

        path = folder / f"{self.name}.png"
        if path.is_file() and drawing_of(path) == self.drawing:
            return
        drawn = io.BytesIO()
        with style():
            heading = self.figure.suptitle(textwrap.fill(self.title, 48), fontsize=10)
            self.figure.savefig(drawn, format="png", dpi=DPI, facecolor="white")
            heading.set(visible=False, in_layout=False)
        image = Image.open(drawn).convert("RGB").quantize(64, Image.Quantize.FASTOCTREE)
        said = PngImagePlugin.PngInfo()
        said.add_text(DRAWING, self.drawing)
        with files.replacing(path) as file:
            image.save(file, format="png", optimize=True, pnginfo=said)

    @functools.cached_property
    def drawing(self) -> str:
        """A digest of the title, the style and all that is drawn: the same from any version of matplotlib."""
        from matplotlib.ticker import FixedFormatter

        parts: list[Any] = [self.title, self.alt, STYLE, DPI, self.figure.get_size_inches().tolist()]
        for axes in self.figure.axes:
            parts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()]
            parts += [(bar.get_bbox().bounds, bar.get_facecolor(), bar.get_label()) for bar in axes.patches]
            for line in axes.lines:
                parts += [line.get_xydata().tolist(), line.get_color(), line.get_linestyle(), line.get_label()]
                parts += [line.get_marker(), line.get_markersize()]
            parts += [(text.get_text(), text.get_position()) for text in axes.texts]
            names = axes.yaxis.get_major_formatter()
            parts += names.seq if isinstance(names, FixedFormatter) else []
        return hashlib.sha256(repr(_rounded(parts)).encode()).hexdigest()


DRAWING = "drawing"  # the text of a PNG file with `Plot.drawing`
DPI = 130


def drawing_of(path: Path) -> str | None:
    """What a PNG file says that it draws; None where it says nothing, or is none."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            found = image.info.get(DRAWING)
    except OSError:
        return None
    return str(found) if found else None


def _rounded(value: Any) -> Any:
    """The value with six digits of each number in it."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def style() -> Any:
    """The context in which everything is drawn."""
    import matplotlib

    return matplotlib.rc_context(STYLE)  # type: ignore[arg-type]


def axes_of(height: float, rows: Sequence[int] = (1,)) -> tuple[Any, Any]:
    """An empty figure of that height in inches, and its axes: an array of axes for several rows, `rows` high."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08)  # inches; the last tick has its number under it
        return figure, figure.subplots(len(rows), sharex=True, height_ratios=rows)


def plain_ticks(axis: Any) -> None:
    """Labels a logarithmic axis, on which all has been drawn, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Any, columns: int) -> None:
    """Puts the legend below the axes, in as many columns at most as fit the longest line of a label."""
    found = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    labels = [textwrap.fill(label, 55, break_on_hyphens=False) for _, label in found]
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    columns = max(1, min(columns, len(labels), 68 // (longest + 6)))
    with style():
        figure.legend(
            [handle for handle, _ in found],
            labels,
            loc="outside lower center",
            ncols=columns,
            handlelength=1.5,
            columnspacing=1.2,
        )


def bars(
    cases: Sequence[str], series: dict[str, tuple[str, list[float | None]]], label: str, form: str, key: str = ""
) -> tuple[Any, Any]:
    """Horizontal bars, a group a case with those that it has.

    Args:
      series: colour and values by name.
      label: of the values.
      form: how they are written.
      key: what the names of cases say.
    """
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
        axes.set_xlabel(label, loc="right")  # under short axes it would reach past the edge
        axes.set_ylabel(key)
    legend(figure, 3)
    return figure, axes
