"""The machine that this process runs on, and how programs end on it."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable


def cores() -> int:
    """How many cores this process may use: those that it is held to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_INTERRUPTED = 130  # what a shell has of a program that Ctrl-C ends
_UNREAD = 141  # and of one that ends as nobody reads on


def _interrupt_again(passed_over: "sys.UnraisableHookArgs") -> None:
    """Repeats an interrupt that met code whose exceptions Python passes over, such as a garbage collector's."""
    if passed_over.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(passed_over)


def run_program(main: Callable[[], int]) -> None:
    """Ends this process with what `main` returns, or quietly where nobody reads on, as behind `| head`.

    An interrupted one ends at once. Python would wait for its threads, those that compile among them; and where a
    second signal ends that wait, C++ under them ends the process with "FATAL: exception not rethrown".
    """
    sys.unraisablehook = _interrupt_again
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = _INTERRUPTED
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # another pipe broke, as to a process that has died
            raise
        code = _UNREAD
    if code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
