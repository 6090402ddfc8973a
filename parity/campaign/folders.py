"""Hostile folders: manifests with other values, and compilation caches that others could have written.

They are used in another process, as in `files`. A manifest is continued as it should be, or refused by name; a
cache is passed over where it is not the user's own, and nothing in it runs or leads elsewhere.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pallas_models.__main__ as program
from pallas_models.minilm import Encoder
from parity.campaign._case import Case
from parity.campaign._damage import Rng, changed, damaged, dumps, hostile, pick
from parity.campaign._sandbox import Sandbox
from parity.weights import checkpoints

DTYPES = ("float32", "int8")
MODEL = checkpoints.MiniLMConfig(
    vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=16
)
SENTENCES = [" ".join(checkpoints.WORDS[i : i + 1 + i % 4]) for i in range(11)]
CLEAR = ()  # what programs and the encoder are given here they answer without an exception
STRANGER = 12345  # a user who owns nothing here


def _embed(folder: Path, output: Path, dtype: str, *options: str) -> tuple[int, str]:
    """The exit code of embedding the sentences to a folder, and its output."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = program.main(
            [
                *("embed", str(folder / "sentences.txt"), "--model", str(folder / "model")),
                *(
                    "--output",
                    f"{output}/",
                    "--shard-size",
                    "4",
                    "--dtype",
                    dtype,
                    "--no-compilation-cache",
                    *options,
                ),
            ]
        )
    return code, said.getvalue()


@functools.cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """A model, sentences, folders of their embeddings in each dtype, and a cache with a program."""
    made = tempfile.TemporaryDirectory(prefix="campaign-")
    folder = Path(made.name)
    checkpoints.write(folder / "model", checkpoints.bert_tensors(MODEL), checkpoints.bert_config(MODEL))
    (folder / "sentences.txt").write_text("\n".join(SENTENCES))
    for dtype in DTYPES:
        code, said = _embed(folder, folder / dtype, dtype)
        if code:
            raise AssertionError(f"embed ends with {code}: {said}")
    _encode(folder / "model", folder / "cache")
    return made


def _encode(model: Path, cache: Path) -> tuple[np.ndarray, str]:
    """The embedding of a sentence by an encoder with that cache, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Encoder.from_pretrained(model, implementation="xla", compilation_cache=cache).encode(SENTENCES[0])
    return found, "; ".join(str(warning.message) for warning in caught)


@functools.cache
def _expected() -> np.ndarray:
    return _encode(Path(_made().name, "model"), Path(_made().name, "cache"))[0]


# How a manifest is changed


def change_manifest(rng: Rng, folder: Path) -> str:
    """Changes the manifest of a folder, and at times takes a shard away; says how."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    kind = pick(rng, ("value", "value", "field", "bytes"))
    if kind == "field":  # one at the top is another kind of thing
        name = pick(rng, list(manifest))
        manifest[name] = hostile(rng, manifest[name])
        content, what = dumps(manifest).encode(), f"{name} = {manifest[name]!s:.40}"
    elif kind == "value":
        value, what = changed(rng, manifest)
        content = dumps(value).encode()
    else:
        content, what = damaged(rng, path.read_bytes())
    path.write_bytes(content)
    if rng.random() < 0.3:
        shard = pick(rng, sorted(folder.glob("0*")))
        shard.unlink()
        what += f", without {shard.name}"
    return what


def change_ranges(rng: Rng, folder: Path) -> str:
    """Changes the ranges in the manifest of a folder; says how."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    if rng.random() < 0.4:  # one number of them
        row, column = int(rng.integers(2)), int(rng.integers(MODEL.hidden_size))
        manifest["ranges"][row][column] = value = hostile(rng, manifest["ranges"][row][column])
        what = f"ranges.{row}.{column} = {value!s:.40}"
    elif rng.random() < 0.5:
        scale = pick(rng, (1e30, 1e-30, -1.0, math.inf, math.nan, 1e38))
        manifest["ranges"] = (np.array(manifest["ranges"]) * scale).tolist()
        what = f"ranges times {scale}"
    else:
        manifest["ranges"], what = changed(rng, manifest["ranges"])
    path.write_text(dumps(manifest))
    return what


def _continue(output: Path, dtype: str) -> str | None:
    """Continues a folder of embeddings; says what is wrong with the outcome."""
    made = Path(_made().name)
    code, said = _embed(made, output, dtype)
    if code:
        return _unclear(code, said, output)
    expected = [np.load(path) for path in sorted((made / dtype).glob("0*.npy"))]
    found = [np.load(path) for path in sorted(output.glob("0*.npy"))]
    if [x.shape for x in found] != [x.shape for x in expected]:
        return f"files of shapes {[x.shape for x in found]}"
    listed = json.loads((output / "manifest.json").read_text())
    if [(s["file"], s["sentences"]) for s in listed["shards"]] != [
        (f"{i:06d}.npy", len(x)) for i, x in enumerate(expected)
    ]:
        return f"a manifest of {listed['shards']!s:.200}"
    if dtype == "float32" and not np.allclose(np.concatenate(found), np.concatenate(expected), atol=1e-5):
        return "other embeddings"
    return _unsound(listed["ranges"]) if dtype == "int8" else None


def _take_ranges(given: Path) -> str | None:
    """Embeds with the ranges of another folder; says what is wrong with the outcome."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as output:
        code, said = _embed(Path(_made().name), Path(output), "int8", "--ranges", str(given))
        if code:
            return _unclear(code, said, given)
        return _unsound(json.loads(Path(output, "manifest.json").read_text())["ranges"])


def _unclear(code: int, said: str, path: Path) -> str | None:
    if code != 1 or said.count("\n") != 1 or str(path) not in said:
        return f"code {code}, and no line that names {path.name}: {said:.300}"
    return None


def _unsound(ranges: Any) -> str | None:
    """What is wrong with ranges that were used."""
    try:
        low, high = np.asarray(ranges, np.float64)
    except (TypeError, ValueError):
        return f"took ranges {ranges!s:.60}"
    if low.shape != (MODEL.hidden_size,) or not np.all(np.abs([low, high]) <= 65504) or np.any(low > high):
        return f"took ranges from {low.min():g} to {high.max():g}"
    return None


# How a cache is made


class _Marks:
    """Pickled, a program of somebody else: it leaves a mark where it runs."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def _plant(path: Path, mark: Path) -> None:
    payload = pickle.dumps((_Marks(mark), None, None))
    path.write_bytes(hashlib.sha256(payload).digest() + payload)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.executable"))


def _planted(folder: Path, mark: Path) -> None:
    for path in _entries(folder):
        _plant(path, mark)


def _of_others(rng: Rng, folder: Path, mark: Path) -> str:
    """Programs in a folder, or files, that others could have written."""
    _planted(folder, mark)
    kinds = ["folder for all", "folder for the group", "file for all", "file for the group"]
    kinds += ["stranger's folder", "stranger's file"] if os.geteuid() == 0 else []
    kind = pick(rng, kinds)
    places = _entries(folder) if "file" in kind else [folder]
    for place in places:
        if "stranger" in kind:
            os.chown(place, STRANGER, STRANGER)
        else:
            place.chmod(place.stat().st_mode | (0o002 if "all" in kind else 0o020))
    return kind


def _of_links(rng: Rng, folder: Path, mark: Path) -> str:
    """Links under the names of entries, to a file that is not to be touched or to one that marks."""
    victim = folder.parent / "victim"
    kind = pick(rng, ("to a file", "to nothing", "to a planted file", "to a folder"))
    for path in _entries(folder):
        path.unlink()
        if kind == "to a folder":
            victim.mkdir(exist_ok=True)
        elif kind != "to nothing":
            victim.write_bytes(b"of somebody else")
            if kind == "to a planted file":
                _plant(victim, mark)
                victim.chmod(0o666)
        path.symlink_to(victim)
    return f"links {kind}"


def _of_another_kind(rng: Rng, folder: Path, mark: Path) -> str:
    """Something else where an entry or the folder should be, or a damaged entry."""
    kind = pick(rng, ("damaged", "damaged", "folder", "pipe", "empty", "no folder", "without permission"))
    for path in _entries(folder):
        content = path.read_bytes()
        path.unlink()
        if kind == "damaged":
            path.write_bytes(damaged(rng, content)[0])
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path, 0o600)
        elif kind == "without permission":
            path.write_bytes(content)
            path.chmod(0)
        elif kind == "empty":
            path.write_bytes(b"")
    if kind == "no folder":
        shutil.rmtree(folder)
        folder.write_text("a file")
    return f"entries: {kind}"


CACHES: dict[Callable[[Rng, Path, Path], str], float] = {_of_others: 0.45, _of_links: 0.3, _of_another_kind: 0.25}


def change_cache(rng: Rng, folder: Path) -> str:
    """Makes a cache hostile; says how."""
    kinds = list(CACHES)
    return kinds[rng.choice(len(kinds), p=list(CACHES.values()))](rng, folder, folder.parent / "mark")


CHANGES = {"manifest": change_manifest, "ranges": change_ranges, "cache": change_cache}


def _use_cache(folder: Path) -> str | None:
    """Encodes with a cache; says what is wrong with the outcome."""
    made, victim = Path(_made().name), folder.parent / "victim"
    before = victim.read_bytes() if victim.is_file() else None
    found, warned = _encode(made / "model", folder)
    if (folder.parent / "mark").exists():
        return "a program of somebody else ran"
    if (victim.read_bytes() if victim.is_file() else None) != before or (
        victim.is_dir() and any(victim.iterdir())
    ):
        return "a file elsewhere was written"
    return None if np.allclose(found, _expected(), atol=1e-5) else f"another embedding; {warned:.200}"


def attempt(request: dict[str, Any]) -> str | None:
    """Makes the hostile folder that a request describes, and uses it; says what is wrong with the outcome."""
    rng, kind, dtype = np.random.default_rng(request["seed"]), request["kind"], request["dtype"]
    folder = Path(request["path"]) / "folder"
    shutil.copytree(Path(_made().name, "cache" if kind == "cache" else dtype), folder)
    what = CHANGES[kind](rng, folder)
    wrong = (
        _use_cache(folder)
        if kind == "cache"
        else _continue(folder, dtype)
        if kind == "manifest"
        else _take_ranges(folder)
    )
    return wrong and f"{what}: {wrong}"


def warm_up() -> None:
    """Makes all that is copied, and uses it once as it is."""
    for dtype in DTYPES:
        if wrong := _continue(Path(_made().name, dtype), dtype):
            raise AssertionError(f"{dtype}: {wrong}, as it is")
    if wrong := _take_ranges(Path(_made().name, "int8")):
        raise AssertionError(f"{wrong}, as it is")
    if not _entries(Path(_made().name, "cache")):
        raise AssertionError("nothing is kept")
    _expected()


_sandbox = Sandbox(__name__)


def _run(seed: int, number: int, kind: str, dtype: str) -> str | None:
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        request = {
            "path": name,
            "kind": kind,
            "dtype": dtype,
            "seed": [seed, number, 1],
            "size": 1 << 20,
            "named": [name],
        }
        return _sandbox.ask(request)


def cases(seed: int) -> Iterator[Case]:
    """Folders that are hostile in a way each."""
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        kind, dtype = pick(rng, CHANGES), pick(rng, DTYPES)
        dtype = "int8" if kind == "ranges" else dtype
        run = functools.partial(_run, seed, number, kind, dtype)
        yield Case(name=f"a hostile {kind}" + ("" if kind == "cache" else f" of {dtype}"), run=run)
