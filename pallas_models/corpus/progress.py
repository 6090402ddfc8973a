"""Shows how far a corpus is embedded."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from pallas_models.corpus.reading import Corpus
from pallas_models.sentence.inputs import shows


@contextlib.contextmanager
def shown(corpus: Corpus, show: bool | None) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Shows a line on stderr while the context lasts: sentences, sentences a second, time left.

    The time left follows from the bytes that are read and that are left; standard input has none.

    Args:
      corpus: the corpus that is read.
      show: None shows the line on a terminal.

    Returns:
      A function that counts the rows that it is given, and returns them.
    """
    if not shows(show, True):
        yield lambda rows: rows
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.fields[sentences]:,} sentences, {task.fields[speed]:,.0f}/s")
    with Progress(
        text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as progress:
        task = progress.add_task("", total=corpus.size, sentences=0, speed=0.0)

        def advance(rows: np.ndarray) -> np.ndarray:
            state = progress.tasks[0]
            sentences = state.fields["sentences"] + len(rows)
            speed = sentences / max(state.elapsed or 0, 1e-3)
            progress.update(task, completed=corpus.done, sentences=sentences, speed=speed)
            return rows

        yield advance
