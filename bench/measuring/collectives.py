"""What a compiled program sends from device to device."""

import collections
import re

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def count(text: str) -> dict[str, int]:
    """How many arrays each kind of collective takes in the text of a compiled program."""
    found: collections.Counter[str] = collections.Counter()
    for kind, operands in re.findall(rf"\b({_KINDS})(?:-start)?\(([^)]*)\)", text):
        found[kind] += operands.count("%")
    return dict(found)
