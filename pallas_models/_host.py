"""The machine that this process runs on."""

import os


def cores() -> int:
    """How many cores this process may use: those that it is held to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
