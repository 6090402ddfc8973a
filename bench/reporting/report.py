"""Turns result files into pages and a CSV file: Markdown and HTML for each GPU, the summary table of README.md."""

import argparse
import contextlib
import functools
import http.server
import importlib.util
import os
import sys
from pathlib import Path

from bench.__main__ import BENCHMARKS
from bench.measuring import results
from bench.measuring.results import Result
from bench.reporting import readme, reasons, sheet, tables
from bench.reporting.reasons import ReasonError, Reasons
from pallas_models import files

HELP = "make pages with tables and plots from the results, and the summary in README.md"

README = Path(__file__).parents[2] / "README.md"
README_GPU = "nvidia-h200"
FOLDER = "report"  # of the HTML page, beside the results that it is made from; not tracked by git
PLOTS = "plots"  # of those plots that Markdown files show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench report`."""
    parser.add_argument("--results", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--gpu", help=f"folder of a GPU in it; all of them, the summary from {README_GPU}")
    parser.add_argument("--readme", type=Path, default=README, help="file whose marked summary is rewritten")
    parser.add_argument("--no-readme", action="store_true", help="leave that file as it is")
    parser.add_argument("--no-html", action="store_true", help="make no HTML page and draw nothing")
    parser.add_argument(
        "--serve", type=int, nargs="?", const=8000, metavar="PORT", help="show the pages at this port; 8000"
    )


def load_all(folder: Path) -> tuple[list[Result], bool]:
    """Reads the results of a GPU: of each benchmark the complete one, else the partial one.

    Returns:
      The results by name of the benchmark, and whether a file could not be used; which one is printed.
    """
    found: dict[str, Result] = {}
    failed = False
    for path in sorted(results.stored(folder.parent, folder.name), key=lambda path: ".partial." in path.name):
        try:
            result = results.load(path)
        except results.ResultError as error:
            print(error, file=sys.stderr)
            failed = True
        else:
            found.setdefault(result.benchmark, result)
    return [found[name] for name in sorted(found)], failed


def load_reasons(complete: list[Result], folder: Path) -> tuple[Reasons, bool]:
    """Why ours is the slower in some rows, and whether that could be read; prints which of it is out of date."""
    try:
        found = reasons.load(folder)
    except ReasonError as error:
        print(error, file=sys.stderr)
        return {}, False
    slower = {result.benchmark: readme.slower(result) for result in complete}
    for row in reasons.unused(found, slower):
        print(f"{folder / reasons.NAME}: ours is not the slower in {', '.join(row)}", file=sys.stderr)
    return found, True


def write_markdown(complete: list[Result], folder: Path, why: Reasons) -> bool:
    """Writes the Markdown page of a GPU from its complete results; returns whether it could be written."""
    path = folder / readme.NAME
    try:
        there = [name for name in readme.PLOTS if (folder / PLOTS / f"{name}.png").is_file()]
        files.write(path, readme.page(complete, there, why))
    except OSError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return False
    print(f"wrote {path}")
    return True


def write_readme(path: Path, complete: list[Result], folder: Path) -> bool:
    """Rewrites the summary in README.md; returns whether that could be done."""
    for name in BENCHMARKS:
        if name not in {result.benchmark for result in complete}:
            print(f"{folder / name}.json: no complete result; run `python -m bench {name}` on that GPU")
    page = folder / readme.NAME
    try:
        if f"<!-- bench:{readme.SUMMARY} -->" not in path.read_text(encoding="utf-8"):
            print(f"{path}: has no <!-- bench:{readme.SUMMARY} -->")
        elif complete:
            link = os.path.relpath(page, path.parent)
            readme.rewrite(path, complete, Path(link).as_posix())
            print(f"wrote the summary in {path}")
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return False
    return True


def write_sheet(complete: list[Result], folder: Path) -> bool:
    """Writes the CSV file of all GPUs; returns whether it could be written."""
    path = folder / sheet.NAME
    try:
        files.write(path, sheet.text(complete))
    except OSError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return False
    print(f"wrote {path}")
    return True


def write_html(found: list[Result], complete: list[Result], folder: Path, why: Reasons) -> bool:
    """Writes the HTML page of a GPU and the plots of Markdown files; returns whether that could be done.

    Without matplotlib they are left out, which is said.
    """
    if importlib.util.find_spec("matplotlib") is None:
        left_out = f"{folder / FOLDER}, and new plots"
        print(f"left out, as matplotlib is not installed: {left_out}; pip install '.[bench]'", file=sys.stderr)
        return True
    from bench.reporting import page, plots

    try:
        summaries = [
            "\n\n".join(
                filter(None, [tables.full(r, readme.own_tables(r)), reasons.listed(r, readme.slower(r), why)])
            )
            for r in found
        ]
        print(f"wrote {page.write(found, summaries, folder / FOLDER)}")
        shown = [plot for plot in plots.headlines(complete) if plot.name in readme.PLOTS]
        if shown:
            (folder / PLOTS).mkdir(exist_ok=True)
        for plot in shown:
            plot.save_png(folder / PLOTS)
    except OSError as error:
        print(f"{folder / FOLDER}: {error}", file=sys.stderr)
        return False
    return True


def run(args: argparse.Namespace) -> int:
    """Writes tables and pages; returns 1 if a file could not be used or written or there is no result at all."""
    readme_gpu = args.gpu or README_GPU
    gpus = [args.gpu] if args.gpu else sorted({readme_gpu, *(p.parent.name for p in results.stored(args.results))})
    good, any_result, every = True, False, list[Result]()
    for gpu in gpus:
        folder = args.results / gpu
        found, failed = load_all(folder)
        complete = [result for result in found if not result.partial]
        good &= not failed
        every += complete
        any_result |= bool(found)
        why, readable = load_reasons(complete, folder)
        good &= readable
        if found and not args.no_html:
            good &= write_html(found, complete, folder, why)
        if complete:
            good &= write_markdown(complete, folder, why)
        if gpu == readme_gpu and not args.no_readme:
            good &= write_readme(args.readme, complete, folder)
    if every and not args.gpu:
        good &= write_sheet(every, args.results)
    if not any_result:
        print(f"no result could be read under {args.results}", file=sys.stderr)
    elif args.serve is not None:
        serve(args.results, args.serve)
    return int(not (good and any_result))


def serve(folder: Path, port: int) -> None:
    """Shows the HTML pages under a folder to browsers of this machine, until an interrupt."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        for page in sorted(folder.glob(f"*/{FOLDER}/index.html")):
            path = page.relative_to(folder).parent.as_posix()
            print(f"http://127.0.0.1:{server.server_port}/{path}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Prints no line for each file that is asked for."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args
