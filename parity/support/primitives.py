"""Which primitives of kernels a test calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from pallas_models.kernels.common.primitives import PRIMITIVES


@contextlib.contextmanager
def all_called(*modules: str) -> Iterator[None]:
    """Asserts that kernels which are traced inside call every primitive of these modules of `kernels`."""
    called = set()

    def spied(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            called.add(name)
            return function(*args, **options)

        return call

    found = {name: pair for name, pair in PRIMITIVES.items() if name.startswith(tuple(f"{m}." for m in modules))}
    pairs = {name: tuple(spied(name, function) for function in pair) for name, pair in found.items()}
    with mock.patch.dict(PRIMITIVES, pairs):
        yield
    assert called and called == found.keys(), f"{sorted(found.keys() - called)} were not called"
