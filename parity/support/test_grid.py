"""Fewer combinations of parameters: all that have to meet still do."""

import itertools

import pytest

from parity.support.common import ON_GPU
from parity.support.grid import covering

GRID = [dict(enumerate(values)) for values in itertools.product("abc", "xyz", "01", "pqr")]


@pytest.mark.parametrize("strength, most", [(1, 3), (2, 9), (4, 54), (9, 54)])
def test_all_that_have_to_meet_do(strength, most):
    def meetings(grid):
        return {pair for values in grid for pair in itertools.combinations(values.items(), min(strength, 4))}

    chosen = covering(GRID, strength)
    assert meetings([GRID[i] for i in chosen]) == meetings(GRID)
    assert chosen == sorted(set(chosen)) and len(chosen) <= most


def test_values_of_a_short_parameter_take_turns():
    grid = [{0: str(i), 1: value} for i in range(9) for value in "abc"]
    assert sorted(grid[i][1] for i in covering(grid, 1)) == sorted("abc" * 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("y", [1, 2, 3])
@pytest.mark.parametrize("x, z", [("a", "b"), ("a", "c"), ("b", "c"), ("b", "b")])
def test_a_marked_test_runs_with_some(request, x, y, z):
    """What one `parametrize` gives together is one value."""
    names = [item.name for item in request.session.items if item.originalname == request.node.originalname]
    assert f"test_a_marked_test_runs_with_some[{x}-{z}-{y}]" in names
    is_whole = ON_GPU or request.config.getoption("--whole-grids")
    assert is_whole or len({name.rsplit("-", 1)[0] for name in names}) == len(names)
