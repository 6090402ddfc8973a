"""The machine that this process runs on, and how programs end on it."""

import os
import sys
from collections.abc import Callable

UNREAD = 141  # what a shell calls a program that was ended as nobody read on


def cores() -> int:
    """How many cores this process may use: those that it is held to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_program(main: Callable[[], int]) -> None:
    """Ends this process with what `main` returns, or quietly where nobody reads on, as behind `| head`."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python still writes what is left
        code = UNREAD
    sys.exit(code)
