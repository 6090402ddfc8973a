"""Texts to token ids: in this process, or, where there are many, in processes of their own.

The library that tokenizes uses all cores, but it returns Python objects: to take the ids out of them and to free
them takes longer, with the interpreter's lock held, than all other work of this process for a text.
"""

import itertools
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pallas_models._processes import cores

if TYPE_CHECKING:
    import tokenizers

# With fewer cores, threads keep them busy.
_WORTH_PROCESSES = 4
# Beside a device: there may be others on the machine, with processes of their own.
_MOST_PROCESSES = 32
# Lists of texts that a process is given: it works on one while the next waits, so that it never does.
_ASKED = 2


class Tokens(NamedTuple):
    """The token ids of texts, (total,) int32, one text after another, and how many each has, (texts,) int64."""

    ids: np.ndarray
    lengths: np.ndarray


Tokenize = Callable[[list[Any]], Sequence[Sequence[int]]]


def tokens(tokenize: Tokenize, texts: list[Any]) -> Tokens:
    """The tokens of texts, in this process."""
    ids = tokenize(texts)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return Tokens(np.fromiter(itertools.chain.from_iterable(ids), np.int32, lengths.sum()), lengths)


def count(platform: str, devices: int = 1) -> int:
    """The number of processes beside devices: one for each core, less the core of this process, or none."""
    # A CPU that computes has no cores to spare.
    if platform == "cpu" or cores() < _WORTH_PROCESSES or not sys.executable:
        return 0
    return min(cores() - 1, _MOST_PROCESSES * devices)


class Processes:
    """Processes that tokenize; they end when this object does."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", count: int):
        """Makes room for `count` processes; the first call starts them, or `start` before it."""
        self._tokenizer: tokenizers.Tokenizer | str = tokenizer
        self._changing = threading.Lock()
        self._missing = count
        # Processes that are up, each as often as it may be asked, and errors in place of those that failed to
        # start.
        self._free: queue.SimpleQueue[_Process | Exception] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts all missing processes at once, and returns before they are up."""
        with self._changing:
            missing, self._missing = self._missing, 0
            if missing and not isinstance(self._tokenizer, str):
                self._tokenizer = self._tokenizer.to_str()
        for _ in range(missing):  # a thread each, which waits until it is up
            threading.Thread(target=_start, args=(self._tokenizer, self._free), daemon=True).start()

    def __call__(self, texts: list[str], limit: int) -> Tokens:
        """Tokenizes texts, up to `limit` tokens of each, in the first process that is free.

        Raises:
          ChildProcessError: the process ended. Another takes its place.
        """
        plain = list(map(str.__str__, texts))  # of a subclass of str, the text alone
        self.start()
        process = self._next()
        try:
            answer = process.ask((plain, limit))
        except BaseException:
            self._replace(process)
            raise
        self._free.put(process)
        if isinstance(answer, Exception):
            raise answer
        ids, lengths = (np.frombuffer(numbers, np.int32) for numbers in answer)
        return Tokens(ids, lengths.astype(np.int64))

    def _next(self) -> "_Process":
        while True:
            process = self._free.get()
            if isinstance(process, Exception):
                self._replace()
                raise process
            if not process.is_lost:
                return process

    def _replace(self, process: "_Process | None" = None) -> None:
        """Starts another process in place of one that is lost, at once, as other threads may wait for one."""
        with self._changing:
            if process is None or not process.is_lost:
                self._missing += 1
            if process is not None:
                process.is_lost = True
        self.start()


def _start(tokenizer: str, free: "queue.SimpleQueue[_Process | Exception]") -> None:
    try:
        process = _Process(tokenizer)
    except Exception as error:  # raised in the thread that waits for the process
        free.put(error)
        return
    for _ in range(_ASKED):
        free.put(process)


class _Process:
    """One process; it has the next list of texts already when it is done with one."""

    def __init__(self, tokenizer: str):
        """Returns when it is up."""
        self.is_lost = False
        self._asking, self._answered = threading.Lock(), threading.Lock()
        # It runs one file of this package, for which the others beside it must be no top-level modules (-P).
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("tokenizer_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,  # an interrupt from the keyboard is for this process alone
        )
        weakref.finalize(self, _end, self._process)
        self.ask(tokenizer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: object) -> Any:
        """Returns the answer of the process, after the answers to all requests before."""
        with self._asking:
            self._send(request)
            self._answered.acquire()  # in the order of the requests
        try:
            return pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._ended() from error
        finally:
            self._answered.release()

    def _send(self, request: object) -> None:
        try:
            pickle.dump(request, self._process.stdin)  # type: ignore[arg-type]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> ChildProcessError:
        return ChildProcessError(f"a process that tokenizes ended with exit code {self._process.wait()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
