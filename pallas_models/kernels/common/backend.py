"""Backends of Pallas, imported when a kernel first wants them."""

import importlib
from typing import Any

Ref = Any  # inside a kernel: a reference to an array in device or shared memory, for which JAX has no public type


class Backend:
    """A module of Pallas, imported when a kernel first wants something of it.

    A backend takes as long to import as the rest of this library, a process needs one of them at most, and JAX
    may cease to have it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
