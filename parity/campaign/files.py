"""Damaged tuning tables and texts: each is used, left out or refused by name."""

import contextlib
import dataclasses
import functools
import io
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

import pallas_models.__main__ as program
from pallas_models import target, tuning
from pallas_models.kernels.mosaic import attention as mosaic_attention
from pallas_models.kernels.mosaic.common import gemm_config
from pallas_models.kernels.triton import attention, matmul, norm, softmax
from parity import ROOT
from parity.campaign._case import Case
from parity.campaign._damage import Rng, changed_text, damaged, damaged_files, pick
from parity.campaign._sandbox import Sandbox
from parity.weights import checkpoints

GPU = "NVIDIA H200"
TABLE = ROOT / "pallas_models" / "tuning" / "tables" / "nvidia-h200.json"
LARGEST = 1 << 16  # no field of a config is above it
KINDS = ("table", "table", "sentences")
CLEAR = (tuning.TableError,)


def change(rng: Rng, kind: str, folder: Path) -> str:
    """Writes a damaged file of a kind into the folder; says how it is damaged."""
    if kind == "table":
        path = folder / "pallas_models" / "tuning" / TABLE.name
        content, what = changed_text(rng, _few_entries(rng))
    else:
        path = folder / "sentences.txt"
        content, what = damaged(rng, "a man\n\nÜber die Gitarre\nsmörgås 今日\n".encode() * 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"{path.name}: {what}"


def _few_entries(rng: Rng) -> bytes:
    """The shipped table, cut to some entries, so that a change most often hits one that matters."""
    table = json.loads(TABLE.read_text())
    table["entries"] = [pick(rng, table["entries"]) for _ in range(3)]
    return json.dumps(table).encode()


def attempt(request: dict[str, Any]) -> str | None:
    """Uses the file that a request names as programs do; says what is wrong with the outcome."""
    folder = Path(request["path"])
    if request["kind"] == "table":
        return _use_table(folder)
    return _embed(folder, request["model"])


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
    """What is wrong with the config that a problem gets; any exception is."""
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


def warm_up() -> None:
    """Uses every kind of file once as it is."""
    with tempfile.TemporaryDirectory() as root:
        model = checkpoints.write(Path(root, "model"))
        for kind in dict.fromkeys(KINDS):
            folder = Path(root, kind)
            if kind == "sentences":
                folder.mkdir()
                (folder / "sentences.txt").write_text("a man\n\nthe guitar")
            else:
                (folder / "pallas_models" / "tuning").mkdir(parents=True)
                shutil.copy(TABLE, folder / "pallas_models" / "tuning")
            if wrong := attempt({"path": str(folder), "kind": kind, "model": str(model)}):
                raise AssertionError(f"{kind}: {wrong}, as it is")


_sandbox = Sandbox(__name__)


@functools.cache
def _model() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="campaign-")
    checkpoints.write(Path(folder.name))
    return folder


def cases(seed: int) -> Iterator[Case]:
    """Files with a damage each."""
    return damaged_files(seed, KINDS, change, _sandbox, lambda: {"model": _model().name})
