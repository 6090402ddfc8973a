"""What encoders check of the sentences they are given, and the bar that shows how far they are."""

import collections.abc
import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator


def checked(sentences: Iterable[str], name: str = "sentences") -> Iterator[str]:
    """The sentences; TypeError and ValueError where one is no text."""
    if isinstance(sentences, str | collections.abc.Mapping) or hasattr(sentences, "columns"):
        raise TypeError(f"{name} is a {type(sentences).__name__}; expected an iterable of str")
    return map(functools.partial(_check_one_of, name), sentences, itertools.count())


def _check_one_of(name: str, sentence: str, index: int) -> str:
    if isinstance(sentence, str) and sentence.isascii():
        return sentence
    return check_sentence(sentence, f"{name}[{index}]")  # which is made where it may be needed


def check_sentence(sentence: str, name: str) -> str:
    """The sentence; TypeError where it is no str, ValueError where it is no valid Unicode."""
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


def shows(asked: bool | None, long: bool) -> bool:
    """Whether to show a bar: as asked, or for long work on a terminal."""
    return long and sys.stderr.isatty() if asked is None else asked


@contextlib.contextmanager
def progress(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar, if one is to be shown, for as long as the context lasts; what it gives advances it."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
