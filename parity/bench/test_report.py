"""`python -m bench report`: every plot is on the page, which loads nothing and fits a phone; unusable files."""

import dataclasses
import html
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import __main__ as cli
from bench.measuring import results
from bench.measuring.results import Accuracy, Case, Kernel, Result
from bench.reporting import drawing, plots, readme, report, tables
from parity import ROOT
from parity.bench.test_bench import entry, make_result

pytest.importorskip("matplotlib", reason="not installed: the report's plots are drawn with it")
colors_of = pytest.importorskip("matplotlib.colors")
Image, PngImagePlugin = (pytest.importorskip(f"PIL.{name}") for name in ("Image", "PngImagePlugin"))

ALL = ("speedup", "roofline")
MINILM = ("speedup-device", "speedup-wall", "time-device-fp16", "time-wall-fp16", "share", "roofline")
MINILM = (*MINILM, "rate-memory", "rate-matmul", "breakdown")
SOFTMAX = (
    "speedup-device",
    "speedup-wall",
    "time-device-bf16",
    "time-wall-bf16",
    "share",
    "roofline",
    "rate-memory",
)
STS = ("throughput", "accuracy")
PLOTS = {"all": ALL, "minilm": MINILM, "softmax": SOFTMAX, "sts": STS}
NAMES = [f"{name}-{plot}" for name, plots in PLOTS.items() for plot in plots]


def minilm_result(**changes: object) -> Result:
    names = ("matmul", "attention", "matmul__1", "layer_norm")
    cases = []
    for batch, seq, us in ((1, 16, 80.0), (64, 128, 600.0), (256, 128, 2200.0)):
        ours = entry("ours", us, name="pallas", kernels=[Kernel(name=name, us=us / 4) for name in names])
        others = [entry(f, k * us, name=f"{f}-<{k}>") for f in ("xla", "torch") for k in (2, 3)]
        cases.append(
            Case(
                label=f"{batch}x{seq} fp16",
                dtype="fp16",
                shape={"batch": batch, "seq": seq},
                flop=2e7 * batch * seq,
                bytes=2e7 + 800.0 * batch * seq,
                entries=[ours, *others],
            )
        )
    return make_result(**{"cases": cases, **changes})


def softmax_result(**changes: object) -> Result:
    cases = []
    for rows, columns, us in ((8192, 4096, 40.0), (65536, 4096, 300.0), (1048576, 1048576, 1e6)):
        times = (
            ("ours", 1.0, "pallas"),
            ("ladder", 2.5, "naive"),
            ("xla", 1.2, "xla"),
            ("torch", 3.0, "torch-eager"),
        )
        entries = [entry(family, k * us, name=name) for family, k, name in (*times, ("peer", 2.0, "jax-pallas"))]
        sizes = {"rows": rows, "columns": columns}
        work = dict(flop=5.0 * rows * columns, bytes=4.0 * rows * columns)
        cases.append(
            Case(label=f"{rows}x{columns}+causal bf16", dtype="bf16", shape=sizes, entries=entries, **work)
        )
    return make_result(**{"benchmark": "softmax", "cases": cases, **changes})


def sts_result() -> Result:
    accuracy = Accuracy(measure="1 - cosine", value=6e-7, limit=1e-4)
    rates = {"encode_sentences_per_s": 1e5, "forward_sentences_per_s": 5e5, "spearman": 82.03}
    bare = dict(device=None, wall=None)
    entries = [
        entry("ours", 1, metrics=rates, accuracy=accuracy, **bare),
        entry("torch", 1, metrics={"forward_sentences_per_s": 9e4}, **bare),
    ]
    cases = [Case(label="fp16", dtype="fp16", shape={"sentences": 9}, flop=None, entries=entries)]
    return make_result(benchmark="sts", cases=cases, ceilings={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three benchmarks."""
    root = tmp_path_factory.mktemp("results")
    results.save(minilm_result(partial=True), root)
    results.save(softmax_result(), root)
    results.save(sts_result(), root)
    assert cli.main(["report", "--results", str(root), "--no-readme"]) == 0
    return root / "nvidia-h200" / "report"


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "index.html").read_text(encoding="utf-8")


def test_every_plot_is_there(folder, page):
    assert re.findall(r'<figure id="([^"]+)">', page) == NAMES
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["index.html", *(name + ending for name in NAMES for ending in (".png", ".svg"))]
    )
    for name in NAMES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(folder / f"{name}.svg")
    labels = re.findall(r'<svg [^>]*role="img" aria-label="([^"]+)"', page)
    assert len(labels) == len(NAMES) and all(len(label) > 30 for label in labels)
    assert "minilm 2.00 over XLA" in labels[0] and "softmax 2.00 over peers (jax-pallas)" in labels[0]
    assert "minilm 2.00 over the best of all others; softmax 1.20 over the best of all others" in labels[0]
    assert "softmax" in labels[1] and "minilm" in labels[1]
    assert "geometric mean 2.00 over XLA, 2.00 over torch" in labels[len(ALL)]


def test_axes_have_labels_with_units(folder):
    expected = {
        "minilm-speedup-wall": ["speed-up of ours (times)", "batch x seq, fp16", "1x16", "64x128"],
        "minilm-time-device-fp16": ["tokens a call", "device time (us)"],
        "all-speedup": ["speed-up of ours (times)", "minilm", "softmax"],
        "softmax-rate-memory": ["bandwidth (TB/s)", "ours", "XLA", "torch", "peers"],
        "softmax-time-device-bf16": ["elements a call", "device time (us)", "naive", "jax-pallas"],
        "minilm-rate-matmul": ["rate (TFLOP/s)"],
        "minilm-share": ["share of the ceiling (%)"],
        "minilm-roofline": ["arithmetic intensity (flop/byte)", "rate (TFLOP/s)", "share of ceiling (%)"],
        "minilm-breakdown": ["share of the device time (%)", "matmul", "matmul 2", "attention", "layer_norm"],
        "sts-throughput": ["thousand sentences a second"],
        "sts-accuracy": ["largest 1 - cosine (no unit)"],
    }
    for name, texts in expected.items():
        root = ElementTree.parse(folder / f"{name}.svg").getroot()
        found = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert set(texts) <= set(found), f"{name}: {found}"


def test_nothing_is_loaded(folder, page):
    assert not re.search(r"https?://|@import|<script|<img|<iframe", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {f"#{i}" for i in re.findall(r'id="([^"]+)"', page)}
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:,")) for link in links)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two elements of the page share an id"
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_conditions_and_tables(page):
    for text in ("1.34 (48, 32%)", "Floor at the measured ceilings", "3.36 TB/s", "80%", "set by"):
        assert text in page
    for text in ("NVIDIA H200", "580.1", "0.11.2", "abc123", "2026-11-20", "not for publication", "82.03"):
        assert text in page
    assert "xla-&lt;2&gt;" in page and "<2>" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.count("<table>") == page.count('<div class="scroll"') > 3


def test_conditions_tell_what_ran_beside():
    told = tables.conditions(
        minilm_result(environment={"device": "NVIDIA L4", "cores": "4", "beside": "the suite"})
    )
    assert "; cores: 4; beside: the suite" in told and told.count("cores") == 1
    assert "beside" not in tables.conditions(minilm_result(environment={"device": "NVIDIA L4"}))


def test_same_page_from_the_same_results(tmp_path):
    results.save(sts_result(), tmp_path)
    pages = []
    for _ in range(2):
        assert cli.main(["report", "--results", str(tmp_path), "--no-readme"]) == 0
        pages.append((tmp_path / "nvidia-h200" / "report" / "index.html").read_text(encoding="utf-8"))
    assert "<svg" in pages[0] and pages[0] == pages[1]


CHECK = """<title>waiting</title><iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>
const errors = []; window.onerror = (text) => errors.push(text);
onload = () => {{
  const inner = document.querySelector("iframe").contentDocument, root = inner.documentElement;
  if (root.scrollWidth > root.clientWidth) errors.push("overflow: " + root.scrollWidth);
  for (const svg of inner.querySelectorAll("svg")) {{
    const box = svg.getBoundingClientRect();
    if (box.width < 200 || box.height < 80) errors.push("tiny plot");
    for (const text of svg.querySelectorAll("text")) {{
      const at = text.getBoundingClientRect();
      if (at.left < box.left - 2 || at.right > box.right + 2 || at.bottom > box.bottom + 2 || at.top < box.top - 2)
        errors.push("cut off: " + text.textContent);
      if (at.height < 7) errors.push("too small to read: " + text.textContent);
    }}
  }}
  document.title = "plots " + inner.querySelectorAll("svg").length + ", errors [" + errors.join("; ") + "]";
}};
</script>"""


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed: pages are not looked at in it"
)


def look_at(page: str, width: int, folder: Path) -> str:
    """What a browser says of the page: its plots and what is wrong with them."""
    path = folder / "check.html"
    path.write_text(CHECK.format(width=width, page=html.escape(page)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    command = [str(BROWSER), *options, "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title and "CONSOLE" not in done.stderr
    return title[1]


@needs_browser
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_in_a_browser(tmp_path, page, width):
    assert look_at(page, width, tmp_path) == f"plots {len(NAMES)}, errors []"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed results, without the PNG files beside it, which no page loads."""
    root = tmp_path_factory.mktemp("published")
    shutil.copytree(results.DEFAULT_FOLDER / report.README_GPU, root / report.README_GPU)
    with mock.patch.object(drawing.Plot, "save_png"):
        assert cli.main(["report", "--results", str(root), "--no-readme"]) == 0
    return root / report.README_GPU / report.FOLDER / "index.html"


@needs_browser
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_the_page_of_the_committed_results_in_a_browser(tmp_path, published, width):
    page = published.read_text(encoding="utf-8")
    assert look_at(page, width, tmp_path) == f"plots {page.count('<figure id=')}, errors []"


def test_a_result_with_few_figures(tmp_path):
    """No GPU, one case, nothing counted; and a benchmark that the report has never heard of."""
    case = make_result().cases[0]
    entries = [dataclasses.replace(e, device=None, kernels=[]) for e in case.entries]
    cases = [dataclasses.replace(case, entries=entries, flop=None, shape={"rows": 8})]
    results.save(make_result(benchmark="soft max", cases=cases, ceilings={}), tmp_path)
    results.save(make_result(benchmark="none", cases=[]), tmp_path)
    assert cli.main(["report", "--results", str(tmp_path), "--no-readme"]) == 0
    page = (tmp_path / "nvidia-h200" / "report" / "index.html").read_text()
    assert re.findall(r'<figure id="([^"]+)">', page) == ["soft-max-speedup-wall"]


def test_memory_bound(tmp_path):
    case = dataclasses.replace(make_result().cases[0], flop=None, bytes=4.2e6, shape={"rows": 8, "columns": 9})
    results.save(make_result(cases=[case]), tmp_path)
    assert cli.main(["report", "--results", str(tmp_path), "--no-readme"]) == 0
    drawn = (tmp_path / "nvidia-h200" / "report" / "minilm-share.svg").read_text()
    assert "(memory)" in drawn and "1x16 fp16 10%" in drawn  # 4.2 MB at 4.2 TB/s take 1 us, ours 10


def test_complete_results_come_first_and_old_plots_go(tmp_path):
    cases = minilm_result().cases[:1]
    results.save(minilm_result(cases=cases, partial=True), tmp_path)
    results.save(minilm_result(cases=cases), tmp_path)
    folder = tmp_path / "nvidia-h200" / report.FOLDER
    folder.mkdir()
    (folder / "old.svg").write_text("")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:summary --><!-- /bench:summary -->")
    assert cli.main(["report", "--results", str(tmp_path), "--readme", str(readme)]) == 0
    assert "not for publication" not in (folder / "index.html").read_text()
    assert not (folder / "old.svg").exists() and "MiniLM forward pass" in readme.read_text()
    assert [path.name for path in sorted((folder.parent / "plots").iterdir())] == ["minilm-speedup-device.png"]


def test_options(tmp_path, capsys):
    results.save(minilm_result(environment={"device": "NVIDIA L4"}), tmp_path)
    folder = tmp_path / "nvidia-l4" / "report"
    assert cli.main(["report", "--results", str(tmp_path), "--no-readme", "--no-html"]) == 0
    assert not folder.exists()
    readme = tmp_path / "README.md"
    readme.write_text("nothing marked")
    assert cli.main(["report", "--results", str(tmp_path), "--readme", str(readme)]) == 0
    assert "Benchmarks on NVIDIA L4" in (folder / "index.html").read_text()
    assert cli.main(["report", "--results", str(tmp_path), "--no-readme", "--gpu", "nvidia-b200"]) == 1
    assert "no result could be read" in capsys.readouterr().err


def test_corrupt_result_beside_a_good_one(tmp_path, capsys):
    results.save(minilm_result(), tmp_path)
    (tmp_path / "nvidia-h200" / "sts.json").write_text('{"format": "other"}')
    assert cli.main(["report", "--results", str(tmp_path), "--no-readme"]) == 1
    captured = capsys.readouterr()
    assert "sts.json: is not a benchmark result" in captured.err and "index.html" in captured.out


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    results.save(minilm_result(), tmp_path)
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["report", "--results", str(tmp_path), "--no-readme"]) == 0
    said = capsys.readouterr().err
    assert "left out, as matplotlib is not installed" in said and str(tmp_path / "nvidia-h200" / "report") in said
    assert sorted(path.name for path in (tmp_path / "nvidia-h200").iterdir()) == ["README.md", "minilm.json"]


def test_plots_in_the_repository_are_those_of_the_committed_results():
    """Run `python -m bench report` after a new result, or a change to a plot."""
    folder = results.DEFAULT_FOLDER / report.README_GPU
    found, _ = report.load_all(folder)
    drawn = {plot.name: plot.drawing for plot in plots.headlines(found) if plot.name in readme.PLOTS}
    assert drawn.keys() == readme.PLOTS.keys()
    assert drawn == {name: drawing.drawing_of(folder / report.PLOTS / f"{name}.png") for name in drawn}


def test_a_plot_is_drawn_anew_only_where_it_shows_something_else(tmp_path):
    def save(**changes):
        plots.speedup(minilm_result(**changes), "plot", tables.device, "device time").save_png(tmp_path)
        return (tmp_path / "plot.png").read_bytes()

    first = save()
    (tmp_path / "plot.png").unlink()
    assert save() == first  # the same bytes from the same version of matplotlib
    with Image.open(tmp_path / "plot.png") as image:
        said = PngImagePlugin.PngInfo()
        said.add_text(drawing.DRAWING, image.info[drawing.DRAWING])
        image.resize((50, 50)).save(tmp_path / "plot.png", pnginfo=said)  # as another one would draw it
    other = (tmp_path / "plot.png").read_bytes()
    assert save() == other
    cases = minilm_result().cases
    slower = dataclasses.replace(cases[0], entries=[entry("ours", 81.0), *cases[0].entries[1:]])
    assert save(cases=[slower, *cases[1:]]) not in (first, other)
    (tmp_path / "plot.png").write_bytes(b"no picture")
    assert save() == first


def test_kinds_of_what_is_shown_are_told_apart(tmp_path):
    """Ten benchmarks have ten pairs of colour and mark, and each family has one colour everywhere."""
    found, _ = report.load_all(results.DEFAULT_FOLDER / report.README_GPU)
    (overview,) = [plot for plot in plots.headlines(found) if plot.name == "all-roofline"]
    rates = overview.figure.axes[0].lines[1:]
    assert len(rates) >= 9 and len({line.get_color() for line in rates}) == len(rates)
    assert len({line.get_marker() for line in rates}) == len(rates)
    overview.save_png(tmp_path)
    shown = np.unique(np.asarray(Image.open(tmp_path / "all-roofline.png").convert("RGB")).reshape(-1, 3), axis=0)
    for line in rates:  # in the picture, too, whose colours are few
        color = 255 * np.array(colors_of.to_rgb(line.get_color()))
        assert np.min(np.linalg.norm(shown - color, axis=1)) < 12, line.get_label()
    shares = [y for line in overview.figure.axes[1].lines[1:] for y in line.get_ydata()]
    assert len(shares) > 60 and all(0 < share < 103 for share in shares)
    colors = {}
    for plot in plots.headlines(found):
        for axes in plot.figure.axes if "speedup" in plot.name else ():
            for bar, label in zip(*axes.get_legend_handles_labels(), strict=True):
                colors.setdefault(label.partition(" (")[0], set()).add(bar.patches[0].get_facecolor())
    assert {"over the best of all others", "over XLA", "over torch", "over peers"} == colors.keys()
    assert all(len(of) == 1 for of in colors.values()) and len(set.union(*colors.values())) == 4


def test_a_legend_fits_below_its_plot():
    found, _ = report.load_all(results.DEFAULT_FOLDER / report.README_GPU)
    for plot in plots.overview(found):
        plot.figure.draw_without_rendering()
        for legend in plot.figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= plot.figure.bbox.x1, plot.name


def test_pages_are_served(tmp_path):
    """By a process that an interrupt ends, at a free port of this machine."""
    results.save(softmax_result(), tmp_path)
    arguments = ["report", "--results", str(tmp_path), "--no-readme", "--serve", "0"]
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
from bench.__main__ import main
raise SystemExit(main({arguments!r}))
"""
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        try:
            url = next(line.strip() for line in program.stdout if line.startswith("http"))
            assert url.startswith("http://127.0.0.1:") and url.endswith("/report/")
            with urllib.request.urlopen(url) as page:
                assert b"8192x4096" in page.read()
            program.send_signal(signal.SIGINT)
            assert program.wait(30) == 0
        finally:
            program.kill()  # or leaving would wait for it
