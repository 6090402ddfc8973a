"""Everything that the suite knows of each op: the lists that tests, campaign and sanitizers draw from.

`parity/cases/<stem>.py` has `CASES`, a record for each function of `pallas_models/ops/<stem>.py` that has kernels.
A new file here is found by itself.
"""

import importlib
import pkgutil
from typing import Any, TypeVar

from pallas_models import ops
from pallas_models.dispatch.records import Op
from parity.cases._records import Call, Case, Empty, Spread, Without
from parity.support.common import by_device

__all__ = [
    "BY_BACKEND",
    "CALLS",
    "FILES",
    "HOPPER_CALLS",
    "OPS",
    "TRANSFORMED",
    "Call",
    "Case",
    "Empty",
    "Spread",
    "Without",
    "records",
]

T = TypeVar("T")

# The cases of every file, by its stem.
FILES: dict[str, tuple[Case, ...]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").CASES
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
# The case of every op, by its name.
OPS: dict[str, Case] = {case.name: case for cases in FILES.values() for case in cases}


def _all(of_ops: list[tuple[T, ...] | Without]) -> list[T]:
    return [item for items in of_ops if not isinstance(items, Without) for item in items]


CALLS: list[Call] = _all([case.calls for case in OPS.values()])
HOPPER_CALLS: list[Call] = _all([case.hopper_calls for case in OPS.values()])
# What is transformed and made under JAX's settings. Neither looks into a kernel: where it is interpreted, the
# first call of an op is enough.
TRANSFORMED = by_device(cpu=list({call.op: call for call in reversed(CALLS)}.values()), gpu=CALLS)


def records() -> dict[str, dict[str, Op[Any]]]:
    """Every record of `pallas_models.ops`, by the stem of its module and by its name."""
    found: dict[str, dict[str, Op[Any]]] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        values = vars(importlib.import_module(f"{ops.__name__}.{module.name}")).values()
        found[module.name] = {value.name: value for value in values if isinstance(value, Op)}
    return {stem: of_module for stem, of_module in found.items() if of_module}


# Calls that run every kernel of a backend.
BY_BACKEND = {"triton": CALLS, "mosaic": HOPPER_CALLS}
