"""The machine that this process runs on, and how programs end on it."""

import os
import select
import sys
from collections.abc import Callable


def cores() -> int:
    """How many cores this process may use: those that it is held to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_program(main: Callable[[], int]) -> None:
    """Ends this process with what `main` returns, or quietly where nobody reads on, as behind `| head`."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # another pipe broke, as to a process that has died
            raise
        code = 141  # what a shell has of a program that ends as nobody reads on
    sys.exit(code)
