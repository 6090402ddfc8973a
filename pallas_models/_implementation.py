"""The names that `implementation` takes, known without JAX."""

from collections.abc import Sequence
from typing import Literal

Name = Literal["mosaic", "triton", "xla", "interpret", "mosaic_interpret"]
Implementation = Name | Sequence[Name]
"""What `implementation` takes, beside None: a name, or several of which the first that serves the call runs."""
IMPLEMENTATIONS: tuple[Name, ...] = ("mosaic", "triton", "xla", "interpret", "mosaic_interpret")
"""The names of all implementations."""


def check_implementation(implementation: Implementation | None) -> tuple[Name, ...]:
    """The names that are given, in order of preference; none for None.

    Raises:
      ValueError: a name is unknown, or a sequence is empty.
    """
    if implementation is None:
        return ()
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not names or not set(names) <= set(IMPLEMENTATIONS):
        raise ValueError(f"{implementation=} is unknown; expected None or one of {IMPLEMENTATIONS}, or several")
    return names
