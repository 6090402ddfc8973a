"""The machine that this process runs on, and how programs end on it."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable


def cores() -> int:
    """The number of cores that this process may use: its affinity counts, not the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Exit statuses as a shell reports them.
_INTERRUPTED = 130  # of a program that Ctrl-C ended
_UNREAD = 141  # of a program that ended because nobody reads its output


def _interrupt_again(passed_over: "sys.UnraisableHookArgs") -> None:
    """Repeats an interrupt that met code whose exceptions Python passes over, such as a garbage collector's."""
    if passed_over.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(passed_over)


def run_program(main: Callable[[], int]) -> None:
    """Ends this process with the status that `main` returns, or quietly where nobody reads on, as before `| head`.

    An interrupted process ends at once. Python would wait for its threads, some of which compile; and where a
    second signal ends that wait, C++ under the threads ends the process with "FATAL: exception not rethrown".
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
