"""Damaged results of benchmarks: `report` and `compare` use them, leave them out or refuse them by name."""

import contextlib
import gzip
import io
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench.__main__ as benchmarks
from bench.measuring.results import ResultError
from parity import ROOT
from parity.campaign._case import Case
from parity.campaign._damage import Rng, changed_text, damaged_files, pick
from parity.campaign._sandbox import Sandbox

RESULTS = ROOT / "bench" / "results" / "nvidia-h200"
MARKUP = "<script>alert(1)</script>\n# Heading\n\n| a | [b](javascript:c) |\x1b[31m"
KINDS = ("result", "markup")
CLEAR = (ResultError,)


def change(rng: Rng, kind: str, folder: Path) -> str:
    """Writes a damaged result into the folder; says how it is damaged."""
    name = pick(rng, ("gemm", "sts", "startup", "softmax"))
    path = folder / "results" / "nvidia-h200" / f"{name}.json"
    original = _committed(name)
    content, what = _with_markup(rng, original) if kind == "markup" else changed_text(rng, original)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"{path.name}: {what}"


def _committed(name: str) -> bytes:
    """The result file of a benchmark."""
    return gzip.decompress((RESULTS / f"{name}.json.gz").read_bytes())


def _with_markup(rng: Rng, content: bytes) -> tuple[bytes, str]:
    """A result in which some texts, all of them at times, hold markup."""
    share = pick(rng, (0.01, 0.1, 1.0))
    enums = {"pallas_models.bench", "ok", "ours", "xla", "torch", "peer", "ladder", "skipped", "failed", "wrong"}

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: visit(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [visit(inner) for inner in value]
        return MARKUP if isinstance(value, str) and value not in enums and rng.random() < share else value

    return json.dumps(visit(json.loads(content))).encode(), f"markup in {share:.0%} of its texts"


def attempt(request: dict[str, Any]) -> str | None:
    """Uses the file that a request names as programs do; says what is wrong with the outcome."""
    return _report(Path(request["path"]), marked=request["kind"] == "markup")


def _report(folder: Path, *, marked: bool) -> str | None:
    readme, results = folder / "README.md", folder / "results"
    readme.write_text("before\n<!-- bench:summary -->\n<!-- /bench:summary -->\nafter\n")
    (result,) = results.rglob("*.json")
    (folder / "other.json").write_bytes(_committed("sts"))
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        code = benchmarks.main(["report", "--results", str(results), "--readme", str(readme), "--no-html"])
        compared = benchmarks.main(["compare", str(result), str(folder / "other.json")])
    if code not in (0, 1) or compared not in (0, 2):
        return f"code {code} of report, {compared} of compare"
    if code == 1 and str(result) not in said.getvalue():
        return f"names no file: {said.getvalue():.200}"
    if "\x1b" in shown.getvalue() + said.getvalue():
        return "control characters of a file on the terminal"
    for page in (readme, results / "nvidia-h200" / "README.md"):
        text = page.read_text() if page.exists() else ""
        outside = re.sub(r"<!-- /?bench:summary -->", "", text)
        if marked and (re.search(r"<\w", outside) or re.search("^# Heading", text, re.MULTILINE)):
            return f"markup of a result in {page.name}"
    return None


def warm_up() -> None:
    """Uses a result as it is."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "results", "nvidia-h200")
        folder.mkdir(parents=True)
        (folder / "sts.json").write_bytes(_committed("sts"))
        if wrong := attempt({"path": root, "kind": "result"}):
            raise AssertionError(f"{wrong}, as it is")


_sandbox = Sandbox(__name__)


def cases(seed: int) -> Iterator[Case]:
    """Results with a damage each."""
    return damaged_files(seed, KINDS, change, _sandbox)
