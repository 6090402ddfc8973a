"""What mkdocs does not do by itself: pages outside of docs/, notebooks, and links as GitHub reads them."""

import functools
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

from bench.measuring import results
from bench.reporting import interactive, readme

ROOT = Path(__file__).parents[1]
OUTSIDE = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/NOTES.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("bench/results/*/**/*"))),
]
# Where the site has what README.md and sources say on GitHub.
ELSEWHERE = {
    "README.md": "docs/index.md",
    "docs": "docs/index.md",
    "pallas_models/target.py": "docs/reference/machine.md",
    "pallas_models/tuning/__init__.py": "docs/reference/machine.md",
}
# Of a table's row: figures that belong together, broken otherwise after the hyphen of an arrow and at slashes.
FIGURES = re.compile(r"(?<=\d) (->|/) (?=[\d*])")
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")
GPU = "nvidia-h200"  # of the plots that a reader can ask
SUMMARY = re.compile(r"<!-- bench:summary -->\n(.*?)<!-- /bench:summary -->", re.DOTALL)


def on_files(files, config):
    """Adds the pages and pictures outside of docs/ by their paths from the root, and takes notebooks for pages."""
    for name in OUTSIDE:
        if name.endswith((".md", ".png", ".json")):
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "assets/plotly.min.js", abs_src_path=str(interactive.script())))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(_Notebook(file.src_uri, config))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri if page.file.src_uri in OUTSIDE else f"docs/{page.file.src_uri}"
    if page.file.src_uri == "benchmarks.md":
        summary = SUMMARY.search((ROOT / "README.md").read_text("utf-8"))[1]
        markdown = markdown.replace("<!-- summary -->", summary.replace("](bench/", "](../bench/"))
    if page.file.src_uri == "explore.md":
        markdown = markdown.replace("<!-- plots -->", _placeholders())
    lines = [_unbroken(line) if line.startswith("|") else line for line in markdown.splitlines()]
    return LINK.sub(lambda link: _link(link, here, files), "\n".join(lines))


def on_page_content(html, page, config, files):
    """Puts plots where the page has their names, behind Markdown, which would change their code."""
    if page.file.src_uri != "explore.md":
        return html
    for name, (_, plot) in _plotted().items():
        html = html.replace(f"<!-- {name} -->", plot)
    return '<script src="../assets/plotly.min.js"></script>\n' + html


def _placeholders():
    return "\n\n".join(f"## {title}\n\n<!-- {name} -->" for name, (title, _) in _plotted().items())


@functools.cache
def _plotted():
    """Title and plot of each benchmark that has one, by name."""
    found = readme.in_order([results.load(path) for path in results.stored(results.DEFAULT_FOLDER, GPU)])
    plots = {result.benchmark: interactive.fragment(result) for result in found if not result.partial}
    return {name: (readme.title(name), plot) for name, plot in plots.items() if plot}


class _Notebook(File):
    """A page of a notebook's cells: text as it is, code and what it printed in fences."""

    def __init__(self, name, config):
        super().__init__(name, config.docs_dir, config.site_dir, config.use_directory_urls)

    def is_documentation_page(self):
        return True

    @property
    def content_string(self):
        return "\n\n".join(map(_markdown, json.loads(Path(self.abs_src_path).read_text("utf-8"))["cells"]))


def _markdown(cell):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    printed = "".join(line for output in cell["outputs"] for line in output["text"])
    return f"```python\n{source}\n```\n" + (f"\n```{{ .text .printed }}\n{printed}```\n" if printed else "")


def _unbroken(row):
    return FIGURES.sub(lambda sign: {"->": "&nbsp;→ ", "/": "&nbsp;/&nbsp;"}[sign[1]], row)


def _link(link, here, files):
    """A link between files of the repository, as one between pages of the site."""
    opening, path, anchor, closing = link.groups(default="")
    if not path or "://" in path:
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if target in ELSEWHERE:
        target, anchor = ELSEWHERE[target], ""
    page = target.removeprefix("docs/")
    if files.get_file_from_path(page) is None:
        return link[0]
    start = posixpath.dirname(here if here in OUTSIDE else here.removeprefix("docs/"))
    return f"{opening}{posixpath.relpath(page, start or '.')}{anchor}{closing}"
