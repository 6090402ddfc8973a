"""Checks of the sentences that encoders are given, and the bar that shows how far they are."""

import collections.abc
import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from pallas_models.sentence import pipeline

T = TypeVar("T")
# With `show_progress_bar=None`, shorter lists show no bar.
TEXTS_WORTH_A_BAR = 2 * pipeline.CHUNK


def either(name: str, given: T | None, inputs: T | None, of: str = "str") -> T:
    """The argument `given` of this name, or `inputs`, as sentence-transformers calls it since version 6."""
    if given is not None and inputs is not None:
        raise TypeError(f"{name} and inputs are both given; expected one of them")
    found = given if inputs is None else inputs
    if found is None:
        raise TypeError(f"{name} is of type NoneType; expected an iterable of {of}")
    return found


def checked(sentences: Iterable[str], name: str = "sentences") -> Iterator[list[str]]:
    """Yields the sentences in chunks of `pipeline.CHUNK`; TypeError and ValueError where one is no text."""
    if hasattr(sentences, "to_pylist") and not hasattr(sentences, "columns"):  # an array of pyarrow
        sentences = sentences.to_pylist()
    refused = isinstance(sentences, str | bytes | collections.abc.Mapping) or hasattr(sentences, "columns")
    if refused or not isinstance(sentences, collections.abc.Iterable) or getattr(sentences, "ndim", 1) == 0:
        raise TypeError(f"{name} is of type {type(sentences).__name__}; expected an iterable of str")
    return checked_chunks(pipeline.chunks(sentences, pipeline.CHUNK), name)


def checked_chunks(chunks: Iterable[list[str]], name: str = "sentences") -> Iterator[list[str]]:
    """Yields the chunks; TypeError and ValueError where a sentence is no text."""
    first = 0
    for chunk in chunks:
        try:
            "".join(chunk).encode()
        except (TypeError, UnicodeEncodeError):  # now it matters which sentence it is
            for index, sentence in enumerate(chunk, first):
                check_sentence(sentence, f"{name}[{index}]")
            raise
        first += len(chunk)
        yield chunk


def check_sentence(sentence: str, name: str) -> str:
    """Returns the sentence; TypeError where it is no str, ValueError where it is no valid Unicode."""
    if not isinstance(sentence, str):
        raise TypeError(f"{name} is of type {type(sentence).__name__}; expected str")
    if not sentence.isascii():
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            found = ascii(sentence[error.start])
            raise ValueError(
                f"{name} holds {found} at {error.start}, half of a surrogate pair; expected valid Unicode"
            ) from error
    return sentence


def check_count(name: str, value: int) -> int:
    """Returns the value; TypeError where it is no integer, ValueError where it is below 1."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; expected an integer") from error
    if count < 1:
        raise ValueError(f"{name}={value}; expected at least 1")
    return count


def find_prompt(prompts: Mapping[str, str], name: str | None, prompt: str | None) -> str:
    """The prompt, or else the prompt of this name, or an empty text; ValueError where there is no such name."""
    if prompt is not None:
        return check_sentence(prompt, "prompt")
    if name is not None and name not in prompts:
        raise ValueError(f"there is no prompt {name!r}; expected one of {tuple(prompts)}")
    return "" if name is None else prompts[name]


def shows(asked: bool | None, long: bool) -> bool:
    """Whether to show a bar: as asked, or for long work on a terminal."""
    return long and sys.stderr.isatty() if asked is None else asked


@contextlib.contextmanager
def progress(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the context lasts, if it is to be shown; gives a function that advances it by a count."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
