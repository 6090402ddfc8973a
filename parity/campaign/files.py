"""Damaged tuning tables, benchmark results and texts: each is used, left out or refused by name."""

import contextlib
import dataclasses
import functools
import gzip
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bench.__main__ as benchmarks
import pallas_models.__main__ as program
from bench.measuring.results import ResultError
from pallas_models import target, tuning
from pallas_models.kernels.mosaic import attention as mosaic_attention
from pallas_models.kernels.mosaic.common import gemm_config
from pallas_models.kernels.triton import attention, matmul, norm, softmax
from parity.campaign._case import Case
from parity.campaign._damage import Rng, changed_text, damaged, pick
from parity.campaign._sandbox import ROOT, Sandbox
from parity.weights import checkpoints

GPU = "NVIDIA H200"
TABLE = ROOT / "pallas_models" / "tuning" / "tables" / "nvidia-h200.json"
RESULTS = ROOT / "bench" / "results" / "nvidia-h200"
MARKUP = "<script>alert(1)</script>\n# Heading\n\n| a | [b](javascript:c) |\x1b[31m"
LARGEST = 1 << 16  # no field of a config is above it
KINDS = ("table", "table", "result", "result", "markup", "sentences")
CLEAR = (ResultError, tuning.TableError)


def change(rng: Rng, kind: str, folder: Path) -> str:
    """Writes a damaged file of a kind into the folder; says how it is damaged."""
    if kind == "table":
        path = folder / "pallas_models" / "tuning" / TABLE.name
        content, what = changed_text(rng, _few_entries(rng))
    elif kind == "sentences":
        path = folder / "sentences.txt"
        content, what = damaged(rng, "a man\n\nÜber die Gitarre\nsmörgås 今日\n".encode() * 3)
    else:
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


def _few_entries(rng: Rng) -> bytes:
    """The shipped table, cut to some entries, so that what is changed is most often one that matters."""
    table = json.loads(TABLE.read_text())
    table["entries"] = [pick(rng, table["entries"]) for _ in range(3)]
    return json.dumps(table).encode()


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
    """Uses the file that a request names as programs do; says what is wrong with what they made of it."""
    folder = Path(request["path"])
    if request["kind"] == "table":
        return _use_table(folder)
    if request["kind"] == "sentences":
        return _embed(folder, request["model"])
    return _report(folder, marked=request["kind"] == "markup")


def _use_table(folder: Path) -> str | None:
    classes: dict[tuple[str, str], Any] = {
        ("triton", "matmul"): matmul.Config,
        ("triton", "attention"): attention.Config,
        ("triton", "layer_norm"): norm.Config,
        ("triton", "softmax_fused"): softmax.Config,
        ("mosaic", "matmul"): gemm_config.Config,
        ("mosaic", "gated_matmul"): gemm_config.Config,
        ("mosaic", "attention"): mosaic_attention.Config,
    }
    os.environ["XDG_CACHE_HOME"] = str(folder)
    gpu = target.Target(name=GPU, capability=(9, 0), num_cores=132, shared_memory=232_448)
    path = tuning.cache_path(GPU)
    for entry in tuning.Table.load(TABLE).entries:
        if (entry.backend, entry.op) in classes:
            problem = tuning.Problem(
                backend=entry.backend, op=entry.op, shape=entry.shape, bucketed=entry.bucketed, dtype=entry.dtype,
                config=classes[entry.backend, entry.op], heuristic=lambda: None, candidates=tuple,
            )  # fmt: skip
            if wrong := _choose(problem, gpu):
                return wrong
    try:
        tuning.Table.load(path)
    except tuning.TableError as error:
        if str(path) not in str(error):
            return f"names no file: {error}"
    return None


def _choose(problem: Any, gpu: Any) -> str | None:
    """What is wrong with the config that a problem gets; whatever is raised here is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = tuning.choose(None, problem, gpu)
        except Exception as error:
            return f"{type(error).__name__} from choose: {error!s:.200}"
    for field in dataclasses.fields(config) if config is not None else ():
        value = getattr(config, field.name)
        if type(value) is not field.type or not (value is False or 1 <= value <= LARGEST):
            return f"a config with {field.name} = {value!r:.60}"
    return None


def _embed(folder: Path, model: str) -> str | None:
    path, output, said = folder / "sentences.txt", folder / "out.npy", io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = program.main(["embed", str(path), "--model", model, "--output", str(output)])
    try:
        lines = len(re.findall(r".*?(?:\r\n|\r|\n)|.+$", path.read_bytes().decode(), re.DOTALL))
    except UnicodeDecodeError:
        return None if code == 1 and str(path) in said.getvalue() else f"code {code}: {said.getvalue():.200}"
    if code or np.load(output).shape[0] != lines:
        return f"code {code} for {lines} lines: {said.getvalue():.200}"
    return None


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
    """Uses every kind of file once as it is."""
    with tempfile.TemporaryDirectory() as root:
        model = checkpoints.write(Path(root, "model"))
        for kind in dict.fromkeys(KINDS):
            folder = Path(root, kind)
            if kind == "sentences":
                folder.mkdir()
                (folder / "sentences.txt").write_text("a man\n\nthe guitar")
            elif kind == "table":
                (folder / "pallas_models" / "tuning").mkdir(parents=True)
                shutil.copy(TABLE, folder / "pallas_models" / "tuning")
            else:
                (folder / "results" / "nvidia-h200").mkdir(parents=True)
                (folder / "results" / "nvidia-h200" / "sts.json").write_bytes(_committed("sts"))
            if wrong := attempt({"path": str(folder), "kind": kind, "model": str(model)}):
                raise AssertionError(f"{kind}: {wrong}, as it is")


_sandbox = Sandbox(__name__)


@functools.cache
def _model() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="campaign-")
    checkpoints.write(Path(folder.name))
    return folder


def _run(seed: int, number: int, kind: str) -> str | None:
    rng = np.random.default_rng([seed, number, 1])
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        what = change(rng, kind, Path(name))
        size = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
        wrong = _sandbox.ask({"path": name, "kind": kind, "size": size, "named": [name], "model": _model().name})
        return wrong and f"{what}: {wrong}"


def cases(seed: int) -> Iterator[Case]:
    """Files with a damage each."""
    for number in itertools.count():
        kind = pick(np.random.default_rng([seed, number]), KINDS)
        yield Case(name=f"a damaged file: {kind}", run=functools.partial(_run, seed, number, kind))
