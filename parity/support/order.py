"""The order of the suite's tests: the slow ones begin, so that no worker is left with them at the end.

pytest-xdist deals the tests out in as many runs as there are workers. One that has done its own takes over half of
the longest queue, from its end. So the first tests of a worker stay with it, and in the end each keeps two that no
other can take: these should be short.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# A process of its own computes for two minutes what its tests look at.
SLOW_ON_CPU = ("parity/dispatch/test_meshes.py",)
# Many of their tests take half a minute: one worker that has all of a file is the last to end.
SLOWEST_ON_GPU = ("parity/models/test_pairformer.py",)
# Their tests take a second or more each where 16 workers share a GPU's machine: they compile whole models.
SLOW_ON_GPU = (
    "parity/models/test_cuequivariance.py",
    "parity/models/test_encoders.py",
    "parity/models/test_gpt2.py",
    "parity/models/test_losses.py",
    "parity/models/test_minilm.py",
    "parity/models/test_qwen3.py",
    "parity/ops/test_triangle_attention.py",
    "parity/ops/test_trimul_backward.py",
    "parity/ops/test_trimul_mosaic.py",
    "parity/sentence/test_cross_encoder.py",
    "parity/sentence/test_sentence_transformers.py",
    "parity/support/test_examples.py",
    "parity/support/test_sanitize.py",
)


def slow_first(
    items: Sequence[T], is_slow: Callable[[T], bool], is_slowest: Callable[[T], bool], workers: int
) -> list[T]:
    """The items with an equal part of the slow ones at the begin of each worker's; else in their order.

    The slowest come before them, not in their order: tests of the same file go to different workers.
    """
    slowest = [x for x in items if is_slowest(x)]
    dealt = [x for i in range(workers) for x in slowest[i::workers]]
    slow = [x for x in items if is_slow(x) and not is_slowest(x)]
    others = iter([x for x in items if not is_slow(x) and not is_slowest(x)])
    parts = []
    for i in range(workers):
        first = [*_part(dealt, i, workers), *_part(slow, i, workers)]
        parts += first + list(itertools.islice(others, len(_part(items, i, workers)) - len(first)))
    return parts


def _part(items: Sequence[T], index: int, count: int) -> Sequence[T]:
    return items[len(items) * index // count : len(items) * (index + 1) // count]
