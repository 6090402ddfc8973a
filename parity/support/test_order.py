"""The order of the suite's tests."""

import pytest

from parity import ROOT
from parity.support import order


@pytest.mark.parametrize("workers", [1, 3, 16])
@pytest.mark.parametrize("count", [0, 5, 1000])
def test_each_worker_begins_with_its_part_of_the_slow_tests(count, workers):
    items = list(range(count))
    ordered = order.slow_first(items, lambda x: x % 10 == 0, lambda x: False, workers)
    assert sorted(ordered) == items
    size = count / workers
    for i in range(workers):
        part = ordered[round(i * size) : round((i + 1) * size)]
        assert all(x % 10 == 0 for x in part[: int(size / 10)])
    if workers == 1:
        assert ordered == sorted(items, key=lambda x: (x % 10 != 0, x))


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_the_slowest_are_dealt_out_one_by_one(workers):
    items = list(range(1000))
    ordered = order.slow_first(items, lambda x: x < 200, lambda x: x < 50, workers)
    assert sorted(ordered) == items
    for i in range(workers):
        part = ordered[1000 * i // workers : 1000 * (i + 1) // workers]
        slowest = [x for x in part if x < 50]
        assert abs(len(slowest) - 50 / workers) <= 1
        assert workers == 1 or max(slowest) - min(slowest) > 50 / workers  # from all over the file
        assert set(slowest) == set(part[: len(slowest)])
        assert all(x < 200 for x in part[: 200 // workers])


def test_slow_files_exist():
    files = (*order.SLOW_ON_CPU, *order.SLOW_ON_GPU, *order.SLOWEST_ON_GPU)
    assert all((ROOT / file).is_file() for file in files)


def test_no_test_takes_the_name_of_a_plugin_s_fixture(request):
    """pytest-benchmark, where it is installed, ends a worker whose test has an argument `benchmark` of its own."""
    assert not [item.nodeid for item in request.session.items if "benchmark" in getattr(item, "fixturenames", ())]
