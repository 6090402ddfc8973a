"""Fewer of the combinations of a test's parameters: each compiles a program, or takes a second to interpret.

A test that is marked `covering(1)` has every value of each parameter on a CPU, and on a GPU every two values of
two parameters together, as one that is marked `covering(2)` has everywhere; in as few combinations as are found.
"""

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence

import pytest

Values = Mapping[int, str]  # by the number of the parameter


def covering(grid: Sequence[Values], strength: int) -> list[int]:
    """The indices of combinations that together have all that the grid has of any `strength` parameters' values.

    Each next one has the most that none before it has; of single values also those that came least.
    """
    parts = [set(itertools.combinations(sorted(values.items()), min(strength, len(values)))) for values in grid]
    missing, chosen = set[tuple[tuple[int, str], ...]]().union(*parts), list[int]()
    came: collections.Counter[tuple[int, str]] = collections.Counter()

    def gain(i: int) -> tuple[int, int, int]:
        again = sum(came[value] for value in grid[i].items()) if strength == 1 else 0
        return len(parts[i] & missing), -again, -i

    while missing:
        best = max(range(len(grid)), key=gain)
        missing -= parts[best]
        came.update(grid[best].items())
        chosen.append(best)
    return sorted(chosen)


def thinned(items: Sequence[pytest.Item], at_least: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that are needed, and those that are not by their mark, which counts as `at_least` as strong."""
    marked = collections.defaultdict[Hashable, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            marked[item.function].append(item)
    left_out = set[str]()
    for tests in marked.values():
        mark = tests[0].get_closest_marker("covering")
        assert mark is not None
        strength = max(mark.args[0], at_least)
        # Its parts, of one `parametrize` each: what these give together stays together.
        kept = covering([dict(enumerate(test.callspec._idlist)) for test in tests], strength)
        left_out |= {test.nodeid for i, test in enumerate(tests) if i not in kept}
    parts: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        parts[item.nodeid in left_out].append(item)
    return parts
