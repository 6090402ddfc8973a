"""Jobs that embed to a folder: two at once, or one that SIGINT or SIGTERM ends at a random moment.

What a folder holds afterwards, after the same command once more where a job was ended, is what one alone leaves,
to the byte. A process that has imported all that is needed forks for each job, which goes on as the program does.
"""

import atexit
import functools
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from parity.campaign._case import Case
from parity.campaign._damage import Rng, pick
from parity.campaign._sandbox import ROOT
from parity.weights import checkpoints

MODEL = checkpoints.MiniLMConfig(
    vocab_size=200, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128, max_positions=32
)
LONGEST_S = 1.2  # that a job takes from its start, about
APART_S = 0.05  # between the starts of two jobs
PATIENCE_S = 60.0
SHARD = 16  # sentences of a file
# Exit codes of a job that a signal ends are, to a shell, 128 and the signal; to Python it is then -2 or -15, too.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNWANTED = ("Traceback", "FATAL", "Fatal", "terminate called", "Exception ignored", "core dumped")
# What jobs differ in; of two that are alike none disturbs the other.
VARIANTS: dict[str, tuple[str, ...]] = {
    "one": ("0.txt", "model"),
    "other sentences": ("1.txt", "model"),
    "another model": ("0.txt", "other"),
    "another dtype": ("0.txt", "model", "--dtype", "float16"),
    "bits": ("0.txt", "model", "--dtype", "ubinary"),
    "a prompt": ("0.txt", "model", "--prompt", "the "),
    "fewer dimensions": ("0.txt", "model", "--truncate-dim", "8"),
    "another format": ("0.txt", "model", "--format", "safetensors"),
    "longer files": ("0.txt", "model", "--shard-size", "40"),
}


@functools.cache
def _made() -> tempfile.TemporaryDirectory[str]:
    """Sentences, two models, and a cache of compiled programs."""
    made = tempfile.TemporaryDirectory(prefix="campaign-")
    folder = Path(made.name)
    for seed, name in enumerate(("model", "other")):
        checkpoints.write(folder / name, checkpoints.bert_tensors(MODEL, seed), checkpoints.bert_config(MODEL))
    for turn in range(2):
        lines = [f"{word} guitar {'slowly ' * turn}" for word in checkpoints.WORDS] * 12
        (folder / f"{turn}.txt").write_text("\n".join(lines[: 150 + turn]))
    return made


def arguments(variant: str, output: Path, *, cached: bool = True) -> list[str]:
    """The command line of a job."""
    folder, (sentences, model, *options) = Path(_made().name), VARIANTS[variant]
    cache = ["--compilation-cache", str(folder / "cache")] if cached else ["--no-compilation-cache"]
    given = ["embed", str(folder / sentences), "--model", str(folder / model), "--output", f"{output}/"]
    return [*given, "--shard-size", str(SHARD), "--implementation", "xla", *cache, *options]


class Jobs:
    """A process that forks for each job."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            cwd=ROOT, env=environment, text=True,
        )  # fmt: skip
        atexit.register(self._process.kill)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def start(self, given: list[str], said: Path) -> int:
        """Starts a job that writes to a file what it says; returns its process id, which holds until `ended`."""
        return int(self._ask({"start": given, "said": str(said)}))

    def ended(self, process: int) -> int | None:
        """The exit code of a job, negative if a signal ended it; None where it does not end, and is killed."""
        code = self._ask({"wait": process, "patience": PATIENCE_S})
        return None if code is None else int(code)


@functools.cache
def _jobs() -> Jobs:
    return Jobs()


def main() -> None:
    """Answers requests, one a line, until there are no more; a job leaves the loop, and ends as a program does."""
    for name in ("pallas_models.minilm", "pallas_models.corpus.job", "pallas_models.corpus.embedder", "weights"):
        importlib.import_module(name)
    from pallas_models.__main__ import main as program
    from pallas_models._processes import run_program

    answers = os.fdopen(os.dup(1), "w")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            answer = _waited(request["wait"], request["patience"])
        elif answer := os.fork():
            pass
        else:
            nothing, said = (
                os.open(os.devnull, os.O_RDONLY),
                os.open(request["said"], os.O_WRONLY | os.O_CREAT, 0o600),
            )
            for source, target in ((nothing, 0), (said, 1), (said, 2)):
                os.dup2(source, target)

            def job(given: list[str] = request["start"]) -> int:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return program(given)

            run_program(job)
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:  # whoever asked has gone, as time was up
            os._exit(0)


def _waited(process: int, patience: float) -> int | None:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


@functools.cache
def _alone(variant: str) -> dict[str, bytes]:
    """The files that a job leaves which runs alone."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        said = Path(name, "said")
        code = _jobs().ended(_jobs().start(arguments(variant, Path(name, "out")), said))
        if code:
            raise AssertionError(f"a job alone ends with {code}: {said.read_text():.300}")
        return _held(Path(name, "out"))


def _different(found: dict[str, bytes], expected: dict[str, bytes]) -> str | None:
    """What is wrong with the files of a folder; hidden files are locks, if no drafts."""
    found = {name: content for name, content in found.items() if not name.startswith(".") or "draft" in name}
    if found.keys() != expected.keys():
        return f"files are {sorted(found)[:30]}, expected {sorted(expected)[:30]}"
    other = [name for name, content in found.items() if content != expected[name]]
    return f"{other} are others than a job alone gives" if other else None


def _two(variants: tuple[str, str], apart: float, there: bool) -> str | None:
    """Starts two jobs into one folder; says what is wrong with the files that they left."""
    for variant in variants:
        _alone(variant)
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        output, said = Path(name, "out"), [Path(name, f"said-{i}") for i in range(2)]
        if there:
            output.mkdir()
        first = _jobs().start(arguments(variants[0], output), said[0])
        time.sleep(apart)
        second = _jobs().start(arguments(variants[1], output), said[1])
        codes = [_jobs().ended(process) for process in (first, second)]
        texts = [path.read_text() for path in said]
        for code, text in zip(codes, texts, strict=True):
            if code not in (0, 1) or any(word in text for word in UNWANTED):
                return f"a job ends with {code}: {text:.400}"
            if code == 1 and (text.count("\n") != 1 or str(output) not in text):
                return f"a job is refused, and no line names the folder: {text:.300}"
        done = [variant for variant, code in zip(variants, codes, strict=True) if code == 0]
        if not done:
            return f"neither job is done: {texts!s:.300}"
        wrong = next(filter(None, (_different(_held(output), _alone(variant)) for variant in done)), None)
        return wrong and f"{' and '.join(done)} done: {wrong}"


def _ended(variant: str, number: int, delay: float, again: float | None, cached: bool) -> str | None:
    """Ends a job by a signal, or by two; says what is wrong with its end or with what the next one makes of it."""
    _alone(variant)
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        output, said = Path(name, "out"), Path(name, "said")
        process = _jobs().start(arguments(variant, output, cached=cached), said)
        for wait in (delay, again):
            if wait is not None:
                time.sleep(wait)
                os.kill(process, number)  # it is not waited for yet, so that the id is still its own
        code, text = _jobs().ended(process), said.read_text()
        if code is None:
            return f"it does not end within {PATIENCE_S:.0f} s: {text:.300}"
        if found := [word for word in UNWANTED if word in text]:
            return f"it says {found}: {text[-400:]}"
        if code not in (0, 128 + number, -number):
            return f"it ends with {code}: {text:.300}"
        code = _jobs().ended(_jobs().start(arguments(variant, output), said))
        if code:
            return f"the next one ends with {code}: {said.read_text():.300}"
        return _different(_held(output), _alone(variant))


def draw(rng: Rng) -> Case:
    """Two jobs at once, or one that is ended."""
    if rng.random() < 0.5:
        variants, apart = ("one", pick(rng, VARIANTS)), float(rng.uniform(0, APART_S))
        if rng.random() < 0.5:
            variants = variants[::-1]
        there = bool(rng.random() < 0.5)
        name = f"{' and '.join(variants)}, {1000 * apart:.0f} ms apart"
        name += ", into a folder that is there" if there else ""
        return Case(name=name, run=functools.partial(_two, variants, apart, there))
    number, delay = pick(rng, SIGNALS), float(rng.uniform(0, LONGEST_S))
    again = float(rng.uniform(0, 0.2)) if rng.random() < 0.3 else None
    variant, cached = pick(rng, VARIANTS), bool(rng.random() < 0.5)
    name = f"{number.name} to {variant} after {delay:.3f} s"
    name += "" if again is None else f", and {again:.3f} s later"
    name += "" if cached else ", which compiles"
    return Case(name=name, run=functools.partial(_ended, variant, int(number), delay, again, cached))


def cases(seed: int) -> Iterator[Case]:
    """Jobs; see the module."""
    for index in itertools.count():
        yield draw(np.random.default_rng([seed, index]))


if __name__ == "__main__":
    main()
