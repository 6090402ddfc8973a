"""The order of the suite's tests."""

import pytest

from parity import ROOT
from parity.support import order


@pytest.mark.parametrize("workers", [1, 3, 16])
@pytest.mark.parametrize("count", [0, 5, 1000])
def test_each_worker_begins_with_its_part_of_the_slow_tests(count, workers):
    items = list(range(count))
    ordered = order.slow_first(items, lambda x: x % 10 == 0, workers)
    assert sorted(ordered) == items
    size = count / workers
    for i in range(workers):
        part = ordered[round(i * size) : round((i + 1) * size)]
        first = part[: max(0, int(size / 10) - 1)]  # parts differ by a test
        assert sum(x % 10 == 0 for x in first) >= len(first) - 1
    if workers == 1:
        assert ordered == sorted(items, key=lambda x: (x % 10 != 0, x))


def test_slow_files_exist():
    assert all((ROOT / file).is_file() for file in (*order.SLOW_ON_CPU, *order.SLOW_ON_GPU))
