"""Writers that are killed at a random moment: what lies under a final name is the older file or the newer one.

A writer runs the program itself in a loop, by turns with two inputs, so that it writes much of the time. It is
killed by SIGKILL, and started anew in the same folder for the next case.
"""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

from parity.campaign._case import Case
from parity.campaign._damage import pick
from parity.campaign._sandbox import ROOT
from parity.weights import checkpoints

MODEL = checkpoints.MiniLMConfig(
    vocab_size=2000, hidden_size=256, num_layers=2, num_heads=4, intermediate_size=1024, max_positions=64
)
LONGEST_S = 0.6  # until the kill, once a writer is in its loop


def _weights(folder: Path) -> Callable[[int], int]:
    from weights.__main__ import main

    other = Path(shutil.copytree(folder / "model", folder / "other", dirs_exist_ok=True))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    (other / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    sources = ((folder / "model", "float16"), (other, "float32"))
    return lambda turn: main(["minilm", str(sources[turn][0]), str(folder / "out"), "--dtype", sources[turn][1]])


def _embed(folder: Path) -> Callable[[int], int]:
    from pallas_models.__main__ import main

    for turn in range(2):
        lines = [f"{word} guitar {turn}" for word in checkpoints.WORDS] * 40
        (folder / f"{turn}.txt").write_text("\n".join(lines[: 400 + turn]))
    options = ["--model", str(folder / "model"), "--output", str(folder / "out" / "embeddings.npy")]
    options += ["--batch-size", "256", "--no-compilation-cache"]
    return lambda turn: main(["embed", str(folder / f"{turn}.txt"), *options])


def _table(folder: Path) -> Callable[[int], int]:
    from pallas_models.tuning import Table, shipped_path

    table = Table.load(shipped_path("NVIDIA H200"))
    other = Table(gpu=table.gpu, entries=table.entries[::2])
    return lambda turn: int((table, other)[turn].save(folder / "out" / "table.json") is not None)


# By name, what makes of a folder a function that writes the input of a turn there.
Writers = Mapping[str, Callable[[Path], Callable[[int], int]]]
WRITERS: Writers = {"weights": _weights, "embed": _embed, "table": _table}
AT_ONCE = ("weights",)  # whose files are replaced together


def _turns(parent: int) -> Iterator[int]:
    """By turns 0 and 1, while the process has that parent: a campaign whose time is up kills no more than that."""
    return itertools.takewhile(lambda _: os.getppid() == parent, itertools.cycle((0, 1)))


def main(writers: Writers, writer: str, folder: Path) -> None:
    """Writes until it or who started it is killed; after a line and a wait once there is a file of each input."""
    parent = os.getppid()
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (folder / "out").mkdir(exist_ok=True)
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        write = writers[writer](folder)
        for turn in (0, 1):
            if write(turn):
                raise SystemExit(f"{writer} fails")
            print(turn, file=say, flush=True)
            if not sys.stdin.readline():
                return
        for turn in _turns(parent):
            write(turn)


@functools.cache
def _folder(writer: str) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=f"campaign-{writer}-")
    checkpoints.write(Path(folder.name, "model"), checkpoints.bert_tensors(MODEL), checkpoints.bert_config(MODEL))
    return folder


def _written(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}


def _same(path: Path, content: bytes, other: bytes | None) -> bool:
    """Whether two files hold the same; the metadata of a safetensors file stands in no order."""
    if content == other or other is None or path.suffix != ".safetensors":
        return content == other
    try:
        found, expected = safetensors.numpy.load(content), safetensors.numpy.load(other)
    except safetensors.SafetensorError:
        return False
    return found.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and np.array_equal(tensor, expected[name])
        for name, tensor in found.items()
    )


def _same_files(left: dict[Path, bytes], files: dict[Path, bytes]) -> bool:
    return left.keys() == files.keys() and all(_same(path, content, files[path]) for path, content in left.items())


def _is_draft(path: Path) -> bool:
    return path.suffix == ".draft" and path.name.startswith(".")


def _wrong(
    path: Path, content: bytes, whole: list[dict[Path, bytes]], sound: Callable[[Path], bool] | None = None
) -> str | None:
    """What is wrong with a file after the kill, given the files of writers that were let alone."""
    if _is_draft(path) or any(_same(path, content, files.get(path)) for files in whole):
        return None
    if sound is not None and sound(path):
        return None
    return f"{path.name} is neither the older nor the newer file ({len(content)} bytes)"


def _kill(writer: str, delay: float, module: str, sound: Callable[[Path], bool] | None) -> str | None:
    """Kills a writer; says what is wrong with the files that it left."""
    folder = Path(_folder(writer).name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, writer, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    whole = []
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for _ in range(2):
                if not process.stdout.readline():
                    return f"{writer} fails"
                whole.append(_written(folder))
                process.stdin.write(b"\n")
                process.stdin.flush()
            time.sleep(delay)
        finally:
            process.kill()
    if drafts := [path.name for files in whole for path in files if _is_draft(path)]:
        return f"{drafts} of a killed writer are left after another one"
    left = _written(folder)
    if writer in AT_ONCE and not any(_same_files(left, files) for files in whole):
        return f"{sorted(path.name for path in left)} are neither the older nor the newer files together"
    if missing := [path.name for path in whole[0] if path not in left and path in whole[1]]:
        return f"{missing} are gone"
    return next(filter(None, (_wrong(path, content, whole, sound) for path, content in left.items())), None)


def kills(seed: int, writers: Writers, module: str, sound: Callable[[Path], bool] | None = None) -> Iterator[Case]:
    """A writer of a module, and a moment; `sound` says whether a file is whole that no other run writes alike."""
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        writer, delay = pick(rng, writers), float(rng.uniform(0, LONGEST_S))
        run = functools.partial(_kill, writer, delay, module, sound)
        yield Case(name=f"{writer} killed after {delay:.3f} s", run=run)


def cases(seed: int) -> Iterator[Case]:
    """Writers of the library that are killed; see the module."""
    return kills(seed, WRITERS, "parity.campaign.kills")


if __name__ == "__main__":
    main(WRITERS, sys.argv[1], Path(sys.argv[2]))
